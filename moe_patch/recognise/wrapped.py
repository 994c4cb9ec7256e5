"""Classes and forwards that engines put around a module without replacing it.

torch's fully_shard and torch.nn.utils.parametrize give the module a class of their own, derived
from the module's, and so do weights in 4 bits (four_bits.py); transformers' plans put a forward on
the instance, which calls the one that it found there; accelerate keeps the class's forward beside
its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ..compat import OLD_FORWARD, PLANNED_FORWARD

_MADE = {"__dict__", "__weakref__"}  # of every class, by `type`
_PLACES = ("forward", OLD_FORWARD)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one beneath those that are derived from it: FSDPModule's,
    torch.nn.utils.parametrize's and that of 4-bit experts."""
    cls = type(module)
    while _is_wrapper(cls):
        cls = cls.__bases__[-1]
    return cls


def rewrapped(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """The module's class as it is with `new` beneath torch's wrappers, in the place of `old`.

    Raises:
        TypeError: the class derives from `old`, and it is not torch that derived it.
    """
    return _rewrapped(type(module), old, new)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives the module that class, and its forward where hooks on the instance end."""
    old = type(module).forward
    module.__class__ = cls
    for name in _PLACES:
        held, put = _held(module, name)
        if getattr(held, "__func__", None) is old:
            put(cls.forward.__get__(module))


def replaced_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward of its own, so that its class's is not what runs."""
    own = vars(module)
    held, _ = _held(module, _PLACES[OLD_FORWARD in own])
    return held is not None and getattr(held, "__func__", None) is not type(module).forward


def hooked_by_plan(module: nn.Module) -> bool:
    """Whether a tensor- or expert-parallel plan of transformers put a forward on the instance."""
    return any(_inner(vars(module).get(name)) is not None for name in _PLACES)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, which engines make of the parameters that they spread over ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def _held(module: nn.Module, name: str) -> tuple[Any, Callable[[Any], None]]:
    """(the forward under that name, or the innermost that plans put theirs around; its setter)."""
    held = vars(module).get(name)
    put = functools.partial(setattr, module, name)
    while (cell := _inner(held)) is not None:
        held, put = cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    return held, put


def _inner(forward: Any) -> Any:
    if not isinstance(forward, FunctionType):
        return None
    return dict(zip(forward.__code__.co_freevars, forward.__closure__ or ())).get(PLANNED_FORWARD)


def _is_wrapper(cls: type) -> bool:
    made = cls.__module__ == "torch.nn.utils.parametrize"
    return made or _is_four_bits(cls) or _is_engine(cls)


def _is_four_bits(cls: type) -> bool:
    return "within" in vars(cls)


def _is_engine(cls: type) -> bool:
    return len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed.")


def _rewrapped(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    if cls is old:
        return new
    if not _is_wrapper(cls):
        raise TypeError(f"{cls.__name__} derives from {old.__name__}")
    if _is_four_bits(cls):
        four_bits: Any = cls
        return four_bits.around(_rewrapped(four_bits.within, old, new))
    # an engine has one class for all modules of a kind; a parametrized module has one of its own,
    # which changes with every parametrization
    derived: Any = _shared if _is_engine(cls) else _derived
    return derived(cls, _rewrapped(cls.__bases__[-1], old, new))


def _derived(like: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` under the wrapper that `like` is under."""
    own = {name: value for name, value in vars(like).items() if name not in _MADE}
    prefix = like.__name__.removesuffix(like.__bases__[-1].__name__)
    return type(f"{prefix}{cls.__name__}", (*like.__bases__[:-1], cls), own)


_shared = functools.cache(_derived)
