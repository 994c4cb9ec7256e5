"""Whether the experts that LoRA updates take its factors (lent.py) in their fused call.

PEFT's wrapper lends them, the experts' forward takes them, and the wrapper takes back what nobody
took: then Hugging Face's forward ran, and it runs PEFT's own code.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import switch
from ..compat import implementation_of, why_no_adapters
from .eligibility import is_decorated, why_by_parts, why_not_form, why_not_run
from .original import NAME
from .parts import up_name
from .storage import storage_of
from .wrapped import is_dtensor, plain_class, replaced_forward


def takes_low_rank(experts: Any, hidden_states: Tensor, *routing: Tensor) -> bool:
    """Whether a call with these arguments will run fused, and take LoRA's factors (`lend`)."""
    if len(routing) != 2 or is_parametrized(experts):
        return False
    if "forward" in experts.__dict__ and replaced_forward(experts):
        return False
    if is_decorated(experts):
        if implementation_of(experts) != NAME:
            return False
        if why_not_form(experts) or why_by_parts(experts):
            return False
    elif not getattr(experts, "takes_low_rank", False):
        return False
    gate_up, down = getattr(experts, up_name(experts)), experts.down_proj
    stored = storage_of(experts)
    runs = switch.ENABLED and stored.takes_low_rank and not stored.why_not(experts, gate_up, down)
    return runs and not why_not_run(hidden_states, routing[1])


def is_adapter(module: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of one parameter, fused or not."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__}
    return ("peft", "ParamWrapper") in names


def why_left_to_peft(wrapper: Any, fused: type | None) -> str | None:
    """None when the factors of such a wrapper's adapters can be lent, else why PEFT forms the
    updated weights. `fused` is the class that is swapped in for the experts', if any."""
    if reason := why_no_adapters():
        return reason
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    if name not in (up_name(experts), "down_proj"):
        return f"{name} is not a weight of the experts' two projections"
    if not (is_decorated(experts) or hasattr(fused, "takes_low_rank")):
        return f"the experts are {plain_class(experts).__name__}, which moe_patch does not fuse"
    gate_up, down = (getattr(experts, each, None) for each in (up_name(experts), "down_proj"))
    stored = storage_of(experts)
    if not stored.takes_low_rank:
        return "the experts are quantised"
    local = isinstance(gate_up, Tensor) and isinstance(down, Tensor) and not is_dtensor(gate_up)
    if local and (reason := stored.why_not(experts, gate_up, down)):
        return reason
    if getattr(fused, "takes_low_rank", None) is True:
        return None
    by_parts = why_by_parts(experts)
    return by_parts and f"the experts run by parts, because of {by_parts}"
