"""Prints what Triton's interpreter computes, with moe_patch's shortcuts or without.

    TRITON_INTERPRET=1 python tests/tools/interpreted.py quickened step
    TRITON_INTERPRET=1 python tests/tools/interpreted.py slow operations
    TRITON_INTERPRET=1 python tests/tools/interpreted.py forgetful operations

A shortcut changes nothing where all ways print the same. The forgetful one is quickened, and its
operators remember three kinds of operands each.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

from moe_patch import compat

if sys.argv[1] == "slow":  # before kernels are imported, which take the shortcuts
    compat.INTERPRETER["no such name"] = compat.Name("triton:no_such_name", "", "", "")

from moe_patch import fused_experts
from moe_patch.kernels import interpreter, operators

POINTER = tl.pointer_type(tl.float32)
TYPES = (tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, POINTER)
SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4), (4, 2, 4))
NUMBERS = (0, 1, 3, -2, 2.5, -0.0, True, tl.constexpr(3), 2**31, None)
INDICES = ((None,), (slice(None),), (slice(None), None), (None, slice(None)), None, 0)


def step() -> None:
    """Results and gradients of a small block; then what the interpreter's `tensor` is."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows, gate_up, down = torch.randn(9, 24), torch.randn(4, 40, 24), torch.randn(4, 24, 20)
        inputs = [each.to(dtype).requires_grad_() for each in (rows, gate_up, down)]
        index, weights = torch.randint(0, 5, (9, 2)), torch.rand(9, 2).requires_grad_()
        out = fused_experts(*inputs, index, weights)
        one = fused_experts(inputs[0][:1].detach(), *inputs[1:], index[:1], weights[:1].detach())
        gradients = torch.autograd.grad(out.float().square().sum(), [*inputs, weights])
        for each in (out, one, *gradients):
            print(hashlib.sha256(each.detach().float().numpy().tobytes()).hexdigest())
    name = compat.INTERPRETER["tensor"].find().__name__
    print(interpreter.quicken.cache_info().currsize, name)


def operations() -> None:
    """Operators of drawn operands, casts, and new axes, each three times; first of equal numbers,
    which do not tell which operand comes first."""
    warnings.simplefilter("ignore")
    if sys.argv[1] == "forgetful":
        operators.MOST = 3
    interpreter.quicken()
    language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    compat.INTERPRETER["patch"].find()(language)
    draw = random.Random(0)
    names = [f"__{r}{name}__" for name in operators.NAMES for r in ("", "r")]
    cases = [
        (name, *(draw.choice(each) for each in (TYPES, SHAPES, TYPES, SHAPES)), number)
        for name in names
        if hasattr(tl.tensor, name)
        for number in (*NUMBERS * 5, *(100 * [...]))
    ]
    for equal in (True, False, False):
        for name, first, shape, second, other_shape, number in cases:
            other = drawn(draw, second, other_shape, equal) if number is ... else number
            tell(name, getattr(tl.tensor, name), drawn(draw, first, shape, equal), other)
        for first, second, shape in itertools.product(TYPES, TYPES, SHAPES):
            for rounding in (None, "rtz"):
                tell("to", tl.tensor.to, drawn(draw, first, shape, equal), second, rounding)
        for shape, index in itertools.product(SHAPES, INDICES):
            tell("index", tl.tensor.__getitem__, drawn(draw, tl.int32, shape, equal), index)


def drawn(draw: random.Random, type: Any, shape: tuple[int, ...], equal: bool) -> tl.tensor:
    data = np.full(shape or (1,), 2.0003)
    if not equal:
        data = np.array([draw.randrange(9) + 3e-4 for _ in data.flat]).reshape(data.shape)
    handle = TensorHandle(data.astype(_get_np_dtype(type)), type)
    return tl.tensor(handle, tl.block_type(type, list(shape)) if shape else type)


def tell(name: str, compute: Callable, *operands: Any) -> None:
    try:
        found = compute(*operands)
    except Exception as error:
        print(name, type(error).__name__)
        return
    handle = found.handle
    data = np.asarray(handle.data)
    print(name, found.type, handle.dtype, data.dtype, data.shape, data.tobytes().hex())


if __name__ == "__main__":
    {"step": step, "operations": operations}[sys.argv[2]]()
