"""Grouped GEMM of e4m3 with block scales, x 1x128 and weights 128x128, promoted every 128 of K.

out[r] = sum over blocks b of K of x_scale[r, b] w_scale[e_r, n / 128, b] (x[r, b] W[e_r, n, b]^T)
(DeepSeek-V3, arXiv:2412.19437, section 3.3). Or, of a gate and an up projection, their activation,
quantised again for the next one, and on request kept for a backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import has_gluon
from ..order import ExpertOrder
from . import chips
from .activate import gate_of, glu
from .boxes import gluon_box, rows_box
from .launch import Launch, cdiv
from .quantize import BLOCK, quantize_rows
from .tiles import INTERPRET, block_m
from .tiling import place


@triton.jit(do_not_specialize=["stride_xs", "stride_xg", "stride_os"])
def fp8_gemm_kernel(
    x, w, x_scale, w_scale, out, out_scale, pre, ends, tile_expert, tile_row, num_tiles,
    stride_xs, stride_xg, stride_os,
    N: tl.constexpr, K: tl.constexpr, M_MAX: tl.constexpr,
    GATE: tl.constexpr, SAVE_PRE: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """For any chip with FP8 products; on Hopper fp8_hopper_kernel does the same."""
    ACTIVATE: tl.constexpr = GATE is not None
    WIDTH: tl.constexpr = N // 2 if ACTIVATE else N
    NUM_N: tl.constexpr = (WIDTH + 127) // 128
    NUM_K: tl.constexpr = (K + 127) // 128
    NUM_S: tl.constexpr = (N + 127) // 128
    pid = tl.program_id(0)
    if M_MAX == 0:
        if pid >= tl.load(num_tiles) * NUM_N:
            return
    expert, first, end, column = place(pid, tile_expert, tile_row, ends, NUM_N, M_MAX, BM, GROUP_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BM)
    inside = rows < end
    n = column * 128 + tl.arange(0, 128)
    x_rows = x + rows.to(tl.int64)[:, None] * K
    x_scales = x_scale + rows.to(tl.int64) * stride_xs
    w_columns = w + (expert.to(tl.int64) * N + n[None, :]) * K
    w_scales = w_scale + (expert * NUM_S + column) * NUM_K
    acc = tl.zeros([BM, 128], dtype=tl.float32)
    up = tl.zeros([BM, 128], dtype=tl.float32)
    for block in range(NUM_K):
        k = block * 128 + tl.arange(0, 128)
        a = tl.load(x_rows + k[None, :], mask=inside[:, None] & (k[None, :] < K), other=0.0)
        mask = (n[None, :] < WIDTH) & (k[:, None] < K)
        by_x = tl.load(x_scales + block * stride_xg, mask=inside, other=0.0)
        b = tl.load(w_columns + k[:, None], mask=mask, other=0.0)
        acc = tl.fma(tl.dot(a, b), (by_x * tl.load(w_scales + block))[:, None], acc)
        if ACTIVATE:
            b = tl.load(w_columns + (WIDTH * K + k[:, None]), mask=mask, other=0.0)
            by_w = tl.load(w_scales + NUM_N * NUM_K + block)
            up = tl.fma(tl.dot(a, b), (by_x * by_w)[:, None], up)
    if SAVE_PRE:
        at = pre + rows.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, acc.to(pre.dtype.element_ty), mask=inside[:, None])
        tl.store(at + WIDTH, up.to(pre.dtype.element_ty), mask=inside[:, None])
    if ACTIVATE:
        acc, _, _ = glu(acc, up, GATE)
        acc, scale = quantize_rows(acc, False, INTERPRET)
        to = out_scale + column.to(tl.int64) * stride_os + rows[:, None]
        tl.store(to, scale, mask=inside[:, None])
    at = out + rows.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n[None, :] < WIDTH))


def _hopper(device: torch.device) -> bool:
    return not INTERPRET and chips.chip(device).wgmma and has_gluon()


def runs(device: torch.device) -> bool:
    """Whether the device multiplies e4m3."""
    return INTERPRET or chips.chip(device).fp8


def height(slots: int, num_experts: int, device: torch.device) -> int:
    """Of the row tiles that an order for `fp8_gemm` should have."""
    return 128 if _hopper(device) else min(64, block_m(slots, num_experts, torch.float8_e4m3fn))


def _boxes(x: Tensor, weight: Tensor, out: Tensor | None, high: int) -> tuple[Any, Any, Any] | None:
    """Boxes of `high` rows, of the weight and of the result (None: it is quantised), if all are
    lawful."""
    experts, n, k = weight.shape
    rows = gluon_box(x.data_ptr(), x.dtype, tuple(x.shape), (high, BLOCK))
    lines = gluon_box(weight.data_ptr(), x.dtype, (experts * n, k), (BLOCK, BLOCK))
    result = out
    if out is not None:
        result = rows_box(out.data_ptr(), out.dtype, tuple(out.shape), (64, 64))
    lawful = rows is not None and lines is not None and (out is None or result is not None)
    return (rows, lines, result) if lawful else None


def _stages(bm: int, other: int, device: torch.device) -> int:
    """Number of stages of one tile of rows and two of the weight that fit into shared memory beside
    `other` bytes."""
    return max(1, min(4, (chips.chip(device).shared - other) // ((bm + 2 * BLOCK) * BLOCK)))


def _beside_stages(results: Tensor | None) -> int:
    """Bytes of shared memory that the kernel in hopper/ has besides its stages: four boxes
    [64, 64] by way of which `results` are stored, scales, and barriers."""
    return 3072 + (0 if results is None else 4 * 64 * 64 * results.itemsize)


def _brief(experts: int, n: int, k: int, device: torch.device) -> bool:
    """Whether a masked product is over after a few tiles of 128 columns each, where no expert has
    more rows than one tile; docs/kernels.md has what that is worth."""
    return k >= 2 * BLOCK and experts * cdiv(n, BLOCK) <= 4 * chips.multiprocessors(device)


@functools.lru_cache(1024)
def _prepared(
    hopper: bool, n: int, k: int, experts: int, m_max: int, bm: int, stages: int,
    activation: str | None, save_pre: bool, ptx: bool, brief: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """(a launch, columns of the result from one tile to the next). Not masked: 0 experts, whose
    number it does not depend on, and m_max 0. `brief` is what `_brief` says of a masked product."""
    gate = gate_of(activation, ptx) if activation else None
    group_m = 16 if k > 4096 else 8
    if hopper:
        from .hopper.fp8 import deeper, fp8_hopper_kernel, plan

        sizes = plan(n, k, experts, m_max, gate is not None, group_m, stages)
        constants = dict(PLAN=sizes, DEEP=deeper(sizes, brief), GATE=gate, SAVE_PRE=save_pre)
        return Launch(fp8_hopper_kernel, **constants, num_warps=4), sizes.bn
    launch = Launch(
        fp8_gemm_kernel, N=n, K=k, M_MAX=m_max, GATE=gate, SAVE_PRE=save_pre, INTERPRET=INTERPRET,
        BM=bm, GROUP_M=group_m, num_warps=8 if bm == 128 or gate else 4, num_stages=stages,
    )  # fmt: skip
    return launch, BLOCK


def fp8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    order: ExpertOrder | None = None,
    *,
    masked_m: Tensor | None = None,
    activation: str | None = None,
    pre: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out [S, N] bfloat16, None); with `activation` (e4m3 [S, N / 2], scales [S, N / 256]), and
    what is activated in `pre` [S, N] if there is one.

    x e4m3 [S, K], contiguous, in expert order, or with `masked_m` [E] int32 E equal parts of which
    the first masked_m[e] rows count. x_scale float32 [S, ceil(K / 128)], any strides; weight e4m3
    [E, N, K] and weight_scale float32 [E, ceil(N / 128), ceil(K / 128)], contiguous. With
    `activation` N is a multiple of 256: gates first. Other rows of the result are not written.
    """
    (slots, k), (experts, n, _) = x.shape, weight.shape
    scale = None
    if activation:
        out = x.new_empty(slots, n // 2)
        scale = x.new_empty(n // 2 // BLOCK, slots, dtype=torch.float32).t()
    elif out is None:
        out = x.new_empty(slots, n, dtype=torch.bfloat16)
    if slots == 0:
        return out, scale
    boxes, brief = None, False
    if _hopper(x.device) and (masked_m is not None or order.block_m == 128):
        boxes = _boxes(x, weight, None if activation else out, 128 if masked_m is None else 64)
    if masked_m is None:
        bm, m_max, ends = order.block_m, 0, order.expert_offsets
        tiles = order.tile_expert.numel()
        listed = order.tile_expert, order.tile_row, order.num_tiles
    else:
        m_max, ends, listed = slots // experts, masked_m, (None,) * 3
        brief = boxes is not None and not activation and _brief(experts, n, k, x.device)
        bm = 128 if boxes else 64
        tiles = experts * cdiv(m_max, bm)
    other = _beside_stages(None if activation else out) if boxes else 4096
    start, width = _prepared(
        boxes is not None, n, k, experts if m_max else 0, m_max, bm, _stages(bm, other, x.device),
        activation, pre is not None, chips.chip(x.device).ptx, brief,
    )  # fmt: skip
    count = tiles * cdiv(n // 2 if activation else n, width)
    strides = *x_scale.stride(), 0 if scale is None else scale.stride(1)
    scales = x_scale, weight_scale
    if boxes:
        rows, lines, result = boxes
        taken = order.taken if masked_m is None else ends  # masked, nobody reads it
        start(
            chips.programs(x.device, 2 * count),  # a tile may be two programs'
            rows, lines, weight if brief else None, *scales, result or out, scale, pre, taken, ends,
            *listed, *strides,
        )  # fmt: skip
    else:
        start((count,), x, weight, *scales, out, scale, pre, ends, *listed, *strides)
    return out, scale
