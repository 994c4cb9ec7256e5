"""Shared memory that operands pass through: a producer fills stages, two warpgroups empty them.

A stage is 64 of the reduction. A tile's left operand lies in halves, one for each warpgroup; its
right one is whole, and both read it. Each warpgroup has its sums in registers. They may be as far
apart as the ring has stages, so that one's epilogue runs beside the other's products.

A PLAN, the sizes of a product as one constant, says how a ring lies: `bm` and `bn`, the rows and
columns of a tile; `left_turned`, halves [64, bm / 2] instead of [bm / 2, 64]; `right_turned`,
[bn, 64] instead of [64, bn]; `copied`, some of it comes by cp.async; and `stages`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BK = gl.constexpr(64)
PRODUCERS = gl.constexpr(128)
"""Threads of the producer: each says when what it copied has arrived."""


class Ring(NamedTuple):
    """Stages of both operands, and the barriers that say that one is full, and empty again."""

    left: Any
    right: Any
    full: Any
    empty: Any


@gluon.jit
def ring_of(dtype: gl.constexpr, PLAN: gl.constexpr):
    """A Ring with its barriers ready."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = PLAN.stages
    HALF: gl.constexpr = PLAN.bm // 2
    BN: gl.constexpr = PLAN.bn
    if PLAN.left_turned:
        left = gl.allocate_shared_memory(dtype, [2 * STAGES, BK, HALF], layout)
    else:
        left = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, BK], layout)
    if PLAN.right_turned:
        right = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], layout)
    else:
        right = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + PRODUCERS if PLAN.copied else 1)
        mbarrier.init(empty.index(stage), count=2)
    return Ring(left, right, full, empty)


@gluon.jit
def wait_empty(ring, step, PLAN: gl.constexpr):
    """The stage of a step, once both warpgroups have read what was in it."""
    stage = step % PLAN.stages
    mbarrier.wait(ring.empty.index(stage), (step // PLAN.stages) & 1 ^ 1)
    return stage


@gluon.jit
def multiply(ring, step, steps, PART: gl.constexpr, PLAN: gl.constexpr):
    """Sums [bm / 2, bn] over `steps` stages from `step` on, of PART's half of the left operand."""
    HALF: gl.constexpr = PLAN.bm // 2
    BN: gl.constexpr = PLAN.bn
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([HALF, BN], gl.float32, layout)
    for i in range(steps):
        stage = (step + i) % PLAN.stages
        mbarrier.wait(ring.full.index(stage), ((step + i) // PLAN.stages) & 1)
        if PLAN.copied:  # cp.async writes as threads do, and wgmma reads as TMA does
            fence_async_shared()
        left = ring.left.index(2 * stage + PART)
        right = ring.right.index(stage)
        if PLAN.left_turned:
            left = left.permute((1, 0))
        if PLAN.right_turned:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        before = (step + i - 1) % PLAN.stages
        mbarrier.arrive(ring.empty.index(before), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    last = (step + steps - 1) % PLAN.stages
    mbarrier.arrive(ring.empty.index(last), count=1, pred=steps > 0)
    return acc


@gluon.jit
def pass_over(ring, step, steps, PLAN: gl.constexpr):
    """Lets `steps` stages go by unread."""
    for i in range(step, step + steps):
        mbarrier.wait(ring.full.index(i % PLAN.stages), (i // PLAN.stages) & 1)
        mbarrier.arrive(ring.empty.index(i % PLAN.stages), count=1)


@gluon.constexpr_function
def _by_quads(rows, columns):
    """Layout of a warpgroup's [rows, columns] in which a thread has eight neighbours of a row, and
    four threads 32: every row stays in the warp that has it among its sums."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, size] for size in (32, 64, 128) if size < columns]
    registers += [[8, 0]] + [[size, 0] for size in (64,) if size < rows]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store(
    acc, out, m0, m_end, n0, n_end,
    ROW: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Writes sums to rows m0 ... of `out`, ROW elements apart, up to row m_end and column n_end, or
    adds them. They are not to push operands out of the L2 cache."""
    WIDE: gl.constexpr = out.dtype.element_ty.primitive_bitwidth > 16
    by: gl.constexpr = acc.type.layout if WIDE else _by_quads(acc.shape[0], acc.shape[1])
    m = m0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, by))
    n = n0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, by))
    to = out + gl.expand_dims(m.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(m < m_end, 1) & gl.expand_dims(n < n_end, 0)
    if ADD:
        old = gl.load(to, mask=inside, other=0.0)
        acc += gl.convert_layout(old, acc.type.layout).to(gl.float32)
    new = gl.convert_layout(acc.to(out.dtype.element_ty), by)
    gl.store(to, new, mask=inside, cache_modifier=".cs")
