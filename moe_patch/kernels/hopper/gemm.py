"""grouped_gemm for Hopper: rows in expert order, as they lie, and weights of their dtype.

A tile is 128 rows of one expert by 256 columns, or up to 144 where the expert then has one tile
less. One warpgroup loads it through TMA, two multiply 64 rows each, and half of the columns of the
rest. Where all 64 are past the tile's end, they are neither loaded nor multiplied. As many
programs as the chip has multiprocessors share the tiles: whoever is free takes the next, so that
the tiles at work lie close together and their operands in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .producer import bring_weight, find_nothing, produce
from .ring import (
    BK,
    bytes_of_weight,
    multiply_beside,
    multiply_tailed,
    pass_over,
    ring_of,
    rows_in,
    steps_of,
    sums_of,
    tail_of,
)
from .roles import run
from .rows import Parts, load_parts
from .stores import Waiting, Writer, rounded, staged_for, store_tail, write_quarter
from .turns import tiles_of, told, turns_of
from .update import Update, bring_update


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    k: int
    group_m: int
    stages: int
    right_turned: bool
    """The weight's reduction is contiguous in memory; else its columns are."""
    listed: int
    """Rows of a tile in the order's list: 128 or 64."""
    tail: int
    """Rows that a tile may have beyond `bm`."""
    bm: int = 128
    bn: int = 256
    parts: int = 2
    rank: int = 0
    """Rank of a low-rank update; 0: there is none."""
    widened: bool = False
    left_turned: bool = False
    copied: bool = False


class Operands(NamedTuple):
    """Parts of rows of x, and boxes of the weight."""

    x: Any
    w: Any


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    full = ring.full.index(stage)
    mbarrier.expect(full, bytes_of_weight(PLAN) + rows_in(PARTS, PLAN) * BK * 2)
    bring_weight(operands.w, ring, stage, place, k, PLAN)
    load_parts(operands.x, ring, stage, place, k, PARTS, PLAN)


@gluon.jit
def _produce(operands, update, tiles, ring, turns, PLAN: gl.constexpr):
    produce(operands, update, tiles, ring, turns, find_nothing, _bring, bring_update, PLAN)


@gluon.jit
def _consume(out, staged, ring, turns, ME: gl.constexpr, PLAN: gl.constexpr):
    STEPS: gl.constexpr = steps_of(PLAN)
    TAILS: gl.constexpr = tail_of(PLAN) > 0
    step, turn = 0, 0
    _, first, end, column = told(turns, 0)
    waiting = Waiting(rounded(sums_of(PLAN), out.dtype), first, end * 0, column)
    while end > 0:
        n, rows = column * PLAN.bn, end - first
        # of short tiles each warpgroup gets its share
        part = gl.where(rows > PLAN.bm, ME, (turn + ME) % PLAN.parts)
        writer = Writer(out, staged, waiting, ME, 0)
        if rows > 64 * part:
            if TAILS and rows > PLAN.bm:
                acc, one, two = multiply_tailed(
                    ring, step, STEPS, ME, writer, write_quarter, 4, PLAN
                )
                tail, column = first + PLAN.bm, n + 64 * ME
                store_tail(one, out, staged, tail, end, column, ME)
                store_tail(two, out, staged, tail, end, column + PLAN.bn // 2, ME)
            else:
                acc = multiply_beside(ring, step, STEPS, part, writer, write_quarter, 4, PLAN)
            waiting = Waiting(rounded(acc, out.dtype), first + 64 * part, end, n)
        else:
            pass_over(ring, step, STEPS, PLAN)
        step += STEPS
        turn += 1
        _, first, end, column = told(turns, turn)
    for i in gl.static_range(4):
        write_quarter(Writer(out, staged, waiting, ME, 0), i)
    tma.store_wait(0)


@gluon.jit
def gemm_hopper_kernel(
    x, x_tail, w, scales, side, side_tail, b, out, taken,
    expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr,
):  # fmt: skip
    """x [S, K] and out [S, N] as boxes of rows, [64, 64]; w as boxes [256, 64] of [E * N, K] or
    [64, 256] of [E * K, N], with K a multiple of 64; `taken` is an order's. `side` and `b` are an
    `Update`; `x_tail` and `side_tail` the boxes of a tail."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    ring, turns = ring_of(out.dtype, PLAN), turns_of(taken, PLAN)
    staged = staged_for(out.dtype, PLAN)
    update = Update(Parts(side, side_tail), b)
    run(
        (out, staged, ring, turns, 0, PLAN),
        (out, staged, ring, turns, 1, PLAN),
        (Operands(Parts(x, x_tail), w), update, tiles, ring, turns, PLAN),
        (scales, ring, turns, False, PLAN),
        _consume, _produce, PLAN,
    )  # fmt: skip
