"""fp8_gemm for Hopper: two warps feed two warpgroups, which promote in turns.

A tile is 128 rows by two column parts of 128: neighbours, or a gate and its up. Each warpgroup owns
64 of the rows. Every 128 of K its tensor core sum is scaled into a float32 accumulator while the
other warpgroup's product runs (`fp8_sums`). One warp brings operands through TMA, another copies
their scales, and nobody else reads from memory. Results leave through TMA while the next tile's
products run. (After DeepGEMM's schedule, here with the second projection's input activated and
quantised in the epilogue.)

Where no masked expert has more rows than one tile, weights are all that takes time. Tiles are
halved then, and what stages have for a second column part becomes a stage more (`deeper`). If the
launch is brief, too, what a program will read first is asked for before anything is known, and
weights do not drive other data out of the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from ...compat import gluon_copy, gluon_load, gluon_read_once
from ..activate import glu
from .fp8_sums import (
    BLOCK,
    LANES,
    begin,
    close_section,
    columns_at,
    multiply,
    no_product,
    open_section,
    ring_of,
    rows_at,
    tile_of,
)
from .producer import find_nothing, produce
from .ring import pass_over, wait_empty
from .stores import in_halves, staged_for, store, store_box
from .turns import column_tiles, columns_of, posted, tiles_of, told, turns_of

async_load, copy = gluon_load(), gluon_copy()

_READ_ONCE = gl.constexpr(gluon_read_once())
_EXIT = gl.constexpr("cp.async.wait_all; exit; mov.u32 $0, $1;")
_PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; prefetch.global.L2 [$1 + 128]; mov.u32 $0, 0;")


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    """Columns of the result."""
    k: int
    lines: int
    """Lines of an expert's weight: n, or n gates and their ups."""
    bn: int
    shift: int
    """Lines of the weight from a tile's left part to its right."""
    experts: int
    m_max: int
    """Rows that each of so many experts may have, masked; 0, 0: rows in expert order."""
    group_m: int
    stages: int
    listed: int = 128
    bm: int = 128
    bk: int = 128
    parts: int = 2
    rank: int = 0
    copied: bool = True
    halves: bool = False
    """Whether tiles may be halved; not where a tile's parts belong together."""
    column_parts: int = 2
    """Column parts that a stage has room for."""
    brief: bool = False
    """Whether a program has a few tiles at most, all of them halved, so that it matters how soon it
    begins. Each weight is read once."""
    listeners: int = 3
    """Both warpgroups, and the warp that copies scales."""


class Operands(NamedTuple):
    """Boxes of rows, [128, 128] or, masked, [64, 128], and [128, 128] of a weight's lines."""

    x: Any
    w: Any


class Scales(NamedTuple):
    """Pointers to the scales of rows, which lie that far apart, and of weights."""

    x: Any
    w: Any
    stride_row: Any
    stride_group: Any


class Result(NamedTuple):
    """`out` as boxes of rows [64, 64], by way of `staged`; or activations and their scales,
    `stride_scale` from one column tile to the next, and what is activated, as pointers."""

    out: Any
    staged: Any
    out_scale: Any
    pre: Any
    stride_scale: Any


def plan(
    n: int, k: int, experts: int, m_max: int, activate: bool, group_m: int, stages: int
) -> Plan:
    """Return the Plan of a product [S, k] x [E, n, k], whose columns `activate` takes in pairs."""
    columns, bn, shift = (n // 2, 128, n // 2) if activate else (n, 256, 128)
    return Plan(columns, k, n, bn, shift, experts, m_max, group_m, stages, halves=not activate)


def deeper(plan: Plan, brief: bool) -> Plan | None:
    """Return the Plan of launches in which all tiles are halved; None for products whose tiles may
    not be, or are not masked. `brief` is a Plan's.

    In the memory of a Plan's stages two squares each instead of three would be half as many more,
    but there is room for the scales of one more."""
    if not (plan.m_max and plan.halves):
        return None
    stages = min(plan.stages + 1, 3 * plan.stages // 2)
    return plan._replace(column_parts=1, stages=stages, brief=brief)


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    HIGH: gl.constexpr = operands.x.block_shape[0]
    BOXES: gl.constexpr = (64 * PARTS + HIGH - 1) // HIGH
    full = ring.full.index(stage)
    n, is_half = columns_of(place.column, PLAN)
    line = place.expert * PLAN.lines + n
    if PLAN.column_parts == 1 or (PLAN.halves and is_half):
        mbarrier.expect(full, (BOXES * HIGH + BLOCK) * BLOCK)
    else:
        mbarrier.expect(full, (BOXES * HIGH + 2 * BLOCK) * BLOCK)
        async_load(operands.w, [line + PLAN.shift, k], full, columns_at(ring, stage, 1, PLAN))
    for box in gl.static_range(BOXES):
        to = rows_at(ring, stage, PLAN).slice(HIGH * box, HIGH, dim=0)
        async_load(operands.x, [place.first + HIGH * box, k], full, to)
    left = columns_at(ring, stage, 0, PLAN)
    if PLAN.brief and _READ_ONCE is not None:
        async_load(operands.w, [line, k], full, left, cache_policy=_READ_ONCE)
    else:
        async_load(operands.w, [line, k], full, left)


@gluon.jit
def _by_depth(DO: gl.constexpr, what, is_deep, PLAN: gl.constexpr, DEEP: gl.constexpr):
    """Does `DO(*what, PLAN)`, or, `is_deep`, with the plan DEEP, if there is one."""
    if DEEP is None:
        DO(*what, PLAN)
    elif is_deep:
        DO(*what, DEEP)
    else:
        DO(*what, PLAN)


@gluon.jit
def _told_deep(turns, PLAN: gl.constexpr, DEEP: gl.constexpr):
    """Whether all tiles are halved: whether the program's first is, since halved ones are last."""
    if DEEP is None:
        return False
    else:
        _, _, _, column = posted(turns, 0)
        _, is_half = columns_of(column, PLAN)
        return is_half


@gluon.jit
def _end_warps():
    """Ends the warps that have done their role, as its last step, or that have none; what they
    copied has arrived.

    Triton would have all roles meet, hand registers back and be told to stop, for nothing that
    comes after. It adds warps that wait for this where a role's warps do not come in fours: so
    there must be none of them here."""
    gl.inline_asm_elementwise(_EXIT, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def _produce(operands, listed, ring, turns, PLAN: gl.constexpr, DEEP: gl.constexpr):
    tiles = tiles_of(*listed, PLAN)
    _by_depth(
        produce, (operands, operands, tiles, ring, turns, find_nothing, _bring, _bring),
        tiles.halved == tiles.total, PLAN, DEEP,
    )  # fmt: skip
    _end_warps()


@gluon.jit
def _produce_scales(scales, ring, turns, PLAN: gl.constexpr, DEEP: gl.constexpr):
    _by_depth(_copy_scales, (scales, ring, turns), _told_deep(turns, PLAN, DEEP), PLAN, DEEP)
    _end_warps()


@gluon.jit
def _copy_scales(scales, ring, turns, PLAN: gl.constexpr):
    """Copies scales by pointers. (Beside TMA's in one warp they took longer than products.)"""
    STEPS: gl.constexpr = (PLAN.k + BLOCK - 1) // BLOCK
    BLOCKS: gl.constexpr = (PLAN.lines + BLOCK - 1) // BLOCK  # of a weight's lines
    by: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    i, part = gl.arange(0, BLOCK, by), gl.arange(0, 2, by)
    step, turn = 0, 0
    expert, first, end, column = told(turns, 0)
    while end > 0:
        row = first + i
        inside = row < end
        x = scales.x + row.to(gl.int64) * scales.stride_row
        n, is_half = columns_of(column, PLAN)
        block = gl.minimum((n + part * PLAN.shift) // BLOCK, BLOCKS - 1)
        w = scales.w + (expert * BLOCKS + block) * STEPS
        for j in range(STEPS):
            stage = wait_empty(ring, step + j, PLAN)
            copy(ring.x_scale.index(stage), x, inside)
            copy(ring.w_scale.index(stage), w)
            async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
            x += scales.stride_group
            w += 1
        step += STEPS
        turn += 1
        expert, first, end, column = told(turns, turn)


@gluon.jit
def _consume(
    result, ring, turns, ME: gl.constexpr, PLAN: gl.constexpr, DEEP: gl.constexpr,
    GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    is_deep = _told_deep(turns, PLAN, DEEP)
    _by_depth(_sum_up, (result, ring, turns, ME, GATE, SAVE_PRE), is_deep, PLAN, DEEP)
    _end_warps()


@gluon.jit
def _sum_up(
    result, ring, turns, ME: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = (PLAN.k + BLOCK - 1) // BLOCK
    step, turn = 0, 0
    open_section(ME)
    tile = tile_of(turns, 0, ME, PLAN)
    running = begin(ring, 0, tile, no_product(), ME, PLAN)
    while tile.end > 0:
        steps = gl.where(tile.mine, STEPS, 0)
        left, right, after, running = multiply(
            ring, step, steps, tile, running, turns, turn, ME, PLAN
        )
        if tile.mine:
            _written(left, right, result, tile, ME, PLAN, GATE, SAVE_PRE)
        else:
            pass_over(ring, step, STEPS, PLAN)
            after = tile_of(turns, turn + 1, ME, PLAN)
            running = begin(ring, step + STEPS, after, running.product, ME, PLAN)
        tile = after
        step += STEPS
        turn += 1
    warpgroup_mma_wait(0, deps=[running.product])
    close_section(ME)
    tma.store_wait(0)


@gluon.jit
def _written(
    left, right, result, tile,
    ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    """Writes a warpgroup's sums."""
    first, end, n = tile.first, tile.end, tile.column
    if SAVE_PRE:
        store(left, result.pre, first, end, n, PLAN.n, PLAN.lines)
        store(right, result.pre, first, end, n + PLAN.shift, PLAN.lines, PLAN.lines)
    if GATE is not None:
        _activated(left, right, result, tile, PLAN.n, GATE)
    else:
        quarters = in_halves(left) + in_halves(right)
        for i in gl.static_range(4):
            if i < 2 or (PLAN.column_parts == 2 and not (PLAN.halves and tile.is_half)):
                store_box(quarters[i], result.out, result.staged, first, end, n + 64 * i, ME, i % 2)


@gluon.jit
def _activated(gate, up, result, tile, I: gl.constexpr, GATE: gl.constexpr):
    """Activates, quantises each row's 128 columns, and stores both."""
    end, column = tile.end, tile.column // BLOCK
    rows = tile.first + gl.arange(0, 64, gl.SliceLayout(1, gate.type.layout))
    n = tile.column + gl.arange(0, BLOCK, gl.SliceLayout(0, gate.type.layout))
    value, _, _ = glu(gate, up, GATE)
    if I % BLOCK != 0:
        value = gl.where(gl.expand_dims(n < I, 0), value, 0.0)
    largest = gl.max(gl.abs(value), axis=1)
    scale = gl.where(largest > 0, largest / 448.0, 1.0)
    to = result.out_scale + column.to(gl.int64) * result.stride_scale + rows
    gl.store(to, scale, mask=rows < end)
    quantised = (value * gl.expand_dims(1.0 / scale, 1)).to(gl.float8e4nv)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    quantised = gl.convert_layout(quantised, wide)
    to_rows = gl.convert_layout(rows, gl.SliceLayout(1, wide))
    n = tile.column + gl.arange(0, BLOCK, gl.SliceLayout(0, wide))
    at = gl.expand_dims(to_rows.to(gl.int64), 1) * I + gl.expand_dims(n, 0)
    mask = gl.expand_dims(to_rows < end, 1) & gl.expand_dims(n < I, 0)
    gl.store(result.out + at, quantised, mask=mask)


@gluon.jit
def _prefetch(weight, PLAN: gl.constexpr):
    """Asks the L2 cache for the first 256 of the reduction of the program's first half tile, which
    it has if every expert has rows. It takes the time of two trips to memory to learn which."""
    HALVES: gl.constexpr = 2 * column_tiles(PLAN)
    by: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    expert, half = gl.program_id(0) // HALVES, gl.program_id(0) % HALVES
    line = expert * PLAN.lines + half * BLOCK + gl.arange(0, BLOCK, by)
    line = gl.minimum(line, PLAN.experts * PLAN.lines - 1)
    at = weight + line.to(gl.int64) * PLAN.k
    gl.inline_asm_elementwise(_PREFETCH, "=r,l", [at], gl.int32, False, 1)


@gluon.jit(do_not_specialize=["stride_xs", "stride_xg", "stride_os"])
def fp8_hopper_kernel(
    x, w, weight, x_scale, w_scale, out, out_scale, pre, taken, ends, tile_expert, tile_row,
    num_tiles, stride_xs, stride_xg, stride_os,
    PLAN: gl.constexpr, DEEP: gl.constexpr, GATE: gl.constexpr, SAVE_PRE: gl.constexpr,
):  # fmt: skip
    """x [S, K] and w [E * N, K] as boxes; see Operands. GATE None: the product is stored as it is,
    through boxes of rows [64, 64]. `taken` is an order's; masked, turns are dealt, and
    `tile_expert`, `tile_row` and `num_tiles` are None. DEEP is what `deeper` says of PLAN; `weight`
    is w as a pointer where it is brief, and None elsewhere."""
    if weight is not None:
        _prefetch(weight, DEEP)
    ring, turns = ring_of(w, PLAN, DEEP), turns_of(taken, PLAN)
    staged = None
    if GATE is None:
        staged = staged_for(out.dtype, PLAN)
    listed = ends, tile_expert, tile_row, num_tiles
    operands, scales = Operands(x, w), Scales(x_scale, w_scale, stride_xs, stride_xg)
    result = Result(out, staged, out_scale, pre, stride_os)
    gl.warp_specialize(
        [
            (_consume, (result, ring, turns, 0, PLAN, DEEP, GATE, SAVE_PRE)),
            (_consume, (result, ring, turns, 1, PLAN, DEEP, GATE, SAVE_PRE)),
            (_produce, (operands, listed, ring, turns, PLAN, DEEP)),
            (_produce_scales, (scales, ring, turns, PLAN, DEEP)),
            (_end_warps, ()),
            (_end_warps, ()),
        ],
        [4, 1, 1, 1, 1],
        [224, 56, 56, 56, 56],
    )
