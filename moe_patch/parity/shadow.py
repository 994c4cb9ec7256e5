"""Shadows of MoE blocks, what is where in them, and Hugging Face's ways of running them.

A shadow shares its block's weights and nothing else, so whatever runs on it leaves the block as
it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..compat import CAPTURED, HF_HOOK, OLD_FORWARD, implementation_of, module_state
from ..formats.packed import dequantize
from ..models import SWAPS
from ..models.decorated import ExpertsConfig, UndecoratedExperts
from ..ops import fp8
from ..patcher import unpatch
from ..precision import ieee_products
from ..recognise.eligibility import is_decorated
from ..recognise.four_bits import FourBits
from ..recognise.gates import activation_of
from ..recognise.original import NAME
from ..recognise.parts import normalises, stored_transposed, up_name
from ..recognise.quantised import is_quantised
from ..recognise.storage import PLAIN, storage_of
from ..recognise.wrapped import plain_class
from .emulate import dequantised_linear, fp8_linear

DEQUANTISED = "dequantised"
"""A way of running FP8 experts: in the activations' dtype."""

_LEFT_BEHIND = {"forward", HF_HOOK, OLD_FORWARD, CAPTURED}


def shadow(
    module: nn.Module, dtype: torch.dtype | None = None, _memo: dict | None = None
) -> nn.Module:
    """A copy that shares every parameter's storage (unless cast to `dtype`) and nothing mutable.

    Its parameters are leaves of their own that want a gradient; hooks, and what accelerate and
    others hang on an instance (`forward`, `_hf_hook`), are left behind. In eval mode.
    """
    memo = {} if _memo is None else _memo
    if id(module) in memo:
        return memo[id(module)]
    packed = isinstance(module, FourBits)
    scales = "_scales" if packed else "_scale_inv"

    def tensor(name: str, old: Tensor | None, wrap: Callable[[Tensor], Tensor]) -> Tensor | None:
        if old is None:
            return None
        if id(old) not in memo:
            quantised = old.element_size() == 1 or name.endswith(scales)
            cast = dtype is not None and old.is_floating_point() and not quantised
            memo[id(old)] = wrap(old.detach().to(dtype) if cast else old.detach())
        return memo[id(old)]

    def parameter(old: Tensor) -> nn.Parameter:
        return nn.Parameter(old, requires_grad=old.is_floating_point())

    new = memo[id(module)] = module.__class__.__new__(module.__class__)
    nn.Module.__init__(new)
    fresh = set(new.__dict__) | _LEFT_BEHIND
    new.__dict__.update({k: v for k, v in module.__dict__.items() if k not in fresh})
    if "config" in new.__dict__:  # unpatch may write to it
        new.__dict__["config"] = copy.deepcopy(module.config, memo)
    if packed:  # not worth a warning: it runs dequantised to be compared
        new.__dict__.update(warns=False, weight_dtype=dtype or module.weight_dtype)
    new.training = False
    (parameters, buffers, children, unsaved), mine = module_state(module), module_state(new)
    mine[0].update({k: tensor(k, p, parameter) for k, p in parameters.items()})
    mine[1].update({k: tensor(k, b, lambda z: z) for k, b in buffers.items()})
    mine[3].update(unsaved)
    for name, child in children.items():
        mine[2][name] = None if child is None else shadow(child, dtype, memo)
    return new


def runs_ours(block: nn.Module) -> bool:
    """Whether the block is patched, or switched to experts_implementation="moe_patch"."""
    for module in block.modules():
        if plain_class(module) in SWAPS.values():
            return True
        if is_decorated(module) and implementation_of(module) == NAME:
            return True
    return False


@dataclass(frozen=True)
class Family:
    """Where a block keeps its parts; `router` None: only the experts are compared."""

    router: str | None = None
    logits: int = 0  # which of the router's results
    score: str = "softmax"
    renormalize: bool = False
    weight_on: str = "output"
    shared_expert: bool = False
    activation: str = "silu"
    own_gate: bool = False  # the class's own gate between two products, perhaps with biases

    def weights(self, logits: Tensor, index: Tensor) -> Tensor:
        """Routing weights [T, K] of the chosen experts, in the precision of the logits."""
        return reference.expert_weights(
            logits, index, score=self.score, renormalize=self.renormalize
        )


def family_of(block: Any) -> Family:
    """The family whose float64 truth is known; the bare experts of any other."""
    names = {cls.__name__ for cls in type(block).__mro__}
    if adapted(block):
        return Family()  # adapters are no part of the truth
    if "Llama4TextMoe" in names:
        return Family("router", 1, "sigmoid", weight_on="input", shared_expert=True)
    if "Qwen3MoeSparseMoeBlock" in names:
        return Family("gate", 0, "softmax", block.gate.norm_topk_prob)
    experts = find_experts(block)
    if not (is_decorated(experts) or isinstance(experts, UndecoratedExperts)):
        return Family()
    plain = experts.has_gate and experts.is_concatenated and not experts.has_bias
    known = activation_of(experts) if plain and not normalises(experts) else None
    return Family(activation=known or "silu", own_gate=known is None)


def adapted(block: nn.Module) -> bool:
    """Whether PEFT has put adapters into the block."""
    classes = (cls for child in block.modules() for cls in type(child).__mro__)
    return any(cls.__module__.startswith("peft.") for cls in classes)


def find_experts(block: nn.Module) -> Any:
    """The module that holds the stacked weights."""
    for module in block.modules():
        up = getattr(module, up_name(module), None)
        if isinstance(up, Tensor) and up.dim() == 3:
            return module
    return None


def exact_weights(experts: nn.Module, expert: int) -> list[Tensor]:
    """The parameters of one expert in float64, each with its leading 1 and as `logical` has it;
    quantised weights are dequantised."""
    one = slice(expert, expert + 1)
    names = projections(experts)
    if is_quantised(experts):
        scales = (getattr(experts, f"{name}_scale_inv").detach()[one] for name in names)
        weights = (getattr(experts, name).detach()[one] for name in names)
        return [reference.dequantize(w, s, torch.float64) for w, s in zip(weights, scales)]
    weights = storage_of(experts).operands(experts, *(getattr(experts, n) for n in names[:2]))[:2]
    biases = [getattr(experts, name).detach()[one].double() for name in names[2:]]
    if isinstance(experts, FourBits):
        return [dequantize(weight[one], torch.float64) for weight in weights] + biases
    return [weight.detach()[one].double() for weight in weights] + biases


def projections(experts: nn.Module) -> tuple[str, ...]:
    """Names of the parameters: both weights, and their biases where there are any."""
    names = up_name(experts), "down_proj"
    return *names, *(f"{n}_bias" for n in names if getattr(experts, "has_bias", False))


def trained(experts: nn.Module) -> tuple[str, ...]:
    """Those of `projections` that can want a gradient: not quantised weights."""
    return projections(experts)[0 if storage_of(experts) is PLAIN else 2 :]


def dtype_of(experts: Any) -> torch.dtype:
    """The dtype of the weights; of 4-bit ones, that which they had."""
    return experts.weight_dtype if isinstance(experts, FourBits) else experts.down_proj.dtype


def multiplies_fp8(experts: nn.Module) -> bool:
    """Whether our passes over these FP8 experts, a few tokens apart, quantise activations, too."""
    up, down = (getattr(experts, name) for name in projections(experts)[:2])
    return fp8.multiplies(down, up, down, str(activation_of(experts)))


def logical(block: nn.Module, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Views [E, 2I, H] (without a gate [E, I, H]) and [E, H, I] of weights or their gradients."""
    experts = find_experts(block)
    return (gate_up.mT, down.mT) if stored_transposed(experts) else (gate_up, down)


def implementations(block: nn.Module) -> list[str]:
    """Hugging Face's ways of running the block that count as the baseline."""
    experts = find_experts(block)
    if is_quantised(experts):
        return [DEQUANTISED] * (not multiplies_fp8(experts)) + ["emulated", "grouped_mm"]
    return ["eager", "grouped_mm"] if is_decorated(experts) else ["dense"]


def hugging_face(block: nn.Module, implementation: str) -> nn.Module:
    """A shadow that runs Hugging Face's own code: one of the decorated experts' implementations,
    or "dense", the block as it comes. Of FP8 experts also its eager loop over a linear in plain
    PyTorch, on quantised activations ("emulated") or on dequantised weights (`DEQUANTISED`)."""
    block = shadow(block)
    unpatch(block)
    if implementation != "dense":
        experts: Any = find_experts(block)
        linears = {DEQUANTISED: dequantised_linear, "emulated": fp8_linear}
        if implementation in linears:
            experts.linear, implementation = linears[implementation], "eager"
        experts.config = ExpertsConfig(experts.config, implementation)
    return block


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """IEEE float32 products, no autocast, no inference mode; all of it put back afterwards."""
    with (
        ieee_products(),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield
