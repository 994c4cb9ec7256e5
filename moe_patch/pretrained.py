"""The hooks into transformers: model.patch(), the loading hook, the experts implementation."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import notices
from .compat import CAN_CHOOSE, CHOOSE, FROM_CONFIG
from .models import decorated
from .patcher import LOOKS_LIKE_MOE, patch, unpatch
from .quantizer import loader
from .recognise.original import NAME

_LOADERS = ("from_pretrained", FROM_CONFIG)  # the Auto classes end in these two
_ALWAYS = "enable()"
_on: frozenset[object] = frozenset()  # who asks for the hook: `_ALWAYS`, and every open block
_inside: ContextVar[frozenset[object]] = ContextVar("moe_patch_inside", default=frozenset())
_originals: dict[str, classmethod] = {}  # filled while the hook is in place
_switching = threading.RLock()
_loading: ContextVar[bool] = ContextVar("moe_patch_loading", default=False)


class _Method:
    """A method for every model, that gives way to a submodule of the same name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self.function
        submodule = dict(model.named_children()).get(self.function.__name__)
        return self.function.__get__(model) if submodule is None else submodule


def register() -> None:
    """Puts patch() and unpatch() on every PreTrainedModel and "moe_patch" in HF's registries.

    An attribute of that name which is not ours stays, with a warning.
    """
    decorated.register()
    loader.register()
    choose = vars(PreTrainedModel).get(CHOOSE)
    if choose is not None and not hasattr(choose, "moe_patch_original"):
        setattr(PreTrainedModel, CHOOSE, _warning(choose))
    for function in (patch, unpatch):
        name = function.__name__
        found = vars(PreTrainedModel).get(name)
        if found is None or type(found).__qualname__ == _Method.__qualname__:
            setattr(PreTrainedModel, name, _Method(function))
        else:
            warnings.warn(
                f"PreTrainedModel already has an attribute {name!r} ({found!r}), which moe_patch "
                f"leaves alone: call moe_patch.{name}(model) instead.",
                stacklevel=2,
            )


def enable() -> None:
    """From now on every model that from_pretrained or from_config makes comes back patched.

    In all threads, until :func:`disable`, whatever `with enabled():` blocks end meanwhile. Blocks
    of a model that cannot be fused are listed in a warning. On already: nothing happens, with a
    warning.
    """
    with _switching:
        if _ALWAYS in _on:
            warnings.warn("moe_patch is enabled already, nothing changed.", stacklevel=2)
        _switch(_on | {_ALWAYS})


def disable() -> None:
    """Undoes :func:`enable`; models already loaded stay patched. Harmless when the hook is off.

    Inside `with enabled():` that block stays on until it ends.
    """
    with _switching:
        _switch(_on - {_ALWAYS})


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`with moe_patch.enabled():` has the hook on inside, and as it was before afterwards.

    Inside means in this thread or asyncio task (its context); another thread's loads are its own.
    """
    block = object()
    with _switching:
        _switch(_on | {block})
    _inside.set(_inside.get() | {block})
    try:
        yield
    finally:
        _inside.set(_inside.get() - {block})
        with _switching:
            _switch(_on - {block})


def _switch(on: frozenset[object]) -> None:
    """Has these ask for the hook, which is in place while any does."""
    global _on
    if on and not _originals:
        for name in _LOADERS:
            if name in vars(PreTrainedModel):
                _originals[name] = vars(PreTrainedModel)[name]
                setattr(PreTrainedModel, name, _patching(_originals[name]))
    elif not on:
        for name, original in _originals.items():
            if getattr(vars(PreTrainedModel)[name], "moe_patch_original", None) is original:
                setattr(PreTrainedModel, name, original)
        _originals.clear()  # a hook that somebody wrapped stays in place, inert
    _on = on


def _is_on() -> bool:
    """Whether a load in this context is to be patched."""
    return _ALWAYS in _on or not _on.isdisjoint(_inside.get())


def _warning(original: Callable[..., str]) -> Callable[..., str]:
    """Says where experts_implementation="moe_patch" does nothing: HF's switch itself is silent."""

    @functools.wraps(original)
    def choose(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        chosen = original(self, *args, **kwargs)
        source = sys.modules.get(type(self).__module__)
        can = getattr(self, CAN_CHOOSE, lambda: True)
        silent = chosen == NAME and not can()
        if silent and any(map(LOOKS_LIKE_MOE.search, vars(source) if source else ())):
            notices.warn_once(
                f'experts_implementation="moe_patch" does nothing for {source.__name__}, whose '
                "experts transformers cannot switch: load without it and call model.patch()."
            )
        return chosen

    vars(choose)["moe_patch_original"] = original
    return choose


def _patching(original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def load(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        if not _is_on() or _loading.get():  # a load inside a load: the outer one patches
            return original.__func__(cls, *args, **kwargs)
        token = _loading.set(True)
        try:
            loaded = original.__func__(cls, *args, **kwargs)
        finally:
            _loading.reset(token)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
        report = patch(model, strict=False)
        if report.skipped:
            warnings.warn(str(report), stacklevel=2)
        return loaded

    hook: Any = classmethod(load)
    hook.moe_patch_original = original
    return hook
