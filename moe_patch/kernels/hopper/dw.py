"""dw for Hopper: an expert's rows are the reduction; one operand is gathered, the other in order.

Columns of the gathered one are a tile's rows, and come by cp.async; those of the other are its
columns, and come through TMA. A result that lies the other way is turned when it is stored. Rows
past an expert's end are zeros in both operands, because a neighbour's may hold NaN.

The producer looks the slots of a step's rows up two steps before it copies them, and tells the
others which tile is next. A tile's sums wait in registers and are stored beside the next tile's
products; what is added to comes beside its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .dw_steps import SLOTS, Tiles, first_tile, next_step, row_tiles, tell, told
from .gather import copy, rows_layout
from .ring import BK, multiply, multiply_beside, ring_of, sums_of, wait_empty
from .rows import load_rows, store_rows
from .stores import (
    Waiting,
    Writer,
    in_quarters,
    quarter_at,
    rounded,
    staged_for,
    store,
    write_quarter,
)
from .turns import column_tiles, forget, leave, turns_of

LOOKUPS = gl.constexpr(4)
"""Steps whose slots there is memory for: the one at hand, two that are looked up, and one that a
warp may still read."""


class Plan(NamedTuple):
    """Sizes of a weight gradient: m columns of the gathered operand by n of the other one; see
    `ring`."""

    m: int
    n: int
    turned: bool
    """The result lies as [E, n, m] in memory, else as [E, m, n]."""
    stride_e: int
    stride_row: int
    gather: int
    """The gathered operand's row of a slot is slot // gather."""
    stride_gathered: int
    add: bool
    stages: int
    group_m: int
    """Row tiles that walk the columns side by side."""
    shared: bool
    """Tiles always go to whichever program is free; else they are dealt out, unless an expert is
    large."""
    boxed: bool
    """The result is written through TMA, as boxes [64, 64] of rows as it lies."""
    bm: int
    bn: int
    parts: int = 2
    left_turned: bool = True
    right_turned: bool = False
    copied: bool = True


class Operands(NamedTuple):
    """Factors of the product, inside a kernel; the dense one as boxes of rows."""

    gathered: Any
    dense_box: Any
    row_to_slot: Any
    slots: Any
    """Memory for the slots of LOOKUPS steps' rows."""


class Result(NamedTuple):
    """Memory that a result goes to; `boxes` of it, by way of `staged`, if it is boxed."""

    out: Any
    boxes: Any
    staged: Any
    came: Any
    """Each warpgroup's barrier for what it adds to, which comes into `staged`."""


class Work(NamedTuple):
    """Things that all warpgroups share."""

    ring: Any
    turns: Any


@gluon.constexpr_function
def _shape(plan):
    """(rows, columns) of an expert's result, as it lies."""
    return (plan.n, plan.m) if plan.turned else (plan.m, plan.n)


@gluon.constexpr_function
def _down(plan):
    """See `quarter_at`."""
    return 64 if plan.turned else 0


@gluon.jit
def _look_up(operands, step, at):
    """Begins to copy the slots of a step's rows; it is the program's `at`-th."""
    by: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = step.first + gl.arange(0, BK, by)
    copy(operands.slots.index(at % LOOKUPS), operands.row_to_slot + rows, rows < step.end)
    async_copy.commit_group()


@gluon.jit
def _looked_up(operands, at):
    """Slots [BK] of the program's `at`-th step. Those of the step after it may be on their way."""
    async_copy.wait_group(1)
    return operands.slots.index(at % LOOKUPS).load(gl.SliceLayout(1, rows_layout()))


@gluon.jit
def _copy(operands, step, slots, ring, stage, PLAN: gl.constexpr):
    """Begins to copy a step's rows of the gathered operand, as many columns as a tile has rows;
    zeros where a row or a column is past the end."""
    PARTS: gl.constexpr = PLAN.parts
    by: gl.constexpr = rows_layout()
    source = (slots // PLAN.gather).to(gl.int64) * PLAN.stride_gathered
    source = operands.gathered + gl.expand_dims(source, 1)  # [BK, 1]
    rows = step.first + gl.arange(0, BK, gl.SliceLayout(1, by))
    inside = gl.expand_dims(rows < step.end, 1)
    for part in gl.static_range(PARTS):
        m = step.row + 64 * part + gl.arange(0, 64, gl.SliceLayout(0, by))
        m = gl.expand_dims(m, 0)  # [1, 64]
        copy(ring.left.index(PARTS * stage + part), source + m, inside & (m < PLAN.m))


@gluon.jit
def _load(operands, step, ring, stage, PLAN: gl.constexpr):
    """Begins to load a step's rows of the dense operand."""
    full = ring.full.index(stage)
    mbarrier.expect(full, BK * PLAN.bn * 2)
    right = ring.right.index(stage)
    load_rows(operands.dense_box, step.first, step.end, step.column, full, right)


@gluon.jit
def _produce(
    operands, expert_offsets, large_first, num_large, total, work, PLAN: gl.constexpr
):  # fmt: skip
    """Fills stages, and looks two steps ahead for the slots of their rows."""
    filled = 0
    shared = PLAN.shared | (gl.load(num_large) > 0)
    tiles = Tiles(expert_offsets, large_first, total, work.turns, shared)
    queue, step = tell(first_tile(tiles), tiles, PLAN)
    _look_up(operands, step, 0)
    queue, second = next_step(queue, step, tiles, PLAN)
    _look_up(operands, second, 1)
    while step.row >= 0:
        slots = _looked_up(operands, filled)
        queue, third = next_step(queue, second, tiles, PLAN)
        _look_up(operands, third, filled + 2)
        stage = wait_empty(work.ring, filled, PLAN)
        _copy(operands, step, slots, work.ring, stage, PLAN)
        _load(operands, step, work.ring, stage, PLAN)
        async_copy.mbarrier_arrive(work.ring.full.index(stage), increment_count=False)
        filled += 1
        step, second = second, third
    async_copy.wait_group(0)  # nothing is on its way into shared memory when the program ends
    if shared:  # each program asks twice for a tile that there is not
        leave(work.turns, total + gl.num_programs(0), PLAN)


@gluon.jit
def _position(tile, PART: gl.constexpr, PLAN: gl.constexpr):
    """(row, column) of a warpgroup's first sum in its expert's result, as that lies."""
    m, n = tile.row * PLAN.bm + 64 * PART, tile.column * PLAN.bn
    if PLAN.turned:
        return n, m
    else:
        return m, n


@gluon.jit
def _store_from_registers(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of each tile and stores them, or adds them, when they are ready."""
    ROWS: gl.constexpr = _shape(PLAN)[0]
    COLUMNS: gl.constexpr = _shape(PLAN)[1]
    step, turn = 0, 0
    tile = told(work.turns, 0)
    while tile.steps > 0:
        forget(work.turns, turn)
        quarters = in_quarters(multiply(work.ring, step, tile.steps, PART, PLAN), PLAN.turned)
        to = result.out + tile.expert.to(gl.int64) * PLAN.stride_e
        first, left = _position(tile, PART, PLAN)
        for i in gl.static_range(4):
            row, column = quarter_at(first, left, i, _down(PLAN))
            store(
                quarters[i], to, row, ROWS, column, COLUMNS,
                PLAN.stride_row, PLAN.add, PLAN.turned,
            )  # fmt: skip
        step += tile.steps
        turn += 1
        tile = told(work.turns, turn)


@gluon.jit
def _came(PLAN: gl.constexpr):
    """A barrier for each warpgroup that multiplies."""
    PARTS: gl.constexpr = PLAN.parts
    came = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(came.index(part), count=1)
    return came


@gluon.jit
def _box_rows(tile, PART: gl.constexpr, PLAN: gl.constexpr):
    """(first row, the row after its expert's last, first column) of a warpgroup's sums in all
    experts' results, as they lie."""
    ROWS: gl.constexpr = _shape(PLAN)[0]
    row, column = _position(tile, PART, PLAN)
    return tile.expert * ROWS + row, (tile.expert + 1) * ROWS, column


@gluon.jit
def _add(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of each tile and adds them to what is there, which comes meanwhile."""
    step, turn = 0, 0
    came = result.came.index(PART)
    tile = told(work.turns, 0)
    while tile.steps > 0:
        forget(work.turns, turn)
        first, end, left = _box_rows(tile, PART, PLAN)
        tma.store_wait(0)
        mbarrier.expect(came, 4 * 64 * 64 * 2)
        for i in gl.static_range(4):
            row, column = quarter_at(first, left, i, _down(PLAN))
            load_rows(result.boxes, row, end, column, came, result.staged.index(4 * PART + i))
        quarters = in_quarters(multiply(work.ring, step, tile.steps, PART, PLAN), PLAN.turned)
        mbarrier.wait(came, turn & 1)
        for i in gl.static_range(4):
            box = result.staged.index(4 * PART + i)
            sums = quarters[i] + box.load(quarters[i].type.layout).to(gl.float32)
            box.store(sums.to(box.dtype))
            fence_async_shared()
            row, column = quarter_at(first, left, i, _down(PLAN))
            store_rows(result.boxes, row, end, column, box)
        step += tile.steps
        turn += 1
        tile = told(work.turns, turn)


@gluon.jit
def _store_beside(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of each tile and stores them beside the next one's products."""
    dtype: gl.constexpr = result.staged.dtype
    step, turn = 0, 0
    tile = told(work.turns, 0)
    nothing = rounded(sums_of(PLAN), dtype, PLAN.turned)
    waiting = Waiting(nothing, tile.row, tile.steps * 0, tile.column)
    while tile.steps > 0:
        forget(work.turns, turn)
        writer = Writer(result.boxes, result.staged, waiting, PART, _down(PLAN))
        acc = multiply_beside(work.ring, step, tile.steps, PART, writer, write_quarter, 4, PLAN)
        row, end, column = _box_rows(tile, PART, PLAN)
        waiting = Waiting(rounded(acc, dtype, PLAN.turned), row, end, column)
        step += tile.steps
        turn += 1
        tile = told(work.turns, turn)
    for i in gl.static_range(4):
        write_quarter(Writer(result.boxes, result.staged, waiting, PART, _down(PLAN)), i)


@gluon.jit
def _consume(result, work, PART: gl.constexpr, PLAN: gl.constexpr):
    if not PLAN.boxed:
        _store_from_registers(result, work, PART, PLAN)
    elif PLAN.add:
        _add(result, work, PART, PLAN)
    else:
        _store_beside(result, work, PART, PLAN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts"])
def dw_hopper_kernel(
    gathered, dense_box, out, boxes,
    row_to_slot, expert_offsets, large_first, num_large, taken, experts,
    PLAN: gl.constexpr,
):  # fmt: skip
    """`dense_box`: rows of [64, bn]; `boxes`: of `out` as it lies, rows of [64, 64]; or `out`
    itself."""
    total = experts * (row_tiles(PLAN) * column_tiles(PLAN))
    ring, turns = ring_of(gathered.dtype.element_ty, PLAN), turns_of(taken, PLAN, SLOTS)
    staged, came = ring.left, ring.full  # not used
    if PLAN.boxed:
        staged = staged_for(gathered.dtype.element_ty, PLAN, 4 if PLAN.add else 2)
    if PLAN.boxed and PLAN.add:  # memory of barriers that nobody reads would be somebody else's
        came = _came(PLAN)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [LOOKUPS, BK], plain)
    operands = Operands(gathered, dense_box, row_to_slot, slots)
    result, work = Result(out, boxes, staged, came), Work(ring, turns)
    gl.warp_specialize(
        [
            (_consume, (result, work, 0, PLAN)),
            (_consume, (result, work, 1, PLAN)),
            (_produce, (operands, expert_offsets, large_first, num_large, total, work, PLAN)),
        ],
        [4, 4],
        [224, 56],
    )
