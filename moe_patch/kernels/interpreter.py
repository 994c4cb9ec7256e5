"""Triton's interpreter without the work that it repeats: same numbers, less time."""

from __future__ import annotations

import copy
import functools
import operator
from types import SimpleNamespace
from typing import Any

from ..compat import COMPUTING, INTERPRETER, MASKED
from . import operators


@functools.cache
def quicken() -> None:
    """Has the interpreter do once what it does for each launch, call or intermediate result.

    Each launch, and each call of a jit function inside one (tl.zeros and tl.sum are such), looks
    through triton.language for functions to replace; each operator, cast and index compares types
    and shapes (`operators.py`); each intermediate result writes down its type and shape again, and
    looks its dtype up in a table made for that; each sum of integers is computed again in 64 bits,
    for a check that is off; tl.sort takes elements one by one. All of that stays where Triton has
    renamed one of these functions.
    """
    for name, at in MASKED.items():
        if name.find() is not None:
            name.put(_masked(name.find(), at))
    found = {short: name.find() for short, name in INTERPRETER.items()}
    if None in (*found.values(), *(name.find() for name in COMPUTING.values())):
        return
    for short, new in {
        "patch": _patched_once(found["patch"]),
        "call": _called(found["rewrite"]),
        "dtype": _looked_up_once(found["dtype"]),
        "block": _described_once(found["block"]),
        "tensor": _measured_once(found["tensor"]),
        "overflow": _checked(found["overflow"]),
        "broadcast": _broadcast_once(found["broadcast"]),
        "cast": operators.cast_once(found["cast"]),
        "reduce": _reduced(found["reduce"], found["xor"]),
    }.items():
        INTERPRETER[short].put(new)


def _masked(access: Any, at: int) -> Any:
    """Makes booleans of the mask: 3.9 takes nothing else, and compares scalars to integers."""

    def masked(self, *args):
        mask = copy.copy(args[at])
        mask.data = mask.data.astype(bool, copy=False)
        return access(self, *args[:at], mask, *args[at + 1 :])

    return masked


def _patched_once(patch: Any) -> Any:
    import triton.language as tl

    @functools.cache
    def patched() -> SimpleNamespace:
        # it patches the modules that a function's globals hold: ours hold tl, Triton's tl.core
        patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        tl.tensor.__getitem__ = _indexed(tl.tensor.__getitem__)
        operators.remember(tl.tensor)
        return SimpleNamespace(restore=lambda: None)  # nothing after a launch wants it as it was

    return lambda function: patched()


def _called(rewrite: Any) -> Any:
    def call(self, *args, **kwargs):
        return rewrite(self)(*args, **kwargs)

    return call


def _looked_up_once(look_up: Any) -> Any:
    found: dict[str, Any] = {}

    def looked_up(dtype):
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    return looked_up


def _described_once(describe: Any) -> Any:
    found: dict[tuple, dict[str, Any]] = {}

    def described(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in found:
            vars(self).update(found[key])
            self.element_ty = element_ty
        else:
            describe(self, element_ty, shape)
            found[key] = dict(vars(self))

    return described


def _measured_once(measure: Any) -> Any:
    found: dict[str, dict[str, Any]] = {}

    def measured(self, handle, type):
        if type.name in found:
            vars(self).update(found[type.name])
            self.handle, self.type, self.dtype = handle, type, type.scalar
        else:
            measure(self, handle, type)
            found[type.name] = dict(vars(self), handle=None)

    return measured


def _indexed(index: Any) -> Any:
    """An index that looks for new axes, as in x[:, None], once for each type."""
    import triton.language as tl

    handle_of, whole = INTERPRETER["handle"].find(), slice(None)
    types: dict[tuple, Any] = {}

    def is_axis(each):
        return each is None or (each.__class__ is slice and each == whole)

    def indexed(self, slices):
        axes = slices.__class__ is tuple and all(map(is_axis, slices))
        if not axes or not self.type.is_block():
            return index(self, slices)
        key = self.type.name, *(each is None for each in slices)
        if key not in types:
            types[key] = index(self, slices).type
        handle = handle_of(self.handle.data[slices], self.handle.dtype.scalar)
        return tl.tensor(handle, types[key])

    return indexed


def _broadcast_once(broadcast: Any) -> Any:
    types: dict[tuple[str, str], list[Any]] = {}

    def broadcasted(self, *both):
        key = both[0].type.name, both[1].type.name
        if key not in types:
            found = broadcast(self, *both)
            types[key] = [None if new is old else new.type for new, old in zip(found, both)]
            return found
        return tuple(
            old if new is None else to(self, old, new) for old, new in zip(both, types[key])
        )

    def to(self, value, type):
        if value.type.is_block():
            shape = [getattr(size, "value", size) for size in type.shape]
            return self.tensor(self.builder.create_broadcast(value.handle, shape), type)
        return self.tensor(self.builder.create_splat(type, value.handle), type)

    return broadcasted


def _checked(check: Any) -> Any:
    def checked(self, lhs, rhs, binary_op):
        if self.builder.options.debug:  # else nobody asks what the check found
            check(self, lhs, rhs, binary_op)

    return checked


def _reduced(reduce: Any, xor: Any) -> Any:
    def reduced(self, input):
        if self.combine_fn is not xor or self.axis is None or len(input) != 1:
            return reduce(self, input)
        data = input[0].handle.data
        slices = (data.take([i], self.axis) for i in range(data.shape[self.axis]))
        data = functools.reduce(operator.xor, slices)
        if not self.keep_dims:
            data = data.squeeze(self.axis)
        return [self.to_tensor(data, input[0].dtype)]

    return reduced
