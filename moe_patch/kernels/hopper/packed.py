"""Products with weights in 4 bits for Hopper, turned around: weight rows by few rows of x.

A tile is `bm` rows of one expert by two blocks of 64 rows of its weight: a gate's and its up's, or
neighbours. The weight is the left operand of wgmma, which may come from registers; a program is one
warpgroup, and has sums [64, bm] of each block. Words of codes and rows of x come by cp.async, a few
steps ahead. A thread unpacks the words that it copied itself (`codes.py`), into a quarter of a
step's operand at a time, while the product of the quarter before is computed. Several programs
share a multiprocessor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat import gluon_copy
from ..activate import glu
from ..tiling import place
from .codes import LESS, ROWS, STEP, fragment, halves, own_value, words_of
from .packed_weight import add_bias, by_routing, gate_and_up, groups, is_there, of_expert

copy = gluon_copy()


class Plan(NamedTuple):
    """Sizes of a product, as one constant."""

    n: int
    """Rows of an expert's weight as it lies."""
    k: int
    format: str
    group: int
    zeros: bool
    """Whether groups have codes for zero."""
    weight_e: int
    """Bytes of codes of an expert."""
    scale_e: int
    bm: int
    form: str
    """How a gate and its up lie among the rows, see Activation; "" where there is none."""
    top_k: int
    """Row r is x[row_to_slot[r] // top_k]; 0: x[r]."""
    weight_on_input: bool
    save_pre: bool
    steps: int
    """Of 128; x has 128 * steps columns."""
    ahead: int
    """Steps that are on their way; besides, one is read."""
    act_in_steps: bool
    """Whether act is stored in the order in which a product of `codes.py` reads it."""
    whole: bool
    """Whether tiles and steps divide the weight, so that nothing has to be masked."""


class Order(NamedTuple):
    """An ExpertOrder inside a kernel."""

    row_to_slot: Any
    expert_offsets: Any
    tile_expert: Any
    tile_row: Any


class Rings(NamedTuple):
    """Shared memory that rows of x and the words of both blocks pass through."""

    x: Any
    words: Any


@gluon.jit
def _copy_words(ring, weight, row, step, BLOCK: gl.constexpr, PLAN: gl.constexpr):
    """Starts to bring a step of the codes of a block's rows."""
    by: gl.constexpr = row.type.layout.parent.parent
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by)))
    line = gl.expand_dims(row * (PLAN.k // 8), 1) + gl.expand_dims(step * (STEP // 8) + 4 * q, 0)
    at = gl.expand_dims(line, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    to = ring.index(2 * (step % (PLAN.ahead + 1)) + BLOCK)
    if PLAN.whole:
        copy(to, weight.words + at)
    else:
        copy(to, weight.words + at, mask=gl.expand_dims(is_there(row, step * STEP, PLAN), 2))


@gluon.jit
def _copy_step(rings, weight, first, second, rows, step, PLAN: gl.constexpr):
    """Starts to bring words of both blocks, and columns of x [bm, 128] of the step that is needed
    next."""
    if step < PLAN.steps:
        _copy_words(rings.words, weight, first, step, 0, PLAN)
        _copy_words(rings.words, weight, second, step, 1, PLAN)
        copy(rings.x.index(step % (PLAN.ahead + 1)), rows + step * STEP)
    async_copy.commit_group()


@gluon.jit
def _products(x, weight, table, source, first, second, rings, PLAN: gl.constexpr):
    """Sums [64, bm] of two blocks of an expert's weight, its rows `first` and `second`, by rows
    `source` [bm] of x."""
    BM: gl.constexpr = PLAN.bm
    AHEAD: gl.constexpr = PLAN.ahead
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    by: gl.constexpr = first.type.layout.parent.parent
    columns = gl.arange(0, STEP, gl.SliceLayout(0, source.type.layout.parent))
    rows = gl.expand_dims(source.to(gl.int64) * (PLAN.steps * STEP), 1)
    rows = x + (rows + gl.expand_dims(columns, 0))
    for step in gl.static_range(AHEAD):
        _copy_step(rings, weight, first, second, rows, step, PLAN)
    own = own_value(table)
    one, two = groups(weight, first, 0, PLAN), groups(weight, second, 0, PLAN)
    one_next, two_next = groups(weight, first, 1, PLAN), groups(weight, second, 1, PLAN)
    left = gl.zeros([ROWS, BM], gl.float32, SUMS)
    right = gl.zeros([ROWS, BM], gl.float32, SUMS)
    for step in range(PLAN.steps):
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        stage = rings.x.index(step % (PLAN.ahead + 1))  # [bm, 128]
        low = stage.slice(0, STEP // 2, dim=1).permute((1, 0))
        high = stage.slice(STEP // 2, STEP // 2, dim=1).permute((1, 0))
        at = 2 * (step % (PLAN.ahead + 1))
        one_low, one_high = halves(rings.words.index(at).load(by))
        two_low, two_high = halves(rings.words.index(at + 1).load(by))
        part = fragment(one_low, one, own, SUMS, PLAN)
        left = warpgroup_mma(part, low, left, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        part = fragment(two_low, two, own, SUMS, PLAN)
        right = warpgroup_mma(part, low, right, is_async=True)
        right = warpgroup_mma_wait(1, deps=[right])
        part = fragment(one_high, one, own, SUMS, PLAN)
        left = warpgroup_mma(part, high, left, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        part = fragment(two_high, two, own, SUMS, PLAN)
        right = warpgroup_mma(part, high, right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        one, two = one_next, two_next
        one_next = groups(weight, first, step + 2, PLAN)
        two_next = groups(weight, second, step + 2, PLAN)
        _copy_step(rings, weight, first, second, rows, step + AHEAD, PLAN)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    if PLAN.format == "mxfp4":
        left *= 2.0**LESS
        right *= 2.0**LESS
    return left, right


@gluon.jit
def _tile(order, num_n: gl.constexpr, PLAN: gl.constexpr):
    """(expert, row0, the row after its last, column tile, where rows come from [bm])."""
    expert, row0, end, column = place(
        gl.program_id(0), order.tile_expert, order.tile_row, order.expert_offsets,
        num_n, 0, PLAN.bm, 8,
    )  # fmt: skip
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    source = row0 + gl.arange(0, PLAN.bm, gl.SliceLayout(1, by))
    inside = source < end
    if PLAN.top_k > 0:
        source = gl.load(order.row_to_slot + source, mask=inside, other=0) // PLAN.top_k
    else:
        source = gl.where(inside, source, row0)
    return expert, row0, end, column, source


@gluon.jit
def _rings(dtype: gl.constexpr, PLAN: gl.constexpr):
    for_x: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    as_read: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x = gl.allocate_shared_memory(dtype, [PLAN.ahead + 1, PLAN.bm, STEP], for_x)
    words = gl.allocate_shared_memory(gl.int32, [2 * (PLAN.ahead + 1), ROWS, 4, 4], as_read)
    return Rings(x, words)


@gluon.jit
def _row(begin, PLAN: gl.constexpr):
    """begin ... begin + rows, as rows of words lie in threads."""
    by: gl.constexpr = words_of()
    return begin + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, by)))


@gluon.jit
def _store(value, out, row0, end, column, END: gl.constexpr, ROW: gl.constexpr):
    """Writes the transpose of sums [columns, bm] to rows of `out`, ROW elements apart, from a row
    and a column on, up to row `end` and column END."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(out.dtype.element_ty).permute((1, 0)), by)
    row = row0 + gl.arange(0, value.shape[0], gl.SliceLayout(1, by))
    n = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, by))
    inside = gl.expand_dims(row < end, 1) & gl.expand_dims(n < END, 0)
    to = out + gl.expand_dims(row.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    gl.store(to, value, mask=inside)


@gluon.jit
def _store_in_steps(value, out, row0, end, column, END: gl.constexpr, ROW: gl.constexpr):
    """As `_store`, of columns in the order of `codes.py`; zero from column END on."""
    COLUMNS: gl.constexpr = value.shape[0]
    BM: gl.constexpr = value.shape[1]
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, value.type.layout))
    value = gl.where(gl.expand_dims(n < END, 1), value, 0.0).to(out.dtype.element_ty)
    value = value.reshape((COLUMNS // 32, 2, 2, 2, 4, BM)).permute((5, 2, 1, 4, 0, 3))
    by: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    value = gl.convert_layout(value.reshape((BM, COLUMNS)), by)  # r s p q h
    row = row0 + gl.arange(0, BM, gl.SliceLayout(1, by))
    place = gl.arange(0, COLUMNS, gl.SliceLayout(0, by))
    WIDE: gl.constexpr = COLUMNS // 16  # of a step's eight places with the same r, s, p
    place = place // WIDE * 8 + place % WIDE
    first = column // STEP * STEP + column % STEP // 16
    to = out + gl.expand_dims(row.to(gl.int64) * ROW + first, 1) + gl.expand_dims(place, 0)
    gl.store(to, value, mask=gl.expand_dims(row < end, 1))


@gluon.jit
def gemm_packed_kernel(
    x, w, scales, zeros, table, bias, out,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr,
):  # fmt: skip
    """out [S, n] = x W^T + bias of x [S, 128 * steps], in steps, in expert order."""
    NUM_N: gl.constexpr = (PLAN.n + 2 * ROWS - 1) // (2 * ROWS)
    if gl.program_id(0) < gl.load(num_tiles) * NUM_N:
        order = Order(row_to_slot, expert_offsets, tile_expert, tile_row)
        expert, row0, end, column, source = _tile(order, NUM_N, PLAN)
        weight, n0 = of_expert(w, scales, zeros, expert, PLAN), column * (2 * ROWS)
        first = _row(n0, PLAN)
        rings = _rings(x.dtype.element_ty, PLAN)
        left, right = _products(x, weight, table, source, first, first + ROWS, rings, PLAN)
        if bias is not None:
            row = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, left.type.layout))
            left = add_bias(left, bias, expert, row, PLAN)
            right = add_bias(right, bias, expert, row + ROWS, PLAN)
        _store(left, out, row0, end, n0, PLAN.n, PLAN.n)
        _store(right, out, row0, end, n0 + ROWS, PLAN.n, PLAN.n)


@gluon.jit
def gate_up_packed_kernel(
    x, w, scales, zeros, table, bias, slot_weight, act, pre,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """act [S, n / 2] of x [T, 128 * steps], in steps, and with PLAN.save_pre also pre [S, n]."""
    INNER: gl.constexpr = PLAN.n // 2
    COLUMNS: gl.constexpr = (INNER + STEP - 1) // STEP * STEP if PLAN.act_in_steps else INNER
    NUM_N: gl.constexpr = (COLUMNS + ROWS - 1) // ROWS
    if gl.program_id(0) < gl.load(num_tiles) * NUM_N:
        order = Order(row_to_slot, expert_offsets, tile_expert, tile_row)
        expert, row0, end, column, source = _tile(order, NUM_N, PLAN)
        weight, n0 = of_expert(w, scales, zeros, expert, PLAN), column * ROWS
        at, shift = gate_and_up(_row(n0, PLAN), PLAN)
        rings = _rings(x.dtype.element_ty, PLAN)
        gate, up = _products(x, weight, table, source, at, at + shift, rings, PLAN)
        if bias is not None:
            at, shift = gate_and_up(
                n0 + gl.arange(0, ROWS, gl.SliceLayout(1, gate.type.layout)), PLAN
            )
            gate = add_bias(gate, bias, expert, at, PLAN)
            up = add_bias(up, bias, expert, at + shift, PLAN)
        if PLAN.save_pre:
            if PLAN.form == "interleaved":
                both = gl.join(gate, up).permute((0, 2, 1)).reshape((2 * ROWS, PLAN.bm))
                _store(both, pre, row0, end, 2 * n0, PLAN.n, PLAN.n)
            else:
                _store(gate, pre, row0, end, n0, INNER, PLAN.n)
                _store(up, pre + INNER, row0, end, n0, INNER, PLAN.n)
        if PLAN.weight_on_input:
            gate, up = by_routing(gate, up, slot_weight, row_to_slot, row0, end)
        value, _, _ = glu(gate, up, GATE)
        if PLAN.act_in_steps:
            WIDTH: gl.constexpr = (INNER + STEP - 1) // STEP * STEP
            _store_in_steps(value, act, row0, end, n0, INNER, WIDTH)
        else:
            _store(value, act, row0, end, n0, INNER, INNER)
