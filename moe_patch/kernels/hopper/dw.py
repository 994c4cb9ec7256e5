"""dw for Hopper: an expert's rows are the reduction; one operand is gathered, the other in order.

128 columns of the gathered one come by cp.async, 256 of the other through TMA. In an expert's last
block of rows both come by cp.async, and rows past the end are zeros, because a neighbour's may hold
NaN. The gathered operand's columns are the result's rows or its columns: as the result lies.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import gluon_copy, gluon_load
from .ring import BK, multiply, ring_of, store, wait_empty

async_load, copy = gluon_load(), gluon_copy()


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
    stride_dense: int
    add: bool
    bm: int
    bn: int
    stages: int
    left_turned: bool = True
    right_turned: bool = False
    copied: bool = True


@gluon.jit
def _place(at, expert_offsets, PLAN: gl.constexpr):
    """(expert, its first row, the one after its last, first row and column of the result)."""
    NUM_M: gl.constexpr = (PLAN.m + PLAN.bm - 1) // PLAN.bm
    NUM_N: gl.constexpr = (PLAN.n + PLAN.bn - 1) // PLAN.bn
    expert = at // (NUM_M * NUM_N)
    local = at % (NUM_M * NUM_N)
    begin = gl.load(expert_offsets + expert)
    end = gl.load(expert_offsets + expert + 1)
    return expert, begin, end, local % NUM_M * PLAN.bm, local // NUM_M * PLAN.bn


@gluon.jit
def _columns(ring, stage, part: gl.constexpr, LEFT: gl.constexpr, PLAN: gl.constexpr):
    """The part-th 64 columns of a stage of the left operand, or of the right one."""
    if LEFT:
        PARTS: gl.constexpr = PLAN.bm // 128  # of a half
        half = ring.left.index(2 * stage + part // PARTS)
        return half.slice(part % PARTS * 64, 64, dim=1)
    else:
        return ring.right.index(stage).slice(part * 64, 64, dim=1)


@gluon.jit
def _copy(
    rows, inside, first, ring, stage,
    PARTS: gl.constexpr, N: gl.constexpr, LEFT: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Begins to copy PARTS times 64 columns, from `first` on, of rows that are pointers [64, 1];
    zeros where a row is not inside, and from column N on."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = first + gl.arange(0, 64, gl.SliceLayout(0, by))
    for part in gl.static_range(PARTS):
        n = gl.expand_dims(column + part * 64, 0)
        to = _columns(ring, stage, part, LEFT, PLAN)
        copy(to, rows + n, inside & (n < N))


@gluon.jit
def _produce(gathered, dense, box, row_to_slot, expert_offsets, ring, total, PLAN: gl.constexpr):
    GATHERED: gl.constexpr = PLAN.m if PLAN.gather_left else PLAN.n
    DENSE: gl.constexpr = PLAN.n if PLAN.gather_left else PLAN.m
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    local = gl.arange(0, BK, gl.SliceLayout(1, by))
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        _, begin, end, m0, n0 = _place(at, expert_offsets, PLAN)
        gathered_at = m0 if PLAN.gather_left else n0
        dense_at = n0 if PLAN.gather_left else m0
        for row in range(begin, end, BK):
            rows = row + local
            inside = rows < end
            slot = gl.load(row_to_slot + rows, mask=inside, other=0)
            source = (slot // PLAN.gather).to(gl.int64) * PLAN.stride_gathered
            source = gathered + gl.expand_dims(source, 1)
            inside = gl.expand_dims(inside, 1)
            stage = wait_empty(ring, step, PLAN)
            full = ring.full.index(stage)
            _copy(source, inside, gathered_at, ring, stage, 2, GATHERED, PLAN.gather_left, PLAN)
            if row + BK <= end:
                mbarrier.expect(full, BK * 256 * 2)
                if PLAN.gather_left:
                    async_load(box, [row, dense_at], full, ring.right.index(stage))
                else:
                    async_load(box, [row, dense_at], full, ring.left.index(2 * stage))
                    async_load(box, [row, dense_at + 128], full, ring.left.index(2 * stage + 1))
            else:
                source = dense + gl.expand_dims(rows.to(gl.int64) * PLAN.stride_dense, 1)
                _copy(source, inside, dense_at, ring, stage, 4, DENSE, not PLAN.gather_left, PLAN)
                mbarrier.arrive(full, count=1)
            async_copy.mbarrier_arrive(full, increment_count=False)
            step += 1


@gluon.jit
def _consume(out, expert_offsets, ring, total, PART: gl.constexpr, PLAN: gl.constexpr):
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, begin, end, m0, n0 = _place(at, expert_offsets, PLAN)
        steps = (end - begin + BK - 1) // BK
        acc = multiply(ring, step, steps, PART, PLAN)
        step += steps
        m0 += PART * (PLAN.bm // 2)
        m_end = PLAN.m
        if PLAN.add:  # to an expert without rows nothing is added
            m_end = gl.where(steps > 0, PLAN.m, 0)
        to = out + expert.to(gl.int64) * PLAN.stride_e
        store(acc, to, m0, m_end, n0, PLAN.n, PLAN.stride_m, PLAN.add)


@gluon.jit(do_not_specialize=["experts"])
def dw_hopper_kernel(
    gathered, dense, box, out, row_to_slot, expert_offsets, experts, PLAN: gl.constexpr
):
    """`box` is of `dense`: [64, 256], or [64, 128] where its columns are the result's rows."""
    NUM_M: gl.constexpr = (PLAN.m + PLAN.bm - 1) // PLAN.bm
    NUM_N: gl.constexpr = (PLAN.n + PLAN.bn - 1) // PLAN.bn
    total = experts * (NUM_M * NUM_N)
    ring = ring_of(gathered.dtype.element_ty, PLAN)
    gl.warp_specialize(
        [
            (_consume, (out, expert_offsets, ring, total, 0, PLAN)),
            (_consume, (out, expert_offsets, ring, total, 1, PLAN)),
            (_produce, (gathered, dense, box, row_to_slot, expert_offsets, ring, total, PLAN)),
        ],
        [4, 4],
        [224, 56],
    )
