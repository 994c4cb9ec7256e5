"""Products with weights in 4 bits for Hopper and few rows an expert.

As in `packed.py` the product is turned around: weight rows are the left operand of wgmma, in
registers. A byte has two codes, and a table in shared memory (`lookup.py`) what they stand for. Its
32 KB are one for three or four warpgroups, which share nothing else: each does tiles of its own,
with operands that come through a ring of its own (`pairs_ring.py`, `pairs_sums.py`).

A tile is `bm` rows of one expert by two blocks of 64 rows of its weight: a gate's and its up's, or
neighbours. Neighbouring tiles go to different programs, so that all have as many but for one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..activate import glu
from ..tiling import place
from .lookup import fill_table, own_bank
from .packed_weight import add_bias, by_routing
from .pairs_ring import ROWS, Operands, Tile, Tiles, Turn, bring, ring_of
from .pairs_sums import products


class Order(NamedTuple):
    """An ExpertOrder inside a kernel; `total` tiles of rows."""

    row_to_slot: Any
    expert_offsets: Any
    tile_expert: Any
    tile_row: Any
    total: Any


class Result(NamedTuple):
    """Tensors that are written, and what that takes: a bias, routing weights on the input."""

    out: Any
    pre: Any
    bias: Any
    slot_weight: Any


@gluon.jit
def _tile(at, order, NUM_N: gl.constexpr, COLUMNS: gl.constexpr, PLAN: gl.constexpr):
    """The at-th of the tiles that have COLUMNS rows of the weight in NUM_N columns of tiles."""
    expert, row0, end, column = place(
        at, order.tile_expert, order.tile_row, order.expert_offsets, NUM_N, 0, PLAN.bm, 8
    )
    return Tile(row0, end, expert, column * COLUMNS)


@gluon.jit
def _store(
    value, ring, out, row0, end, column,
    END: gl.constexpr, ROW: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Writes [bm, 64] to rows of `out`, ROW elements apart, from a row and a column on, up to row
    `end` and column END, by way of one of two places."""
    by: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_way = ring.staged.index(PART)
    by_way.store(value.to(out.dtype.element_ty))
    value = by_way.load(by)
    row = row0 + gl.arange(0, value.shape[0], gl.SliceLayout(1, by))
    n = column + gl.arange(0, 64, gl.SliceLayout(0, by))
    inside = gl.expand_dims(row < end, 1) & gl.expand_dims(n < END, 0)
    to = out + gl.expand_dims(row.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    gl.store(to, value, mask=inside)


@gluon.jit
def _in_steps(value, column, END: gl.constexpr):
    """Sums [64, bm] as [bm, 64], in the order of a step; zero from column END on."""
    n = column + gl.arange(0, ROWS, gl.SliceLayout(1, value.type.layout))
    value = gl.where(gl.expand_dims(n < END, 1), value, 0.0)
    value = value.reshape((2, 4, 4, 2, value.shape[1])).permute((4, 0, 2, 1, 3))
    return value.reshape((value.shape[0], ROWS))


@gluon.jit
def _add_bias(sums, bias, tile, BLOCK: gl.constexpr, PLAN: gl.constexpr):
    """sums [64, bm] of a block plus the bias of its rows."""
    row = tile.n0 + BLOCK * PLAN.second + gl.arange(0, ROWS, gl.SliceLayout(1, sums.type.layout))
    return add_bias(sums, bias, tile.expert, row, PLAN)


@gluon.jit
def _write_rows(left, right, tile, ring, result, PLAN: gl.constexpr):
    """Writes two neighbouring blocks of out."""
    row0, end, n0 = tile.row0, tile.end, tile.n0
    _store(left.permute((1, 0)), ring, result.out, row0, end, n0, PLAN.n, PLAN.n, 0)
    _store(right.permute((1, 0)), ring, result.out, row0, end, n0 + ROWS, PLAN.n, PLAN.n, 1)


@gluon.jit
def _write_act(gate, up, tile, order, ring, result, PLAN: gl.constexpr, GATE: gl.constexpr):
    """Writes a gate's and its up's block, if they are kept, and what they become."""
    INNER: gl.constexpr = PLAN.n // 2
    WIDTH: gl.constexpr = PLAN.act_width
    row0, end, n0 = tile.row0, tile.end, tile.n0
    if PLAN.save_pre:
        _store(gate.permute((1, 0)), ring, result.pre, row0, end, n0, INNER, PLAN.n, 0)
        _store(up.permute((1, 0)), ring, result.pre + INNER, row0, end, n0, INNER, PLAN.n, 1)
    if PLAN.weight_on_input:
        gate, up = by_routing(gate, up, result.slot_weight, order.row_to_slot, row0, end)
    value, _, _ = glu(gate, up, GATE)
    if PLAN.act_in_steps:
        value = _in_steps(value, n0, INNER)
    else:
        value = value.permute((1, 0))
    _store(value, ring, result.out, row0, end, n0, WIDTH, WIDTH, 0)


@gluon.jit
def _walk(
    operands, order, result, ring,
    WALKER: gl.constexpr, COLUMNS: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Does a warpgroup's tiles; they lie COLUMNS rows of the weight apart."""
    STAGES: gl.constexpr = PLAN.stages
    WIDTH: gl.constexpr = PLAN.n if GATE is None else PLAN.act_width
    NUM_N: gl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    bank = own_bank(order.total)
    at, stride = gl.program_id(0) + WALKER * gl.num_programs(0), gl.num_programs(0) * PLAN.walkers
    tiles, turn = order.total * NUM_N, Turn(0, 0)
    if at < tiles:
        tile = _tile(at, order, NUM_N, COLUMNS, PLAN)
        for step in gl.static_range(STAGES):
            bring(operands, ring, step, tile, step, PLAN)
        while at < tiles:
            at += stride
            following = _tile(gl.minimum(at, tiles - 1), order, NUM_N, COLUMNS, PLAN)
            left, right, turn = products(
                operands, ring, turn, Tiles(tile, following, at < tiles), bank, PLAN
            )
            if result.bias is not None:
                left = _add_bias(left, result.bias, tile, 0, PLAN)
                right = _add_bias(right, result.bias, tile, 1, PLAN)
            if GATE is None:
                _write_rows(left, right, tile, ring, result, PLAN)
            else:
                _write_act(left, right, tile, order, ring, result, PLAN, GATE)
            tile = following


@gluon.jit
def _share(
    operands, table, order, result,
    COLUMNS: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Has a program's warpgroups do all tiles."""
    fill_table(table)
    one, two = (
        ring_of(result.out.dtype.element_ty, PLAN),
        ring_of(result.out.dtype.element_ty, PLAN),
    )
    three = ring_of(result.out.dtype.element_ty, PLAN)
    if PLAN.walkers == 3:
        gl.warp_specialize(
            [
                (_walk, (operands, order, result, one, 0, COLUMNS, PLAN, GATE)),
                (_walk, (operands, order, result, two, 1, COLUMNS, PLAN, GATE)),
                (_walk, (operands, order, result, three, 2, COLUMNS, PLAN, GATE)),
            ],
            [4, 4],
            [168, 168],
        )
    else:
        four = ring_of(result.out.dtype.element_ty, PLAN)
        gl.warp_specialize(
            [
                (_walk, (operands, order, result, one, 0, COLUMNS, PLAN, GATE)),
                (_walk, (operands, order, result, two, 1, COLUMNS, PLAN, GATE)),
                (_walk, (operands, order, result, three, 2, COLUMNS, PLAN, GATE)),
                (_walk, (operands, order, result, four, 3, COLUMNS, PLAN, GATE)),
            ],
            [4, 4, 4],
            [128, 128, 128],
        )


@gluon.jit
def gemm_pairs_kernel(
    x, words, scales, table, bias, out,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles, PLAN: gl.constexpr,
):  # fmt: skip
    """out [S, n] = x W^T + bias, in expert order. x as boxes [bm, 64], the codes of all experts
    [E * n, k / 8] as boxes [64, 16] of words; `table`, int32 [256]."""
    order = Order(row_to_slot, expert_offsets, tile_expert, tile_row, gl.load(num_tiles))
    result = Result(out, None, bias, None)
    _share(Operands(x, words, scales), table, order, result, 2 * ROWS, PLAN, None)


@gluon.jit
def gate_up_pairs_kernel(
    x, words, scales, table, bias, slot_weight, act, pre,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """act [S, n / 2], and with PLAN.save_pre also pre [S, n]; the others as of the gemm."""
    order = Order(row_to_slot, expert_offsets, tile_expert, tile_row, gl.load(num_tiles))
    result = Result(act, pre, bias, slot_weight)
    _share(Operands(x, words, scales), table, order, result, ROWS, PLAN, GATE)
