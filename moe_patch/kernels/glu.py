"""silu(gate) * up of two tensors, and its gradients, for MLPs that are no experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chips
from .activate import gate_of, glu
from .launch import Launch, cdiv, launches

BLOCK = 2048
VECTOR = 8
"""Elements that a thread reads at once. A mask that is the same for so many keeps it so."""


@triton.jit
def _place(vectors, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """(elements of a program, which of them there are)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at // VECTOR < vectors


@triton.jit(do_not_specialize=["vectors"])
def glu_kernel(
    gate, up, out, vectors, GATE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    at, mask = _place(vectors, BLOCK, VECTOR)
    gates = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    value, _, _ = glu(gates, ups, GATE)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["vectors"])
def glu_backward_kernel(
    d_out, gate, up, d_gate, d_up, vectors,
    GATE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    at, mask = _place(vectors, BLOCK, VECTOR)
    d = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    _, by_gate, by_up = glu(gates, ups, GATE)
    tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=mask)
    tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=mask)


_forward, _backward = launches(glu_kernel), launches(glu_backward_kernel)


def _start(prepare: Callable[..., Launch], *tensors: Tensor) -> None:
    """Starts a kernel on tensors of one size, if they have elements."""
    size, silu = tensors[0].numel(), gate_of("silu", chips.chip(tensors[0].device).ptx)
    if size:
        start = prepare(GATE=silu, BLOCK=BLOCK, VECTOR=VECTOR, num_warps=4)
        start((cdiv(size, BLOCK),), *tensors, size // VECTOR)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32. Both are contiguous, of one shape and dtype, and of a
    multiple of VECTOR elements."""
    out = torch.empty_like(gate)
    _start(_forward, gate, up, out)
    return out


def backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) of d_out, which is contiguous, too."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _start(_backward, d_out, gate, up, d_gate, d_up)
    return d_gate, d_up
