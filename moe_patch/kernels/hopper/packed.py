"""Products with weights in 4 bits for Hopper, turned around: weight rows by rows of x.

A tile is `bm` rows of one expert by two blocks of `rows` rows of its weight: a gate's and its up's,
or neighbours. The weight is the left operand of wgmma, which may come from registers; a warpgroup
has sums [64, bm] of each block. Words of codes and rows of x come by cp.async, a few steps ahead. A
thread unpacks the words that it copied itself (`codes.py`), into a quarter of a step's operand at a
time, while the product of the quarter before is computed. Several programs share a multiprocessor.
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

from ...compat import gluon_barrier, gluon_copy
from ..activate import glu
from ..tiling import place
from .codes import LESS, STEP, fragment, own_value, words_of
from .lookup import fill_table

barrier, copy = gluon_barrier(), gluon_copy()


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
    group_m: int
    form: str
    """How a gate and its up lie among the rows, see Activation; "" where there is none."""
    top_k: int
    """Row r is x[row_to_slot[r] // top_k]; 0: x[r]."""
    weight_on_input: bool
    save_pre: bool
    steps: int
    """Of 128; x has 128 * steps columns."""
    rows: int
    """Of the weight, in one of a tile's two blocks: 16 for each warp."""
    stages: int
    """Of the rings."""
    ahead: int
    """How many of them are on their way; besides, one is read. If that is not all, products of a
    step may go on while the next one's codes are unpacked."""
    act_in_steps: bool
    """Whether act is stored in the order in which a product of `codes.py` reads it."""
    whole: bool
    """Whether tiles and steps divide the weight, so that nothing has to be masked."""
    pairs: bool
    """Whether codes are looked up in shared memory, two at a time."""


class Weight(NamedTuple):
    """Pointers: an expert's codes as words, its scales, and its zeros or anything."""

    words: Any
    scales: Any
    zeros: Any


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


class Groups(NamedTuple):
    """What a thread's words of one row share: scales [rows, 4], and zeros or anything."""

    scale: Any
    zero: Any


@gluon.jit
def _inside(row, k, PLAN: gl.constexpr):
    """[rows, 4]: whether there are such rows, and columns from k + 32 q on."""
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    return gl.expand_dims(row < PLAN.n, 1) & gl.expand_dims(k + 32 * q < PLAN.k, 0)


@gluon.jit
def _groups(weight, row, step, PLAN: gl.constexpr):
    """Of a step of rows `row` of an expert's weight; zero past its end."""
    k = gl.minimum(step, PLAN.steps - 1) * STEP
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    at = gl.expand_dims(row * (PLAN.k // PLAN.group), 1)
    at += gl.expand_dims((k + 32 * q) // PLAN.group, 0)
    if PLAN.whole:
        scale = gl.load(weight.scales + at)
        zero = gl.load(weight.zeros + at) if PLAN.zeros else scale
    else:
        inside = _inside(row, k, PLAN)
        scale = gl.load(weight.scales + at, mask=inside, other=0)
        zero = gl.load(weight.zeros + at, mask=inside, other=0) if PLAN.zeros else scale
    return Groups(scale, zero)


@gluon.jit
def _copy_words(ring, weight, row, step, BLOCK: gl.constexpr, PLAN: gl.constexpr):
    """Starts to bring a step of the codes of a block's rows."""
    by: gl.constexpr = row.type.layout.parent.parent
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by)))
    line = gl.expand_dims(row * (PLAN.k // 8), 1) + gl.expand_dims(step * (STEP // 8) + 4 * q, 0)
    at = gl.expand_dims(line, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    to = ring.index(2 * (step % PLAN.stages) + BLOCK)
    if PLAN.whole:
        copy(to, weight.words + at)
    else:
        copy(to, weight.words + at, mask=gl.expand_dims(_inside(row, step * STEP, PLAN), 2))


@gluon.jit
def _copy_step(rings, weight, first, second, rows, step, PLAN: gl.constexpr):
    """Starts to bring words of both blocks, and columns of x [bm, 128] of the step that is needed
    next."""
    if step < PLAN.steps:
        _copy_words(rings.words, weight, first, step, 0, PLAN)
        _copy_words(rings.words, weight, second, step, 1, PLAN)
        copy(rings.x.index(step % PLAN.stages), rows + step * STEP)
    async_copy.commit_group()


@gluon.jit
def _halves(words):
    """r = 0 and r = 1 of words [rows, q, 2 s + r]."""
    return words.reshape((words.shape[0], 4, 2, 2)).split()


@gluon.jit
def _products(x, weight, table, source, first, second, rings, PLAN: gl.constexpr):
    """Sums [rows, bm] of two blocks of an expert's weight, its rows `first` and `second`, by rows
    `source` [bm] of x."""
    BM: gl.constexpr = PLAN.bm
    AHEAD: gl.constexpr = PLAN.ahead
    LAST: gl.constexpr = 1 if PLAN.stages > PLAN.ahead + 1 else 0
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    by: gl.constexpr = first.type.layout.parent.parent
    columns = gl.arange(0, STEP, gl.SliceLayout(0, source.type.layout.parent))
    rows = gl.expand_dims(source.to(gl.int64) * (PLAN.steps * STEP), 1)
    rows = x + (rows + gl.expand_dims(columns, 0))
    for step in gl.static_range(AHEAD):
        _copy_step(rings, weight, first, second, rows, step, PLAN)
    if PLAN.pairs:  # while the first steps come
        fill_table(table)
        barrier()
    own = own_value(table, PLAN)
    one, two = _groups(weight, first, 0, PLAN), _groups(weight, second, 0, PLAN)
    one_next, two_next = _groups(weight, first, 1, PLAN), _groups(weight, second, 1, PLAN)
    left = gl.zeros([first.shape[0], BM], gl.float32, SUMS)
    right = gl.zeros([first.shape[0], BM], gl.float32, SUMS)
    for step in range(PLAN.steps):
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        stage = rings.x.index(step % PLAN.stages)  # [bm, 128]
        low = stage.slice(0, STEP // 2, dim=1).permute((1, 0))
        high = stage.slice(STEP // 2, STEP // 2, dim=1).permute((1, 0))
        at = 2 * (step % PLAN.stages)
        one_low, one_high = _halves(rings.words.index(at).load(by))
        two_low, two_high = _halves(rings.words.index(at + 1).load(by))
        part = fragment(one_low, one.scale, one.zero, own, SUMS, PLAN)
        left = warpgroup_mma(part, low, left, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        part = fragment(two_low, two.scale, two.zero, own, SUMS, PLAN)
        right = warpgroup_mma(part, low, right, is_async=True)
        right = warpgroup_mma_wait(1, deps=[right])
        part = fragment(one_high, one.scale, one.zero, own, SUMS, PLAN)
        left = warpgroup_mma(part, high, left, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        part = fragment(two_high, two.scale, two.zero, own, SUMS, PLAN)
        right = warpgroup_mma(part, high, right, is_async=True)
        left, right = warpgroup_mma_wait(LAST, deps=[left, right])
        one, two = one_next, two_next
        one_next = _groups(weight, first, step + 2, PLAN)
        two_next = _groups(weight, second, step + 2, PLAN)
        _copy_step(rings, weight, first, second, rows, step + AHEAD, PLAN)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    if PLAN.format == "mxfp4":
        left *= 2.0**LESS
        right *= 2.0**LESS
    return left, right


@gluon.jit
def _of_expert(w, scales, zeros, expert, PLAN: gl.constexpr):
    expert = expert.to(gl.int64)
    words = (w + expert * PLAN.weight_e).to(gl.pointer_type(gl.int32), bitcast=True)
    scales += expert * PLAN.scale_e
    if PLAN.zeros:
        return Weight(words, scales, zeros + expert * PLAN.scale_e)
    else:
        return Weight(words, scales, scales)


@gluon.jit
def _tile(order, num_n: gl.constexpr, PLAN: gl.constexpr):
    """(expert, row0, the row after its last, column tile, where rows come from [bm])."""
    expert, row0, end, column = place(
        gl.program_id(0), order.tile_expert, order.tile_row, order.expert_offsets,
        num_n, 0, PLAN.bm, PLAN.group_m,
    )  # fmt: skip
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
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
    x = gl.allocate_shared_memory(dtype, [PLAN.stages, PLAN.bm, STEP], for_x)
    words = gl.allocate_shared_memory(gl.int32, [2 * PLAN.stages, PLAN.rows, 4, 4], as_read)
    return Rings(x, words)


@gluon.jit
def _row(begin, PLAN: gl.constexpr):
    """begin ... begin + rows, as rows of words lie in threads."""
    by: gl.constexpr = words_of(PLAN.rows)
    return begin + gl.arange(0, PLAN.rows, gl.SliceLayout(1, gl.SliceLayout(2, by)))


@gluon.jit
def _store(value, out, row0, end, column, END: gl.constexpr, ROW: gl.constexpr):
    """Writes the transpose of sums [columns, bm] to rows of `out`, ROW elements apart, from a row
    and a column on, up to row `end` and column END."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    value = gl.convert_layout(value.to(out.dtype.element_ty).permute((1, 0)), by)
    row = row0 + gl.arange(0, value.shape[0], gl.SliceLayout(1, by))
    n = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, by))
    inside = gl.expand_dims(row < end, 1) & gl.expand_dims(n < END, 0)
    to = out + gl.expand_dims(row.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    gl.store(to, value, mask=inside)


@gluon.jit
def _store_in_steps(
    value, out, row0, end, column, END: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr
):
    """As `_store`, of columns in the order of `codes.py`; zero from column END on."""
    COLUMNS: gl.constexpr = value.shape[0]
    BM: gl.constexpr = value.shape[1]
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, value.type.layout))
    value = gl.where(gl.expand_dims(n < END, 1), value, 0.0).to(out.dtype.element_ty)
    if PAIRS:
        value = value.reshape((COLUMNS // 32, 2, 2, 4, 2, BM)).permute((5, 2, 1, 3, 0, 4))
    else:
        value = value.reshape((COLUMNS // 32, 2, 2, 2, 4, BM)).permute((5, 2, 1, 4, 0, 3))
    by: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    value = gl.convert_layout(value.reshape((BM, COLUMNS)), by)  # r s p q h
    row = row0 + gl.arange(0, BM, gl.SliceLayout(1, by))
    place = gl.arange(0, COLUMNS, gl.SliceLayout(0, by))
    WIDE: gl.constexpr = COLUMNS // 16  # of a step's eight places with the same r, s, p
    place = place // WIDE * 8 + place % WIDE
    first = column // STEP * STEP + column % STEP // 16
    to = out + gl.expand_dims(row.to(gl.int64) * ROW + first, 1) + gl.expand_dims(place, 0)
    gl.store(to, value, mask=gl.expand_dims(row < end, 1))


@gluon.jit
def _pair(n, PLAN: gl.constexpr):
    """(the weight's rows of gates n, how far their ups are)."""
    if PLAN.form == "interleaved":
        return 2 * n, 1
    else:
        return n, PLAN.n // 2


@gluon.jit
def _add_bias(sums, bias, expert, row, PLAN: gl.constexpr):
    """sums [rows, bm] plus the bias of its rows `row` [rows]."""
    value = gl.load(bias + expert.to(gl.int64) * PLAN.n + row, mask=row < PLAN.n, other=0.0)
    return sums + gl.expand_dims(value.to(gl.float32), 1)


@gluon.jit
def gemm_packed_kernel(
    x, w, scales, zeros, table, bias, out,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr,
):  # fmt: skip
    """out [S, n] = x W^T + bias of x [S, 128 * steps], in steps, in expert order."""
    NUM_N: gl.constexpr = (PLAN.n + 2 * PLAN.rows - 1) // (2 * PLAN.rows)
    if gl.program_id(0) < gl.load(num_tiles) * NUM_N:
        order = Order(row_to_slot, expert_offsets, tile_expert, tile_row)
        expert, row0, end, column, source = _tile(order, NUM_N, PLAN)
        weight, n0 = _of_expert(w, scales, zeros, expert, PLAN), column * (2 * PLAN.rows)
        first = _row(n0, PLAN)
        rings = _rings(x.dtype.element_ty, PLAN)
        left, right = _products(x, weight, table, source, first, first + PLAN.rows, rings, PLAN)
        if bias is not None:
            row = n0 + gl.arange(0, PLAN.rows, gl.SliceLayout(1, left.type.layout))
            left = _add_bias(left, bias, expert, row, PLAN)
            right = _add_bias(right, bias, expert, row + PLAN.rows, PLAN)
        _store(left, out, row0, end, n0, PLAN.n, PLAN.n)
        _store(right, out, row0, end, n0 + PLAN.rows, PLAN.n, PLAN.n)


@gluon.jit
def gate_up_packed_kernel(
    x, w, scales, zeros, table, bias, slot_weight, act, pre,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """act [S, n / 2] of x [T, 128 * steps], in steps, and with PLAN.save_pre also pre [S, n]."""
    INNER: gl.constexpr = PLAN.n // 2
    COLUMNS: gl.constexpr = (INNER + STEP - 1) // STEP * STEP if PLAN.act_in_steps else INNER
    NUM_N: gl.constexpr = (COLUMNS + PLAN.rows - 1) // PLAN.rows
    if gl.program_id(0) < gl.load(num_tiles) * NUM_N:
        order = Order(row_to_slot, expert_offsets, tile_expert, tile_row)
        expert, row0, end, column, source = _tile(order, NUM_N, PLAN)
        weight, n0 = _of_expert(w, scales, zeros, expert, PLAN), column * PLAN.rows
        at, shift = _pair(_row(n0, PLAN), PLAN)
        rings = _rings(x.dtype.element_ty, PLAN)
        gate, up = _products(x, weight, table, source, at, at + shift, rings, PLAN)
        if bias is not None:
            at, shift = _pair(
                n0 + gl.arange(0, PLAN.rows, gl.SliceLayout(1, gate.type.layout)), PLAN
            )
            gate = _add_bias(gate, bias, expert, at, PLAN)
            up = _add_bias(up, bias, expert, at + shift, PLAN)
        if PLAN.save_pre:
            if PLAN.form == "interleaved":
                both = gl.join(gate, up).permute((0, 2, 1)).reshape((2 * PLAN.rows, PLAN.bm))
                _store(both, pre, row0, end, 2 * n0, PLAN.n, PLAN.n)
            else:
                _store(gate, pre, row0, end, n0, INNER, PLAN.n)
                _store(up, pre + INNER, row0, end, n0, INNER, PLAN.n)
        if PLAN.weight_on_input:
            row = row0 + gl.arange(0, PLAN.bm, gl.SliceLayout(0, gate.type.layout))
            slot = gl.load(row_to_slot + row, mask=row < end, other=0)
            scale = gl.expand_dims(gl.load(slot_weight + slot).to(gl.float32), 0)
            gate *= scale
            up *= scale
        value, _, _ = glu(gate, up, GATE)
        if PLAN.act_in_steps:
            WIDTH: gl.constexpr = (INNER + STEP - 1) // STEP * STEP
            _store_in_steps(value, act, row0, end, n0, INNER, WIDTH, PLAN.pairs)
        else:
            _store(value, act, row0, end, n0, INNER, INNER)
