"""The warpgroup that brings the operands of one tile after another.

Kernels say how: `BRING(operands, ring, stage, turn, place, k, PARTS, PLAN)` begins to load a step,
the weight's and PARTS parts of the rows', from k on of the reduction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...compat import gluon_load
from .ring import expect_weight, parts_of, rows_in, step_of, wait_empty
from .turns import following, is_long, leave, own, tell, turns_in

async_load = gluon_load()


@gluon.jit
def bring_weight(w, ring, stage, place, k, PLAN: gl.constexpr):
    """Begins to load a step of a weight in one box."""
    come, right = expect_weight(ring, stage, PLAN)
    n = place.column * PLAN.bn
    if PLAN.right_turned:
        async_load(w, [place.expert * PLAN.n + n, k], come, right)
    else:
        async_load(w, [place.expert * PLAN.k + k, n], come, right)


@gluon.jit
def _fill(
    operands, ring, step, turn, place,
    BRING: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, BK: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Brings FROM ... TO of a tile's reduction, BK a stage, without parts past its end; returns the
    step after it."""
    PARTS: gl.constexpr = parts_of(PLAN)
    parts = (gl.minimum(place.end - place.first, rows_in(PARTS, PLAN)) + 63) // 64
    for count in gl.static_range(1, PARTS + 1):
        if parts == count:
            for k in range(FROM, TO, BK):
                stage = wait_empty(ring, step + (k - FROM) // BK, PLAN)
                BRING(operands, ring, stage, turn, place, k, count, PLAN)
    return step + (TO - FROM + BK - 1) // BK


@gluon.jit
def find_nothing(operands, turn, place, PLAN: gl.constexpr):
    """FIND of rows that lie as they are read."""


@gluon.constexpr_function
def _asked_at(plan, step):
    """Position in a tile's reduction at which the producer asks for the next tile, a multiple of
    `step`: once the ring is full, since there is time then.

    A program that asks early holds its next tile long before it begins it, while others take that
    tile's neighbours and begin at once. So where the reduction is long it asks 1024 before the
    end. Where rows are to be found by token first, that gained nothing.
    """
    late = is_long(plan.k) and not plan.copied
    return (plan.k - 16 * 64) // step * step if late else min(plan.stages * step, plan.k)


@gluon.jit
def produce(
    operands, update, tiles, ring, turns, FIND: gl.constexpr, BRING: gl.constexpr,
    BRING_UPDATE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Fills the ring. `FIND(operands, turn, place, PLAN)` prepares a tile before its turn;
    BRING_UPDATE is a BRING of a low-rank update."""
    BK: gl.constexpr = step_of(PLAN)
    ASKED: gl.constexpr = _asked_at(PLAN, BK)
    step, turn = 0, 0
    at = tell(turns, 0, gl.program_id(0), tiles, PLAN)
    place = own(turns, 0)
    FIND(operands, 0, place, PLAN)
    while place.end > 0:
        step = _fill(operands, ring, step, turn, place, BRING, 0, ASKED, BK, PLAN)
        at = tell(turns, turn + 1, following(turns, at, PLAN), tiles, PLAN)
        FIND(operands, turn + 1, own(turns, turn + 1), PLAN)
        step = _fill(operands, ring, step, turn, place, BRING, ASKED, PLAN.k, BK, PLAN)
        if PLAN.rank > 0:
            step = _fill(update, ring, step, turn, place, BRING_UPDATE, 0, PLAN.rank, 64, PLAN)
        turn += 1
        place = own(turns, turn)
    # a program's first turn is not taken, but one is for which there is no tile
    leave(turns, turns_in(tiles), PLAN)
