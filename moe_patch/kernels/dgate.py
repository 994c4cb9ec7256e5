"""Backward through the down projection and the activation in one kernel, here of SwiGLU.

With dA'_r = dO[token_r] W_down (the routing weight s_r not applied yet) and [g | u] = pre_r:
  weight on output: act = silu(g) u,           dA = s dA',  d_s = <dA', act>,  act_out = s act
  weight on input:  act = silu(s g) (s u),     dA = dA',    d_s = <d[sg|su], [g|u]>, act_out = act
d_pre = [dA u silu'(g) | dA silu(g)], silu'(g) = sig(g) (1 + g (1 - sig(g))); times s on input.
(SonicMoE, arXiv:2512.14080, section 3.)
"""

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
from . import chips
from .activate import gate_of, through_gate
from .boxes import Lying, gluon_box
from .grouped_gemm import multiply_a
from .launch import Launch, cdiv
from .low_rank import NO_UPDATE, LowRank, Update, add_update, update_boxes, update_operand
from .low_rank import Boxes as UpdateBoxes
from .tiles import ROLES, Product, Tile, choose, plan_of, portable
from .tiling import dot_precision, launches, load_rows, place
from .weights import Weight, boxed_weight, suffix, weight_dot, weight_operand


class Rows(NamedTuple):
    """What the epilogue reads and writes of a tile's rows, in expert order."""

    row: Any
    """[BM]; `mask` [BM] says which of them there are."""
    mask: Any
    scale: Any
    """[BM, 1], the routing weights."""
    pre: Any
    d_pre: Any
    act: Any


@triton.jit
def _epilogue(
    d_act, rows, start,
    I: tl.constexpr, GATE: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    NEED_ACT: tl.constexpr, NEED_PRE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = d_act.shape[0]
    BN: tl.constexpr = d_act.shape[1]
    n = start + tl.arange(0, BN)
    mask = rows.mask[:, None] & (n[None, :] < I)
    if GATE.form == "interleaved":
        wide = 2 * start + tl.arange(0, 2 * BN)
        wide_mask = rows.mask[:, None] & (wide[None, :] < 2 * I)
        at = rows.row.to(tl.int64)[:, None] * (2 * I) + wide[None, :]
        both = tl.load(rows.pre + at, mask=wide_mask, other=0.0).to(tl.float32)
        gate, up = both.reshape(BM, BN, 2).split()
    else:
        INNER: tl.constexpr = I if GATE.form == "ungated" else 2 * I
        at = rows.row.to(tl.int64)[:, None] * INNER + n[None, :]
        gate = tl.load(rows.pre + at, mask=mask, other=0.0).to(tl.float32)
        if GATE.form == "ungated":
            up = 1.0 + tl.zeros_like(gate)
        else:
            up = tl.load(rows.pre + at + I, mask=mask, other=0.0).to(tl.float32)
    d_gate, d_up, value, d_scale = through_gate(
        d_act, gate, up, rows.scale, mask, GATE, WEIGHT_ON_INPUT
    )
    if NEED_PRE:
        if GATE.form == "interleaved":
            both = tl.join(d_gate, d_up).reshape(BM, 2 * BN)
            tl.store(rows.d_pre + at, both.to(rows.d_pre.dtype.element_ty), mask=wide_mask)
        else:
            tl.store(rows.d_pre + at, d_gate.to(rows.d_pre.dtype.element_ty), mask=mask)
        if GATE.form == "concatenated":
            tl.store(rows.d_pre + at + I, d_up.to(rows.d_pre.dtype.element_ty), mask=mask)
    if NEED_ACT:
        to = rows.row.to(tl.int64)[:, None] * I + n[None, :]
        tl.store(rows.act + to, value.to(rows.act.dtype.element_ty), mask=mask)
    return d_scale


@triton.jit
def _epilogues(
    d_act, rows, start,
    I: tl.constexpr, GATE: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    NEED_ACT: tl.constexpr, NEED_PRE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """In column parts: over a whole tile the epilogue's registers would spill."""
    if PARTS == 1:
        return _epilogue(d_act, rows, start, I, GATE, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE)
    else:
        BM: tl.constexpr = d_act.shape[0]
        HALF: tl.constexpr = d_act.shape[1] // 2
        left, right = d_act.reshape(BM, 2, HALF).permute(0, 2, 1).split()
        total = _epilogues(
            left, rows, start, I, GATE, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, PARTS // 2
        )
        return total + _epilogues(
            right, rows, start + HALF, I, GATE, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, PARTS // 2
        )


@triton.jit
def dgate_kernel(
    d_out, w, scales, zeros, table, slot_weight, pre, d_pre, act, d_scale, low_side, low_b,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    LAYOUT: tl.constexpr, STRIDE_X: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    NEED_PRE: tl.constexpr, NEED_ACT: tl.constexpr, NEED_SCALE: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE.bm
    BN: tl.constexpr = TILE.bn
    BK: tl.constexpr = TILE.bk
    pid = tl.program_id(0)
    NUM_N: tl.constexpr = (I + BN - 1) // BN
    if pid >= tl.load(num_tiles) * NUM_N:
        return
    expert, first, end, column = place(
        pid, tile_expert, tile_row, expert_offsets, NUM_N, 0, BM, TILE.group_m
    )
    rows = first + tl.arange(0, BM)
    mask = rows < end
    slot = tl.load(row_to_slot + rows, mask=mask, other=0)
    d_rows = d_out + (slot // TOP_K).to(tl.int64)[:, None] * STRIDE_X

    weight, update = Weight(w, scales, zeros, table), Update(low_side, low_b)
    n0 = column * BN
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, H, BK):
        a = load_rows(d_rows, k, H, TILE)
        acc = weight_dot(a, acc, weight, expert, n0, k, LAYOUT, I, H, BN, TILE)
    if FACTOR.rank > 0:
        n = n0 + tl.arange(0, BN)
        acc = add_update(acc, update, expert, rows, mask, n, n < I, FACTOR, TILE)

    scale = tl.load(slot_weight + slot).to(tl.float32)[:, None]
    mine = Rows(rows, mask, scale, pre, d_pre, act)
    total = _epilogues(acc, mine, n0, I, GATE, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, PARTS)
    if NEED_SCALE:
        tl.store(d_scale + rows.to(tl.int64) * NUM_N + column, total, mask=mask)


_launches = launches(dgate_kernel)


class Made(NamedTuple):
    """Results of dgate; empty where they are not needed."""

    d_pre: Tensor
    act: Tensor
    d_scale: Tensor


@functools.lru_cache(1024)
def _launch_on_hopper(
    activation: str, tile: Tile, weight: Lying, rank: int, **sizes: Any
) -> Launch:
    from .hopper.dgate import Plan, dgate_hopper_kernel

    plan, gate = Plan(**plan_of(tile, weight, rank), **sizes), gate_of(activation, ptx=True)
    return Launch(dgate_hopper_kernel, PLAN=plan, GATE=gate, num_warps=4)


class _Boxes(NamedTuple):
    """Boxes that the kernel in hopper/ reads through TMA, and the weight's scales."""

    weight: Any
    scales: Tensor | None
    gate: Any
    """Gates in `pre`, two columns of 16 bits in one of 32."""
    up: Any
    """Ups in `pre`."""
    low: UpdateBoxes


def _boxes(
    d_out: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    pre: Tensor,
    tile: Tile,
    update: LowRank | None,
) -> _Boxes | None:
    """Boxes for a tile of hopper/'s kernel, if all are lawful, and d_out's rows may be copied by 16
    bytes."""
    if d_out.stride(0) % 8 or d_out.data_ptr() % 16:
        return None
    inner = weight.shape[1]
    w_box, scales = boxed_weight(weight, scale, tile.bn, tile.bk)
    slots, gates, dtype = pre.shape[0], pre.data_ptr(), pre.dtype
    gate_box = gluon_box(gates, torch.float32, (slots, inner // 2), (64, 32), (inner, 1))
    ups = gates + inner * dtype.itemsize
    up_box = gluon_box(ups, dtype, (slots, inner), (64, 64), (2 * inner, 1))
    low = update_boxes(update, weight, tile.bn)
    if w_box is None or gate_box is None or up_box is None or low is None:
        return None
    return _Boxes(w_box, scales, gate_box, up_box, low)


def _on_hopper(
    boxes: _Boxes,
    d_out: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    slot_weight: Tensor,
    weight_on_input: bool,
    made: Made,
    tile: Tile,
    activation: str,
) -> None:
    """Starts the kernel in hopper/."""
    d_pre, act, d_scale = made
    start = _launch_on_hopper(
        activation, tile, Lying.of(weight), boxes.low.rank,
        stride_x=d_out.stride(0), top_k=order.row_to_slot.numel() // d_out.shape[0],
        weight_on_input=weight_on_input,
        need_pre=d_pre.numel() > 0, need_act=act.numel() > 0, need_scale=d_scale.numel() > 0,
    )  # fmt: skip
    tiles = order.tile_expert.numel() * cdiv(weight.shape[1], tile.bn)
    start(
        chips.programs(d_out.device, tiles),
        d_out, boxes.weight, boxes.scales, boxes.low.side, boxes.low.b, slot_weight,
        boxes.gate, boxes.up, d_pre, act, d_scale, order.taken,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip


def dgate(
    d_out: Tensor,
    down_proj: Tensor | Packed,
    order: ExpertOrder,
    slot_weight: Tensor,
    pre: Tensor,
    *,
    weight_on_input: bool,
    need_pre: bool,
    need_act: bool,
    need_scale: bool,
    activation: str = "silu",
    scale: Tensor | None = None,
    low_rank: LowRank | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(d_pre as pre, act [S, I], d_scale partials [S, column tiles] float32) in expert order.

    d_out [T, H], down_proj [E, H, I], pre [S, 2I] or [S, I] as `gate_up` saved it; `scale`
    [E, ceil(H / 128), ceil(I / 128)] is of an FP8 down_proj. What is not needed comes back empty;
    rows of dropped slots are not written. `into` is what an earlier call for other rows returned:
    these are written there. With `low_rank`, of the weight as the kernel sees it, [E, I, H]:
    A [E, R, H], B [E, I, R].
    """
    slots, (experts, hidden, inner) = order.row_to_slot.numel(), down_proj.shape
    dtype, device = d_out.dtype, d_out.device
    name = "dgate" + suffix(down_proj, scale)
    product = Product(name, order.block_m, slots // experts, inner, hidden, dtype, device)
    tile, boxes, form = choose(*product), None, parse(activation).form
    weight, scale = down_proj.mT, None if scale is None else scale.mT  # [E, N = I, K = H]
    if tile.warps == ROLES:
        if form == "concatenated" and order.block_m == tile.bm:
            boxes = _boxes(d_out, weight, scale, pre, tile, low_rank)
        if boxes is None:
            tile = portable(product)
    columns = cdiv(inner, tile.bn)
    made = d_pre, act, d_scale = into or (
        torch.empty_like(pre) if need_pre else pre.new_empty(0),
        pre.new_empty((slots, inner) if need_act else (0,)),
        pre.new_empty((slots, columns) if need_scale else (0,), dtype=torch.float32),
    )
    if slots == 0:
        return made
    if low_rank:
        multiply_a(d_out, low_rank, order, slots // len(d_out))
    if boxes is not None:
        _on_hopper(
            boxes, d_out, weight, order, slot_weight, weight_on_input, Made(*made), tile, activation
        )  # fmt: skip
        return made
    operand = weight_operand(weight, scale, tile.bn, tile.bk)
    low = update_operand(low_rank) if low_rank else NO_UPDATE
    parts = 1 if tile.bn < 64 else 8 if form == "interleaved" else 4
    start = _launches(
        tile, dtype, dot_precision(dtype) if dtype == torch.float32 else "ieee",
        operand.layout, activation, chips.chip(d_out.device).ptx, FACTOR=low.factor,
        STRIDE_X=d_out.stride(0), H=hidden, I=inner, TOP_K=slots // d_out.shape[0],
        WEIGHT_ON_INPUT=weight_on_input,
        NEED_PRE=need_pre, NEED_ACT=need_act, NEED_SCALE=need_scale, PARTS=parts,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * columns,),
        d_out, *operand[:-1], slot_weight, pre, d_pre, act, d_scale,
        *low.tensors,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return d_pre, act, d_scale
