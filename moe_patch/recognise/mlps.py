"""Shared experts: MLPs in MoE blocks whose gate, silu(gate) * up, one kernel computes.

Families write them anew, and new releases bring more. So a class is known by what it computes on a
stand-in. Its three projections are called as Hugging Face calls them, whatever they are by then:
PEFT's, quantised ones, spread over ranks, with hooks.
"""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import switch
from ..ops.glu import silu_mul
from .gates import is_silu
from .original import Recognised, intact, methods, own_forward, replaced
from .swaps import SWAPS

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ACTS = {"act_fn", "activation_fn"}
"""Names under which classes keep their activation."""
_HOME = "transformers.models."
_asking = threading.RLock()


class FusedMLP(Recognised):
    """First among the bases of a fused class, HF's is the last."""

    act: str
    """The name under which it keeps its activation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., H] -> the same."""
        act_fn = getattr(self, getattr(type(self), "act", ""), None)
        alone = len(args) == 1 and not kwargs
        if not (alone and switch.ENABLED and intact(self) and is_silu(act_fn)):
            return own_forward(self, *args, **kwargs)
        (x,) = args
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(silu_mul(gate, up))


def fused_class(cls: Any) -> type[nn.Module] | None:
    """The class's fused subclass, known to SWAPS from then on; None when it computes something
    else, or was changed."""
    if not cls.__module__.startswith(_HOME):
        return None
    with _asking:
        fused = _new_class(cls, cls.forward)
        if fused is not None:
            SWAPS[cls] = fused
        return fused


@functools.cache
def _new_class(cls: type[nn.Module], forward: Any) -> type[nn.Module] | None:
    act = _act_of(cls, forward)
    if act is None:
        return None
    members: dict[str, Any] = {"act": act, "functions": (("forward", forward),)}
    members |= {"find": staticmethod(fused_class), "__module__": __name__, "__doc__": cls.__doc__}
    return type(cls.__name__, (FusedMLP, cls), members)


def _act_of(cls: type[nn.Module], forward: Any) -> str | None:
    """The name of its activation, if the class has a gated MLP's forward and no other function."""
    if methods(cls) != {"forward": forward} or [*replaced(cls, ["forward"])]:
        return None
    code = forward.__code__
    acts = set(code.co_names) - set(_PROJECTIONS)
    if len(acts) != 1 or not acts <= _ACTS or code.co_argcount != 2:
        return None
    (act,) = acts
    return act if _computes(forward, act) else None


def _computes(forward: Any, act: str) -> bool:
    """Whether it is down_proj(silu(gate_proj(x)) * up_proj(x)), bit for bit, for stand-ins."""
    x = torch.linspace(-3, 3, 24, device="cpu").view(3, 8)
    parts = {
        "gate_proj": lambda x: 1.5 * x - 0.3,
        "up_proj": lambda x: 0.7 * x.flip(-1) + 0.2,
        "down_proj": lambda x: x.cumsum(-1),
    }
    found = forward(SimpleNamespace(**parts, **{act: F.silu}), x)
    gate, up, down = parts.values()
    return isinstance(found, Tensor) and torch.equal(found, down(F.silu(gate(x)) * up(x)))
