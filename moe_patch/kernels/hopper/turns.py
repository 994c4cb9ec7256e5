"""Tiles, one after the other, to whichever program is free. (dw may deal them out.)

So tiles that take long are no one program's, and those at work lie close together, with their
operands in the L2 cache. The order in which tiles are done changes no bit of them.

An order may list lower tiles than a kernel has. An expert has a turn for each tile that is listed.
The producer passes over turns that the kernel's higher tiles leave, and tells nobody. Tiles that
would keep few programs busy may be halved: two turns are then theirs, of half their columns each.
So are masked ones if no two read the same columns of a weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..tiling import place
from .ring import tail_of


class Tiles(NamedTuple):
    """An ExpertOrder's tiles inside a kernel, and how many they are."""

    ends: Any
    tile_expert: Any
    tile_row: Any
    total: Any
    halved: Any
    """Number of the last ones that are two turns each, of half their columns."""


class MaskedTiles(NamedTuple):
    """Tiles that no list has: of how many rows each expert has."""

    rows: Any
    """Each expert's rows, in registers."""
    past: Any
    """Number of tiles up to each expert's last."""
    total: Any
    halved: Any
    """Number of halved tiles, as of Tiles."""


class Turns(NamedTuple):
    """The producer takes a tile for its program and tells the others through a few slots, so that
    nobody else waits for global memory."""

    taken: Any
    """How many turns are taken, besides the first of every program: an ExpertOrder's, in global
    memory. It is 0 before a kernel and after it. Masked, turns are dealt, and nobody reads it."""
    slot: Any
    """Memory for four numbers of each turn: a Place, or what dw tells."""
    full: Any
    empty: Any


class Place(NamedTuple):
    """Position of a tile."""

    expert: Any
    first: Any
    """The tile's first row."""
    end: Any
    """The row after the tile's last, or after its expert's, which may be further; 0: no tile."""
    column: Any
    """Number of the column tile; counted on from `column_tiles`, that of half a tile."""


@gluon.constexpr_function
def column_tiles(plan):
    """Tiles side by side."""
    return (plan.n + plan.bn - 1) // plan.bn


@gluon.constexpr_function
def _listeners(plan):
    """How many are told: those that multiply, and whoever else the plan names."""
    return getattr(plan, "listeners", plan.parts + getattr(plan, "widened", False))


@gluon.constexpr_function
def _masked_rows(plan):
    """Rows that an expert has, masked; 0: tiles are listed."""
    return getattr(plan, "m_max", 0)


@gluon.constexpr_function
def is_long(k):
    """Whether programs may drift so far apart on the way of a reduction over k that a weight which
    they share leaves the L2 cache between them."""
    return k > 2048


@gluon.jit
def turns_of(taken, PLAN: gl.constexpr, SLOTS: gl.constexpr = 2):
    """Turns with their barriers ready, of which SLOTS may be told and not be read yet."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slot = gl.allocate_shared_memory(gl.int32, [4 * SLOTS, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_listeners(PLAN))
    return Turns(taken, slot, full, empty)


@gluon.jit
def take(turns):
    """The next turn."""
    return gl.num_programs(0) + gl.atomic_add(turns.taken, 1, sem="relaxed")


@gluon.jit
def _threads():
    """Numbers of the threads."""
    by: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, 32 * gl.num_warps(), by)


@gluon.jit
def ask(turns, pred=True):
    """Begins to take the next turn, which `answer` gives: nobody waits in between, as `take` does.
    The first thread's number is the one that counts."""
    thread = _threads()
    return gl.atomic_add(
        turns.taken + 0 * thread, 1 + 0 * thread, pred & (thread == 0), sem="relaxed"
    )


@gluon.jit
def answer(asked):
    """The turn that was asked for."""
    return gl.num_programs(0) + gl.sum(gl.where(_threads() == 0, asked, 0), axis=0)


@gluon.constexpr_function
def _halves(plan):
    """Whether tiles may be halved."""
    return getattr(plan, "halves", False)


@gluon.jit
def _halved(total, PLAN: gl.constexpr):
    """How many of the last tiles are to be halved: all, if they are no more than half of the
    programs; or those of a last round in which no more than a quarter would be busy, since
    programs do not begin it together."""
    if _halves(PLAN):
        rest = total % gl.num_programs(0)
        share = gl.where(rest == total, 2, 4)
        return gl.where(share * rest <= gl.num_programs(0), rest, 0)
    else:
        return 0


@gluon.jit
def _row_tiles(rows, PLAN: gl.constexpr):
    """Row tiles of so many rows."""
    return (rows + PLAN.bm - 1) // PLAN.bm


@gluon.constexpr_function
def _masked_experts(plan):
    """Number of experts, or of a few more, so that each thread of a warp has as many."""
    return max(32, 1 << (plan.experts - 1).bit_length())


@gluon.jit
def _experts(PLAN: gl.constexpr):
    """Numbers of masked experts, those of a thread in a row."""
    EXPERTS: gl.constexpr = _masked_experts(PLAN)
    by: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0])
    return gl.arange(0, EXPERTS, by)


@gluon.jit
def tiles_of(ends, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr):
    """Tiles of a product: of an order, or MaskedTiles of how many rows `ends` says that each
    expert has, clamped to what it can have."""
    if _masked_rows(PLAN) > 0:
        expert = _experts(PLAN)
        rows = gl.load(ends + expert, mask=expert < PLAN.experts, other=0)
        rows = gl.maximum(gl.minimum(rows, _masked_rows(PLAN)), 0)
        past = tl.cumsum(_row_tiles(rows, PLAN) * column_tiles(PLAN), 0)
        total = gl.max(past, axis=0)
        halved = _halved(total, PLAN)
        if _halves(PLAN):  # all, if no two tiles read the same columns of a weight
            halved = gl.where(gl.max(rows, axis=0) <= PLAN.bm, total, halved)
        return MaskedTiles(rows, past, total, halved)
    else:
        total = gl.load(num_tiles) * column_tiles(PLAN)
        return Tiles(ends, tile_expert, tile_row, total, _halved(total, PLAN))


@gluon.jit
def turns_in(tiles):
    """How many turns all tiles are."""
    return tiles.total + tiles.halved


@gluon.jit
def _masked_place(at, tiles, PLAN: gl.constexpr):
    """(expert, first row, the row after its last, column tile) of tile `at`. An expert's row tiles
    stand together, so that they read a weight's columns at the same time."""
    M_MAX: gl.constexpr = _masked_rows(PLAN)
    expert = gl.sum((tiles.past <= at).to(gl.int32), axis=0)
    before = gl.max(gl.where(tiles.past <= at, tiles.past, 0), axis=0)
    rows = gl.sum(gl.where(_experts(PLAN) == expert, tiles.rows, 0), axis=0)
    high = _row_tiles(rows, PLAN)
    first = expert * M_MAX + (at - before) % high * PLAN.bm
    return expert, first, expert * M_MAX + rows, (at - before) // high


@gluon.jit
def _place(at, tiles, PLAN: gl.constexpr):
    """The Place of turn `at` of all."""
    COLUMNS: gl.constexpr = column_tiles(PLAN)
    tile, half = at, 0
    if _halves(PLAN):
        half = at - (tiles.total - tiles.halved)
        tile = gl.where(half < 0, at, at - half + half // 2)
    if _masked_rows(PLAN) > 0:
        expert, first, end, column = _masked_place(tile, tiles, PLAN)
    else:
        expert, first, end, column = place(
            tile, tiles.tile_expert, tiles.tile_row, tiles.ends,
            COLUMNS, 0, PLAN.bm, PLAN.group_m, PLAN.listed, is_long(PLAN.k), tail_of(PLAN),
        )  # fmt: skip
    if _halves(PLAN):
        column = gl.where(half < 0, column, COLUMNS + 2 * column + half % 2)
    return Place(expert, first, end, column)


@gluon.jit
def columns_of(column, PLAN: gl.constexpr):
    """(a tile's first column, whether it is half a one), of a Place's `column`."""
    COLUMNS: gl.constexpr = column_tiles(PLAN)
    if _halves(PLAN):
        half = column - COLUMNS
        n = gl.where(half < 0, column * PLAN.bn, half * (PLAN.bn // 2))
        return n, half >= 0
    else:
        return column * PLAN.bn, column < 0


@gluon.jit
def following(turns, at, PLAN: gl.constexpr):
    """The next turn: of all programs, or, where they are dealt, of this one after turn `at`."""
    if _masked_rows(PLAN) > 0:
        return at + gl.num_programs(0)
    else:
        return take(turns)


@gluon.jit
def leave(turns, taken, PLAN: gl.constexpr):
    """Says that the program takes no more; `taken` is how many turns all programs take together.
    The last one that leaves puts the count of them back to 0."""
    if _masked_rows(PLAN) == 0:
        if take(turns) == taken + 2 * gl.num_programs(0) - 1:
            gl.store(turns.taken, 0)


@gluon.jit
def _slot(turns, turn):
    """(a turn's slot, which of two phases its barriers are in)."""
    SLOTS: gl.constexpr = turns.full.shape[0]
    return turn % SLOTS, (turn // SLOTS) & 1


@gluon.jit
def post(turns, turn, numbers):
    """Tells the others four numbers of the program's `turn`, as soon as they have read those that
    were told as many turns before as there are slots."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot, phase = _slot(turns, turn)
    mbarrier.wait(turns.empty.index(slot), phase ^ 1)
    for i in gl.static_range(4):
        number = gl.full([1], numbers[i], gl.int32, one)
        turns.slot.index(slot * 4 + i).store(number)
    mbarrier.arrive(turns.full.index(slot), count=1)


@gluon.jit
def _read(turns, turn, I: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot, _ = _slot(turns, turn)
    return gl.max(turns.slot.index(slot * 4 + I).load(one), axis=0)


@gluon.jit
def tell(turns, turn, at, tiles, PLAN: gl.constexpr):
    """Tells which tile the program's `turn` is: that of turn `at` of all, or of the next that has
    rows, and returns that turn. The row after the last is 0 if there is none.

    Over a long reduction a program whose tile is short would overtake others, and begin its next
    tile long before those that share a weight with it: so an expert's tiles are equally high there.
    """
    expert, first, end, column = 0, 0, 0, 0
    found, all_turns = at, turns_in(tiles)
    while at < all_turns:
        expert, first, end, column = _place(at, tiles, PLAN)
        found = at
        if first < end:
            at = all_turns
        else:
            end = 0
            at = following(turns, at, PLAN)
    post(turns, turn, (expert, first, end, column))
    return found


@gluon.jit
def _numbers_of(turns, turn):
    """The four numbers of a turn, for whoever knows that they are there."""
    return (
        _read(turns, turn, 0),
        _read(turns, turn, 1),
        _read(turns, turn, 2),
        _read(turns, turn, 3),
    )


@gluon.jit
def posted(turns, turn):
    """The four numbers of a turn, for the others; they stay until `forget`."""
    slot, phase = _slot(turns, turn)
    mbarrier.wait(turns.full.index(slot), phase)
    return _numbers_of(turns, turn)


@gluon.jit
def forget(turns, turn):
    """Says that a turn's numbers have been read."""
    slot, _ = _slot(turns, turn)
    mbarrier.arrive(turns.empty.index(slot), count=1)


@gluon.jit
def own(turns, turn):
    """The Place of a turn, for the producer."""
    expert, first, end, column = _numbers_of(turns, turn)
    return Place(expert, first, end, column)


@gluon.jit
def told(turns, turn):
    """The Place of a turn, for the others."""
    expert, first, end, column = posted(turns, turn)
    forget(turns, turn)
    return Place(expert, first, end, column)
