"""bench block: one block, ours against Hugging Face's own implementations."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

from ..parity import ParityReport, check_parity
from ..parity.shadow import hugging_face, implementations, shadow
from ..patcher import patch
from ..shapes import Shape, build, find
from ..usage import DTYPES, add_dtype, add_shape, add_tokens
from . import routing as routed
from .kind import Flags, Run, Timed, add_files
from .timing import OURS, Call, Spread, free, need_gpu, ready, rounds, short_of, times

SHAPES = ("qwen3_30b", "llama4_scout")
TOKENS = (1, 64, 1024, 4096)
MODES = ("forward", "backward")
EAGER_TOKENS = {"forward": 16384, "backward": 4096}
"""Above these, Hugging Face's eager and dense code is left out: too slow, or out of memory."""
BATCHED_TOKENS = 64
"""batched_mm copies the weights of every slot: it is for decoding."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call. "backward" is forward and backward, with all gradients."""

    shape: str
    tokens: int
    dtype: str
    mode: str  # "forward" or "backward", or ", graph" after it
    implementation: str
    ms: float
    p10: float
    p90: float
    tflops: float
    speedup: float  # of moe_patch over this one
    limit_ms: float  # what the card's own ceilings allow
    kept_mb: float | None = None  # what a forward leaves for its backward, besides the output
    peak_mb: float | None = None  # most memory in use during a step, beyond what was there
    routing: str = routed.UNIFORM


@dataclass(frozen=True)
class Result:
    """What one row gave. No report: it was skipped, and the note says why."""

    timings: list[Timing]
    report: ParityReport | None
    notes: list[str]


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches on the two plainest jobs."""

    dtype: str
    matmul_tflops: float  # 8192^3
    copy_tb_s: float  # bytes read and bytes written

    def limit_ms(self, shape: Shape, tokens: int, *, backward: bool = False) -> float:
        """No less time than the block's flops or its bytes need; three times that with backward."""
        itemsize = getattr(torch, self.dtype).itemsize
        arithmetic = shape.flops(tokens) / self.matmul_tflops
        traffic = shape.bytes(tokens, itemsize) / self.copy_tb_s
        return max(arithmetic, traffic) / 1e9 * (3 if backward else 1)

    def __str__(self) -> str:
        return (
            f"ceilings of this card, measured: {self.matmul_tflops:.0f} TFLOP/s "
            f"({self.dtype} matmul), {self.copy_tb_s:.2f} TB/s (copy)"
        )


@functools.cache
def ceilings(dtype: torch.dtype) -> Ceilings:
    """Measures the card, once a process: a matmul of 8192^3, a copy of 2 GiB (less if short)."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul_ms = _warm_ms(lambda: torch.matmul(a, b, out=product))
    size = min(1 << 31, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _warm_ms(lambda: target.copy_(source))
    return Ceilings(str(dtype)[6:], 2 * n**3 / matmul_ms / 1e9, 2 * size / copy_ms / 1e9)


def _warm_ms(call: Call, *, warm_up: int = 5, count: int = 20) -> float:
    """The median of calls right behind each other."""
    return statistics.median(rounds({"": call}, warm_up + count, cold=False)[""][warm_up:])


def contenders(
    block: nn.Module, tokens: int, mode: str, *, eager: bool = True, compiled: bool = True
) -> dict[str, nn.Module]:
    """moe_patch and Hugging Face's own, by name; all share the block's weights."""
    ours = shadow(block)
    patch(ours)
    has_grouped = "grouped_mm" in implementations(block)
    names = [n for n in implementations(block) if n == "grouped_mm" or eager]
    names = [n for n in names if n == "grouped_mm" or tokens <= EAGER_TOKENS[mode]]
    if has_grouped and tokens <= BATCHED_TOKENS:
        names.append("batched_mm")
    found = {OURS: ours} | {f"HF {name}": hugging_face(block, name) for name in names}
    if has_grouped and compiled:
        grouped = hugging_face(block, "grouped_mm")
        found["HF grouped_mm + compile"] = torch.compile(grouped, dynamic=False)
    return found


def step(
    block: nn.Module, x: torch.Tensor, d_out: torch.Tensor, mode: str, *routing: torch.Tensor
) -> Call:
    """One call to time; bare experts take (index, weights) as well."""
    leaves = [x, *(r for r in routing if r.is_floating_point())]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    leaves += [p for p in block.parameters() if p.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            block(x, *routing)

    def backward() -> None:
        out = _output(block, x, *routing)
        torch.autograd.grad(out, leaves, d_out.view_as(out))

    return forward if mode == "forward" else backward


def memory(block: nn.Module, x: torch.Tensor, d_out: torch.Tensor) -> tuple[float, float]:
    """(kept_mb, peak_mb) of one step, as in Timing."""
    leaves = [x.requires_grad_(), *(p for p in block.parameters() if p.requires_grad)]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = _output(block, x)
    kept = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
    torch.autograd.grad(out, leaves, d_out.view_as(out))
    return kept / 1e6, (torch.cuda.max_memory_allocated() - before) / 1e6


def _output(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    out = block(*inputs)
    return out[0] if isinstance(out, tuple) else out


def bench(
    shape: str,
    tokens: int,
    *,
    mode: str = "forward",
    dtype: torch.dtype = torch.bfloat16,
    eager: bool = True,
    compiled: bool = True,
    graph: bool = False,
    routing: str = routed.UNIFORM,
    budget_ms: float = 2000.0,
) -> Result:
    """Times one named shape; no times when the parity of the same block does not hold.

    Too little memory for it is a note, not an error. So is what of Hugging Face's does not run.

    Args:
        eager: time Hugging Face's slow loop too.
        compiled: and its grouped_mm under torch.compile.
        graph: time the replay of CUDA graphs.
        routing: which experts tokens choose: "uniform", "zipf", "hot" or a file, as
            `moe_patch.bench.routing` has them. Parity is checked with uniform routing.

    Raises:
        RuntimeError: there is no GPU.
        ValueError: an unknown shape, mode or routing, or a file that does not fit.
    """
    need_gpu()
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: use {' or '.join(MODES)}")
    size, backward = find(shape), mode == "backward"
    routed.check(routing)
    index = None if routing == routed.UNIFORM else routed.choices(routing, size, tokens)
    label = mode + ", graph" * graph
    row = f"{shape}, {tokens} tokens, {str(dtype)[6:]}, {label}"
    notes = []
    if index is not None:
        busiest = routed.load(index, size.num_experts)
        notes.append(f"{row}, {routing} routing: the busiest expert has {busiest:.1f} x the mean")
    torch.compiler.reset()  # or many rows would run into torch.compile's recompile limit
    free()
    try:
        stage = "the card's ceilings"
        limit_ms = ceilings(dtype).limit_ms(size, tokens, backward=backward)
        stage = "the block"
        block = build(size, dtype=dtype, device="cuda")
        stage = "its parity check"
        report = check_parity(block, tokens=tokens, backward=backward)
        if not report.passed:
            return Result([], report, [])
        stage = "its run"
        generator = torch.Generator("cuda").manual_seed(0)
        x, d_out = (
            torch.randn(1, tokens, size.hidden_size, generator=generator, device="cuda").to(dtype)
            for _ in range(2)
        )
        if index is not None:
            routed.impose(block, x, index)
        blocks = contenders(block, tokens, mode, eager=eager, compiled=compiled)
        calls = {name: step(each, x, d_out, mode) for name, each in blocks.items()}
        calls, failed = ready(calls, graph=graph)
        taken = times(calls, budget_ms=budget_ms)
        kept = {name: memory(blocks[name], x, d_out) for name in calls if backward}
    except torch.OutOfMemoryError as error:
        return Result([], None, [f"{row}: skipped, {short_of(error, stage)}"])
    flops = size.flops(tokens, backward=backward)
    about = (shape, tokens, str(dtype)[6:], label)
    timings = packed(about, taken, flops, limit_ms, kept, routing=routing)
    notes += [f"{row}: {name} left out, {why}" for name, why in failed.items()]
    return Result(timings, report, notes)


def packed(
    about: tuple[str, int, str, str], taken: dict[str, Spread], flops: float, limit_ms: float,
    memory: dict[str, tuple[float, float]], *, routing: str = routed.UNIFORM,
) -> list[Timing]:  # fmt: skip
    """A row for each implementation; `about`: shape, tokens, dtype and mode."""
    return [
        Timing(
            *about, name, **vars(spread), tflops=flops / spread.ms / 1e9,
            speedup=spread.ms / taken[OURS].ms, limit_ms=limit_ms,
            **dict(zip(("kept_mb", "peak_mb"), memory.get(name, ()))), routing=routing,
        )
        for name, spread in taken.items()
    ]  # fmt: skip


def timing_tables(timings: Iterable[Timing]) -> Iterable[Table]:
    """One for each shape, dtype, mode and number of tokens; a line an implementation."""
    for key, group in itertools.groupby(
        timings, lambda t: (t.shape, t.dtype, t.mode, t.tokens, t.limit_ms, t.routing)
    ):
        with_memory = key[2].startswith("backward")
        header = ["", "ms", "p10 to p90", "TFLOP/s", "x limit"]
        header += ["kept MB", "peak MB"] * with_memory
        table = Table(
            *header,
            f"{OURS} is",
            title="{}, {}, {}, {} tokens; limit {:.3f} ms".format(*key)
            + ("" if key[5] == routed.UNIFORM else f"; {key[5]} routing"),
            title_justify="left",
        )
        for t in group:
            cells = [t.implementation, f"{t.ms:.3f}", f"{t.p10:.3f} to {t.p90:.3f}"]
            cells += [f"{t.tflops:.0f}", f"{t.ms / t.limit_ms:.2f}"]
            cells += [f"{t.kept_mb:.1f}", f"{t.peak_mb:.1f}"] if with_memory else []
            cells.append("" if t.implementation == OURS else f"{t.speedup:.2f} x as fast")
            table.add_row(*cells)
        yield table


class Block(Timed):
    """`bench block`, and what `bench` times when it is told no kind."""

    name = "block"
    help = "one block: its forward, and its forward and backward"
    about = "Every row comes after its parity check. `bench fp8` has the rows in FP8."

    def arguments(self, flag: Flags, old: bool) -> None:
        add_shape(flag, " ".join(SHAPES))
        add_tokens(flag, TOKENS)
        add_dtype(flag, "bf16", ["fp8"] if old else [])
        text = "of forward, backward (both passes, all gradients); default: both"
        flag("--mode", nargs="+", choices=MODES, metavar="NAME", help=text)
        flag("--graph", action="store_true", help="time CUDA graphs: no launches in the way")
        text = f"of {', '.join(routed.NAMES)}, or a safetensors file with {routed.KEY} [tokens, K]"
        flag("--routing", nargs="+", metavar="NAME", help=f"{text}; default: uniform")
        flag("--no-eager", action="store_true", help="leave out HF's slow loop")
        flag("--no-compile", action="store_true", help="leave out HF under torch.compile")
        add_files(flag, png=True)

    def refuse(self, options: argparse.Namespace) -> None:
        for name, how in itertools.product(options.shape or SHAPES, options.routing or [""]):
            size = find(name)
            if how:
                routed.check(how)
                routed.choices(how, size, 1)

    def measure(self, run: Run) -> ParityReport | None:
        options = run.options
        names = options.shape or SHAPES
        modes = options.mode or MODES
        dtypes = [DTYPES[name] for name in options.dtype or ["bf16"]]
        hows = options.routing or [routed.UNIFORM]
        todo = [*itertools.product(names, dtypes, modes, options.tokens or TOKENS, hows)]
        for name, dtype, mode, tokens, how in run.each(todo, _label):
            result = bench(
                name,
                tokens,
                mode=mode,
                dtype=dtype,
                eager=not options.no_eager,
                compiled=not options.no_compile,
                graph=options.graph,
                routing=how,
            )
            if not take(run, result):
                return result.report
        run.ceilings += ceilings_of(run.rows)
        return None

    tables = staticmethod(timing_tables)


def _label(row: tuple[str, torch.dtype, str, int, str]) -> str:
    name, dtype, mode, tokens, how = row
    return f"{name} {str(dtype)[6:]} {mode} {tokens}" + f" {how}" * (how != routed.UNIFORM)


def take(run: Run, result: Result) -> bool:
    """Adds what a row gave; False when its parity fails."""
    if result.report and not result.report.passed:
        return False
    run.rows += result.timings
    run.notes += result.notes
    return True


def ceilings_of(timings: Iterable[Timing]) -> list[Ceilings]:
    """The card's, once for each dtype of these rows."""
    return [*map(ceilings, dict.fromkeys(getattr(torch, t.dtype) for t in timings))]


KIND = Block()
