"""Experts classes with Hugging Face's @use_experts_implementation (its integrations/moe.py).

That decorator makes `experts.forward` look up a function by name on every call, so the parameters,
hooks and wrappers around the module never notice which function runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import switch
from ..compat import (
    CHOOSE,
    IMPLEMENTATION,
    INTERNAL,
    ExpertsInterface,
    FP8ExpertsInterface,
    implementation_of,
)
from ..notices import say_unfused, warn_once
from ..ops.experts import fused_experts
from ..recognise.eligibility import (
    interface,
    why_by_parts,
    why_not_form,
    why_not_run,
    why_not_weights,
)
from ..recognise.four_bits import dequantised, is_four_bits, run_dequantised
from ..recognise.gates import activation_of
from ..recognise.lent import low_rank_updates
from ..recognise.original import NAME, Fused, intact, own_forward
from ..recognise.parts import by_parts, form_of
from ..recognise.storage import FP8, PLAIN, storage_of
from ..recognise.wrapped import replaced_forward


class ExpertsConfig:
    """Stands in for `experts.config`, and differs from it in the experts implementation alone.

    HF's switch is a field of a config that models share, so switching there would patch every
    model built from it; this switches one module. `original` is the config behind it.
    """

    def __init__(self, original: Any, implementation: str = NAME) -> None:
        self.original = original
        vars(self)[IMPLEMENTATION] = implementation

    def __getattr__(self, name: str) -> Any:
        # no `original` yet while unpickling; dunders are asked of this class, not of the config
        if name == "original" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.original, name)


def register() -> None:
    """Adds "moe_patch" to HF's experts implementations."""
    for each in (ExpertsInterface, FP8ExpertsInterface):
        if each is not None:
            each.register(NAME, experts_forward)


def register_for(experts: nn.Module) -> None:
    """Adds "moe_patch" where these experts look names up: a package may have its own interface."""
    names = interface(type(experts))
    if NAME not in names:
        names.register(NAME, experts_forward)


def why_not_ours(experts: nn.Module) -> str | None:
    """None unless somebody registered another function as "moe_patch", else the reason."""
    names = interface(type(experts))
    function = names.get(NAME, experts_forward)
    if function is experts_forward:
        return None
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return (
        f'{path} was registered as "{NAME}" in {type(names).__name__}, and that would run: '
        "register it under another name"
    )


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function behind the name "moe_patch": fused where it can be, else HF's own.

    Args as HF's: the experts module, hidden_states [T, H], top_k_index and top_k_weights [T, K].
    """
    routed = hidden_states, top_k_index, top_k_weights
    return _fused_or(functools.partial(_hf_forward, self), self, *routed)


class UndecoratedExperts(Fused):
    """Before HF's class among the bases of a fused one: an experts class of the form that HF's
    decorator expects (gate_up_proj, down_proj, act_fn, perhaps _apply_gate), but without it."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As HF's: [T, H] with top_k_index and top_k_weights [T, K] -> [T, H]."""
        routed = hidden_states, top_k_index, top_k_weights
        if not intact(self):
            return own_forward(self, *routed)
        return _fused_or(functools.partial(own_forward, self), self, *routed)

    @property
    def takes_low_rank(self) -> bool:
        """Whether LoRA's factors can be taken where it runs fused."""
        return intact(self) and why_by_parts(self) is None

    @staticmethod
    def why_not_fused(experts: nn.Module) -> str | None:
        """None when the class can be swapped, else the reason in one sentence."""
        if replaced_forward(experts):
            return "the experts' forward was replaced on the instance: patch before that"
        return why_not_weights(experts)


def _fused_or(
    hf: Callable[..., Tensor],
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    if not switch.ENABLED:
        return hf(hidden_states, top_k_index, top_k_weights)
    form = form_of(self)
    activation = None if form.normalises else activation_of(self)
    reason = why_not_form(self) if activation is None else None
    if reason is None:
        up, down = getattr(self, form.up_name), self.down_proj  # PEFT computes them: read once
        stored = storage_of(self)
        reason = stored.why_not(self, up, down)
    if reason is not None:
        reason = f"{type(self).__name__} is not fused, {reason}"
    else:
        reason = why_not_run(hidden_states, top_k_weights)
    if reason is not None:
        say_unfused(reason)
        return hf(hidden_states, top_k_index, top_k_weights)

    routed = top_k_index, top_k_weights
    if activation is None and not stored.by_parts:
        with dequantised(self, hidden_states) as plain:
            return _fused_or(hf, plain, hidden_states, *routed)
    more: dict[str, Any] = {}
    if stored is not PLAIN:
        up, down, more = stored.operands(self, up, down)
    elif form.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if stored is FP8:
        _say_how(hidden_states.device)
    if activation is None:  # `why_by_parts` says why
        return by_parts(self, hidden_states, up, down, *routed)
    if form.has_bias:
        more["gate_up_bias"] = getattr(self, f"{form.up_name}_bias")
        more["down_bias"] = self.down_proj_bias
    more |= low_rank_updates(self)
    return fused_experts(hidden_states, up, down, *routed, activation=activation, **more)


def restore_default(module: nn.Module) -> None:
    """Undoes experts_implementation="moe_patch" in the module's config: HF's default returns."""
    config = getattr(module, "config", None)
    if getattr(config, IMPLEMENTATION, None) == NAME:
        choose = getattr(module, CHOOSE, None) if isinstance(module, PreTrainedModel) else None
        default = choose(None) if choose else "grouped_mm"
        setattr(config, INTERNAL if hasattr(config, INTERNAL) else IMPLEMENTATION, default)


def _hf_forward(self: nn.Module, *args: Tensor) -> Tensor:
    name = implementation_of(self)
    if isinstance(self.config, ExpertsConfig):
        name = getattr(self.config.original, IMPLEMENTATION, None)
    if name == NAME:  # HF's default, which has no static scales
        name = "eager" if getattr(self, "activation_scheme", "") == "static" else "grouped_mm"
    # FP8Experts is decorated once a layer, so that a forward one layer down dispatches again
    eager = inspect.unwrap(getattr(type(self), "within", type(self)).forward)
    function = interface(type(self)).get_interface(name, eager)
    return run_dequantised(self, function, *args) if is_four_bits(self) else function(self, *args)


@torch.compiler.assume_constant_result
def _say_how(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        warn_once(
            f"{torch.cuda.get_device_name(device)} has no FP8 tensor cores: moe_patch runs FP8 "
            "experts with 16-bit products, their weights widened as they are read."
        )
