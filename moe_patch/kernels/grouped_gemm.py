"""Grouped GEMM over rows in expert order, out[r] = x[r] W[e_r]^T, with gather or scatter fused."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.packed import Packed
from ..order import ExpertOrder
from . import chips, packed_products
from .boxes import Lying, box, parts_box, rows_box
from .launch import Launch, cdiv
from .low_rank import NO_UPDATE, LowRank, Update, add_update, update_boxes, update_operand
from .tiles import ROLES, Product, Tile, choose, plan_of, portable, tail_for
from .tiling import dot_precision, launches, load_rows, place
from .weights import Weight, boxed_weight, suffix, weight_dot, weight_operand


@triton.jit
def grouped_gemm_kernel(
    x, w, scales, zeros, table, bias, out, low_side, low_b,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    LAYOUT: tl.constexpr, STRIDE_X: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BIAS: tl.constexpr, X_TMA: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """GATHER 0: x in expert order; d > 0: row r is x[row_to_slot[r] // d]."""
    BM: tl.constexpr = TILE.bm
    BN: tl.constexpr = TILE.bn
    BK: tl.constexpr = TILE.bk
    pid = tl.program_id(0)
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    if pid >= tl.load(num_tiles) * NUM_N:
        return
    expert, first, end, column = place(
        pid, tile_expert, tile_row, expert_offsets, NUM_N, 0, BM, TILE.group_m
    )
    rows = first + tl.arange(0, BM)
    mask = rows < end
    if GATHER > 0 or SCATTER:
        slot = tl.load(row_to_slot + rows, mask=mask, other=0)
    if not X_TMA:
        source = slot // GATHER if GATHER > 0 else tl.where(mask, rows, first)
        x_rows = x + source.to(tl.int64)[:, None] * STRIDE_X

    weight, update = Weight(w, scales, zeros, table), Update(low_side, low_b)
    n0 = column * BN
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        if X_TMA:  # rows past the expert's end belong to the next one: computed, never stored
            a = x.load([first, k])
            if TILE.upcast:
                a = a.to(tl.float32)
        else:
            a = load_rows(x_rows, k, K, TILE)
        acc = weight_dot(a, acc, weight, expert, n0, k, LAYOUT, N, K, BN, TILE)

    n = n0 + tl.arange(0, BN)
    if FACTOR.rank > 0:
        acc = add_update(acc, update, expert, rows, mask, n, n < N, FACTOR, TILE)
    if BIAS:
        value = tl.load(bias + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)
        acc += value.to(tl.float32)[None, :]
    n = n[None, :]
    to = slot if SCATTER else rows
    at = to.to(tl.int64)[:, None] * N + n
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask[:, None] & (n < N))


_launches = launches(grouped_gemm_kernel)


@functools.lru_cache(1024)
def _launch_on_hopper(tile: Tile, weight: Lying, rank: int, tail: int) -> Launch:
    from .hopper.gemm import Plan, gemm_hopper_kernel

    plan = Plan(**plan_of(tile, weight, rank), tail=tail)
    return Launch(gemm_hopper_kernel, PLAN=plan, num_warps=4)


@functools.lru_cache(1024)
def _launch_turned(tile: Tile, weight: Lying, rank: int, tail: int) -> Launch:
    from .hopper.turned import STAGES, Plan, gemm_turned_kernel

    _, n, k = weight.shape
    plan = Plan(n, k, tile.group_m, STAGES, listed=tile.bm, tail=tail, rank=rank)
    return Launch(gemm_turned_kernel, PLAN=plan, num_warps=4)


def multiply_a(x: Tensor, update: LowRank, order: ExpertOrder, gather: int = 0) -> None:
    """Writes x A^T into an update's `side`; arguments as of `grouped_gemm`."""
    grouped_gemm(x, update.a, order, gather=gather, out=update.side)


def _on_hopper(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    out: Tensor,
    tile: Tile,
    update: LowRank | None,
    scale: Tensor | None,
) -> bool:
    """Starts the kernel in hopper/, unless the operands' boxes are not lawful."""
    if order.block_m != tile.bm:
        return False
    tail = tail_for(weight, order.row_to_slot.numel())
    turned = scale is not None and weight.stride(2) != 1  # columns are contiguous
    part = 128 if turned else 64
    x_box, tail_box = parts_box(x, tail, part)
    w_box, scales = boxed_weight(weight, scale, tile.bn, tile.bk)
    out_box = rows_box(out.data_ptr(), out.dtype, out.shape, (64, 64))
    low = update_boxes(update, weight, tile.bn, tail, part)
    if x_box is None or w_box is None or out_box is None or low is None:
        return False
    launch = _launch_turned if turned else _launch_on_hopper
    start = launch(tile, Lying.of(weight), low.rank, tail)
    tiles = order.tile_expert.numel() * cdiv(weight.shape[1], tile.bn)
    start(
        chips.programs(x.device, tiles),
        x_box, tail_box, w_box, scales, low.side, low.tail, low.kept if turned else low.b,
        out if turned else out_box, order.taken,
        order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return True


def grouped_gemm(
    x: Tensor,
    weight: Tensor | Packed,
    order: ExpertOrder,
    *,
    gather: int = 0,
    scatter: bool = False,
    out: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    in_steps: bool = False,
) -> Tensor:
    """Writes x @ weight[e]^T + bias[e] into `out` [S, N] for weight [E, N, K] and returns it.
    `bias` [E, N] is contiguous; `scale` [E, ceil(N / 128), ceil(K / 128)] is of FP8 weights.

    gather = 0: x [S, K] is in expert order; gather = d: row r is x[row_to_slot[r] // d] (d = top_k
    reads tokens, d = 1 slots). scatter: rows go to slot order instead of expert order. Rows of
    dropped slots are not written. With `low_rank` the weight is weight[e] + B[e] A[e].
    `in_steps`: x is an act that gate_up wrote so.
    """
    if order.row_to_slot.numel() == 0:
        return out
    (experts, n, k), dtype = weight.shape, x.dtype
    if isinstance(weight, Packed) and not (gather or scatter):
        if packed_products.supported(weight, order, dtype, low_rank):
            if low_rank:
                by = packed_products.for_steps(low_rank, weight, order) if in_steps else low_rank
                multiply_a(x, by, order)
            packed_products.gemm(x, weight, order, out, bias, in_steps, low_rank)
            return out
    rows = order.row_to_slot.numel() // experts
    name = "gemm" + suffix(weight, scale)
    if low_rank:
        multiply_a(x, low_rank, order, gather)
    product = Product(name, order.block_m, rows, n, k, dtype, x.device)
    tile = choose(*product)
    if tile.warps == ROLES:
        as_it_lies = not (gather or scatter) and bias is None
        if as_it_lies and _on_hopper(x, weight, order, out, tile, low_rank, scale):
            return out
        tile = portable(product)
    operand = weight_operand(weight, scale, tile.bn, tile.bk)
    low = update_operand(low_rank) if low_rank else NO_UPDATE
    rows_in, x_tma = (x, False) if gather else box(x, (tile.bm, tile.bk))
    start = _launches(
        tile, dtype, dot_precision(dtype) if dtype == torch.float32 else "ieee",
        operand.layout, None, FACTOR=low.factor,
        STRIDE_X=x.stride(0), N=n, K=k, GATHER=gather, SCATTER=scatter, BIAS=bias is not None,
        X_TMA=x_tma,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * -(-n // tile.bn),),
        rows_in, *operand[:-1], bias, out, *low.tensors,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    return out
