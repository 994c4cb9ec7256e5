"""gate_up for Hopper: rows gathered by token, a gate and its up side by side, activated as stored.

A tile is 128 rows of one expert by 128 columns of the gate and the same 128 of up, or up to 144
rows where the expert then has one tile less. One warpgroup copies rows by cp.async and brings
weights through TMA; two own 64 rows each, and half of the columns of the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...compat import gluon_load
from ..activate import glu
from .gather import Gathered, find_tokens, gather_rows, tokens_of
from .producer import produce
from .ring import (
    BK,
    bytes_of_weight,
    expect_weight,
    multiply_beside,
    multiply_tailed,
    pass_over,
    ring_of,
    steps_of,
    sums_of,
    tail_of,
)
from .roles import run
from .rows import Parts
from .stores import in_halves, rounded, staged_for, store_box, store_tail
from .turns import tiles_of, told, turns_of
from .update import Update, bring_b, bring_side

async_load = gluon_load()
WIDTH = gl.constexpr(128)
"""Columns of a tile's gate, and of its up."""


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    """Columns of the gate and of up."""
    k: int
    stride_x: int
    top_k: int
    weight_on_input: bool
    save_pre: bool
    group_m: int
    stages: int
    right_turned: bool
    """The weight's reduction is contiguous in memory; else its columns are."""
    listed: int
    """Rows of a tile in the order's list: 128 or 64."""
    tail: int
    """Rows that a tile may have beyond `bm`."""
    bm: int = 128
    bn: int = 256
    parts: int = 2
    rank: int = 0
    """Rank of a low-rank update; 0: there is none."""
    widened: bool = False
    left_turned: bool = False
    copied: bool = True


class Result(NamedTuple):
    """Boxes of rows of `act` and of both halves of `pre`, and the memory by way of which they are
    written."""

    act: Any
    gate: Any
    up: Any
    staged: Any


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    INNER: gl.constexpr = PLAN.n // 2
    n = place.column * WIDTH
    mbarrier.expect(ring.full.index(stage), bytes_of_weight(PLAN))
    come, right = expect_weight(ring, stage, PLAN)
    if PLAN.right_turned:
        row = place.expert * PLAN.n + n
        async_load(operands.w, [row, k], come, right.slice(0, WIDTH, dim=0))
        async_load(operands.w, [row + INNER, k], come, right.slice(WIDTH, WIDTH, dim=0))
    else:
        row = place.expert * PLAN.k + k
        async_load(operands.w, [row, n], come, right.slice(0, WIDTH, dim=1))
        async_load(operands.w, [row, n + INNER], come, right.slice(WIDTH, WIDTH, dim=1))
    gather_rows(operands, ring, stage, turn, k, PARTS, PLAN)


@gluon.jit
def _bring_update(update, ring, stage, turn, place, r, PARTS: gl.constexpr, PLAN: gl.constexpr):
    bring_side(update, ring, stage, place, r, PARTS, PLAN)
    full, right, n = ring.full.index(stage), ring.right.index(stage), place.column * WIDTH
    if PLAN.right_turned:
        gates, ups = right.slice(0, WIDTH, dim=0), right.slice(WIDTH, WIDTH, dim=0)
    else:  # slices have no other shape, so that the whole has that of a box
        whole = right.reshape([1, 1, BK, 2 * WIDTH])
        gates, ups = whole.slice(0, WIDTH, dim=3), whole.slice(WIDTH, WIDTH, dim=3)
    bring_b(update.b, full, gates, place.expert, n, r, PLAN)
    bring_b(update.b, full, ups, place.expert, n + PLAN.n // 2, r, PLAN)


@gluon.jit
def _produce(operands, update, tiles, ring, turns, PLAN: gl.constexpr):
    produce(operands, update, tiles, ring, turns, find_tokens, _bring, _bring_update, PLAN)


class Waiting(NamedTuple):
    """Results of a tile that are written beside the next one's products."""

    boxes: Any
    """[64, 64] each, rounded: both halves of act; before them, if pre is kept, the second ones of
    the gate and of up."""
    first: Any
    end: Any
    """The end of its Place; 0 if there are none."""
    column: Any


class Writer(NamedTuple):
    """Arguments of `_write`, for a warpgroup."""

    result: Result
    waiting: Waiting
    me: gl.constexpr


@gluon.jit
def _write(writer, I: gl.constexpr):
    result, waiting, ME = writer
    boxes, first, end, column = waiting
    if end > 0:
        if len(boxes) == 2:
            store_box(boxes[I], result.act, result.staged, first, end, column + 64 * I, ME, I)
        elif I == 0:
            store_box(boxes[0], result.gate, result.staged, first, end, column + 64, ME, 0)
        elif I == 1:
            store_box(boxes[1], result.up, result.staged, first, end, column + 64, ME, 1)
        else:
            n = column + 64 * (I - 2)
            store_box(boxes[I], result.act, result.staged, first, end, n, ME, I - 2)


@gluon.jit
def _weights(sums, slot_weight, row_to_slot, first, end, ROWS: gl.constexpr):
    """Routing weights that sums are to be multiplied with; ROWS: which dimension rows are."""
    by: gl.constexpr = gl.SliceLayout(1 - ROWS, sums.type.layout)
    rows = first + gl.arange(0, sums.shape[ROWS], by)
    slot = gl.load(row_to_slot + rows, mask=rows < end, other=0)
    return gl.expand_dims(gl.load(slot_weight + slot).to(gl.float32), 1 - ROWS)


@gluon.jit
def _activated(
    acc, result, slot_weight, row_to_slot, first, end, column,
    ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Activates a tile's sums; returns the boxes of its `Waiting`. The first halves of the gate and
    of up are written, if they are kept."""
    dtype: gl.constexpr = result.act.dtype
    gates, ups = in_halves(acc)
    gate, gate_2 = in_halves(gates)
    up, up_2 = in_halves(ups)
    if PLAN.save_pre:
        store_box(gate, result.gate, result.staged, first, end, column, ME, 0)
        store_box(up, result.up, result.staged, first, end, column, ME, 1)
        kept = gate_2.to(dtype), up_2.to(dtype)
    if PLAN.weight_on_input:
        scale = _weights(gate, slot_weight, row_to_slot, first, end, 0)
        gate, up, gate_2, up_2 = gate * scale, up * scale, gate_2 * scale, up_2 * scale
    value, by_gate, by_up = glu(gate, up, GATE)
    value_2, by_gate, by_up = glu(gate_2, up_2, GATE)
    act = value.to(dtype), value_2.to(dtype)
    if PLAN.save_pre:
        return kept + act
    else:
        return act


@gluon.jit
def _write_tail(
    gate, up, result, slot_weight, row_to_slot, first, end, column,
    ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Activates the sums of a tile's tail and writes them, and, if they are kept, the sums."""
    if PLAN.save_pre:
        store_tail(gate, result.gate, result.staged, first, end, column, ME)
        store_tail(up, result.up, result.staged, first, end, column, ME)
    if PLAN.weight_on_input:
        scale = _weights(gate, slot_weight, row_to_slot, first, end, 1)
        gate, up = gate * scale, up * scale
    act, by_gate, by_up = glu(gate, up, GATE)
    store_tail(act, result.act, result.staged, first, end, column, ME)


@gluon.jit
def _consume(
    result, slot_weight, row_to_slot, ring, turns,
    ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = steps_of(PLAN)
    WAITING: gl.constexpr = 4 if PLAN.save_pre else 2
    TAILS: gl.constexpr = tail_of(PLAN) > 0
    step, turn = 0, 0
    _, first, end, column = told(turns, 0)
    none = rounded(sums_of(PLAN), result.act.dtype)
    if not PLAN.save_pre:
        none = none[0], none[1]
    waiting = Waiting(none, first, end * 0, column)
    while end > 0:
        n, rows = column * WIDTH, end - first
        # of short tiles each warpgroup gets its share
        part = gl.where(rows > PLAN.bm, ME, (turn + ME) % PLAN.parts)
        if rows > 64 * part:
            writer = Writer(result, waiting, ME)
            # [64, 128 of the gate and 128 of up]
            if TAILS and rows > PLAN.bm:
                acc, gate, up = multiply_tailed(
                    ring, step, STEPS, ME, writer, _write, WAITING, PLAN
                )
                _write_tail(
                    gate, up, result, slot_weight, row_to_slot, first + PLAN.bm, end, n + 64 * ME,
                    ME, PLAN, GATE,
                )  # fmt: skip
            else:
                acc = multiply_beside(ring, step, STEPS, part, writer, _write, WAITING, PLAN)
            first += 64 * part
            boxes = _activated(acc, result, slot_weight, row_to_slot, first, end, n, ME, PLAN, GATE)
            waiting = Waiting(boxes, first, end, n)
        else:
            pass_over(ring, step, STEPS, PLAN)
        step += STEPS
        turn += 1
        _, first, end, column = told(turns, turn)
    for i in gl.static_range(WAITING):
        _write(Writer(result, waiting, ME), i)
    tma.store_wait(0)


@gluon.jit
def gate_up_hopper_kernel(
    x, w, scales, side, side_tail, b, slot_weight, act, gate, up, taken,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """x [T, K] with K a multiple of 64; w as boxes [128, 64] of [E * 2I, K] or [64, 128] of
    [E * K, 2I]; act [S, I] and both halves of pre [S, 2I] as boxes of rows, [64, 64]; `taken` is
    an order's. `side` and `b` are an `Update`, boxes of b of 128 columns; `side_tail` the boxes of
    a tail."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    ring, turns = ring_of(act.dtype, PLAN), turns_of(taken, PLAN)
    staged = staged_for(act.dtype, PLAN)
    result = Result(act, gate, up, staged)
    operands = Gathered(x, w, row_to_slot, tokens_of(PLAN))
    run(
        (result, slot_weight, row_to_slot, ring, turns, 0, PLAN, GATE),
        (result, slot_weight, row_to_slot, ring, turns, 1, PLAN, GATE),
        (operands, Update(Parts(side, side_tail), b), tiles, ring, turns, PLAN),
        (scales, ring, turns, True, PLAN),
        _consume, _produce, PLAN,
    )  # fmt: skip
