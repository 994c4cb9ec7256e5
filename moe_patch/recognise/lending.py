"""LoRA's factors on their way to the fused call of the experts that they update.

PEFT's wrapper lends them, the experts' forward takes them, and the wrapper takes back what nobody
took: then Hugging Face's forward ran, and it runs PEFT's own code.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import switch
from ..compat import implementation_of, why_no_adapters
from ..ops.low_rank import LowRank
from .eligibility import NAME, is_decorated, why_by_parts, why_not_form, why_not_plain, why_not_run
from .parts import up_name
from .quantised import is_quantised
from .wrapped import is_dtensor, plain_class, replaced_forward


class _Entries:
    """Updates that LoRA lends to the experts it calls: (experts, parameter, factors)."""

    def __init__(self) -> None:
        self.entries: tuple[tuple[nn.Module, str, LowRank], ...] = ()


class _Lent(threading.local):
    """Entries of each thread. Not kept on the module: another thread may run the same one.

    An object of its own holds them: what a compiled function writes to a threading.local itself is
    lost where its graph breaks (torch 2.13 to 2.15).
    """

    def __init__(self) -> None:  # not of the class: Dynamo's guards take it for absent
        self.here = _Entries()


_lent = _Lent()


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
    runs = switch.ENABLED and not why_not_plain(gate_up, down)
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
    if is_quantised(experts):
        return "the experts are quantised"
    plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor) and not is_dtensor(gate_up)
    if plain and (reason := why_not_plain(gate_up, down)):
        return reason
    if getattr(fused, "takes_low_rank", None) is True:
        return None
    by_parts = why_by_parts(experts)
    return by_parts and f"the experts run by parts, because of {by_parts}"


def lend(experts: nn.Module, parameter: str, low_rank: LowRank) -> None:
    """Has the next fused call of these experts in this thread take the factors of an update."""
    _lent.here.entries = (*_lent.here.entries, (experts, parameter, low_rank))


def take_back(experts: nn.Module, parameter: str) -> bool:
    """Undoes `lend`; whether the factors were still there, so that no call has taken them."""
    entries = _lent.here.entries
    left = tuple(e for e in entries if e[0] is not experts or e[1] != parameter)
    _lent.here.entries = left
    return len(left) < len(entries)


def low_rank_updates(experts: nn.Module) -> dict[str, LowRank]:
    """Arguments of `fused_experts`, what was lent to these experts; none without LoRA."""
    entries = _lent.here.entries
    if not entries:
        return {}
    _lent.here.entries = tuple(e for e in entries if e[0] is not experts)
    taken = {name: low_rank for owner, name, low_rank in entries if owner is experts}
    names = {"gate_up_low_rank": up_name(experts), "down_low_rank": "down_proj"}
    return {argument: taken.get(name) for argument, name in names.items()} if taken else {}
