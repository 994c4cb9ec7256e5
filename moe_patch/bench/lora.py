"""bench lora: one block under LoRA, its factors inside the grouped GEMMs, against PEFT's own way.

Every weight is frozen but the adapters on gate_up_proj and down_proj. Forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import reference
from ..parity import ParityReport, Section, environment, law
from ..parity.law import Row
from ..parity.shadow import hugging_face, shadow
from ..patcher import patch, unpatch
from ..shapes import Shape, build, find
from ..usage import DTYPES, add_dtype, add_shape, add_tokens, positive
from .block import (
    TOKENS,
    Result,
    ceilings,
    ceilings_of,
    memory,
    packed,
    step,
    take,
    timing_tables,
)
from .kind import Flags, Run, Timed, add_files, need_peft
from .timing import OURS, free, need_gpu, short_of, times

RANK = 16
MODE = "backward, LoRA"
FROZEN = "moe_patch, no adapters"
PEFT = "HF grouped_mm, PEFT"


def adapted(block: nn.Module, rank: int, seed: int = 0) -> dict[str, nn.Module]:
    """Three shadows of the block, frozen: patched without adapters, and with the same adapters in
    PEFT's own way and patched."""
    from peft import LoraConfig, inject_adapter_in_model

    found = {}
    for name in (FROZEN, PEFT, OURS):
        found[name] = hugging_face(block, "grouped_mm") if name == PEFT else shadow(block)
        found[name].requires_grad_(False)
        if name != FROZEN:
            config = LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                init_lora_weights=False,  # B would be zero
                target_modules=[],
                target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                inject_adapter_in_model(config, found[name])
    weights = [p for p in found[PEFT].parameters() if p.requires_grad]
    for weight, same in zip((p for p in found[OURS].parameters() if p.requires_grad), weights):
        weight.data.copy_(same.data)
    for name in (FROZEN, OURS):
        unpatch(found[name])
        assert len(patch(found[name]).fused) == 1
    return found


def check(block: nn.Module, blocks: dict[str, nn.Module], x: Tensor, d_out: Tensor) -> list[Row]:
    """The parity law on the experts' output, d_hidden_states and every adapter's gradient."""
    tokens, _ = x.shape
    experts = block.experts
    draw = torch.Generator(x.device).manual_seed(1)
    scores = torch.rand(tokens, len(experts.gate_up_proj), generator=draw, device=x.device)
    top_k_weights, index = scores.topk(block.gate.top_k)
    top_k_weights = (top_k_weights / top_k_weights.sum(1, keepdim=True)).to(x.dtype)

    def run(block: nn.Module) -> dict[str, Tensor]:
        inputs = x.detach().requires_grad_()
        out = block.experts(inputs, index, top_k_weights)
        leaves = {n: p for n, p in block.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(out, [inputs, *leaves.values()], d_out)
        return dict(zip(["output", "d_hidden_states", *leaves], [out.detach(), *grads]))

    ours, theirs = run(blocks[OURS]), run(blocks[PEFT])
    truth = {n: p for n, p in blocks[PEFT].named_parameters() if p.requires_grad}
    truth = {n: p.detach().double().requires_grad_() for n, p in truth.items()}
    inputs = x.detach().double().requires_grad_()
    out = reference.fused_experts(
        inputs,
        experts.gate_up_proj.detach().double(),
        experts.down_proj.detach().double(),
        index,
        top_k_weights.double(),
        gate_up_low_rank=_factors(truth, experts.gate_up_proj, blocks[PEFT]),
        down_low_rank=_factors(truth, experts.down_proj, blocks[PEFT]),
    )
    grads = torch.autograd.grad(out, [inputs, *truth.values()], d_out.double())
    exact = dict(zip(["output", "d_hidden_states", *truth], [out.detach(), *grads]))
    return [law.judge(name, ours[name], [theirs[name]], exact[name]) for name in exact]


def _factors(
    adapters: dict[str, Tensor], weight: Tensor, block: nn.Module
) -> tuple[Tensor, Tensor]:
    """(A [E, R, K], scaled B [E, N, R]) of the float64 adapters of one weight, by its shape."""
    experts, n, k = weight.shape
    (a,) = (p for name, p in adapters.items() if "lora_A" in name and p.shape[1] == k)
    (b,) = (p for name, p in adapters.items() if "lora_B" in name and p.shape[0] == n)
    scaling = next(m.scaling["default"] for m in block.modules() if hasattr(m, "scaling"))
    b = b.reshape(n, -1, experts).permute(2, 0, 1)  # PEFT packs B with the expert fastest
    return a.reshape(experts, -1, k), b * scaling


def supported(shape: str, switch: str = "--lora") -> Shape:
    """The named shape. ValueError when it is unknown, or Llama4's."""
    size = find(shape)
    if size.family != "qwen3_moe":
        raise ValueError(f"{switch} compares with grouped_mm, which {shape} has not: leave it out")
    return size


def bench_lora(
    shape: str,
    tokens: int,
    *,
    rank: int = RANK,
    dtype: torch.dtype = torch.bfloat16,
    budget_ms: float = 2000.0,
) -> Result:
    """Times one named shape; no times when the parity of the same blocks does not hold.

    Raises:
        RuntimeError: there is no GPU.
        ValueError: an unknown shape, or Llama4's, whose experts HF computes densely.
    """
    need_gpu()
    size = supported(shape)
    row = f"{shape}, {tokens} tokens, {str(dtype)[6:]}, {MODE}"
    free()
    try:
        block = build(size, dtype=dtype, device="cuda")
        draw = torch.Generator("cuda").manual_seed(0)
        x, d_out = (
            torch.randn(tokens, size.hidden_size, generator=draw, device="cuda").to(dtype)
            for _ in range(2)
        )
        blocks = adapted(block, rank)
        section = Section(f"experts under LoRA of rank {rank}", str(dtype)[6:], tokens, [])
        section = replace(section, rows=check(block, blocks, x, d_out))
        report = ParityReport([section], environment(x.device), [])
        if not report.passed:
            return Result([], report, [])
        free()
        x, d_out = x[None], d_out[None]
        calls = {name: step(each, x, d_out, "backward") for name, each in blocks.items()}
        for call in calls.values():
            call()
        taken = times(calls, budget_ms=budget_ms)
        kept = {name: memory(each, x, d_out) for name, each in blocks.items()}
    except torch.OutOfMemoryError as error:
        return Result([], None, [f"{row}: skipped, {short_of(error)}"])
    # frozen weights: the forward and the gradient of the input
    flops = 2 * size.flops(tokens)
    limit_ms = ceilings(dtype).limit_ms(size, tokens) * 2
    about = shape, tokens, str(dtype)[6:], MODE
    return Result(packed(about, taken, flops, limit_ms, kept), report, [])


class Lora(Timed):
    """`bench lora`."""

    name = "lora"
    help = "one block with PEFT's adapters on frozen experts, both ways"
    about = "Forward and backward of one block of Qwen3-MoE. Every row comes after its parity."
    switch, does = "--lora", "times forward and backward"

    def arguments(self, flag: Flags, old: bool) -> None:
        add_shape(flag, "qwen3_30b")
        add_tokens(flag, TOKENS)
        add_dtype(flag, "bf16", ["fp8"] if old else [])
        add_files(flag, png=True)
        if old:
            flag("--lora", type=int, nargs="?", const=RANK, dest="rank")
            # there is nothing for them to leave out
            flag("--no-eager", action="store_true")
            flag("--no-compile", action="store_true")
        else:
            flag("--rank", type=positive, metavar="R", help=f"of the adapters; default: {RANK}")

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.rank is not None

    def takes_no(self, flag: str) -> str:
        if flag in ("--mode", "--graph"):
            return f"{self.switch} {self.does}: leave out --mode and --graph"
        return super().takes_no(flag)

    def refuse(self, options: argparse.Namespace) -> None:
        if options.rank is not None and options.rank < 1:
            raise ValueError(f"--lora {options.rank}: a rank of at least 1 is needed")
        for name in options.shape:
            supported(name)
        need_peft()

    def measure(self, run: Run) -> ParityReport | None:
        options = run.options
        dtypes = [DTYPES[name] for name in options.dtype or ["bf16"]]
        names = options.shape or ["qwen3_30b"]
        todo = [*itertools.product(names, dtypes, options.tokens or TOKENS)]
        for name, dtype, tokens in run.each(todo, lambda row: f"{row[0]} {MODE} {row[2]}"):
            result = bench_lora(name, tokens, rank=options.rank or RANK, dtype=dtype)
            if not take(run, result):
                return result.report
        run.ceilings += ceilings_of(run.rows)
        return None

    tables = staticmethod(timing_tables)


KIND = Lora()
