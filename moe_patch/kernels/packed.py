"""Weights in 4 bits as the grouped kernels read them: `formats.packed.Packed`, K-major or turned.

A byte has two codes, neighbours in memory. A code stands for a value, and a group of 32 to 128
neighbours shares a scale. A kernel looks values up, or computes them, scales them in float32 and
rounds them to the rows' dtype before it multiplies: the bits that dequantised weights have. (decode
sums over a group first, and scales the sum.)
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.packed import FORMATS, Packed
from . import chips
from .boxes import box
from .tiling import Layout
from .widen import widen_scale

COMPUTED = "mxfp4", "int4"
"""Formats whose values a kernel computes. Those of others it looks up."""


def operand(weight: Packed, bn: int, bk: int, halves: int) -> tuple[Any, Tensor | None, Layout]:
    """(codes, or the descriptor of their boxes; what they stand for, float32 [16], or None where
    that is computed; how all of it lies), arguments as of `weights.weight_operand`."""
    data, tma, strides, scales = weight.codes, False, weight.codes.stride(), weight.scales.stride()
    if weight.turned:
        block = (1, bk, bn // 2)
        strides, scales = _turned(strides), _turned(scales)
    else:
        block = (1, bn, bk // 2) if halves == 1 else (1, 2, bn, bk // 2)
    if bn:
        data, tma = box(data, block, halves=halves)
    table = values(weight)
    ptx = chips.chip(weight.codes.device).ptx
    k_major = not weight.turned
    return data, table, Layout(*strides, *scales, tma, k_major, weight.format, weight.group, ptx)


def _turned(strides: tuple[int, int, int]) -> tuple[int, int, int]:
    return strides[0], strides[2], strides[1]


def values(weight: Packed) -> Tensor | None:
    """float32 [16]: what codes stand for, or None where kernels compute that."""
    return None if weight.format in COMPUTED else _table(weight.format, weight.codes.device)


@functools.lru_cache
def _table(format: str, device: torch.device) -> Tensor:
    """float32 [16]: what codes stand for."""
    return torch.tensor(FORMATS[format].values, dtype=torch.float32, device=device)


PAIR_UNIT = 0.5642767
"""Factor that NF4_PAIRS lack."""
NF4_PAIRS = (
    -1.7734375, -1.234375, -0.9296875, -0.69921875, -0.50390625, -0.328125, -0.1611328125, 0.0,
    0.140625, 0.28515625, 0.4375, 0.59765625, 0.78125, 0.99609375, 1.28125, 1.7734375,
)  # fmt: skip
"""bfloat16 numbers that stand for NF4's values. Of normal weights their errors have an rms of 1e-3
of the weights' (where rounding scaled weights, as everywhere, costs 1.7e-3) and a mean of 2e-5. The
mean counts most: where what weights multiply is positive, as squared activations are, the errors of
all of them add up. The numbers with the least rms, 8e-4, have a mean of 4e-4, and broke the parity
law there."""


def pair_unit(format: str) -> float:
    """Factor that values of `pairs_of_codes` lack; those of other formats are exact."""
    return PAIR_UNIT if format == "nf4" else 1.0


def pairs_of_codes(weight: Packed) -> Tensor:
    """int32 [256]: what both codes of a byte stand for, divided by `pair_unit`, in bfloat16, the
    low half's below."""
    return _pairs(weight.format, weight.codes.device)


@functools.lru_cache
def _pairs(format: str, device: torch.device) -> Tensor:
    found = NF4_PAIRS if format == "nf4" else FORMATS[format].values
    values = torch.tensor(found, dtype=torch.float64)
    bits = values.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return (bits.repeat(16) | bits.repeat_interleave(16) << 16).to(device)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")


_LOOK_UP: tl.constexpr = tl.constexpr(
    "{ .reg .u32 code;"
    + "".join(
        f"shr.u32 code, $8, {4 * place}; "
        f"shfl.sync.idx.b32 ${place // 2 + place % 2 * 4}, $9, code, 0x1f, 0xffffffff; "
        for place in range(8)
    )
    + "}"
)
"""Of four bytes: what their low halves stand for, then their high ones. Lane l of a warp has the
value of code l % 16, and a shuffle reads no more than five bits of the lane it is to ask."""
_E2M1: tl.constexpr = tl.constexpr(
    "{ .reg .b32 w, x; shr.u32 w, $8, 8; "
    + "".join(
        f"and.b32 x, {'$8' if place < 2 else 'w'}, {0x000F000F << place % 2 * 4:#x}; "
        f"mul.lo.u32 x, x, {0x1040 >> place % 2 * 4:#x}; "
        f"and.b32 ${place // 2 + place % 2 * 4 + 2}, x, 0x81C00000; "
        "shl.b32 x, x, 16; "
        f"and.b32 ${place // 2 + place % 2 * 4}, x, 0x81C00000; "
        for place in range(4)
    )
    + "}"
)
"""Of four bytes, as `_LOOK_UP`: what they stand for, times 2 ** -126. Two codes that are 16 bits
apart are multiplied at once, so that the sign comes to bit 15 and the others to bits 8 to 6."""
_INT4: tl.constexpr = tl.constexpr(
    "{ .reg .b32 w, x; .reg .f32 f; shr.u32 w, $8, 16; "
    + "".join(
        f"lop3.b32 x, {'$8' if place < 4 else 'w'}, {15 << place % 4 * 4:#x}, 0x4B000000, 0xEA; "
        f"mov.b32 f, x; fma.rn.f32 ${place // 2 + place % 2 * 4}, f, "
        f"0f{_bits(16.0 ** -(place % 4)):08X}, 0f{_bits(-(2.0 ** (23 - place % 4 * 4))):08X}; "
        for place in range(8)
    )
    + "}"
)
"""Of four bytes, as `_LOOK_UP`: their codes, where they are, behind 2 ** 23."""
_OWN_VALUE: tl.constexpr = tl.constexpr(
    "{ .reg .u32 lane; .reg .u64 at; mov.u32 lane, %laneid; and.b32 lane, lane, 15; "
    "mad.wide.u32 at, lane, 4, $1; ld.global.nc.f32 $0, [at]; }"
)


@triton.jit
def decoded(codes, table, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """[R, 2 C] float32, not scaled, of bytes [R, C] with two codes each, the first in the low half.

    "mxfp4": e2m1, times 2 ** -126; "int4": the code itself; else from the table.
    """
    if PTX:
        if FORMAT == "mxfp4" or FORMAT == "int4":
            ptx: tl.constexpr = _E2M1 if FORMAT == "mxfp4" else _INT4
            low, high = tl.inline_asm_elementwise(
                ptx, "=f,=f,=f,=f,=f,=f,=f,=f,r", [codes],
                dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            own = tl.inline_asm_elementwise(
                _OWN_VALUE, "=f,l", [table], dtype=tl.float32, is_pure=True, pack=1
            )
            low, high = tl.inline_asm_elementwise(
                _LOOK_UP, "=f,=f,=f,=f,=f,=f,=f,=f,r,f,f,f,f", [codes, own],
                dtype=(tl.float32, tl.float32), is_pure=False, pack=4,
            )  # fmt: skip
        return tl.join(low, high).reshape(codes.shape[0], 2 * codes.shape[1])
    else:
        code = tl.join(codes & 15, codes >> 4).reshape(codes.shape[0], 2 * codes.shape[1])
        if FORMAT == "mxfp4":
            bits = code.to(tl.int32)
            return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
        elif FORMAT == "int4":
            return code.to(tl.float32)
        else:
            return tl.load(table + code.to(tl.int32))


@triton.jit
def load_groups(
    weight, expert, rows, inside, first, END, LAYOUT: tl.constexpr,
    STRIDE_R: tl.constexpr, STRIDE_C: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Scales [R, G] and zeros, as they are stored, of the groups in columns `first` to `first` + C,
    of END, of rows `rows` [R] of the expert's weight as it lies, where `inside` [R]; `expert` may
    be [R, 1], too. Those of its row r and group g lie at r * STRIDE_R + g * STRIDE_C. Without
    zeros: scales twice."""
    GROUPS: tl.constexpr = C // LAYOUT.group if LAYOUT.group < C else 1
    group = first // LAYOUT.group + tl.arange(0, GROUPS)
    at = expert.to(tl.int64) * LAYOUT.scale_e
    at += rows[:, None] * STRIDE_R + group[None, :] * STRIDE_C
    mask = inside[:, None] & (group[None, :] < END // LAYOUT.group)
    scale = tl.load(weight.scales + at, mask=mask, other=0)
    if weight.zeros is not None:
        return scale, tl.load(weight.zeros + at, mask=mask, other=0)
    else:
        return scale, scale


@triton.jit
def in_groups(value, scale, zero, weight, FORMAT: tl.constexpr):
    """`decoded` codes [R, C], less their zeros, as groups that share a scale: ([R, G, C / G],
    scales [R, G] in float32) by what `load_groups` returned."""
    GROUPS: tl.constexpr = scale.shape[1]
    value = value.reshape(value.shape[0], GROUPS, value.shape[1] // GROUPS)
    if FORMAT == "int4":
        if weight.zeros is not None:
            value -= zero.to(tl.float32)[:, :, None]
        else:
            value -= 8.0
    return value, widen_scale(scale).to(tl.float32)


@triton.jit
def _scaled(value, scale, zero, weight, FORMAT: tl.constexpr):
    """[R, C] float32, arguments as of `in_groups`."""
    R: tl.constexpr = value.shape[0]
    C: tl.constexpr = value.shape[1]
    value, scale = in_groups(value, scale, zero, weight, FORMAT)
    if FORMAT == "mxfp4":
        value *= 8.507059173023462e37  # 2**126: the exponents' biases are 1 and 127
    return (value * scale[:, :, None]).reshape(R, C)


@triton.jit
def load_packed(
    weight, expert, n0, k0, LAYOUT: tl.constexpr,
    N_END: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """As `load_weight`, of weights in 4 bits, in float32."""
    FORMAT: tl.constexpr = LAYOUT.format
    PTX: tl.constexpr = LAYOUT.ptx if weight.table is not None else False
    if LAYOUT.k_major:
        column = tl.arange(0, HALVES * BN)
        n = n0 + column % BN
        rows, inside = n + column // BN * N_END, n < N_END
        k = k0 // 2 + tl.arange(0, BK // 2)
        if LAYOUT.tma:
            if HALVES == 2:
                codes = weight.data.load([expert, 0, n0, k0 // 2]).reshape(2 * BN, BK // 2)
            else:
                codes = weight.data.load([expert, n0, k0 // 2]).reshape(BN, BK // 2)
        else:
            at = weight.data + expert.to(tl.int64) * LAYOUT.stride_e
            at += rows[:, None] * LAYOUT.stride_n + k[None, :] * LAYOUT.stride_k
            codes = tl.load(at, mask=inside[:, None] & (k[None, :] < K // 2), other=0)
        value = decoded(codes, weight.table, FORMAT, PTX)
        scale, zero = load_groups(
            weight, expert, rows, inside, k0, K, LAYOUT, LAYOUT.scale_n, LAYOUT.scale_k, BK
        )
        return _scaled(value, scale, zero, weight, FORMAT).T
    else:
        tl.static_assert(HALVES == 1)
        rows = k0 + tl.arange(0, BK)
        inside = rows < K
        n = n0 // 2 + tl.arange(0, BN // 2)
        if LAYOUT.tma:
            codes = weight.data.load([expert, k0, n0 // 2]).reshape(BK, BN // 2)
        else:
            at = weight.data + expert.to(tl.int64) * LAYOUT.stride_e
            at += rows[:, None] * LAYOUT.stride_k + n[None, :] * LAYOUT.stride_n
            codes = tl.load(at, mask=inside[:, None] & (n[None, :] < N_END // 2), other=0)
        value = decoded(codes, weight.table, FORMAT, PTX)
        scale, zero = load_groups(
            weight, expert, rows, inside, n0, N_END, LAYOUT, LAYOUT.scale_k, LAYOUT.scale_n, BN
        )
        return _scaled(value, scale, zero, weight, FORMAT)
