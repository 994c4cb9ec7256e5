"""Weights of 8 or 4 bits, widened a few experts at a time.

The kernels of `weights.py` widen a tile for every row tile that meets it. Where an expert has many
rows that costs more than writing its weights out once and reading them at full speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.packed import Packed
from ..order import ExpertOrder
from . import packed_products
from .groups import group_tiles
from .launch import cdiv, launches
from .low_rank import LowRank
from .packed import COMPUTED, load_packed
from .tiles import ROLES, W8, choose
from .weights import _BLOCK, BLOCK, Weight, weight_operand
from .widen import readable, widen, widen_scale

ROWS = 512
"""An expert's, from which on it pays."""
ROWS_ON_HOPPER = 1024
"""The same of FP8 weights, where a kernel in hopper/ widens them on their way."""
ROWS_LOOKED_UP, ROWS_COMPUTED = 1024, 2048
"""The same in a forward whose products unpack codes in registers (packed_products.py)."""
BYTES = 1 << 28
"""Of the widened weights that there are at a time; one expert at least."""


@triton.jit
def dequantize_kernel(
    w, scales, out,
    SCALE_E: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """w, out [E, N, K], contiguous; BN divides a block."""
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    at = expert * (N * K) + n[:, None] * K + k[None, :]
    mask = (n[:, None] < N) & (k[None, :] < K)
    block = tl.program_id(0) * BN // _BLOCK * SCALE_N + tl.program_id(1) * SCALE_K
    scale = widen_scale(tl.load(scales + expert * SCALE_E + block))
    value = widen(tl.load(w + at, mask=mask, other=0.0), tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def unpack_kernel(
    codes, scales, zeros, table, out,
    LAYOUT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """codes [E, N, K / 2] and out [E, N, K], contiguous."""
    expert, n0, k0 = tl.program_id(2), tl.program_id(0) * BN, tl.program_id(1) * BK
    weight = Weight(codes, scales, zeros, table)
    value = load_packed(weight, expert, n0, k0, LAYOUT, N, K, BN, BK, 1).T
    n, k = n0 + tl.arange(0, BN), k0 + tl.arange(0, BK)
    at = out + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


_launches = launches(dequantize_kernel)
_unpacks = launches(unpack_kernel)


def dequantize(weight: Tensor | Packed, scale: Tensor | None, out: Tensor) -> Tensor:
    """Writes what a weight [E, N, K] stands for into `out`, and returns it; both are contiguous.

    It is 4 bits wide, or e4m3 with scales [E, ceil(N / 128), ceil(K / 128)] of its blocks.
    """
    experts, n, k = weight.shape
    if isinstance(weight, Packed):
        # what is contiguous comes by pointers: 8 to 16 % faster than boxes of 16 x 128
        bk = 128 if weight.turned else 256
        operand = weight_operand(weight, None, 16 if weight.turned else 0, bk)
        start = _unpacks(LAYOUT=operand.layout, N=n, K=k, BN=16, BK=bk, num_warps=4)
        start((cdiv(n, 16), cdiv(k, bk), experts), *operand[:-1], out)
        return out
    scale_e, scale_n, scale_k = scale.stride()
    start = _launches(
        SCALE_E=scale_e, SCALE_N=scale_n, SCALE_K=scale_k, N=n, K=k, BN=32, num_warps=4
    )  # fmt: skip
    start((cdiv(n, 32), cdiv(k, BLOCK), experts), readable(weight), readable(scale), out)
    return out


class Part(NamedTuple):
    """What kernels multiply by in one launch, for some of the experts."""

    weight: Tensor | Packed
    scale: Tensor | None
    bias: Tensor | None
    low_rank: LowRank | None
    order: ExpertOrder
    """Of the rows that are theirs."""


def few_at_a_time(
    weight: Tensor | Packed,
    scale: Tensor | None,
    order: ExpertOrder,
    dtype: torch.dtype,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    *,
    backward: bool = True,
) -> Iterable[Part]:
    """What kernels multiply by, one after the other, for all rows of `order`. Of experts in 8 or 4
    bits with many rows a few in `dtype`, in memory that the next ones overwrite; else everything
    as it is. FP8 weights with an update, and those of a forward, are left as they are."""
    everything = Part(weight, scale, bias, low_rank, order)
    plain = scale is None and not isinstance(weight, Packed)
    if plain or not widens(weight, scale, order, dtype, low_rank, backward=backward):
        return (everything,)
    return _widened(everything, dtype)


def widens(
    weight: Tensor | Packed,
    scale: Tensor | None,
    order: ExpertOrder,
    dtype: torch.dtype,
    low_rank: LowRank | None,
    *,
    backward: bool,
) -> bool:
    """Whether `few_at_a_time` does so with such weights and rows."""
    rows = order.row_to_slot.numel() // (order.expert_offsets.numel() - 1)
    if rows < ROWS:
        return False
    if isinstance(weight, Packed):
        in_registers = not backward and packed_products.supported(weight, order, dtype, low_rank)
        later = ROWS_COMPUTED if weight.format in COMPUTED else ROWS_LOOKED_UP
        return not in_registers or rows >= later
    if scale is None or low_rank is not None or not (weight.is_contiguous() and backward):
        return False
    _, n, k = weight.shape
    tile = choose("gemm" + W8, order.block_m, rows, k, n, dtype, weight.device)  # its transpose
    return tile.warps != ROLES or rows >= ROWS_ON_HOPPER


def _widened(everything: Part, dtype: torch.dtype) -> Iterator[Part]:
    weight, scale, bias, low_rank, order = everything
    (experts, n, k), slots = weight.shape, order.row_to_slot.numel()
    share = max(1, min(experts, BYTES // (n * k * dtype.itemsize)))
    share = next(s for s in range(share, 0, -1) if experts % s == 0)  # equal: so are their tiles
    whole = torch.empty(share, n, k, dtype=dtype, device=weight.device)
    numel = ExpertOrder.numel(slots, share, order.block_m)
    for first in range(0, experts, share):
        part = slice(first, first + share)
        dequantize(weight[part], None if scale is None else scale[part], whole)
        offsets = order.expert_offsets[first : first + share + 1]
        buffer = offsets.new_empty(numel)
        tiles = group_tiles(offsets, slots, order.block_m, buffer)
        rows = {"row_to_slot": order.row_to_slot, "slot_to_row": order.slot_to_row}
        yield Part(
            whole, None, None if bias is None else bias[part],
            None if low_rank is None else low_rank[part], replace(tiles, **rows),
        )  # fmt: skip
