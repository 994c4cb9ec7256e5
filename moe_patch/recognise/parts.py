"""Experts that no one kernel computes: grouped GEMM, the class's own gate, grouped GEMM.

For gates that are no known function, with biases, interleaved halves or whatever else they have,
and for experts that normalise their output before it is weighted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import GATE
from ..ops.grouped import add_bias, expert_order, grouped_gemm
from ..paths import ran


class Form(NamedTuple):
    """What a class of experts says of its instance's parameters, as HF's decorator has it."""

    up_name: str
    """Name of the first projection."""
    has_bias: bool
    is_transposed: bool
    """Whether the weights are stored [E, K, N]."""
    normalises: bool
    """Whether every row of an expert's output is normalised before it is weighted."""


def form_of(experts: nn.Module) -> Form:
    """Everything that a forward asks of the experts besides weights and gate."""
    return Form(
        "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj",
        getattr(experts, "has_bias", False),
        getattr(experts, "is_transposed", False),
        vars(experts).get("has_post_expert_norm", False),
    )


def stored_transposed(experts: nn.Module) -> bool:
    """Whether the class stores its weights [E, K, N]. Llama4's does not say so."""
    return getattr(experts, "is_transposed", "Llama4" in type(experts).__name__)


def has_gate(experts: nn.Module) -> bool:
    """Whether the first projection makes gates too, as HF's decorator has it."""
    return getattr(experts, "has_gate", True)


def up_name(experts: nn.Module) -> str:
    """Name of the first projection."""
    return "gate_up_proj" if has_gate(experts) else "up_proj"


def gate(experts: Any, rows: Tensor) -> Tensor:
    """The class's own activation of [S, N] rows of the first projection -> [S, I]."""
    return getattr(experts, GATE)(rows) if has_gate(experts) else experts.act_fn(rows)


def normalises(experts: nn.Module) -> bool:
    """Whether every row of an expert's output is normalised before it is weighted (MuseSpark)."""
    return vars(experts).get("has_post_expert_norm", False)  # not in transformers 5.17


def by_parts(
    experts: Any,
    hidden_states: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """As `fused_experts`: up_proj [E, N, H], down_proj [E, H, I]; biases are the module's."""
    if not torch.compiler.is_compiling():
        ran("by parts")
    (tokens, top_k), num_experts = top_k_index.shape, up_proj.shape[0]
    dtype, device = up_proj.dtype, hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    x, up_proj, down_proj = (t.to(dtype) for t in (hidden_states, up_proj, down_proj))
    order = expert_order(top_k_index, num_experts, dtype)
    dropped = (top_k_index < 0) | (top_k_index >= num_experts)
    rows = grouped_gemm(x, up_proj, order, gather=True)
    biased = getattr(experts, "has_bias", False)
    if biased:
        bias = getattr(experts, f"{up_name(experts)}_bias").to(dtype)
        rows = add_bias(rows, bias, top_k_index, order)
    rows = grouped_gemm(gate(experts, rows).to(dtype), down_proj, order, scatter=True)
    if biased:
        bias = experts.down_proj_bias.to(dtype)
        rows = add_bias(rows, bias, top_k_index, order, scattered=True)
    rows = rows.masked_fill(dropped.reshape(-1, 1), 0)  # what a bias made of them
    if normalises(experts):
        rows = experts.post_expert_norm(rows)
    rows = rows.view(tokens, top_k, -1).float() * top_k_weights.float()[..., None]
    return rows.sum(1).to(hidden_states.dtype)
