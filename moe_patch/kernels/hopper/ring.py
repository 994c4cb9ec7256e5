"""Shared memory that operands pass through: a producer fills stages, other warpgroups empty them.

A stage is 64 of the reduction. A tile's left operand lies in parts, one for each warpgroup that
multiplies; its right one is whole, and all of them read it. Each has its sums in registers. They
may be as far apart as the ring has stages, so that one's epilogue runs beside the others' products.

A PLAN, the sizes of a product as one constant, says how a ring lies: `bm` and `bn`, the rows and
columns of a tile; `parts`, how many the rows are in; `left_turned`, parts [64, bm / parts] instead
of [bm / parts, 64]; `right_turned`, [bn, 64] instead of [64, bn]; `copied`, some of it comes by
cp.async; and `stages`. Where `producer` fills the ring it also has the sizes of a weight, `n` and
`k`, the `rank` of its update, and whether it is `widened`: it has 8 bits, and `widening` fills the
right operand. `tail`: a tile may have so many rows more, which lie apart.
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
    tail: Any
    """Each stage's rows of a tile's tail, [tail, 64]; of tiles without one, `left`."""


class WidenedRing(NamedTuple):
    """A Ring whose right operand arrives in 8 bits, as `raw`, and is written by `widening`."""

    left: Any
    right: Any
    full: Any
    empty: Any
    tail: Any
    raw: Any
    """Each stage's e4m3, of the shape that `right` has."""
    come: Any
    """Barriers that say that a stage's e4m3 is there."""


@gluon.constexpr_function
def step_of(plan):
    """Part of the reduction that a stage holds: 64, if the plan says nothing else."""
    return getattr(plan, "bk", 64)


@gluon.constexpr_function
def is_widened(plan):
    """Whether the weight has 8 bits."""
    return getattr(plan, "widened", False)


@gluon.constexpr_function
def tail_of(plan):
    """Rows that a tile may have beyond `bm`: a last part of them, which all warpgroups share."""
    return getattr(plan, "tail", 0)


@gluon.constexpr_function
def parts_of(plan):
    """How many parts a tile's rows may be in, with the tail."""
    return plan.parts + (getattr(plan, "tail", 0) > 0)


@gluon.constexpr_function
def rows_in(parts, plan):
    """Rows of the first `parts` parts of a tile."""
    rows = min(parts, plan.parts) * plan.bm // plan.parts
    return rows + plan.tail if parts > plan.parts else rows


@gluon.constexpr_function
def bytes_of_weight(plan):
    """Bytes of a step's weight that arrive at the barrier `full`: none where they are widened."""
    return 0 if plan.widened else 2 * plan.bn * 64


@gluon.constexpr_function
def steps_of(plan):
    """Stages that a tile takes: of its reduction, and of a low-rank update."""
    return plan.k // 64 + (plan.rank + 63) // 64


@gluon.jit
def barriers_of(ARRIVALS: gl.constexpr, PLAN: gl.constexpr):
    """(full, empty), ready: a stage is full after so many arrivals and what TMA brings, and empty
    once every part has released it."""
    STAGES: gl.constexpr = PLAN.stages
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=PLAN.parts)
    return full, empty


@gluon.jit
def with_barriers(left, right, tail, PLAN: gl.constexpr):
    """A Ring of this memory, with its barriers ready."""
    ARRIVALS: gl.constexpr = (1 + PRODUCERS if PLAN.copied else 1) + is_widened(PLAN)
    full, empty = barriers_of(ARRIVALS, PLAN)
    return Ring(left, right, full, empty, tail)


@gluon.jit
def ring_of(dtype: gl.constexpr, PLAN: gl.constexpr):
    """A Ring with its barriers ready."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = PLAN.stages
    LEFTS: gl.constexpr = PLAN.parts * STAGES
    PART: gl.constexpr = PLAN.bm // PLAN.parts
    BN: gl.constexpr = PLAN.bn
    if PLAN.left_turned:
        left = gl.allocate_shared_memory(dtype, [LEFTS, BK, PART], layout)
    else:
        left = gl.allocate_shared_memory(dtype, [LEFTS, PART, BK], layout)
    if PLAN.right_turned:
        right = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], layout)
    else:
        right = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], layout)
    TAIL: gl.constexpr = tail_of(PLAN)
    tail = left
    if TAIL > 0:
        tail = gl.allocate_shared_memory(dtype, [STAGES, TAIL, BK], layout)
    ring = with_barriers(left, right, tail, PLAN)
    if is_widened(PLAN):
        return _widened(ring, PLAN)
    else:
        return ring


@gluon.jit
def _widened(ring, PLAN: gl.constexpr):
    """A WidenedRing of this Ring, with its barriers ready."""
    STAGES: gl.constexpr = PLAN.stages
    swizzled: gl.constexpr = gl.NVMMASharedLayout(64 if PLAN.right_turned else 128, 8, 2)
    raw = gl.allocate_shared_memory(gl.float8e4nv, ring.right.shape, swizzled)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(come.index(stage), count=1)
    return WidenedRing(ring.left, ring.right, ring.full, ring.empty, ring.tail, raw, come)


@gluon.jit
def rows_of(ring, stage, PART: gl.constexpr, PLAN: gl.constexpr):
    """Memory of a part of a stage's rows."""
    if PLAN.parts > PART:
        return ring.left.index(PLAN.parts * stage + PART)
    else:
        return ring.tail.index(stage)


@gluon.jit
def expect_weight(ring, stage, PLAN: gl.constexpr):
    """(the barrier at which a step's right operand arrives, its memory), for the producer, which
    then brings it."""
    if is_widened(PLAN):
        mbarrier.expect(ring.come.index(stage), PLAN.bn * BK)
        return ring.come.index(stage), ring.raw.index(stage)
    else:
        return ring.full.index(stage), ring.right.index(stage)


@gluon.jit
def wait_empty(ring, step, PLAN: gl.constexpr):
    """The stage of a step, once every warpgroup has read what was in it."""
    stage = step % PLAN.stages
    mbarrier.wait(ring.empty.index(stage), (step // PLAN.stages) & 1 ^ 1)
    return stage


@gluon.jit
def wait_full(ring, step, PLAN: gl.constexpr, pred=True):
    """The stage of a step, once what it holds is there."""
    stage = step % PLAN.stages
    mbarrier.wait(ring.full.index(stage), (step // PLAN.stages) & 1, pred=pred)
    return stage


@gluon.jit
def _begin(ring, step, sums, part, PLAN: gl.constexpr):
    """Begins to add the product of a step's stage and a part of the left operand."""
    stage = wait_full(ring, step, PLAN)
    if PLAN.copied:  # cp.async writes as threads do, and wgmma reads as TMA does
        fence_async_shared()
    left = ring.left.index(PLAN.parts * stage + part)
    right = ring.right.index(stage)
    if PLAN.left_turned:
        left = left.permute((1, 0))
    if PLAN.right_turned:
        right = right.permute((1, 0))
    return (warpgroup_mma(left, right, sums[0], use_acc=True, is_async=True),)


@gluon.jit
def _columns(right, N: gl.constexpr, PLAN: gl.constexpr):
    """Columns of a stage's right operand, 64 from N on, as rows."""
    if PLAN.right_turned:
        return right.slice(N, 64, dim=0)
    else:
        return right.slice(N, 64, dim=1).permute((1, 0))


@gluon.jit
def release(ring, step, PLAN: gl.constexpr, pred=True):
    """Says that a step's stage has been read."""
    mbarrier.arrive(ring.empty.index(step % PLAN.stages), count=1, pred=pred)


@gluon.jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros, as sums lie in a warpgroup's registers, of instructions WIDTH columns wide."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def sums_of(PLAN: gl.constexpr):
    """Zeros [bm / parts, bn], as sums lie in a warpgroup's registers."""
    # four warpgroups begin with 128 registers each, too few for an instruction with 256 columns
    WIDTH: gl.constexpr = 128 if is_widened(PLAN) else PLAN.bn
    return _zeros(PLAN.bm // PLAN.parts, PLAN.bn, WIDTH)


@gluon.jit
def _wait(sums, PENDING: gl.constexpr):
    """The sums, once no more than PENDING products are under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(PENDING, deps=[sums[0]]),)
    else:
        return warpgroup_mma_wait(PENDING, deps=sums)


@gluon.jit
def _reduce(
    ring, step, steps, sums, which, BEGIN: gl.constexpr, beside, DO: gl.constexpr,
    TIMES: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Adds `steps` stages from `step` on to a tuple of sums, for each of which
    `BEGIN(ring, step, sums, which, PLAN)` begins a product. While the first ones run it does
    `DO(beside, i)` for i below TIMES."""
    for i in range(steps):
        sums = BEGIN(ring, step + i, sums, which, PLAN)
        for j in gl.static_range(TIMES):
            if i == j:
                DO(beside, j)
        sums = _wait(sums, len(sums))
        release(ring, step + i - 1, PLAN, i > 0)
    sums = _wait(sums, 0)
    release(ring, step + steps - 1, PLAN, steps > 0)
    for j in gl.static_range(TIMES):
        if j >= steps:
            DO(beside, j)
    return sums


@gluon.jit
def multiply_beside(
    ring, step, steps, part, beside, DO: gl.constexpr, TIMES: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Sums [bm / parts, bn] over `steps` stages from `step` on, of a part of the left operand.
    While the first products run it does `DO(beside, i)` for i below TIMES."""
    none = (sums_of(PLAN),)
    return _reduce(ring, step, steps, none, part, _begin, beside, DO, TIMES, PLAN)[0]


@gluon.jit
def _begin_tailed(ring, step, sums, ME: gl.constexpr, PLAN: gl.constexpr):
    """Begins to add the products of a step's stage that `multiply_tailed` has."""
    stage = step % PLAN.stages
    own = _begin(ring, step, sums[:1], ME, PLAN)
    right = ring.right.index(stage)
    tail = ring.tail.index(stage).permute((1, 0))
    one = _columns(right, 64 * ME, PLAN)
    two = _columns(right, PLAN.bn // 2 + 64 * ME, PLAN)
    return own + (
        warpgroup_mma(one, tail, sums[1], use_acc=True, is_async=True),
        warpgroup_mma(two, tail, sums[2], use_acc=True, is_async=True),
    )


@gluon.jit
def multiply_tailed(
    ring, step, steps, me, beside, DO: gl.constexpr, TIMES: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Sums as of `multiply_beside`, of part `me`, and those of the tile's tail, turned: of 64
    columns of each half of the 256, from 64 `me` on, [64, tail] each."""
    TAIL: gl.constexpr = tail_of(PLAN)
    none = (sums_of(PLAN), _zeros(64, TAIL, TAIL), _zeros(64, TAIL, TAIL))
    return _reduce(ring, step, steps, none, me, _begin_tailed, beside, DO, TIMES, PLAN)


@gluon.jit
def _nothing(beside, I: gl.constexpr):
    pass


@gluon.jit
def multiply(ring, step, steps, part, PLAN: gl.constexpr):
    """Sums as of `multiply_beside`, with nothing beside them."""
    return multiply_beside(ring, step, steps, part, ring, _nothing, 0, PLAN)


@gluon.jit
def pass_over(ring, step, steps, PLAN: gl.constexpr):
    """Lets `steps` stages go by unread."""
    for i in range(steps):  # not from `step` on: see forgets_steps in tests/tools/texts.py
        wait_full(ring, step + i, PLAN)
        release(ring, step + i, PLAN)
