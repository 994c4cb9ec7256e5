"""The Hugging Face class that a fused one stands for, and the functions of it that it replaces.

People replace functions on Hugging Face's classes, before a model is patched or after, and they
keep forwards of modules that are unpatched later. Both are theirs to decide: a fused forward asks
`intact` before it runs, `patch` asks `why_replaced`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..compat import OLD_INIT
from ..notices import say_unfused

NAME = "moe_patch"
"""Our name in HF's registries: `from_pretrained(..., experts_implementation="moe_patch")`."""

_Object: Any = object  # for type checkers: Hugging Face's class brings attributes of its own


class Fused(_Object):
    """First among the bases of every fused class, Hugging Face's class is the last.

    What a fused forward reads of them, it reads off one look at `type(module)`: another thread may
    unpatch the module meanwhile.
    """

    stands_for: type[nn.Module]
    """Hugging Face's class, which `unpatch` puts back."""
    functions: tuple[tuple[str, Callable[..., Any]], ...]
    """Functions of Hugging Face's class that the fused one replaces or was recognised by."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base = cls.__bases__[-1]
        if issubclass(base, nn.Module) and not hasattr(cls, "stands_for"):
            cls.stands_for = base
            if not hasattr(cls, "functions"):
                cls.functions = (("forward", base.forward),)


class Recognised(Fused):
    """A fused class that is made when a model has Hugging Face's: a pickle has that one's name."""

    find: Callable[[type[nn.Module]], type[nn.Module] | None]
    """Makes the fused class of Hugging Face's, or finds it: a function of a module."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return _blank, (type(self).find, self.stands_for), *state


def _blank(find: Callable[..., Any], original: type[nn.Module]) -> nn.Module:
    cls = find(original) or original
    return cls.__new__(cls)


def methods(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """The functions that a class has besides __init__, by name; not those of its bases."""
    own = {name: value for name, value in vars(cls).items() if isinstance(value, FunctionType)}
    # DeepSpeed's zero.Init leaves a copy of __init__ behind
    return {n: method for n, method in own.items() if n not in ("__init__", OLD_INIT)}


def intact(module: nn.Module) -> bool:
    """Whether a fused forward may run: the module is still patched, Hugging Face's class as it was.

    If not, `own_forward` is what runs. Replaced functions are warned of, once.
    """
    cls: Any = type(module)
    original = getattr(cls, "stands_for", None)
    if original is None:  # somebody kept the forward of a module that was unpatched since
        return False
    for name, function in cls.functions:
        if getattr(original, name, None) is not function:
            _say_replaced(cls)
            return False
        if name != "forward" and name in module.__dict__:  # a helper of the instance
            return False
    return True


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward that the module has without moe_patch."""
    cls = type(module)
    cls = getattr(cls, "stands_for", cls)
    forward = getattr(type(module), "run_own", None)  # of 4-bit experts
    return (forward or cls.forward)(module, *args, **kwargs)


def fused_within(cls: type) -> type[Fused] | None:
    """The fused class that the class is or derives from."""
    return next((base for base in cls.__mro__ if "stands_for" in vars(base)), None)


def why_replaced(cls: type[Fused]) -> str | None:
    """None while Hugging Face's class has its own functions, else which one is not, in a sentence.

    One that was replaced before moe_patch was imported is known by where its code is.
    """
    found = dict(replaced(cls.stands_for, (name for name, _ in cls.functions)))
    for name, function in cls.functions:
        if getattr(cls.stands_for, name, None) is not function:
            found.setdefault(name, describe(cls.stands_for, name))
    return next(iter(found.values()), None)


def replaced(cls: type, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, sentence) of those functions that the class has from elsewhere than its own module."""
    for name in names:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is not None and not _is_own(vars(owner)[name], owner.__module__):
            yield name, describe(cls, name)


def describe(cls: type, name: str) -> str:
    """A sentence that says with what a function of the class was replaced."""
    function = getattr(cls, name, None)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    outer = getattr(function, "__code__", code)
    where = f"{outer.co_filename}:{outer.co_firstlineno}" if outer else repr(function)
    return (
        f"{cls.__name__}.{name} was replaced on the class ({where}), and that runs: put the "
        "original back to have it fused"
    )


def _is_own(function: Any, module: str) -> bool:
    """Whether it is written in that module, perhaps under decorators of transformers."""
    home = ""
    while function is not None:
        if not isinstance(function, FunctionType):
            return False
        home = function.__globals__.get("__name__", "")
        if home != module and not home.startswith("transformers."):
            return False
        function = getattr(function, "__wrapped__", None)
    return home == module


@torch.compiler.assume_constant_result
def _say_replaced(cls: type[Fused]) -> None:
    """Once for each function that is put in the place of another."""
    reason = why_replaced(cls)
    if reason is not None:  # else it was put back meanwhile
        say_unfused(reason)
