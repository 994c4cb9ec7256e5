"""Products with weights in 4 bits for Hopper and many rows an expert, turned around, with roles.

As in `packed.py` weight rows are the left operand of wgmma, in registers. A tile is 128 rows of one
expert by two blocks of 128 rows of its weight: a gate's and its up's, or neighbours. One warpgroup
brings codes through TMA, and rows of x: gathered by cp.async, or through TMA. Two own 64 rows of
each block; each unpacks its codes, a quarter of a step at a time, while the product of the quarter
before is computed. They share a step's rows of x, and one's epilogue runs beside the other's
products.

Which 64 columns of an activation are a warpgroup's: where they are stored in the order in which the
next product reads them (`codes.py`), those that come to lie together, 8 of each 16; else the lower
ones or the upper ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat import gluon_barrier
from ..activate import glu
from .codes import LESS, ROWS, fragment, halves, own_value, words_of
from .gather import tokens_of
from .lookup import fill_table, own_bank
from .packed_ring import Operands, Update, bring_tiles, first_column, ring_of
from .packed_weight import add_bias, by_routing, gate_and_up, groups, of_expert
from .ring import wait_full
from .stores import in_halves, staged_for, store_box
from .turns import tiles_of, told, turns_of

barrier = gluon_barrier()


class Weights(NamedTuple):
    """Pointers to all experts' codes, scales and zeros; and a table's address or values."""

    words: Any
    scales: Any
    zeros: Any
    table: Any


class Result(NamedTuple):
    """Boxes [64, 64] of rows that are written; pre; what that takes: a bias, the routing weights;
    and the memory by way of which it is."""

    out: Any
    pre: Any
    bias: Any
    slot_weight: Any
    row_to_slot: Any
    staged: Any


@gluon.constexpr_function
def _lines_of():
    """Layout of a step's words [64, 16], as `words_of` has them."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16]
    )


@gluon.jit
def _column(i, column, ME: gl.constexpr, PLAN: gl.constexpr):
    """Columns of a block that a warpgroup's rows i are, in the column tile `column`."""
    if PLAN.act_in_steps:
        return column * (2 * ROWS) + i // 8 * 16 + 8 * ME + i % 8
    else:
        return first_column(column, ME, PLAN) + i


@gluon.jit
def _rows_of(column, by: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr):
    """Both blocks' rows [64] of the weight."""
    n = _column(gl.arange(0, ROWS, by), column, ME, PLAN)
    if PLAN.form == "":
        return n, n + 2 * ROWS
    else:
        first, shift = gate_and_up(n, PLAN)
        return first, first + shift


@gluon.jit
def _words(ring, at):
    """Both halves of a step's words [64, 4, 2]."""
    words = ring.left.index(at).load(_lines_of()).reshape((ROWS, 4, 4))
    return halves(gl.convert_layout(words, words_of(), assert_trivial=True))


@gluon.jit
def _arrived(ring, step, exists, ME: gl.constexpr, PLAN: gl.constexpr):
    """Both halves' words of both blocks, [64, 4, 2] each, once the step is there."""
    stage = wait_full(ring, step, PLAN, exists)
    if PLAN.copied:  # cp.async writes as threads do, and wgmma reads as TMA does
        fence_async_shared()
    one_low, one_high = _words(ring, 4 * stage + 2 * ME)
    two_low, two_high = _words(ring, 4 * stage + 2 * ME + 1)
    return one_low, one_high, two_low, two_high


@gluon.jit
def _updated(sums, ring, step, BM: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr):
    """Sums [64, BM] of a block, plus 64 of the rank of an update."""
    stage = wait_full(ring, step, PLAN)
    side = ring.right.index(2 * stage).slice(0, BM).permute((1, 0))
    b = ring.right.index(2 * stage + 1).slice(ROWS * ME, ROWS)
    sums = warpgroup_mma(b, side, sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return sums


@gluon.jit
def _products(
    weights, ring, step, place, own,
    BM: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Sums [64, BM] of a warpgroup's rows of both blocks by BM rows of x, from a step of the ring
    on.

    One product is on its way at a time, while the next one's operand is unpacked. With two, `ptxas`
    finds 168 registers too few, those that a thread has before warpgroups share them anew, and
    waits for each instruction of wgmma."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    by: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_of()))
    weight = of_expert(weights.words, weights.scales, weights.zeros, place.expert, PLAN)
    first, second = _rows_of(place.column, by, ME, PLAN)
    one, two = groups(weight, first, 0, PLAN), groups(weight, second, 0, PLAN)
    one_next, two_next = groups(weight, first, 1, PLAN), groups(weight, second, 1, PLAN)
    left = gl.zeros([ROWS, BM], gl.float32, SUMS)
    right = gl.zeros([ROWS, BM], gl.float32, SUMS)
    one_low, one_high, two_low, two_high = _arrived(ring, step, True, ME, PLAN)
    part = fragment(one_low, one, own, SUMS, PLAN, PLAN.pairs)
    for i in range(PLAN.steps):
        stage = (step + i) % PLAN.stages
        low = ring.right.index(2 * stage).slice(0, BM).permute((1, 0))
        high = ring.right.index(2 * stage + 1).slice(0, BM).permute((1, 0))
        left = warpgroup_mma(part, low, left, is_async=True)
        part = fragment(two_low, two, own, SUMS, PLAN, PLAN.pairs)
        left = warpgroup_mma_wait(0, deps=[left])
        right = warpgroup_mma(part, low, right, is_async=True)
        part = fragment(one_high, one, own, SUMS, PLAN, PLAN.pairs)
        right = warpgroup_mma_wait(0, deps=[right])
        left = warpgroup_mma(part, high, left, is_async=True)
        part = fragment(two_high, two, own, SUMS, PLAN, PLAN.pairs)
        left = warpgroup_mma_wait(0, deps=[left])
        right = warpgroup_mma(part, high, right, is_async=True)
        one, two = one_next, two_next
        one_next = groups(weight, first, i + 2, PLAN)
        two_next = groups(weight, second, i + 2, PLAN)
        # after the last step: what is there, which nobody reads
        more = i < PLAN.steps - 1
        one_low, one_high, two_low, two_high = _arrived(ring, step + i + 1, more, ME, PLAN)
        part = fragment(one_low, one, own, SUMS, PLAN, PLAN.pairs)
        right = warpgroup_mma_wait(0, deps=[right])
        mbarrier.arrive(ring.empty.index(stage), count=1)
    for i in range(PLAN.rank // 128):
        left = _updated(left, ring, step + PLAN.steps + 2 * i, BM, ME, PLAN)
        right = _updated(right, ring, step + PLAN.steps + 2 * i + 1, BM, ME, PLAN)
    return left, right


@gluon.jit
def _part(
    sums, result, place,
    PART: gl.constexpr, BLOCK: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Sums of 64 rows of x, of a block's [64, BM], with their bias. (With all of them at once,
    `ptxas` found too few registers, as in `_products`.)"""
    if sums.shape[1] > 64:
        both = in_halves(sums)
        sums = both[PART]
    if PLAN.format == "mxfp4":
        sums *= 2.0**LESS
    if result.bias is not None:
        rows = _rows_of(place.column, gl.SliceLayout(1, sums.type.layout), ME, PLAN)
        sums = add_bias(sums, result.bias, place.expert, rows[BLOCK], PLAN)
    return sums


@gluon.jit
def _write_rows(left, right, result, place, ME: gl.constexpr, PLAN: gl.constexpr):
    """Writes the transpose of sums [64, BM] of both blocks to out."""
    n0 = first_column(place.column, ME, PLAN)
    for part in gl.static_range(left.shape[1] // 64):
        row = place.first + 64 * part
        if row < place.end:
            one = _part(left, result, place, part, 0, ME, PLAN).permute((1, 0))
            two = _part(right, result, place, part, 1, ME, PLAN).permute((1, 0))
            store_box(one, result.out, result.staged, row, place.end, n0, ME, 0)
            store_box(two, result.out, result.staged, row, place.end, n0 + 2 * ROWS, ME, 1)


@gluon.jit
def _in_steps(value, column, INNER: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr):
    """Activations [64, rows] as [rows, 64], in the order of a step; zero from column INNER on."""
    M: gl.constexpr = value.shape[1]
    n = _column(gl.arange(0, ROWS, gl.SliceLayout(1, value.type.layout)), column, ME, PLAN)
    value = gl.where(gl.expand_dims(n < INNER, 1), value, 0.0)
    if PLAN.pairs:
        value = value.reshape((4, 2, 4, 2, M)).permute((4, 1, 2, 0, 3))  # q s p h -> s p q h
    else:
        value = value.reshape((4, 2, 2, 4, M)).permute((4, 1, 3, 0, 2))  # q s h p -> s p q h
    return value.reshape((M, ROWS))


@gluon.jit
def _keep(gate, up, result, row, end, column, ME: gl.constexpr, PLAN: gl.constexpr):
    """Writes gates and ups [64, 64] to rows of pre."""
    INNER: gl.constexpr = PLAN.n // 2
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = result.staged.dtype
    tma.store_wait(0)
    barrier()
    by_way, other = result.staged.index(2 * ME), result.staged.index(2 * ME + 1)
    by_way.store(gate.permute((1, 0)).to(dtype))
    other.store(up.permute((1, 0)).to(dtype))
    gate, up = by_way.load(by), other.load(by)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, by))
    n = _column(gl.arange(0, ROWS, gl.SliceLayout(0, by)), column, ME, PLAN)
    inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(n < INNER, 0)
    first, shift = gate_and_up(n, PLAN)
    at = result.pre + (gl.expand_dims(rows.to(gl.int64) * PLAN.n, 1) + gl.expand_dims(first, 0))
    gl.store(at, gate, mask=inside)
    gl.store(at + shift, up, mask=inside)


@gluon.jit
def _write_act(
    gates, ups, result, place, ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr
):  # fmt: skip
    """Activates and writes sums [64, BM]; before that, if it is kept, pre."""
    end, column = place.end, place.column
    for part in gl.static_range(gates.shape[1] // 64):
        row = place.first + 64 * part
        if row < end:
            gate = _part(gates, result, place, part, 0, ME, PLAN)
            up = _part(ups, result, place, part, 1, ME, PLAN)
            if PLAN.save_pre:
                _keep(gate, up, result, row, end, column, ME, PLAN)
            if PLAN.weight_on_input:
                gate, up = by_routing(gate, up, result.slot_weight, result.row_to_slot, row, end)
            value, _, _ = glu(gate, up, GATE)
            if PLAN.act_in_steps:
                value = _in_steps(value, column, PLAN.n // 2, ME, PLAN)
            else:
                value = value.permute((1, 0))
            n0 = first_column(column, ME, PLAN)
            store_box(value, result.out, result.staged, row, end, n0, ME, part)


@gluon.jit
def _compute(
    weights, result, ring, step, place, own,
    BM: gl.constexpr, ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Does a warpgroup's part of a tile of up to BM rows."""
    left, right = _products(weights, ring, step, place, own, BM, ME, PLAN)
    tma.store_wait(0)  # the tile's before, which may have used one box alone
    if GATE is None:
        _write_rows(left, right, result, place, ME, PLAN)
    else:
        _write_act(left, right, result, place, ME, PLAN, GATE)


@gluon.jit
def _consume(
    weights, result, ring, turns, ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr
):  # fmt: skip
    step, turn = 0, 0
    place = told(turns, 0)
    own = own_bank(place.expert) if PLAN.pairs else own_value(weights.table)
    while place.end > 0:
        if place.end - place.first <= 64:
            _compute(weights, result, ring, step, place, own, 64, ME, PLAN, GATE)
        else:
            _compute(weights, result, ring, step, place, own, 128, ME, PLAN, GATE)
        step += PLAN.steps + PLAN.rank // 64
        turn += 1
        place = told(turns, turn)
    tma.store_wait(0)


@gluon.jit
def _share(
    operands, update, weights, result, tiles, taken, PLAN: gl.constexpr, GATE: gl.constexpr
):  # fmt: skip
    """Has a program's warpgroups do its share of all tiles."""
    ring, turns = ring_of(result.staged.dtype, PLAN), turns_of(taken, PLAN)
    if PLAN.pairs:
        fill_table(weights.table)
        barrier()
    gl.warp_specialize(
        [
            (_consume, (weights, result, ring, turns, 0, PLAN, GATE)),
            (_consume, (weights, result, ring, turns, 1, PLAN, GATE)),
            (bring_tiles, (operands, update, tiles, ring, turns, PLAN)),
        ],
        [4, 4],
        [232, 40],
    )


@gluon.jit
def gemm_packed_roles_kernel(
    x, words, w, scales, zeros, table, side, b, bias, out, taken,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr,
):  # fmt: skip
    """out [S, n] = x W^T + bias, in expert order. x [S, 128 * steps], in steps, and out as boxes of
    rows, [128, 64] and [64, 64]; `words` as boxes, see `bring_words`, of `w`; `taken` is an
    order's."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    operands = Operands(x, words, words, None, None)
    result = Result(out, None, bias, None, row_to_slot, staged_for(out.dtype, PLAN))
    weights, update = Weights(w, scales, zeros, table), Update(side, b, b)
    _share(operands, update, weights, result, tiles, taken, PLAN, None)


@gluon.jit
def gate_up_packed_roles_kernel(
    x, gates, ups, w, scales, zeros, table, side, b_gates, b_ups, bias, slot_weight, act, pre,
    taken,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """act [S, n / 2], or in steps, as boxes of rows, [64, 64], and with PLAN.save_pre also pre
    [S, n], of x [T, 128 * steps], in steps; the others as of the gemm."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    operands = Operands(x, gates, ups, row_to_slot, tokens_of(PLAN))
    result = Result(act, pre, bias, slot_weight, row_to_slot, staged_for(act.dtype, PLAN))
    weights, update = Weights(w, scales, zeros, table), Update(side, b_gates, b_ups)
    _share(operands, update, weights, result, tiles, taken, PLAN, GATE)
