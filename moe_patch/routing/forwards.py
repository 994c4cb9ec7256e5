"""The forward of a whole model that is under way: how many tokens it has, which are padding."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Forward:
    """What the outermost model of transformers was called with."""

    shape: tuple[int, int] | None
    """(sequences, tokens of each); None: not known."""
    mask: Tensor | None
    """bool of that shape, False where a token is padding; None: none is."""

    def covers(self, tokens: int) -> bool:
        """Whether a layer with that many tokens has all of them."""
        return self.shape is not None and self.shape[0] * self.shape[1] == tokens


NONE = Forward(None, None)
_here = threading.local()


def current() -> Forward:
    """The one that is under way in this thread."""
    running = getattr(_here, "running", None)
    return running[0] if running else NONE


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Inside, `current` knows the model's forwards."""
    handles = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            handles.append(module.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(_end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _here.running = [*getattr(_here, "running", ()), _seen(args, kwargs)]


def _end(*_: Any) -> None:
    _here.running = _here.running[:-1]


def _seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    first = args[0] if args else kwargs.get("input_ids")
    first = kwargs.get("inputs_embeds") if first is None else first
    if not isinstance(first, Tensor) or first.dim() < 2:
        return NONE
    shape = first.shape[0], first.shape[1]
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return Forward(shape, None)
    if mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        return Forward(shape, None)
    return Forward(shape, mask[:, -shape[1] :].to(torch.bool))
