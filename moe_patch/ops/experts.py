"""fused_experts(): the MoE MLP as one differentiable function.

The pipeline is in forward.py and backward.py; here are its three operators, which torch.compile
sees as opaque, the autograd function, and the public function that checks and casts.
Kept for the backward: hidden_states, the pre-activation [S, 2I], the order of slots and the
routing weights; everything else is computed again (SonicMoE, arXiv:2512.14080).

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import kernels
from ..activation import Activation, parse
from ..formats.packed import Packed
from ..kernels import op
from ..order import ExpertOrder
from . import backward, differentiable, forward
from .accumulate import stored
from .checks import check
from .low_rank import LowRank
from .operands import NUM_INPUTS, Inputs, Projection, Routing

__all__ = ["fused_experts"]


# Operators. Their first arguments are `Inputs.flat()`: torch.compile passes tensors one by one.


@op(lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape))
def _experts_inference(
    hidden_states: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scale: Tensor | None,
    gate_up_zeros: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scale: Tensor | None,
    down_zeros: Tensor | None,
    top_k_index: Tensor,
    weight_on_input: bool,
    activation: str,
    format: str = "",
) -> Tensor:
    """out [T, H]; nothing is kept for a backward."""
    gate_up = Projection(
        gate_up_proj, gate_up_bias, gate_up_a, gate_up_b, gate_up_scale, gate_up_zeros
    ).put_together(format)
    down = Projection(down_proj, down_bias, down_a, down_b, down_scale, down_zeros).put_together(
        format
    )
    routing = Routing(top_k_index, top_k_weights, weight_on_input)
    return forward.infer(hidden_states, gate_up, down, routing, activation)


def _fake_forward(*arguments):
    inputs, (index, *_) = Inputs.of(arguments[:NUM_INPUTS]), arguments[NUM_INPUTS:]
    x, slots, (experts, width, _) = inputs.hidden_states, index.numel(), inputs.gate_up.weight.shape
    height = kernels.tiles.block_m(slots, experts, x.dtype)
    numel = ExpertOrder.numel(slots, experts, height)
    return (
        x.new_empty(x.shape),
        x.new_empty(slots, width),
        index.new_empty(numel, dtype=torch.int32),
        *(
            x.new_empty(0 if each.a is None else (slots, each.a.shape[1]))
            for each in (inputs.gate_up, inputs.down)
        ),
    )


@op(_fake_forward)
def _experts_forward(
    hidden_states: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scale: Tensor | None,
    gate_up_zeros: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scale: Tensor | None,
    down_zeros: Tensor | None,
    top_k_index: Tensor,
    weight_on_input: bool,
    activation: str,
    format: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`forward.Forward`, empty where that has None."""
    gate_up = Projection(
        gate_up_proj, gate_up_bias, gate_up_a, gate_up_b, gate_up_scale, gate_up_zeros
    ).put_together(format)
    down = Projection(down_proj, down_bias, down_a, down_b, down_scale, down_zeros).put_together(
        format
    )
    routing = Routing(top_k_index, top_k_weights, weight_on_input)
    made = forward.forward(hidden_states, gate_up, down, routing, activation, keep=True)
    out, pre, buffer, *sides = (hidden_states.new_empty(0) if x is None else x for x in made)
    gate_up_side, down_side = sides
    return out, pre, buffer, gate_up_side, down_side


def _fake_backward(*arguments):
    inputs, need = arguments[:NUM_INPUTS], arguments[-1]
    return [
        (torch.empty_like(x) if x.dim() == 3 else x.new_empty(x.shape))
        if wanted
        else inputs[0].new_empty(0)
        for x, wanted in zip(inputs, need)
    ]


@op(_fake_backward)
def _experts_backward(
    hidden_states: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scale: Tensor | None,
    gate_up_zeros: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scale: Tensor | None,
    down_zeros: Tensor | None,
    top_k_index: Tensor,
    weight_on_input: bool,
    activation: str,
    format: str,
    pre: Tensor,
    buffer: Tensor,
    gate_up_side: Tensor | None,
    down_side: Tensor | None,
    d_out: Tensor,
    need: list[bool],
) -> list[Tensor]:
    """Gradients in the order of `Inputs.flat()`; empty where not needed."""
    gate_up = Projection(
        gate_up_proj, gate_up_bias, gate_up_a, gate_up_b, gate_up_scale, gate_up_zeros
    ).put_together(format)
    down = Projection(down_proj, down_bias, down_a, down_b, down_scale, down_zeros).put_together(
        format
    )
    kept = backward.Kept(
        hidden_states, gate_up, down, Routing(top_k_index, top_k_weights, weight_on_input),
        activation, pre, buffer, gate_up_side, down_side,
    )  # fmt: skip
    grads = backward.gradients(kept, d_out, Inputs.of(need)).flat()
    return [hidden_states.new_empty(0) if grad is None else grad for grad in grads]


class _FusedExperts(torch.autograd.Function):
    """Takes `Inputs.flat()`, then what needs no gradient."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, (index, *options) = arguments[:NUM_INPUTS], arguments[NUM_INPUTS:]
        x, weights, gate_up, down = Inputs.of(inputs)
        if torch.compiler.is_compiling():
            out, *kept = _experts_forward(*arguments)
        else:
            on_input, activation, format = options
            routing, together = Routing(index, weights, on_input), (gate_up, down)
            if format:
                together = gate_up.put_together(format), down.put_together(format)
            out, *kept = forward.forward(x, *together, routing, activation, keep=True)
        ctx.options = options
        up, low = stored(gate_up.weight), stored(down.weight)
        ctx.turned, ctx.leaves = (up.turned, low.turned), (up.leaf, low.leaf)
        ctx.save_for_backward(  # Inputs.flat() with the weights as they are stored
            x, weights, up.tensor, *gate_up[1:], low.tensor, *down[1:], index, *kept
        )
        return out

    @staticmethod
    def backward(ctx, d_out):
        need = Inputs.of(ctx.needs_input_grad[:NUM_INPUTS])
        saved = ctx.saved_tensors  # once: checkpointing gives each tensor back once
        x, weights, *projections = Inputs.of(saved[:NUM_INPUTS])
        index, *made = saved[NUM_INPUTS:]
        gate_up, down = (
            each._replace(weight=each.weight.mT) if turned else each
            for each, turned in zip(projections, ctx.turned)
        )
        inputs = Inputs(x, weights, gate_up, down)
        on_input, activation, format = ctx.options
        if differentiable.wanted(d_out):
            if gate_up.scale is not None and not format:
                differentiable.refuse_fp8()
            twin = functools.partial(_plain, index, *ctx.options)
            grads = differentiable.gradients(twin, inputs.flat(), need.flat(), d_out)
        elif torch.compiler.is_compiling():
            wanted = list(need.flat())
            grads = _experts_backward(*inputs.flat(), index, *ctx.options, *made, d_out, wanted)
            grads = [grad if each else None for grad, each in zip(grads, wanted)]
        else:
            if format:
                gate_up, down = gate_up.put_together(format), down.put_together(format)
            routing = Routing(index, weights, on_input)
            kept = backward.Kept(x, gate_up, down, routing, activation, *made, *ctx.leaves)
            grads = backward.gradients(kept, d_out, need).flat()
        return *grads, None, None, None, None


def _plain(
    index: Tensor, on_input: bool, activation: str, format: str, *inputs: Tensor | None
) -> Tensor:
    """The forward of `Inputs.flat()` in plain PyTorch."""
    x, weights, gate_up, down = Inputs.of(inputs)
    gate_up, down = gate_up.put_together(format), down.put_together(format)
    return differentiable.experts(x, gate_up, down, Routing(index, weights, on_input), activation)


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor | Packed,
    down_proj: Tensor | Packed,
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
            no copy is made. Or a `moe_patch.formats.packed.Packed` of that shape: weights in 4
            bits, frozen, widened where they are multiplied.
        down_proj: [E, H, I], dtype and device of gate_up_proj, or Packed in the same format.
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
    activation = str(activation)
    if not torch.compiler.is_compiling():
        parse(activation)  # or raises
    if not (type(hidden_states) is type(top_k_index) is type(top_k_weights) is Tensor):
        hidden_states = _arrived(hidden_states)
        top_k_index, top_k_weights = _arrived(top_k_index), _arrived(top_k_weights)
    (a, b), (down_a, down_b) = gate_up_low_rank or (None, None), down_low_rank or (None, None)
    gate_up = Projection(gate_up_proj, gate_up_bias, a, b, gate_up_scale_inv)
    down = Projection(down_proj, down_bias, down_a, down_b, down_scale_inv)
    routing = Routing(top_k_index, top_k_weights, weight_on == "input")
    projections = 1 if activation.endswith("ungated") else 2
    check(hidden_states, gate_up, down, routing, weight_on, projections)

    format = "" if isinstance(gate_up_proj, Tensor) else gate_up_proj.format
    frozen = bool(format) or gate_up.scale is not None
    dtype = hidden_states.dtype if frozen else gate_up.weight.dtype
    autocast = torch.is_autocast_enabled(hidden_states.device.type)
    if autocast:
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
    x = hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype)
    biased = gate_up_bias is not None or down_bias is not None
    if autocast or biased or gate_up_low_rank or down_low_rank:
        gate_up, down = _cast(gate_up, dtype, frozen), _cast(down, dtype, frozen)

    flat = (gate_up.taken_apart(), down.taken_apart()) if format else (gate_up, down)
    inputs = x, top_k_weights, *flat[0], *flat[1]  # as Inputs.flat()
    if differentiable.why_not_kernels():
        out = differentiable.experts(x, gate_up, down, routing, activation)
    elif torch.is_grad_enabled() and any([z.requires_grad for z in inputs if z is not None]):
        out = _FusedExperts.apply(*inputs, top_k_index, routing.on_input, activation, format)
    elif torch.compiler.is_compiling():
        out = _experts_inference(*inputs, top_k_index, routing.on_input, activation, format)
    else:
        out = forward.infer(x, gate_up, down, routing, activation)
    return out if out.dtype == hidden_states.dtype else out.to(hidden_states.dtype)


def _arrived(tensor: Tensor) -> Tensor:
    """The result of a collective that may be under way (torch's AsyncCollectiveTensor, as experts
    get it that are spread over ranks) once it is there: until then it has no memory. A copy,
    because views do not wait."""
    return tensor.clone() if hasattr(tensor, "trigger_wait") else tensor


def _cast(projection: Projection, dtype: torch.dtype, frozen: bool) -> Projection:
    """In that dtype, but for a frozen weight and its scales; all but the weight contiguous."""
    weight, bias, a, b, *scales = projection
    bias, a, b = [None if each is None else each.to(dtype).contiguous() for each in (bias, a, b)]
    return Projection(weight if frozen else weight.to(dtype), bias, a, b, *scales)
