"""grouped_gemm for Hopper: rows in expert order, as they lie, and weights of their dtype.

A tile is 128 rows of one expert by 256 columns. One warpgroup loads it through TMA, two multiply 64
rows each, and not if all of theirs are past the expert's end. As many programs as the chip has
multiprocessors share the tiles: whoever is free takes the next, so that the tiles at work lie close
together and their operands in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...compat import gluon_load
from ..tiles import place
from .ring import BK, multiply, pass_over, ring_of, wait_empty
from .stores import staged_for, store_boxes
from .turns import take, told, turns_of

async_load = gluon_load()


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    k: int
    group_m: int
    stages: int
    right_turned: bool
    """The weight's reduction is contiguous in memory; else its columns are."""
    bm: int = 128
    bn: int = 256
    parts: int = 2
    left_turned: bool = False
    copied: bool = False


class Order(NamedTuple):
    """An ExpertOrder inside a kernel; `total` tiles."""

    expert_offsets: Any
    tile_expert: Any
    tile_row: Any
    total: Any


@gluon.jit
def _place(at, order, PLAN: gl.constexpr):
    NUM_N: gl.constexpr = (PLAN.n + PLAN.bn - 1) // PLAN.bn
    return place(
        at, order.tile_expert, order.tile_row, order.expert_offsets,
        NUM_N, 0, PLAN.bm, PLAN.group_m,
    )  # fmt: skip


@gluon.jit
def _produce(x, w, order, ring, turns, PLAN: gl.constexpr):
    step, turn = 0, 0
    at = gl.program_id(0)
    while at < order.total:
        expert, first, _, column = _place(at, order, PLAN)
        at = take(turns, turn)
        turn += 1
        n = column * PLAN.bn
        for k in range(0, PLAN.k, BK):
            stage = wait_empty(ring, step, PLAN)
            full = ring.full.index(stage)
            mbarrier.expect(full, (PLAN.bm + PLAN.bn) * BK * 2)
            if PLAN.right_turned:
                async_load(w, [expert * PLAN.n + n, k], full, ring.right.index(stage))
            else:
                async_load(w, [expert * PLAN.k + k, n], full, ring.right.index(stage))
            async_load(x, [first, k], full, ring.left.index(2 * stage))
            async_load(x, [first + 64, k], full, ring.left.index(2 * stage + 1))
            step += 1


@gluon.jit
def _consume(out, box, staged, order, ring, turns, PART: gl.constexpr, PLAN: gl.constexpr):
    STEPS: gl.constexpr = PLAN.k // BK
    step, turn = 0, 0
    at = gl.program_id(0)
    while at < order.total:
        _, first, end, column = _place(at, order, PLAN)
        first += PART * 64
        read = gl.where(first < end, STEPS, 0)
        acc = multiply(ring, step, read, PART, PLAN)
        pass_over(ring, step, STEPS - read, PLAN)
        step += STEPS
        if first < end:
            n = column * PLAN.bn
            store_boxes(acc, out, box, staged, first, end, n, PLAN.n, PLAN.n, False, PART)
        at = told(turns, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def gemm_hopper_kernel(
    x, w, out, box, taken, expert_offsets, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr
):
    """x [S, K] as boxes [64, 64]; w as boxes [256, 64] of [E * N, K] or [64, 256] of [E * K, N],
    with K a multiple of 64; out [S, N] as it is, and as boxes [64, 64]; `taken` is one zero."""
    total = gl.load(num_tiles) * ((PLAN.n + PLAN.bn - 1) // PLAN.bn)
    order = Order(expert_offsets, tile_expert, tile_row, total)
    ring, turns = ring_of(out.dtype.element_ty, PLAN), turns_of(taken, PLAN)
    staged = staged_for(out.dtype.element_ty, PLAN)
    gl.warp_specialize(
        [
            (_consume, (out, box, staged, order, ring, turns, 0, PLAN)),
            (_consume, (out, box, staged, order, ring, turns, 1, PLAN)),
            (_produce, (x, w, order, ring, turns, PLAN)),
        ],
        [4, 4],
        [224, 56],
    )
