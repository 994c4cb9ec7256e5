"""Decoding: a few tokens, no sort. Each program streams its weights once with vector math.

Two launches: act = silu(x W_gate^T) * (x W_up^T) by slot, then each token's weighted sum of
act W_down^T over its choices. For as good as no expert chosen twice.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import constants
from .launch import Launch, cdiv, power_of_two
from .tiles import INTERPRET, glu


@triton.jit
def _weights(at, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] in float32; zero past N and K."""
    if N % BN == 0 and K % BK == 0:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0).to(tl.float32)


@triton.jit
def decode_gate_up_kernel(
    x, w, bias, index, slot_weight, act,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    FORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(index + slot).to(tl.int64)
    if (expert >= 0) & (expert < E):
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        # rows of the weight: the gate's, in turn with up's, or all there are
        WIDTH: tl.constexpr = 2 * BN if FORM == "interleaved" else BN
        INNER: tl.constexpr = I if FORM == "ungated" else 2 * I
        END: tl.constexpr = 2 * I if FORM == "interleaved" else I
        m = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        row = x + (slot // TOP_K).to(tl.int64) * STRIDE_X
        rows = w + expert * STRIDE_E + m[:, None] * STRIDE_N
        gate = tl.zeros([WIDTH, BK], dtype=tl.float32)
        up = tl.zeros([BN, BK], dtype=tl.float32)
        for k0 in range(0, H, BK):
            k = k0 + tl.arange(0, BK)
            a = tl.load(row + k, mask=k < H, other=0.0).to(tl.float32)[None, :]
            at = rows + k[None, :] * STRIDE_K
            gate += _weights(at, m, k, END, H, WIDTH, BK) * a
            if FORM == "concatenated":
                up += _weights(at + I * STRIDE_N, n, k, I, H, BN, BK) * a
        scale = tl.load(slot_weight + slot).to(tl.float32) if WEIGHT_ON_INPUT else 1.0
        gate, up = tl.sum(gate, axis=1) * scale, tl.sum(up, axis=1) * scale
        if BIAS:
            at = bias + expert * INNER + m
            gate += tl.load(at, mask=m < END, other=0.0).to(tl.float32)
            if FORM == "concatenated":
                up += tl.load(at + I, mask=n < I, other=0.0).to(tl.float32)
        if FORM == "interleaved":
            gate, up = gate.reshape(BN, 2).split()
        elif FORM == "ungated":
            up = 1.0
        value, _, _ = glu(gate, up, ACT, LIMIT, ALPHA, OFFSET)
        tl.store(act + slot * I + n, value, mask=n < I)


@triton.jit
def decode_down_kernel(
    act, w, bias, index, slot_weight, out,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    biases = tl.zeros([BN], dtype=tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(index + slot).to(tl.int64)
        if (expert >= 0) & (expert < E):
            scale = tl.load(slot_weight + slot).to(tl.float32) if WEIGHTED else 1.0
            if BIAS:
                value = tl.load(bias + expert * H + n, mask=n < H, other=0.0)
                biases += value.to(tl.float32) * scale
            rows = w + expert * STRIDE_E + n[:, None] * STRIDE_N
            for k0 in range(0, I, BK):
                k = k0 + tl.arange(0, BK)
                a = tl.load(act + slot * I + k, mask=k < I, other=0.0) * scale
                acc += _weights(rows + k[None, :] * STRIDE_K, n, k, H, I, BN, BK) * a[None, :]
    at = out + token.to(tl.int64) * H + n
    tl.store(at, (tl.sum(acc, axis=1) + biases).to(out.dtype.element_ty), mask=n < H)


def decodes(top_k_index: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> bool:
    """Whether the slots are so few that their experts hardly repeat and a sort would not pay."""
    tokens, top_k = top_k_index.shape
    few = tokens == 1 or 4 * tokens * top_k <= gate_up_proj.shape[0]
    return tokens > 0 and few and all(1 in w.stride()[1:] for w in (gate_up_proj, down_proj))


def _block(size: int, k: int, strides: tuple[int, int, int], *, down: bool) -> dict[str, int]:
    """A program's columns, the block of its reduction and its warps, for a weight."""
    if INTERPRET:
        return {"BN": 16, "BK": 64, "num_warps": 4}
    k = power_of_two(k)
    if strides[2] == 1:
        bk = min(2048 // size, k)
        return {"BN": 4 if down and k <= bk else 2, "BK": bk, "num_warps": 4}
    bk = min((1024 if down else 256) // size, k)
    return {"BN": 64 // size, "BK": bk, "num_warps": 8}


def decode(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on_input: bool,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """fused_experts [T, H] -> [T, H] for the cases that `decodes` accepts; nothing is kept."""
    tokens, hidden = x.shape
    top_k = top_k_index.shape[1]
    inner = down_proj.shape[2]
    gate_up, down = _launches(
        hidden, inner, down_proj.shape[0], top_k, weight_on_input, activation,
        gate_up_bias is not None, down_bias is not None,
        x.element_size(), x.stride(0), gate_up_proj.stride(), down_proj.stride(),
    )  # fmt: skip
    act = x.new_empty((tokens * top_k, inner), dtype=torch.float32)
    out = x.new_empty(x.shape)
    grid = (cdiv(inner, gate_up.constants["BN"]), tokens * top_k)
    gate_up(grid, x, gate_up_proj, gate_up_bias, top_k_index, top_k_weights, act)
    grid = (cdiv(hidden, down.constants["BN"]), tokens)
    down(grid, act, down_proj, down_bias, top_k_index, top_k_weights, out)
    return out


@functools.lru_cache(1024)
def _launches(
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    weight_on_input: bool,
    activation: str,
    gate_up_bias: bool,
    down_bias: bool,
    itemsize: int,
    stride_x: int,
    *strides: tuple[int, int, int],
) -> tuple[Launch, Launch]:
    """Of the two kernels."""
    sizes = {"H": hidden, "I": inner, "E": experts, "TOP_K": top_k}
    gate_up, down = (dict(zip(("STRIDE_E", "STRIDE_N", "STRIDE_K"), each)) for each in strides)
    block = _block(itemsize, hidden, strides[0], down=False)
    first = Launch(
        decode_gate_up_kernel,
        STRIDE_X=stride_x, **gate_up, **sizes, WEIGHT_ON_INPUT=weight_on_input,
        BIAS=gate_up_bias, **constants(activation), **block,
    )  # fmt: skip
    block = _block(itemsize, inner, strides[1], down=True)
    second = Launch(
        decode_down_kernel,
        **down, **sizes, WEIGHTED=not weight_on_input, BIAS=down_bias, **block,
    )  # fmt: skip
    return first, second
