"""What `python -m moe_patch bench` shows: a table for each kind of row, and the picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from . import scaling
from .block import OURS, Timing
from .distributed import Measured
from .families import FamilyTiming
from .fp8 import Fp8Timing
from .model import Rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def timing_tables(timings: Iterable[Timing]) -> Iterable[Table]:
    """One for each shape, dtype, mode and number of tokens; a line an implementation."""
    for key, group in itertools.groupby(
        timings, lambda t: (t.shape, t.dtype, t.mode, t.tokens, t.limit_ms)
    ):
        with_memory = key[2].startswith("backward")
        header = ["", "ms", "p10 to p90", "TFLOP/s", "x limit"]
        header += ["kept MB", "peak MB"] * with_memory
        table = Table(
            *header,
            f"{OURS} is",
            title="{}, {}, {}, {} tokens; limit {:.3f} ms".format(*key),
            title_justify="left",
        )
        for t in group:
            cells = [t.implementation, f"{t.ms:.3f}", f"{t.p10:.3f} to {t.p90:.3f}"]
            cells += [f"{t.tflops:.0f}", f"{t.ms / t.limit_ms:.2f}"]
            cells += [f"{t.kept_mb:.1f}", f"{t.peak_mb:.1f}"] if with_memory else []
            cells.append("" if t.implementation == OURS else f"{t.speedup:.2f} x as fast")
            table.add_row(*cells)
        yield table


def rate_tables(rates: Sequence[Rate]) -> Iterable[Table]:
    """Of a whole model, a line a task."""
    for key, group in itertools.groupby(rates, lambda r: (r.model, r.layers)):
        header = ["", "batch", "prompt", "HF tokens/s", "patched tokens/s", "patched is"]
        group = list(group)
        with_memory = any(r.peak_gb is not None for r in group)
        header += ["HF peak GB", "patched peak GB"] * with_memory
        title = "{}, {} layers, random bfloat16 weights".format(*key)
        table = Table(*header, title=title, title_justify="left")
        for r in group:
            cells = [r.task, f"{r.batch}", f"{r.prompt}", f"{r.hf_tokens_s:.4g}"]
            cells += [f"{r.tokens_s:.4g}", f"{r.speedup:.2f} x as fast"]
            cells += [f"{gb:.1f}" for gb in (r.hf_peak_gb, r.peak_gb) if gb is not None]
            table.add_row(*cells)
        yield table


def family_table(timings: Sequence[FamilyTiming]) -> Iterable[Table]:
    """A line a family: how many times as fast as Hugging Face's default."""
    columns = list(dict.fromkeys((t.mode, t.tokens) for t in timings))
    header = (f"{mode} {tokens}" for mode, tokens in columns)
    table = Table("family", "H, I, E, K", *header, title="x as fast as grouped_mm")
    for (family, size), group in itertools.groupby(timings, lambda t: (t.family, t.size)):
        found = {(t.mode, t.tokens): f"{t.speedup:.2f}" for t in group}
        table.add_row(family, size, *(found.get(column, "") for column in columns))
    yield table


def fp8_table(timings: Sequence[Fp8Timing]) -> Iterable[Table]:
    """A line a row and implementation."""
    header = ["", "", "ms", "p10 to p90", "TFLOP/s", "TB/s", f"{OURS} is"]
    table = Table(*header, title="FP8, scales 1x128 and 128x128")
    for t in timings:
        cells = [f"{t.ms:.3f}", f"{t.p10:.3f} to {t.p90:.3f}", f"{t.tflops:.0f}", f"{t.tb_s:.2f}"]
        speedup = "" if t.implementation == OURS else f"{t.speedup:.2f} x as fast"
        table.add_row(t.row, t.implementation, *cells, speedup)
    yield table


def distributed_table(rows: Sequence[Measured]) -> Iterable[Table]:
    """A line a task, patched beside Hugging Face's."""
    header = ("", "HF ms", "patched ms", "HF tokens/s", "patched tokens/s", "patched is")
    first = rows[0]
    title = f"{first.shape}, {first.ranks} ranks, {first.tokens} tokens each, {first.transformers}"
    table = Table(*header, title=title, title_justify="left")
    for r in rows:
        if r.hf_ms is None:
            table.add_row(r.task, "", f"{r.ms:.3f}", "", "", f"{r.gb_s:.0f} GB/s")
            continue
        cells = [f"{r.task}, {r.layers} layers", f"{r.hf_ms:.3f}", f"{r.ms:.3f}"]
        cells += [f"{r.hf_tokens_s:.4g}", f"{r.tokens_s:.4g}", f"{r.speedup:.2f} x as fast"]
        table.add_row(*cells)
    yield table


def scaling_table(rates: scaling.Rates, network_gb_s: float) -> Table:
    """A layer's forward on more GPUs, from measured rates."""
    header = ("", "GPUs", "share experts", "compute ms", "moved MB", "of it to hosts", "comm ms")
    title = (
        f"{rates.shape}, a layer's forward, {rates.tokens} tokens a GPU; rates of {rates.ranks} "
        f"GPUs, {scaling.HOST} a host, {network_gb_s:g} GB/s between hosts (assumed)"
    )
    table = Table(*header, "share", "tokens/s", title=title, title_justify="left")
    for layer in scaling.layers(rates, network_gb_s=network_gb_s):
        cells = [layer.way, f"{layer.ranks}", f"{layer.group}", f"{layer.compute_ms:.3f}"]
        cells += [f"{layer.moved_mb:.1f}", f"{layer.network_mb:.1f}", f"{layer.comm_ms:.3f}"]
        table.add_row(*cells, f"{layer.share:.0%}", f"{layer.tokens_s:.3g}")
    return table


def figure(timings: Sequence[Timing]) -> Figure:
    """A row for each shape, dtype and mode: time and TFLOP/s over tokens, the limit dashed."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    def key(t: Timing) -> tuple[str, str, str]:
        return t.shape, t.dtype, t.mode

    def draw(points: dict[int, tuple[float, float]], axes: Sequence[Any], **style: Any) -> None:
        tokens = sorted(points)
        for axis, which in zip(axes, (0, 1)):
            axis.plot(tokens, [points[t][which] for t in tokens], **style)

    groups = dict.fromkeys(map(key, timings))
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(_names(timings)))}
    drawing = Figure(figsize=(12, 4 * len(groups)), layout="constrained")
    grid = drawing.subplots(len(groups), 2, squeeze=False)
    for group, (left, right) in zip(groups, grid):
        rows = [t for t in timings if key(t) == group]
        for name in dict.fromkeys(_names(rows)):
            points = {t.tokens: (t.ms, t.tflops) for t in rows if t.implementation == name}
            width = 2.5 if name == OURS else 1.2
            draw(points, (left, right), label=name, color=colors[name], lw=width, marker="o", ms=4)
        limit = {t.tokens: (t.limit_ms, t.tflops * t.ms / t.limit_ms) for t in rows}
        draw(limit, (left, right), label="limit", color="black", lw=1, ls="--")
        for axis, what in ((left, "ms"), (right, "TFLOP/s")):
            axis.set_xscale("log", base=2)
            axis.set(title=", ".join(group), xlabel="tokens", ylabel=what)
            axis.grid(alpha=0.3)
            ticks = sorted({t.tokens for t in rows})
            axis.set_xticks(ticks, [str(t) for t in ticks], minor=False)
        left.set_yscale("log")
        left.legend(fontsize="small")
    return drawing


def _names(timings: Iterable[Timing]) -> list[str]:
    return [t.implementation for t in timings]
