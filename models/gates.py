"""Which fused activation does what an experts class's own gate does: the gate is asked.

Families write their gates anew (clamps, alphas, offsets), and new releases bring more. So a gate is
known by what it computes, not by its class.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from .. import reference
from ..activation import ACTS, FORMS, Activation

KNOWN = "_fused_activation"
"""Attribute of experts: (gate function, act_fn, limits and alphas, the activation or None)."""

SILU = "silu"

_PROJECTIONS = {
    *(
        f"{name}_proj{what}"
        for name in ("gate_up", "up", "down")
        for what in ("", "_bias", "_scale_inv", "_activation_scale")
    ),
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
    if gate is _default_apply_gate and is_silu(act_fn) and form_of(experts) == FORMS[0]:
        return SILU
    known = vars(experts).get(KNOWN, (None,) * 4)
    traced = torch.compiler.is_compiling()  # where before Python 3.12 none goes through vars()
    numbers = _numbers(experts, (known[2] or ()) if traced else None)
    if known[0] is gate and known[1] is act_fn and known[2] == numbers:
        return known[3]
    if traced:  # it cannot be asked there
        return None
    found = _ask(experts)
    vars(experts)[KNOWN] = gate, act_fn, numbers, found
    return found


def has_own_gate(experts: nn.Module) -> bool:
    """Whether the gate is not act_fn(gate) * up, as HF's decorator provides it."""
    return type(experts)._apply_gate is not _default_apply_gate or "_apply_gate" in vars(experts)


def form_of(experts: nn.Module) -> str:
    """How rows of the first projection make pairs, as HF's decorator has it."""
    if not experts.has_gate:
        return "ungated"
    return "concatenated" if experts.is_concatenated else "interleaved"


def _numbers(experts: nn.Module, names: Iterable[str] | None = None) -> dict[str, float]:
    """What limits and alphas a gate may read: all there are, or those of that name."""
    own = vars(experts)
    names = [n for n in own if "limit" in n or "alpha" in n] if names is None else names
    return {name: float(own[name]) for name in names if isinstance(own.get(name), (int, float))}


def _ask(experts: nn.Module) -> str | None:
    own = [n for n, _ in experts.named_parameters() if n.split(".")[0] not in _PROJECTIONS]
    if own or list(experts.buffers()):
        return None  # what is learned does today's job today
    numbers = _numbers(experts)
    limits = {number for name, number in numbers.items() if "limit" in name}
    limits = tuple(number for number in limits if 0 < number < float("inf"))
    alphas = {1.702} | {number for name, number in numbers.items() if "alpha" in name}  # quick_gelu
    form = form_of(experts)
    probe, ungated = _probe(limits, form), form == "ungated"
    try:
        with torch.no_grad():
            answer = (experts.act_fn if ungated else experts._apply_gate)(probe.clone())
    except Exception:  # whatever it needs, it is no function of gate and up alone
        return None
    if not isinstance(answer, Tensor) or answer.shape != (len(probe), 4 if ungated else 2):
        return None
    limits, offsets = ((), (0.0,)) if ungated else (limits, (0.0, 1.0))
    for act, limit, offset in itertools.product(ACTS, (None, *limits), offsets):
        for alpha in (1.0, *alphas) if act == "silu" else (1.0,):
            activation = Activation(act, limit, alpha, offset, form)
            expected = reference.glu(probe, activation)
            if torch.allclose(answer.to(expected), expected, rtol=1e-5, atol=1e-6):  # some cast
                return str(activation)
    return None


@functools.cache
def _probe(limits: tuple[float, ...], form: str) -> Tensor:
    """[N, 4] float64: two gates and two ups a row, near zero, in between and past the limits."""
    values = [0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 12.0, 200.0, *(1.25 * limit for limit in limits)]
    values = [0.0, *values, *(-value for value in values)]
    values = torch.tensor(values, dtype=torch.float64, device="cpu")
    gate, up = (each.reshape(-1) for each in torch.meshgrid(values, values, indexing="ij"))
    pairs = [gate, gate.roll(7), up, up.roll(3)]
    return torch.stack(pairs[::2] + pairs[1::2] if form == "interleaved" else pairs, dim=1)
