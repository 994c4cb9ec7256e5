"""The experts' backward: one function a gradient, from the output inwards.

    d_out [T, H] -> dgate: d_act = d_out W_down; with the activation computed again from `pre`,
                    d_pre [S, 2I], act [S, I] and what each slot's routing weight gets
                 -> d_top_k_weights [T, K]
                 -> d_down_projection: d_out^T act
                 -> d_gate_up_projection: d_pre^T x
                 -> d_hidden_states: d_pre W_gate_up, combined to [T, H]

With y = x (W + B A)^T: dA = (dy B)^T x, dB = dy^T (x A^T), and dx = dy W + (dy B) A is a product
with the transposed weight and its low-rank update A^T B^T. Biases sum the rows of dy.

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots in expert
order, R rank of a low-rank update. (SonicMoE, arXiv:2512.14080.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import on_device
from ..kernels.ahead import compiled_together
from ..order import ExpertOrder
from .accumulate import Leaf, Product, gradient
from .forward import update
from .grouped import input_gradient, rows_contiguous
from .operands import Inputs, Projection, Routing


class Kept(NamedTuple):
    """What the forward left for the backward."""

    x: Tensor  # [T, H]
    gate_up: Projection
    down: Projection
    routing: Routing
    activation: str
    pre: Tensor  # [S, 2I]: the first projection, before the activation
    buffer: Tensor  # the order of slots
    gate_up_side: Tensor | None  # [S, R]: x A^T
    down_side: Tensor | None  # [S, R]: act A^T
    gate_up_leaf: Leaf | None = None
    """The parameter to whose `.grad` a weight's gradient may be added; None: it is returned."""
    down_leaf: Leaf | None = None

    def order(self) -> ExpertOrder:
        """Slots in expert order."""
        slots, experts = self.routing.index.numel(), self.gate_up.weight.shape[0]
        height = kernels.tiles.block_m(slots, experts, self.x.dtype)
        return ExpertOrder.view(self.buffer, slots, experts, height)


class Gate(NamedTuple):
    """What the backward of the activation and the second product yields, in expert order."""

    d_pre: Tensor  # [S, 2I], empty if nothing needs it
    act: Tensor  # [S, I], the same
    d_scale: Tensor  # [S, column tiles] float32, the same: parts of d_top_k_weights
    side: Tensor | None  # [S, R]: d_out B of the second projection's update


@compiled_together
def gradients(kept: Kept, d_out: Tensor, need: Inputs) -> Inputs:
    """Gradients of the inputs that `need` flags.

    None elsewhere, and for a weight whose gradient will be added to its leaf's `.grad`.
    """
    with on_device(d_out.device):
        x, d_out, order = rows_contiguous(kept.x), rows_contiguous(d_out), kept.order()
        d_pre, act, d_scale, side = dgate(kept, d_out, order, need)
        d_weights = d_top_k_weights(kept, d_out, d_scale, order) if need.top_k_weights else None
        d_down = d_down_projection(kept, d_out, act, side, order, need.down)
        del act  # unless its product waits
        d_gate_up = d_gate_up_projection(kept, x, d_pre, order, need.gate_up)
        d_x, side = d_hidden_states(kept, x, d_pre, order, need)
        if need.gate_up.a:
            d_a = d_gate_up_a(kept, x, side, order)
            d_gate_up = d_gate_up._replace(a=d_a)
    return Inputs(d_x, d_weights, d_gate_up, d_down)


def dgate(kept: Kept, d_out: Tensor, order: ExpertOrder, need: Inputs) -> Gate:
    """Through the second projection and the activation."""
    down, first = kept.down, need.gate_up
    need_pre = need.hidden_states or first.weight or first.bias or first.a or first.b
    turned = None if down.a is None else update(d_out, order, down.b.mT, down.a.mT)
    weights, into = kept.routing.weights.contiguous(), None
    for part in kernels.dequantize.few_at_a_time(
        down.weight, down.scale, order, d_out.dtype, turned
    ):
        into = kernels.dgate.dgate(
            d_out, part.weight, part.order, weights, kept.pre,
            weight_on_input=kept.routing.on_input,
            need_pre=need_pre, need_act=need.down.weight or need.down.a,
            need_scale=need.top_k_weights,
            activation=kept.activation, scale=part.scale, low_rank=part.low_rank, into=into,
        )  # fmt: skip
    d_pre, act, d_scale = into
    return Gate(d_pre, act, d_scale, turned.side if turned else None)


def d_top_k_weights(kept: Kept, d_out: Tensor, d_scale: Tensor, order: ExpertOrder) -> Tensor:
    """[T, K]: each slot's partial sums, and what the second projection's bias adds to them."""
    index, weights, _ = kept.routing
    start = None if kept.down.bias is None else _by_choice(d_out, kept.down.bias, index)  # [T, K]
    out = weights.new_empty(weights.shape)
    return kernels.combine.sum_partials(d_scale, order.slot_to_row, out, start)


def d_down_projection(
    kept: Kept,
    d_out: Tensor,
    act: Tensor,
    side: Tensor | None,
    order: ExpertOrder,
    need: Projection,
) -> Projection:
    """d_out [T, H] is dy of each of a token's slots, times its routing weight.

    `act` carries that weight already; the sides do not.
    """
    down, top_k = kept.down, kept.routing.weights.shape[1]
    weight = bias = a = b = None
    if need.weight:
        product = Product(d_out, act, order, top_k)
        weight = gradient(down.weight, kept.down_leaf, product)  # [E, H, I]
    if need.a:
        a = torch.empty_like(down.a)  # [E, R, I]
        kernels.dw.dw(act, side, order, out=a.mT)
    if need.b:
        rows, b = kept.down_side, torch.empty_like(down.b)  # [S, R], [E, H, R]
        if not kept.routing.on_input:
            rows = rows * _in_order(kept.routing.weights, order, rows.dtype)
        kernels.dw.dw(d_out, rows, order, gather=top_k, out=b)
    if need.bias:
        bias = torch.empty_like(down.bias)  # [E, H]
        weights = kept.routing.weights.contiguous()  # [T, K]
        kernels.row_sums.row_sums(d_out, order, gather=top_k, slot_weight=weights, out=bias)
    return Projection(weight, bias, a, b)


def d_gate_up_projection(
    kept: Kept, x: Tensor, d_pre: Tensor, order: ExpertOrder, need: Projection
) -> Projection:
    """All but A's, which waits for d_pre B: see `d_hidden_states`."""
    gate_up, top_k = kept.gate_up, kept.routing.weights.shape[1]
    weight = bias = b = None
    if need.bias:
        bias = torch.empty_like(gate_up.bias)  # [E, 2I]
        kernels.row_sums.row_sums(d_pre, order, out=bias)
    if need.weight:
        product = Product(x, d_pre, order, top_k, turned=True)
        weight = gradient(gate_up.weight, kept.gate_up_leaf, product)  # [E, 2I, H]
    if need.b:
        b = torch.empty_like(gate_up.b)  # [E, 2I, R]
        kernels.dw.dw(d_pre, kept.gate_up_side, order, out=b)
    return Projection(weight, bias, None, b)


def d_hidden_states(
    kept: Kept, x: Tensor, d_pre: Tensor, order: ExpertOrder, need: Inputs
) -> tuple[Tensor | None, Tensor | None]:
    """(d_x [T, H] if needed, d_pre B [S, R] if there is an update)."""
    gate_up, top_k, d_x = kept.gate_up, kept.routing.weights.shape[1], None
    turned = None if gate_up.a is None else update(x, order, gate_up.b.mT, gate_up.a.mT)
    if need.hidden_states:
        rows = x.new_empty(d_pre.shape[0], x.shape[1])  # [S, H]
        input_gradient(d_pre, gate_up.weight, gate_up.scale, order, out=rows, low_rank=turned)
        d_x = kernels.combine.combine(rows, order.slot_to_row, top_k)  # [T, H]
    elif need.gate_up.a:
        kernels.grouped_gemm.grouped_gemm(d_pre, turned.a, order, out=turned.side)
    return d_x, turned.side if turned else None


def d_gate_up_a(kept: Kept, x: Tensor, side: Tensor, order: ExpertOrder) -> Tensor:
    """[E, R, H] of x [T, H] and d_pre B [S, R]."""
    d_a, top_k = torch.empty_like(kept.gate_up.a), kept.routing.weights.shape[1]
    kernels.dw.dw(x, side, order, gather=top_k, out=d_a.mT)
    return d_a


def _in_order(weights: Tensor, order: ExpertOrder, dtype: torch.dtype) -> Tensor:
    """[S, 1]: routing weights [T, K] in expert order."""
    return weights.reshape(-1, 1).index_select(0, order.row_to_slot).to(dtype)


def _by_choice(d_out: Tensor, bias: Tensor, index: Tensor) -> Tensor:
    """<d_out[t], bias[index[t, k]]> [T, K] in float32; any number where a slot is dropped."""
    if d_out.is_cuda and d_out.dtype != torch.float32:
        products = torch.mm(d_out, bias.T, out_dtype=torch.float32)
    else:
        products = d_out.float() @ bias.float().T
    return products.gather(1, index.long().clamp(0, len(bias) - 1))
