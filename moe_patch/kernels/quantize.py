"""Rows to e4m3 with a float32 scale for each 128 columns, gathered into expert order on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch import cdiv, launches
from .tiles import INTERPRET

BLOCK = 128


@triton.jit
def quantize_rows(value, UE8M0: tl.constexpr, INTERPRET: tl.constexpr):
    """(value / scale as e4m3, scale) of [..., 128], its last axis a group: scale = largest / 448,
    UE8M0: the next power of two. A group of zeros has scale 1."""
    largest = tl.max(tl.abs(value), axis=len(value.shape) - 1, keep_dims=True)
    scale = tl.where(largest == 0, 1.0, largest / 448.0)
    if UE8M0:
        bits = scale.to(tl.uint32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0xFF800000).to(tl.float32, bitcast=True)
    value /= scale
    if INTERPRET:  # whose cast loses the carry of a mantissa that rounds up to 2
        bits = value.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        small = tl.abs(value) < 0.015625
        rounded = tl.where(small, (value + 24576.0) - 24576.0, normal)  # a step is 2**-9 there
        nan = tl.full([], 0x7FF00000, tl.uint32).to(tl.float32, bitcast=True)
        value = tl.where(value == value, rounded, nan)
    return value.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["stride_xs", "stride_xg", "stride_q", "rows_end"])
def quantize_kernel(
    x, x_scale, q, scale, row_to_slot, ends, stride_xs, stride_xg, stride_q, rows_end,
    STRIDE_X: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, EXPERTS: tl.constexpr,
    UE8M0: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """x_scale: x is quantised already, and only gathered."""
    first = tl.program_id(0) * ROWS
    end = rows_end
    if EXPERTS > 0:
        end = tl.load(ends + EXPERTS)  # dropped slots stand behind
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    inside = row < end
    source = row
    if GATHER > 0:
        source = tl.load(row_to_slot + row, mask=inside, other=0) // GATHER
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = inside[:, None, None] & (k < K)[None, :, :]
    value = tl.load(
        x + source.to(tl.int64)[:, None, None] * STRIDE_X + k[None], mask=mask, other=0.0
    )
    scale_mask = inside[:, None] & (group * 128 < K)[None, :]
    if x_scale is not None:
        at = source.to(tl.int64)[:, None] * stride_xs + group[None, :] * stride_xg
        found = tl.load(x_scale + at, mask=scale_mask, other=0.0)
    else:
        value, found = quantize_rows(value.to(tl.float32), UE8M0, INTERPRET)
        found = tl.reshape(found, (ROWS, GROUPS))
    tl.store(q + row.to(tl.int64)[:, None, None] * K + k[None], value, mask=mask)
    tl.store(scale + group.to(tl.int64)[None, :] * stride_q + row[:, None], found, mask=scale_mask)


_launches = launches(quantize_kernel)


def quantize(
    x: Tensor,
    x_scale: Tensor | None = None,
    order: ExpertOrder | None = None,
    *,
    gather: int = 0,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """(e4m3 [S, K], float32 scales [S, ceil(K / 128)]) of the rows of x, which are contiguous.

    gather = d: row r of the result is x[row_to_slot[r] // d], and rows of dropped slots are not
    written. With `x_scale` [T, ceil(K / 128)] x is e4m3 already. Scales of one group lie together:
    that is how fp8_gemm reads them best.
    """
    rows, columns = order.row_to_slot.numel() if gather else x.shape[0], x.shape[1]
    groups = cdiv(columns, BLOCK)
    q = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(groups, rows, dtype=torch.float32).t()
    if q.numel() == 0:
        return q, scale
    height, width = (8, 8) if rows >= 1024 else (1, 8)
    start = _launches(
        STRIDE_X=x.stride(0), K=columns, GATHER=gather,
        EXPERTS=order.expert_offsets.numel() - 1 if gather else 0, UE8M0=ue8m0,
        INTERPRET=INTERPRET, ROWS=height, GROUPS=width, num_warps=4,
    )  # fmt: skip
    strides = (0, 0) if x_scale is None else x_scale.stride()
    start(
        (cdiv(rows, height), cdiv(groups, width)),
        x, x_scale, q, scale, order.row_to_slot if gather else None,
        order.expert_offsets if gather else None, *strides, scale.stride(1), rows,
    )  # fmt: skip
    return q, scale
