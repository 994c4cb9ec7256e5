"""bench fp8: FP8 with block scales. Experts, their training step on frozen weights, grouped GEMMs,
DeepSeek-V3's layer on one rank.

Each row's figures come after its parity: of the same build, on the same tensors, against float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from .. import reference, shapes
from ..compat import scaled_mm
from ..formats.scaled import E4M3
from ..ops import fp8
from ..ops.experts import fused_experts
from ..parity import ParityReport, Section, emulate, environment, law
from ..usage import add_dtype, add_shape, add_tokens
from .kind import Flags, Run, Timed, add_files
from .timing import OURS, captured, free, times

CONTIGUOUS = [(4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 7168, 2048)]  # G, M, N, K
MASKED = [(4, 256, 4096, 7168), (4, 256, 7168, 2048)]
MASKED_ROWS = (64, 128, 192, 256)
STEPS = {"qwen3_30b": (1024, 4096, 6144), "dsv3_ep32": (256, 1024)}  # tokens
LAYER = {"experts": 256, "local": 32, "hidden": 7168, "inner": 2048}
TOKENS = LAYER_TOKENS = (1, 64, 1024, 16384)
BF16, LOOP = "moe_patch bf16", "torch._scaled_mm, a loop"
JUDGED = 128
"""Rows of a group, or tokens, that parity looks at: float64 products are slow."""


@dataclass(frozen=True)
class Fp8Timing:
    """Milliseconds of one call."""

    row: str
    implementation: str
    ms: float
    p10: float
    p90: float
    tflops: float
    tb_s: float  # of the weights that are used, read once
    speedup: float  # of moe_patch over this one


@dataclass
class _Row:
    name: str
    calls: dict[str, Callable[[], object]]
    flops: float
    bytes: float
    judge: Callable[[], list[law.Row]]
    graph: bool = False
    """Whether CUDA graphs of the calls are timed."""
    alone: bool = False
    """Whether each call is timed alone. In turns they share a card's power limit: the one that
    draws less of it waits for a clock that the others have lowered."""


class Operands(NamedTuple):
    """E4m3 rows and weights of G groups, and their scales."""

    lhs: Tensor  # [G * M, K] or [G, M, K]
    lhs_scale: Tensor  # [..., K / 128]
    rhs: Tensor  # [G, N, K]
    rhs_scale: Tensor  # [G, N / 128, K / 128]


class Product(NamedTuple):
    """A grouped product, ours, and the rows of its last group that parity looks at."""

    name: str
    flops: float
    operands: Operands
    groups: Tensor  # int32: offsets [G + 1], or the rows of each group [G] where it is masked
    run: Callable[[], Tensor]  # bfloat16 [G * M, N] or [G, M, N]
    judged: tuple[int | slice, ...]

    @property
    def masked(self) -> bool:
        """Whether each group has room for as many rows. CUDA graphs of it are timed, for which that
        layout exists."""
        return self.groups.numel() == len(self.operands.rhs)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The judged rows: of float32, rounded to bfloat16, and of float64."""
        lhs, lhs_scale, rhs, rhs_scale = self.operands
        rows, scale = lhs[self.judged], lhs_scale[self.judged]
        baseline, truth = (
            reference.dequantize(rows, scale, dtype)
            @ reference.dequantize(rhs[-1], rhs_scale[-1], dtype).T
            for dtype in (torch.float32, torch.float64)
        )
        return baseline.bfloat16(), truth


def rows(shape: str, tokens: tuple[int, ...]) -> Iterator[_Row]:
    """What is timed: `shape`'s experts at these tokens, then the rows of fixed sizes."""
    size = shapes.find(shape)
    for count in tokens:
        yield _experts(shape, size, count)
    for name, counts in STEPS.items():
        for count in counts:
            yield _step(name, shapes.find(name), count)
    for sizes in CONTIGUOUS:
        yield _contiguous(*sizes)
    for sizes in MASKED:
        for count in MASKED_ROWS:
            yield masked(*sizes, count)
    for count in LAYER_TOKENS:
        yield _layer(count)


def bench_fp8(row: _Row, *, budget_ms: float = 400.0) -> list[Fp8Timing] | ParityReport:
    """Times of one row; the report when its parity does not hold."""
    free()
    judged = row.judge()
    if not (judged and all(each.passed for each in judged)):
        return ParityReport([Section(row.name, "float8_e4m3fn", 0, judged)], environment("cuda"))
    for name, call in list(row.calls.items()):
        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError):
            if name == OURS:
                raise
            del row.calls[name]  # a peer that does not run here
    calls = {name: captured(call) if row.graph else call for name, call in row.calls.items()}
    apart = [{name: call} for name, call in calls.items()] if row.alone else [calls]
    taken = {}
    for together in apart:
        taken |= times(together, budget_ms=budget_ms)
    return [
        Fp8Timing(
            row.name, name, **vars(spread), tflops=row.flops / spread.ms / 1e9,
            tb_s=row.bytes / spread.ms / 1e9, speedup=spread.ms / taken[OURS].ms,
        )
        for name, spread in taken.items()
    ]  # fmt: skip


def weights(groups: int, n: int, k: int, *, seed: int, std: float = 0.02) -> tuple[Tensor, Tensor]:
    """Random e4m3 [G, N, K] and their scales, a group at a time."""
    draw = torch.Generator("cuda").manual_seed(seed)
    q = torch.empty(groups, n, k, dtype=E4M3, device="cuda")
    scale = torch.empty(groups, n // 128, k // 128, device="cuda")
    for g in range(groups):
        weight = torch.randn(1, n, k, generator=draw, device="cuda") * std
        q[g : g + 1], scale[g : g + 1] = reference.quantize_weight(weight)
    return q, scale


def _verdict(name: str, ours: Tensor, baseline: Tensor, truth: Tensor) -> law.Row:
    return law.judge(name, ours, [baseline], truth, dtype=torch.bfloat16)


Stored = tuple[Tensor, Tensor, Tensor, Tensor]
"""E4m3 of gate_up and its scales, of down and its scales."""


class _Inputs(NamedTuple):
    """Tokens of a shape's experts."""

    x: Tensor  # [T, H]
    index: Tensor  # [T, K]
    weight: Tensor  # [T, K]
    stored: Stored
    wide: list[Tensor]  # what is stored, in bfloat16
    d_out: Tensor  # [T, H]

    def ours(self) -> Tensor:
        """Ours, on FP8 weights."""
        up, up_scale, down, down_scale = self.stored
        return fused_experts(
            self.x, up, down, self.index, self.weight,
            gate_up_scale_inv=up_scale, down_scale_inv=down_scale,
        )  # fmt: skip

    def in_bf16(self) -> Tensor:
        """Ours, on bfloat16 weights."""
        return fused_experts(self.x, *self.wide, self.index, self.weight)


def _inputs(size: shapes.Shape, tokens: int) -> _Inputs:
    experts, hidden, inner, top_k = (
        size.num_experts, size.hidden_size, size.intermediate_size, size.top_k,
    )  # fmt: skip
    up, up_scale = weights(experts, 2 * inner, hidden, seed=1)
    down, down_scale = weights(experts, hidden, inner, seed=2)
    draw = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(tokens, hidden, generator=draw, device="cuda").bfloat16()
    logits = torch.randn(tokens, experts, generator=draw, device="cuda")
    weight, index = logits.softmax(-1).topk(top_k)
    weight = (weight / weight.sum(-1, keepdim=True)).bfloat16()
    wide = [
        torch.stack([reference.dequantize(*pair).bfloat16() for pair in zip(q, s)])
        for q, s in ((up, up_scale), (down, down_scale))
    ]

    d_out = torch.randn(tokens, hidden, generator=draw, device="cuda").bfloat16()
    return _Inputs(x, index, weight, (up, up_scale, down, down_scale), wide, d_out)


def _experts(name: str, size: shapes.Shape, tokens: int) -> _Row:
    given = _inputs(size, tokens)

    def judge() -> list[law.Row]:
        ours = given.ours()
        return [_judge_experts(ours, given.x, None, given.stored, given.index, given.weight)]

    return _Row(
        f"{name} experts, {tokens} tokens", {OURS: given.ours, BF16: given.in_bf16},
        size.flops(tokens), size.bytes(tokens, 1), judge,
    )  # fmt: skip


def _step(name: str, size: shapes.Shape, tokens: int) -> _Row:
    """Forward, and gradients to the rows and to the routing weights."""
    given = _inputs(size, tokens)
    leaves = given.x.requires_grad_(), given.weight.requires_grad_()

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(given.ours(), leaves, given.d_out)

    def in_bf16() -> tuple[Tensor, ...]:
        return torch.autograd.grad(given.in_bf16(), leaves, given.d_out)

    def judge() -> list[law.Row]:
        return _judge_gradients(*ours(), given)

    return _Row(
        f"{name} step on frozen weights, {tokens} tokens, graph", {OURS: ours, BF16: in_bf16},
        2 * size.flops(tokens), 2 * size.bytes(tokens, 1), judge, graph=True, alone=True,
    )  # fmt: skip


def _as_hf(x: Tensor, stored: Stored, index: Tensor, weight: Tensor) -> Tensor:
    """Hugging Face's way in PyTorch, of float32 rows: both activations are quantised."""
    up, up_scale, down, down_scale = stored
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        token, choice = torch.where(index == expert)
        rows = emulate.fp8_linear(x[token], up[expert], up_scale[expert]).bfloat16()
        rows = emulate.fp8_linear(reference.glu(rows), down[expert], down_scale[expert])
        out = out.index_add(0, token, rows * weight[token, choice, None].float())
    return out.bfloat16()


def _exact(x: Tensor, stored: Stored, index: Tensor, weight: Tensor) -> Tensor:
    """Experts in float64, with activations that are not quantised."""
    up, up_scale, down, down_scale = stored
    return reference.fp8_experts(
        x, up, down, index, weight, up_scale, down_scale, dtype=torch.float64, requantize=False
    )


def _judge_experts(
    ours: Tensor, x: Tensor, x_scale: Tensor | None,
    stored: Stored, index: Tensor, weight: Tensor,
) -> law.Row:  # fmt: skip
    """The first tokens' output."""
    few = slice(0, JUDGED)
    wide = x[few].float() if x_scale is None else reference.dequantize(x[few], x_scale[few])
    given = wide, stored, index[few], weight[few]
    return _verdict("out", ours[few], _as_hf(*given), _exact(*given))


def _judge_gradients(d_x: Tensor, d_weight: Tensor, given: _Inputs) -> list[law.Row]:
    """The first tokens' gradients to their rows and to their routing weights."""
    few = slice(0, JUDGED)

    def gradients(experts: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t[few].detach().to(dtype).requires_grad_() for t in (given.x, given.weight)]
        out = experts(leaves[0], given.stored, given.index[few], leaves[1])
        return torch.autograd.grad(out, leaves, given.d_out[few].to(out.dtype))

    found = (d_x, d_weight), gradients(_as_hf, torch.float32), gradients(_exact, torch.float64)
    return [
        _verdict(name, ours[few], hf.bfloat16(), exact)
        for name, ours, hf, exact in zip(("d_x", "d_top_k_weights"), *found)
    ]


def operands(groups: int, m: int, n: int, k: int) -> Operands:
    """Random rows, m of each group, and weights."""
    rhs, rhs_scale = weights(groups, n, k, seed=1)  # [G, N, K], [G, N / 128, K / 128]
    draw = torch.Generator("cuda").manual_seed(2)
    lhs = torch.randn(groups * m, k, generator=draw, device="cuda").bfloat16()
    return Operands(*fp8.quantize(lhs), rhs, rhs_scale)


def contiguous_product(groups: int, m: int, n: int, k: int) -> Product:
    """A product of groups of m rows each, one below the other."""
    of = operands(groups, m, n, k)
    offsets = torch.arange(groups + 1, device="cuda", dtype=torch.int32) * m
    return Product(
        f"contiguous {groups} x {m} x {n} x {k}", 2.0 * groups * m * n * k, of, offsets,
        lambda: fp8.grouped_gemm(*of, offsets),
        (slice((groups - 1) * m, (groups - 1) * m + JUDGED),),
    )  # fmt: skip


def masked_product(groups: int, m_max: int, n: int, k: int, count: int) -> Product:
    """A product of groups that have `count` rows of m_max each."""
    lhs, lhs_scale, *rhs = operands(groups, m_max, n, k)
    of = Operands(lhs.view(groups, m_max, k), lhs_scale.reshape(groups, m_max, -1), *rhs)
    masked_m = torch.full((groups,), count, dtype=torch.int32, device="cuda")
    out = torch.empty(groups, m_max, n, dtype=torch.bfloat16, device="cuda")
    return Product(
        f"masked {groups} x {count} of {m_max} x {n} x {k}, graph", 2.0 * groups * count * n * k,
        of, masked_m, lambda: fp8.masked_grouped_gemm(*of, masked_m, count, out=out),
        (-1, slice(0, count)),
    )  # fmt: skip


def _row(product: Product, others: dict[str, Callable[[], object]]) -> _Row:
    def judge() -> list[law.Row]:
        return [_verdict("out", product.run()[product.judged], *product.expected())]

    calls = {OURS: product.run} | others
    weights = product.operands.rhs.numel()
    return _Row(product.name, calls, product.flops, weights, judge, graph=product.masked)


def _contiguous(groups: int, m: int, n: int, k: int) -> _Row:
    product = contiguous_product(groups, m, n, k)
    lhs, lhs_scale, rhs, rhs_scale = product.operands
    apart = [
        (part, scale.t().contiguous().t()) for part, scale in zip(lhs.split(m), lhs_scale.split(m))
    ]

    def loop() -> list[Tensor]:
        return [
            scaled_mm(x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16)
            for (x, x_scale), w, w_scale in zip(apart, rhs, rhs_scale)
        ]

    return _row(product, {LOOP: loop} if scaled_mm else {})


def masked(groups: int, m_max: int, n: int, k: int, count: int) -> _Row:
    """A product of groups that have `count` rows of m_max each."""
    return _row(masked_product(groups, m_max, n, k, count), {})


def _layer(tokens: int) -> _Row:
    experts, local, hidden, inner = LAYER.values()
    stored = (
        *weights(local, 2 * inner, hidden, seed=1),
        *weights(local, hidden, inner, seed=2),
    )
    draw = torch.Generator("cuda").manual_seed(3)
    x, scale = fp8.quantize(torch.randn(tokens, hidden, generator=draw, device="cuda").bfloat16())
    logits = torch.randn(tokens, experts, generator=draw, device="cuda")
    bias = torch.randn(experts, generator=draw, device="cuda") * 0.1
    index, weight = reference.select_experts(
        logits, 8, score="sigmoid", renormalize=True, scale=2.5, eps=1e-20, bias=bias,
        num_groups=8, top_groups=4,
    )  # fmt: skip
    first = int(index[0, 0]) // local * local  # a single token has work here, too
    index = index - first
    here = (index >= 0) & (index < local)

    def ours() -> Tensor:
        return fp8.moe(x, scale, logits, *stored, correction_bias=bias, local_expert_offset=first)

    def judge() -> list[law.Row]:
        return [_judge_experts(ours(), x, scale, stored, index, weight)]

    slots, used = int(here.sum()), len(index[here].unique())
    return _Row(
        f"DeepSeek-V3 layer, {local} of {experts} experts, {tokens} tokens", {OURS: ours},
        6.0 * slots * hidden * inner, 3.0 * used * hidden * inner, judge,
    )  # fmt: skip


def fp8_table(timings: Sequence[Fp8Timing]) -> Iterable[Table]:
    """A line a row and implementation."""
    header = ["", "", "ms", "p10 to p90", "TFLOP/s", "TB/s", f"{OURS} is"]
    table = Table(*header, title="FP8, scales 1x128 and 128x128")
    for t in timings:
        cells = [f"{t.ms:.3f}", f"{t.p10:.3f} to {t.p90:.3f}", f"{t.tflops:.0f}", f"{t.tb_s:.2f}"]
        speedup = "" if t.implementation == OURS else f"{t.speedup:.2f} x as fast"
        table.add_row(t.row, t.implementation, *cells, speedup)
    yield table


class Fp8(Timed):
    """`bench fp8`."""

    name = "fp8"
    help = "FP8, block scales: experts, grouped GEMMs, DeepSeek-V3's layer"
    about = "The experts of one shape; the other rows have fixed sizes. Parity comes first in each."
    switch, does = "--dtype fp8", "has rows of its own"

    def arguments(self, flag: Flags, old: bool) -> None:
        add_shape(flag, "dsv3_ep32; one")
        add_tokens(flag, TOKENS)
        add_files(flag)
        if old:
            add_dtype(flag, "bf16", ["fp8"])

    def chosen(self, options: argparse.Namespace) -> bool:
        return "fp8" in (options.dtype or ())

    def refuse(self, options: argparse.Namespace) -> None:
        for name in options.shape:
            shapes.find(name)
        if len(getattr(options, "dtype", None) or ()) > 1 or len(options.shape) > 1:
            raise ValueError(self.takes_no("other dtype and no second shape"))

    def measure(self, run: Run) -> ParityReport | None:
        shape = (run.options.shape or ["dsv3_ep32"])[0]
        todo = rows(shape, tuple(run.options.tokens or TOKENS))
        for row in run.each(todo, lambda row: row.name):
            found = bench_fp8(row)
            if isinstance(found, ParityReport):
                return found
            run.rows += found
            run.keep()
        return None

    tables = staticmethod(fp8_table)


KIND = Fp8()
