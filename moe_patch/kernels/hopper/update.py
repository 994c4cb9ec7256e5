"""A low-rank update of the weight: steps of the reduction that follow the weight's own.

Rows of x A^T [S, rank], which a small product before has computed, are the left operand, an
expert's B the right one, 64 of the rank a step. Past the rank both are zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import gluon_load
from .ring import BK, is_widened, rows_in
from .rows import load_parts, load_rows

async_load = gluon_load()


class Update(NamedTuple):
    """Boxes of an update; None without one."""

    side: Any
    """Parts of rows of x A^T [S, rank]."""
    b: Any
    """[columns, 64] of B as [E * N, rank]; beside a weight whose columns are contiguous, of rows of
    B as [E * rank, N], [64, columns]."""


@gluon.jit
def bring_side(update, ring, stage, place, r, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load a step's rows of x A^T, from r on of the rank. The stage's barrier expects
    their bytes and those of a whole right operand."""
    full = ring.full.index(stage)
    mbarrier.expect(full, (PLAN.bn + rows_in(PARTS, PLAN)) * BK * 2)
    load_parts(update.side, ring, stage, place, r, PARTS, PLAN)
    if is_widened(PLAN):  # there is nothing to widen
        mbarrier.arrive(ring.come.index(stage), count=1)
    if PLAN.copied:  # each thread of the producer says so
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def bring_b(b, full, right, expert, n, r, PLAN: gl.constexpr):
    """Begins to load an expert's B from column n on, and from r on of its rank."""
    if PLAN.right_turned:
        async_load(b, [expert * PLAN.n + n, r], full, right)
    else:
        load_rows(b, expert * PLAN.rank + r, (expert + 1) * PLAN.rank, n, full, right)


@gluon.jit
def bring_update(update, ring, stage, turn, place, r, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load a step of an update whose B comes in one box."""
    bring_side(update, ring, stage, place, r, PARTS, PLAN)
    full, right = ring.full.index(stage), ring.right.index(stage)
    bring_b(update.b, full, right, place.expert, place.column * PLAN.bn, r, PLAN)
