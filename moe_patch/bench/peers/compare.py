"""One row of `bench peers`: our call and a peer's, judged on the same tensors, then timed."""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parity import ParityReport, Section, environment, law
from ...shapes import Shape
from .. import routing as routed
from ..timing import OURS, Call, captured, first_line, free, rounds, short_of, times

Outputs = dict[str, Tensor]
"""Tensors of one call, by their names in the report of parity."""


@dataclass(frozen=True)
class PeerTiming:
    """Milliseconds of one call, and its error."""

    case: str
    row: str
    implementation: str
    configuration: str  # the fastest that was tried, "" where there is no choice
    ms: float
    p10: float
    p90: float
    tflops: float
    error: float | None  # rms, relative to the float64 truth's; None: NaN, inf or another shape
    speedup: float  # of moe_patch over this one


@dataclass(frozen=True)
class Case:
    """A block's experts at one number of tokens, and which of them tokens choose."""

    shape: str
    size: Shape
    tokens: int
    routing: str
    index: Tensor  # [T, K] int64, on the CPU

    @property
    def label(self) -> str:
        """Name in tables and notes."""
        how = "" if self.routing == routed.UNIFORM else f", {self.routing} routing"
        return f"{self.shape}, {self.tokens} tokens{how}"


class Part(NamedTuple):
    """Truth of an output, or of a part of it."""

    tensor: str
    where: Any
    """Index of the part; a number is an expert, whose weight gradient the part is."""
    baseline: Tensor
    """PyTorch's, in the dtype under test."""
    truth: Tensor
    """The same in float64."""


@dataclass(frozen=True)
class Contender:
    """An implementation: its call in each of its configurations."""

    calls: dict[str, Call]
    read: Callable[[Any], Outputs]
    """Outputs, out of what a call returns."""


@dataclass(frozen=True)
class Comparison:
    """One row, before it is judged and timed."""

    case: str
    name: str
    flops: float
    ours: Contender
    theirs: Callable[[], Contender]
    """Builds the peer's side; whatever it raises is a note."""
    parts: Callable[[], Iterable[Part]]
    dtype: torch.dtype
    counts: list[int] | None = None
    """Tokens of each expert, where outputs are weight gradients."""
    graph: bool = False
    """Whether CUDA graphs of the calls are timed."""

    @property
    def label(self) -> str:
        """Name in notes."""
        return f"{self.case}, {self.name}"


@dataclass(frozen=True)
class Compared:
    """Outcome of one row. With a report, parity fails and there are no times."""

    timings: list[PeerTiming] = field(default_factory=list)
    report: ParityReport | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Peer:
    """A library that computes what moe_patch does."""

    name: str
    package: str  # what is imported
    install: str
    compared: Callable[[Case, float], Iterator[Compared]]
    """Rows of one case; the seconds are for the configurations that a row tries."""
    fixed: bool = False
    """Whether its rows have sizes of their own, whatever the case."""


class LostDevice(RuntimeError):
    """The GPU does not answer any more: a peer's kernel has failed on it."""


def compare(row: Comparison, peer: str, *, seconds: float, budget_ms: float = 400.0) -> Compared:
    """Judges and times one row.

    Args:
        peer: its name.
        seconds: how long configurations of the peer may be tried.
        budget_ms: how long both are timed.

    Raises:
        LostDevice: a kernel of the peer has failed, and took the GPU with it.
    """
    ours = next(iter(row.ours.calls.values()))
    outputs = {OURS: row.ours.read(ours())}
    calls, configurations, notes = {OURS: ours}, {OURS: ""}, []
    try:
        theirs = row.theirs()
        best, notes = _fastest(theirs.calls, seconds)
        outputs[peer] = theirs.read(theirs.calls[best]())
        calls[peer], configurations[peer] = theirs.calls[best], best
    except LostDevice:
        raise
    except Exception as error:  # whatever a peer raises
        alive(error)
        notes = [f"left out, {why(error)}"]
    notes = [f"{row.label}: {peer} {note}" for note in notes]
    judged, errors = judge(outputs, row.parts(), row.dtype, row.counts)
    del outputs
    if not all(each.passed for each in judged):
        section = Section(row.label, str(row.dtype)[6:], 0, judged)
        return Compared([], ParityReport([section], environment("cuda")), notes)
    free()
    if row.graph:
        calls = {name: captured(call) for name, call in calls.items()}
    taken = times(calls, budget_ms=budget_ms)
    timings = [
        PeerTiming(
            row.case, row.name, name, configurations[name], **vars(spread),
            tflops=row.flops / spread.ms / 1e9, error=errors[name],
            speedup=spread.ms / taken[OURS].ms,
        )
        for name, spread in taken.items()
    ]  # fmt: skip
    return Compared(timings, None, notes)


def judge(
    outputs: dict[str, Outputs],
    parts: Iterable[Part],
    dtype: torch.dtype,
    counts: list[int] | None = None,
) -> tuple[list[law.Row], dict[str, float | None]]:
    """The parity law on our outputs; the largest relative rms error of each implementation.

    Args:
        outputs: of each implementation.
        parts: of all outputs, those of weight gradients in the order of experts.
        dtype: the one under test.
        counts: tokens of each expert, for weight gradients.
    """
    found: dict[str, dict[str, list[law.Errors]]] = {}
    gradients, wrong = set(), set()
    for part in parts:
        of = found.setdefault(part.tensor, {name: [] for name in outputs})
        expert = isinstance(part.where, int)
        if expert:
            gradients.add(part.tensor)
        at = (part.where,) if expert else ()
        for name, tensors in outputs.items():
            mine = tensors[part.tensor][part.where]
            if name != OURS and mine.shape != part.truth.shape:
                wrong.add(name)
                continue
            if name == OURS and expert and counts is not None and not counts[part.where]:
                of[name].append(law.measure_unused(mine, part.where))
                continue
            baselines = [part.baseline] if name == OURS else []
            errors = law.measure(mine, baselines, part.truth, at=at)
            if errors.count < part.truth.numel():
                wrong.add(name)
            of[name].append(errors)
    rows = [
        law.row(tensor, of[OURS], dtype, counts=counts if tensor in gradients else None)
        for tensor, of in found.items()
    ]
    return rows, {
        name: None if name in wrong else max(_relative(of[name]) for of in found.values())
        for name in outputs
    }


def _relative(parts: list[law.Errors]) -> float:
    """The rms error over the truth's rms, as a row of parity has it."""
    total = reduce(add, parts)
    truth = total.rms(total.truth_square)
    return total.rms(total.square[0]) / truth if truth else math.inf


def _fastest(calls: dict[str, Call], seconds: float) -> tuple[str, list[str]]:
    """The name of the fastest call, and what to note about those that were not tried or failed.

    Raises what the first one raised where none works.
    """
    found, failed, begin = {}, [], time.perf_counter()
    for name, call in calls.items():
        if (found or failed) and time.perf_counter() - begin > seconds:
            break
        try:
            call()
            found[name] = statistics.median(rounds({name: call}, 10)[name])
        except Exception as error:  # whatever a peer raises
            alive(error)
            failed.append(error)
    if not found:
        raise failed[0]
    notes = []
    tried = len(found) + len(failed)
    if tried < len(calls):
        notes.append(f"tried {tried} of {len(calls)} configurations in {seconds:.0f} seconds")
    if failed:
        notes.append(f"failed in {len(failed)} configurations, {why(failed[0])}")
    return min(found, key=lambda name: found[name]), notes


def alive(error: Exception) -> None:
    """Raises LostDevice if the GPU does not answer after this error."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as lost:
        raise LostDevice(f"the GPU is lost after {why(error)}") from lost


def why(error: Exception) -> str:
    """Return what a peer raised, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return short_of(error)
    return textwrap.shorten(f"{type(error).__name__}: {first_line(error)}", 200)
