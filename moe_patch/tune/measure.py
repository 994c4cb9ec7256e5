"""Measures the tiles of one entry: candidates, those that compile, their times."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..bench.timing import rounds
from ..order import ExpertOrder
from .blocks import Block
from .plan import Entry, Limit

if TYPE_CHECKING:
    from ..kernels.tiles import Tile

GAIN = 0.98
"""A tile replaces the one in use when it takes at most this share of its time."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-3}


class NoTile(Exception):
    """No tile of an entry starts on this card; the message says why the first one does not."""


class Measured(NamedTuple):
    """The tile that the library uses now and the one it is to use, with their milliseconds.

    `before_ms` is infinite where that tile does not start on this card.
    """

    before: Tile
    before_ms: float
    after: Tile
    after_ms: float
    compile_s: float
    measure_s: float


@dataclass(frozen=True)
class Operands:
    """Tensors of one block: x [T, H], weights, order, routing weights [T, K], act [S, I], pre
    [S, 2I] (empty without a backward); the scales of FP8 weights, else None."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    order: ExpertOrder
    weights: Tensor
    act: Tensor
    pre: Tensor


def run(entry: Entry, o: Operands) -> Tensor:
    """Compute the entry's product; the tensor shows whether a tile computed it right."""
    from ..kernels.dgate import dgate
    from ..kernels.dw import dw
    from ..kernels.gate_up import gate_up
    from ..kernels.grouped_gemm import grouped_gemm

    block = entry.block
    top_k = o.weights.shape[1]
    on = {"weight_on_input": block.weight_on_input, "activation": block.activation}
    if entry.part == "gate_up":
        scale = o.gate_up_scale
        return gate_up(o.x, o.gate_up, o.order, o.weights, save_pre=False, scale=scale, **on)[0]
    if entry.part == "d_act":
        needs = {"need_pre": True, "need_act": True, "need_scale": True, "scale": o.down_scale}
        return dgate(o.x, o.down, o.order, o.weights, o.pre, **on, **needs)[0]
    if entry.part == "d_gate_up":
        out = torch.empty_like(o.gate_up).transpose(1, 2)
        return dw(o.x, o.pre, o.order, gather=top_k, out=out)
    if entry.part == "d_down":
        return dw(o.x, o.act, o.order, gather=top_k, out=torch.empty_like(o.down))
    rows, weight, scale = o.act, o.down, o.down_scale
    if entry.part == "d_x":
        rows, weight, scale = o.pre, o.gate_up.mT, o.gate_up_scale
        scale = None if scale is None else scale.mT
    out = rows.new_empty(len(rows), block.hidden)
    return grouped_gemm(rows, weight, o.order, out=out, scale=scale)


def operands(
    block: Block, tokens: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> tuple[Operands, Operands]:
    """(random operands; the same of one expert alone, which compile to the same binaries)."""
    from ..kernels.sort_tokens import sort_tokens
    from ..kernels.tiles import block_m

    hidden, inner, width, top_k = block.hidden, block.inner, block.width, block.top_k
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(size, dtype=dtype, device=device)
        return out.normal_(0, scale, generator=generator)

    def weight(n: int, k: int) -> Tensor:
        if block.fp8:
            out = torch.empty(block.experts, n, k, dtype=torch.float8_e4m3fn, device=device)
            for expert in out:  # one at a time: no more memory than e4m3 takes
                expert.copy_(random(n, k))
            return out
        size = (block.experts, *((k, n) if block.transposed else (n, k)))
        out = random(*size, scale=k**-0.5)
        return out.transpose(1, 2) if block.transposed else out

    def scales(n: int, k: int) -> Tensor | None:
        size = (block.experts, -(-n // 128), -(-k // 128))
        return torch.full(size, k**-0.5, device=device) if block.fp8 else None

    gate_up, down = weight(width, hidden), weight(hidden, inner)
    gate_up_scale, down_scale = scales(width, hidden), scales(hidden, inner)
    height = block_m(tokens * top_k, block.experts, dtype)

    def of(tokens: int, experts: int, index: Tensor) -> Operands:
        slots = index.numel()
        numel = ExpertOrder.numel(slots, experts, height)
        buffer = torch.empty(numel, dtype=torch.int32, device=device)
        return Operands(
            random(tokens, hidden),
            gate_up[:experts],
            down[:experts],
            None if gate_up_scale is None else gate_up_scale[:experts],
            None if down_scale is None else down_scale[:experts],
            sort_tokens(index, experts, height, buffer),
            torch.rand(tokens, top_k, generator=generator, device=device).to(dtype),
            random(slots, inner),
            random(slots if backward else 0, width),
        )

    scores = torch.rand(tokens, block.experts, generator=generator, device=device)
    full = of(tokens, block.experts, scores.topk(top_k).indices.contiguous())
    few = -(-max(1, tokens * top_k // block.experts) // top_k)
    return full, of(few, 1, torch.zeros(few, top_k, dtype=torch.int64, device=device))


def candidates(
    kernel: str, start: Tile, n: int, m: int, dtype: torch.dtype, shared: int
) -> list[Tile]:
    """Tiles to try beside `start`, the heuristic's: all that shared memory and registers hold.

    `m` is dw's M, its rows of blocks; other kernels keep the height of `start`.
    """
    from ..kernels.tiles import W8, fit, held, loaded

    is_dw, scaled = kernel.startswith("dw"), kernel.endswith(W8)
    small = dtype == torch.float32 or shared < 160_000
    heights = (64, 128) if is_dw else (start.bm,)
    low = dtype == torch.float32 or (small and start.bm < 64)
    widths = (32, 64, 128) if low else (64, 128, 256)
    depths = (32, 64) if small or is_dw else (64, 128)
    if start.bm == 16 and not small:
        # a block of scales is 128 deep, and blocks of the reduction divide it
        widths, depths = (32, *widths), depths if scaled else (*depths, 256)
    if scaled and small:
        depths = (*depths, 128)
    tiles = [
        replace(start, bm=bm, bn=bn, bk=bk, warps=warps, stages=5 if is_dw else 4)
        for bm, bn, bk, warps in itertools.product(heights, widths, depths, (4, 8))
        if not is_dw or bm <= max(64, m)
    ]
    if small or not is_dw:
        tiles += [replace(start, stages=stages) for stages in ((2, 3, 4) if small else (3, 5))]
    if not is_dw:
        tiles += [replace(start, group_m=group_m) for group_m in (4, 16) if start.bm >= 64]
    found = [start]
    for tile in tiles:
        tile = fit(kernel, tile, n, dtype.itemsize, shared)
        # a product of FP8 weights stands beside its sum until it has met its scale
        sums = tile.bm * loaded(kernel, tile) * (2 if scaled else 1)
        registers = sums // (32 * tile.warps)
        enough = held(kernel, tile, dtype.itemsize, shared) >= (2 if small else 3)
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


def measure(
    entry: Entry, full: Operands, small: Operands, dtype: torch.dtype, limit: Limit
) -> Measured:
    """Measure one entry. Raises NoTile, and TimeUp at the limit."""
    from ..kernels import chips, tiles

    device = full.x.device
    product = tiles.Product(entry.kernel, entry.height, entry.rows, entry.n, entry.k, dtype, device)
    before, start = tiles.choose(*product), tiles.heuristic(product)
    shared = chips.chip(device).shared
    tried = [before, *candidates(entry.kernel, start, entry.n, entry.k, dtype, shared)]
    begin = time.monotonic()
    found = compiled(entry, list(dict.fromkeys(tried)), small, limit)
    compile_s = time.monotonic() - begin
    tried = [tile for tile, why_not in found.items() if not why_not]
    if not tried:
        raise NoTile(found[before])
    begin = time.monotonic()
    after, ms = fastest(entry, tried, before, full, limit)
    took = time.monotonic() - begin
    return Measured(before, ms.get(before, math.inf), after, ms[after], compile_s, took)


def compiled(entry: Entry, tried: list[Tile], small: Operands, limit: Limit) -> dict[Tile, str]:
    """Compile and start each tile: "", or one line that says why it does not start.

    In threads: Triton's compiler and ptxas leave Python's lock alone most of the time.
    """
    from ..kernels import on_device, tiles

    def why_not(tile: Tile) -> str:
        limit.check()
        try:
            with on_device(small.x.device), tiles.forced(entry.kernel, tile):
                run(entry, small)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # too many resources, or a compiler that gives up
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        return ""

    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    try:
        return dict(zip(tried, pool.map(why_not, tried)))
    finally:
        pool.shutdown(cancel_futures=True)


def fastest(
    entry: Entry, tried: list[Tile], before: Tile, full: Operands, limit: Limit
) -> tuple[Tile, dict[Tile, float]]:
    """(the best tile, milliseconds); a tile that computes something else than the first is out.

    The tile in use, `before`, stays unless another one takes at most GAIN of its time.
    """
    from ..kernels import tiles

    def call(tile: Tile) -> Tensor:
        with tiles.forced(entry.kernel, tile):
            return run(entry, full)

    limit.check()
    reference = call(tried[0])
    calls = {tried[0]: lambda: call(tried[0])}
    for tile in tried[1:]:
        limit.check()
        poison = torch.full_like(reference, float("nan"))  # what `empty` then finds
        del poison
        if right(call(tile), reference):
            calls[tile] = lambda tile=tile: call(tile)
    del reference
    limit.check()
    screened = times(calls, 5)
    best = [tile for tile in sorted(screened, key=screened.__getitem__) if tile != before][:4]
    if before in calls:
        best.insert(0, before)
    limit.check()
    ms = times({tile: calls[tile] for tile in best}, 25)
    after = min(ms, key=ms.__getitem__)
    keep = before in ms and ms[after] > GAIN * ms[before]
    return before if keep else after, ms
