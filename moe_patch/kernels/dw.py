"""Weight gradient of a grouped GEMM: dW[e] = sum over the expert's rows r of p_r^T q_r."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from . import chips
from .boxes import Lying, box, rows_box
from .launch import Launch, cdiv, launches
from .tiles import INTERPRET, ROLES, Product, Tile, choose, portable
from .tiling import dot, dot_precision


@triton.jit
def dw_kernel(
    p, q, q_box, dw, dw_box, row_to_slot, expert_offsets,
    STRIDE_P: tl.constexpr, STRIDE_Q: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr,
    STORE: tl.constexpr, ADD: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    NUM_M: tl.constexpr = (M + BM - 1) // BM
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert = pid // (NUM_M * NUM_N)
    pid = pid % (NUM_M * NUM_N)
    m0 = (pid % NUM_M) * BM
    m = m0 + tl.arange(0, BM)
    n0 = (pid // NUM_M) * BN
    n = n0 + tl.arange(0, BN)
    begin = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    if ADD:
        if begin == end:
            return
    full = begin
    if TMA:
        full = begin + (end - begin) // BK * BK

    acc = tl.zeros([BM, BN], dtype=tl.float32)
    if TMA:  # only whole blocks: a box cannot end where the expert does
        for row in range(begin, full, BK):
            source = row + tl.arange(0, BK)
            if GATHER > 0:
                source = tl.load(row_to_slot + source) // GATHER
            at = p + source.to(tl.int64)[:, None] * STRIDE_P + m[None, :]
            a = tl.load(at) if M % BM == 0 else tl.load(at, mask=m[None, :] < M, other=0.0)
            b = q_box.load([row, n0])
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = dot(a.T, b, acc, PRECISION)
    for row in range(full, end, BK):
        rows = row + tl.arange(0, BK)
        mask = (rows < end)[:, None]
        source = rows
        if GATHER > 0:
            source = tl.load(row_to_slot + rows, mask=rows < end, other=0) // GATHER
        p_mask = mask if M % BM == 0 else mask & (m[None, :] < M)
        q_mask = mask if N % BN == 0 else mask & (n[None, :] < N)
        a = tl.load(
            p + source.to(tl.int64)[:, None] * STRIDE_P + m[None, :], mask=p_mask, other=0.0
        )
        b = tl.load(q + rows.to(tl.int64)[:, None] * STRIDE_Q + n[None, :], mask=q_mask, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = dot(a.T, b, acc, PRECISION)

    if STORE == "N":
        if ADD:
            acc += dw_box.load([expert, m0, n0]).reshape(BM, BN).to(tl.float32)
        dw_box.store([expert, m0, n0], acc.to(dw.dtype.element_ty).reshape(1, BM, BN))
    elif STORE == "M":
        if ADD:
            acc += dw_box.load([expert, n0, m0]).reshape(BN, BM).T.to(tl.float32)
        dw_box.store([expert, n0, m0], acc.to(dw.dtype.element_ty).T.reshape(1, BN, BM))
    else:
        at = dw + expert.to(tl.int64) * STRIDE_E + m[:, None] * STRIDE_M + n[None, :] * STRIDE_N
        inside = (m[:, None] < M) & (n[None, :] < N)
        if ADD:
            acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, acc.to(dw.dtype.element_ty), mask=inside)


_launches = launches(dw_kernel)


BM, BN = 128, 256
"""Rows and columns of hopper/'s tiles."""
FEW = 256
"""Rows an expert below which writing the result takes as long as computing it. Where it is added to
what is there, that is read, too: twice as many."""


@functools.lru_cache(1024)
def _launch_on_hopper(
    tile: Tile, few: bool, result: Lying, add: bool, boxed: bool, **gathered: int
) -> Launch:
    """Few rows of an expert stay in the L2 cache. Of many 132 programs read the least where 16 row
    tiles walk the columns side by side."""
    from .hopper.dw import Plan, dw_hopper_kernel

    (_, m, n), (stride_e, stride_m, stride_n) = result.shape, result.strides
    stages = min(tile.stages, 3) if add and boxed else tile.stages  # beside boxes to add to
    plan = Plan(
        m=m, n=n, turned=result.turned,
        stride_e=stride_e, stride_row=stride_n if result.turned else stride_m,
        add=add, boxed=boxed, stages=stages, bm=BM, bn=BN, group_m=2 if few else 16, shared=few,
        **gathered,
    )  # fmt: skip
    return Launch(dw_hopper_kernel, PLAN=plan, num_warps=4)


def _on_hopper(
    p: Tensor, q: Tensor, order: ExpertOrder, gather: int, out: Tensor, add: bool, tile: Tile
) -> bool:
    """Starts the kernel in hopper/, unless operands cannot be copied by 16 bytes."""
    (experts, m, n), result, dtype = out.shape, Lying.of(out), p.dtype
    stride_p, stride_q = p.stride(0), q.stride(0)
    if 1 not in result.strides[1:] or q.dtype != dtype:
        return False
    if (m | n | stride_p | stride_q) % 8 or p.data_ptr() % 16:
        return False
    box = rows_box(q.data_ptr(), dtype, q.shape, (64, BN), stride_q)
    if box is None:
        return False
    lines, boxes = result.lines(), None
    if out.dtype == dtype and lines is not None:
        boxes = rows_box(out.data_ptr(), dtype, lines, (64, 64))
    start = _launch_on_hopper(
        tile, len(q) // experts < (2 * FEW if add else FEW), result, add, boxes is not None,
        gather=gather, stride_gathered=stride_p,
    )  # fmt: skip
    tiles = experts * cdiv(m, BM) * cdiv(n, BN)
    start(
        chips.programs(p.device, tiles),
        p, box, out, out if boxes is None else boxes, order.row_to_slot, order.expert_offsets,
        order.large_first, order.num_large, order.taken, experts,
    )  # fmt: skip
    return True


def dw(
    p: Tensor, q: Tensor, order: ExpertOrder, *, gather: int = 0, out: Tensor, add: bool = False
) -> Tensor:
    """Writes the sum over each expert's rows of p^T q into `out` [E, M, N] (any strides, its dtype
    or float32), or adds it.

    q [S, N] is in expert order; p [S, M] too, or gathered: row r is p[row_to_slot[r] // gather].
    An expert without rows gets exact zeros, or nothing added.
    """
    (experts, m, n), dtype = out.shape, p.dtype
    name, rows = "dw_gathered" if gather else "dw", q.shape[0] // experts
    product = Product(name, 128, rows, n, m, dtype, p.device)
    tile = choose(*product)
    if tile.warps == ROLES:
        if gather and _on_hopper(p, q, order, gather, out, add, tile):
            return out
        tile = portable(product)
    q_box, tma = q, False
    if rows >= 512:  # else the masked tail is most of the loop
        q_box, tma = box(q, (tile.bk, tile.bn))
    stride_e, stride_m, stride_n = out.stride()
    if stride_n == 1:
        out_box, tma_store = box(out, (1, tile.bm, tile.bn))
    else:
        out_box, tma_store = box(out.transpose(1, 2), (1, tile.bn, tile.bm))
    store = ("N" if stride_n == 1 else "M") if tma_store else ""
    start = _launches(
        STRIDE_P=p.stride(0), STRIDE_Q=q.stride(0),
        STRIDE_E=stride_e, STRIDE_M=stride_m, STRIDE_N=stride_n,
        M=m, N=n, GATHER=gather, TMA=tma, STORE=store, ADD=add,
        UPCAST=INTERPRET and dtype == torch.bfloat16,
        PRECISION=dot_precision(dtype) if dtype == torch.float32 else "ieee",
        BM=tile.bm, BN=tile.bn, BK=tile.bk, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    start(
        (experts * -(-m // tile.bm) * -(-n // tile.bn),),
        p, q, q_box, out, out_box, order.row_to_slot, order.expert_offsets,
    )  # fmt: skip
    return out
