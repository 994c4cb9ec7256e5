"""Backward through the down projection and the activation in one kernel, here of SwiGLU.

With dA'_r = dO[token_r] W_down (the routing weight s_r not applied yet) and [g | u] = pre_r:
  weight on output: act = silu(g) u,           dA = s dA',  d_s = <dA', act>,  act_out = s act
  weight on input:  act = silu(s g) (s u),     dA = dA',    d_s = <d[sg|su], [g|u]>, act_out = act
d_pre = [dA u silu'(g) | dA silu(g)], silu'(g) = sig(g) (1 + g (1 - sig(g))); times s on input.
(SonicMoE, arXiv:2512.14080, section 3.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .activate import gate_of, glu
from .launch import cdiv
from .tiles import (
    W8,
    LowRank,
    choose,
    dot_precision,
    find_tile,
    launches,
    load_rows,
    low_rank_args,
    low_rank_in,
    low_rank_out,
)
from .weights import scale_operand, weight_dot, weight_operand


@triton.jit
def _epilogue(
    d_act, rows, row_mask, scale, start, pre, d_pre, act,
    I: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, NEED_ACT: tl.constexpr, NEED_PRE: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = d_act.shape[0]
    BN: tl.constexpr = d_act.shape[1]
    n = start + tl.arange(0, BN)
    mask = row_mask[:, None] & (n[None, :] < I)
    if GATE.form == "interleaved":
        wide = 2 * start + tl.arange(0, 2 * BN)
        wide_mask = row_mask[:, None] & (wide[None, :] < 2 * I)
        at = rows.to(tl.int64)[:, None] * (2 * I) + wide[None, :]
        both = tl.load(pre + at, mask=wide_mask, other=0.0).to(tl.float32)
        gate, up = both.reshape(BM, BN, 2).split()
    else:
        INNER: tl.constexpr = I if GATE.form == "ungated" else 2 * I
        at = rows.to(tl.int64)[:, None] * INNER + n[None, :]
        gate = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
        if GATE.form == "ungated":
            up = 1.0 + tl.zeros_like(gate)
        else:
            up = tl.load(pre + at + I, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT_ON_INPUT:
        up_scale = 1.0 if GATE.form == "ungated" else scale
        value, by_gate, by_up = glu(gate * scale, up * up_scale, GATE)
        d_gate, d_up = d_act * by_gate, d_act * by_up
        if GATE.form == "ungated":
            d_up = tl.zeros_like(d_up)
        d_scale = tl.sum(tl.where(mask, d_gate * gate + d_up * up, 0.0), axis=1)
        d_gate *= scale
        d_up *= scale
    else:
        value, by_gate, by_up = glu(gate, up, GATE)
        d_scale = tl.sum(tl.where(mask, d_act * value, 0.0), axis=1)
        d_act *= scale
        value *= scale
        d_gate, d_up = d_act * by_gate, d_act * by_up
    if NEED_PRE:
        if GATE.form == "interleaved":
            both = tl.join(d_gate, d_up).reshape(BM, 2 * BN)
            tl.store(d_pre + at, both.to(d_pre.dtype.element_ty), mask=wide_mask)
        else:
            tl.store(d_pre + at, d_gate.to(d_pre.dtype.element_ty), mask=mask)
        if GATE.form == "concatenated":
            tl.store(d_pre + at + I, d_up.to(d_pre.dtype.element_ty), mask=mask)
    if NEED_ACT:
        to = rows.to(tl.int64)[:, None] * I + n[None, :]
        tl.store(act + to, value.to(act.dtype.element_ty), mask=mask)
    return d_scale


@triton.jit
def _epilogues(
    d_act, rows, mask, scale, start, pre, d_pre, act,
    I: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, NEED_ACT: tl.constexpr, NEED_PRE: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """In column parts: over a whole tile the epilogue's registers would spill."""
    if PARTS == 1:
        return _epilogue(d_act, rows, mask, scale, start, pre, d_pre, act, I, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, GATE)  # fmt: skip # noqa: E501
    else:
        BM: tl.constexpr = d_act.shape[0]
        HALF: tl.constexpr = d_act.shape[1] // 2
        left, right = d_act.reshape(BM, 2, HALF).permute(0, 2, 1).split()
        total = _epilogues(left, rows, mask, scale, start, pre, d_pre, act, I, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, GATE, PARTS // 2)  # fmt: skip # noqa: E501
        return total + _epilogues(right, rows, mask, scale, start + HALF, pre, d_pre, act, I, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, GATE, PARTS // 2)  # fmt: skip # noqa: E501


@triton.jit
def dgate_kernel(
    d_out, w, scales, slot_weight, pre, d_pre, act, d_scale, low_a, low_b, low_side,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    SCALE_E: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    NEED_PRE: tl.constexpr, NEED_ACT: tl.constexpr, NEED_SCALE: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles = tl.load(num_tiles)
    NUM_N: tl.constexpr = (I + BN - 1) // BN
    if pid >= tiles * NUM_N:
        return
    tile, column = find_tile(pid, tiles, NUM_N, GROUP_M)
    expert = tl.load(tile_expert + tile)
    rows = tl.load(tile_row + tile) + tl.arange(0, BM)
    mask = rows < tl.load(expert_offsets + expert + 1)
    slot = tl.load(row_to_slot + rows, mask=mask, other=0)
    d_rows = d_out + (slot // TOP_K).to(tl.int64)[:, None] * STRIDE_X

    n0 = column * BN
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    if R > 0:
        side = tl.zeros([BM, RP], dtype=tl.float32)
    for k in range(0, H, BK):
        a = load_rows(d_rows, k, H, BK, UPCAST)
        acc = weight_dot(a, acc, w, scales, expert, n0, k, STRIDE_E, STRIDE_N, STRIDE_K, SCALE_E, SCALE_N, SCALE_K, I, H, BN, BK, TMA, K_MAJOR, PRECISION)  # fmt: skip # noqa: E501
        if R > 0:
            side = low_rank_in(a, low_a, side, expert, k, H, R, BK, UPCAST, PRECISION)
    if R > 0:
        n = n0 + tl.arange(0, BN)
        acc = low_rank_out(acc, side, low_b, low_side, expert, rows, mask, n, n < I, column == 0, I, R, UPCAST, PRECISION)  # fmt: skip # noqa: E501

    scale = tl.load(slot_weight + slot).to(tl.float32)[:, None]
    total = _epilogues(acc, rows, mask, scale, n0, pre, d_pre, act, I, WEIGHT_ON_INPUT, NEED_ACT, NEED_PRE, GATE, PARTS)  # fmt: skip # noqa: E501
    if NEED_SCALE:
        tl.store(d_scale + rows.to(tl.int64) * NUM_N + column, total, mask=mask)


_launches = launches(dgate_kernel)


def dgate(
    d_out: Tensor,
    down_proj: Tensor,
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
    name = "dgate" if scale is None else "dgate" + W8
    rows = slots // experts
    tile = choose(name, order.block_m, rows, inner, hidden, d_out.dtype, d_out.device)
    columns = cdiv(inner, tile.bn)
    d_pre, act, d_scale = into or (
        torch.empty_like(pre) if need_pre else pre.new_empty(0),
        pre.new_empty((slots, inner) if need_act else (0,)),
        pre.new_empty((slots, columns) if need_scale else (0,), dtype=torch.float32),
    )
    if slots == 0:
        return d_pre, act, d_scale
    weight = down_proj.transpose(1, 2)  # [E, N = I, K = H]
    weights, tma, k_major = weight_operand(weight, tile.bn, tile.bk)
    scales, scale_strides = scale_operand(None if scale is None else scale.transpose(1, 2))
    gate = gate_of(activation)
    parts = 1 if tile.bn < 64 else 8 if gate.form == "interleaved" else 4
    start = _launches(
        tile, d_out.dtype, dot_precision(d_out.dtype), weight.stride(),
        low_rank.rank if low_rank else 0,
        STRIDE_X=d_out.stride(0), H=hidden, I=inner, TOP_K=slots // d_out.shape[0],
        WEIGHT_ON_INPUT=weight_on_input,
        NEED_PRE=need_pre, NEED_ACT=need_act, NEED_SCALE=need_scale,
        PARTS=parts, TMA=tma, K_MAJOR=k_major, **scale_strides, GATE=gate,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * columns,),
        d_out, weights, scales, slot_weight, pre, d_pre, act, d_scale, *low_rank_args(low_rank),
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return d_pre, act, d_scale
