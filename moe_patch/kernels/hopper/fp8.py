"""fp8_gemm for Hopper: one producer feeds two warpgroups through TMA, and they promote in turns.

A tile is 128 rows by two column parts of 128: neighbours, or a gate and its up. Each warpgroup owns
64 of the rows. Every 128 of K its tensor core sum is scaled into a float32 accumulator while the
other warpgroup's products run. (DeepGEMM's schedule, here with the second projection's input
activated and quantised in the epilogue.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat import gluon_load
from ..activate import glu
from ..tiling import place

BLOCK = gl.constexpr(128)
async_load = gluon_load()


class Plan(NamedTuple):
    """Sizes of a product, as one constant."""

    n: int
    k: int
    width: int
    """Columns of the result from one tile to the next."""
    shift: int
    """Columns of the weight from a tile's left part to its right."""
    num_n: int
    """Column tiles."""
    m_max: int
    """Rows an expert has, masked; 0: rows in expert order."""
    group_m: int
    stages: int


class Rings(NamedTuple):
    """Shared memory that tiles pass through, and its barriers: PLAN.stages deep."""

    x: Any
    w: Any
    ready: Any
    empty: Any


class Schedule(NamedTuple):
    """Rows as `place` reads them, and tiles in all."""

    ends: Any
    tile_expert: Any
    tile_row: Any
    total: Any


def plan(n: int, k: int, m_max: int, activate: bool, group_m: int, stages: int) -> Plan:
    """Return the Plan of a product [S, k] x [E, n, k], whose columns `activate` takes in pairs."""
    columns, width = (n // 2, BLOCK.value) if activate else (n, 2 * BLOCK.value)
    shift = columns if activate else BLOCK.value
    return Plan(n, k, width, shift, -(-columns // width), m_max, group_m, stages)


@gluon.jit
def _place(at, schedule, PLAN: gl.constexpr):
    return place(
        at, schedule.tile_expert, schedule.tile_row, schedule.ends,
        PLAN.num_n, PLAN.m_max, BLOCK, PLAN.group_m,
    )  # fmt: skip


@gluon.jit
def _produce(x, w, rings, schedule, PLAN: gl.constexpr):
    step = 0
    for at in range(gl.program_id(0), schedule.total, gl.num_programs(0)):
        expert, first, end, column = _place(at, schedule, PLAN)
        if first < end:
            row = expert * PLAN.n + column * PLAN.width
            for k in range(0, PLAN.k, BLOCK):
                stage = step % PLAN.stages
                mbarrier.wait(rings.empty.index(stage), (step // PLAN.stages) & 1 ^ 1)
                filled = rings.ready.index(stage)
                mbarrier.expect(filled, 3 * BLOCK * BLOCK)
                left, right = 2 * stage, 2 * stage + 1
                async_load(w, [row, k], filled, rings.w.index(left))
                at_right = row + PLAN.shift
                async_load(w, [at_right, k], filled, rings.w.index(right))
                async_load(x, [first, k], filled, rings.x.index(left))
                async_load(x, [first + 64, k], filled, rings.x.index(right))
                step += 1


@gluon.jit
def _product(a, ring, at, none):
    """a [64, 128] times what lies in the ring [128, 128]^T, begun and waited for."""
    part = warpgroup_mma(a, ring.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def _consume(
    rings, x_scale, w_scale, out, out_scale, pre, schedule, stride_xs, stride_xg, stride_os,
    PART: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = PLAN.n
    K: gl.constexpr = PLAN.k
    WIDTH: gl.constexpr = PLAN.width
    SHIFT: gl.constexpr = PLAN.shift
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    NUM_K: gl.constexpr = (K + BLOCK - 1) // BLOCK
    NUM_S: gl.constexpr = (N + BLOCK - 1) // BLOCK  # scale blocks of a weight's columns
    step = 0
    for at in range(gl.program_id(0), schedule.total, gl.num_programs(0)):
        expert, first, end, column = _place(at, schedule, PLAN)
        if first < end:
            rows = first + PART * 64 + gl.arange(0, 64, by_row)
            inside = rows < end
            row_scales = x_scale + rows.to(gl.int64) * stride_xs
            left_block = column * WIDTH // BLOCK
            right_block = gl.minimum((column * WIDTH + SHIFT) // BLOCK, NUM_S - 1)
            left_scales = w_scale + (expert * NUM_S + left_block) * NUM_K
            to_right = (right_block - left_block) * NUM_K
            left = gl.zeros([64, BLOCK], gl.float32, product)
            right = gl.zeros([64, BLOCK], gl.float32, product)
            none = gl.zeros([64, BLOCK], gl.float32, product)
            by_x = gl.load(row_scales, mask=inside, other=0.0)
            by_left = by_x * gl.load(left_scales)
            by_right = by_x * gl.load(left_scales + to_right)
            for k in range(NUM_K):
                # of the next step, while this one's products run
                row_scales += gl.where(k < NUM_K - 1, stride_xg, 0)
                left_scales += gl.where(k < NUM_K - 1, 1, 0)
                by_x = gl.load(row_scales, mask=inside, other=0.0)
                next_left = gl.load(left_scales)
                next_right = gl.load(left_scales + to_right)
                stage = step % PLAN.stages
                mbarrier.wait(rings.ready.index(stage), (step // PLAN.stages) & 1)
                a = rings.x.index(2 * stage + PART)
                part = _product(a, rings.w, 2 * stage, none)
                left = gl.fma(part, gl.expand_dims(by_left, 1), left)
                part = _product(a, rings.w, 2 * stage + 1, none)
                mbarrier.arrive(rings.empty.index(stage), count=1)
                right = gl.fma(part, gl.expand_dims(by_right, 1), right)
                by_left, by_right = by_x * next_left, by_x * next_right
                step += 1
            first_row = first + PART * 64
            if SAVE_PRE:
                _stored(left, pre, first_row, end, column * WIDTH, N)
                _stored(right, pre, first_row, end, column * WIDTH + SHIFT, N)
            if GATE is not None:
                _activated(left, right, out, out_scale, rows, end, column, stride_os, N // 2, GATE)
            else:
                _stored(left, out, first_row, end, column * WIDTH, N)
                _stored(right, out, first_row, end, column * WIDTH + SHIFT, N)


@gluon.jit
def _stored(tile, out, first, end, n0, N: gl.constexpr):
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tile = gl.convert_layout(tile.to(out.dtype.element_ty), wide)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, wide))
    n = n0 + gl.arange(0, BLOCK, gl.SliceLayout(0, wide))
    at = gl.expand_dims(rows.to(gl.int64), 1) * N + gl.expand_dims(n, 0)
    gl.store(out + at, tile, mask=gl.expand_dims(rows < end, 1) & gl.expand_dims(n < N, 0))


@gluon.jit
def _activated(
    gate, up, out, out_scale, rows, end, column, stride_os,
    I: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Activates, quantises each row's 128 columns, and stores both."""
    n = column * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, gate.type.layout))
    value, _, _ = glu(gate, up, GATE)
    if I % BLOCK != 0:
        value = gl.where(gl.expand_dims(n < I, 0), value, 0.0)
    largest = gl.max(gl.abs(value), axis=1)
    scale = gl.where(largest > 0, largest / 448.0, 1.0)
    gl.store(out_scale + column.to(gl.int64) * stride_os + rows, scale, mask=rows < end)
    quantised = (value * gl.expand_dims(1.0 / scale, 1)).to(gl.float8e4nv)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    quantised = gl.convert_layout(quantised, wide)
    to_rows = gl.convert_layout(rows, gl.SliceLayout(1, wide))
    n = column * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, wide))
    at = gl.expand_dims(to_rows.to(gl.int64), 1) * I + gl.expand_dims(n, 0)
    mask = gl.expand_dims(to_rows < end, 1) & gl.expand_dims(n < I, 0)
    gl.store(out + at, quantised, mask=mask)


@gluon.jit(do_not_specialize=["stride_xs", "stride_xg", "stride_os", "groups"])
def fp8_hopper_kernel(
    x, w, x_scale, w_scale, out, out_scale, pre, ends, tile_expert, tile_row, num_tiles,
    stride_xs, stride_xg, stride_os, groups,
    PLAN: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    """x [S, K] and w [E * N, K] as descriptors of boxes [64, 128] and [128, 128]; GATE None: the
    product is stored as it is."""
    STAGES: gl.constexpr = PLAN.stages
    if PLAN.m_max > 0:
        total = groups * ((PLAN.m_max + BLOCK - 1) // BLOCK) * PLAN.num_n
    else:
        total = gl.load(num_tiles) * PLAN.num_n
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 64, BLOCK], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [2 * STAGES, BLOCK, BLOCK], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    rings = Rings(x_ring, w_ring, ready, empty)
    schedule = Schedule(ends, tile_expert, tile_row, total)
    gl.warp_specialize(
        [
            (_consume, (
                rings, x_scale, w_scale, out, out_scale, pre, schedule,
                stride_xs, stride_xg, stride_os, 0, PLAN, GATE, SAVE_PRE,
            )),
            (_consume, (
                rings, x_scale, w_scale, out, out_scale, pre, schedule,
                stride_xs, stride_xg, stride_os, 1, PLAN, GATE, SAVE_PRE,
            )),
            (_produce, (x, w, rings, schedule, PLAN)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
