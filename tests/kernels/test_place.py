"""place: which program computes which tile. Every tile once, those of an expert side by side."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from moe_patch.kernels.groups import group_tiles
from moe_patch.kernels.tiling import place
from moe_patch.order import ExpertOrder


@triton.jit
def places_kernel(
    out, tile_expert, tile_row, ends,
    NUM_N: tl.constexpr, M_MAX: tl.constexpr, BM: tl.constexpr, GROUP_M: tl.constexpr,
    LISTED: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    expert, first, end, column = place(
        at, tile_expert, tile_row, ends, NUM_N, M_MAX, BM, GROUP_M, LISTED, EVEN, TAIL
    )
    tl.store(out + 4 * at, expert)
    tl.store(out + 4 * at + 1, first)
    tl.store(out + 4 * at + 2, end)
    tl.store(out + 4 * at + 3, column)


def places(count, tile_expert, tile_row, ends, LISTED=0, EVEN=False, TAIL=0, **sizes):
    out = torch.full((max(count, 1), 4), -1, dtype=torch.int32, device=ends.device)
    if count:
        more = {"LISTED": LISTED, "EVEN": EVEN, "TAIL": TAIL}
        places_kernel[(count,)](out, tile_expert, tile_row, ends, **more, **sizes)
    return [tuple(row) for row in out[:count].tolist()]


def random_order(draw, bm, device):
    """(rows of each expert, an order of tiles of bm rows)."""
    sizes = [
        draw.choice((0, draw.randint(1, bm), draw.randint(1, 40 * bm)))
        for _ in range(draw.randint(1, 6))
    ]
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
    slots = int(offsets[-1])
    numel = ExpertOrder.numel(slots, len(sizes), bm)
    buffer = torch.empty(numel, dtype=torch.int32, device=device)
    return sizes, group_tiles(offsets, slots, bm, buffer)


@pytest.mark.parametrize("number", range(40))
def test_listed_rows(number, device):
    draw = random.Random(number)
    bm = draw.choice((16, 64, 128))
    columns, group_m = draw.randint(1, 5), draw.choice((1, 2, 8))
    sizes, order = random_order(draw, bm, device)
    found = places(
        int(order.num_tiles) * columns, order.tile_expert, order.tile_row, order.expert_offsets,
        NUM_N=columns, M_MAX=0, BM=bm, GROUP_M=group_m,
    )  # fmt: skip
    ends = order.expert_offsets.tolist()
    wanted = [
        (expert, first, ends[expert + 1], column)
        for expert in range(len(sizes))
        for first in range(ends[expert], ends[expert + 1], bm)
        for column in range(columns)
    ]
    assert sorted(found) == sorted(wanted)
    assert [place[0] for place in found] == sorted(place[0] for place in found)
    if bm < 64:
        assert found == wanted
        return
    longest = run = 1
    for before, now in zip(found, found[1:]):
        run = run + 1 if (before[0], before[3]) == (now[0], now[3]) else 1
        longest = max(longest, run)
    if columns > 1:  # else groups follow each other in the same column
        tiles = [-(-size // bm) for size in sizes]
        heights = [-(-count // max((count + group_m // 2) // group_m, 1)) for count in tiles]
        assert longest == max(1, *heights)
        assert all(height <= group_m + group_m // 2 for height in heights)


def high_tiles(number, device, EVEN=False, TAIL=0):
    """(their places, rows of each expert, their offsets, columns, bm) for an order of tiles that
    may be lower."""
    draw = random.Random(number)
    listed, bm = draw.choice(((64, 128), (128, 128), (64, 192)))
    columns, group_m = draw.randint(1, 5), draw.choice((1, 2, 8))
    sizes, order = random_order(draw, listed, device)
    found = places(
        int(order.num_tiles) * columns, order.tile_expert, order.tile_row, order.expert_offsets,
        NUM_N=columns, M_MAX=0, BM=bm, GROUP_M=group_m, LISTED=listed, EVEN=EVEN, TAIL=TAIL,
    )  # fmt: skip
    return found, sizes, order.expert_offsets.tolist(), columns, bm


@pytest.mark.parametrize("number", range(40))
def test_tiles_higher_than_listed(number, device):
    """Every high tile once, in groups, and programs that are left over have no rows."""
    found, sizes, ends, columns, bm = high_tiles(number, device)
    wanted = [
        (expert, first, ends[expert + 1], column)
        for expert in range(len(sizes))
        for first in range(ends[expert], ends[expert + 1], bm)
        for column in range(columns)
    ]
    assert sorted(place for place in found if place[1] < place[2]) == sorted(wanted)
    assert all(place[1] <= place[2] for place in found)
    assert [place[0] for place in found] == sorted(place[0] for place in found)


@pytest.mark.parametrize("number", range(40))
def test_even_tiles(number, device):
    """No more tiles than otherwise, one after the other, equally high but for one row."""
    found, sizes, ends, columns, bm = high_tiles(number, device, EVEN=True)
    for expert, column in itertools.product(range(len(sizes)), range(columns)):
        tiles = sorted(p[1:3] for p in found if (p[0], p[3]) == (expert, column) and p[1] < p[2])
        count = -(-sizes[expert] // bm)
        assert len(tiles) == count
        edges = [ends[expert], *(end for _, end in tiles)]
        assert [first for first, _ in tiles] == edges[:-1] and edges[-1] == ends[expert + 1]
        heights = [end - first for first, end in tiles] or [0]
        assert heights == sorted(heights, reverse=True)
        assert heights[0] <= min(bm, heights[-1] + 1)
    assert all(place[1] <= place[2] for place in found)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("number", range(40))
def test_tailed_tiles(number, even, device):
    """An expert has one tile less where its others, the first ones, take the rows of that one, 16
    each, and these are no more than 64; else tiles are dealt as without tails."""
    found, sizes, ends, columns, bm = high_tiles(number, device, EVEN=even, TAIL=16)
    for expert, column in itertools.product(range(len(sizes)), range(columns)):
        tiles = sorted(p[1:3] for p in found if (p[0], p[3]) == (expert, column) and p[1] < p[2])
        full, over = divmod(sizes[expert], bm)
        tails = -(-over // 16)
        if tails > min(full, 4):
            tails = 0
        count = full if tails else -(-sizes[expert] // bm)
        assert len(tiles) == count
        edges = [ends[expert], *(end for _, end in tiles)]
        assert [first for first, _ in tiles] == edges[:-1] and edges[-1] == ends[expert + 1]
        heights = [end - first for first, end in tiles]
        if tails:
            assert heights[:-1] == [bm + 16 * (i < tails) for i in range(count - 1)]
        elif even:
            assert heights == [(sizes[expert] + count - 1 - i) // count for i in range(count)]
        else:
            assert heights[:-1] == [bm] * (count - 1)
    assert all(place[1] <= place[2] for place in found)


def test_masked_rows(device):
    counts = torch.tensor([5, 0, 70, 200], dtype=torch.int32, device=device)  # clamped to 100
    found = places(4 * 2 * 3, None, None, counts, NUM_N=3, M_MAX=100, BM=64, GROUP_M=8)
    ends = [5, 100, 270, 400]
    wanted = [
        (expert, 100 * expert + first, ends[expert], column)
        for expert in range(4)
        for column in range(3)
        for first in (0, 64)
    ]
    assert found == wanted
