"""grouped_gemm for Hopper with e4m3 weights whose columns are contiguous, turned around.

The weight is the left operand of wgmma, which may come from registers, so that no widened weight
goes through shared memory. A tile is 128 rows of one expert, or up to 144, by 256 columns. One
warpgroup loads rows and e4m3 through TMA; two own 128 columns each. Each multiplies its e4m3 by
their block's scale in float32 and rounds to the rows' dtype, as `dequantize_kernel` does: half of
its columns, while the product of the other half runs.

A thread reads four neighbours of a line, and has both halves' sums of these four columns: row

    16 w + 8 h + g    of a half's operand is column    32 w + 4 g + 2 b + h

of the 128, where b is the half, w < 4 the warp, and g < 8 counts the threads that share a row.
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
from .producer import find_nothing, produce
from .ring import BK, release, steps_of, tail_of, wait_full, with_barriers
from .rows import Parts, load_rows
from .turns import tiles_of, told, turns_of
from .widening import scale_of

async_load = gluon_load()
WIDTH = gl.constexpr(128)
"""Columns of a tile that a warpgroup has, and those that a scale is for."""
STAGES = 5
"""Stages of a ring, of 32 KB each, or 34 with a tail."""


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    k: int
    group_m: int
    stages: int
    listed: int
    """Rows of a tile in the order's list: 128 or 64."""
    tail: int
    """Rows that a tile may have beyond `bm`."""
    bm: int = 128
    bn: int = 256
    parts: int = 2
    rank: int = 0
    """Rank of a low-rank update; 0: there is none."""
    right_turned: bool = False
    copied: bool = False


class Operands(NamedTuple):
    """Parts of rows of x, and boxes of the weight."""

    x: Any
    w: Any


class Weights(NamedTuple):
    """Pointers that those that multiply read all experts' weights by themselves."""

    scales: Any
    b: Any
    """B of an update, [E, rank, N]."""


@gluon.jit
def _ring_of(dtype: gl.constexpr, PLAN: gl.constexpr):
    """A Ring whose right operand is e4m3, and whose rows are in one part."""
    TAIL: gl.constexpr = tail_of(PLAN)
    of_rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [PLAN.stages, PLAN.bm, BK], of_rows)
    of_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    right = gl.allocate_shared_memory(gl.float8e4nv, [PLAN.stages, BK, PLAN.bn], of_bytes)
    tail = left
    if TAIL > 0:
        tail = gl.allocate_shared_memory(dtype, [PLAN.stages, TAIL, BK], of_rows)
    return with_barriers(left, right, tail, PLAN)


@gluon.jit
def _bring_rows(
    rows, ring, stage, place, column, BYTES: gl.constexpr, TAILED: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Begins to load 64 columns of a tile's rows, and, TAILED, of its tail's. The stage's barrier
    expects so many bytes besides."""
    TAIL: gl.constexpr = tail_of(PLAN) if TAILED else 0
    full, first, end = ring.full.index(stage), place.first, place.end
    mbarrier.expect(full, BYTES + 2 * (PLAN.bm + TAIL) * BK)
    load_rows(rows.each, first, end, column, full, ring.left.index(stage))
    if TAILED:
        load_rows(rows.tail, first + PLAN.bm, end, column, full, ring.tail.index(stage))


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    BYTES: gl.constexpr = PLAN.bn * BK
    _bring_rows(operands.x, ring, stage, place, k, BYTES, PLAN.parts < PARTS, PLAN)
    at = [place.expert * PLAN.k + k, place.column * PLAN.bn]
    async_load(operands.w, at, ring.full.index(stage), ring.right.index(stage))


@gluon.jit
def _bring_side(side, ring, stage, turn, place, r, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load 64 of the rank of an update's rows."""
    _bring_rows(side, ring, stage, place, r, 0, PLAN.parts < PARTS, PLAN)


@gluon.jit
def _produce(operands, side, tiles, ring, turns, PLAN: gl.constexpr):
    produce(operands, side, tiles, ring, turns, find_nothing, _bring, _bring_side, PLAN)


@gluon.constexpr_function
def _lines_of():
    """Layout of [64, 128] of a weight: of each line of a left operand of wgmma that a thread has,
    four neighbours."""
    registers = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]], [], [64, 128])


@gluon.jit
def _halves(lines):
    """Both halves of lines [64, 128], as [64, 4 w + g, h]."""
    return lines.reshape((BK, 32, 2, 2)).permute((0, 1, 3, 2)).split()


@gluon.jit
def _lines(ring, step, ME: gl.constexpr, PLAN: gl.constexpr):
    """Both halves of a step's e4m3, in float16, which is exact."""
    whole = ring.right.index(step % PLAN.stages)
    return _halves(whole.slice(WIDTH * ME, WIDTH, dim=1).load(_lines_of()).to(gl.float16))


@gluon.jit
def _lines_of_b(b, expert, n, r, PLAN: gl.constexpr):
    """Both halves of 64 lines of an expert's B, from r on of its rank; zeros past it."""
    by: gl.constexpr = _lines_of()
    line = r + gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(1, by)), 1)
    column = n + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, by)), 0)
    at = (expert * PLAN.rank + line).to(gl.int64) * PLAN.n + column
    return _halves(gl.load(b + at, mask=(line < PLAN.rank) & (column < PLAN.n), other=0.0))


@gluon.jit
def _fragment(half, scale, dtype: gl.constexpr, SUMS: gl.constexpr):
    """A half's lines times `scale`, as a left operand [64, 64]."""
    value = (half.to(gl.float32) * scale).reshape((BK, 4, 8, 2)).permute((1, 3, 2, 0))
    by: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    return gl.convert_layout(value.reshape((64, BK)), by, assert_trivial=True).to(dtype)


@gluon.jit
def _begin(part, rows, sums):
    """Begins to add the products of a half with a tile's rows, and its tail's."""
    if len(sums) == 1:
        return (warpgroup_mma(part, rows[0], sums[0], is_async=True),)
    else:
        return (
            warpgroup_mma(part, rows[0], sums[0], is_async=True),
            warpgroup_mma(part, rows[1], sums[1], is_async=True),
        )


@gluon.jit
def _wait(sums):
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=[sums[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def _rows_of(ring, stage, BM: gl.constexpr, TAILED: gl.constexpr, PLAN: gl.constexpr):
    """A stage's rows, turned: [BK, BM], and those of the tail."""
    rows = ring.left.index(stage).slice(0, BM).permute((1, 0))
    if TAILED:
        return rows, ring.tail.index(stage).permute((1, 0))
    else:
        return (rows,)


@gluon.jit
def _zeros(BM: gl.constexpr, TAILED: gl.constexpr, PLAN: gl.constexpr):
    """Sums of a half: [64, BM], and of a tail."""
    sums = gl.zeros([64, BM], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16]))
    if TAILED:
        TAIL: gl.constexpr = tail_of(PLAN)
        by: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        return sums, gl.zeros([64, TAIL], gl.float32, by)
    else:
        return (sums,)


@gluon.jit
def _updated(
    first, second, b, ring, step, place, n,
    BM: gl.constexpr, TAILED: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Sums of both halves, plus those of an update, whose rows come from a step of the ring on."""
    dtype: gl.constexpr = ring.left.dtype
    SUMS: gl.constexpr = first[0].type.layout
    for i in range((PLAN.rank + BK - 1) // BK):
        one, two = _lines_of_b(b, place.expert, n, i * BK, PLAN)
        stage = wait_full(ring, step + i, PLAN)
        rows = _rows_of(ring, stage, BM, TAILED, PLAN)
        first = _wait(_begin(_fragment(one, 1.0, dtype, SUMS), rows, first))
        second = _wait(_begin(_fragment(two, 1.0, dtype, SUMS), rows, second))
        release(ring, step + i, PLAN)
    return first, second


@gluon.jit
def _products(
    weights, ring, step, place, n, BM: gl.constexpr, TAILED: gl.constexpr,
    ME: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Sums of both halves of a warpgroup's columns n ..., from a step of the ring on.

    A half is widened before the wait for the product of the other one. `ptxas` would do so after
    it, right before the half is needed, but moves nothing past a branch, and the wait for a step
    has one: so there is such a wait before each for a product, one of them for nothing else."""
    STEPS: gl.constexpr = PLAN.k // BK
    dtype: gl.constexpr = ring.left.dtype
    first, second = _zeros(BM, TAILED, PLAN), _zeros(BM, TAILED, PLAN)
    SUMS: gl.constexpr = first[0].type.layout
    scale = scale_of(weights.scales, place.expert, n, 0, PLAN)
    coming = scale_of(weights.scales, place.expert, n, BK, PLAN)
    wait_full(ring, step, PLAN)
    one, two = _lines(ring, step, ME, PLAN)
    part = _fragment(one, scale, dtype, SUMS)
    for i in range(STEPS):
        more = i < STEPS - 1
        rows = _rows_of(ring, (step + i) % PLAN.stages, BM, TAILED, PLAN)
        first = _begin(part, rows, first)
        part = _fragment(two, scale, dtype, SUMS)
        wait_full(ring, step + i + 1, PLAN, more)
        first = _wait(first)
        second = _begin(part, rows, second)
        # after the last step: what is there, which nobody multiplies
        one, two = _lines(ring, step + i + 1, ME, PLAN)
        scale = coming
        part = _fragment(one, scale, dtype, SUMS)
        coming = scale_of(weights.scales, place.expert, n, (i + 2) * BK, PLAN)
        wait_full(ring, step + i + 1, PLAN, more)
        second = _wait(second)
        release(ring, step + i, PLAN)
    if PLAN.rank > 0:
        first, second = _updated(
            first, second, weights.b, ring, step + STEPS, place, n, BM, TAILED, PLAN
        )
    return first, second


@gluon.constexpr_function
def _stored(rows):
    """Layout of [rows, 128] in which a thread has four neighbours."""
    down = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    registers = [[0, 1], [0, 2], down[0], *down[3:]]
    lanes = [*down[1:3], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]], [], [rows, 128])


@gluon.jit
def _store(first, second, out, row, end, n0, PLAN: gl.constexpr):
    """Writes sums of both halves, [64, rows], to rows of `out` from a row and a column on."""
    ROWS: gl.constexpr = first.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    both = gl.join(first.reshape((4, 2, 8, ROWS)), second.reshape((4, 2, 8, ROWS)))
    value = both.permute((3, 0, 2, 4, 1)).reshape((ROWS, WIDTH))
    by: gl.constexpr = _stored(ROWS)
    value = gl.convert_layout(value, by, assert_trivial=True).to(dtype)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, by))
    n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(0, by))
    inside = gl.expand_dims(m < end - row, 1) & gl.expand_dims(n < PLAN.n, 0)
    to = out + row.to(gl.int64) * PLAN.n + (gl.expand_dims(m * PLAN.n, 1) + gl.expand_dims(n, 0))
    gl.store(to, value, mask=inside)


@gluon.jit
def _compute(
    weights, out, ring, step, place,
    BM: gl.constexpr, TAILED: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Does a warpgroup's part of a tile of up to BM rows, and a tail."""
    n = place.column * PLAN.bn + WIDTH * ME
    first, second = _products(weights, ring, step, place, n, BM, TAILED, ME, PLAN)
    _store(first[0], second[0], out, place.first, place.end, n, PLAN)
    if TAILED:
        _store(first[1], second[1], out, place.first + PLAN.bm, place.end, n, PLAN)


@gluon.jit
def _consume(weights, out, ring, turns, ME: gl.constexpr, PLAN: gl.constexpr):
    TAILS: gl.constexpr = tail_of(PLAN) > 0
    step, turn = 0, 0
    place = told(turns, 0)
    while place.end > 0:
        rows = place.end - place.first
        if rows <= 64:
            _compute(weights, out, ring, step, place, 64, False, ME, PLAN)
        elif TAILS and rows > PLAN.bm:
            _compute(weights, out, ring, step, place, 128, True, ME, PLAN)
        else:
            _compute(weights, out, ring, step, place, 128, False, ME, PLAN)
        step += steps_of(PLAN)
        turn += 1
        place = told(turns, turn)


@gluon.jit
def gemm_turned_kernel(
    x, x_tail, w, scales, side, side_tail, b, out, taken,
    expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr,
):  # fmt: skip
    """x [S, K] as boxes of rows, [128, 64], with K a multiple of 64; w as boxes [64, 256] of
    [E * K, N]; scales as `widening.scale_of` reads them; out [S, N]; `taken` is an order's. `side`
    has the boxes of an update's rows, and b is its B, [E, rank, N]; `x_tail` and `side_tail` are
    the boxes of a tail."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    ring, turns = _ring_of(out.dtype.element_ty, PLAN), turns_of(taken, PLAN)
    operands, weights = Operands(Parts(x, x_tail), w), Weights(scales, b)
    gl.warp_specialize(
        [
            (_consume, (weights, out, ring, turns, 0, PLAN)),
            (_consume, (weights, out, ring, turns, 1, PLAN)),
            (_produce, (operands, Parts(side, side_tail), tiles, ring, turns, PLAN)),
        ],
        [4, 4],
        [232, 40],
    )
