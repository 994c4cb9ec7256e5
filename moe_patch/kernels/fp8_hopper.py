"""fp8_gemm for Hopper: one producer feeds two warpgroups through TMA, and they promote in turns.

A tile is 128 rows by two column parts of 128: neighbours, or a gate and its up. Each warpgroup owns
64 of the rows. Every 128 of K its tensor core sum is scaled into a float32 accumulator while the
other warpgroup's products run. (DeepGEMM's schedule, here with the second projection's input
activated and quantised in the epilogue.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .activate import glu
from .fp8_gemm import place

BLOCK = gl.constexpr(128)


@gluon.jit
def _produce(
    x, w, x_ring, w_ring, ready, empty, ends, tile_expert, tile_row, total, tiles,
    N: gl.constexpr, K: gl.constexpr, NUM_N: gl.constexpr, WIDTH: gl.constexpr,
    SHIFT: gl.constexpr, M_MAX: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, column = place(at, tiles, tile_expert, tile_row, ends, NUM_N, M_MAX, BLOCK, GROUP_M)  # fmt: skip # noqa: E501
        if first < end:
            row = expert * N + column * WIDTH
            for k in range(0, K, BLOCK):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
                filled = ready.index(stage)
                mbarrier.expect(filled, 3 * BLOCK * BLOCK)
                tma.async_copy_global_to_shared(w, [row, k], filled, w_ring.index(2 * stage))
                tma.async_copy_global_to_shared(w, [row + SHIFT, k], filled, w_ring.index(2 * stage + 1))  # fmt: skip # noqa: E501
                tma.async_copy_global_to_shared(x, [first, k], filled, x_ring.index(2 * stage))
                tma.async_copy_global_to_shared(x, [first + 64, k], filled, x_ring.index(2 * stage + 1))  # fmt: skip # noqa: E501
                step += 1


@gluon.jit
def _consume(
    x_ring, w_ring, ready, empty, x_scale, w_scale, out, out_scale, pre, ends, tile_expert,
    tile_row, total, tiles, stride_xs, stride_xg, stride_os,
    PART: gl.constexpr, N: gl.constexpr, K: gl.constexpr, NUM_N: gl.constexpr,
    WIDTH: gl.constexpr, SHIFT: gl.constexpr, M_MAX: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    ACTIVATE: gl.constexpr = GATE is not None
    NUM_K: gl.constexpr = (K + BLOCK - 1) // BLOCK
    NUM_S: gl.constexpr = (N + BLOCK - 1) // BLOCK  # scale blocks of a weight's columns
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, column = place(at, tiles, tile_expert, tile_row, ends, NUM_N, M_MAX, BLOCK, GROUP_M)  # fmt: skip # noqa: E501
        if first < end:
            rows = first + PART * 64 + gl.arange(0, 64, by_row)
            inside = rows < end
            row_scales = x_scale + rows.to(gl.int64) * stride_xs
            left_block = column * WIDTH // BLOCK
            right_block = gl.minimum((column * WIDTH + SHIFT) // BLOCK, NUM_S - 1)
            left_scales = w_scale + (expert * NUM_S + left_block) * NUM_K
            right_scales = w_scale + (expert * NUM_S + right_block) * NUM_K
            left = gl.zeros([64, BLOCK], gl.float32, product)
            right = gl.zeros([64, BLOCK], gl.float32, product)
            none = gl.zeros([64, BLOCK], gl.float32, product)
            by_x = gl.load(row_scales, mask=inside, other=0.0)
            by_left = gl.load(left_scales)
            by_right = gl.load(right_scales)
            for k in range(NUM_K):
                # of the next step, while this one's products run
                ahead = gl.minimum(k + 1, NUM_K - 1)
                next_x = gl.load(row_scales + ahead * stride_xg, mask=inside, other=0.0)
                next_left = gl.load(left_scales + ahead)
                next_right = gl.load(right_scales + ahead)
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                a = x_ring.index(2 * stage + PART)
                part = warpgroup_mma(a, w_ring.index(2 * stage).permute((1, 0)), none, use_acc=False, is_async=True)  # fmt: skip # noqa: E501
                part = warpgroup_mma_wait(0, deps=[part])
                left = gl.fma(part, gl.expand_dims(by_x * by_left, 1), left)
                part = warpgroup_mma(a, w_ring.index(2 * stage + 1).permute((1, 0)), none, use_acc=False, is_async=True)  # fmt: skip # noqa: E501
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage), count=1)
                right = gl.fma(part, gl.expand_dims(by_x * by_right, 1), right)
                by_x, by_left, by_right = next_x, next_left, next_right
                step += 1
            first_row = first + PART * 64
            if SAVE_PRE:
                _stored(left, pre, first_row, end, column * WIDTH, N)
                _stored(right, pre, first_row, end, column * WIDTH + SHIFT, N)
            if ACTIVATE:
                _activated(left, right, out, out_scale, rows, end, column, stride_os, N // 2, GATE)  # fmt: skip # noqa: E501
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
    N: gl.constexpr, K: gl.constexpr, M_MAX: gl.constexpr,
    GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """x [S, K] and w [E * N, K] as descriptors of boxes [64, 128] and [128, 128]."""
    ACTIVATE: gl.constexpr = GATE is not None
    WIDTH: gl.constexpr = BLOCK if ACTIVATE else 2 * BLOCK
    SHIFT: gl.constexpr = N // 2 if ACTIVATE else BLOCK
    NUM_N: gl.constexpr = (N // 2 if ACTIVATE else N) // WIDTH + ((N // 2 if ACTIVATE else N) % WIDTH > 0)  # fmt: skip # noqa: E501
    if M_MAX > 0:
        tiles = 0
        total = groups * ((M_MAX + BLOCK - 1) // BLOCK) * NUM_N
    else:
        tiles = gl.load(num_tiles)
        total = tiles * NUM_N
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 64, BLOCK], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [2 * STAGES, BLOCK, BLOCK], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                x_ring, w_ring, ready, empty, x_scale, w_scale, out, out_scale, pre, ends,
                tile_expert, tile_row, total, tiles, stride_xs, stride_xg, stride_os,
                0, N, K, NUM_N, WIDTH, SHIFT, M_MAX, GROUP_M, STAGES, GATE, SAVE_PRE,
            )),
            (_consume, (
                x_ring, w_ring, ready, empty, x_scale, w_scale, out, out_scale, pre, ends,
                tile_expert, tile_row, total, tiles, stride_xs, stride_xg, stride_os,
                1, N, K, NUM_N, WIDTH, SHIFT, M_MAX, GROUP_M, STAGES, GATE, SAVE_PRE,
            )),
            (_produce, (
                x, w, x_ring, w_ring, ready, empty, ends, tile_expert, tile_row, total, tiles,
                N, K, NUM_N, WIDTH, SHIFT, M_MAX, GROUP_M, STAGES,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
