"""Operators and casts in Triton's interpreter that ask Triton once for each pair of types.

Triton takes an operator through its rules for types and shapes each time, and makes operands of one
shape; what comes of that is one call of a function of the interpreter's, which calls numpy. Here
the rules are asked the first time. From then on that function is called with the operands as they
are: numpy broadcasts them itself, to the same bits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..compat import COMPUTING, INTERPRETER

NAMES = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift",
    "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
_NUMBERS = (bool, int, float)
MOST = 10_000
"""Kinds of operands that one operator remembers: loops count in numbers."""
_NEW = object()


class _Call(NamedTuple):
    """A call of one of the interpreter's functions that compute."""

    name: str
    operands: tuple[Any, ...]
    """Handles of tensors, and what else it takes."""


class _Recipe(NamedTuple):
    """How an operator's result is computed from its operands' handles."""

    function: Callable
    more: tuple[Any, ...]
    """Arguments of the function after the two handles."""
    reflected: bool
    """Whether the second operand comes first."""
    constant: Any
    """Handle of a second operand that is a number: one element."""
    type: Any
    """The result's."""


def remember(tensor: type) -> None:
    """Replaces the operators of the interpreter's tensors."""
    for name in NAMES:
        for each in (name, f"r{name}"):
            if (found := getattr(tensor, f"__{each}__", None)) is not None:
                setattr(tensor, f"__{each}__", _operator(found, each != name))


@contextlib.contextmanager
def _recorded() -> Iterator[list[_Call]]:
    """Outermost calls of the functions that compute, while it lasts: this thread's, since the
    interpreter's builder holds which program runs, and so runs one at a time."""
    builder, calls, within = INTERPRETER["builder"].find(), [], [False]

    def recording(name: str, function: Callable) -> Callable:
        def record(*operands):
            outermost, within[0] = not within[0], True
            try:
                found = function(*operands)
            finally:
                within[0] = not outermost
            if outermost:
                calls.append(_Call(name, operands))
            return found

        return record

    before = {name: vars(builder).get(name) for name in COMPUTING}
    for name in COMPUTING:
        setattr(builder, name, recording(name, getattr(builder, name)))
    try:
        yield calls
    finally:
        for name, own in before.items():
            if own is None:
                delattr(builder, name)
            else:
                setattr(builder, name, own)


def _operator(operator: Callable, reflected: bool) -> Callable:
    from triton.language import constexpr, tensor

    known: dict[tuple, Any] = {}  # a _Recipe; None where Triton is asked each time

    def apply(self, other):
        value = other.value if other.__class__ is constexpr else other
        if value.__class__ is tensor:
            key, second = (self.type.name, value.type.name), value.handle
        elif value.__class__ in _NUMBERS:
            key, second = (self.type.name, value.__class__, value), None
        else:
            return operator(self, other)
        recipe = known.get(key, _NEW)
        if recipe is _NEW and len(known) < MOST:
            return first(key, self, other)
        if recipe is _NEW or recipe is None:
            return operator(self, other)
        return tensor(_compute(recipe, self.handle, second), recipe.type)

    def first(key, self, other):
        with _recorded() as calls:
            result = operator(self, other)
        known[key] = _recipe(calls, reflected, self, other, result)
        return result

    return apply


def _compute(recipe: _Recipe, first: Any, second: Any) -> Any:
    """Handle of the result; `second` is None where a number is the second operand."""
    second = recipe.constant if second is None else second
    left, right = (second, first) if recipe.reflected else (first, second)
    return recipe.function(left, right, *recipe.more)


def _recipe(
    calls: list[_Call], reflected: bool, first: Any, second: Any, result: Any
) -> _Recipe | None:
    """Reads off the calls that an operator's first use made how it computes; None where there was
    more than one: operands were cast, say."""
    if len(calls) != 1:
        return None
    ((name, (left, right, *more)),) = calls
    if name == "create_addptr":  # pointer and offset, however they were added
        reflected = not first.type.scalar.is_ptr()
    constant = None
    if not hasattr(second, "handle"):
        constant = copy.copy(left if reflected else right)
        constant.data = constant.data.reshape(-1)[:1].copy()
    function = getattr(INTERPRETER["builder"].find(), name)
    return _Recipe(function, tuple(more), reflected, constant, result.type)


def cast_once(cast: Callable) -> Callable:
    """TritonSemantic.cast that asks once for each pair of types."""
    known: dict[tuple, Any] = {}  # the result's type; None where Triton is asked each time

    def casting(self, value, to, rounding=None):
        key = value.type.name, to.scalar.name, rounding
        if key not in known:
            with _recorded() as calls:
                result = cast(self, value, to, rounding)
            known[key] = result.type if [call.name for call in calls] == ["cast_impl"] else None
            return result
        if known[key] is None:
            return cast(self, value, to, rounding)
        return self.tensor(self.builder.cast_impl(value.handle, known[key]), known[key])

    return casting
