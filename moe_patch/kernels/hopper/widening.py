"""Weights of 8 bits on their way into a ring: e4m3 in blocks of 128 x 128, each with a scale.
(A gemm by weights whose columns are contiguous, as in a backward, is `turned.py`'s.)

The producer brings their bytes. A warpgroup of its own multiplies these by their blocks' scales in
float32 and rounds to the rows' dtype, as `dequantize_kernel` does, so that those that multiply find
a right operand as of any other weight. Where a PLAN is `widened`, all of that happens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..widen import widen_scale
from .ring import BK, steps_of
from .turns import told

BLOCK = gl.constexpr(128)
"""Lines and columns that a scale is for."""


@gluon.constexpr_function
def _blocks(size):
    return (size + 127) // 128


@gluon.jit
def scale_of(scales, expert, n, k, PLAN: gl.constexpr):
    """Scale of the block that has column n and element k of the reduction; past the weight's end
    the last one's. `scales` points to [E, N / 128, K / 128], or, where a weight's columns are
    contiguous, [E, K / 128, N / 128]."""
    BLOCKS_N: gl.constexpr = _blocks(PLAN.n)
    BLOCKS_K: gl.constexpr = _blocks(PLAN.k)
    n = gl.minimum(n // BLOCK, BLOCKS_N - 1)
    k = gl.minimum(k // BLOCK, BLOCKS_K - 1)
    at = n * BLOCKS_K + k if PLAN.right_turned else k * BLOCKS_N + n
    return widen_scale(gl.load(scales + expert * (BLOCKS_N * BLOCKS_K) + at))


@gluon.constexpr_function
def _layout(plan):
    """Layout of a step in which a thread has eight neighbours: 16 bytes of what they become."""
    columns = 8 if plan.right_turned else 16
    return gl.BlockedLayout([1, 8], [32 // columns, columns], [4, 1], [1, 0])


@gluon.jit
def _widen(raw, right, by_left, by_right, PLAN: gl.constexpr):
    """Writes a step times its scales to `right`, one for each part of 128 columns.

    In one piece: Triton puts a barrier before a second store to the same memory."""
    by: gl.constexpr = _layout(PLAN)
    AXIS: gl.constexpr = 1 if PLAN.right_turned else 0  # along which a column lies
    column = gl.arange(0, 2 * BLOCK, gl.SliceLayout(AXIS, by))
    scale = gl.expand_dims(gl.where(column < BLOCK, by_left, by_right), AXIS)
    right.store((raw.load(by).to(gl.float32) * scale).to(right.dtype))


@gluon.jit
def _wait(ring, step, PLAN: gl.constexpr):
    """The stage of a step, once its bytes are there."""
    stage = step % PLAN.stages
    mbarrier.wait(ring.come.index(stage), (step // PLAN.stages) & 1)
    return stage


@gluon.jit
def widen(scales, ring, turns, GATED: gl.constexpr, PLAN: gl.constexpr):
    """Widens what the producer brings. A tile's right operand is two parts of 128 columns:
    neighbours, or, GATED, of the gate and of up."""
    WIDTH: gl.constexpr = BLOCK if GATED else PLAN.bn
    SHIFT: gl.constexpr = PLAN.n // 2 if GATED else BLOCK
    STEPS: gl.constexpr = PLAN.k // BK
    UPDATE: gl.constexpr = steps_of(PLAN) - STEPS
    step, turn = 0, 0
    expert, first, end, column = told(turns, 0)
    while end > 0:
        n = column * WIDTH
        left = scale_of(scales, expert, n, 0, PLAN)
        right = scale_of(scales, expert, n + SHIFT, 0, PLAN)
        for i in range(STEPS):
            by_left, by_right = left, right
            left = scale_of(scales, expert, n, (i + 1) * BK, PLAN)  # of the next step
            right = scale_of(scales, expert, n + SHIFT, (i + 1) * BK, PLAN)
            stage = _wait(ring, step + i, PLAN)
            _widen(ring.raw.index(stage), ring.right.index(stage), by_left, by_right, PLAN)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
        for i in range(UPDATE):  # has the rows' dtype
            stage = _wait(ring, step + STEPS + i, PLAN)
            mbarrier.arrive(ring.full.index(stage), count=1)
        step += STEPS + UPDATE
        turn += 1
        expert, first, end, column = told(turns, turn)
