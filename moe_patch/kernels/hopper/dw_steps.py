"""Steps that a program of dw takes: its tiles, one after the other, BK rows of an expert a step.

The producer is two steps ahead of what it copies, so that it goes over to the next tile, and tells
the others of it, before the tile at hand is at its end. Tiles are dealt out, or go to whichever
program is free, in an order in which what takes long comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiling import in_groups
from .ring import BK
from .turns import answer, ask, column_tiles, post, posted

SLOTS = gl.constexpr(4)
"""Tiles of which the others may have been told: one that they still read, the one at hand, and two
ahead. With fewer the producer would wait for whoever waits for it."""


class Tiles(NamedTuple):
    """Tiles of a result, and how the producer comes by them."""

    expert_offsets: Any
    large_first: Any
    """Experts in the order in which their tiles are computed: what takes long begins first."""
    total: Any
    turns: Any
    shared: Any
    """Whether they go to whichever program is free; else they are dealt out."""


class Step(NamedTuple):
    """BK rows of the reduction, and the tile of which they are a step."""

    first: Any
    end: Any
    """The row after the expert's last."""
    row: Any
    """First of the gathered operand's columns; below 0: there is no step left."""
    column: Any
    """First of the other's."""


class Queue(NamedTuple):
    """Tiles of a program's, for its producer."""

    at: Any
    """Number of the tile at hand."""
    asked: Any
    """The one after it, as `ask` has it, if they are shared; else anything."""
    turn: Any
    """Number of the next turn, of which the others have not been told."""


class Tile(NamedTuple):
    """Tile of a turn, for the others."""

    expert: Any
    row: Any
    """Number of the row tile."""
    steps: Any
    """Steps that it takes; 0: there is no tile left."""
    column: Any
    """Number of the column tile."""


@gluon.constexpr_function
def row_tiles(plan):
    """Tiles below each other."""
    return (plan.m + plan.bm - 1) // plan.bm


@gluon.jit
def told(turns, turn):
    """Tile of a turn, once it is there; `forget` says that it has been read."""
    expert, row, steps, column = posted(turns, turn)
    return Tile(expert, row, steps, column)


@gluon.jit
def first_tile(tiles):
    """Queue at the program's first tile; asks for the one after it."""
    return Queue(gl.program_id(0), ask(tiles.turns, tiles.shared), gl.to_tensor(0))


@gluon.jit
def next_tile(queue, tiles):
    """Queue at the tile after that; asks for the one after it."""
    at, asked = queue.at + gl.num_programs(0), queue.asked
    if tiles.shared:
        at, asked = answer(asked), ask(tiles.turns)
    return Queue(at, asked, queue.turn)


@gluon.jit
def _rows_of(queue, tiles, PLAN: gl.constexpr):
    """(expert, its first row, the row after its last) of a tile; the last one's after it."""
    NUM_M: gl.constexpr = row_tiles(PLAN)
    at = gl.minimum(queue.at, tiles.total - 1)
    expert = at // (NUM_M * column_tiles(PLAN))
    expert = gl.load(tiles.large_first + expert)
    begin = gl.load(tiles.expert_offsets + expert)
    return expert, begin, gl.load(tiles.expert_offsets + expert + 1)


@gluon.jit
def tell(queue, tiles, PLAN: gl.constexpr):
    """Tells the others the tile at hand, or that there is none: (Queue, the tile's first Step). To
    an expert without rows nothing is added; without `add` such a tile is a step of zeros, so that
    as many tiles are told ahead as steps."""
    NUM_M: gl.constexpr = row_tiles(PLAN)
    NUM_N: gl.constexpr = column_tiles(PLAN)
    expert, begin, end = _rows_of(queue, tiles, PLAN)
    if PLAN.add:
        while (begin == end) & (queue.at < tiles.total):
            queue = next_tile(queue, tiles)
            expert, begin, end = _rows_of(queue, tiles, PLAN)
    row, column = in_groups(queue.at % (NUM_M * NUM_N), NUM_M, NUM_N, PLAN.group_m)
    steps = gl.maximum((end - begin + BK - 1) // BK, 1)
    if queue.at >= tiles.total:
        row, steps = gl.to_tensor(-1), gl.to_tensor(0)
    post(tiles.turns, queue.turn, Tile(expert, row, steps, column))
    queue = Queue(queue.at, queue.asked, queue.turn + 1)
    return queue, Step(begin, end, row * PLAN.bm, column * PLAN.bn)


@gluon.jit
def next_step(queue, step, tiles, PLAN: gl.constexpr):
    """(Queue, Step) after a step: of its tile, or the first one of the next tile, which is told."""
    after = Step(step.first + BK, step.end, step.row, step.column)
    if (after.first >= after.end) & (step.row >= 0):
        queue, after = tell(next_tile(queue, tiles), tiles, PLAN)
    return queue, after
