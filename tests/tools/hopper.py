"""Launches that kernels of `hopper/` may take."""

from __future__ import annotations

from types import ModuleType

import pytest

from moe_patch.kernels import dgate, dw, gate_up, grouped_gemm
from moe_patch.order import ExpertOrder


def answers(
    monkeypatch: pytest.MonkeyPatch,
    modules: tuple[ModuleType, ...] = (gate_up, grouped_gemm, dgate, dw),
) -> list[bool]:
    """Answers of every `_on_hopper` of these modules from now on: whether its kernel ran. Each
    leaves an order's count of turns at 0."""
    found: list[bool] = []
    for module in modules:

        def asked(*arguments, original=module._on_hopper):
            found.append(original(*arguments))
            assert not [o for o in arguments if isinstance(o, ExpertOrder) and o.taken.item()]
            return found[-1]

        monkeypatch.setattr(module, "_on_hopper", asked)
    return found
