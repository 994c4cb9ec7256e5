"""Weights as the grouped kernels read them: logical [E, N, K] with any strides.

They have the rows' dtype, or they are FP8: e4m3 in blocks of 128 x 128, each with a scale in
float32 or e8m0. Those are widened to the rows' dtype, which is exact, and the scale of a block
multiplies its product in float32, so that no scaled weight is rounded or stored. Scales are logical
[E, ceil(N / 128), ceil(K / 128)], with any strides, too. (Kernels in hopper/ round scaled weights:
`hopper/widening.py`.)

Or they have 4 bits; `packed.py` reads those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..formats.packed import Packed
from . import packed
from .boxes import box, weight_box
from .packed import load_packed
from .tiles import W4, W8
from .tiling import NO_SCALES, Layout, dot
from .widen import readable, widen, widen_scale

BLOCK = 128
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


class Operand(NamedTuple):
    """A weight as a kernel's arguments, and the constant that says how it lies."""

    data: Any
    """A tensor, or its TMA descriptor."""
    scales: Tensor | None
    zeros: Tensor | None
    table: Tensor | None
    layout: Layout


def suffix(weight: Tensor | Packed, scale: Tensor | None) -> str:
    """Ends the name of the kernel that reads it, in tables of tiles."""
    return W4 if isinstance(weight, Packed) else W8 if scale is not None else ""


def weight_operand(
    weight: Tensor | Packed, scale: Tensor | None, bn: int = 0, bk: int = 0,
    *, halves: int = 1, begins: tuple[int, ...] = (),
) -> Operand:  # fmt: skip
    """A logical [E, N, K] weight, and its scales if it is FP8, for a kernel with blocks [bn, bk],
    or, without, for one that reads it by pointers.

    halves = 2: blocks of 2 * bn columns, bn of each half of N; K-major weights only. `begins`:
    columns past which a kernel counts its blocks, besides 0; of weights that are not K-major.
    """
    if isinstance(weight, Packed):
        data, table, layout = packed.operand(weight, bn, bk, halves)
        return Operand(data, readable(weight.scales), weight.zeros, table, layout)
    strides, scales = weight.stride(), NO_SCALES
    if scale is not None:
        weight, scale, scales = readable(weight), readable(scale), scale.stride()
    data, tma, k_major = weight, False, strides[2] == 1
    if bn and k_major:
        data, tma = box(weight, (1, bn, bk) if halves == 1 else (1, 2, bn, bk), halves=halves)
    elif bn:
        boxes, tma = box(weight.transpose(1, 2), (1, bk, bn), begins=begins)
        data = boxes if tma else weight
    return Operand(data, scale, None, None, Layout(*strides, *scales, tma, k_major))


def boxed_weight(
    weight: Tensor, scale: Tensor | None, bn: int, bk: int
) -> tuple[Any, Tensor | None]:
    """(boxes [bn, bk] of a logical [E, N, K] weight, or None where they are not lawful; its scales,
    contiguous as it lies), for a kernel in hopper/."""
    if scale is None:
        return weight_box(weight, bn, bk), None
    by_columns = weight.stride(2) != 1
    whole = (scale.mT if by_columns else scale).is_contiguous()
    return weight_box(weight, bn, bk) if whole else None, readable(scale)


class Weight(NamedTuple):
    """A logical [E, N, K] weight inside a kernel."""

    data: Any
    """A pointer or a TMA descriptor."""
    scales: Any
    """A pointer, or None."""
    zeros: Any
    """Codes that stand for zero, one where each scale is; a pointer, or None."""
    table: Any
    """float32 [16], what codes stand for; a pointer, or None where it can be computed."""


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
    PRECISION: tl.constexpr = TILE.precision
    if LAYOUT.format != "":
        b = load_packed(weight, expert, n0, k0, LAYOUT, N_END, K, BN, TILE.bk, HALVES)
    else:
        b = load_weight(weight, expert, n0, k0, LAYOUT, N_END, K, BN, TILE.bk, HALVES)
    b = widen(b, x.dtype)
    if weight.scales is None or LAYOUT.format != "":
        return dot(x, b, acc, PRECISION)
    else:
        tl.static_assert(_BLOCK % TILE.bk == 0)
        scale = load_scale(weight, expert, n0, k0, LAYOUT, N_END, BN, HALVES, FIRST)
        return tl.fma(tl.dot(x, b, input_precision=PRECISION), scale, acc)
