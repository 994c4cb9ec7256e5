"""What commands share: a parser that refuses in one line, numbers, flags of several of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from . import shapes

T = TypeVar("T")
Flag = Callable[..., object]
"""A parser's add_argument, or what stands for it."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class UsageError(Exception):
    """A request that cannot be carried out; the message is one sentence."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError; argparse would print the usage and exit."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def refused(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls the function; a ValueError, its refusal, becomes a UsageError."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raises UsageError for an empty argument: a variable that is not set asks for no default."""
    for i, argument in enumerate(arguments):
        if not argument.strip() or (argument.startswith("--") and argument.endswith("=")):
            flag = argument.strip(" =") or (arguments[i - 1] if i else "")
            raise UsageError(f"the argument after {flag!r} is empty: is a shell variable not set?")


def positive(text: str) -> int:
    """A whole number from 1 to 2^31 - 1."""
    return _whole(text, 1, 2**31 - 1)


def seed(text: str) -> int:
    """A whole number that a random generator takes."""
    return _whole(text, 0, 2**63 - 1)


def _whole(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def add_shape(flag: Flag, default: str = "") -> None:
    """--shape: names of blocks, a list that is empty by default."""
    names = f"of {', '.join(shapes.SHAPES)}"
    text = f"{names}; default: {default}" if default else names
    flag("--shape", nargs="+", default=[], metavar="NAME", help=text)


def add_tokens(flag: Flag, default: Sequence[int] = ()) -> None:
    """--tokens: positive numbers, or None."""
    text = f"default: {' '.join(map(str, default))}" if default else None
    flag("--tokens", nargs="+", type=positive, metavar="N", help=text)


def add_dtype(flag: Flag, default: str, more: Sequence[str] = ()) -> None:
    """--dtype: keys of DTYPES, or `more`, or None."""
    names = (*DTYPES, *more)
    text = f"of {', '.join(names)}; default: {default}"
    flag("--dtype", nargs="+", choices=names, metavar="NAME", help=text)


def add_json(flag: Flag) -> None:
    """--json: a file, "-" for stdout, or None."""
    text = "write json, to stdout without FILE"
    flag("--json", nargs="?", const="-", metavar="FILE", help=text)
