"""Times of every family's experts at its default configuration's size, against HF's default.

The experts alone, with random routing, bfloat16: the sanity check that no family gets slower.
Parity is judged before, on eight of the experts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from . import support
from .bench import MODES, OURS, free, short_of, step, times
from .parity import ParityReport, check_parity
from .patcher import patch
from .shadow import hugging_face, logical, projections, shadow

TOKENS = (1, 64, 4096)
HF = "HF grouped_mm"
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
    "moe_topk", "moe_k", "moe_top_k", "num_selected_experts", "top_k",
)  # fmt: skip


@dataclass(frozen=True)
class FamilyTiming:
    """Medians of one family's experts; "backward" is forward and backward, all gradients."""

    family: str
    experts: str
    size: str  # H, I, E and K
    tokens: int
    mode: str
    ms: float
    hf_ms: float
    speedup: float


def rows() -> list[support.Support]:
    """The families to time: those that are fused, but for Llama4, whose block `bench` times."""
    return [one for one in support.families() if one.fused and one.family != "llama4"]


def bench_family(
    one: support.Support,
    tokens: tuple[int, ...] = TOKENS,
    *,
    budget_ms: float = 150.0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> list[FamilyTiming] | ParityReport | str:
    """Times of one family; a report when its parity does not hold, a note when it cannot be run.

    Raises:
        RuntimeError: there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("bench needs a GPU: times of Triton's interpreter would mean nothing")
    free()
    experts = support.build(one)
    top_k = experts and _top_k(experts.config)
    if not top_k:
        return f"{one.family}: left out, its default configuration has no experts of a known size"
    try:
        experts = experts.to(dtype).to_empty(device=device).eval()
        draw = torch.Generator(device).manual_seed(0)
        for parameter in experts.parameters():
            parameter.data.normal_(0, 0.02, generator=draw)
        report = check_parity(_first(experts), tokens=64)
        if not report.passed:
            return report
        return [
            _time(one, experts, top_k, count, mode, budget_ms) for mode in MODES for count in tokens
        ]
    except torch.OutOfMemoryError as error:
        return f"{one.family}: left out, {short_of(error)}"


def _first(experts: nn.Module) -> nn.Module:
    """The first eight alone: the float64 truth of 256 would take longer than all the times."""
    few = shadow(experts)
    for name, parameter in few.named_parameters(recurse=False):
        few.register_parameter(name, nn.Parameter(parameter.detach()[:8]))
    few.num_experts = len(few.down_proj)
    return few


def _time(
    one: support.Support, experts: nn.Module, top_k: int, tokens: int, mode: str, budget_ms: float
) -> FamilyTiming:
    free()
    names = projections(experts)[:2]
    gate_up, down = logical(experts, *(getattr(experts, name) for name in names))
    (num_experts, _, hidden), inner = gate_up.shape, down.shape[2]
    draw = torch.Generator(gate_up.device).manual_seed(tokens)
    where = {"generator": draw, "device": gate_up.device}
    x, d_out = (torch.randn(tokens, hidden, **where) for _ in range(2))
    scores = torch.rand(tokens, num_experts, **where)
    weights, index = scores.topk(top_k)
    weights = (weights / weights.sum(1, keepdim=True)).to(gate_up.dtype)
    x, d_out = x.to(gate_up.dtype), d_out.to(gate_up.dtype)
    ours = shadow(experts)
    patch(ours)
    blocks = {OURS: ours, HF: hugging_face(experts, "grouped_mm")}
    calls = {name: step(each, x, d_out, mode, index, weights) for name, each in blocks.items()}
    for call in calls.values():
        call()
    taken = times(calls, budget_ms=budget_ms)
    ms, hf_ms = (statistics.median(taken[name]) for name in (OURS, HF))
    size = f"{hidden}, {inner}, {num_experts}, {top_k}"
    return FamilyTiming(one.family, one.experts, size, tokens, mode, ms, hf_ms, hf_ms / ms)


def _top_k(config: object) -> int | None:
    found = (getattr(config, name, None) for name in _TOP_K)
    return next((int(k) for k in found if isinstance(k, int) and k > 0), None)
