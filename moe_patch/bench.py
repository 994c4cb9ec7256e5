"""Side-by-side times of one block: ours against Hugging Face's own implementations.

Interleaved rounds in one process, CUDA events, the L2 cache overwritten before every call.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from .parity import ParityReport, check_parity
from .patcher import patch
from .shadow import hugging_face, implementations, shadow
from .shapes import SHAPES, build

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
    mode: str
    implementation: str
    ms: float
    p10: float
    p90: float
    tflops: float
    speedup: float  # of moe_patch over this one


def contenders(block: nn.Module, tokens: int, mode: str, eager: bool) -> dict[str, nn.Module]:
    """moe_patch and Hugging Face's own, by name; all share the block's weights."""
    ours = shadow(block)
    patch(ours)
    names = [n for n in implementations(block) if n == "grouped_mm" or eager]
    names = [n for n in names if n == "grouped_mm" or tokens <= EAGER_TOKENS[mode]]
    if "grouped_mm" in implementations(block) and tokens <= BATCHED_TOKENS:
        names.append("batched_mm")
    return {"moe_patch": ours} | {f"HF {name}": hugging_face(block, name) for name in names}


def step(block: nn.Module, x: torch.Tensor, d_out: torch.Tensor, mode: str) -> Callable[[], None]:
    """One call to time."""
    leaves = [x.requires_grad_(), *block.parameters()]

    def forward() -> None:
        with torch.no_grad():
            block(x)

    def backward() -> None:
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, leaves, d_out.view_as(out))

    return forward if mode == "forward" else backward


def times(calls: dict[str, Callable[[], None]], *, budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds of every call, over interleaved rounds that take about `budget_ms` in all.

    Hugging Face's code that runs out of memory is left out.
    """
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def events(call: Callable[[], None]) -> list[torch.cuda.Event]:
        begin, end = pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        cache.zero_()
        begin.record()
        call()
        end.record()
        return pair

    for name, call in list(calls.items()):
        try:
            events(call)
        except torch.OutOfMemoryError:
            if name == "moe_patch":
                raise
            del calls[name]
            torch.cuda.empty_cache()

    def rounds(count: int) -> dict[str, list[float]]:
        """Launches run ahead of the GPU, as in a model: the host is waited for only when slower."""
        pairs = [{name: events(call) for name, call in calls.items()} for _ in range(count)]
        torch.cuda.synchronize()
        return {
            name: [begin.elapsed_time(end) for begin, end in (p[name] for p in pairs)]
            for name in calls
        }

    per_round = sum(max(every) for every in rounds(2).values())
    return rounds(min(200, max(10, int(budget_ms / per_round))))


def bench(
    shape: str,
    tokens: int,
    *,
    mode: str = "forward",
    dtype: torch.dtype = torch.bfloat16,
    eager: bool = True,
    budget_ms: float = 2000.0,
) -> tuple[list[Timing], ParityReport]:
    """Times one named shape; no times when the parity of the same block does not hold.

    Raises:
        RuntimeError: there is no GPU.
        ValueError: an unknown shape or mode.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a GPU: times of Triton's interpreter would mean nothing")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: use {' or '.join(MODES)}")
    block = build(shape, dtype=dtype, device="cuda")
    report = check_parity(block, tokens=tokens, backward=mode == "backward")
    if not report.passed:
        return [], report
    generator = torch.Generator("cuda").manual_seed(0)
    size = (1, tokens, SHAPES[shape].hidden_size)
    x, d_out = (torch.randn(size, generator=generator, device="cuda").to(dtype) for _ in range(2))
    blocks = contenders(block, tokens, mode, eager)
    taken = times({n: step(b, x, d_out, mode) for n, b in blocks.items()}, budget_ms=budget_ms)
    flops = SHAPES[shape].flops(tokens, backward=mode == "backward")
    ours = statistics.median(taken["moe_patch"])
    timings = []
    for name, every in taken.items():
        ms, deciles = statistics.median(every), statistics.quantiles(every, n=10)
        timings.append(
            Timing(
                shape,
                tokens,
                str(dtype)[6:],
                mode,
                name,
                ms,
                deciles[0],
                deciles[-1],
                flops / ms / 1e9,
                ms / ours,
            )  # fmt: skip
        )
    return timings, report


def write_csv(timings: Sequence[Timing], path: Path) -> None:
    """One line a timing, with a header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Timing)])
        writer.writeheader()
        writer.writerows(map(asdict, timings))


def to_json(timings: Sequence[Timing], environment: str) -> str:
    """The timings and the machine they hold for."""
    return json.dumps({"environment": environment, "timings": [*map(asdict, timings)]}, indent=2)
