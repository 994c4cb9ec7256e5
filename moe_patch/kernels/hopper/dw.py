"""dw for Hopper: an expert's rows are the reduction; one operand is gathered, the other in order.

Columns of the gathered one come by cp.async, those of the other through TMA. Rows past an expert's
end are zeros in both, because a neighbour's may hold NaN. The gathered operand's columns are the
result's rows or its columns: as the result lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...compat import gluon_copy
from ..tiling import in_groups
from .ring import BK, multiply, ring_of, wait_empty
from .rows import load_rows
from .stores import added, in_quarters, staged_for, store, store_box

copy = gluon_copy()
GROUP_M = gl.constexpr(12)
"""Row tiles that walk the columns side by side: with as many columns as 132 programs have then,
they read the least."""


class Plan(NamedTuple):
    """Sizes of a weight gradient as it lies in memory, [E, m, n] with n contiguous; see `ring`."""

    m: int
    n: int
    stride_e: int
    stride_m: int
    gather: int
    """The gathered operand's row of a slot is slot // gather."""
    gather_left: bool
    """Columns of the gathered operand are the result's rows, else the result's columns."""
    stride_gathered: int
    add: bool
    bm: int
    bn: int
    parts: int
    stages: int
    boxed: bool
    """The result is written through TMA, as boxes [bm / parts, 64] of [E * m, n]."""
    left_turned: bool = True
    right_turned: bool = False
    copied: bool = True


class Operands(NamedTuple):
    """Factors of the product, inside a kernel; the dense one as boxes of rows."""

    gathered: Any
    dense_box: Any
    row_to_slot: Any


class Result(NamedTuple):
    """Where it goes; `boxes` of it, by way of `staged`, if it is boxed."""

    out: Any
    boxes: Any
    staged: Any


class Work(NamedTuple):
    """What all warpgroups share; `total` tiles."""

    expert_offsets: Any
    total: Any
    ring: Any


@gluon.jit
def _place(at, expert_offsets, PLAN: gl.constexpr):
    """(expert, its first row, the one after its last, first row and column of the result)."""
    NUM_M: gl.constexpr = (PLAN.m + PLAN.bm - 1) // PLAN.bm
    NUM_N: gl.constexpr = (PLAN.n + PLAN.bn - 1) // PLAN.bn
    expert = at // (NUM_M * NUM_N)
    tile, column = in_groups(at % (NUM_M * NUM_N), NUM_M, NUM_N, GROUP_M)
    begin = gl.load(expert_offsets + expert)
    end = gl.load(expert_offsets + expert + 1)
    return expert, begin, end, tile * PLAN.bm, column * PLAN.bn


@gluon.jit
def _columns(ring, stage, part: gl.constexpr, PLAN: gl.constexpr):
    """The part-th 64 columns of a stage of the gathered operand."""
    if PLAN.gather_left:
        WIDTH: gl.constexpr = PLAN.bm // PLAN.parts // 64
        left = ring.left.index(PLAN.parts * stage + part // WIDTH)
        return left.slice(part % WIDTH * 64, 64, dim=1)
    else:
        return ring.right.index(stage).slice(part * 64, 64, dim=1)


@gluon.jit
def _copy(rows, inside, first, ring, stage, PLAN: gl.constexpr):
    """Begins to copy the gathered operand's columns, from `first` on, of rows that are pointers
    [64, 1]; zeros where a row is not inside, and past the last column."""
    N: gl.constexpr = PLAN.m if PLAN.gather_left else PLAN.n
    WIDTH: gl.constexpr = PLAN.bm if PLAN.gather_left else PLAN.bn
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = first + gl.arange(0, 64, gl.SliceLayout(0, by))
    for part in gl.static_range(WIDTH // 64):
        n = gl.expand_dims(column + part * 64, 0)
        copy(_columns(ring, stage, part, PLAN), rows + n, inside & (n < N))


@gluon.jit
def _produce(operands, work, PLAN: gl.constexpr):
    PARTS: gl.constexpr = PLAN.parts
    BYTES: gl.constexpr = (PLAN.bn if PLAN.gather_left else PLAN.bm) * BK * 2
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    local = gl.arange(0, BK, gl.SliceLayout(1, by))
    step = 0
    for at in range(gl.program_id(0), work.total, gl.num_programs(0)):
        _, begin, end, m0, n0 = _place(at, work.expert_offsets, PLAN)
        gathered_at = m0 if PLAN.gather_left else n0
        dense_at = n0 if PLAN.gather_left else m0
        for row in range(begin, end, BK):
            rows = row + local
            inside = rows < end
            slot = gl.load(operands.row_to_slot + rows, mask=inside, other=0)
            source = (slot // PLAN.gather).to(gl.int64) * PLAN.stride_gathered
            source = operands.gathered + gl.expand_dims(source, 1)
            inside = gl.expand_dims(inside, 1)
            stage = wait_empty(work.ring, step, PLAN)
            full = work.ring.full.index(stage)
            _copy(source, inside, gathered_at, work.ring, stage, PLAN)
            mbarrier.expect(full, BYTES)
            if PLAN.gather_left:
                right = work.ring.right.index(stage)
                load_rows(operands.dense_box, row, end, dense_at, full, right)
            else:
                for part in gl.static_range(PARTS):
                    n = dense_at + part * (PLAN.bm // PARTS)
                    left = work.ring.left.index(PARTS * stage + part)
                    load_rows(operands.dense_box, row, end, n, full, left)
            async_copy.mbarrier_arrive(full, increment_count=False)
            step += 1


@gluon.jit
def _consume(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    step = 0
    for at in range(gl.program_id(0), work.total, gl.num_programs(0)):
        expert, begin, end, m0, n0 = _place(at, work.expert_offsets, PLAN)
        steps = (end - begin + BK - 1) // BK
        acc = multiply(work.ring, step, steps, PART, PLAN)
        step += steps
        m0 += PART * (PLAN.bm // PLAN.parts)
        if steps > 0 or not PLAN.add:  # to an expert without rows nothing is added
            if PLAN.boxed:
                first = expert * PLAN.m
                row, last = first + m0, first + PLAN.m
                quarters = in_quarters(acc)
                for i in gl.static_range(4):
                    sums, n = quarters[i], n0 + 64 * i
                    if PLAN.add:
                        sums = added(sums, result.out, row, last, n, PLAN.n, PLAN.stride_m)
                    store_box(sums, result.boxes, result.staged, row, last, n, PART, i % 2)
            else:
                to = result.out + expert.to(gl.int64) * PLAN.stride_e
                if PLAN.add:
                    acc = added(acc, to, m0, PLAN.m, n0, PLAN.n, PLAN.stride_m)
                store(acc, to, m0, PLAN.m, n0, PLAN.n, PLAN.stride_m)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts"])
def dw_hopper_kernel(
    gathered, dense_box, out, boxes, row_to_slot, expert_offsets, experts, PLAN: gl.constexpr
):  # fmt: skip
    """`dense_box`: rows of [64, bn], or [64, bm / parts] where its columns are the result's rows;
    `boxes`: of `out` as [E * m, n], rows of [64, 64]; or `out` itself."""
    NUM_M: gl.constexpr = (PLAN.m + PLAN.bm - 1) // PLAN.bm
    NUM_N: gl.constexpr = (PLAN.n + PLAN.bn - 1) // PLAN.bn
    total = experts * (NUM_M * NUM_N)
    ring = ring_of(gathered.dtype.element_ty, PLAN)
    staged = ring.left  # not used
    if PLAN.boxed:
        staged = staged_for(gathered.dtype.element_ty, PLAN)
    operands = Operands(gathered, dense_box, row_to_slot)
    result, work = Result(out, boxes, staged), Work(expert_offsets, total, ring)
    if PLAN.parts == 3:
        gl.warp_specialize(
            [
                (_consume, (result, work, 0, PLAN)),
                (_consume, (result, work, 1, PLAN)),
                (_consume, (result, work, 2, PLAN)),
                (_produce, (operands, work, PLAN)),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (result, work, 0, PLAN)),
                (_consume, (result, work, 1, PLAN)),
                (_produce, (operands, work, PLAN)),
            ],
            [4, 4],
            [224, 56],
        )
