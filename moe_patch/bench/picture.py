"""The picture of --png, and bench picture, which draws it again from CSV files."""

from __future__ import annotations

import argparse
import csv
import os
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .block import Timing
from .kind import Flags, FromFiles, add_png
from .lora import PEFT
from .timing import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULTS = ("HF grouped_mm", PEFT, "HF dense")
"""Hugging Face's default; Llama4's experts are dense."""


def figure(timings: Sequence[Timing]) -> Figure:
    """A row of panels for each shape, dtype and mode, over tokens, the limit dashed.

    Time; the same relative to Hugging Face's default; TFLOP/s.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    def key(t: Timing) -> tuple[str, str, str]:
        return t.shape, t.dtype, t.mode

    groups = dict.fromkeys(map(key, timings))
    colors = {name: f"C{i}" for i, name in enumerate(_names(timings))}
    drawing = Figure(figsize=(14, 3.5 * len(groups)), layout="constrained")
    grid = drawing.subplots(len(groups), 3, squeeze=False)
    for group, panels in zip(groups, grid):
        rows = [t for t in timings if key(t) == group]
        base = next((name for name in DEFAULTS if name in _names(rows)), None)
        base_ms = {t.tokens: t.ms for t in rows if t.implementation == base}
        limits = {t.tokens: t.limit_ms for t in rows}
        flops = {t.tokens: t.tflops * t.ms for t in rows}
        lines = {
            name: {t.tokens: t.ms for t in rows if t.implementation == name}
            for name in _names(rows)
        } | {"limit": limits}
        for name, ms in lines.items():
            relative = {n: ms[n] / base_ms[n] for n in ms if n in base_ms}
            style = {"color": colors.get(name, "black"), "lw": 2.5 if name == OURS else 1.2}
            style |= {"ls": "--", "lw": 1} if name == "limit" else {"marker": "o", "ms": 4}
            for panel, values in zip(panels, (ms, relative, {n: flops[n] / ms[n] for n in ms})):
                tokens = sorted(values)
                panel.plot(tokens, [values[n] for n in tokens], label=name, **style)
            if name == OURS:
                _say_how_fast(panels[1], relative, colors[name])
        unit = f"time relative to {base}" if base else "Hugging Face's default was not timed"
        ticks = sorted(limits)
        for panel, what in zip(panels, ("ms", unit, "TFLOP/s")):
            panel.set_xscale("log", base=2)
            panel.set(title=", ".join(group), xlabel="tokens", ylabel=what)
            panel.grid(alpha=0.3)
            panel.set_xticks(ticks, [str(t) for t in ticks], minor=False)
        for panel in panels[: 2 if base else 1]:  # an empty panel has no logarithm
            panel.set_yscale("log")
        panels[0].legend(fontsize="small")
    return drawing


def _say_how_fast(panel: Axes, relative: dict[int, float], color: str) -> None:
    """Writes how many times as fast as the default above each point of ours."""
    for tokens, share in relative.items():
        panel.annotate(
            f"{1 / share:.1f} x", (tokens, share), (0, 5), textcoords="offset points",
            ha="center", fontsize="small", color=color,
        )  # fmt: skip


def _names(timings: Iterable[Timing]) -> list[str]:
    return list(dict.fromkeys(t.implementation for t in timings))


def read(file: Path) -> list[Timing]:
    """The rows of a CSV file of `bench block` or `bench lora`.

    Raises:
        ValueError: it is not such a file, or has no rows.
    """
    types = typing.get_type_hints(Timing)

    def value(name: str, text: str) -> Any:
        kind = types[name]
        if kind in (str, int, float):
            return kind(text)
        return float(text) if text else None  # kept_mb and peak_mb, of a backward only

    try:
        with file.open(newline="") as lines:
            rows = [
                Timing(**{f.name: value(f.name, row[f.name]) for f in fields(Timing)})
                for row in csv.DictReader(lines)
            ]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        rows = []
        why = f"has no {error}" if isinstance(error, KeyError) else f"is broken ({error})"
    else:
        why = "has no rows"
    if not rows:
        raise ValueError(f"{file} {why}: a CSV file of bench block or bench lora is read")
    return rows


class Picture(FromFiles):
    """`bench picture`."""

    name = "picture"
    help = "draws --png from CSV files of `block`; measures nothing"
    about = "All rows of all files go into one picture."

    def arguments(self, flag: Flags, old: bool) -> None:
        flag("files", metavar="FILE", nargs="+", type=Path, help="written with --csv")
        add_png(flag, required=True)

    def refuse(self, options: argparse.Namespace) -> None:
        if os.path.realpath(options.png) in map(os.path.realpath, options.files):
            raise ValueError(f"--png {str(options.png)!r} is a file to read: name another")

    def answer(self, options: argparse.Namespace) -> None:
        rows = [row for file in options.files for row in read(file)]
        figure(rows).savefig(options.png, dpi=120)


KIND = Picture()
