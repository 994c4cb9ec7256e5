"""Launches that kernels of `hopper/` may take, and results that they write."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from ops import rehearses
from torch import Tensor

from moe_patch.kernels import dgate, dw, gate_up, grouped_gemm
from moe_patch.order import ExpertOrder


def answers(
    monkeypatch: pytest.MonkeyPatch,
    modules: tuple[ModuleType, ...] = (gate_up, grouped_gemm, dgate, dw),
) -> list[bool]:
    """Answers of every `_on_hopper` of these modules from now on: whether its kernel ran. (dgate
    comes there only to start it.) Each leaves an order's count of turns at 0."""
    found: list[bool] = []
    for module in modules:

        def asked(*arguments, original=module._on_hopper):
            ran = original(*arguments) is not False
            if not rehearses():
                found.append(ran)
                assert not [o for o in arguments if isinstance(o, ExpertOrder) and o.taken.item()]
            return ran

        monkeypatch.setattr(module, "_on_hopper", asked)
    return found


def copy_as(start: Tensor, turned: bool, gap: int) -> tuple[Tensor, Tensor]:
    """(a copy of `start` [E, m, n], what lies after each of its rows: `gap` times 7). Turned, its
    rows in memory are columns of it."""
    lies = start.mT if turned else start
    experts, rows, columns = lies.shape
    out = torch.full((experts, rows, columns + gap), 7.0, dtype=start.dtype, device=start.device)
    out[..., :columns] = lies
    copy = out[..., :columns]
    return (copy.mT if turned else copy), out[..., columns:]
