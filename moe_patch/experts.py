"""fused_experts(): the MoE MLP as one differentiable function; grouped_gemm(): one projection.

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots.
Kept for the backward: hidden_states, the pre-activation [S, 2I], the order of slots and the
routing weights; everything else is computed again (SonicMoE, arXiv:2512.14080).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import on_device, op, require
from .order import ExpertOrder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Kernels read rows with 16-byte loads: the last dimension must be contiguous."""
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def expert_order(top_k_index: Tensor, num_experts: int, dtype: torch.dtype) -> ExpertOrder:
    """Sorts the slots of top_k_index [T, K] by expert, for `grouped_gemm` on operands of `dtype`.

    Ids outside 0 .. num_experts - 1 are dropped. Raises RuntimeError where kernels cannot run.
    """
    require(top_k_index.device)
    with on_device(top_k_index.device):
        return _sort(top_k_index, num_experts, dtype)[0]


def _sort(top_k_index: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[ExpertOrder, Tensor]:
    from .kernels.sort_tokens import sort_tokens
    from .kernels.tiles import block_m

    height = block_m(top_k_index.numel(), num_experts, dtype)
    numel = ExpertOrder.numel(top_k_index.numel(), num_experts, height)
    buffer = torch.empty(numel, dtype=torch.int32, device=top_k_index.device)
    return sort_tokens(top_k_index.contiguous(), num_experts, height, buffer), buffer


def _view(buffer: Tensor, num_slots: int, num_experts: int, dtype: torch.dtype) -> ExpertOrder:
    from .kernels.tiles import block_m

    return ExpertOrder.view(buffer, num_slots, num_experts, block_m(num_slots, num_experts, dtype))


def _by_sort(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H], pre-activation [S, 2I] or empty unless `save`, order buffer)."""
    from .kernels.combine import combine
    from .kernels.gate_up import gate_up
    from .kernels.grouped_gemm import grouped_gemm as gemm

    x, weights = _rows_contiguous(hidden_states), top_k_weights.contiguous()
    order, buffer = _sort(top_k_index, gate_up_proj.shape[0], x.dtype)
    act, pre = gate_up(
        x, gate_up_proj, order, weights, weight_on_input=weight_on_input, save_pre=save
    )
    rows = gemm(act, down_proj, order, out=x.new_empty(act.shape[0], x.shape[1]))
    out = combine(
        rows, order.slot_to_row, top_k_index.shape[1], None if weight_on_input else weights
    )
    return out, pre, buffer


@op(lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape))
def _experts_inference(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
) -> Tensor:
    """out [T, H]; nothing is kept for a backward."""
    from .kernels.decode import decode, decodes

    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    with on_device(hidden_states.device):
        if not decodes(top_k_index, gate_up_proj, down_proj):
            return _by_sort(*tensors, weight_on_input, False)[0]
        return decode(
            _rows_contiguous(hidden_states), gate_up_proj, down_proj,
            top_k_index.contiguous(), top_k_weights.contiguous(), weight_on_input=weight_on_input,
        )  # fmt: skip


def _fake_forward(hidden_states, gate_up_proj, down_proj, top_k_index, *_):
    from .kernels.tiles import block_m

    slots, (experts, inner, _) = top_k_index.numel(), gate_up_proj.shape
    numel = ExpertOrder.numel(slots, experts, block_m(slots, experts, hidden_states.dtype))
    return (
        hidden_states.new_empty(hidden_states.shape),
        hidden_states.new_empty(slots, inner),
        top_k_index.new_empty(numel, dtype=torch.int32),
    )


@op(_fake_forward)
def _experts_forward(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H], pre-activation [S, 2I], order buffer)."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    with on_device(hidden_states.device):
        return _by_sort(*tensors, weight_on_input, True)


def _fake_backward(
    d_out, hidden_states, gate_up_proj, down_proj, top_k_weights, pre, buffer, weight_on_input, need
):
    inputs = (hidden_states, gate_up_proj, down_proj, top_k_weights)
    return tuple(
        (torch.empty_like(x) if x.dim() == 3 else x.new_empty(x.shape)) if n else x.new_empty(0)
        for x, n in zip(inputs, need)
    )


@op(_fake_backward)
def _experts_backward(
    d_out: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    pre: Tensor,
    buffer: Tensor,
    weight_on_input: bool,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (hidden_states, gate_up_proj, down_proj, top_k_weights); empty if not needed."""
    from .kernels.combine import combine, sum_partials
    from .kernels.dgate import dgate
    from .kernels.dw import dw
    from .kernels.grouped_gemm import grouped_gemm as gemm

    need_hidden, need_gate_up, need_down, need_weights = need
    grads = [hidden_states.new_empty(0) for _ in need]
    top_k, slots = top_k_weights.shape[1], top_k_weights.numel()
    with on_device(hidden_states.device):
        x, d_out = _rows_contiguous(hidden_states), _rows_contiguous(d_out)
        order = _view(buffer, slots, gate_up_proj.shape[0], x.dtype)
        d_pre, act, d_scale = dgate(
            d_out, down_proj, order, top_k_weights.contiguous(), pre,
            weight_on_input=weight_on_input, need_pre=need_hidden or need_gate_up,
            need_act=need_down, need_scale=need_weights,
        )  # fmt: skip
        if need_weights:
            out = top_k_weights.new_empty(top_k_weights.shape)
            grads[3] = sum_partials(d_scale, order.slot_to_row, out)
        if need_down:
            grads[2] = torch.empty_like(down_proj)
            dw(d_out, act, order, gather=top_k, out=grads[2])
        del act
        if need_gate_up:
            grads[1] = torch.empty_like(gate_up_proj)
            dw(x, d_pre, order, gather=top_k, out=grads[1].transpose(1, 2))
        if need_hidden:
            rows = x.new_empty(slots, x.shape[1])
            gemm(d_pre, gate_up_proj.transpose(1, 2), order, out=rows)
            grads[0] = combine(rows, order.slot_to_row, top_k)
    return tuple(grads)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, gate_up_proj, down_proj, index, weights, weight_on_input):
        out, pre, buffer = _experts_forward(
            hidden_states, gate_up_proj, down_proj, index, weights, weight_on_input
        )
        ctx.save_for_backward(hidden_states, gate_up_proj, down_proj, weights, pre, buffer)
        ctx.weight_on_input = weight_on_input
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        hidden, gate_up, down, _, weights, _ = ctx.needs_input_grad
        need = [hidden, gate_up, down, weights]
        grads = _experts_backward(d_out, *ctx.saved_tensors, ctx.weight_on_input, need)
        d_hidden, d_gate_up, d_down, d_weights = (
            grad if wanted else None for grad, wanted in zip(grads, need)
        )
        return d_hidden, d_gate_up, d_down, None, d_weights, None


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on: str = "output",
) -> Tensor:
    """The MoE MLP: each token's K experts, silu(x W_gate^T) * (x W_up^T) W_down^T, summed.

    Args:
        hidden_states: [T, H], bfloat16, float16 or float32. Cast to the weights' dtype.
        gate_up_proj: [E, 2I, H], gate rows first. Any strides: pass a transposed view of weights
            stored [E, H, 2I]; no copy is made.
        down_proj: [E, H, I], dtype and device of gate_up_proj.
        top_k_index: [T, K] integer. Ids outside 0 .. E-1 (expert-parallel sentinels) are dropped:
            they add exact zeros and get zero gradients. An expert may come twice in a token.
        top_k_weights: [T, K] floating point.
        weight_on: "output" multiplies each expert's output by its weight; "input" its input
            (Llama4), in float32 after the first product.

    Returns:
        [T, H] in the dtype of hidden_states, a fresh tensor. Differentiable in the three float
        inputs and the weights, once; gradients come in their inputs' dtypes. Two runs on the same
        inputs give the same bits.

    Raises:
        ValueError: shapes or devices that do not fit together, an unknown weight_on.
        TypeError: unsupported or mixed dtypes.
        RuntimeError: the kernels cannot run on this device.
    """
    _check(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, weight_on)
    dtype = gate_up_proj.dtype
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
        gate_up_proj, down_proj = gate_up_proj.to(dtype), down_proj.to(dtype)
    x = hidden_states.to(dtype)
    tensors = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    on_input = weight_on == "input"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out = _FusedExperts.apply(*tensors, on_input)
    else:
        out = _experts_inference(*tensors, on_input)
    return out.to(hidden_states.dtype)


def _check(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on: str,
) -> None:
    if weight_on not in ("output", "input"):
        raise ValueError(f"weight_on is {weight_on!r}, use 'output' or 'input'.")
    if hidden_states.dim() != 2 or gate_up_proj.dim() != 3 or down_proj.dim() != 3:
        raise ValueError(
            "fused_experts takes hidden_states [T, H], gate_up_proj [E, 2I, H] and down_proj "
            f"[E, H, I], found {tuple(hidden_states.shape)}, {tuple(gate_up_proj.shape)} and "
            f"{tuple(down_proj.shape)}."
        )
    (tokens, hidden), (experts, inner, _) = hidden_states.shape, gate_up_proj.shape
    if gate_up_proj.shape[2] != hidden or down_proj.shape != (experts, hidden, inner // 2):
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} needs gate_up_proj [E, 2I, {hidden}] and "
            f"down_proj [E, {hidden}, I], found {tuple(gate_up_proj.shape)} and "
            f"{tuple(down_proj.shape)}: pass weights stored the other way as .transpose(1, 2)."
        )
    if inner % 2:
        raise ValueError(f"gate_up_proj has {inner} rows an expert, an even number is needed.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != tokens:
        raise ValueError(
            f"top_k_index must be [{tokens}, K], one row a token, found {tuple(top_k_index.shape)}."
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights {tuple(top_k_weights.shape)} must have the shape of top_k_index "
            f"{tuple(top_k_index.shape)}."
        )
    if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool:
        raise TypeError(f"top_k_index is {top_k_index.dtype}, an integer dtype is needed.")
    if gate_up_proj.dtype not in DTYPES or gate_up_proj.dtype != down_proj.dtype:
        raise TypeError(
            f"gate_up_proj is {gate_up_proj.dtype} and down_proj {down_proj.dtype}: both must be "
            "the same one of bfloat16, float16 and float32."
        )
    if hidden_states.dtype not in DTYPES or top_k_weights.dtype not in DTYPES:
        raise TypeError(
            f"hidden_states is {hidden_states.dtype} and top_k_weights {top_k_weights.dtype}: "
            "each must be bfloat16, float16 or float32."
        )
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    if len({tensor.device for tensor in tensors}) > 1:
        found = ", ".join(str(tensor.device) for tensor in tensors)
        raise ValueError(f"all tensors must be on one device, found {found}.")
    require(hidden_states.device)


def _fake_gemm(x, weight, order, block_m, gather, scatter):
    return x.new_empty(order[1].numel(), weight.shape[1])


@op(_fake_gemm)
def _grouped_gemm(
    x: Tensor, weight: Tensor, order: list[Tensor], block_m: int, gather: int, scatter: bool
) -> Tensor:
    from .kernels.grouped_gemm import grouped_gemm as gemm

    with on_device(x.device):
        out = x.new_zeros(order[1].numel(), weight.shape[1])  # rows of dropped slots stay zero
        order = ExpertOrder(*order, block_m=block_m)
        return gemm(_rows_contiguous(x), weight, order, gather=gather, scatter=scatter, out=out)


def _fake_gemm_backward(d_out, x, weight, order, block_m, gather, scatter, need):
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
) -> tuple[Tensor, Tensor]:
    from .kernels.combine import combine
    from .kernels.dw import dw
    from .kernels.grouped_gemm import grouped_gemm as gemm

    with on_device(x.device):
        order = ExpertOrder(*order, block_m=block_m)
        x, d_out = _rows_contiguous(x), _rows_contiguous(d_out)
        d_x = x.new_empty(x.shape if need[0] else 0)
        d_weight = torch.empty_like(weight) if need[1] else weight.new_empty(0)
        if need[0]:
            rows = d_out.new_zeros(d_out.shape[0], x.shape[1])
            gemm(d_out, weight.transpose(1, 2), order, gather=int(scatter), out=rows)
            d_x = combine(rows, order.slot_to_row, gather) if gather else rows
        if need[1] and gather:
            dw(x, d_out, order, gather=gather, out=d_weight.transpose(1, 2))
        elif need[1]:
            dw(d_out, x, order, gather=int(scatter), out=d_weight)
    return d_x, d_weight


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, block_m, gather, scatter, *order):
        ctx.save_for_backward(x, weight, *order)
        ctx.options = (block_m, gather, scatter)
        return _grouped_gemm(x, weight, list(order), block_m, gather, scatter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        x, weight, *order = ctx.saved_tensors
        need = list(ctx.needs_input_grad[:2])
        d_x, d_weight = _grouped_gemm_backward(d_out, x, weight, order, *ctx.options, need)
        none = (None,) * (3 + len(order))
        return d_x if need[0] else None, d_weight if need[1] else None, *none


def grouped_gemm(
    x: Tensor, weight: Tensor, order: ExpertOrder, *, gather: bool = False, scatter: bool = False
) -> Tensor:
    """One expert projection: row r of the result is x[r] @ weight[expert of r]^T.

    Args:
        x: [S, K] in expert order; with `gather` [T, K] tokens, read through the order; with
            `scatter` still [S, K] in expert order.
        weight: [E, N, K] of x's dtype, any strides.
        order: of the S slots, from `expert_order` on the same dtype.
        gather: fuse the permutation into expert order into the read of x.
        scatter: fuse the permutation back into the write: the result is in slot order.

    Returns:
        [S, N], rows of dropped slots zero. Differentiable in x and weight, once.

    Raises:
        ValueError: gather and scatter together, or shapes that do not fit.
        TypeError: unsupported or mixed dtypes.
        RuntimeError: the kernels cannot run on this device.
    """
    slots = order.row_to_slot.numel()
    if gather and scatter:
        raise ValueError("gather is for the first projection, scatter for the second: pass one.")
    if weight.dim() != 3 or x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_gemm takes x [rows, K] and weight [E, N, K], found {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if order.expert_offsets.numel() != weight.shape[0] + 1:
        raise ValueError(
            f"the order is of {order.expert_offsets.numel() - 1} experts and weight has "
            f"{weight.shape[0]}."
        )
    top_k = slots // max(x.shape[0], 1) if gather else 1
    if x.shape[0] * top_k != slots:
        kind = "tokens that divide them" if gather else "rows"
        raise ValueError(f"the order has {slots} slots and x {x.shape[0]} rows, not {kind}.")
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        raise TypeError(
            f"x is {x.dtype} and weight {weight.dtype}: both must be the same one of bfloat16, "
            "float16 and float32."
        )
    require(x.device)
    fields = (
        order.expert_offsets, order.row_to_slot, order.slot_to_row,
        order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
    options = (order.block_m, top_k if gather else 0, scatter)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GroupedGemm.apply(x, weight, *options, *fields)
    return _grouped_gemm(x, weight, list(fields), *options)
