"""What parallel engines put around a module without replacing it.

torch's fully_shard gives the module a class of its own, derived from the module's; transformers'
plans put a forward on the instance, which calls the one that it found there; accelerate keeps the
class's forward in `_old_forward`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_PLACES = ("forward", "_old_forward")
_INNER = "original_forward"  # what transformers' plans call the forward that they found


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one beneath torch's FSDPModule."""
    cls = type(module)
    return cls.__bases__[-1] if _is_wrapper(cls) else cls


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes `cls` the `plain_class`, its forward the one that hooks on the instance end in."""
    old = type(module).forward
    module.__class__ = _wrapper(type(module), cls) if _is_wrapper(type(module)) else cls
    for name in _PLACES:
        held, put = _held(module, name)
        if getattr(held, "__func__", None) is old:
            put(cls.forward.__get__(module))


def replaced_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward of its own, so that its class's is not what runs."""
    own = vars(module)
    held, _ = _held(module, _PLACES["_old_forward" in own])
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
    return dict(zip(forward.__code__.co_freevars, forward.__closure__ or ())).get(_INNER)


def _is_wrapper(cls: type) -> bool:
    return len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed.")


@functools.cache
def _wrapper(like: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` under the wrapper that `like` is under."""
    own = {name: vars(like)[name] for name in vars(like).keys() & {"__module__", "__deepcopy__"}}
    prefix = like.__name__.removesuffix(like.__bases__[-1].__name__)
    return type(f"{prefix}{cls.__name__}", (*like.__bases__[:-1], cls), own)
