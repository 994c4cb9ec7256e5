"""Back from expert order to tokens: each token sums its K rows in float32, in choice order."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launches


@triton.jit
def combine_kernel(
    rows, slot_to_row, slot_weight, out,
    H: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        row = tl.load(slot_to_row + slot)
        at = rows + row.to(tl.int64) * H + h
        value = tl.load(at, mask=(h < H) & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(slot_weight + slot).to(tl.float32)
            value = tl.where(row >= 0, value, 0.0)
        acc += value
    tl.store(out + token * H + h, acc.to(out.dtype.element_ty), mask=h < H)


_combine = launches(combine_kernel)


def combine(rows: Tensor, slot_to_row: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over choices of weights[t, k] * rows[slot_to_row[t * top_k + k]] -> [T, H].

    rows [S, H], slot_to_row [S], weights [T, K] or None for a plain sum; dropped slots count zero.
    """
    tokens, hidden = slot_to_row.numel() // top_k, rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    if tokens:
        start, columns = _prepare(tokens >= 256, hidden, top_k, weights is not None)
        weights = rows if weights is None else weights
        start((tokens, columns), rows, slot_to_row, weights, out)
    return out


@functools.lru_cache(1024)
def _prepare(many: bool, hidden: int, top_k: int, weighted: bool) -> tuple[Launch, int]:
    """(combine_kernel, made ready, and the programs of a token)."""
    block = min(2048 if many else 256, 1 << (hidden - 1).bit_length())
    start = _combine(H=hidden, TOP_K=top_k, WEIGHTED=weighted, BLOCK=block, num_warps=4)
    return start, -(-hidden // block)


@triton.jit(do_not_specialize=["num_slots"])
def sum_partials_kernel(
    partials, start, slot_to_row, out, num_slots,
    COLUMNS: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slot_to_row + slot, mask=slot < num_slots, other=-1)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        acc += tl.load(start + slot, mask=row >= 0, other=0.0)
    for column in range(COLUMNS):
        acc += tl.load(partials + row.to(tl.int64) * COLUMNS + column, mask=row >= 0, other=0.0)
    tl.store(out + slot, acc.to(out.dtype.element_ty), mask=slot < num_slots)


_sum_partials = launches(sum_partials_kernel)


def sum_partials(
    partials: Tensor, slot_to_row: Tensor, out: Tensor, start: Tensor | None = None
) -> Tensor:
    """out[slot] = start[slot] + the sum of partials[slot_to_row[slot], :] in column order; zero for
    dropped slots. `start` [S] is float32."""
    slots = slot_to_row.numel()
    if slots:
        options = {"COLUMNS": partials.shape[1], "START": start is not None, "BLOCK": 256}
        launch = _sum_partials(**options, num_warps=4)
        launch((-(-slots // 256),), partials, start, slot_to_row, out, slots)
    return out
