"""Weights as the grouped kernels read them: logical [E, N, K] with any strides.

They have the rows' dtype, or they are FP8: e4m3 in blocks of 128 x 128, each with a scale in
float32 or e8m0. Those are widened to the rows' dtype, which is exact, and the scale of a block
multiplies its product in float32, so that no scaled weight is rounded or stored. Scales are logical
[E, ceil(N / 128), ceil(K / 128)], with any strides, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chips
from .boxes import box
from .tiles import dot

BLOCK = 128
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


def readable(weight: Tensor) -> Tensor:
    """What a kernel is given: e4m3 as its bits where the chip cannot convert it, e8m0 always."""
    if weight.dtype == torch.float8_e8m0fnu:
        return weight.view(torch.uint8)
    if weight.dtype == torch.float8_e4m3fn and not chips.chip(weight.device).fp8:
        return weight.view(torch.uint8)
    return weight


def weight_operand(
    weight: Tensor, bn: int, bk: int, *, halves: int = 1, begins: tuple[int, ...] = ()
) -> tuple[Any, bool, bool]:
    """A logical [E, N, K] weight as a kernel argument: (tensor or TMA descriptor, is TMA, K-major).

    halves = 2: blocks of 2 * bn columns, bn of each half of N; K-major weights only. `begins`:
    columns past which a kernel counts its blocks, besides 0; of weights that are not K-major.
    """
    if weight.element_size() == 1:
        weight = readable(weight)
    if weight.stride(2) == 1:
        block = (1, bn, bk) if halves == 1 else (1, 2, bn, bk)
        return *box(weight, block, halves=halves), True
    boxes, tma = box(weight.transpose(1, 2), (1, bk, bn), begins=begins)
    return (boxes, True, False) if tma else (weight, False, False)


@triton.jit
def widen(tile, DTYPE: tl.constexpr):
    """To DTYPE. Exact from e4m3, whose bits (uint8) are taken apart where chips cannot."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.int32)
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        value *= 1.329227995784916e36  # 2**120: the exponents' biases are 7 and 127
        tile = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return tile.to(DTYPE)


@triton.jit
def widen_scale(scale):
    """To float32, from e8m0's bits: 2 ** (bits - 127), NaN for 255."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 0x400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        scale = bits.to(tl.float32, bitcast=True)
    return scale


class Weight(NamedTuple):
    """A logical [E, N, K] weight inside a kernel."""

    data: Any
    """A pointer or a TMA descriptor."""
    scales: Any
    """A pointer, or None."""


@triton.jit
def load_weight(
    weight, expert, n0, k0, LAYOUT: tl.constexpr,
    N_END: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of the weight; zero past N_END and K (TMA: past the tensor).

    HALVES 2: [BK, 2 * BN], columns n0 ... of the first N_END, then the same of the second N_END.
    """
    if LAYOUT.tma:
        if HALVES == 2:
            return weight.data.load([expert, 0, n0, k0]).reshape(2 * BN, BK).T
        elif LAYOUT.k_major:
            return weight.data.load([expert, n0, k0]).reshape(BN, BK).T
        else:
            return weight.data.load([expert, k0, n0]).reshape(BK, BN)
    else:
        column = tl.arange(0, HALVES * BN)
        n = n0 + column % BN
        k = k0 + tl.arange(0, BK)
        at = weight.data + expert.to(tl.int64) * LAYOUT.stride_e + k[:, None] * LAYOUT.stride_k
        at += (n + column // BN * N_END)[None, :] * LAYOUT.stride_n
        if K % BK == 0:
            return tl.load(at, mask=n[None, :] < N_END, other=0.0)
        else:
            return tl.load(at, mask=(n[None, :] < N_END) & (k[:, None] < K), other=0.0)


@triton.jit
def load_scale(
    weight, expert, n0, k0, LAYOUT: tl.constexpr,
    N_END: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Of the columns that `load_weight` loads: one number where one block has them all, else
    [1, HALVES * BN]. n0 - FIRST is a multiple of BN."""
    SCALE_N: tl.constexpr = LAYOUT.scale_n
    at = weight.scales + expert.to(tl.int64) * LAYOUT.scale_e + k0 // _BLOCK * LAYOUT.scale_k
    if BN > _BLOCK or FIRST % BN != 0 or (HALVES == 2 and N_END % BN != 0):  # a seam in the tile
        column = tl.arange(0, HALVES * BN)
        n = n0 + column % BN
        row = (n + column // BN * N_END) // _BLOCK
        return widen_scale(tl.load(at + row * SCALE_N, mask=n < N_END, other=0))[None, :]
    elif HALVES == 2:
        first = widen_scale(tl.load(at + n0 // _BLOCK * SCALE_N))
        second = widen_scale(tl.load(at + (n0 + N_END) // _BLOCK * SCALE_N))
        return tl.where(tl.arange(0, 2 * BN) < BN, first, second)[None, :]
    else:
        return widen_scale(tl.load(at + n0 // _BLOCK * SCALE_N))


@triton.jit
def weight_dot(
    x, acc, weight, expert, n0, k0, LAYOUT: tl.constexpr,
    N_END: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    HALVES: tl.constexpr = 1, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """acc + x [BM, BK] times the columns from n0 on of the expert's weight, at its k0; columns as
    in `load_weight`, FIRST as in `load_scale`. With scales BK divides a block."""
    b = widen(load_weight(weight, expert, n0, k0, LAYOUT, N_END, K, BN, TILE.bk, HALVES), x.dtype)
    PRECISION: tl.constexpr = TILE.precision
    if weight.scales is None:
        return dot(x, b, acc, PRECISION)
    else:
        tl.static_assert(_BLOCK % TILE.bk == 0)
        scale = load_scale(weight, expert, n0, k0, LAYOUT, N_END, BN, HALVES, FIRST)
        return tl.fma(tl.dot(x, b, input_precision=PRECISION), scale, acc)
