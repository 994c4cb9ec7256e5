"""fused_experts(): the MoE MLP as one differentiable function; grouped_gemm(): one projection.

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots.
Kept for the backward: hidden_states, the pre-activation [S, 2I], the order of slots and the
routing weights; everything else is computed again (SonicMoE, arXiv:2512.14080).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import kernels
from ..activation import Activation, parse
from ..kernels import on_device, op
from ..order import ExpertOrder
from ..paths import ran
from . import differentiable, fp8
from .accumulate import Leaf, Product, gradient, leaf, stored
from .checks import check
from .grouped import (
    DTYPES,
    expert_order,
    grouped_gemm,
    input_gradient,
    rows_contiguous,
    sort,
)
from .low_rank import LowRank

__all__ = ["DTYPES", "expert_order", "fused_experts", "grouped_gemm"]


def _view(buffer: Tensor, num_slots: int, num_experts: int, dtype: torch.dtype) -> ExpertOrder:
    return ExpertOrder.view(
        buffer, num_slots, num_experts, kernels.tiles.block_m(num_slots, num_experts, dtype)
    )


def _by_sort(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
    activation: str,
    extra: list[Tensor],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [T, H], pre-activation [S, 2I] or empty unless `save`, order buffer, x A^T of the two
    low-rank updates [S, R], empty without).

    `extra` is nothing, or both updates' A and B and both biases, empty where there is none, and
    then the scales of both weights where they are FP8.
    """
    x, weights = rows_contiguous(hidden_states), top_k_weights.contiguous()
    order, buffer = sort(top_k_index, gate_up_proj.shape[0], x.dtype)
    updates = [_update(x, order, *extra[:2]), _update(x, order, *extra[2:4])]
    biases, scales = _biases(extra), _scales(extra)
    act, pre = kernels.gate_up.gate_up(
        x, gate_up_proj, order, weights, weight_on_input=weight_on_input, save_pre=save,
        activation=activation, scale=scales[0], bias=biases[0], low_rank=updates[0],
    )  # fmt: skip
    rows = x.new_empty(act.shape[0], x.shape[1])
    kernels.grouped_gemm.grouped_gemm(
        act, down_proj, order, out=rows, scale=scales[1], bias=biases[1], low_rank=updates[1]
    )
    out = kernels.combine.combine(
        rows, order.slot_to_row, top_k_index.shape[1], None if weight_on_input else weights
    )
    sides = (x.new_empty(0) if update is None else update.side for update in updates)
    return out, pre, buffer, *sides


def _update(x: Tensor, order: ExpertOrder, a: Tensor | None = None, b: Tensor | None = None):
    """A low-rank update as kernels take it; None without."""
    if a is None or not a.numel():
        return None
    side = x.new_empty(order.row_to_slot.numel(), a.shape[1])
    return kernels.tiles.LowRank(a.contiguous(), b.contiguous(), side)


def _biases(extra: list[Tensor]) -> list[Tensor | None]:
    """Of both projections, as kernels take them."""
    return [b.contiguous() if b.numel() else None for b in extra[4:6]] or [None, None]


def _scales(extra: list[Tensor]) -> list[Tensor | None]:
    """Of both FP8 weights, as kernels take them; None of others."""
    return extra[6:] or [None, None]


def _in_fp8(
    x: Tensor, gate_up: Tensor, down: Tensor, weight_on_input: bool, activation: str, extra: list
) -> bool:
    """Whether both products are of FP8 activations, too."""
    plain = len(extra) > 6 and not weight_on_input and not any(t.numel() for t in extra[:6])
    return plain and fp8.multiplies(x, gate_up, down, activation)


@op(lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape))
def _experts_inference(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
    activation: str,
    extra: list[Tensor],
) -> Tensor:
    """out [T, H]; nothing is kept for a backward."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    with on_device(hidden_states.device):
        adapted = bool(extra) and any(factor.numel() for factor in extra[:4])
        if adapted or not kernels.decode.decodes(top_k_index, gate_up_proj, down_proj):
            if _in_fp8(*tensors[:3], weight_on_input, activation, extra):
                ran("fp8")
                return fp8.forward(*tensors, *_scales(extra), None, activation)[0]
            ran("sorted")
            return _by_sort(*tensors, weight_on_input, activation, extra, False)[0]
        ran("decode")
        (gate_up_bias, down_bias), (gate_up_scale, down_scale) = _biases(extra), _scales(extra)
        return kernels.decode.decode(
            rows_contiguous(hidden_states), gate_up_proj, down_proj,
            top_k_index.contiguous(), top_k_weights.contiguous(), weight_on_input=weight_on_input,
            activation=activation, gate_up_scale=gate_up_scale, down_scale=down_scale,
            gate_up_bias=gate_up_bias, down_bias=down_bias,
        )  # fmt: skip


def _fake_forward(hidden_states, gate_up_proj, down_proj, top_k_index, _, on_input, act, extra):
    slots, (experts, inner, _) = top_k_index.numel(), gate_up_proj.shape
    numel = ExpertOrder.numel(
        slots, experts, kernels.tiles.block_m(slots, experts, hidden_states.dtype)
    )
    return (
        hidden_states.new_empty(hidden_states.shape),
        hidden_states.new_empty(slots, inner),
        top_k_index.new_empty(numel, dtype=torch.int32),
        *(
            hidden_states.new_empty((slots, a.shape[1]) if a.numel() else (0,))
            for a in (extra[:4:2] or (hidden_states.new_empty(0),) * 2)
        ),
    )


@op(_fake_forward)
def _experts_forward(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool,
    activation: str,
    extra: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [T, H], pre-activation [S, 2I], order buffer, the low-rank updates' x A^T)."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    with on_device(hidden_states.device):
        if not _in_fp8(*tensors[:3], weight_on_input, activation, extra):
            ran("sorted")
            return _by_sort(*tensors, weight_on_input, activation, extra, True)
        ran("fp8")
        scales, empty = _scales(extra), hidden_states.new_empty
        out, pre, order, buffer = fp8.forward(*tensors, *scales, None, activation, True)
        dtype, experts = hidden_states.dtype, len(gate_up_proj)
        if order.block_m != kernels.tiles.block_m(top_k_index.numel(), experts, dtype):
            _, buffer = sort(top_k_index, experts, dtype)  # the backward's tiles
        return out, pre, buffer, empty(0), empty(0)


def _fake_backward(
    d_out, hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, pre, buffer, sides,
    weight_on_input, activation, extra, need
):  # fmt: skip
    inputs = (hidden_states, gate_up_proj, down_proj, top_k_weights, *extra)
    return [
        (torch.empty_like(x) if x.dim() == 3 else x.new_empty(x.shape)) if n else x.new_empty(0)
        for x, n in zip(inputs, need)
    ]


@op(_fake_backward)
def _experts_backward(
    d_out: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pre: Tensor,
    buffer: Tensor,
    sides: list[Tensor],
    weight_on_input: bool,
    activation: str,
    extra: list[Tensor],
    need: list[bool],
) -> list[Tensor]:
    """Gradients of (hidden_states, gate_up_proj, down_proj, top_k_weights, *extra); empty if not
    needed."""
    grads = _gradients(
        d_out, hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, pre, buffer,
        sides, weight_on_input, activation, extra, need, (None, None),
    )  # fmt: skip
    return [hidden_states.new_empty(0) if grad is None else grad for grad in grads]


def _gradients(
    d_out: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pre: Tensor,
    buffer: Tensor,
    sides: list[Tensor],
    weight_on_input: bool,
    activation: str,
    extra: list[Tensor],
    need: list[bool],
    leaves: tuple[Leaf | None, Leaf | None],
) -> list[Tensor | None]:
    """Gradients as `_experts_backward` has them; None if not needed, or for a weight whose gradient
    will be added to its leaf's .grad.

    With y = x (W + B A)^T: dA = (dy B)^T x, dB = dy^T (x A^T), and dx = dy W + (dy B) A is a
    product with the transposed weight and its low-rank update A^T B^T.
    """
    need_hidden, need_gate_up, need_down, need_weights, *need_extra = need
    need_a1, need_b1, need_a2, need_b2, *need_biases = need_extra or (False,) * 6
    gate_up_scale, down_scale = _scales(extra)
    a1, b1, a2, b2, *_ = extra or (None,) * 4
    _, down_bias = _biases(extra)
    grads: list[Tensor | None] = [None] * len(need)
    top_k, slots = top_k_weights.shape[1], top_k_weights.numel()
    with on_device(hidden_states.device):
        x, d_out = rows_contiguous(hidden_states), rows_contiguous(d_out)
        order = _view(buffer, slots, gate_up_proj.shape[0], x.dtype)
        turned = [
            () if a is None or not a.numel() else (b.transpose(1, 2), a.transpose(1, 2))
            for a, b in ((a1, b1), (a2, b2))
        ]
        update, into = _update(x, order, *turned[1]), None
        parts = kernels.dequantize.few_at_a_time(down_proj, down_scale, order, x.dtype, update)
        for weight, scale, part in parts:
            into = kernels.dgate.dgate(
                d_out, weight, part, top_k_weights.contiguous(), pre,
                weight_on_input=weight_on_input, need_act=need_down or need_a2,
                need_pre=need_hidden or need_gate_up or need_a1 or need_b1 or need_biases[0],
                need_scale=need_weights, activation=activation, scale=scale, low_rank=update,
                into=into,
            )  # fmt: skip
        d_pre, act, d_scale = into
        del into, weight, scale, part  # widened weights, perhaps
        if need_weights:
            out, start = top_k_weights.new_empty(top_k_weights.shape), None
            if down_bias is not None:
                start = _by_choice(d_out, down_bias, top_k_index)
            grads[3] = kernels.combine.sum_partials(d_scale, order.slot_to_row, out, start)
        if need_down:
            grads[2] = gradient(down_proj, leaves[1], Product(d_out, act, order, top_k))
        if need_a2:
            grads[6] = torch.empty_like(a2)
            kernels.dw.dw(act, update.side, order, out=grads[6].transpose(1, 2))
        del act  # unless its product waits
        if need_b2:
            side, grads[7] = sides[1], torch.empty_like(b2)
            if not weight_on_input:
                side = side * _in_order(top_k_weights, order, side.dtype)
            kernels.dw.dw(d_out, side, order, gather=top_k, out=grads[7])
        if need_biases[1]:
            grads[9] = torch.empty_like(extra[5], memory_format=torch.contiguous_format)
            scale = _in_order(top_k_weights, order, d_out.dtype)
            kernels.dw.dw(d_out, scale, order, gather=top_k, out=grads[9][:, :, None])
        if need_biases[0]:
            grads[8] = torch.empty_like(extra[4], memory_format=torch.contiguous_format)
            ones = d_pre.new_ones(slots, 1)
            kernels.dw.dw(ones, d_pre, order, out=grads[8][:, None])
        if need_gate_up:
            product = Product(x, d_pre, order, top_k, turned=True)
            grads[1] = gradient(gate_up_proj, leaves[0], product)
        if need_b1:
            grads[5] = torch.empty_like(b1)
            kernels.dw.dw(d_pre, sides[0], order, out=grads[5])
        update = _update(x, order, *turned[0])
        if need_hidden:
            rows = x.new_empty(slots, x.shape[1])
            input_gradient(d_pre, gate_up_proj, gate_up_scale, order, out=rows, low_rank=update)
            grads[0] = kernels.combine.combine(rows, order.slot_to_row, top_k)
        elif need_a1:
            kernels.grouped_gemm.grouped_gemm(d_pre, update.a, order, out=update.side)
        if need_a1:
            grads[4] = torch.empty_like(a1)
            kernels.dw.dw(x, update.side, order, gather=top_k, out=grads[4].transpose(1, 2))
    return grads


def _in_order(weights: Tensor, order: ExpertOrder, dtype: torch.dtype) -> Tensor:
    """[S, 1], in expert order."""
    return weights.reshape(-1, 1).index_select(0, order.row_to_slot).to(dtype)


def _by_choice(d_out: Tensor, bias: Tensor, index: Tensor) -> Tensor:
    """<d_out[t], bias[index[t, k]]> [T, K] in float32, of dropped slots whatever."""
    if d_out.is_cuda and d_out.dtype != torch.float32:
        products = torch.mm(d_out, bias.T, out_dtype=torch.float32)
    else:
        products = d_out.float() @ bias.float().T
    return products.gather(1, index.long().clamp(0, len(bias) - 1))


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, gate_up_proj, down_proj, index, weights, on_input, act, *extra):
        options = on_input, act
        out, pre, buffer, *sides = _experts_forward(
            hidden_states, gate_up_proj, down_proj, index, weights, *options, list(extra)
        )
        up, down = stored(gate_up_proj), stored(down_proj)
        kept = (hidden_states, up[0], down[0], index, weights, pre, buffer)
        ctx.save_for_backward(*kept, *(sides if extra else ()), *extra)
        ctx.turned = up[1], down[1]
        ctx.options = options
        ctx.leaves = leaf(gate_up_proj, *up), leaf(down_proj, *down)
        return out

    @staticmethod
    def backward(ctx, d_out):
        hidden, gate_up, down, _, weights, _, _, *others = ctx.needs_input_grad
        need = [hidden, gate_up, down, weights, *others]
        saved = ctx.saved_tensors  # once: checkpointing gives each tensor back once
        tensors, sides, extra = list(saved[:7]), list(saved[7:9]), list(saved[9:])
        tensors[1:3] = (w.mT if turned else w for w, turned in zip(saved[1:3], ctx.turned))
        if differentiable.wanted(d_out):
            if len(extra) > 6:
                differentiable.refuse_fp8()
            inputs, need = (*tensors[:5], *extra), (*need[:3], False, *need[3:])
            twin = functools.partial(differentiable.experts, *ctx.options)
            d_inputs = differentiable.gradients(twin, inputs, need, d_out)
            return *d_inputs[:5], None, None, *d_inputs[5:]
        arguments = (d_out, *tensors, sides, *ctx.options, extra, need)
        if torch.compiler.is_compiling():
            grads = _experts_backward(*arguments)
        else:
            grads = _gradients(*arguments, ctx.leaves)
        d_hidden, d_gate_up, d_down, d_weights, *d_extra = (
            grad if wanted else None for grad, wanted in zip(grads, need)
        )
        return d_hidden, d_gate_up, d_down, None, d_weights, None, None, *d_extra


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on: str = "output",
    activation: Activation | str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
    gate_up_scale_inv: Tensor | None = None,
    down_scale_inv: Tensor | None = None,
) -> Tensor:
    """The MoE MLP: each token's K experts, silu(x W_gate^T) * (x W_up^T) W_down^T, summed.

    Args:
        hidden_states: [T, H], bfloat16, float16 or float32. Cast to the weights' dtype, unless
            that is FP8.
        gate_up_proj: [E, 2I, H], gate rows first unless the activation says otherwise ([E, I, H]
            when it is ungated). Any strides: pass a transposed view of weights stored [E, H, 2I];
            no copy is made.
        down_proj: [E, H, I], dtype and device of gate_up_proj.
        top_k_index: [T, K] integer. Ids outside 0 .. E-1 (expert-parallel sentinels) are dropped:
            they add exact zeros and get zero gradients. An expert may come twice in a token.
        top_k_weights: [T, K] floating point.
        weight_on: "output" multiplies each expert's output by its weight; "input" its input
            (Llama4), in float32 after the first product.
        activation: a moe_patch.activation.Activation instead of silu(gate) * up, or its act:
            "silu", "gelu", "gelu_tanh", "relu", "relu2".
        gate_up_bias, down_bias: [E, 2I] and [E, H], of the experts' projections; not with
            weight_on="input".
        gate_up_low_rank, down_low_rank: LoRA: (A [E, R, H], B [E, 2I, R]) and (A [E, R, I],
            B [E, H, R]), with its scaling in one of them; cast to the dtype computed in.
        gate_up_scale_inv, down_scale_inv: [E, ceil(2I / 128), ceil(H / 128)] and
            [E, ceil(H / 128), ceil(I / 128)], float32 or float8_e8m0fnu: the weights are
            float8_e4m3fn, and each 128 x 128 block of them times its scale is what they stand for
            (the last blocks may be ragged). Such weights are frozen: gradients flow to everything
            else. They are never dequantised as a whole. Where the card has FP8 products and I is a
            multiple of 128, activations are quantised too, 1 x 128, as Hugging Face does, and
            gradients go straight through that; else, with biases, low-rank updates or
            weight_on="input", and for a few tokens without gradients, they stay as they are.

    Returns:
        [T, H] in the dtype of hidden_states, a fresh tensor. Differentiable in all float inputs;
        gradients come in their inputs' dtypes. Two runs on the same inputs give the same bits.
        Plain PyTorch computes second derivatives (not through FP8 weights), and everything under
        forward-mode AD, torch.func and torch.jit.trace.

    Raises:
        ValueError: shapes or devices that do not fit together, an unknown weight_on or activation,
            FP8 weights without scales or the reverse, or that want a gradient.
        TypeError: unsupported or mixed dtypes.
        RuntimeError: the kernels cannot run on this device.
    """
    options = weight_on == "input", str(activation)
    if not torch.compiler.is_compiling():
        parse(options[1])  # or raises
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    scales = (gate_up_scale_inv, down_scale_inv)
    check(
        *tensors, weight_on, 1 if options[1].endswith("ungated") else 2, gate_up_bias, down_bias,
        *scales,
    )  # fmt: skip
    scaled = scales[0] is not None
    dtype = hidden_states.dtype if scaled else gate_up_proj.dtype
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
        if not scaled:
            gate_up_proj, down_proj = gate_up_proj.to(dtype), down_proj.to(dtype)
    x = hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype)
    tensors = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    none = None, None
    biased = gate_up_bias is not None or down_bias is not None
    if scaled or biased or gate_up_low_rank or down_low_rank:
        extra = [*(gate_up_low_rank or none), *(down_low_rank or none), gate_up_bias, down_bias]
        # each its own: torch.compile refuses one tensor twice
        extra = [x.new_empty(0) if t is None else t.to(dtype) for t in extra]
        extra += scales if scaled else ()
    else:
        extra = []
    if differentiable.why_not_kernels():
        out = differentiable.experts(*options, *tensors, *extra)
    elif torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *extra)):
        out = _FusedExperts.apply(*tensors, *options, *extra)
    else:
        out = _experts_inference(*tensors, *options, extra)
    return out if out.dtype == hidden_states.dtype else out.to(hidden_states.dtype)
