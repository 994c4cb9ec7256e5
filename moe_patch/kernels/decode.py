"""Decoding: a few tokens, no sort. Each program streams its weight rows once with vector math.

Two launches: act = silu(x W_gate^T) * (x W_up^T) by slot, then each token's weighted sum of
act W_down^T over its choices. For K-major weights and as good as no expert chosen twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import INTERPRET, silu_mul


@triton.jit
def decode_gate_up_kernel(
    x, w, index, slot_weight, act, stride_x, stride_e, stride_n,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(index + slot).to(tl.int64)
    if (expert >= 0) & (expert < E):
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row = x + (slot // TOP_K).to(tl.int64) * stride_x
        rows = w + expert * stride_e + n[:, None] * stride_n
        gate = tl.zeros([BN, BK], dtype=tl.float32)
        up = tl.zeros([BN, BK], dtype=tl.float32)
        for k0 in range(0, H, BK):
            k = k0 + tl.arange(0, BK)
            a = tl.load(row + k, mask=k < H, other=0.0).to(tl.float32)[None, :]
            mask = (n[:, None] < I) & (k[None, :] < H)
            gate += tl.load(rows + k[None, :], mask=mask, other=0.0).to(tl.float32) * a
            up += tl.load(rows + I * stride_n + k[None, :], mask=mask, other=0.0).to(tl.float32) * a
        scale = tl.load(slot_weight + slot).to(tl.float32) if WEIGHT_ON_INPUT else 1.0
        value, _, _ = silu_mul(tl.sum(gate, axis=1) * scale, tl.sum(up, axis=1) * scale)
        tl.store(act + slot * I + n, value, mask=n < I)


@triton.jit
def decode_down_kernel(
    act, w, index, slot_weight, out, stride_e, stride_n,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(index + slot).to(tl.int64)
        known = (expert >= 0) & (expert < E)
        scale = tl.load(slot_weight + slot).to(tl.float32) if WEIGHTED else 1.0
        rows = w + tl.where(known, expert, 0) * stride_e + n[:, None] * stride_n
        for k0 in range(0, I, BK):
            k = k0 + tl.arange(0, BK)
            a = tl.load(act + slot * I + k, mask=known & (k < I), other=0.0) * scale
            mask = known & (n[:, None] < H) & (k[None, :] < I)
            value = tl.load(rows + k[None, :], mask=mask, other=0.0).to(tl.float32) * a[None, :]
            acc += tl.where(known, value, 0.0)
    at = out + token.to(tl.int64) * H + n
    tl.store(at, tl.sum(acc, axis=1).to(out.dtype.element_ty), mask=n < H)


def decodes(top_k_index: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> bool:
    """Whether the slots are so few that their experts hardly repeat and a sort would not pay."""
    tokens, top_k = top_k_index.shape
    few = tokens == 1 or 4 * tokens * top_k <= gate_up_proj.shape[0]
    return tokens > 0 and few and gate_up_proj.stride(2) == 1 and down_proj.stride(2) == 1


def decode(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on_input: bool,
) -> Tensor:
    """fused_experts [T, H] -> [T, H] for the cases that `decodes` accepts; nothing is kept."""
    tokens, hidden = x.shape
    experts, _, inner = down_proj.shape
    top_k = top_k_index.shape[1]
    act = torch.empty((tokens * top_k, inner), dtype=torch.float32, device=x.device)
    out = x.new_empty(x.shape)
    longest, bn = (64, 16) if INTERPRET else (2048 // x.element_size(), 2)
    bk = min(longest, triton.next_power_of_2(hidden))
    decode_gate_up_kernel[(triton.cdiv(inner, bn), tokens * top_k)](
        x, gate_up_proj, top_k_index, top_k_weights, act,
        x.stride(0), gate_up_proj.stride(0), gate_up_proj.stride(1),
        H=hidden, I=inner, E=experts, TOP_K=top_k,
        WEIGHT_ON_INPUT=weight_on_input, BN=bn, BK=bk, num_warps=4,
    )  # fmt: skip
    bk = min(longest, triton.next_power_of_2(inner))
    bn *= 2 if inner <= bk else 1
    decode_down_kernel[(triton.cdiv(hidden, bn), tokens)](
        act, down_proj, top_k_index, top_k_weights, out,
        down_proj.stride(0), down_proj.stride(1),
        H=hidden, I=inner, E=experts, TOP_K=top_k,
        WEIGHTED=not weight_on_input, BN=bn, BK=bk, num_warps=4,
    )  # fmt: skip
    return out
