"""Experts classes with Hugging Face's @use_experts_implementation (its integrations/moe.py).

That decorator makes `experts.forward` look up a function by name on every call, so the parameters,
hooks and wrappers around the module never notice which function runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from .. import kernels
from ..ops.differentiable import why_not_kernels
from ..ops.experts import fused_experts
from ..ops.grouped import DTYPES
from ..ops.low_rank import LowRank
from ..recognise import quantised as fp8
from ..recognise.gates import activation_of, has_own_gate, is_silu
from ..recognise.original import Fused, intact, own_forward
from ..recognise.parts import by_parts, has_gate, normalises, up_name
from ..recognise.wrapped import is_dtensor, replaced_forward
from ..switch import is_on

NAME = "moe_patch"
"""Our name in HF's registries: `from_pretrained(..., experts_implementation="moe_patch")`."""

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # FakeTensor: while torch.export traces

ENABLED = is_on(os.environ.get("MOE_PATCH"))
"""False under MOE_PATCH=0: every patched module runs HF's own forward."""


class _Lent(threading.local):
    """Updates that LoRA lends to experts it calls in this thread: (experts, parameter, factors).

    Not kept on the module: another thread may run the same one.
    """

    def __init__(self) -> None:  # not of the class: Dynamo's guards take it for absent
        self.entries: tuple[tuple[nn.Module, str, LowRank], ...] = ()


_lent = _Lent()


class ExpertsConfig:
    """Stands in for `experts.config`, and differs from it in the experts implementation alone.

    HF's switch is a field of a config that models share, so switching there would patch every
    model built from it; this switches one module. `original` is the config behind it.
    """

    def __init__(self, original: Any, implementation: str = NAME) -> None:
        self.original = original
        self._experts_implementation = implementation

    def __getattr__(self, name: str) -> Any:
        # no `original` yet while unpickling; dunders are asked of this class, not of the config
        if name == "original" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.original, name)


def register() -> None:
    """Adds "moe_patch" to HF's experts implementations."""
    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, experts_forward)


def is_decorated(module: nn.Module) -> bool:
    """Whether the forward of the module's class is the dispatch that HF's decorator writes."""
    return dispatches(type(module))


@torch.compiler.assume_constant_result  # Dynamo cannot call what it has seen the cells of
def dispatches(cls: type) -> bool:
    """Whether `cls.forward` is the dispatch that HF's decorator writes. An override is not."""
    return isinstance(_interface(cls), ExpertsInterface)


@torch.compiler.assume_constant_result
def _interface(cls: type) -> ExpertsInterface | None:
    """Where the dispatch of a decorated class looks names up."""
    forward = getattr(cls, "forward", None)
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(forward, "__closure__", None) or ()))
    found = cells.get("experts_interface")
    return None if found is None else found.cell_contents


def why_not_fused(experts: nn.Module) -> str | None:
    """None when `patch` can fuse these decorated experts, else the reason in one sentence."""
    # Tensor and expert parallelism replace forward by a closure that still calls the dispatch.
    if replaced_forward(experts) and not getattr(experts, "_is_hooked", False):
        return "the experts' forward was replaced on the instance: patch before that"
    return why_not_weights(experts) or why_not_form(experts)


def why_not_weights(experts: nn.Module) -> str | None:
    """None when the kernels can read the experts' weights, else the reason in one sentence."""
    name = up_name(experts)
    gate_up, down = getattr(experts, name, None), getattr(experts, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        return f"there are no {name} and down_proj tensors: only stacked weights can be fused"
    if gate_up.is_meta and not hasattr(experts, "_hf_hook"):  # accelerate brings them when called
        return "the weights are on the meta device: patch after they are loaded"
    if is_dtensor(gate_up):  # local tensors by the time they are used, or HF's forward runs
        return None
    return _why_not_read(experts, gate_up, down) or _why_not_shapes(experts, gate_up, down)


def why_not_silu(act_fn: Any) -> str | None:
    """None when the activation is SiLU, else the reason in one sentence."""
    if is_silu(act_fn):
        return None
    return f"the activation is {_name(act_fn)}: only SiLU without hooks can be fused"


def _name(act_fn: Any) -> str:
    return getattr(act_fn, "__name__", type(act_fn).__name__)


def stored_transposed(experts: nn.Module) -> bool:
    """Whether the weights are stored [E, K, N]. Llama4's class does not say so."""
    return getattr(experts, "is_transposed", "Llama4" in type(experts).__name__)


def runs_fused(*tensors: Tensor, reason: str | None = None) -> bool:
    """Whether kernels take these tensors now; the first says on which device. Warns once if not.

    `reason` is another one why not.
    """
    return ENABLED and not _warn(reason or _why_not_run(*tensors))


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
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    if not ENABLED:
        return hf(hidden_states, top_k_index, top_k_weights)
    reason = why_not_form(self)
    if reason is None:
        up, down = getattr(self, up_name(self)), self.down_proj  # PEFT computes them: read once
        reason = _why_not_read(self, up, down)
    if reason is not None:
        reason = f"{type(self).__name__} is not fused, {reason}"
    if _warn(reason or _why_not_run(hidden_states, top_k_weights)):
        return hf(hidden_states, top_k_index, top_k_weights)
    if getattr(self, "is_transposed", False):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    scales = {}
    if fp8.is_quantised(self):  # frozen, whatever `requires_grad` HF left on them
        up, down, scales = up.detach(), down.detach(), fp8.scales(self)
        _say_how(hidden_states.device)
    tensors = (hidden_states, up, down, top_k_index, top_k_weights)
    activation = None if normalises(self) else activation_of(self)
    if activation is None:  # `why_by_parts` says why
        return by_parts(self, *tensors)
    more = scales | biases(self) | low_rank_updates(self)
    return fused_experts(*tensors, activation=activation, **more)


def biases(experts: nn.Module) -> dict[str, Tensor]:
    """Arguments of `fused_experts`; none without them."""
    if not getattr(experts, "has_bias", False):
        return {}
    name = up_name(experts)
    return {"gate_up_bias": getattr(experts, f"{name}_bias"), "down_bias": experts.down_proj_bias}


def takes_low_rank(experts: nn.Module, hidden_states: Tensor, *routing: Tensor) -> bool:
    """Whether a call with these arguments will run fused, and take LoRA's factors (`lend`)."""
    if len(routing) != 2 or "parametrizations" in experts._modules:
        return False
    if "forward" in experts.__dict__ and replaced_forward(experts):
        return False
    if is_decorated(experts):
        if experts.config._experts_implementation != NAME:
            return False
        if why_not_form(experts) or why_by_parts(experts):
            return False
    elif not getattr(experts, "takes_low_rank", False):
        return False
    gate_up, down = getattr(experts, up_name(experts)), experts.down_proj
    runs = ENABLED and not _why_not_weights(gate_up, down)
    return runs and not _why_not_run(hidden_states, routing[1])


def lend(experts: nn.Module, parameter: str, low_rank: LowRank) -> None:
    """Has the next fused call of these experts in this thread take the factors of an update."""
    _lent.entries = (*_lent.entries, (experts, parameter, low_rank))


def take_back(experts: nn.Module, parameter: str) -> bool:
    """Undoes `lend`; whether the factors were still there, so that no call has taken them."""
    entries = _lent.entries
    left = tuple(e for e in entries if e[0] is not experts or e[1] != parameter)
    _lent.entries = left
    return len(left) < len(entries)


def low_rank_updates(experts: nn.Module) -> dict[str, LowRank]:
    """Arguments of `fused_experts`, what was lent to these experts; none without LoRA."""
    entries = _lent.entries
    if not entries:
        return {}
    _lent.entries = tuple(e for e in entries if e[0] is not experts)
    taken = {name: low_rank for owner, name, low_rank in entries if owner is experts}
    names = {"gate_up_low_rank": up_name(experts), "down_low_rank": "down_proj"}
    return {argument: taken.get(name) for argument, name in names.items()} if taken else {}


def restore_default(module: nn.Module) -> None:
    """Undoes experts_implementation="moe_patch" in the module's config: HF's default returns."""
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) == NAME:
        is_model = isinstance(module, PreTrainedModel)
        default = module.get_correct_experts_implementation(None) if is_model else "grouped_mm"
        config._experts_implementation_internal = default


def _hf_forward(self: nn.Module, *args: Tensor) -> Tensor:
    config = self.config.original if isinstance(self.config, ExpertsConfig) else self.config
    name = config._experts_implementation
    if name == NAME:  # HF's default, which has no static scales
        name = "eager" if getattr(self, "activation_scheme", "") == "static" else "grouped_mm"
    # FP8Experts is decorated once a layer, so that a forward one layer down dispatches again
    eager = inspect.unwrap(type(self).forward)
    return _interface(type(self)).get_interface(name, eager)(self, *args)


@torch.compiler.assume_constant_result
def _say_how(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        warn_once(
            f"{torch.cuda.get_device_name(device)} has no FP8 tensor cores: moe_patch runs FP8 "
            "experts with 16-bit products, their weights widened as they are read."
        )


def why_not_form(experts: nn.Module) -> str | None:
    """None when the kernels can do the class's products, whatever its weights, else the reason."""
    if normalises(experts) and not hasattr(experts, "post_expert_norm"):
        return "each expert normalises its output, and there is no post_expert_norm"
    own = has_gate(experts) and has_own_gate(experts)
    if not own and getattr(experts, "act_fn", None) is None:
        return "the experts have no act_fn, which their gate is to call"
    return None


def why_by_parts(experts: nn.Module) -> str | None:
    """None when `fused_experts` computes all that the class does, else why `by_parts` does."""
    if normalises(experts):
        return "a norm of each expert's output"
    if activation_of(experts) is None:
        own = has_gate(experts) and has_own_gate(experts)
        return "a gate of its own" if own else f"the activation {_name(experts.act_fn)}"
    return None


def _why_not_read(experts: nn.Module, gate_up: Tensor, down: Tensor) -> str | None:
    if fp8.is_quantised(experts):
        return fp8.why_not(experts, gate_up, down)
    return _why_not_weights(gate_up, down)


def _why_not_weights(gate_up: Tensor, down: Tensor) -> str | None:
    if gate_up.dtype != down.dtype:
        return f"the weights are {gate_up.dtype} and {down.dtype}: one dtype is needed"
    if gate_up.dtype not in DTYPES:
        return f"the weights are {gate_up.dtype}: bfloat16, float16 or float32 is needed"
    if type(gate_up) not in _PLAIN or type(down) not in _PLAIN:
        return f"the weights are {type(gate_up).__name__}s: plain tensors are needed"
    if gate_up.device != down.device:
        return f"the weights are on {gate_up.device} and {down.device}: one device is needed"
    return None


def _why_not_shapes(experts: nn.Module, gate_up: Tensor, down: Tensor) -> str | None:
    if gate_up.dim() != 3 or down.dim() != 3:  # flat or empty while ZeRO-3 or FSDP has them
        return None
    (e, n, h), (f, o, i) = gate_up.shape, down.shape
    if stored_transposed(experts):
        n, h, o, i = h, n, i, o
    if (f, o, 2 * i if has_gate(experts) else i) == (e, h, n):
        return None
    return (
        f"{up_name(experts)} is {list(gate_up.shape)} and down_proj {list(down.shape)}, which do "
        "not fit together: was the checkpoint converted half?"
    )


def _why_not_run(*tensors: Tensor) -> str | None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"a tensor is {tensor.dtype}: bfloat16, float16 or float32 is needed"
    return _why_not_device(tensors[0].device.type) or why_not_kernels()


@torch.compiler.assume_constant_result
def _why_not_device(device_type: str) -> str | None:
    return kernels.why_not(device_type)


def _warn(reason: str | None) -> bool:
    """Whether there is a reason to run HF's own forward, said once."""
    if reason is not None:
        warn_once(f"moe_patch runs Hugging Face's own forward: {reason}.")
    return reason is not None


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """A UserWarning, the first time only; torch.compile calls it while it traces."""
    _warn_uncompiled(message)


@functools.cache
def _warn_uncompiled(message: str) -> None:
    warnings.warn(message, stacklevel=2)
