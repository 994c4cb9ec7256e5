"""Sums of products with weights in 4 bits, whose codes are looked up in pairs.

A step is 128 of the reduction, 64 bytes of a row of codes. Thread q of four neighbours has every
fourth word of them, so a step is summed in another order: its place

    32 j + 8 p + 2 q + h    is column    32 j + 8 q + 2 p + h

where j < 4 is the 16 bytes, p < 4 the byte of a word and h its half. x lies in that order, as
`kernels/in_steps.py` writes it. Half a step of one block is unpacked while the product of another
is computed. Where 64 or 128 weights share a scale their sums are scaled, in float32; powers of two
for 32 weights multiply the weights, which is exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .lookup import look_up
from .pairs_ring import GROUP, ROWS, STEP, next_turn, refill


@gluon.constexpr_function
def _words_of():
    """Layout of a step's words [64, 4 j + q]."""
    registers = [[0, 4], [0, 8], [8, 0]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.constexpr_function
def _twice_of():
    """Layout of the words of a group [64, j % 2, q, 2], twice each."""
    registers = [[0, 0, 0, 1], [0, 1, 0, 0], [8, 0, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 2, 4, 2])


@gluon.constexpr_function
def _scales_of():
    """Layout of the scales [64, 2] of a step, in the threads that have the sums of their rows."""
    registers, lanes = [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 2])


@gluon.jit
def _fragment(words, scale, bank, SUMS: gl.constexpr):
    """Values of a group's words [64, 2, 4], as a left operand [64, 64]; `scale` [64, 2] of
    each 32 of them, or None."""
    by: gl.constexpr = _twice_of()
    twice = gl.convert_layout(gl.join(words, words), by, assert_trivial=True)
    if scale is not None:
        scale = gl.expand_dims(gl.expand_dims(scale, 2), 3)
    found = look_up(twice, bank, scale)
    both = gl.join(gl.join(found[0], found[1]), gl.join(found[2], found[3]))
    both = both.permute((0, 1, 5, 4, 2, 3))  # [rows, j % 2, q, h, p % 2, p // 2] before
    both = both.reshape((ROWS, GROUP))
    return gl.convert_layout(both, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _words(stage):
    """Both groups of a step of a block: [64, j % 2, q] each."""
    words = stage.load(_words_of())
    return words.reshape((ROWS, 2, 2, 4)).permute((0, 2, 3, 1)).split()


@gluon.jit
def _arrived(ring, turn, PLAN: gl.constexpr):
    """The stage's halves of x, turned [64, bm], and the words of both groups of both blocks."""
    stage = turn.stage
    mbarrier.wait(ring.full.index(stage), turn.phase)
    x, words = ring.x.index(stage).permute((1, 0)), ring.words.index(stage)
    low, high = x.slice(0, PLAN.bm, dim=1), x.slice(PLAN.bm, PLAN.bm, dim=1)
    first_low, first_high = _words(words.slice(0, ROWS))
    second_low, second_high = _words(words.slice(ROWS, ROWS))
    return low, high, first_low, first_high, second_low, second_high


@gluon.jit
def _rows(tile, by: gl.constexpr, PLAN: gl.constexpr):
    """Both blocks' rows [64] of the weight. Past its end, where products are not kept: its last."""
    first = tile.n0 + gl.arange(0, ROWS, by)
    second = first + PLAN.second
    if PLAN.whole:
        return first, second
    else:
        return gl.minimum(first, PLAN.n - 1), gl.minimum(second, PLAN.n - 1)


@gluon.jit
def _scales_at(operands, tile, PLAN: gl.constexpr):
    """Pointers to the scales [64, 2] of the first step of both blocks."""
    by: gl.constexpr = _scales_of()
    COLUMNS: gl.constexpr = PLAN.k // PLAN.group
    row, other = _rows(tile, gl.SliceLayout(1, by), PLAN)
    column = gl.arange(0, 2, gl.SliceLayout(0, by)) // (PLAN.group // GROUP)
    column = gl.expand_dims(column, 0)
    scales = operands.scales + tile.expert.to(gl.int64) * (PLAN.n * COLUMNS)
    first = scales + (gl.expand_dims(row * COLUMNS, 1) + column)
    return first, scales + (gl.expand_dims(other * COLUMNS, 1) + column)


@gluon.jit
def _scales(at, step, PLAN: gl.constexpr):
    """Scales of a step; zero past the end of the reduction."""
    at += step * (STEP // PLAN.group)
    if PLAN.k % STEP == 0:
        return gl.load(at)
    else:
        k = step * STEP + GROUP * gl.arange(0, 2, gl.SliceLayout(0, _scales_of()))
        return gl.load(at, mask=gl.expand_dims(k < PLAN.k, 0), other=0.0)


@gluon.jit
def _of_sums(scales, SUMS: gl.constexpr):
    """Scales of both groups, [64, 1] each."""
    first, second = scales.to(gl.float32).split()
    by: gl.constexpr = gl.SliceLayout(1, SUMS)
    first = gl.convert_layout(first, by, assert_trivial=True)
    second = gl.convert_layout(second, by, assert_trivial=True)
    return gl.expand_dims(first, 1), gl.expand_dims(second, 1)


@gluon.jit
def _by_sums(operands, ring, turn, tiles, bank, PLAN: gl.constexpr):
    """Sums as of `products`; those of each group are scaled."""
    BM: gl.constexpr = PLAN.bm
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    first_at, second_at = _scales_at(operands, tiles.now, PLAN)
    first, second = _scales(first_at, 0, PLAN), _scales(second_at, 0, PLAN)
    left = gl.zeros([ROWS, BM], gl.float32, SUMS)
    right = gl.zeros([ROWS, BM], gl.float32, SUMS)
    none = gl.zeros([ROWS, BM], gl.float32, SUMS)
    for step in range(PLAN.steps):
        coming = gl.minimum(step + 1, PLAN.steps - 1)
        next_first, next_second = _scales(first_at, coming, PLAN), _scales(second_at, coming, PLAN)
        low, high, first_low, first_high, second_low, second_high = _arrived(ring, turn, PLAN)
        low_scale, high_scale = _of_sums(first, SUMS)
        part = _fragment(first_low, None, bank, SUMS)
        sums = warpgroup_mma(part, low, none, use_acc=False, is_async=True)
        part = _fragment(second_low, None, bank, SUMS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        left += sums * low_scale
        sums = warpgroup_mma(part, low, none, use_acc=False, is_async=True)
        low_scale, other_scale = _of_sums(second, SUMS)
        part = _fragment(first_high, None, bank, SUMS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        right += sums * low_scale
        sums = warpgroup_mma(part, high, none, use_acc=False, is_async=True)
        part = _fragment(second_high, None, bank, SUMS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        left += sums * high_scale
        sums = warpgroup_mma(part, high, none, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        right += sums * other_scale
        refill(operands, ring, turn, tiles, step, PLAN)
        first, second = next_first, next_second
        turn = next_turn(turn, PLAN)
    return left * PLAN.unit, right * PLAN.unit, turn


@gluon.jit
def _powers_at(operands, tile, PLAN: gl.constexpr):
    """Pointers to the exponents of the first step of both blocks, four in a word: [64]."""
    by: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _twice_of())))
    COLUMNS: gl.constexpr = PLAN.k // STEP
    row, other = _rows(tile, by, PLAN)
    words = operands.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    words += tile.expert.to(gl.int64) * (PLAN.n * COLUMNS)
    return words + row * COLUMNS, words + other * COLUMNS


@gluon.jit
def _powers(words, GROUP_OF_STEP: gl.constexpr):
    """Two powers of two of words [64] of exponents, [64, 2], twice in bfloat16."""
    by: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _twice_of()))
    place = 16 * GROUP_OF_STEP + 8 * gl.arange(0, 2, gl.SliceLayout(0, by))
    return ((gl.expand_dims(words, 1) >> gl.expand_dims(place, 0)) & 0xFF) * 0x00800080


@gluon.jit
def _by_weights(operands, ring, turn, tiles, bank, PLAN: gl.constexpr):
    """Sums as of `products`; weights are scaled, by powers of two."""
    BM: gl.constexpr = PLAN.bm
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    first_at, second_at = _powers_at(operands, tiles.now, PLAN)
    first, second = gl.load(first_at), gl.load(second_at)
    left = gl.zeros([ROWS, BM], gl.float32, SUMS)
    right = gl.zeros([ROWS, BM], gl.float32, SUMS)
    for step in range(PLAN.steps):
        coming = gl.minimum(step + 1, PLAN.steps - 1)
        next_first, next_second = gl.load(first_at + coming), gl.load(second_at + coming)
        low, high, first_low, first_high, second_low, second_high = _arrived(ring, turn, PLAN)
        part = _fragment(first_low, _powers(first, 0), bank, SUMS)
        left = warpgroup_mma(part, low, left, is_async=True)
        part = _fragment(second_low, _powers(second, 0), bank, SUMS)
        right = warpgroup_mma(part, low, right, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        part = _fragment(first_high, _powers(first, 1), bank, SUMS)
        left = warpgroup_mma(part, high, left, is_async=True)
        right = warpgroup_mma_wait(1, deps=[right])
        part = _fragment(second_high, _powers(second, 1), bank, SUMS)
        right = warpgroup_mma(part, high, right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        refill(operands, ring, turn, tiles, step, PLAN)
        first, second = next_first, next_second
        turn = next_turn(turn, PLAN)
    return left, right, turn


@gluon.jit
def products(operands, ring, turn, tiles, bank, PLAN: gl.constexpr):
    """(Sums [64, bm] of both blocks of a tile, the next one's turn). While the last steps are
    computed, the first ones of the tile that follows come."""
    if PLAN.group == 32:
        return _by_weights(operands, ring, turn, tiles, bank, PLAN)
    else:
        return _by_sums(operands, ring, turn, tiles, bank, PLAN)
