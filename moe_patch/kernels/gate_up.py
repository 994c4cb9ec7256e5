"""Gathered first projection, activated in its epilogue: act = silu(x W_gate^T) * (x W_up^T)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import parse
from ..formats.packed import Packed
from ..order import ExpertOrder
from . import chips, packed_products
from .activate import Activated, gate_of, glu
from .boxes import Lying, rows_box
from .grouped_gemm import multiply_a
from .in_steps import width
from .launch import Launch, cdiv
from .low_rank import NO_UPDATE, LowRank, Update, add_update, update_boxes, update_operand
from .tiles import ROLES, Product, Tile, choose, plan_of, portable, tail_for
from .tiling import dot_precision, launches, load_rows, place
from .weights import BLOCK, Weight, boxed_weight, suffix, weight_dot, weight_operand


class Rows(NamedTuple):
    """A tile's rows: which [BM], which of them are its expert's, and where those of x lie."""

    at: Any
    mask: Any
    x: Any


@triton.jit
def _by_one_product(
    rows, weight, update, bias, pre, expert, column,
    LAYOUT: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    SAVE_PRE: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(gate, up) [BM, BN], which stand side by side in one operand; up is 1 without gates. Stores
    the sums where their order in memory is theirs in the operand."""
    BM: tl.constexpr = TILE.bm
    BN: tl.constexpr = TILE.bn
    n0 = column * BN
    WIDTH: tl.constexpr = BN if GATE.form == "ungated" else 2 * BN
    INNER: tl.constexpr = I if GATE.form == "ungated" else 2 * I
    both = tl.zeros([BM, WIDTH], dtype=tl.float32)
    for k in range(0, H, TILE.bk):
        a = load_rows(rows.x, k, H, TILE)
        if GATE.form == "concatenated":
            both = weight_dot(a, both, weight, expert, n0, k, LAYOUT, I, H, BN, TILE, HALVES=2)
        else:
            n1 = column * WIDTH
            both = weight_dot(a, both, weight, expert, n1, k, LAYOUT, INNER, H, WIDTH, TILE)
    n = tl.arange(0, WIDTH)
    if GATE.form == "concatenated":
        inside = n0 + n % BN < I
        n = n0 + n % BN + n // BN * I
    else:
        n += column * WIDTH
        inside = n < INNER
    if FACTOR.rank > 0:
        both = add_update(both, update, expert, rows.at, rows.mask, n, inside, FACTOR, TILE)
    if BIAS:
        value = tl.load(bias + expert.to(tl.int64) * INNER + n, mask=inside, other=0.0)
        both += value.to(tl.float32)[None, :]
    if SAVE_PRE and GATE.form != "concatenated":
        at = rows.at.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(pre + at, both.to(pre.dtype.element_ty), mask=rows.mask[:, None] & inside[None, :])
    if GATE.form == "concatenated":
        gate, up = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
    elif GATE.form == "interleaved":
        gate, up = both.reshape(BM, BN, 2).split()
    else:
        gate, up = both, 1.0
    return gate, up


@triton.jit
def _by_two_products(
    rows, weight, update, bias, expert, column,
    LAYOUT: tl.constexpr, H: tl.constexpr, I: tl.constexpr, BIAS: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(gate, up) [BM, BN]: N-major TMA boxes of the two halves cannot stand side by side."""
    BM: tl.constexpr = TILE.bm
    BN: tl.constexpr = TILE.bn
    n0 = column * BN
    gate = tl.zeros([BM, BN], dtype=tl.float32)
    up = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, H, TILE.bk):
        a = load_rows(rows.x, k, H, TILE)
        gate = weight_dot(a, gate, weight, expert, n0, k, LAYOUT, I, H, BN, TILE)
        up = weight_dot(a, up, weight, expert, I + n0, k, LAYOUT, 2 * I, H, BN, TILE, FIRST=I)
    n = n0 + tl.arange(0, BN)
    if FACTOR.rank > 0:
        gate = add_update(gate, update, expert, rows.at, rows.mask, n, n < I, FACTOR, TILE)
        up = add_update(up, update, expert, rows.at, rows.mask, n + I, n < I, FACTOR, TILE)
    if BIAS:
        at = bias + expert.to(tl.int64) * (2 * I) + n
        gate += tl.load(at, mask=n < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + I, mask=n < I, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def gate_up_kernel(
    x, w, scales, zeros, table, bias, slot_weight, pre, act, low_side, low_b,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    LAYOUT: tl.constexpr, STRIDE_X: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, SAVE_PRE: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ONE_DOT: tl.constexpr, FACTOR: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE.bm
    BN: tl.constexpr = TILE.bn
    pid = tl.program_id(0)
    NUM_N: tl.constexpr = (I + BN - 1) // BN
    if pid >= tl.load(num_tiles) * NUM_N:
        return
    expert, first, end, column = place(
        pid, tile_expert, tile_row, expert_offsets, NUM_N, 0, BM, TILE.group_m
    )
    at = first + tl.arange(0, BM)
    mask = at < end
    slot = tl.load(row_to_slot + at, mask=mask, other=0)
    rows = Rows(at, mask, x + (slot // TOP_K).to(tl.int64)[:, None] * STRIDE_X)

    weight, update = Weight(w, scales, zeros, table), Update(low_side, low_b)
    if ONE_DOT:
        gate, up = _by_one_product(
            rows, weight, update, bias, pre, expert, column,
            LAYOUT, H, I, SAVE_PRE, BIAS, GATE, FACTOR, TILE,
        )  # fmt: skip
    else:
        gate, up = _by_two_products(
            rows, weight, update, bias, expert, column, LAYOUT, H, I, BIAS, FACTOR, TILE
        )

    n = column * BN + tl.arange(0, BN)[None, :]
    mask = mask[:, None] & (n < I)
    at = at.to(tl.int64)[:, None]
    if SAVE_PRE and GATE.form == "concatenated":
        tl.store(pre + at * (2 * I) + n, gate.to(pre.dtype.element_ty), mask=mask)
        tl.store(pre + at * (2 * I) + I + n, up.to(pre.dtype.element_ty), mask=mask)
    if WEIGHT_ON_INPUT:
        scale = tl.load(slot_weight + slot).to(tl.float32)[:, None]
        gate *= scale
        if GATE.form != "ungated":
            up *= scale
    value, _, _ = glu(gate, up, GATE)
    tl.store(act + at * I + n, value.to(act.dtype.element_ty), mask=mask)


_launches = launches(gate_up_kernel)


@functools.lru_cache(1024)
def _launch_on_hopper(
    activation: str, tile: Tile, weight: Lying, rank: int, **sizes: Any
) -> Launch:
    from .hopper.gate_up import Plan, gate_up_hopper_kernel

    plan, gate = Plan(**plan_of(tile, weight, rank), **sizes), gate_of(activation, ptx=True)
    return Launch(gate_up_hopper_kernel, PLAN=plan, GATE=gate, num_warps=4)


def _on_hopper(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    result: Activated,
    tile: Tile,
    update: LowRank | None,
    scale: Tensor | None,
) -> bool:
    """Starts the kernel in hopper/, unless the operands' boxes are not lawful."""
    act, pre, dtype = result.act, result.pre, x.dtype
    slots, inner = shape = act.shape
    save_pre = pre.numel() > 0
    by_16_bytes = not (x.stride(0) % 8 or x.data_ptr() % 16)
    if not by_16_bytes or order.block_m != tile.bm:
        return False
    if scale is not None and inner % BLOCK:  # a block of gates and ups
        return False
    w_box, scales = boxed_weight(weight, scale, tile.bn, tile.bk)
    act_box = gate_box = up_box = rows_box(act.data_ptr(), dtype, shape, (64, 64))
    if save_pre:
        gates = pre.data_ptr()
        gate_box = rows_box(gates, dtype, shape, (64, 64), 2 * inner)
        up_box = rows_box(gates + inner * dtype.itemsize, dtype, shape, (64, 64), 2 * inner)
    tail = tail_for(weight, slots)
    low = update_boxes(update, weight, tile.bn, tail)
    if w_box is None or act_box is None or gate_box is None or up_box is None or low is None:
        return False
    start = _launch_on_hopper(
        result.activation, tile, Lying.of(weight), low.rank,
        stride_x=x.stride(0), top_k=slots // x.shape[0],
        weight_on_input=result.weight_on_input, save_pre=save_pre, tail=tail,
    )  # fmt: skip
    tiles = order.tile_expert.numel() * cdiv(inner, tile.bn)
    slot_weight = result.slot_weight if result.weight_on_input else act  # which is not read
    start(
        chips.programs(x.device, tiles),
        x, w_box, scales, low.side, low.tail, low.b, slot_weight, act_box, gate_box, up_box,
        order.taken,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return True


def gate_up(
    x: Tensor,
    weight: Tensor | Packed,
    order: ExpertOrder,
    slot_weight: Tensor,
    *,
    weight_on_input: bool,
    save_pre: bool,
    activation: str = "silu",
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    act_in_steps: bool = False,
) -> tuple[Tensor, Tensor]:
    """(act [S, I], pre [S, 2I] or empty) of x [T, H] and weight [E, 2I, H], rows in expert order.
    I instead of 2I where the activation is ungated. `bias` [E, 2I] is contiguous; `scale`
    [E, ceil(2I / 128), ceil(H / 128)] is of FP8 weights.

    `slot_weight` [T, K] multiplies the input rows when `weight_on_input` (Llama4); `pre` is the
    projection without it. Rows of dropped slots are not written. With `low_rank` the weight is
    weight[e] + B[e] A[e]. `into` is what an earlier call for other rows returned: these are
    written there. `act_in_steps`: packed_products compute this product and the next, and act
    [S, width(I)] is in their order.
    """
    slots, (experts, rows, hidden) = order.row_to_slot.numel(), weight.shape
    form = parse(activation).form
    inner = rows if form == "ungated" else rows // 2
    act, pre = into or (
        x.new_empty(slots, width(inner) if act_in_steps else inner),
        x.new_empty((slots, rows) if save_pre else (0,)),
    )
    if slots == 0:
        return act, pre
    result = Activated(act, pre, bias, slot_weight, weight_on_input, activation, act_in_steps)
    dtype, device = x.dtype, x.device
    if isinstance(weight, Packed) and form != "ungated":
        if packed_products.supported(weight, order, dtype, low_rank):
            if low_rank:
                multiply_a(x, low_rank, order, slots // len(x))
            packed_products.gate_up(x, weight, order, result, low_rank)
            return act, pre
    name = "gemm" if form == "ungated" else "gate_up"
    if low_rank:
        multiply_a(x, low_rank, order, slots // len(x))
    rows_each = slots // experts
    product = Product(
        name + suffix(weight, scale), order.block_m, rows_each, inner, hidden, dtype, device
    )
    tile = choose(*product)
    packed = isinstance(weight, Packed)
    if tile.warps == ROLES:  # an ungated product has gemm's tiles
        as_it_lies = bias is None and form == "concatenated"
        if as_it_lies and _on_hopper(x, weight, order, result, tile, low_rank, scale):
            return act, pre
        tile = portable(product)
    turned = form == "concatenated" and not packed and weight.stride(2) != 1
    halves = 2 if form == "concatenated" and not turned else 1
    columns = 2 * tile.bn if form == "interleaved" else tile.bn
    begins = (inner,) if turned else ()  # the second half's boxes
    operand = weight_operand(weight, scale, columns, tile.bk, halves=halves, begins=begins)
    one_dot = not (turned and operand.layout.tma)
    low = update_operand(low_rank) if low_rank else NO_UPDATE
    start = _launches(
        tile, dtype, dot_precision(dtype) if dtype == torch.float32 else "ieee",
        operand.layout, activation, chips.chip(x.device).ptx, FACTOR=low.factor,
        STRIDE_X=x.stride(0), H=hidden, I=inner, TOP_K=slots // x.shape[0],
        WEIGHT_ON_INPUT=weight_on_input, SAVE_PRE=save_pre, BIAS=bias is not None, ONE_DOT=one_dot,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * -(-inner // tile.bn),),
        x, *operand[:-1], bias, slot_weight, pre, act, *low.tensors,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return act, pre
