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

from ..formats.packed import Packed
from . import chips
from .activate import gate_of, glu
from .ahead import compiled_together
from .decode_packed import decode_down_packed_kernel, load_codes, load_rows, packed_products
from .launch import Launch, power_of_two
from .tiles import INTERPRET
from .tiling import Layout
from .weights import _BLOCK, BLOCK, Weight, weight_operand
from .widen import readable, widen, widen_scale


@triton.jit
def _weights(at, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] that lie `at`; zero past N and K."""
    if N % BN == 0 and K % BK == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)


@triton.jit
def _products(
    weights, scales, a, a_scales, n, k0, N, K, LAYOUT: tl.constexpr,
    STRIDE_AG: tl.constexpr, FIRST: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Weights [BN, BK] times a [BK], in float32; or, with the scales of rows FIRST + n, and of a if
    it has any, sums over the blocks of the reduction: [BN, PARTS]."""
    products = widen(weights, tl.float32) * a[None, :]
    if scales is None:
        return products
    else:
        k = k0 + tl.arange(0, PARTS) * (BK // PARTS)
        place = ((FIRST + n) // _BLOCK * LAYOUT.scale_n)[:, None]
        place += (k // _BLOCK * LAYOUT.scale_k)[None, :]
        inside = (n[:, None] < N) & (k[None, :] < K)
        scale = widen_scale(tl.load(scales + place, mask=inside, other=0))
        if a_scales is not None:
            at_a = a_scales + k // _BLOCK * STRIDE_AG
            scale *= tl.load(at_a, mask=k < K, other=0.0)[None, :]
        return tl.sum(products.reshape(BN, PARTS, BK // PARTS), axis=2) * scale


@triton.jit
def decode_gate_up_kernel(
    x, x_scale, w, scales, zeros, table, bias, index, slot_weight, act,
    LAYOUT: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_XS: tl.constexpr, STRIDE_XG: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(index + slot).to(tl.int64)
    if (expert >= 0) & (expert < E):
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        # rows of the weight: the gate's, in turn with up's, or all there are
        WIDTH: tl.constexpr = 2 * BN if GATE.form == "interleaved" else BN
        INNER: tl.constexpr = I if GATE.form == "ungated" else 2 * I
        END: tl.constexpr = 2 * I if GATE.form == "interleaved" else I
        m = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        token = (slot // TOP_K).to(tl.int64)
        row = x + token * STRIDE_X
        weight = Weight(w, scales, zeros, table)
        if LAYOUT.format == "":
            rows = w + expert * LAYOUT.stride_e + m[:, None] * LAYOUT.stride_n
            if scales is not None:
                scales += expert * LAYOUT.scale_e
        if x_scale is not None:
            x_scale += token * STRIDE_XS
        gate = tl.zeros([WIDTH, PARTS], dtype=tl.float32)
        up = tl.zeros([BN, PARTS], dtype=tl.float32)
        for k0 in tl.range(0, H, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            if LAYOUT.format != "":
                gates = load_codes(weight, expert, m, m < END, k0, H, LAYOUT, BK)
                if GATE.form == "concatenated":
                    ups = load_codes(weight, expert, I + n, n < I, k0, H, LAYOUT, BK)
                one = tl.arange(0, 1)
                a = load_rows(row + one, one == 0, k0, H, LAYOUT.ptx, BK)
                gate += packed_products(gates, weight, a, LAYOUT).reshape(WIDTH, PARTS)
                if GATE.form == "concatenated":
                    up += packed_products(ups, weight, a, LAYOUT).reshape(BN, PARTS)
            else:
                at = rows + k[None, :] * LAYOUT.stride_k
                gates = _weights(at, m, k, END, H, WIDTH, BK)
                if GATE.form == "concatenated":
                    ups = _weights(at + I * LAYOUT.stride_n, n, k, I, H, BN, BK)
                # changes layout, behind a barrier: the weights are asked for before
                a = widen(tl.load(row + k, mask=k < H, other=0.0), tl.float32)
                gate += _products(
                    gates, scales, a, x_scale, m, k0, END, H, LAYOUT, STRIDE_XG, 0, WIDTH, BK, PARTS
                )
                if GATE.form == "concatenated":
                    up += _products(
                        ups, scales, a, x_scale, n, k0, I, H, LAYOUT, STRIDE_XG, I, BN, BK, PARTS
                    )
        scale = tl.load(slot_weight + slot).to(tl.float32) if WEIGHT_ON_INPUT else 1.0
        gate, up = tl.sum(gate, axis=1) * scale, tl.sum(up, axis=1) * scale
        if BIAS:
            at = bias + expert * INNER + m
            gate += tl.load(at, mask=m < END, other=0.0).to(tl.float32)
            if GATE.form == "concatenated":
                up += tl.load(at + I, mask=n < I, other=0.0).to(tl.float32)
        if GATE.form == "interleaved":
            gate, up = gate.reshape(BN, 2).split()
        elif GATE.form == "ungated":
            up = 1.0
        value, _, _ = glu(gate, up, GATE)
        tl.store(act + slot * I + n, value, mask=n < I)


@triton.jit
def decode_down_kernel(
    act, w, scales, zeros, table, bias, index, slot_weight, out,
    LAYOUT: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    choices = tl.arange(0, KP)
    first = token * TOP_K
    experts = tl.load(index + first + choices, mask=choices < TOP_K, other=-1).to(tl.int64)
    acc = tl.zeros([BN, PARTS], dtype=tl.float32)
    biases = tl.zeros([BN], dtype=tl.float32)
    STEPS: tl.constexpr = (I + BK - 1) // BK
    for step in tl.range(0, TOP_K * STEPS, num_stages=STAGES):
        slot = first + step // STEPS
        expert = tl.sum(tl.where(choices == step // STEPS, experts, 0))
        live = (expert >= 0) & (expert < E)
        width, height = tl.where(live, I, 0), tl.where(live, H, 0)  # loads nothing where dropped
        k0 = step % STEPS * BK
        k = k0 + tl.arange(0, BK)
        a = tl.load(act + slot * I + k, mask=k < width, other=0.0)
        if WEIGHTED:
            scale = tl.load(slot_weight + slot, mask=live, other=0.0).to(tl.float32)
            a *= scale
        at = w + expert * LAYOUT.stride_e + n[:, None] * LAYOUT.stride_n
        at += k[None, :] * LAYOUT.stride_k
        weights = tl.load(at, mask=(n[:, None] < H) & (k[None, :] < width), other=0.0)
        own = scales
        if scales is not None:
            own += expert * LAYOUT.scale_e
        acc += _products(weights, own, a, None, n, k0, height, width, LAYOUT, 0, 0, BN, BK, PARTS)
        if BIAS:
            value = tl.load(bias + expert * H + n, mask=(n < height) & (k0 == 0), other=0.0)
            value = value.to(tl.float32)
            biases += value * scale if WEIGHTED else value
    at, value = out + token.to(tl.int64) * H + n, tl.sum(acc, axis=1)
    if BIAS:
        value += biases
    tl.store(at, value.to(out.dtype.element_ty), mask=n < H)


def decodes(top_k_index: Tensor, gate_up_proj: Tensor | Packed, down_proj: Tensor | Packed) -> bool:
    """Whether the slots are so few that their experts hardly repeat and a sort would not pay."""
    tokens, top_k = top_k_index.shape
    few = tokens == 1 or 4 * tokens * top_k <= gate_up_proj.shape[0]
    if isinstance(gate_up_proj, Packed):
        return tokens > 0 and few
    by_rows = 1 in gate_up_proj.stride()[1:] and 1 in down_proj.stride()[1:]
    return tokens > 0 and few and by_rows


def _block(size: int, k: int, layout: Layout, *, choices: int = 0) -> dict[str, int]:
    """A program's columns, the block of its reduction, the sums it keeps of that, its warps, and
    how many blocks are on their way; from docs/kernels.md's sweeps. `choices` of a token, padded to
    a power of two, are summed by the second product."""
    down = choices > 0
    group = layout.group or (BLOCK if layout.scale_e else 0)  # of the reduction share a scale
    k, stages = power_of_two(k), 1
    if INTERPRET:
        bn, bk, warps = 16, max(64, group), 4
    elif layout.ptx and down:
        bn = max(1, min(8, 64 // choices))  # a program multiplies all choices at once
        warps = 8 if k > 1024 and choices > 4 else 4
        bk = min(512 if layout.format == "int4" else 1024, k)
    elif layout.ptx and k <= 2048:
        bn, bk, warps = 4, min(1024, k), 1
    elif layout.ptx:
        bn, bk, warps, stages = 8 if k > 4096 else 4, 512, 1, 3
    elif layout.format and down:
        bn, bk, warps = max(1, min(4, 32 // choices)), min(256, k), 4
    elif layout.stride_k != 1:
        wide = 1 if down or group else 2
        bn, bk, warps = wide * 64 // size, min((1024 if down else wide * 256) // size, k), 8
    elif down:
        bk = min(2048 // size, k)
        bn, warps = 8 // size, max(2, bk // 512) if size == 1 else 4
        stages = 4 if k <= 1024 else 1
    else:
        bn, bk, warps = {1: (4, 512, 4), 2: (1, 1024, 8), 4: (2, 512, 4)}[size]
        bk = min(bk, k)
    parts = max(1, bk // group) if group else bk
    return {"BN": bn, "BK": bk, "PARTS": parts, "STAGES": stages, "num_warps": warps}


@compiled_together
def decode(
    x: Tensor,
    gate_up_proj: Tensor | Packed,
    down_proj: Tensor | Packed,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on_input: bool,
    activation: str = "silu",
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """fused_experts [T, H] -> [T, H] for the cases that `decodes` accepts; nothing is kept. Scales
    are of FP8 weights, x_scale float32 [T, ceil(H / 128)] of x in FP8; then out is bfloat16."""
    tokens, hidden = x.shape
    top_k = top_k_index.shape[1]
    inner = down_proj.shape[2]
    if isinstance(gate_up_proj, Packed) and (x.stride(0) % 2 or x.data_ptr() % 8):
        x = x.clone(memory_format=torch.contiguous_format)  # pairs of a row are loaded at once
    first = weight_operand(gate_up_proj, gate_up_scale)
    second = weight_operand(down_proj, down_scale)
    gate_up, down = _launches(
        hidden, inner, down_proj.shape[0], top_k, weight_on_input, activation,
        gate_up_bias is not None, down_bias is not None, first.data.element_size(),
        (x.stride(0), 0, 0) if x_scale is None else (x.stride(0), *x_scale.stride()),
        first.layout, second.layout, chips.chip(x.device).ptx,
    )  # fmt: skip
    act = x.new_empty((tokens * top_k, inner), dtype=torch.float32)
    out = x.new_empty(x.shape, dtype=x.dtype if x_scale is None else torch.bfloat16)
    grid = (-(-inner // gate_up.constants["BN"]), tokens * top_k)
    x = x if x_scale is None else readable(x)
    gate_up(grid, x, x_scale, *first[:-1], gate_up_bias, top_k_index, top_k_weights, act)
    grid = (-(-hidden // down.constants["BN"]), tokens)
    down(grid, act, *second[:-1], down_bias, top_k_index, top_k_weights, out)
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
    x_strides: tuple[int, int, int],
    gate_up: Layout,
    down: Layout,
    ptx: bool,
) -> tuple[Launch, Launch]:
    """Of the two kernels."""
    sizes = {"H": hidden, "I": inner, "E": experts, "TOP_K": top_k}
    choices = power_of_two(top_k)
    first = Launch(
        decode_gate_up_kernel,
        **dict(zip(("STRIDE_X", "STRIDE_XS", "STRIDE_XG"), x_strides)),
        LAYOUT=gate_up, **sizes, WEIGHT_ON_INPUT=weight_on_input,
        BIAS=gate_up_bias, GATE=gate_of(activation, ptx),
        **_block(itemsize, hidden, gate_up),
    )  # fmt: skip
    second = Launch(
        decode_down_packed_kernel if down.format else decode_down_kernel,
        LAYOUT=down, **sizes, KP=choices, WEIGHTED=not weight_on_input,
        BIAS=down_bias, **_block(itemsize, inner, down, choices=choices),
    )  # fmt: skip
    return first, second
