"""FP8 weights with block scales, widened a few experts at a time.

The kernels of `weights.py` widen a tile for every row tile that meets it. Where an expert has many
rows that costs more than writing its weights out once and reading them at full speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .groups import group_tiles
from .launch import cdiv, launches
from .tiles import LowRank
from .weights import _BLOCK, BLOCK, readable, widen, widen_scale

ROWS = 512
"""An expert's, from which on it pays."""
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


_launches = launches(dequantize_kernel)


def dequantize(weight: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Writes weight e4m3 [E, N, K] times the scales [E, ceil(N / 128), ceil(K / 128)] of its blocks
    into `out`, both contiguous, and returns it."""
    experts, n, k = weight.shape
    scale_e, scale_n, scale_k = scale.stride()
    start = _launches(
        SCALE_E=scale_e, SCALE_N=scale_n, SCALE_K=scale_k, N=n, K=k, BN=32, num_warps=4
    )  # fmt: skip
    start((cdiv(n, 32), cdiv(k, BLOCK), experts), readable(weight), readable(scale), out)
    return out


def few_at_a_time(
    weight: Tensor,
    scale: Tensor | None,
    order: ExpertOrder,
    dtype: torch.dtype,
    low_rank: LowRank | None = None,
) -> Iterator[tuple[Tensor, Tensor | None, ExpertOrder]]:
    """What kernels multiply one after the other for all rows of `order`: (weight, its scales or
    None, the order of the rows that it is for). Of FP8 experts with many rows a few in `dtype`, in
    memory that the next ones overwrite; else, or with an update of all, everything as it is."""
    (experts, n, k), slots = weight.shape, order.row_to_slot.numel()
    few = slots < ROWS * experts or low_rank is not None
    if scale is None or few or not weight.is_contiguous():
        yield weight, scale, order
        return
    share = max(1, min(experts, BYTES // (n * k * dtype.itemsize)))
    share = next(s for s in range(share, 0, -1) if experts % s == 0)  # equal: so are their tiles
    whole = weight.new_empty(share, n, k, dtype=dtype)
    numel = ExpertOrder.numel(slots, share, order.block_m)
    for first in range(0, experts, share):
        part = slice(first, first + share)
        dequantize(weight[part], scale[part], whole)
        offsets = order.expert_offsets[first : first + share + 1]
        buffer = offsets.new_empty(numel)
        tiles = group_tiles(offsets, slots, order.block_m, buffer)
        rows = {"row_to_slot": order.row_to_slot, "slot_to_row": order.slot_to_row}
        yield whole, None, replace(tiles, **rows)
