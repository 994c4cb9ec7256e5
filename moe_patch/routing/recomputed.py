"""Forwards that gradient checkpointing runs again in the backward, known by what they ran before.

Who checkpoints keeps a function for it on a module: transformers' layers do, and torch's wrapper
(compat.CHECKPOINTS). While a context is open, what that function is given to run remembers what it
meets, in order, and meets the same again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch import nn

from ..compat import CHECKPOINTS, current_graph_task

Met = TypeVar("Met")


class Memory(Generic[Met]):
    """What one checkpointed function met, by who met it, in the order of its first run."""

    def __init__(self) -> None:
        self.met: dict[object, list[Met]] = {}
        self.again: dict[object, int] = {}


_here = threading.local()


def meet(who: object, new: Callable[[], Met]) -> tuple[Met, bool]:
    """(what `who` met at this point of an earlier run, True), or (`new`, False) in a first run."""
    memory: Memory[Met] | None = getattr(_here, "memory", None)
    if memory is None:
        return new(), False
    met, at = memory.met.setdefault(who, []), memory.again.get(who, 0)
    memory.again[who] = at + 1
    if at < len(met):
        return met[at], True
    met.append(new())
    return met[at], False


def in_backward() -> bool:
    """Whether autograd runs now, so that a forward is one that runs again."""
    return current_graph_task is not None and current_graph_task() != -1


@contextlib.contextmanager
def remembering(model: nn.Module) -> Iterator[None]:
    """Inside, what the model's modules checkpoint remembers."""
    kept = []
    for module in model.modules():
        for name in CHECKPOINTS:
            function = vars(module).get(name)
            if callable(function):
                kept.append((module, name, function))
                setattr(module, name, _remembered(function))
    try:
        yield
    finally:
        for module, name, function in reversed(kept):
            setattr(module, name, function)


def _remembered(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(checkpoint)
    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        memory: Memory[Any] = Memory()

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, _here.memory = getattr(_here, "memory", None), memory
            memory.again.clear()
            try:
                return function(*args, **kwargs)
            finally:
                _here.memory = outer

        return checkpoint(run, *args, **kwargs)

    return checkpointed
