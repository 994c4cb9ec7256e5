"""The experts' forward: decode | sort, gate_up, down, combine | the same in FP8.

    hidden_states [T, H]
      few tokens, no gradients ->  decode            two kernels that read each chosen expert once
      else -> sort_tokens                            slots in expert order
           -> gate_up: gather, GEMM, activation      [S, I]
           -> grouped_gemm: down                     [S, H]
           -> combine: weighted sum of K rows        [T, H]

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots, R rank of
a low-rank update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..activation import parse
from ..formats.packed import Packed
from ..kernels import on_device
from ..kernels.ahead import compiled_together
from ..order import ExpertOrder
from ..paths import ran
from . import fp8
from .grouped import rows_contiguous, sort
from .operands import Projection, Routing

if TYPE_CHECKING:
    from ..kernels.low_rank import LowRank


class Forward(NamedTuple):
    """The result, and what a backward needs besides the inputs."""

    out: Tensor  # [T, H]
    pre: Tensor | None  # [S, 2I]: the first projection, before the activation, in expert order
    buffer: Tensor  # int32: the order of slots, see ExpertOrder.view
    gate_up_side: Tensor | None  # [S, R]: x A^T of the first projection's low-rank update
    down_side: Tensor | None  # [S, R]: act A^T of the second's


def infer(
    x: Tensor, gate_up: Projection, down: Projection, routing: Routing, activation: str
) -> Tensor:
    """x [T, H] -> [T, H]; nothing is kept for a backward."""
    adapted = gate_up.a is not None or down.a is not None
    if adapted or not kernels.decode.decodes(routing.index, gate_up.weight, down.weight):
        return forward(x, gate_up, down, routing, activation, keep=False).out
    ran("decode")
    with on_device(x.device):
        return kernels.decode.decode(
            rows_contiguous(x), gate_up.weight, down.weight,
            routing.index.contiguous(), routing.weights.contiguous(),
            weight_on_input=routing.on_input, activation=activation,
            gate_up_scale=gate_up.scale, down_scale=down.scale,
            gate_up_bias=gate_up.bias, down_bias=down.bias,
        )  # fmt: skip


def forward(
    x: Tensor,
    gate_up: Projection,
    down: Projection,
    routing: Routing,
    activation: str,
    *,
    keep: bool,
) -> Forward:
    """x [T, H] -> out [T, H]; with `keep` also the pre-activation that the backward reads."""
    with on_device(x.device):
        if gate_up.scale is not None and _multiplies_fp8(x, gate_up, down, routing, activation):
            ran("fp8")
            return _in_fp8(x, gate_up, down, routing, activation, keep)
        ran("sorted")
        return _sorted(x, gate_up, down, routing, activation, keep)


@compiled_together
def _sorted(
    x: Tensor,
    gate_up: Projection,
    down: Projection,
    routing: Routing,
    activation: str,
    keep: bool,
) -> Forward:
    x, weights = rows_contiguous(x), routing.weights.contiguous()  # [T, H], [T, K]
    order, buffer = sort(routing.index, gate_up.weight.shape[0], x.dtype)
    first = None if gate_up.a is None else update(x, order, gate_up.a, gate_up.b)
    second = None if down.a is None else update(x, order, down.a, down.b)

    packed = isinstance(gate_up.weight, Packed) and isinstance(down.weight, Packed)
    both = (gate_up.weight, first), (down.weight, second)
    in_steps = packed and _by_registers(*both, order, x.dtype, activation)
    made = None
    for part in kernels.dequantize.few_at_a_time(
        gate_up.weight, gate_up.scale, order, x.dtype, first, gate_up.bias, backward=False
    ):
        made = kernels.gate_up.gate_up(
            x, part.weight, part.order, weights,
            weight_on_input=routing.on_input, save_pre=keep, activation=activation,
            scale=part.scale, bias=part.bias, low_rank=part.low_rank, into=made,
            act_in_steps=in_steps,
        )  # fmt: skip
    act, pre = made  # [S, I] or, in steps, [S, width(I)]; [S, 2I]
    rows = x.new_empty(act.shape[0], x.shape[1])  # [S, H]
    for part in kernels.dequantize.few_at_a_time(
        down.weight, down.scale, order, x.dtype, second, down.bias, backward=False
    ):
        kernels.grouped_gemm.grouped_gemm(
            act, part.weight, part.order, out=rows,
            scale=part.scale, bias=part.bias, low_rank=part.low_rank, in_steps=in_steps,
        )  # fmt: skip
    on_output = None if routing.on_input else weights
    out = kernels.combine.combine(rows, order.slot_to_row, weights.shape[1], on_output)  # [T, H]
    first_side, second_side = first.side if first else None, second.side if second else None
    return Forward(out, pre, buffer, first_side, second_side)


def _by_registers(
    gate_up: tuple[Packed, LowRank | None],
    down: tuple[Packed, LowRank | None],
    order: ExpertOrder,
    dtype: torch.dtype,
    activation: str,
) -> bool:
    """Whether `packed_products` compute both, with act in the order in which they read it; each is
    a weight and its update."""
    if parse(activation).form == "ungated":
        return False
    for weight, low_rank in (gate_up, down):
        if not kernels.packed_products.supported(weight, order, dtype, low_rank):
            return False
        if kernels.dequantize.widens(weight, None, order, dtype, low_rank, backward=False):
            return False
    steps_of = kernels.packed_products.steps_of
    return steps_of(gate_up[0], order, activation) == steps_of(down[0], order)


def _multiplies_fp8(
    x: Tensor, gate_up: Projection, down: Projection, routing: Routing, activation: str
) -> bool:
    """Whether activations are quantised, too, and both products are of FP8 operands."""
    added = (gate_up.a, gate_up.bias, down.a, down.bias)
    plain = not routing.on_input and all(tensor is None for tensor in added)
    return plain and fp8.multiplies(x, gate_up.weight, down.weight, activation)


def _in_fp8(
    x: Tensor,
    gate_up: Projection,
    down: Projection,
    routing: Routing,
    activation: str,
    keep: bool,
) -> Forward:
    out, pre, order, buffer = fp8.forward(  # [T, H], [S, 2I]
        x, gate_up.weight, down.weight, routing.index, routing.weights,
        gate_up.scale, down.scale, None, activation, keep,
    )  # fmt: skip
    slots, experts = routing.index.numel(), len(gate_up.weight)
    if keep and order.block_m != kernels.tiles.block_m(slots, experts, x.dtype):
        _, buffer = sort(routing.index, experts, x.dtype)  # the backward's tiles are 16-bit
    return Forward(out, pre, buffer, None, None)


def update(x: Tensor, order: ExpertOrder, a: Tensor, b: Tensor) -> LowRank:
    """A [E, R, in] and B [E, out, R] of a low-rank update as kernels take them, with room for the
    product [S, R] of their rows and A^T."""
    side = x.new_empty(order.row_to_slot.numel(), a.shape[1])
    return kernels.low_rank.LowRank(a, b, side)
