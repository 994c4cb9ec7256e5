"""Which modules are experts under Hugging Face's @use_experts_implementation, and which are fused.

That decorator makes `experts.forward` look up a function by name on every call. A class is asked
for that dispatch, its instance for weights, shapes and a gate that the kernels can compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels, switch
from ..compat import (
    GATE,
    HF_HOOK,
    HOOKED,
    IMPLEMENTATION,
    INTERFACE,
    ExpertsInterface,
)
from ..notices import say_unfused
from ..ops.differentiable import why_not_kernels
from ..ops.grouped import DTYPES
from .gates import activation_of, has_own_gate, is_silu
from .parts import has_gate, normalises, up_name
from .storage import logical_shapes, storage_of
from .wrapped import is_dtensor, replaced_forward


def is_decorated(module: nn.Module) -> bool:
    """Whether the forward of the module's class is the dispatch that HF's decorator writes."""
    return dispatches(type(module))


@torch.compiler.assume_constant_result  # Dynamo cannot call what it has seen the cells of
def dispatches(cls: Any) -> bool:
    """Whether `cls.forward` is the dispatch that HF's decorator writes. An override is not."""
    if ExpertsInterface is None or not isinstance(interface(cls), ExpertsInterface):
        return False
    forward = getattr(cls, "within", cls).forward
    return IMPLEMENTATION in forward.__code__.co_names  # what `patch` stands in for


@torch.compiler.assume_constant_result
def interface(cls: type) -> Any:
    """Where the dispatch of a decorated class looks names up."""
    forward = getattr(getattr(cls, "within", cls), "forward", None)  # 4-bit experts' own
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(forward, "__closure__", None) or ()))
    found = cells.get(INTERFACE)
    return None if found is None else found.cell_contents


def why_not_fused(experts: nn.Module) -> str | None:
    """None when `patch` can fuse these decorated experts, else the reason in one sentence."""
    # Tensor and expert parallelism replace forward by a closure that still calls the dispatch.
    if replaced_forward(experts) and not getattr(experts, HOOKED, False):
        return "the experts' forward was replaced on the instance: patch before that"
    return why_not_weights(experts) or why_not_form(experts)


def why_not_weights(experts: nn.Module) -> str | None:
    """None when the kernels can read the experts' weights, else the reason in one sentence."""
    name = up_name(experts)
    gate_up, down = getattr(experts, name, None), getattr(experts, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        return f"there are no {name} and down_proj tensors: only stacked weights can be fused"
    if gate_up.is_meta and not hasattr(experts, HF_HOOK):  # accelerate brings them when called
        return "the weights are on the meta device: patch after they are loaded"
    if is_dtensor(gate_up):  # local tensors by the time they are used, or HF's forward runs
        return None
    return why_not_read(experts, gate_up, down) or _why_not_shapes(experts, gate_up, down)


def why_not_silu(act_fn: Any) -> str | None:
    """None when the activation is SiLU, else the reason in one sentence."""
    if is_silu(act_fn):
        return None
    return f"the activation is {_name(act_fn)}: only SiLU without hooks can be fused"


def _name(act_fn: Any) -> str:
    return getattr(act_fn, "__name__", type(act_fn).__name__)


def runs_fused(*tensors: Tensor, reason: str | None = None) -> bool:
    """Whether kernels take these tensors now; the first says on which device. Warns once if not.

    `reason` is another one why not.
    """
    if not switch.ENABLED:
        return False
    reason = reason or why_not_run(*tensors)
    if reason is not None:
        say_unfused(reason)
    return reason is None


def why_not_form(experts: nn.Module) -> str | None:
    """None when the kernels can do the class's products, whatever its weights, else the reason."""
    if normalises(experts) and not hasattr(experts, "post_expert_norm"):
        return "each expert normalises its output, and there is no post_expert_norm"
    if has_gate(experts) and not hasattr(experts, GATE):
        return f"the experts have no {GATE}, which this version of transformers calls otherwise"
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


def why_not_read(experts: nn.Module, gate_up: Tensor, down: Tensor) -> str | None:
    """None when the kernels can read these weights of the experts, else the reason."""
    return storage_of(experts).why_not(experts, gate_up, down)


def _why_not_shapes(experts: nn.Module, gate_up: Tensor, down: Tensor) -> str | None:
    if gate_up.dim() != 3 or down.dim() != 3:  # flat or empty while ZeRO-3 or FSDP has them
        return None
    (e, n, h), (f, o, i) = logical_shapes(experts)
    if (f, o, 2 * i if has_gate(experts) else i) == (e, h, n):
        return None
    return (
        f"{up_name(experts)} is {list(gate_up.shape)} and down_proj {list(down.shape)}, which do "
        "not fit together: was the checkpoint converted half?"
    )


def why_not_run(*tensors: Tensor) -> str | None:
    """None when the kernels run on these tensors, where the first of them is, else the reason."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"a tensor is {tensor.dtype}: bfloat16, float16 or float32 is needed"
    device = tensors[0].device
    if torch.compiler.is_compiling():
        return _why_not_device(device)
    return kernels.why_not(device) or why_not_kernels()


@torch.compiler.assume_constant_result
def _why_not_device(device: torch.device) -> str | None:
    return kernels.why_not(device)
