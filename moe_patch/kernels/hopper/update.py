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
from .ring import BK, wait_empty
from .rows import load_rows

async_load = gluon_load()


class Update(NamedTuple):
    """Its boxes; None without one."""

    side: Any
    """Of rows of x A^T [S, rank], [64, 64]."""
    b: Any
    """[columns, 64] of B as [E * N, rank]; beside a weight whose columns are contiguous, of rows of
    B as [E * rank, N], [64, columns]."""


@gluon.jit
def bring_b(b, full, right, expert, n, r, N: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load an expert's B from column n on, of N, and from r on of its rank."""
    if PLAN.right_turned:
        async_load(b, [expert * N + n, r], full, right)
    else:
        load_rows(b, expert * PLAN.rank + r, (expert + 1) * PLAN.rank, n, full, right)


@gluon.jit
def load_update(update, ring, step, expert, first, end, n, BRING: gl.constexpr, PLAN: gl.constexpr):
    """Brings a tile's steps of the update, if there is one; returns the step after them.
    `BRING(b, full, right, expert, n, r, PLAN)` begins to load B from column n on."""
    PARTS: gl.constexpr = PLAN.parts
    RANK: gl.constexpr = PLAN.rank
    parts = (gl.minimum(end - first, PLAN.bm) + 63) // 64
    for r in gl.static_range(0, RANK, BK):
        for count in gl.static_range(1, PARTS + 1):
            if parts == count:
                stage = wait_empty(ring, step, PLAN)
                full = ring.full.index(stage)
                mbarrier.expect(full, (PLAN.bn + 64 * count) * BK * 2)
                BRING(update.b, full, ring.right.index(stage), expert, n, r, PLAN)
                for part in gl.static_range(count):
                    left = ring.left.index(PARTS * stage + part)
                    load_rows(update.side, first + 64 * part, end, r, full, left)
                if PLAN.copied:  # each thread of the producer says so
                    async_copy.mbarrier_arrive(full, increment_count=False)
        step += 1
    return step
