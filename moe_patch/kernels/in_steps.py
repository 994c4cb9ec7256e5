"""Columns in the orders in which kernels in hopper/ sum over weights in 4 bits."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch import cdiv, launches

STEP = 128
"""Columns of a step."""
LESS = 30
"""Kernels in hopper/ compute 2 ** -30 of mxfp4's values, see `hopper/codes.py`."""
GROUP = STEP // 2
"""Columns that a product of wgmma takes in `hopper/pairs.py`."""
Steps = Literal["halves", "bytes", "words"]
"""The order of a step, by where the two codes of a pair are: one in each half of a word, or both in
a byte (`hopper/codes.py`), where a thread may have every fourth word (`hopper/pairs.py`)."""
_STEP: tl.constexpr = tl.constexpr(STEP)


@triton.jit(do_not_specialize=["rows"])
def in_steps_kernel(
    x, row_to_slot, out, rows,
    STRIDE_X: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out [rows, WIDTH] of x [rows, K], or, with TOP_K, of x [T, K] in expert order."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    source = row
    if TOP_K > 0:
        source = tl.load(row_to_slot + row, mask=row < rows, other=0) // TOP_K
    at = x + source.to(tl.int64)[:, None] * STRIDE_X + column[None, :]
    value = tl.load(at, mask=(row[:, None] < rows) & (column[None, :] < K), other=0.0)
    if STEPS == "words":
        value = value.reshape(BM, 4, 4, 4, 2).permute(0, 1, 3, 2, 4)  # j q p h -> j p q h
    elif STEPS == "bytes":
        value = value.reshape(BM, 4, 2, 2, 4, 2).permute(0, 3, 2, 4, 1, 5)  # q s r p h -> r s p q h
    else:
        value = value.reshape(BM, 4, 2, 2, 2, 4).permute(0, 3, 2, 5, 1, 4)  # q s r h p -> r s p q h
    to = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, value.reshape(BM, _STEP), mask=row[:, None] < rows)


_launches = launches(in_steps_kernel)


def width(k: int) -> int:
    """Columns that K columns take there."""
    return cdiv(k, STEP) * STEP


def in_steps(x: Tensor, steps: Steps, *, gather: ExpertOrder | None = None) -> Tensor:
    """x [R, K] as [R, 128 * ceil(K / 128)], zero past K. With `gather` x [T, K] becomes [S, ...],
    in that expert order."""
    row_to_slot = gather.row_to_slot if gather else None
    rows, k = x.shape if row_to_slot is None else (row_to_slot.numel(), x.shape[1])
    top_k = rows // len(x) if gather else 0
    out = torch.empty(rows, width(k), dtype=x.dtype, device=x.device)
    start = _launches(
        STRIDE_X=x.stride(0), K=k, WIDTH=width(k), TOP_K=top_k, STEPS=steps, BM=16, num_warps=4
    )
    start((cdiv(rows, 16), width(k) // STEP), x, row_to_slot, out, rows)
    return out
