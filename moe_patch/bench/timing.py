"""How everything that `bench` shows is timed.

Calls on one GPU run in interleaved rounds in one process, between CUDA events, the L2 cache
overwritten before each. Whole models and steps over ranks are timed by the host's clock.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

OURS = "moe_patch"

Call = Callable[[], object]
Name = TypeVar("Name")


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one call: the median, the first and the last decile."""

    ms: float
    p10: float
    p90: float

    @classmethod
    def of(cls, every: Sequence[float]) -> Spread:
        """From the milliseconds of at least two calls."""
        deciles = statistics.quantiles(every, n=10)
        return cls(statistics.median(every), deciles[0], deciles[-1])


def times(calls: dict[Name, Call], *, budget_ms: float) -> dict[Name, Spread]:
    """What every call takes, over interleaved rounds that take about `budget_ms` in all."""
    per_round = sum(max(every) for every in rounds(calls, 2).values())
    taken = rounds(calls, min(200, max(10, int(budget_ms / per_round))))
    return {name: Spread.of(every) for name, every in taken.items()}


def rounds(calls: dict[Name, Call], count: int, *, cold: bool = True) -> dict[Name, list[float]]:
    """Milliseconds of every call, `count` times in turn, the L2 cache overwritten before if `cold`.

    Launches run ahead of the GPU, as in a model: the host is waited for only when slower.
    """
    cache = torch.empty(1 << 28 if cold else 0, dtype=torch.int8, device="cuda")
    pairs: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(count):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                cache.zero_()
            begin.record()
            call()
            end.record()
            pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: [begin.elapsed_time(end) for begin, end in every] for n, every in pairs.items()}


def seconds(call: Call, *, count: int = 1, wait: Call | None = None) -> float:
    """Seconds of one call by the host's clock, of `count` in a row.

    Args:
        wait: returns once the device has finished; torch.cuda.synchronize by default.
    """
    wait = wait or torch.cuda.synchronize
    wait()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - begin) / count


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


def short_of(error: BaseException, what: str = "it") -> str:
    """What did not fit, in words from torch's OutOfMemoryError."""
    found = re.search(
        r"Tried to allocate ([\d.]+ \w+).*?of which ([\d.]+ \w+) is free", str(error), re.S
    )
    amounts = f"{found[1]} more asked for, {found[2]} free" if found else first_line(error)
    return f"the GPU has too little memory for {what} ({amounts})"


def first_line(error: BaseException) -> str:
    """The first line of its message; its class's name when there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free() -> None:
    """Gives back what is no longer in use, reference cycles too."""
    gc.collect()
    torch.cuda.empty_cache()


def need_gpu() -> None:
    """Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a GPU: times of Triton's interpreter would mean nothing")
