"""grouped_gemm(): one projection of every expert; expert_order(): the order its rows stand in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels, reference
from ..formats.packed import Packed
from ..formats.scaled import E4M3, check_scaled
from ..kernels import on_device, op, require
from ..order import ExpertOrder
from . import differentiable
from .accumulate import stored

if TYPE_CHECKING:
    from ..kernels.low_rank import LowRank

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_contiguous(x: Tensor) -> Tensor:
    """Kernels read rows with 16-byte loads: the last dimension must be contiguous."""
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def expert_order(top_k_index: Tensor, num_experts: int, dtype: torch.dtype) -> ExpertOrder:
    """Sorts the slots of top_k_index [T, K] by expert, for `grouped_gemm` on operands of `dtype`.

    Ids outside 0 .. num_experts - 1 are dropped. Raises RuntimeError where kernels cannot run.
    """
    from ..kernels.tiles import block_m  # torch.compile follows this, and no look-up in `kernels`

    require(top_k_index.device)
    height = block_m(top_k_index.numel(), num_experts, dtype)
    if differentiable.why_not_kernels():
        _refuse_trace()
        return reference.sort_tokens(top_k_index, num_experts, height)
    buffer = _expert_order(top_k_index, num_experts, height)
    return ExpertOrder.view(buffer, top_k_index.numel(), num_experts, height)


def _refuse_trace() -> None:
    """The twins of what follows read numbers of rows, which a trace would keep for all inputs."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace cannot record moe_patch's expert_order and grouped_gemm: trace "
            "fused_experts or a patched model, or use torch.compile or torch.export."
        )


def _fake_order(top_k_index, num_experts, block_m):
    numel = ExpertOrder.numel(top_k_index.numel(), num_experts, block_m)
    return top_k_index.new_empty(numel, dtype=torch.int32)


@op(_fake_order)
def _expert_order(top_k_index: Tensor, num_experts: int, block_m: int) -> Tensor:
    buffer = _fake_order(top_k_index, num_experts, block_m)
    with on_device(top_k_index.device):
        index = top_k_index.contiguous()
        kernels.sort_tokens.sort_tokens(index, num_experts, block_m, buffer)
    return buffer


def sort(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, height: int | None = None
) -> tuple[ExpertOrder, Tensor]:
    """(the order of top_k_index [T, K], the buffer that it is views of)."""
    height = height or kernels.tiles.block_m(top_k_index.numel(), num_experts, dtype)
    numel = ExpertOrder.numel(top_k_index.numel(), num_experts, height)
    buffer = top_k_index.new_empty(numel, dtype=torch.int32)
    return kernels.sort_tokens.sort_tokens(
        top_k_index.contiguous(), num_experts, height, buffer
    ), buffer


def _given(order: Sequence[Tensor], block_m: int) -> ExpertOrder:
    """An order that an operator is given as tensors; its owner may use it on several streams."""
    return ExpertOrder(*order, block_m=block_m).apart()


def _fake_gemm(x, weight, order, block_m, gather, scatter, scale=None):
    return x.new_empty(order[1].numel(), weight.shape[1])


@op(_fake_gemm)
def _grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: list[Tensor],
    block_m: int,
    gather: int,
    scatter: bool,
    scale: Tensor | None = None,
) -> Tensor:
    x = rows_contiguous(x)
    with on_device(x.device):
        order = _given(order, block_m)
        by_group = scale is not None and not gather and not scatter
        if by_group and weight.is_contiguous() and kernels.fp8_gemm.runs(x.device):
            rows, row_scale = kernels.quantize.quantize(x)
            scale = scale.float().contiguous()
            out = x.new_empty(len(x), weight.shape[1])
            kernels.fp8_gemm.fp8_gemm(rows, row_scale, weight, scale, order, out=out)
            return kernels.groups.zero_rest(out, order)
        out = x.new_zeros(order.row_to_slot.numel(), weight.shape[1])  # dropped slots stay zero
        return kernels.grouped_gemm.grouped_gemm(
            x, weight, order, gather=gather, scatter=scatter, out=out, scale=scale
        )


def input_gradient(
    d_rows: Tensor,
    weight: Tensor | Packed,
    scale: Tensor | None,
    order: ExpertOrder,
    *,
    gather: int = 0,
    out: Tensor,
    low_rank: LowRank | None = None,
) -> None:
    """Writes d_rows [S, N] times each row's expert of weight [E, N, K] into `out` [S, K]; arguments
    as `kernels.grouped_gemm` takes them, the update turned around."""
    parts = kernels.dequantize.few_at_a_time(weight, scale, order, d_rows.dtype, low_rank)
    for part in parts:
        kernels.grouped_gemm.grouped_gemm(
            d_rows, part.weight.mT, part.order, gather=gather, out=out, low_rank=part.low_rank,
            scale=None if part.scale is None else part.scale.mT,
        )  # fmt: skip


def _fake_gemm_backward(d_out, x, weight, order, block_m, gather, scatter, need, scale=None):
    d_weight = torch.empty_like(weight) if need[1] else weight.new_empty(0)
    return x.new_empty(x.shape if need[0] else 0), d_weight


@op(_fake_gemm_backward)
def _grouped_gemm_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    order: list[Tensor],
    block_m: int,
    gather: int,
    scatter: bool,
    need: list[bool],
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    with on_device(x.device):
        order = _given(order, block_m)
        x, d_out = rows_contiguous(x), rows_contiguous(d_out)
        d_x = x.new_empty(x.shape if need[0] else 0)
        d_weight = torch.empty_like(weight) if need[1] else weight.new_empty(0)
        if need[0]:
            rows = d_out.new_zeros(d_out.shape[0], x.shape[1])
            input_gradient(d_out, weight, scale, order, gather=int(scatter), out=rows)
            d_x = kernels.combine.combine(rows, order.slot_to_row, gather) if gather else rows
        if need[1] and gather:
            kernels.dw.dw(x, d_out, order, gather=gather, out=d_weight.transpose(1, 2))
        elif need[1]:
            kernels.dw.dw(d_out, x, order, gather=int(scatter), out=d_weight)
    return d_x, d_weight


def _plain(
    options: tuple[int, int, bool],
    order: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """grouped_gemm in plain PyTorch, of what the operator takes."""
    block_m, gather, scatter = options
    return reference.grouped_gemm(
        x, weight, ExpertOrder(*order, block_m=block_m),
        gather=bool(gather), scatter=scatter, weight_scale_inv=scale,
    )  # fmt: skip


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scale, block_m, gather, scatter, *order):
        kept = stored(weight)
        ctx.turned = kept.turned
        ctx.save_for_backward(x, kept.tensor, scale, *order)
        ctx.options = (block_m, gather, scatter)
        return _grouped_gemm(x, weight, list(order), block_m, gather, scatter, scale)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, scale, *order = ctx.saved_tensors
        weight = weight.mT if ctx.turned else weight
        need, none = list(ctx.needs_input_grad[:2]), (None,) * (4 + len(order))
        if differentiable.wanted(d_out):
            if scale is not None:
                differentiable.refuse_fp8()
            twin = functools.partial(_plain, ctx.options, order)
            return *differentiable.gradients(twin, (x, weight), need, d_out), *none
        d_x, d_weight = _grouped_gemm_backward(d_out, x, weight, order, *ctx.options, need, scale)
        return d_x if need[0] else None, d_weight if need[1] else None, *none


def _fake_bias_gradient(d_rows, order, num_experts, block_m, scattered):
    return d_rows.new_empty(num_experts, d_rows.shape[1])


@op(_fake_bias_gradient)
def _bias_gradient(
    d_rows: Tensor, order: list[Tensor], num_experts: int, block_m: int, scattered: bool
) -> Tensor:
    """Sums [E, N] of each expert's rows, in float32 and one order: dw with a column of ones."""
    with on_device(d_rows.device):
        d_rows, ones = rows_contiguous(d_rows), d_rows.new_ones(len(d_rows), 1)
        out = d_rows.new_empty(num_experts, d_rows.shape[1])
        order = _given(order, block_m)
        if scattered:
            kernels.dw.dw(d_rows, ones, order, gather=1, out=out[:, :, None])
        else:
            kernels.dw.dw(ones, d_rows, order, out=out[:, None])
    return out


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, bias, expert, block_m, scattered, *order):
        ctx.save_for_backward(*order)
        ctx.options = len(bias), block_m, scattered
        return rows + bias[expert]

    @staticmethod
    def backward(ctx, d_rows):
        d_bias, order = None, list(ctx.saved_tensors)
        if ctx.needs_input_grad[1] and differentiable.wanted(d_rows):
            d_bias = reference.bias_gradient(d_rows, order, *ctx.options)
        elif ctx.needs_input_grad[1]:
            d_bias = _bias_gradient(d_rows, order, *ctx.options)
        return d_rows, d_bias, *(None,) * (3 + len(order))


def add_bias(
    rows: Tensor, bias: Tensor, top_k_index: Tensor, order: ExpertOrder, *, scattered: bool = False
) -> Tensor:
    """Each row of `grouped_gemm` plus its expert's bias.

    Args:
        rows: [S, N] in expert order; `scattered`: in slot order.
        bias: [E, N] of the rows' dtype.
        top_k_index: [T, K] that `order` was made from. Dropped slots get some finite row.

    Returns:
        [S, N], differentiable in rows and bias; two runs give the same bits.
    """
    if differentiable.why_not_kernels():
        return reference.add_bias(rows, bias, top_k_index, order, scattered=scattered)
    expert = top_k_index.reshape(-1)
    expert = expert.masked_fill((expert < 0) | (expert >= len(bias)), 0)
    if not scattered:
        expert = expert[order.row_to_slot.long()]
    return _AddBias.apply(rows, bias, expert, order.block_m, scattered, *order.tensors())


def group_order(
    m_sizes: Tensor | None, offsets: Tensor | None, num_rows: int, weight: Tensor
) -> ExpertOrder:
    """The order of rows that stand by group, for the weight [G, N, K] of `grouped_gemm`.

    One of m_sizes [G] and offsets [G + 1] is given. Raises as `grouped_gemm` does.
    """
    groups = weight.shape[0]
    name, given = ("m_sizes", m_sizes) if offsets is None else ("offsets", offsets)
    length = groups if offsets is None else groups + 1
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {given.dtype}: int32 or int64 is needed.")
    if given.shape != (length,) or not groups:
        raise ValueError(
            f"{name} must be [{length}] for a weight of {groups} groups, one at least, found "
            f"{list(given.shape)}."
        )
    if given.device != weight.device:
        raise ValueError(f"{name} is on {given.device} and weight on {weight.device}.")
    if offsets is None:
        ends = m_sizes.clamp(0, num_rows).cumsum(0, dtype=torch.int64)
        offsets = torch.nn.functional.pad(ends, (1, 0))
    # torch.compile follows these, and no look-up in `kernels`
    if weight.dtype == E4M3:
        from ..kernels.fp8_gemm import height as height_in_fp8

        height = height_in_fp8(num_rows, groups, weight.device)
    else:
        from ..kernels.tiles import block_m

        height = block_m(num_rows, groups, weight.dtype)
    if differentiable.why_not_kernels():
        return reference.group_tiles(offsets, num_rows, height)
    buffer = _group_order(offsets, num_rows, height)
    return ExpertOrder.view(buffer, num_rows, groups, height)


def _fake_group_order(offsets, num_rows, block_m):
    numel = ExpertOrder.numel(num_rows, offsets.numel() - 1, block_m)
    return offsets.new_empty(numel, dtype=torch.int32)


@op(_fake_group_order)
def _group_order(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    buffer = _fake_group_order(offsets, num_rows, block_m)
    with on_device(offsets.device):
        kernels.groups.group_tiles(offsets.contiguous(), num_rows, block_m, buffer)
    return buffer


def _check_factors(x: Tensor, weight: Tensor, weight_scale_inv: Tensor | None) -> None:
    """Raises where x [rows, K] and a weight [E, N, K] cannot be multiplied."""
    if weight.dim() != 3 or x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_gemm takes x [rows, K] and weight [E, N, K], found {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    scaled = weight_scale_inv is not None or weight.dtype == E4M3
    if scaled:
        check_scaled("weight", weight, weight_scale_inv, "weight_scale_inv")
    if x.dtype not in DTYPES or not scaled and x.dtype != weight.dtype:
        raise TypeError(
            f"x is {x.dtype} and weight {weight.dtype}: both must be the same one of bfloat16, "
            "float16 and float32, or the weight float8_e4m3fn with scales."
        )
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}.")


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder | None = None,
    *,
    m_sizes: Tensor | None = None,
    offsets: Tensor | None = None,
    gather: bool = False,
    scatter: bool = False,
    weight_scale_inv: Tensor | None = None,
) -> Tensor:
    """One expert projection: row r of the result is x[r] @ weight[expert of r]^T.

    Which rows are whose is told by an order of slots, or, for rows that stand by group already
    (G experts are then called groups), by their numbers or where they begin. All three stay on
    the device.

    Args:
        x: [S, K] in expert order; with `gather` [T, K] tokens, read through the order; with
            `scatter` still [S, K] in expert order.
        weight: [E, N, K] of x's dtype, any strides.
        order: of the S slots, from `expert_order` on the same dtype.
        m_sizes: [G] int32 or int64 instead: the first m_sizes[0] rows of x [S, K] are of group 0,
            and so on.
        offsets: [G + 1] int32 or int64 instead: rows offsets[g] .. offsets[g + 1] - 1 are of g.
        gather: fuse the permutation into expert order into the read of x; needs an order.
        scatter: fuse the permutation back into the write: the result is in slot order; needs one.
        weight_scale_inv: [E, ceil(N / 128), ceil(K / 128)], float32 or float8_e8m0fnu: the weight
            is float8_e4m3fn and frozen, each of its 128 x 128 blocks to be multiplied by its
            scale. Without gather and scatter x is quantised too, 1 x 128, where the card has FP8
            products; its gradient is that of dO W with dO as it is.

    Returns:
        [S, N], rows of dropped slots and of no group zero. Differentiable in x and weight; second
        derivatives, forward-mode AD and torch.func run in plain PyTorch.
        Sizes and offsets are not checked, which would mean waiting for the device: what is negative
        counts as 0, what lies past S as S, an offset below the one before it as that one.

    Raises:
        ValueError: not one of order, m_sizes and offsets, gather and scatter together or without an
            order, or shapes that do not fit.
        TypeError: unsupported or mixed dtypes.
        RuntimeError: the kernels cannot run on this device.
    """
    if gather and scatter:
        raise ValueError("gather is for the first projection, scatter for the second: pass one.")
    if sum(given is not None for given in (order, m_sizes, offsets)) != 1:
        raise ValueError("pass one of order, m_sizes and offsets: it says which rows are whose.")
    if order is None and (gather or scatter):
        raise ValueError("gather and scatter permute by an order: pass one, from expert_order.")
    _check_factors(x, weight, weight_scale_inv)
    require(x.device)
    if order is None:
        order = group_order(m_sizes, offsets, x.shape[0], weight)
    slots = order.row_to_slot.numel()
    if order.expert_offsets.numel() != weight.shape[0] + 1:
        raise ValueError(
            f"the order is of {order.expert_offsets.numel() - 1} experts and weight has "
            f"{weight.shape[0]}."
        )
    top_k = slots // max(x.shape[0], 1) if gather else 1
    if x.shape[0] * top_k != slots:
        kind = "tokens that divide them" if gather else "rows"
        raise ValueError(f"the order has {slots} slots and x {x.shape[0]} rows, not {kind}.")
    fields = order.tensors()
    options = (order.block_m, top_k if gather else 0, scatter)
    if differentiable.why_not_kernels():
        _refuse_trace()
        return _plain(options, fields, x, weight, weight_scale_inv)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GroupedGemm.apply(x, weight, weight_scale_inv, *options, *fields)
    return _grouped_gemm(x, weight, list(fields), *options, weight_scale_inv)
