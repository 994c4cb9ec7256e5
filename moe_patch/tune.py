"""Measures tiles on this card and writes them where the library finds them.

The file is kernels.table.user_file(): tiles.json in $MOE_PATCH_CACHE, else in
$XDG_CACHE_HOME/moe_patch, else in ~/.cache/moe_patch. It is whole after every entry.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .bench.block import rounds
from .order import ExpertOrder
from .shapes import Shape, find

if TYPE_CHECKING:
    from .kernels.tiles import Tile

FORWARD = ("gate_up", "gemm")
BACKWARD = ("dgate", "dw_gathered")
TOKENS = (16, 64, 256, 1024, 4096, 16384)
GAIN = 0.98
"""A tile replaces the heuristic's when it takes at most this share of its time."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-3}


@dataclass(frozen=True)
class Result:
    """One entry: the heuristic's tile and the fastest, with their milliseconds; or why none."""

    shape: str
    tokens: int
    kernel: str
    n: int
    k: int
    rows: int
    before: Tile | None = None
    before_ms: float = 0.0
    after: Tile | None = None
    after_ms: float = 0.0
    note: str = ""
    compile_s: float = 0.0
    measure_s: float = 0.0


@dataclass(frozen=True)
class Operands:
    """Of one block: x [T, H], weights, order, routing weights [T, K], act [S, I], pre [S, 2I]."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    order: ExpertOrder
    weights: Tensor
    act: Tensor
    pre: Tensor


@dataclass(frozen=True)
class Job:
    """A kernel with N = n and K = k; `run` computes a tensor that shows whether it was right."""

    kernel: str
    n: int
    k: int
    run: Callable[[Operands], Tensor]


def jobs(shape: Shape, backward: bool, kernels: Sequence[str] = ()) -> list[Job]:
    """What to tune for one shape; of all its kernels, or of those named."""
    from .kernels.dgate import dgate
    from .kernels.dw import dw
    from .kernels.gate_up import gate_up
    from .kernels.grouped_gemm import grouped_gemm as gemm

    hidden, inner, top_k = shape.hidden_size, shape.intermediate_size, shape.top_k
    on = {"weight_on_input": shape.family == "llama4"}
    all_of_it = {"need_pre": True, "need_act": True, "need_scale": True}

    def rows(o: Operands) -> Tensor:
        return o.x.new_empty(len(o.act), hidden)

    def grad(weight: Tensor) -> Tensor:
        return torch.empty_like(weight)

    found = [
        Job("gate_up", inner, hidden, lambda o: gate_up(
            o.x, o.gate_up, o.order, o.weights, save_pre=False, **on)[0]),
        Job("gemm", hidden, inner, lambda o: gemm(o.act, o.down, o.order, out=rows(o))),
    ]  # fmt: skip
    if backward:
        found += [
            Job("dgate", inner, hidden, lambda o: dgate(
                o.x, o.down, o.order, o.weights, o.pre, **on, **all_of_it)[0]),
            Job("gemm", hidden, 2 * inner, lambda o: gemm(
                o.pre, o.gate_up.transpose(1, 2), o.order, out=rows(o))),
            Job("dw_gathered", inner, hidden, lambda o: dw(
                o.x, o.act, o.order, gather=top_k, out=grad(o.down))),
            Job("dw_gathered", 2 * inner, hidden, lambda o: dw(
                o.x, o.pre, o.order, gather=top_k, out=grad(o.gate_up).transpose(1, 2))),
        ]  # fmt: skip
    return [job for job in found if not kernels or job.kernel in kernels]


def operands(
    shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> tuple[Operands, Operands]:
    """(random operands; the same of one expert alone, which compile to the same binaries)."""
    from .kernels.sort_tokens import sort_tokens
    from .kernels.tiles import block_m

    hidden, inner, top_k = shape.hidden_size, shape.intermediate_size, shape.top_k
    generator = torch.Generator(device).manual_seed(0)
    llama4 = shape.family == "llama4"

    def random(*size: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(size, dtype=dtype, device=device)
        return out.normal_(0, scale, generator=generator)

    def weight(n: int, k: int) -> Tensor:
        size = (shape.num_experts, *((k, n) if llama4 else (n, k)))
        weight = random(*size, scale=k**-0.5)
        return weight.transpose(1, 2) if llama4 else weight

    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    height = block_m(tokens * top_k, shape.num_experts, dtype)

    def block(tokens: int, experts: int, index: Tensor) -> Operands:
        slots = index.numel()
        numel = ExpertOrder.numel(slots, experts, height)
        buffer = torch.empty(numel, dtype=torch.int32, device=device)
        return Operands(
            random(tokens, hidden),
            gate_up[:experts],
            down[:experts],
            sort_tokens(index, experts, height, buffer),
            torch.rand(tokens, top_k, generator=generator, device=device).to(dtype),
            random(slots, inner),
            random(slots if backward else 0, 2 * inner),
        )

    scores = torch.rand(tokens, shape.num_experts, generator=generator, device=device)
    full = block(tokens, shape.num_experts, scores.topk(top_k).indices.contiguous())
    few = -(-max(1, tokens * top_k // shape.num_experts) // top_k)
    return full, block(few, 1, torch.zeros(few, top_k, dtype=torch.int64, device=device))


def candidates(
    kernel: str, start: Tile, n: int, m: int, dtype: torch.dtype, shared: int
) -> list[Tile]:
    """Tiles to try beside `start`, the heuristic's: all that shared memory and registers hold.

    `m` is dw's M, its rows of blocks; other kernels keep the height of `start`.
    """
    from .kernels.tiles import fit, loaded

    is_dw = kernel.startswith("dw")
    small = dtype == torch.float32 or shared < 160_000
    heights = (64, 128) if is_dw else (start.bm,)
    widths = (32, 64, 128) if small else (64, 128, 256)
    depths = (32, 64) if small or is_dw else (64, 128)
    if start.bm == 16 and not small:
        widths, depths = (32, *widths), (*depths, 256)
    tiles = [
        replace(start, bm=bm, bn=bn, bk=bk, warps=warps, stages=5 if is_dw else 4)
        for bm, bn, bk, warps in itertools.product(heights, widths, depths, (4, 8))
        if not is_dw or bm <= max(64, m)
    ]
    if not is_dw:
        tiles += [replace(start, stages=stages) for stages in (3, 5)]
        tiles += [replace(start, group_m=group_m) for group_m in (4, 16) if start.bm >= 64]
    found = [start]
    for tile in tiles:
        tile = fit(kernel, tile, n, dtype.itemsize, shared)
        columns = loaded(kernel, tile)
        registers = tile.bm * columns // (32 * tile.warps)
        held = (shared - 4096) // ((tile.bm + columns) * tile.bk * dtype.itemsize)
        enough = held >= (2 if small else 3)
        if enough and registers <= 192 and (tile.warps == 4 or registers >= 32):
            found.append(tile)
    return list(dict.fromkeys(found))


def times(calls: dict[Tile, Callable[[], object]], count: int) -> dict[Tile, float]:
    """Median milliseconds of `count` interleaved rounds."""
    return {tile: statistics.median(every) for tile, every in rounds(calls, count).items()}


def right(ours: Tensor, reference: Tensor) -> bool:
    """Whether two tiles' outputs agree, NaN being wrong."""
    bound = TOLERANCE[reference.dtype]
    rms = torch.linalg.vector_norm(reference, dtype=torch.float32) / reference.numel() ** 0.5
    return torch.allclose(ours, reference, rtol=bound, atol=bound * float(rms))


def tune(
    names: Sequence[str],
    tokens: Sequence[int] = TOKENS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    kernels: Sequence[str] = (),
    output: Path | None = None,
    device: torch.device | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Tunes named shapes at numbers of tokens; yields each entry once it is in the file.

    `output` instead of the user's file; `say` hears what is under way.

    Raises:
        ValueError: an unknown shape, or an output that is something else.
        OSError: the file cannot be written.
    """
    from .kernels import table

    shapes = {name: find(name) for name in names}
    if output is not None and output.exists():
        try:
            table.read(output)
        except ValueError as error:
            raise ValueError(f"{output} is not overwritten, because {error}") from error
    path = output or table.user_file()
    device = device or torch.device("cuda", torch.cuda.current_device())
    _save(path, device, {})
    return _rows(shapes, tokens, dtype, backward, kernels, path, device, say)


def _save(path: Path, device: torch.device, entries: dict[str, list[int]]) -> None:
    from triton import __version__

    from .kernels import chips, table, tiles

    table.add(path, chips.name(device), chips.chip(device).arch, __version__, entries)
    tiles.forget()


def _rows(shapes, tokens, dtype, backward, kernels, path, device, say) -> Iterator[Result]:
    for (name, shape), count in itertools.product(shapes.items(), tokens):
        rows, listed = count * shape.top_k // shape.num_experts, jobs(shape, backward, kernels)
        done = 0
        try:
            say(f"{name}, {count} tokens: random weights")
            full, small = operands(shape, count, dtype, device, backward)
            say(f"{name}, {count} tokens: compiling")
            begin = time.monotonic()
            tried = _compile(listed, small, full, rows, dtype, device)
            compile_s = (time.monotonic() - begin) / len(listed)
            for job, found in zip(listed, tried):
                say(f"{name}, {count} tokens: {job.kernel} {job.n}x{job.k}")
                begin = time.monotonic()
                before, after, ms = _measure(job, found, full)
                entry = _key(job, full, rows, dtype)
                _save(path, device, {entry: [*vars(after).values()]})
                took = time.monotonic() - begin
                yield Result(
                    name, count, job.kernel, job.n, job.k, rows, before, ms[before], after,
                    ms[after], compile_s=compile_s, measure_s=took,
                )  # fmt: skip
                done += 1
        except torch.OutOfMemoryError:
            for job in listed[done:]:
                note = "skipped: too little memory on this card"
                yield Result(name, count, job.kernel, job.n, job.k, rows, note=note)
        full = small = None
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _height(job: Job, full: Operands) -> int:
    return 128 if job.kernel.startswith("dw") else full.order.block_m


def _key(job: Job, full: Operands, rows: int, dtype: torch.dtype) -> str:
    from .kernels import table

    kind = str(dtype).removeprefix("torch.")
    return table.key(job.kernel, kind, job.n, job.k, _height(job, full), rows)


def _compile(listed, small, full, rows, dtype, device) -> list[list[Tile]]:
    """The tiles of each job that compile and start, the heuristic's first.

    In threads: Triton's compiler and ptxas leave Python's lock alone most of the time.
    """
    from .kernels import chips, on_device, tiles

    def starts(job: Job, tile: Tile) -> bool:
        try:
            with on_device(device), tiles.forced(job.kernel, tile):
                job.run(small)
        except Exception:  # too many resources, or a compiler that gives up: not a candidate
            return False
        return True

    def wanted(job: Job) -> list[Tile]:
        arguments = (job.kernel, _height(job, full), rows, job.n, job.k, dtype, device)
        start, shared = tiles.heuristic(*arguments), chips.chip(device).shared
        found = candidates(job.kernel, start, job.n, job.k, dtype, shared)
        return list(dict.fromkeys([*found, tiles.choose(*arguments)]))

    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    try:
        every = [[(tile, pool.submit(starts, job, tile)) for tile in wanted(job)] for job in listed]
        return [
            [tile for i, (tile, ok) in enumerate(found) if ok.result() or i == 0] for found in every
        ]
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(job: Job, found: list[Tile], full: Operands) -> tuple[Tile, Tile, dict[Tile, float]]:
    """(the heuristic's tile, the best, milliseconds); a tile that computes otherwise is out."""
    from .kernels import tiles

    def call(tile: Tile) -> Tensor:
        with tiles.forced(job.kernel, tile):
            return job.run(full)

    before, reference = found[0], call(found[0])
    calls = {before: lambda: call(before)}
    for tile in found[1:]:
        poison = torch.full_like(reference, float("nan"))  # what `empty` then finds
        del poison
        if right(call(tile), reference):
            calls[tile] = lambda tile=tile: call(tile)
    del reference
    screened = times(calls, 5)
    best = [t for t in sorted(screened, key=screened.__getitem__) if t != before][:4]
    ms = times({tile: calls[tile] for tile in (before, *best)}, 25)
    after = min(ms, key=ms.__getitem__)
    return before, after if ms[after] <= GAIN * ms[before] else before, ms
