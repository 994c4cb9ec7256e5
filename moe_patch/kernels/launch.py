"""Starts a kernel without Triton's argument binder, which costs more than a decode step's kernels.

The first launch of a kind goes through Triton, which compiles (`ahead`: all that its call starts);
the next ones call the C function behind Triton's launcher: that of the last launch, if its binary
is for such arguments, too (`binder`), else that of the binary which is found by what they are.
Tensors' dtypes, descriptors' dtypes and boxes, and which arguments are None: besides its constants,
a binary depends on nothing else. Strides are among these, counts are not specialised, and unaligned
pointers always take Triton's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import compat
from ..compat import cuda_device
from .ahead import THREAD, compile_call
from .binder import Start, written_out

DIRECT: bool = compat.starts_directly()


class Launch:
    """A kernel and its constants, put together once: even that costs microseconds.

    `constants` are the constexpr parameters, num_warps and num_stages. A product and a sum become
    one rounding, which is Triton's default up to 3.9.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = {"enable_fp_fusion": True, **constants}
        self._starts: dict[tuple, Start] = {}
        self._last: Start = _never

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """kernel[grid](*args, **constants) on the current device and stream.

        `args` are tensors, descriptors of `boxes`, None and non-negative counts marked
        do_not_specialize.
        """
        if DIRECT and self._last(grid, args):
            return
        if not THREAD.ready:
            if THREAD.rehearsed is not None:
                THREAD.rehearsed.append((self, grid, args))
                return
            compat.bind_thread()
            THREAD.ready = True
        if not (DIRECT and self._found(grid, args)):
            self.kernel[grid](*args, **self.constants)

    def _found(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
        """Whether a binary was found for arguments of other kinds than the last launch's, or was
        compiled, and started."""
        global DIRECT
        if not all(map(_fits, args)):
            return False
        key = (cuda_device(), *map(_kind, args))
        if key in self._starts:
            self._last = self._starts[key]
            return self._last(grid, args)
        compile_call()
        compiled = self.kernel[grid](*args, **self.constants)
        binary = compat.binary(self.kernel, compiled, args)
        if binary is None:
            DIRECT = False
        else:
            self._starts[key] = written_out(binary, key[0], args)
        return True


def _never(grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
    """Stands for the last launch before there was one."""
    return False


def _fits(arg: Any) -> bool:
    """Whether a binary for it may load 16 bytes at once, and counts in 32 bits."""
    if isinstance(arg, Tensor):
        return arg.data_ptr() % 16 == 0
    return not isinstance(arg, int) or arg < 2**31


def _kind(arg: Any) -> Any:
    """Return what a binary is compiled for: a dtype, a descriptor's dtype and box, or None."""
    if isinstance(arg, Tensor):
        return arg.dtype
    return None if arg is None or isinstance(arg, int) else arg.kind


def launches(kernel: Any) -> Callable[..., Launch]:
    """(**constants) -> the kernel's Launch, kept."""
    return functools.lru_cache(1024)(functools.partial(Launch, kernel))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own costs microseconds.)"""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
