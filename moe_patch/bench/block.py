"""Side-by-side times of one block: ours against Hugging Face's own implementations.

Interleaved rounds in one process, CUDA events, the L2 cache overwritten before every call.
"""

from __future__ import annotations

import functools
import gc
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ..parity import ParityReport, check_parity
from ..parity.shadow import hugging_face, implementations, shadow
from ..patcher import patch
from ..shapes import Shape, build, find

MODES = ("forward", "backward")
EAGER_TOKENS = {"forward": 16384, "backward": 4096}
"""Above these, Hugging Face's eager and dense code is left out: too slow, or out of memory."""
BATCHED_TOKENS = 64
"""batched_mm copies the weights of every slot: it is for decoding."""
OURS = "moe_patch"

Call = Callable[[], None]
Name = TypeVar("Name")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call. "backward" is forward and backward, with all gradients."""

    shape: str
    tokens: int
    dtype: str
    mode: str  # "forward", "forward, graph" or "backward"
    implementation: str
    ms: float
    p10: float
    p90: float
    tflops: float
    speedup: float  # of moe_patch over this one
    limit_ms: float  # what the card's own ceilings allow
    kept_mb: float | None = None  # what a forward leaves for its backward, besides the output
    peak_mb: float | None = None  # most memory in use during a step, beyond what was there


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
    matmul_ms = _median_ms(lambda: torch.matmul(a, b, out=product))
    size = min(1 << 31, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source))
    return Ceilings(str(dtype)[6:], 2 * n**3 / matmul_ms / 1e9, 2 * size / copy_ms / 1e9)


def _median_ms(call: Callable[[], object], *, warm_up: int = 5, count: int = 20) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(warm_up + count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    every = [begin.elapsed_time(end) for begin, end in zip(events, events[1:])]
    return statistics.median(every[warm_up:])


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


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of the call.

    Raises:
        RuntimeError: it waits for the GPU. Found out before the capture, because a capture that
            fails leaves torch's random state and allocator capturing.
    """
    stream, before = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ready(calls: dict[str, Call], *, graph: bool) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls each once, and captures it if `graph`.

    Returns:
        the calls that work; why each of Hugging Face's others does not. Ours has to.
    """
    working, failed = {}, {}
    for name, call in calls.items():
        try:
            call()
            working[name] = captured(call) if graph else call
        except RuntimeError as error:
            if name == OURS:
                raise
            oom = isinstance(error, torch.OutOfMemoryError)
            failed[name] = short_of(error) if oom else first_line(error)
        if name in failed:  # out here, so that the error and what it holds is gone
            free()
    return working, failed


def rounds(calls: dict[Name, Callable[[], object]], count: int) -> dict[Name, list[float]]:
    """Milliseconds of every call, `count` times in turn, the L2 cache overwritten before each.

    Launches run ahead of the GPU, as in a model: the host is waited for only when slower.
    """
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    pairs: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(count):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            begin.record()
            call()
            end.record()
            pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: [begin.elapsed_time(end) for begin, end in every] for n, every in pairs.items()}


def times(calls: dict[str, Call], *, budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds of every call, over interleaved rounds that take about `budget_ms` in all."""
    per_round = sum(max(every) for every in rounds(calls, 2).values())
    return rounds(calls, min(200, max(10, int(budget_ms / per_round))))


def bench(
    shape: str,
    tokens: int,
    *,
    mode: str = "forward",
    dtype: torch.dtype = torch.bfloat16,
    eager: bool = True,
    compiled: bool = True,
    graph: bool = False,
    budget_ms: float = 2000.0,
) -> Result:
    """Times one named shape; no times when the parity of the same block does not hold.

    Too little memory for it is a note, not an error. So is what of Hugging Face's does not run.

    Args:
        eager: time Hugging Face's slow loop too.
        compiled: and its grouped_mm under torch.compile.
        graph: time the replay of CUDA graphs; only forward.

    Raises:
        RuntimeError: there is no GPU.
        ValueError: an unknown shape or mode, or graphs of a backward.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a GPU: times of Triton's interpreter would mean nothing")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: use {' or '.join(MODES)}")
    if graph and mode == "backward":
        raise ValueError("graphs of a backward are not timed: use mode forward")
    size, backward = find(shape), mode == "backward"
    label = mode + ", graph" * graph
    row = f"{shape}, {tokens} tokens, {str(dtype)[6:]}, {label}"
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
        blocks = contenders(block, tokens, mode, eager=eager, compiled=compiled)
        calls = {name: step(each, x, d_out, mode) for name, each in blocks.items()}
        calls, failed = ready(calls, graph=graph)
        taken = times(calls, budget_ms=budget_ms)
        kept = {name: memory(blocks[name], x, d_out) for name in calls if backward}
    except torch.OutOfMemoryError as error:
        return Result([], None, [f"{row}: skipped, {short_of(error, stage)}"])
    flops, ours = size.flops(tokens, backward=backward), statistics.median(taken[OURS])
    timings = []
    for name, every in taken.items():
        ms, deciles = statistics.median(every), statistics.quantiles(every, n=10)
        timings.append(
            Timing(
                shape,
                tokens,
                str(dtype)[6:],
                label,
                name,
                ms,
                deciles[0],
                deciles[-1],
                flops / ms / 1e9,
                ms / ours,
                limit_ms,
                *kept.get(name, ()),
            )  # fmt: skip
        )
    return Result(timings, report, [f"{row}: {n} left out, {why}" for n, why in failed.items()])


def short_of(error: BaseException, what: str = "it") -> str:
    """What did not fit, in words from torch's OutOfMemoryError."""
    found = re.search(
        r"Tried to allocate ([\d.]+ \w+).*?of which ([\d.]+ \w+) is free", str(error), re.S
    )
    amounts = f"{found[1]} more asked for, {found[2]} free" if found else first_line(error)
    return f"the GPU has too little memory for {what} ({amounts})"


def first_line(error: BaseException) -> str:
    """Of its message; its class's name when there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free() -> None:
    """Gives back what is no longer in use, reference cycles too."""
    gc.collect()
    torch.cuda.empty_cache()
