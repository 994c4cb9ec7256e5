"""dw for Hopper: an expert's rows are the reduction; one operand is gathered, the other in order.

Columns of the gathered one come by cp.async, those of the other through TMA. Rows past an expert's
end are zeros in both, because a neighbour's may hold NaN. The gathered operand's columns are the
result's rows or its columns: as the result lies.

The producer looks a step's tokens up before the turn of that step, and tells the others which tile
is next. Where a tile's stores take as long as its products, its sums wait in registers and are
stored beside the next tile's products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...compat import gluon_copy
from ..tiling import in_groups
from .ring import BK, multiply, multiply_beside, ring_of, sums_of, wait_empty
from .rows import load_rows
from .stores import (
    Waiting,
    Writer,
    added,
    in_quarters,
    rounded,
    staged_for,
    store,
    store_box,
    write_quarter,
)
from .turns import answer, ask, forget, own, post, posted, turns_of

copy = gluon_copy()


class Plan(NamedTuple):
    """Sizes of a weight gradient as it lies in memory, [E, m, n] with n contiguous; see `ring`."""

    m: int
    n: int
    stride_e: int
    stride_m: int
    gather: int
    """The gathered operand's row of a slot is slot // gather."""
    gather_left: bool
    """Columns of the gathered operand are the result's rows, else the result's columns."""
    stride_gathered: int
    add: bool
    bm: int
    """Rows of a tile: 64 for each of `parts` warpgroups."""
    parts: int
    stages: int
    group_m: int
    """Row tiles that walk the columns side by side."""
    shared: bool
    """Whoever is free takes the next tile; else they are dealt out."""
    boxed: bool
    """The result is written through TMA, as boxes [64, 64] of [E * m, n]."""
    bn: int = 256
    left_turned: bool = True
    right_turned: bool = False
    copied: bool = True


class Operands(NamedTuple):
    """Factors of the product, inside a kernel; the dense one as boxes of rows."""

    gathered: Any
    dense_box: Any
    row_to_slot: Any


class Result(NamedTuple):
    """Where it goes; `boxes` of it, by way of `staged`, if it is boxed."""

    out: Any
    boxes: Any
    staged: Any


class Work(NamedTuple):
    """What all warpgroups share; `total` tiles."""

    expert_offsets: Any
    total: Any
    ring: Any
    turns: Any


class Rows(NamedTuple):
    """A step's rows of the reduction."""

    first: Any
    end: Any
    """The row after the expert's last."""
    row: Any
    """First row of the tile, in the result."""
    column: Any
    slots: Any
    """What row_to_slot has for them, [BK]."""


@gluon.constexpr_function
def _row_tiles(plan):
    return (plan.m + plan.bm - 1) // plan.bm


@gluon.constexpr_function
def _column_tiles(plan):
    return (plan.n + plan.bn - 1) // plan.bn


@gluon.constexpr_function
def _waits(plan):
    """Whether sums are stored beside the next tile's products. Three warpgroups that multiply have
    no registers for it."""
    return plan.parts == 2 and plan.boxed and not plan.add


@gluon.jit
def _rows():
    """Numbers of a step's rows."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return gl.arange(0, BK, gl.SliceLayout(1, by))


@gluon.jit
def _columns(first, WIDTH: gl.constexpr):
    """Numbers of columns from `first` on, [1, WIDTH]."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return gl.expand_dims(first + gl.arange(0, WIDTH, gl.SliceLayout(0, by)), 0)


@gluon.jit
def _tell(at, turn, work, PLAN: gl.constexpr):
    """Tells the others that a turn is tile `at`: its expert, row tile, steps (-1 past the last
    tile) and column tile. Returns (first row of the reduction, the one after its last, first row
    and column of the tile)."""
    NUM_M: gl.constexpr = _row_tiles(PLAN)
    NUM_N: gl.constexpr = _column_tiles(PLAN)
    inside = gl.minimum(at, work.total - 1)
    expert = inside // (NUM_M * NUM_N)
    begin = gl.load(work.expert_offsets + expert)
    end = gl.load(work.expert_offsets + expert + 1)
    tile, column = in_groups(inside % (NUM_M * NUM_N), NUM_M, NUM_N, PLAN.group_m)
    steps = (end - begin + BK - 1) // BK
    if at >= work.total:
        steps = gl.to_tensor(-1)
    post(work.turns, turn, (expert, tile, steps, column))
    return begin, end, tile * PLAN.bm, column * PLAN.bn


@gluon.jit
def _tile(at, asked, turn, work, PLAN: gl.constexpr):
    """The first tile with rows from `at` on; the others are told of all up to it. Returns (its
    number, the one that was asked for after it, its turn, what `_tell` returns)."""
    first, end, row, column = _tell(at, turn, work, PLAN)
    while (at < work.total) & (first >= end):
        at, asked = _after(at, asked, work, PLAN)
        turn += 1
        first, end, row, column = _tell(at, turn, work, PLAN)
    return at, asked, turn, first, end, row, column


@gluon.jit
def _ask(work, PLAN: gl.constexpr):
    """Asks for the tile after the program's first."""
    if PLAN.shared:
        return ask(work.turns)
    else:
        return gl.to_tensor(0)  # not used


@gluon.jit
def _after(at, asked, work, PLAN: gl.constexpr):
    """(the program's tile after `at`, one that is asked for now)."""
    if PLAN.shared:
        return answer(asked), ask(work.turns)
    else:
        return at + gl.num_programs(0), asked


@gluon.jit
def _slots(operands, first, end):
    """What row_to_slot has for a step's rows, in the layout of their copy."""
    rows = first + _rows()
    return gl.load(operands.row_to_slot + rows, mask=rows < end, other=0)


@gluon.jit
def _copy(operands, rows, ring, stage, PLAN: gl.constexpr):
    """Begins to copy a step's rows of the gathered operand, as many columns as a tile has; zeros
    where a row or a column is past the end."""
    PARTS: gl.constexpr = PLAN.parts
    source = (rows.slots // PLAN.gather).to(gl.int64) * PLAN.stride_gathered
    source = operands.gathered + gl.expand_dims(source, 1)  # [BK, 1]
    inside = gl.expand_dims(rows.first + _rows() < rows.end, 1)
    if PLAN.gather_left:
        for part in gl.static_range(PARTS):
            m = _columns(rows.row + 64 * part, 64)
            left = ring.left.index(PARTS * stage + part)
            copy(left, source + m, inside & (m < PLAN.m))
    else:
        n = _columns(rows.column, PLAN.bn)
        copy(ring.right.index(stage), source + n, inside & (n < PLAN.n))


@gluon.jit
def _load(operands, rows, ring, stage, PLAN: gl.constexpr):
    """Begins to load a step's rows of the dense operand."""
    PARTS: gl.constexpr = PLAN.parts
    full = ring.full.index(stage)
    if PLAN.gather_left:
        mbarrier.expect(full, BK * PLAN.bn * 2)
        right = ring.right.index(stage)
        load_rows(operands.dense_box, rows.first, rows.end, rows.column, full, right)
    else:
        mbarrier.expect(full, BK * PLAN.bm * 2)
        for part in gl.static_range(PARTS):
            left = ring.left.index(PARTS * stage + part)
            m = rows.row + 64 * part
            load_rows(operands.dense_box, rows.first, rows.end, m, full, left)


@gluon.jit
def _produce(operands, work, PLAN: gl.constexpr):
    step, turn, asked = 0, gl.to_tensor(0), _ask(work, PLAN)
    at, asked, turn, first, end, row, column = _tile(gl.program_id(0), asked, turn, work, PLAN)
    rows = Rows(first, end, row, column, _slots(operands, first, end))
    while at < work.total:
        first, end, row, column = rows.first + BK, rows.end, rows.row, rows.column
        if first >= end:
            at, asked = _after(at, asked, work, PLAN)
            at, asked, turn, first, end, row, column = _tile(at, asked, turn + 1, work, PLAN)
        following = Rows(first, end, row, column, _slots(operands, first, end))
        stage = wait_empty(work.ring, step, PLAN)
        _copy(operands, rows, work.ring, stage, PLAN)
        _load(operands, rows, work.ring, stage, PLAN)
        async_copy.mbarrier_arrive(work.ring.full.index(stage), increment_count=False)
        step += 1
        rows = following


@gluon.jit
def _store(acc, result, expert, row, column, PART: gl.constexpr, PLAN: gl.constexpr):
    """Writes sums [64, bn] of an expert, or adds them."""
    if PLAN.boxed:
        first, end = expert * PLAN.m + row, (expert + 1) * PLAN.m
        quarters = in_quarters(acc)
        for i in gl.static_range(4):
            sums, n = quarters[i], column + 64 * i
            if PLAN.add:
                sums = added(sums, result.out, first, end, n, PLAN.n, PLAN.stride_m)
            store_box(sums, result.boxes, result.staged, first, end, n, PART, i % 2)
    else:
        to = result.out + expert.to(gl.int64) * PLAN.stride_e
        if PLAN.add:
            acc = added(acc, to, row, PLAN.m, column, PLAN.n, PLAN.stride_m)
        store(acc, to, row, PLAN.m, column, PLAN.n, PLAN.stride_m)


@gluon.jit
def _store_at_once(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of each tile and stores them, or adds them, when they are ready."""
    step, turn = 0, 0
    _, _, steps, _ = posted(work.turns, 0)
    while steps >= 0:
        acc = multiply(work.ring, step, steps, PART, PLAN)
        expert, tile, _, column = own(work.turns, turn)  # not before: registers are few
        forget(work.turns, turn)
        if steps > 0 or not PLAN.add:  # to an expert without rows nothing is added
            row = tile * PLAN.bm + 64 * PART
            _store(acc, result, expert, row, column * PLAN.bn, PART, PLAN)
        step += steps
        turn += 1
        _, _, steps, _ = posted(work.turns, turn)


@gluon.jit
def _store_beside(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of each tile and stores them beside the next one's products."""
    dtype: gl.constexpr = result.staged.dtype
    step, turn = 0, 0
    expert, tile, steps, column = posted(work.turns, 0)
    waiting = Waiting(rounded(sums_of(PLAN), dtype), tile, steps * 0, column)
    while steps >= 0:
        forget(work.turns, turn)
        writer = Writer(result.boxes, result.staged, waiting, PART)
        acc = multiply_beside(work.ring, step, steps, PART, writer, write_quarter, 4, PLAN)
        first = expert * PLAN.m
        row = first + tile * PLAN.bm + 64 * PART
        waiting = Waiting(rounded(acc, dtype), row, first + PLAN.m, column * PLAN.bn)
        step += steps
        turn += 1
        expert, tile, steps, column = posted(work.turns, turn)
    for i in gl.static_range(4):
        write_quarter(Writer(result.boxes, result.staged, waiting, PART), i)


@gluon.jit
def _consume(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    if _waits(PLAN):
        _store_beside(result, work, PART, PLAN)
    else:
        _store_at_once(result, work, PART, PLAN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts"])
def dw_hopper_kernel(
    gathered, dense_box, out, boxes, row_to_slot, expert_offsets, taken, experts,
    PLAN: gl.constexpr,
):  # fmt: skip
    """`dense_box`: rows of [64, bn], or [64, 64] where its columns are the result's rows; `boxes`:
    of `out` as [E * m, n], rows of [64, 64]; or `out` itself. `taken` is one zero, if tiles are
    shared."""
    total = experts * (_row_tiles(PLAN) * _column_tiles(PLAN))
    ring, turns = ring_of(gathered.dtype.element_ty, PLAN), turns_of(taken, PLAN)
    staged = ring.left  # not used
    if PLAN.boxed:
        staged = staged_for(gathered.dtype.element_ty, PLAN)
    operands = Operands(gathered, dense_box, row_to_slot)
    result, work = Result(out, boxes, staged), Work(expert_offsets, total, ring, turns)
    if PLAN.parts == 3:
        gl.warp_specialize(
            [
                (_consume, (result, work, 0, PLAN)),
                (_consume, (result, work, 1, PLAN)),
                (_consume, (result, work, 2, PLAN)),
                (_produce, (operands, work, PLAN)),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (result, work, 0, PLAN)),
                (_consume, (result, work, 1, PLAN)),
                (_produce, (operands, work, PLAN)),
            ],
            [4, 4],
            [224, 56],
        )
