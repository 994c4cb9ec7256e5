"""bench families: every family's experts at a published model's size, against HF's default.

The experts alone, with random routing, bfloat16: the sanity check that no family gets slower.
Parity is judged before, on eight of the experts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

from .. import environment
from ..parity import ParityReport, check_parity
from ..parity.shadow import hugging_face, implementations, logical, projections, shadow
from ..patcher import patch
from ..usage import UsageError, add_tokens
from .block import MODES, step
from .kind import Flags, Run, Timed, add_files
from .timing import OURS, free, need_gpu, short_of, times

TOKENS = (1, 64, 4096)
HF = "HF"  # grouped_mm, where it can
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
    "moe_topk", "moe_k", "moe_top_k", "num_selected_experts", "top_k",
)  # fmt: skip
PUBLISHED: dict[str, tuple[str, int, int, int, int]] = {
    "AfmoeExperts": ("arcee-ai/Trinity-Mini", 2048, 1024, 128, 8),
    "DeepseekOcr2TextExperts": ("deepseek-ai/DeepSeek-OCR-2", 1280, 896, 64, 6),
    "DeepseekV2Experts": ("deepseek-ai/DeepSeek-V2-Lite", 2048, 1408, 64, 6),
    "DiffusionGemmaTextExperts": ("google/diffusiongemma-26B-A4B-it", 2816, 704, 128, 8),
    "Dots1Experts": ("rednote-hilab/dots.llm1.inst", 4096, 1408, 128, 6),
    "Ernie4_5_VLMoeMoeExperts": ("baidu/ERNIE-4.5-VL-28B-A3B-PT, text", 2560, 1536, 64, 6),
    "ExaoneMoeExperts": ("LGAI-EXAONE/K-EXAONE-236B-A23B", 6144, 2048, 128, 8),
    "Gemma4TextExperts": ("google/gemma-4-26B-A4B", 2816, 704, 128, 8),
    "GraniteMoeExperts": ("ibm-granite/granite-3.1-3b-a800m-instruct", 1536, 512, 40, 8),
    "GraniteMoeHybridExperts": ("ibm-granite/granite-4.0-h-small", 4096, 768, 72, 10),
    "GraniteMoeSWAExperts": ("ibm-granite/granite-swash-3b-a600m", 1280, 512, 48, 4),
    "HunYuanMoEV1Experts": ("tencent/Hunyuan-A13B-Instruct", 4096, 3072, 64, 8),
    "MiniMaxExperts": ("MiniMaxAI/MiniMax-Text-01", 6144, 9216, 32, 2),
    "NemotronHExperts": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2688, 1856, 128, 6),
    "OlmoeExperts": ("allenai/OLMoE-1B-7B-0924", 2048, 1024, 64, 8),
    "Qwen3OmniMoeTalkerTextExperts": ("Qwen/Qwen3-Omni-30B-A3B-Instruct", 1024, 384, 128, 6),
    "Qwen3OmniMoeThinkerTextExperts": ("Qwen/Qwen3-Omni-30B-A3B-Instruct", 2048, 768, 128, 8),
    "Step3p7Experts": ("stepfun-ai/Step-3.7-Flash", 4096, 1280, 288, 8),
    "Qwen3VLMoeTextExperts": ("Qwen/Qwen3-VL-30B-A3B-Instruct", 2048, 768, 128, 8),
}
"""Of experts whose family's default configuration is no published model: the checkpoint that is
timed, and its config.json's H, I, E and K. Those of Aria, Command A (cohere2_moe), FlexOlmo and
granitemoeshared could not be verified: their defaults are timed, as are all that are not here."""

_NAMES = (  # of H, I, E and K in configurations
    ("hidden_size",),
    ("moe_intermediate_size", "intermediate_size"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    _TOP_K,
)


@dataclass(frozen=True)
class FamilyTiming:
    """Medians of one family's experts; "backward" is forward and backward, all gradients."""

    family: str
    experts: str
    checkpoint: str  # whose size it is
    size: str  # H, I, E and K
    tokens: int
    mode: str
    ms: float
    hf_ms: float
    speedup: float


def rows() -> list[environment.Support]:
    """The families to time: those that are fused, but for Llama4, whose block `bench` times."""
    return [one for one in environment.families() if one.fused and one.family != "llama4"]


def bench_family(
    one: environment.Support,
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
    if device == "cuda":
        need_gpu()
    free()
    experts, top_k = sized(one)
    if experts is None or top_k is None:
        return f"{one.family}: left out, its configuration has no experts of a known size"
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


def sized(one: environment.Support) -> tuple[nn.Module | None, int | None]:
    """The experts that are timed, on the meta device, and K; None is what is not known."""
    _, *size = PUBLISHED.get(one.experts, ("",))
    names = (dict.fromkeys(names, number) for names, number in zip(_NAMES, size))
    experts = environment.build(
        one, {name: value for each in names for name, value in each.items()}
    )
    return experts, size[3] if size else experts and top_k_of(experts.config)


def _first(experts: nn.Module) -> nn.Module:
    """The first eight alone: the float64 truth of 256 would take longer than all the times."""
    few = shadow(experts)
    for name, parameter in few.named_parameters(recurse=False):
        few.register_parameter(name, nn.Parameter(parameter.detach()[:8]))
    few.num_experts = len(few.down_proj)
    return few


def _time(
    one: environment.Support,
    experts: nn.Module,
    top_k: int,
    tokens: int,
    mode: str,
    budget_ms: float,
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
    blocks = {OURS: ours, HF: hugging_face(experts, implementations(experts)[-1])}
    calls = {name: step(each, x, d_out, mode, index, weights) for name, each in blocks.items()}
    for call in calls.values():
        call()
    taken = times(calls, budget_ms=budget_ms)
    ms, hf_ms = (taken[name].ms for name in (OURS, HF))
    size = f"{hidden}, {inner}, {num_experts}, {top_k}"
    checkpoint = PUBLISHED.get(one.experts, ("default configuration",))[0]
    about = one.family, one.experts, checkpoint, size, tokens, mode
    return FamilyTiming(*about, ms, hf_ms, hf_ms / ms)


def top_k_of(config: object) -> int | None:
    """Return the choices a token that a configuration names; None where it names none."""
    found = (getattr(config, name, None) for name in _TOP_K)
    return next((int(k) for k in found if isinstance(k, int) and k > 0), None)


def family_table(timings: Sequence[FamilyTiming]) -> Iterable[Table]:
    """A line a family: how many times as fast as Hugging Face's default."""
    columns = list(dict.fromkeys((t.mode, t.tokens) for t in timings))
    header = (f"{mode} {tokens}" for mode, tokens in columns)
    table = Table("family", "H, I, E, K", *header, title="x as fast as grouped_mm")
    for (family, size), group in itertools.groupby(timings, lambda t: (t.family, t.size)):
        found = {(t.mode, t.tokens): f"{t.speedup:.2f}" for t in group}
        table.add_row(family, size, *(found.get(column, "") for column in columns))
    yield table


class Families(Timed):
    """`bench families`."""

    name = "families"
    help = "every family's experts at a published size"
    about = "A family whose parity fails has no times, stops no other, and makes the exit code 1."
    switch, does = "--families", "times experts of all families"

    def arguments(self, flag: Flags, old: bool) -> None:
        names = "--families" if old else "families"
        flag(names, metavar="NAME", nargs="*", help="default: all that are fused")
        add_tokens(flag, TOKENS)
        add_files(flag)

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.families is not None

    def measure(self, run: Run) -> None:
        options, every = run.options, rows()
        wanted = set(options.families)
        unknown = wanted - {one.family for one in every}
        if unknown:
            known = ", ".join(sorted({one.family for one in every}))
            missing = ", ".join(sorted(unknown))
            raise UsageError(f"no fused family is called {missing}: there are {known}")
        todo = [one for one in every if not wanted or one.family in wanted]
        tokens = tuple(options.tokens or TOKENS)
        for one in run.each(todo, lambda one: one.family):
            found = bench_family(one, tokens)
            if isinstance(found, ParityReport):
                run.failed.append(found)
                run.notes.append(f"{one.family}: no times, {found.verdict}")
            elif isinstance(found, str):
                run.notes.append(found)
            else:
                run.rows += found
            run.keep()

    tables = staticmethod(family_table)


KIND = Families()
