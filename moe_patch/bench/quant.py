"""bench quant: one block's experts with weights in 4 bits, beside their bfloat16 and a way without
such kernels, which writes all weights out in bfloat16 and takes Hugging Face's grouped_mm.

Every format's parity comes first: its output, and in a step the gradient of its rows, against
float64 of what the codes stand for.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from .. import kernels, reference
from ..formats.packed import FORMATS, Packed, quantize
from ..ops import fused_experts
from ..parity import ParityReport, Section, environment, law
from ..parity.shadow import hugging_face
from ..shapes import Shape, build
from ..usage import add_shape, add_tokens, positive
from .kind import Flags, Run, Timed, add_files
from .lora import supported
from .timing import OURS, Call, free, ready, short_of, times

SHAPE = "qwen3_30b"
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
STEP_TOKENS = 8192
RANK = 16
FORWARD, STEP = "forward, graph", "step, LoRA"
PLAIN = f"{OURS} bfloat16"
WRITTEN_OUT = "{} written out, HF grouped_mm"
JUDGED = 128
"""Tokens that parity looks at: float64 products are slow."""

Weights = tuple[Tensor | Packed, Tensor | Packed]
"""[E, 2I, H] and [E, H, I]."""
LowRanks = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class QuantTiming:
    """Milliseconds of one call, and its errors."""

    shape: str
    tokens: int
    mode: str  # FORWARD, or STEP: forward and backward of frozen experts with adapters
    implementation: str
    ms: float
    p10: float
    p90: float
    tflops: float
    speedup: float  # over moe_patch with bfloat16 weights
    weights_mb: float
    error: float | None  # rms, relative, against float64 of the same weights; None: not judged
    lost: float | None  # the same against float64 of the weights before they were quantised


class Batch(NamedTuple):
    """Inputs of the experts, but for their weights."""

    x: Tensor  # [T, H]
    index: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    d_out: Tensor  # [T, H]
    low_rank: LowRanks

    def first(self, tokens: int) -> Batch:
        """Return the batch of the first so many tokens."""
        return Batch(*(each[:tokens] for each in self[:4]), self.low_rank)


def batch(size: Shape, tokens: int, rank: int, seed: int = 3) -> Batch:
    """Random rows and even routing; adapters if there is a rank."""
    draw = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw, device="cuda").bfloat16()

    x, d_out = normal(tokens, size.hidden_size), normal(tokens, size.hidden_size)
    scores = torch.rand(tokens, size.num_experts, generator=draw, device="cuda")
    weights, index = scores.topk(size.top_k)
    low_rank: LowRanks = {}
    if rank:
        experts, hidden, inner = size.num_experts, size.hidden_size, size.intermediate_size
        for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            pair = normal(experts, rank, k) * 0.05, normal(experts, n, rank) * 0.05
            low_rank[f"{name}_low_rank"] = pair[0].requires_grad_(), pair[1].requires_grad_()
    return Batch(x, index, weights.bfloat16(), d_out, low_rank)


def results(experts: Callable[..., Tensor], weights: Weights, given: Batch) -> dict[str, Tensor]:
    """The output [T, H], and, with adapters, the gradient of the rows."""
    x = given.x.detach().requires_grad_(bool(given.low_rank))
    out = experts(x, *weights, given.index, given.weights, **given.low_rank)
    found = {"output": out.detach()}
    if given.low_rank:
        found["d_hidden_states"] = torch.autograd.grad(out, x, given.d_out.to(out.dtype))[0]
    return found


def exactly(weights: Weights, given: Batch) -> dict[str, Tensor]:
    """`results` in float64."""
    wide = [w if isinstance(w, Packed) else w.double() for w in weights]
    low_rank = {
        name: (pair[0].detach().double(), pair[1].detach().double())
        for name, pair in given.low_rank.items()
    }
    exact = given._replace(
        x=given.x.double(), weights=given.weights.double(), d_out=given.d_out.double(),
        low_rank=low_rank,
    )  # fmt: skip
    return results(reference.fused_experts, (wide[0], wide[1]), exact)


class Judged(NamedTuple):
    """Rows of the parity law, and the largest relative rms error of a tensor."""

    rows: list[law.Row]
    error: float
    lost: float


def judge(weights: Weights, before: dict[str, Tensor], given: Batch) -> Judged:
    """Our result on all tokens; its first ones beside PyTorch's in the same dtype. `before`:
    `exactly` of those, with the weights before they were quantised."""
    few = given.first(JUDGED)
    ours = {n: t[:JUDGED] for n, t in results(fused_experts, weights, given).items()}
    theirs, truth = results(reference.fused_experts, weights, few), exactly(weights, few)
    rows = [law.judge(n, ours[n], [theirs[n]], truth[n], dtype=given.x.dtype) for n in truth]
    error = max(_relative(ours[n], truth[n]) for n in truth)
    return Judged(rows, error, max(_relative(ours[n], before[n]) for n in truth))


def _relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def megabytes(weights: Weights) -> float:
    """Return the size of both, with their scales and zero points."""
    tensors = [
        tensor
        for weight in weights
        for tensor in (
            (weight.codes, weight.scales, weight.zeros) if isinstance(weight, Packed) else (weight,)
        )
    ]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None) / 1e6


def calls_of(mode: str, weights: dict[str, Weights], size: Shape, given: Batch) -> dict[str, Call]:
    """A call for each name; for a forward also the weights written out, and grouped_mm."""

    def run(pair: Weights) -> Call:
        def forward() -> None:
            with torch.no_grad():
                fused_experts(given.x, *pair, given.index, given.weights)

        leaves = [given.x, *itertools.chain(*given.low_rank.values())]

        def step() -> None:
            out = fused_experts(given.x, *pair, given.index, given.weights, **given.low_rank)
            torch.autograd.grad(out, leaves, given.d_out)

        return forward if mode == FORWARD else step

    found = {name: run(pair) for name, pair in weights.items()}
    packed = [(n, p) for n, p in weights.items() if isinstance(p[0], Packed)]
    if mode == FORWARD and packed:
        name, pair = packed[0]
        found[WRITTEN_OUT.format(name.removeprefix(f"{OURS} "))] = _written_out(pair, size, given)
    return found


def _written_out(pair: Weights, size: Shape, given: Batch) -> Call:
    block = build(size, dtype=torch.bfloat16, device="cuda")
    experts = hugging_face(block, "grouped_mm").experts

    def call() -> None:
        with torch.no_grad():
            kernels.dequantize.dequantize(pair[0], None, experts.gate_up_proj)
            kernels.dequantize.dequantize(pair[1], None, experts.down_proj)
            experts(given.x, given.index, given.weights)

    return call


def bench_quant(
    shape: str, tokens: int, formats: Sequence[str], *, mode: str = FORWARD, rank: int = RANK,
    budget_ms: float = 1000.0,
) -> tuple[list[QuantTiming], ParityReport | None, list[str]]:  # fmt: skip
    """Times one named shape: (timings, the report where parity fails, notes).

    Raises:
        ValueError: an unknown shape, or Llama4's, whose experts HF computes densely.
    """
    size = supported(shape, Quant.switch)
    free()
    block = build(size, dtype=torch.bfloat16, device="cuda")
    experts = block.experts
    plain: Weights = experts.gate_up_proj.detach(), experts.down_proj.detach()
    del block, experts
    given = batch(size, tokens, rank if mode == STEP else 0)
    weights: dict[str, Weights] = {PLAIN: plain}
    judged: dict[str, Judged] = {}
    before = exactly(plain, given.first(JUDGED))
    for format in formats:
        name = f"{OURS} {format}"
        weights[name] = quantize(plain[0], format), quantize(plain[1], format)
        judged[name] = judge(weights[name], before, given)
        if not all(row.passed for row in judged[name].rows):
            section = Section(f"{shape} in {format}", "bfloat16", tokens, judged[name].rows)
            return [], ParityReport([section], environment("cuda"), []), []
    if mode == STEP:
        given = given._replace(x=given.x.requires_grad_())
    calls, failed = ready(calls_of(mode, weights, size, given), graph=mode == FORWARD)
    taken = times(calls, budget_ms=budget_ms)
    flops = size.flops(tokens) * (1 if mode == FORWARD else 2)
    label = mode if mode == FORWARD else f"{mode} of rank {rank}"
    timings = [
        QuantTiming(
            shape, tokens, label, name, **vars(spread), tflops=flops / spread.ms / 1e9,
            speedup=taken[PLAIN].ms / spread.ms,
            weights_mb=megabytes(weights[name]) if name in weights else megabytes(plain),
            error=judged[name].error if name in judged else None,
            lost=judged[name].lost if name in judged else None,
        )
        for name, spread in taken.items()
    ]  # fmt: skip
    notes = [f"{shape}, {tokens} tokens: {name} left out, {why}" for name, why in failed.items()]
    return timings, None, notes


def quant_tables(timings: Iterable[QuantTiming]) -> Iterable[Table]:
    """One for each shape, mode and number of tokens; a line an implementation."""
    header = ["", "ms", "p10 to p90", "TFLOP/s", "weights MB", "error", "lost", "x bfloat16"]
    for key, group in itertools.groupby(timings, lambda t: (t.shape, t.mode, t.tokens)):
        table = Table(*header, title="{}, {}, {} tokens".format(*key), title_justify="left")
        for t in group:
            errors = ["" if e is None else f"{e:.1e}" for e in (t.error, t.lost)]
            cells = [f"{t.ms:.4f}", f"{t.p10:.4f} to {t.p90:.4f}", f"{t.tflops:.0f}"]
            cells += [f"{t.weights_mb:.0f}", *errors, f"{t.speedup:.2f}"]
            table.add_row(t.implementation, *cells)
        yield table


class Quant(Timed):
    """`bench quant`."""

    name = "quant"
    help = "experts in 4 bits beside bfloat16, with what quantisation loses"
    about = (
        "Forwards in CUDA graphs, and steps of frozen experts with adapters. `lost` is the error "
        "against the weights before they were quantised."
    )
    switch, does = "--quant", "times weights in 4 bits"

    def arguments(self, flag: Flags, old: bool) -> None:
        if old:
            flag("--quant", action="store_true")
        add_shape(flag, SHAPE)
        add_tokens(flag, TOKENS)
        text = f"of {', '.join(FORMATS)}; default: all"
        flag("--format", nargs="+", choices=FORMATS, metavar="NAME", help=text)
        text = f"tokens of a step, 0: no step; default: {STEP_TOKENS}"
        flag("--step-tokens", type=int, metavar="N", help=text)
        if not old:
            flag("--rank", type=positive, metavar="R", help=f"of its adapters; default: {RANK}")
        add_files(flag)

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.quant

    def refuse(self, options: argparse.Namespace) -> None:
        for name in options.shape or [SHAPE]:
            supported(name, self.switch)
        if options.step_tokens is not None and options.step_tokens < 0:
            raise ValueError(f"--step-tokens {options.step_tokens}: 0 or more is needed")

    def measure(self, run: Run) -> ParityReport | None:
        options = run.options
        step = STEP_TOKENS if options.step_tokens is None else options.step_tokens
        modes = [(FORWARD, tokens) for tokens in options.tokens or TOKENS]
        modes += [(STEP, step)] if step else []
        todo = [*itertools.product(options.shape or [SHAPE], modes)]
        for shape, (mode, tokens) in run.each(
            todo, lambda row: f"{row[0]} {row[1][0]} {row[1][1]}"
        ):
            formats, rank = options.format or [*FORMATS], options.rank or RANK
            try:
                found, report, notes = bench_quant(shape, tokens, formats, mode=mode, rank=rank)
            except torch.OutOfMemoryError as error:
                found, report = [], None
                notes = [f"{shape}, {mode}, {tokens} tokens: skipped, {short_of(error)}"]
            if report:
                return report
            run.rows += found
            run.notes += notes
            run.keep()
        return None

    tables = staticmethod(quant_tables)


KIND = Quant()
