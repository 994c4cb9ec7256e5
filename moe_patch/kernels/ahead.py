"""Compiles the kernels of a call side by side, where they would be compiled one after the other.

A kernel takes about a second to compile, and a forward has five kernels, a backward as many. When
the first launch of a call finds none compiled, the call is rehearsed: run with tensors that have no
memory, while launches are noted and start nothing. What they name is compiled on threads, and the
launches of the call itself find it.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import compat

Function = TypeVar("Function", bound=Callable[..., Any])


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Thread(threading.local):
    """State of a thread; `launch` reads it, too."""

    ready = False
    """Whether launches go to the GPU. Before, CUDA has to know the thread: without its context no
    descriptor is made, and in a new thread a kernel of ours may be the first that happens on the
    GPU. Nor is a thread ready that rehearses."""
    call: _Call | None = None
    """Call at work, until it is rehearsed."""
    rehearsed: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] | None = None
    """A rehearsal's launches, each with its grid and arguments, which start nothing."""


THREAD = _Thread()


def compiled_together(function: Function) -> Function:
    """A function of tensors, as it is, but for its launches, which are compiled together.

    It does not read on the host what a kernel wrote, and what it changes besides tensors that it
    makes, as a parameter's `.grad`, it reaches through its arguments alone.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, THREAD.call = THREAD.call, _Call(function, args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            THREAD.call = outer

    return call  # type: ignore[return-value]


def compile_call() -> None:
    """Compiles what the call at work launches, unless that was done or nothing is gained."""
    call, THREAD.call = THREAD.call, None
    threads = min(8, os.cpu_count() or 1)
    if call is None or threads < 2 or not compat.async_compile():
        return
    try:  # in a context of its own, in which an interrupt may leave Triton's mode
        contextvars.copy_context().run(_compile, _rehearsed(call), threads)
    except Exception as error:
        compat.say_one_by_one(call.function.__name__, error)


def _compile(launches: list[Any], threads: int) -> None:
    """Compiles what they launch, and what starts it. The call itself raises what fails."""
    with ThreadPoolExecutor(threads) as pool:
        with compat.async_compile()(pool, ignore_errors=True):
            found = [
                launch.kernel.warmup(*args, grid=grid, **launch.constants)
                for launch, grid, args in launches
            ]
        compiled = [each.result(True) if hasattr(each, "result") else each for each in found]
        list(pool.map(compat.build_launcher, filter(None, compiled)))


def _rehearsed(call: _Call) -> list[Any]:
    """The launches of a call, with tensors on the meta device."""
    ready, THREAD.ready, THREAD.rehearsed = THREAD.ready, False, []
    try:
        kwargs = {name: _hollow(value) for name, value in call.kwargs.items()}
        call.function(*map(_hollow, call.args), **kwargs)
        return THREAD.rehearsed
    finally:
        THREAD.ready, THREAD.rehearsed = ready, None


def _hollow(value: Any) -> Any:
    """A value with tensors that have no memory, inside tuples and dataclasses, too."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        found = map(_hollow, value)
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    if is_dataclass(value):
        return type(value)(**{f.name: _hollow(getattr(value, f.name)) for f in fields(value)})
    return value
