"""Liger: the experts of a block, forward, and forward and backward, beside fused_experts."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ...ops.experts import fused_experts
from .compare import Call, Case, Compared, Comparison, Contender, Outputs, Peer, compare
from .experts import Experts, drawn, parts

NAMES = ("output", "d_hidden_states", "d_gate_up_proj", "d_down_proj", "d_top_k_weights")

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, gate_up, down, weights) -> out, with the choice of experts inside."""


def _contender(function: Function, of: Experts, *, backward: bool) -> Contender:
    weights = of.weights.to(of.x.dtype)  # [T, K]
    leaves = [each.detach().requires_grad_() for each in (of.x, of.gate_up, of.down, weights)]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (function(*leaves),)

    def both() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, of.d_out)

    def read(made: tuple[Tensor, ...]) -> Outputs:
        return dict(zip(NAMES, made))

    call: Call = both if backward else forward
    return Contender({"": call}, read)


def _ours(of: Experts) -> Function:
    return lambda x, gate_up, down, weights: fused_experts(x, gate_up, down, of.index, weights)


def _theirs(of: Experts, *, backward: bool) -> Contender:
    """Liger's side. Raises whatever the package does where it does not fit."""
    apply = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction.apply
    index = of.index.int()  # [T, K]

    def function(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        return apply(x, gate_up, down, index, weights)

    return _contender(function, of, backward=backward)


def comparisons(case: str, of: Experts) -> Iterable[Comparison]:
    """Forward, and forward and backward with all gradients."""
    for backward in (False, True):
        yield Comparison(
            case, "experts, forward and backward" if backward else "experts, forward",
            of.products * (9 if backward else 3), _contender(_ours(of), of, backward=backward),
            functools.partial(_theirs, of, backward=backward),
            functools.partial(parts, of, backward=backward), of.x.dtype,
            of.counts if backward else None,
        )  # fmt: skip


def compared(case: Case, seconds: float) -> Iterator[Compared]:
    """Yields what each row gave."""
    for row in comparisons(case.label, drawn(case)):
        yield compare(row, PEER.name, seconds=seconds)


PEER = Peer("Liger", "liger_kernel", "pip install --no-deps liger-kernel==0.8.5", compared)
