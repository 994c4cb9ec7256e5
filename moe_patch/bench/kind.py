"""The interface of a kind of bench, and the state of a run."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.progress import Progress
from rich.table import Table

from ..parity import ParityReport
from ..usage import add_json

T = TypeVar("T")


class Flags:
    """add_argument of a parser for one kind; `names` has each dest with its flag."""

    def __init__(self, parser: argparse.ArgumentParser, *, hidden: bool = False) -> None:
        self.parser, self.hidden, self.names = parser, hidden, {}

    def __call__(self, *flags: str, **how: Any) -> None:
        """Adds one argument, left out of --help if hidden."""
        if self.hidden:
            how["help"] = argparse.SUPPRESS
        action = self.parser.add_argument(*flags, **how)
        self.names[action.dest] = flags[0]


class Kind(ABC):
    """One sub-command of `bench`."""

    name: ClassVar[str]
    help: ClassVar[str]  # a line of `bench --help`
    about: ClassVar[str] = ""  # what `bench NAME --help` says beside it
    switch: ClassVar[str] = ""  # what chose it before there were sub-commands, and still does
    does: ClassVar[str] = ""  # what --switch does, in its refusals

    @abstractmethod
    def arguments(self, flag: Flags, old: bool) -> None:
        """Adds its arguments.

        Args:
            old: to `bench` without a name, asked only of a kind with a switch; its own
                switch then too, and no default but None, False or [], which say "not given".
        """

    def chosen(self, options: argparse.Namespace) -> bool:
        """Whether the options of `bench` without a name have its switch."""
        return False

    def takes_no(self, flag: str) -> str:
        """Why a flag of another kind is refused beside its switch."""
        return f"{self.switch} {self.does} and takes no {flag}: run bench twice"

    def refuse(self, options: argparse.Namespace) -> None:  # noqa: B027 (most refuse nothing)
        """Raises ValueError, in one sentence, for what cannot be asked for."""


class FromFiles(Kind):
    """A kind that measures nothing, and needs no GPU."""

    @abstractmethod
    def answer(self, options: argparse.Namespace) -> None:
        """Prints or writes. Raises ValueError for a file that it cannot use."""


class Timed(Kind):
    """A kind that measures rows, dataclasses of one class, on a GPU."""

    @abstractmethod
    def measure(self, run: Run) -> ParityReport | None:
        """Adds to run.rows; returns the report where parity fails, and then no times are shown.

        Raises:
            UsageError: what is asked for does not exist.
        """

    @abstractmethod
    def tables(self, rows: Sequence[Any]) -> Iterable[Table]:
        """Return the table that shows the rows."""

    def silent(self, options: argparse.Namespace) -> bool:
        """Whether another process prints and writes."""
        return False


@dataclass
class Run:
    """Options of a run, and its rows so far."""

    options: argparse.Namespace
    progress: Progress
    rows: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ceilings: list[Any] = field(default_factory=list)
    failed: list[ParityReport] = field(default_factory=list)
    """Reports of rows that have no times, where the other rows have."""

    def each(
        self, todo: Iterable[T], label: Callable[[T], str], *, total: int | None = None,
        first: str = "",
    ) -> Iterator[T]:  # fmt: skip
        """Yields the items, and shows which is under way."""
        total = len(todo) if isinstance(todo, Sequence) else total
        task = self.progress.add_task(first, total=total)
        for item in todo:
            self.progress.update(task, description=label(item))
            yield item
            self.progress.advance(task)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Shows that something of unknown length is under way."""
        task = self.progress.add_task(text, total=None)
        yield
        self.progress.remove_task(task)

    def keep(self) -> None:
        """Writes the rows to --csv now: a run takes minutes, and Ctrl-C loses none of them."""
        if self.options.csv:
            write_csv(self.rows, self.options.csv)


def kinds() -> dict[str, Kind]:
    """Every module of this folder that has a KIND, by its name, in alphabetical order."""
    package = importlib.import_module(__package__)
    modules = (
        importlib.import_module(f"{__package__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
    )
    every = (module.KIND for module in modules if hasattr(module, "KIND"))
    return {kind.name: kind for kind in sorted(every, key=lambda kind: kind.name)}


def add_layers(flag: Flags, default: str) -> None:
    """--layers: a number that `check_layers` refuses below 1."""
    flag("--layers", metavar="N", type=int, help=f"default: {default}")


def check_layers(layers: int | None) -> None:
    """Raises ValueError below 1."""
    if layers is not None and layers < 1:
        raise ValueError(f"--layers {layers}: at least 1 layer is needed")


def add_files(flag: Flags, *, png: bool = False) -> None:
    """--csv, --json and, if asked for, --png."""
    flag("--csv", metavar="FILE", type=Path, help="write the rows")
    add_json(flag)
    if png:
        add_png(flag)


def add_png(flag: Flags, **how: Any) -> None:
    """--png: where commands/bench.py checks that it can be written and drawn."""
    flag("--png", metavar="FILE", type=Path, help="draw times over tokens", **how)


def need_peft() -> None:
    """Raises ValueError when PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("LoRA needs PEFT, which the extra moe_patch[lora] installs")


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """One line for each of these dataclasses, with a header; an empty file when there are none."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])] if rows else [])
        if rows:
            writer.writeheader()
        writer.writerows(map(asdict, rows))
