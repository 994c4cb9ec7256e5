"""Sees the moment in which a router has chosen, and may decide the choice.

moe_patch's routers call `select_experts`, Hugging Face's call `topk` on [T, E]: a TorchFunctionMode
sees both, whatever surrounds them. What follows a `topk` reads its values and indices alone, so
that other indices and the values there are another choice with the right gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.routing import select_experts

_TOPK = (torch.topk, Tensor.topk)


class Chooser(Protocol):
    """Who is told of a choice."""

    @property
    def num_experts(self) -> int:
        """Columns of the logits."""

    def given(self, tokens: int, top_k: int, device: torch.device) -> Tensor | None:
        """The experts to take, [T, K] int64, as `given` of `select_experts`; None: the router's."""

    def chose(self, top_k_index: Tensor) -> None:
        """The choice, [T, K]."""

    def multiplied(self, router_logits: Tensor) -> None:
        """Logits, or what else had as many columns as there are experts: the last ones count."""


class Choosing(TorchFunctionMode):
    """While a router runs: `chooser` sees what it chooses."""

    def __init__(self, chooser: Chooser) -> None:
        super().__init__()
        self.chooser = chooser

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answers `select_experts` and `topk`; all else is as it is."""
        kwargs = kwargs or {}
        if func is select_experts:
            return self._ours(*args, **kwargs)
        if func in _TOPK:
            return self._theirs(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is F.linear and out.dim() == 2 and out.shape[1] == self.chooser.num_experts:
            self.chooser.multiplied(out)
        return out

    def _ours(
        self, router_logits: Tensor, top_k: int, *, given: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        found = self.chooser.given(len(router_logits), top_k, router_logits.device)
        given = given if found is None else found
        index, weights = select_experts(router_logits, top_k, given=given, **options)
        self.chooser.chose(index)
        return index, weights

    def _theirs(
        self, topk: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.return_types.topk:
        scores = args[0] if args else kwargs["input"]
        found = topk(*args, **kwargs)
        if scores.dim() != 2 or scores.shape[1] != self.chooser.num_experts:
            return found  # of groups
        index = found.indices
        given = self.chooser.given(len(index), index.shape[1], scores.device)
        if given is not None:
            index = torch.where(given[:, :1] < 0, index, given)
            found = torch.return_types.topk((scores.gather(1, index), index))
        self.chooser.chose(index)
        return found
