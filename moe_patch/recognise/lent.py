"""LoRA's factors on their way from PEFT's wrapper to the call of the experts that they update."""

from __future__ import annotations

import threading

from torch import nn

from ..ops.low_rank import LowRank
from .parts import up_name


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
