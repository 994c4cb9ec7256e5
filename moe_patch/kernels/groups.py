"""The order of rows that stand by group already, and zeros where they are of no group."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch import cdiv, launches, power_of_two
from .sort_tokens import large_first_of


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def group_tiles_kernel(
    offsets, expert_offsets, row_to_slot, slot_to_row, tile_expert, tile_row, num_tiles,
    large_first, num_large, taken, num_rows, max_tiles,
    G: tl.constexpr, BM: tl.constexpr, BINS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every program knows all groups, and writes its share of the tiles and of the rows."""
    group = tl.arange(0, BINS)
    begin = tl.load(offsets + group, mask=group < G, other=0)
    end = tl.load(offsets + group + 1, mask=group < G, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), num_rows).to(tl.int32)
    end = tl.maximum(tl.minimum(tl.maximum(end, 0), num_rows).to(tl.int32), begin)
    begin = tl.associative_scan(begin, 0, _largest)
    end = tl.associative_scan(end, 0, _largest)
    count = tl.where(group < G, (end - begin + BM - 1) // BM, 0)
    last = tl.cumsum(count)
    start, stop = tl.min(begin), tl.max(end)
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(expert_offsets + group, begin, mask=group < G)
        tl.store(expert_offsets + G, stop)
        tl.store(num_tiles, tl.sum(count))
        rank, large = large_first_of(group, end - begin, stop - start, G)
        tl.store(large_first + rank, group, mask=group < G)
        tl.store(num_large, large)
        tl.store(taken, 0)
    tile = pid * TILES + tl.arange(0, TILES)
    at = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    mine = group[None, :] == at[:, None]
    row = tl.sum(tl.where(mine, (begin - (last - count) * BM)[None, :], 0), axis=1) + tile * BM
    tl.store(tile_expert + tile, tl.minimum(at, G - 1), mask=tile < max_tiles)
    tl.store(tile_row + tile, row, mask=tile < max_tiles)
    row = pid * ROWS + tl.arange(0, ROWS)
    tl.store(row_to_slot + row, row, mask=row < num_rows)
    slot = tl.where((row >= start) & (row < stop), row, -1)
    tl.store(slot_to_row + row, slot, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def zero_rest_kernel(
    out, offsets, num_rows,
    G: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    start, stop = tl.load(offsets), tl.load(offsets + G)
    if (first >= start) & (first + ROWS <= stop):
        return
    row = first + tl.arange(0, ROWS)
    mask = ((row < start) | (row >= stop)) & (row < num_rows)
    at = out + row.to(tl.int64)[:, None] * N
    zeros = tl.zeros([ROWS, BLOCK], dtype=out.dtype.element_ty)
    for n in range(0, N, BLOCK):
        column = n + tl.arange(0, BLOCK)[None, :]
        tl.store(at + column, zeros, mask=mask[:, None] & (column < N))


_group_tiles, _zero_rest = launches(group_tiles_kernel), launches(zero_rest_kernel)


def group_tiles(offsets: Tensor, num_rows: int, block_m: int, buffer: Tensor) -> ExpertOrder:
    """The order of rows of which offsets[g] to offsets[g + 1] - 1 are group g's, in `buffer`.

    offsets [G + 1] int32 or int64, contiguous; what decreases or lies outside of 0 .. num_rows is
    moved to the nearest that does not. `buffer` is int32 of ExpertOrder.numel(num_rows, G, block_m)
    elements. The host reads nothing.
    """
    groups = offsets.numel() - 1
    order = ExpertOrder.view(buffer, num_rows, groups, block_m)
    tiles, bins = order.tile_expert.numel(), power_of_two(max(groups, 2))
    share = max(16, min(256, 8192 // bins))
    start = _group_tiles(
        G=groups, BM=block_m, BINS=bins, TILES=share, ROWS=1024, num_warps=4,
    )  # fmt: skip
    start(
        (max(cdiv(tiles, share), cdiv(num_rows, 1024)),),
        offsets, order.expert_offsets, order.row_to_slot, order.slot_to_row,
        order.tile_expert, order.tile_row, order.num_tiles,
        order.large_first, order.num_large, order.taken, num_rows, tiles,
    )  # fmt: skip
    return order


def zero_rest(out: Tensor, order: ExpertOrder) -> Tensor:
    """Zeros the rows of `out` [num_rows, N], contiguous, that are of no group, and returns it."""
    rows, columns = out.shape
    block = min(256, power_of_two(max(columns, 1)))
    start = _zero_rest(
        G=order.expert_offsets.numel() - 1, N=columns, ROWS=32, BLOCK=block, num_warps=4,
    )  # fmt: skip
    if out.numel():
        start((cdiv(rows, 32),), out, order.expert_offsets, rows)
    return out
