"""Starts a kernel without Triton's argument binder, which costs more than a decode step's kernels.

The first launch of a kind goes through Triton, which compiles (`ahead`: all that its call starts);
the next ones find the binary by what the arguments are and call the C function behind Triton's
launcher. Tensors' dtypes, descriptors' dtypes and boxes, and which arguments are None: besides its
constants, a binary depends on nothing else. Strides are among these, counts are not specialised,
and unaligned pointers always take Triton's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from .. import compat
from ..compat import cuda_device, cuda_stream, encoded
from .ahead import THREAD, compile_call

DIRECT: bool = compat.starts_directly()


class Launch:
    """A kernel and its constants, put together once: even that costs microseconds.

    `constants` are the constexpr parameters, num_warps and num_stages. A product and a sum become
    one rounding, which is Triton's default up to 3.9.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = {"enable_fp_fusion": True, **constants}
        self._binaries: dict[tuple, compat.Binary] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """kernel[grid](*args, **constants) on the current device and stream.

        `args` are tensors, descriptors of `boxes`, None and non-negative counts marked
        do_not_specialize.
        """
        if not THREAD.ready:
            if THREAD.rehearsed is not None:
                THREAD.rehearsed.append((self, grid, args))
                return
            compat.bind_thread()
            THREAD.ready = True
        if not DIRECT:
            self.kernel[grid](*args, **self.constants)
            return
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # profiler
            self.kernel[grid](*args, **self.constants)
            return
        device = cuda_device()
        kind: list[Any] = [device]
        bits, values = 0, []
        for arg in args:
            if isinstance(arg, Tensor):
                kind.append(arg.dtype)
                arg = arg.data_ptr()
                bits |= arg
            elif isinstance(arg, int):
                bits |= arg >> 31  # i64
            else:
                kind.append(None if arg is None else arg.kind)
            values.append(arg)
        key = tuple(kind)
        binary = self._binaries.get(key)
        if bits & 15:
            self.kernel[grid](*args, **self.constants)
            return
        if binary is None:
            compile_call()
            self._keep(key, self.kernel[grid](*args, **self.constants), args)
            return
        start, function, settings, boxes, unread, packed = binary
        for at, name, meta in boxes:  # from the last to the first
            values[at : at + 1] = encoded(values[at], name, meta)
        stream = cuda_stream(device)
        x, y, z = (*grid, 1, 1)[:3]
        if packed:
            start(x, y, z, stream, function, *settings, (*values, *unread))
        else:
            start(x, y, z, stream, function, *settings, *values, *unread)

    def _keep(self, key: tuple, compiled: Any, args: tuple[Any, ...]) -> None:
        global DIRECT
        found = compat.binary(self.kernel, compiled, args)
        if found is None:
            DIRECT = False
        else:
            self._binaries[key] = found


def launches(kernel: Any) -> Callable[..., Launch]:
    """(**constants) -> the kernel's Launch, kept."""
    return functools.lru_cache(1024)(functools.partial(Launch, kernel))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own costs microseconds.)"""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
