"""Which fused activation does what an experts class's own gate does: the gate is asked.

Families write their gates anew (clamps, alphas, offsets), and new releases bring more. So a gate is
known by what it computes, not by its class.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from .. import reference
from ..activation import ACTS, Activation

KNOWN = "_fused_activation"
"""Attribute of experts: (their gate function, their act_fn, the activation or None)."""

SILU = "silu"

_PROJECTIONS = {
    "gate_up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "down_proj_bias",
    "parametrizations",  # of these, by PEFT
}


def is_silu(act_fn: Any) -> bool:
    """Whether the activation is SiLU, by its class."""
    return isinstance(act_fn, (SiLUActivation, nn.SiLU)) or act_fn is F.silu


def activation_of(experts: nn.Module) -> str | None:
    """For `fused_experts`; None when no fused activation does what the experts' gate does."""
    gate, act_fn = type(experts)._apply_gate, getattr(experts, "act_fn", None)
    if "_apply_gate" in vars(experts):
        return None
    if gate is _default_apply_gate and is_silu(act_fn):
        return SILU
    known = vars(experts).get(KNOWN)
    if known is not None and known[0] is gate and known[1] is act_fn:
        return known[2]
    if torch.compiler.is_compiling():  # it cannot be asked in a trace
        return None
    found = _ask(experts)
    vars(experts)[KNOWN] = gate, act_fn, found
    return found


def _ask(experts: nn.Module) -> str | None:
    own = [n for n, _ in experts.named_parameters() if n.split(".")[0] not in _PROJECTIONS]
    if own or list(experts.buffers()):
        return None  # what is learned does today's job today
    try:
        with torch.no_grad():
            answer = experts._apply_gate(_probe().clone())
    except Exception:  # whatever it needs, it is no function of gate and up alone
        return None
    if not isinstance(answer, Tensor) or answer.shape != (len(_probe()), 2):
        return None
    numbers = {k: v for k, v in vars(experts).items() if isinstance(v, (int, float))}
    limits = {float(v) for k, v in numbers.items() if "limit" in k and v > 0}
    alphas = {1.702} | {float(v) for k, v in numbers.items() if "alpha" in k}  # 1.702: quick_gelu
    for act, limit, offset in itertools.product(ACTS, (None, *limits), (0.0, 1.0)):
        for alpha in (1.0, *alphas) if act == "silu" else (1.0,):
            activation = Activation(act, limit, alpha, offset)
            expected = reference.glu(_probe(), activation)
            if torch.allclose(answer.to(expected), expected, rtol=1e-9, atol=1e-12):
                return str(activation)
    return None


@functools.cache
def _probe() -> Tensor:
    """[N, 4] float64: two gates and two ups a row, near zero, in between and past any limit."""
    values = torch.tensor([0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 6.9, 7.1, 12.0, 40.0, 200.0]).double()
    values = torch.cat([-values.flip(0), values[1:]])
    gate, up = (each.reshape(-1) for each in torch.meshgrid(values, values, indexing="ij"))
    return torch.stack([gate, gate.roll(7), up, up.roll(3)], dim=1)
