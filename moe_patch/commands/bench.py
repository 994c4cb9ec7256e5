"""python -m moe_patch bench: picks a kind, runs it, prints and writes what it found."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .. import output, parity
from ..bench.kind import Flags, FromFiles, Kind, Run, Timed, kinds, write_csv
from ..bench.picture import figure
from ..usage import Parser, UsageError, refused
from . import running
from .running import PROG, Command

HELP = "times against Hugging Face's implementations, after parity holds"
BENCH = f"{PROG} bench"
FALLBACK = "block"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one kind, and the kind itself: `bench KIND ...`, or `bench ...` with flags."""
    every = kinds()
    first = arguments[0] if arguments else ""
    if first in every:
        kind = every[first]
        about = f"{kind.help[0].upper()}{kind.help[1:]}. {kind.about}"
        parser = Parser(f"{BENCH} {first}", description=about)
        kind.arguments(Flags(parser), old=False)
        options = parser.parse_args(arguments[1:])
    elif first and not first.startswith("-"):
        raise UsageError(f"bench has no kind {first!r}: there are {', '.join(every)}")
    else:
        kind, options = _without_kind(every, arguments)
    options.kind = kind
    return options


def _without_kind(
    every: dict[str, Kind], arguments: Sequence[str]
) -> tuple[Kind, argparse.Namespace]:
    """One parser with the flags of all kinds: a kind's switch chooses it, and then what the kind
    does not take is refused."""
    parser = Parser(
        BENCH,
        usage=f"{BENCH} [KIND] ...",
        description=_about(every),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # kinds share flags
    )
    old = [name for name, kind in every.items() if kind.switch or name == FALLBACK]
    taken = {name: Flags(parser, hidden=True) for name in old}
    for name, flags in taken.items():
        every[name].arguments(flags, old=True)
    options = parser.parse_args(arguments)
    kind = every[next((name for name in old if every[name].chosen(options)), FALLBACK)]
    for dest, value in vars(options).items():
        if dest in taken[kind.name].names or value == parser.get_default(dest):
            continue
        owners = {name: flags.names[dest] for name, flags in taken.items() if dest in flags.names}
        flag = next(iter(owners.values()))
        if kind.switch:
            raise UsageError(kind.takes_no(flag))
        switches = " or ".join(every[name].switch for name in owners)
        raise UsageError(f"{flag} is for {switches}: add it")
    return kind, options


def _about(every: dict[str, Kind]) -> str:
    width = max(map(len, every))
    listed = "\n".join(f"  {name:{width}}  {kind.help}" for name, kind in every.items())
    switches = ", ".join(kind.switch for kind in every.values() if kind.switch)
    without = f"Without KIND: {FALLBACK}, unless a flag chooses another kind: {switches}."
    return (
        f"{HELP[0].upper()}{HELP[1:]}.\n\n{listed}\n\n"
        f"`{BENCH} KIND --help` says what a kind takes.\n{textwrap.fill(without, 78)}"
    )


def run(options: argparse.Namespace) -> int:
    """Refuses before anything is built; then prints what a kind reads off files, or measures."""
    kind = options.kind
    refused(kind.refuse, options)
    refused(_check_files, options)
    if isinstance(kind, FromFiles):
        refused(kind.answer, options)
        return 0
    if running.device() == "cpu":
        raise UsageError("bench needs a GPU: times of Triton's interpreter would mean nothing")
    return measure(kind, options)


def _check_files(options: argparse.Namespace) -> None:
    """Raises ValueError for a picture that cannot be drawn, a file that cannot be written, and
    for two outputs in one file."""
    if getattr(options, "png", None) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which the extra moe_patch[bench] installs")
    taken: dict[str, str] = {}
    for flag in ("--csv", "--png", "--json"):
        file = getattr(options, flag[2:], None)
        if not file or str(file) == "-":
            continue
        output.check_writable(flag, file)
        other = taken.setdefault(os.path.realpath(file), flag)
        if other != flag:
            raise ValueError(f"{other} and {flag} name the same file {str(file)!r}: name two")


def measure(kind: Timed, options: argparse.Namespace) -> int:
    """Times, prints, writes. Returns 1 when parity fails, with no times shown (of that row, where
    the kind goes on). Stopped halfway, it prints the rows that it has, and raises."""
    silent, progress = kind.silent(options), running.bar()
    found = Run(options, progress)
    try:
        with progress:
            report = kind.measure(found)
    except BaseException:
        if found.rows and not silent:
            _show(kind, found.rows, sys.stderr if options.json == "-" else sys.stdout)
        raise
    if report:
        print(report)
        print("moe_patch: no times are shown, because parity fails", file=sys.stderr)
        return 1
    if silent:
        return 0
    environment = parity.environment("cuda")
    about = {"environment": environment, "ceilings": found.ceilings, "notes": found.notes}
    text = to_json(found.rows, **about)
    if options.json == "-":
        print(text)
    else:
        print("\n".join([f"moe_patch bench on {environment}", *map(str, found.ceilings)]))
        _show(kind, found.rows, sys.stdout)
        print("".join(f"note: {note}\n" for note in found.notes), end="")
    # after the tables: a disk that is full by now takes no times away
    if options.csv:
        write_csv(found.rows, options.csv)
    if getattr(options, "png", None) and found.rows:
        figure(found.rows).savefig(options.png, dpi=120)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    for failed in found.failed:
        print(failed, file=sys.stderr)
    return 1 if found.failed else 0


def _show(kind: Timed, rows: Sequence[Any], file: TextIO) -> None:
    for table in kind.tables(rows):
        output.show(table, output.console(file))


def to_json(rows: Iterable[Any], *, ceilings: Iterable[Any] = (), **about: Any) -> str:
    """The rows and what they hold for: environment, ceilings, notes."""
    found = {"ceilings": [*map(asdict, ceilings)], "timings": [*map(asdict, rows)]}
    return json.dumps(about | found, indent=2)


COMMAND = Command("bench", HELP, parse, run)
