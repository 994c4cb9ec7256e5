"""Starts a kernel without Triton's argument binder, which costs more than a decode step's kernels.

The first launch of a kind goes through Triton, which compiles; the next ones find the binary by
the arguments' dtypes and call the C function behind Triton's launcher. The dtypes are all that a
binary depends on besides its constants: strides are among them, counts are not specialised, and
unaligned pointers always take Triton's own way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
    and torch.version.hip is None
)


class Launch:
    """A kernel and its constants, put together once: even that costs microseconds.

    `constants` are the constexpr parameters, num_warps and num_stages.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        self._binaries: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """kernel[grid](*args, **constants) on the current device and stream.

        `args` are tensors, descriptors, None and non-negative counts marked do_not_specialize.
        """
        hooks = triton.knobs.runtime
        if not DIRECT or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # profiler
            self.kernel[grid](*args, **self.constants)
            return
        device = torch._C._cuda_getDevice()
        kind: list[Any] = [device]
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
        binary = self._binaries.get(key)
        if binary is None or bits & 15:
            compiled = self.kernel[grid](*args, **self.constants)
            if not bits & 15:
                self._binaries[key] = _binary(self.kernel, compiled, args)
            return
        start, function, settings, boxes, unread = binary
        for at, name, meta in boxes:  # from the last to the first
            values[at : at + 1] = _encoded(values[at], name, meta)
        stream = torch._C._cuda_getCurrentRawStream(device)
        x, y, z = (*grid, 1, 1)[:3]
        start(x, y, z, stream, function, *settings, *values, *unread)


def _binary(kernel: Any, compiled: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(C function, kernel on the device, its settings, its descriptors, places of constexprs)."""
    launcher = compiled.run
    assert not launcher.global_scratch_size and not launcher.profile_scratch_size
    start, boxes = launcher.launch, []
    at = [i for i, arg in enumerate(args) if hasattr(arg, "block_shape")]  # Triton's or Gluon's
    if at:  # wrapped in Python, to encode descriptors at every launch
        start = inspect.getclosurevars(start).nonlocals["launcher"]
        for i, meta in zip(at, compiled.metadata.tensordesc_meta, strict=True):
            boxes.insert(0, (i, (meta["swizzle"], *meta["block_size"]), meta))
    settings = (
        launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,  # no scratch memory
        compiled.packed_metadata, None, None, None,  # no hooks
    )  # fmt: skip
    unread = (None,) * (len(kernel.params) - len(args))
    return start, compiled.function, settings, boxes, unread


def _encoded(box: TensorDescriptor, name: tuple[int, ...], meta: dict[str, Any]) -> list[Any]:
    """The arguments that a descriptor becomes, kept with it by what a binary wants of it."""
    known = vars(box).setdefault("encoded", {})
    if name not in known:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        known[name] = make_tensordesc_arg(box, meta)
    return known[name]


def launches(kernel: Any) -> Callable[..., Launch]:
    """(**constants) -> the kernel's Launch, kept."""
    return functools.lru_cache(1024)(functools.partial(Launch, kernel))


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


def descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    """TMA descriptor of boxes `block` in the tensor that lies there; it does not keep it alive."""
    return TensorDescriptor(_Memory(pointer, dtype), list(shape), list(strides), list(block))
