"""Stable counting sort of slots by expert: integers only, no host sync, one or two launches."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch import Launch, cdiv, power_of_two
from .tiles import INTERPRET


@triton.jit
def _bin(ids, slot, num_slots, E: tl.constexpr):
    """Expert of each slot; E for an id out of range, E + 1 past the end."""
    expert = tl.load(ids + slot, mask=slot < num_slots, other=0).to(tl.int64)
    # compared before it is narrowed: the low half of 2^32 + 1 is an expert
    expert = tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32)
    return tl.where(slot < num_slots, expert, E + 1)


@triton.jit
def large_first_of(expert, count, rows, E: tl.constexpr):
    """(place of each expert among all, large ones first; number of large ones): those with more
    than twice the mean of `rows` rows."""
    large = (expert < E) & (count > 2 * ((rows + E - 1) // E))
    before = tl.cumsum(large.to(tl.int32)) - large.to(tl.int32)
    number = tl.sum(large.to(tl.int32))
    return tl.where(large, before, number + expert - before), number


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(ids, counts, num_slots, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    expert = _bin(ids, block * BLOCK + tl.arange(0, BLOCK), num_slots, E)
    found = tl.histogram(expert, BINS, mask=expert < E)
    tl.store(counts + block * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "block_m"])
def place_kernel(
    ids, counts,
    expert_offsets, row_to_slot, slot_to_row, tile_expert, tile_row, num_tiles,
    large_first, num_large, taken,
    num_slots, num_blocks, block_m, E: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    local = tl.arange(0, BLOCK)
    expert = _bin(ids, block * BLOCK + local, num_slots, E)
    if SINGLE:
        mine = tl.histogram(expert, BINS, mask=expert < E)
        total = mine
        before = tl.zeros([BINS], dtype=tl.int32)
    else:
        mine = tl.load(counts + block * BINS + bins)
        total = tl.zeros([BINS], dtype=tl.int32)
        before = tl.zeros([BINS], dtype=tl.int32)
        for first in range(0, num_blocks, CHUNK):
            b = first + tl.arange(0, CHUNK)[:, None]
            chunk = tl.load(counts + b * BINS + bins[None, :], mask=b < num_blocks, other=0)
            total += tl.sum(chunk, axis=0)
            before += tl.sum(tl.where(b < block, chunk, 0), axis=0)
    offset = tl.cumsum(total) - total
    rows = tl.sum(total)
    tiles = (total + block_m - 1) // block_m
    tile_offset = tl.cumsum(tiles) - tiles
    if block == 0:
        tl.store(expert_offsets + bins, offset, mask=bins < E)
        tl.store(expert_offsets + E, rows)
        tl.store(num_tiles, tl.sum(tiles))
        rank, large = large_first_of(bins, total, rows, E)
        tl.store(large_first + rank, bins, mask=bins < E)
        tl.store(num_large, large)
        tl.store(taken, 0)
    # the i-th slot of this block in expert order is row i + shift[expert]
    scratch = counts + (num_blocks + 3 * block) * BINS
    tl.store(scratch + bins, offset + before - (tl.cumsum(mine) - mine))
    tl.store(scratch + BINS + bins, offset)
    tl.store(scratch + 2 * BINS + bins, tile_offset)
    tl.debug_barrier()

    key = tl.sort(expert * BLOCK + local)
    expert = key // BLOCK
    slot = block * BLOCK + key % BLOCK
    known = expert < E
    dropped = rows + block * BLOCK - tl.sum(before) - tl.sum(mine)
    row = local + tl.load(scratch + expert, mask=known, other=dropped)
    inside = slot < num_slots
    tl.store(row_to_slot + row, slot, mask=inside)
    tl.store(slot_to_row + slot, tl.where(known, row, -1), mask=inside)
    rank = row - tl.load(scratch + BINS + expert, mask=known, other=0)
    tile = tl.load(scratch + 2 * BINS + expert, mask=known, other=0) + rank // block_m
    leads = known & (rank % block_m == 0)
    tl.store(tile_expert + tile, expert, mask=leads)
    tl.store(tile_row + tile, row, mask=leads)


def _block(slots: int) -> int:
    """Slots a program sorts: small sorts are fast, many programs read many counts.

    Each size is compiled once, so there are few: sorting 64 takes no longer than sorting 16.
    """
    if INTERPRET:
        return min(64, max(16, power_of_two(slots)))
    if slots <= 512:
        return max(64, power_of_two(slots))
    return next((b for b in (256, 512, 1024) if slots <= b * b // 4), 2048)


def programs(slots: int) -> int:
    """How many programs sort that many slots; one needs no counting before."""
    return max(1, cdiv(slots, _block(slots)))


def sort_tokens(top_k_index: Tensor, num_experts: int, block_m: int, buffer: Tensor) -> ExpertOrder:
    """Sorts the slots of top_k_index [T, K] (any integer dtype, contiguous) into `buffer`.

    `buffer` is int32 of ExpertOrder.numel(T * K, num_experts, block_m) elements. Ids outside
    0 .. num_experts - 1 are dropped, so expert-parallel sentinels cost nothing later.
    """
    slots = top_k_index.numel()
    order = ExpertOrder.view(buffer, slots, num_experts, block_m)
    count, place, blocks, bins = _start(slots, num_experts)
    # counts [blocks, bins], then three rows of scratch for each block
    counts = buffer.new_empty(4, blocks, bins)
    if blocks > 1:
        count((blocks,), top_k_index, counts, slots)
    place(
        (blocks,), top_k_index, counts,
        order.expert_offsets, order.row_to_slot, order.slot_to_row,
        order.tile_expert, order.tile_row, order.num_tiles,
        order.large_first, order.num_large, order.taken, slots, blocks, block_m,
    )  # fmt: skip
    return order


@functools.lru_cache(1024)
def _start(slots: int, num_experts: int) -> tuple[Launch, Launch, int, int]:
    """Of the two kernels; the number of blocks and of bins."""
    bins = power_of_two(max(num_experts, 2))
    block, blocks = _block(slots), programs(slots)
    chunk = 1 if blocks == 1 else max(1, 4096 // bins)  # unused with one block
    sizes = {"E": num_experts, "BINS": bins, "BLOCK": block, "num_warps": 4}
    single = blocks == 1
    place = Launch(place_kernel, SINGLE=single, CHUNK=chunk, **sizes)
    return Launch(count_kernel, **sizes), place, blocks, bins
