"""A shared expert beside the routed ones, on a second stream where that pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Routed = TypeVar("Routed")


def both(
    hidden_states: Tensor, shared: Callable[[Tensor], Tensor], routed: Callable[[Tensor], Routed]
) -> tuple[Tensor, Routed]:
    """(shared(hidden_states), routed(hidden_states)); hidden_states [..., H]."""
    if not overlaps(hidden_states):
        found = routed(hidden_states)
        return shared(hidden_states), found
    # both only read weights: together they keep the memory busy
    device = hidden_states.device  # need not be the current one
    main = torch.cuda.current_stream(device)
    side = _beside(main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = shared(hidden_states)
    found = routed(hidden_states)
    main.wait_stream(side)
    if not torch.cuda.is_current_stream_capturing():
        out.record_stream(main)
    return out, found


def overlaps(hidden_states: Tensor) -> bool:
    """Whether a second stream pays: above, GEMMs fill the card; below, launches cost more."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not hidden_states.is_cuda:
        return False
    tokens = hidden_states.numel() // hidden_states.shape[-1]
    return 16 <= tokens <= 256 or tokens < 16 and torch.cuda.is_current_stream_capturing()


@functools.cache
def _beside(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """The second stream of a first one: threads on streams of their own share none, so that one
    that captures a graph does not capture another's work. torch gives out its 32 streams of a
    priority again and again, so this one has a priority that others do not ask for."""
    return torch.cuda.Stream(main.device, priority=-1)
