"""Gradient of a grouped GEMM's bias: the sum of each expert's rows, weighted or not."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch import cdiv, launches


@triton.jit
def row_sums_kernel(
    rows, slot_weight, out, row_to_slot, expert_offsets,
    STRIDE: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What a sum over blocks of rows loses is added to the next block (Kahan 1965), so that the
    error does not grow with the rows of an expert."""
    expert = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    total = tl.zeros([BN], dtype=tl.float32)
    lost = tl.zeros([BN], dtype=tl.float32)
    for first in range(begin, end, BM):
        row = first + tl.arange(0, BM)
        inside = row < end
        source = row
        if GATHER > 0 or slot_weight is not None:
            slot = tl.load(row_to_slot + row, mask=inside, other=0)
        if GATHER > 0:
            source = slot // GATHER
        at = rows + source.to(tl.int64)[:, None] * STRIDE + n[None, :]
        value = tl.load(at, mask=inside[:, None] & (n[None, :] < N), other=0.0).to(tl.float32)
        if slot_weight is not None:
            weight = tl.load(slot_weight + slot, mask=inside, other=0.0)
            value *= weight.to(tl.float32)[:, None]
        part = tl.sum(value, axis=0) - lost
        grown = total + part
        lost = (grown - total) - part
        lost = tl.where(lost == lost, lost, 0.0)  # after an infinity
        total = grown
    at = out + expert.to(tl.int64) * N + n
    tl.store(at, total.to(out.dtype.element_ty), mask=n < N)


_launches = launches(row_sums_kernel)


def row_sums(
    rows: Tensor,
    order: ExpertOrder,
    *,
    gather: int = 0,
    slot_weight: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Writes the sum over each expert's rows into `out` [E, N], contiguous, and returns it.

    rows [S, N] are in expert order, or gathered: row r is rows[row_to_slot[r] // gather]. Each is
    multiplied by its slot's weight, of slot_weight [T, K], if there is one. Sums are float32; an
    expert without rows gets exact zeros.
    """
    experts, n = out.shape
    start = _launches(STRIDE=rows.stride(0), N=n, GATHER=gather, BM=32, BN=128, num_warps=4)
    start((cdiv(n, 128), experts), rows, slot_weight, out, order.row_to_slot, order.expert_offsets)
    return out
