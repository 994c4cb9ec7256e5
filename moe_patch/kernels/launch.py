"""Starts a kernel without Triton's argument binder, which costs more than a decode step's kernels.

The first launch of a kind goes through Triton, which compiles; the next ones find the binary by
the constants and the arguments' dtypes. That is all that its code depends on here: strides are
constants, counts are not specialised, and unaligned pointers always take Triton's own way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

DIRECT: bool = (
    triton.__version__.split(".")[:2] == ["3", "6"]  # whose calling convention this file knows
    and not triton.knobs.runtime.interpret
    and torch.cuda.is_available()
)

_binaries: dict[tuple, tuple] = {}


class Launch(dict):
    """A kernel and its constants, put together once where every microsecond counts."""

    def __init__(self, kernel: Any, **constants: Any) -> None:
        super().__init__(constants)
        self.kernel = kernel
        self.binaries: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """As `launch`."""
        _start(self.kernel, grid, args, self, [], self.binaries)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the current device and stream.

    `args` are tensors, descriptors and non-negative counts marked do_not_specialize; `constants`
    are the constexpr parameters, num_warps and num_stages.
    """
    _start(kernel, grid, args, constants, [kernel.fn, *constants.values()], _binaries)


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple,
    constants: dict[str, Any],
    kind: list,
    binaries: dict[tuple, tuple],
) -> None:
    """`kind`, with the device and the dtypes, is what `binaries` knows it by."""
    hooks = triton.knobs.runtime
    if not DIRECT or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler
        kernel[grid](*args, **constants)
        return
    device = torch.cuda.current_device()
    kind.append(device)
    bits, values = 0, []
    for arg in args:
        if isinstance(arg, Tensor):
            kind.append(arg.dtype)
            arg = arg.data_ptr()
            bits |= arg
        elif isinstance(arg, int):
            bits |= arg >> 31  # i64
        values.append(arg)
    key = tuple(kind)
    binary = binaries.get(key)
    if binary is None or bits & 15:
        compiled = kernel[grid](*args, **constants)
        if not bits & 15:
            unread = (None,) * (len(kernel.params) - len(args))  # the launcher skips constexprs
            binaries[key] = compiled.run, compiled.function, compiled.packed_metadata, unread
        return
    run, function, metadata, unread = binary
    stream = torch._C._cuda_getCurrentRawStream(device)
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, stream, function, metadata, None, None, None, *values, *unread)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own costs microseconds.)"""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class _Memory:
    """What a descriptor needs of a tensor; keeps nothing alive, so that it can be kept."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(4096)
def _descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    return TensorDescriptor(_Memory(pointer, dtype), list(shape), list(strides), list(block))


def descriptor(
    tensor: Tensor,
    block: tuple[int, ...],
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> TensorDescriptor:
    """TMA descriptor of boxes `block` in the tensor, or in a view of it."""
    return _descriptor(
        tensor.data_ptr(), tensor.dtype, shape or tuple(tensor.shape), strides or tensor.stride(),
        block,
    )  # fmt: skip
