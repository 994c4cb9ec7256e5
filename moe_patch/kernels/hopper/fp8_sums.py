"""Sums of e4m3 products with scales: a tensor core's sum of 128 of the reduction, in float32, is
scaled and added to the tile's, 64 rows by two column parts of 128 for each warpgroup.

Sums leave a warpgroup registers for one product, and while it adds that (promotes it), its next one
cannot begin. The tensor cores are at work all the time if the other warpgroup's product runs then.
So the two take turns, and between a warpgroup's products lie its additions and nothing else: it
releases the stage before, waits for the next, reads its scales and is told the next tile while
products run. That tile's first product is begun before this one's sums are written.
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

from .ring import barriers_of, wait_full
from .turns import columns_of, told

BLOCK = gl.constexpr(128)
"""Columns and lines that a scale is for."""
LANES = gl.constexpr(32)
"""Threads that copy scales: each says when what it copied has arrived."""
_FMA = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
# Triton numbers barriers of its own from 0 on
_TURN = "{{ .reg .pred both; setp.ne.s32 both, $1, 0; @both barrier.{} $2, 256; mov.u32 $0, $1; }}"
_ENTER, _LEAVE = gl.constexpr(_TURN.format("sync")), gl.constexpr(_TURN.format("arrive"))


class Ring(NamedTuple):
    """Stages of 128 of the reduction, and barriers that say that one is full, and empty again."""

    squares: Any
    """Each stage's rows of a tile [128, 128], and then its column parts [128, 128]."""
    x_scale: Any
    """Scales of a tile's rows [128]."""
    w_scale: Any
    """Scales of both column parts [2]."""
    full: Any
    empty: Any


@gluon.jit
def ring_of(w, PLAN: gl.constexpr, DEEP: gl.constexpr):
    """A Ring for such boxes of a weight, for either plan, with its barriers ready."""
    SQUARES: gl.constexpr = (1 + PLAN.column_parts) * PLAN.stages
    MOST: gl.constexpr = PLAN if DEEP is None else DEEP
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    squares = gl.allocate_shared_memory(w.dtype, [SQUARES, BLOCK, BLOCK], w.layout)
    x_scale = gl.allocate_shared_memory(gl.float32, [MOST.stages, BLOCK], plain)
    w_scale = gl.allocate_shared_memory(gl.float32, [MOST.stages, 2], plain)
    full, empty = barriers_of(1 + LANES, MOST)
    return Ring(squares, x_scale, w_scale, full, empty)


@gluon.jit
def rows_at(ring, stage, PLAN: gl.constexpr):
    """Memory of a stage's rows."""
    return ring.squares.index((1 + PLAN.column_parts) * stage)


@gluon.jit
def columns_at(ring, stage, PART: gl.constexpr, PLAN: gl.constexpr):
    """Memory of a column part of a stage."""
    return ring.squares.index((1 + PLAN.column_parts) * stage + 1 + PART)


@gluon.constexpr_function
def _layout():
    """Layout of sums and products [64, 128]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])


@gluon.jit
def _section(both, PART: gl.constexpr, ENTER: gl.constexpr):
    """Enters or leaves the section of code in which one warpgroup at a time begins a product, if
    both have rows: in turns, part 0 first.

    The tensor cores alternate between products that were begun together. Those end together, too,
    and then both warpgroups add, while no product runs."""
    PTX: gl.constexpr = _ENTER if ENTER else _LEAVE
    barrier = gl.to_tensor(14 + PART if ENTER else 15 - PART)
    gl.inline_asm_elementwise(PTX, "=r,r,r", [both, barrier], gl.int32, False, 1)


class Tile(NamedTuple):
    """A Place, for a warpgroup that has 64 of its rows."""

    first: Any
    """First row of the 64."""
    end: Any
    column: Any
    """First column."""
    is_half: Any
    """Whether the tile has a left part alone."""
    mine: Any
    """Whether the warpgroup has any rows."""
    both: Any
    """Whether both warpgroups have some, as int32."""


@gluon.jit
def tile_of(turns, turn, PART: gl.constexpr, PLAN: gl.constexpr):
    """The Tile of a turn; its end is 0 if there is none."""
    _, first, end, column = told(turns, turn)
    n, is_half = columns_of(column, PLAN)
    both = (end - first > 64).to(gl.int32)
    first += 64 * PART
    return Tile(first, end, n, is_half, first < end, both)


@gluon.jit
def open_section(PART: gl.constexpr):
    """Lets part 0 begin; each warpgroup calls it before its first product."""
    if PART == 1:
        _section(1, PART, False)


@gluon.jit
def close_section(PART: gl.constexpr):
    """Takes what part 1 has left for part 0; each warpgroup calls it after its last product."""
    if PART == 0:
        _section(1, PART, True)


@gluon.jit
def _begin(
    ring, stage, COLUMNS: gl.constexpr, product, both, PART: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Begins the product of a stage's rows [64, 128] and a column part [128, 128]^T, in the
    registers of an earlier one. Each call more would make addresses anew, behind a fence."""
    x = rows_at(ring, stage, PLAN).slice(64 * PART, 64)
    w = columns_at(ring, stage, COLUMNS, PLAN).permute((1, 0))
    _section(both, PART, True)
    product = warpgroup_mma(x, w, product, use_acc=False, is_async=True)
    _section(both, PART, False)
    return product


@gluon.jit
def _promoted(product, by, sums):
    """sums + product * by [64]. In PTX, which stays where it is: LLVM moves its own behind the next
    product, which then needs registers of its own, and the sums leave none."""
    by = gl.expand_dims(by, 1)
    return gl.inline_asm_elementwise(_FMA, "=f,f,f,f", [product, by, sums], gl.float32, False, 1)


@gluon.jit
def _scales(ring, stage, PART: gl.constexpr, COLUMNS: gl.constexpr):
    """Scales of a warpgroup's rows times that of a column part [64]."""
    by_row: gl.constexpr = gl.SliceLayout(1, _layout())
    rows = ring.x_scale.index(stage).slice(64 * PART, 64).load(by_row)
    return rows * ring.w_scale.index(stage).slice(COLUMNS, 1).load(by_row)


@gluon.jit
def _release_before(ring, stage, pred, PLAN: gl.constexpr):
    """Says that the stage before has been read."""
    before = gl.where(stage == 0, PLAN.stages - 1, stage - 1)
    mbarrier.arrive(ring.empty.index(before), count=1, pred=pred)


class Step(NamedTuple):
    """A step whose stage is full, unless its tile has no rows for the warpgroup."""

    stage: Any
    phase: Any
    """Phase of the stage's barrier: 0 or 1."""
    tile: Any
    scale: Any
    """Scales [64] of the product of its left part."""


@gluon.jit
def _next(ring, now, turns, turn, is_last, PART: gl.constexpr, PLAN: gl.constexpr):
    """The Step after `now`: of the same tile, or, `is_last`, of the one after turn `turn`."""
    end = now.stage == PLAN.stages - 1
    stage, phase = gl.where(end, 0, now.stage + 1), gl.where(end, now.phase ^ 1, now.phase)
    tile = now.tile
    if is_last:
        tile = tile_of(turns, turn + 1, PART, PLAN)
    mbarrier.wait(ring.full.index(stage), phase, pred=tile.mine)
    return Step(stage, phase, tile, _scales(ring, stage, PART, 0))


class Running(NamedTuple):
    """A tile's first product, which has been begun: of its first step and left part; and what that
    will be scaled by. Of a tile without rows, or of none, it is of anything, and nobody uses it."""

    product: Any
    scale: Any


@gluon.jit
def no_product():
    """Registers for a product."""
    return gl.zeros([64, BLOCK], gl.float32, _layout())


@gluon.jit
def begin(ring, step, tile, product, PART: gl.constexpr, PLAN: gl.constexpr):
    """Begins a tile, whose first stage is that of `step`, in the registers of an earlier product;
    returns what is Running."""
    stage = wait_full(ring, step, PLAN, tile.mine)
    by_left = _scales(ring, stage, PART, 0)
    return Running(_begin(ring, stage, 0, product, tile.both, PART, PLAN), by_left)


@gluon.jit
def multiply(
    ring, step, steps, tile, running, turns, turn, PART: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """(sums [64, 128] of both column parts of a tile, the tile of the next turn, what of that is
    Running), over `steps` stages from `step` on. Half a tile has the left part alone; without
    steps: zeros, `tile` and `running`."""
    left = gl.zeros([64, BLOCK], gl.float32, _layout())
    right, product = left, running.product
    now = Step(step % PLAN.stages, (step // PLAN.stages) & 1, tile, running.scale)
    # from 0: if `step`, which is carried from tile to tile, were a bound, Triton 3.6 would take it
    # for a constant
    if PLAN.column_parts == 2:
        for i in range(gl.where(tile.is_half, 0, steps) if PLAN.halves else steps):
            _release_before(ring, now.stage, i > 0, PLAN)
            by_right = _scales(ring, now.stage, PART, 1)
            product = warpgroup_mma_wait(0, deps=[product])
            left = _promoted(product, now.scale, left)
            product = _begin(ring, now.stage, 1, product, now.tile.both, PART, PLAN)
            now = _next(ring, now, turns, turn, i + 1 == steps, PART, PLAN)
            product = warpgroup_mma_wait(0, deps=[product])
            right = _promoted(product, by_right, right)
            product = _begin(ring, now.stage, 0, product, now.tile.both, PART, PLAN)
    if PLAN.halves:
        for i in range(gl.where(tile.is_half, steps, 0)):
            _release_before(ring, now.stage, i > 0, PLAN)
            by_left = now.scale
            now = _next(ring, now, turns, turn, i + 1 == steps, PART, PLAN)
            product = warpgroup_mma_wait(0, deps=[product])
            left = _promoted(product, by_left, left)
            product = _begin(ring, now.stage, 0, product, now.tile.both, PART, PLAN)
    _release_before(ring, now.stage, steps > 0, PLAN)
    return left, right, now.tile, Running(product, now.scale)
