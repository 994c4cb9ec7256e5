"""The float64 truth of a block's experts, an expert at a time, and the errors of every tensor.

No weight is ever whole in float64. T tokens, H hidden size, E experts, K choices a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import reference
from ..recognise.parts import gate, normalises
from ..recognise.quantised import is_quantised
from . import law
from .law import Errors, Row
from .passes import Inputs, Run
from .router import routing
from .shadow import (
    Family,
    exact_weights,
    find_experts,
    multiplies_fp8,
    projections,
    stored_transposed,
)


class Exact(TorchFunctionMode):
    """Code that computes in float32 stays in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) if func is not Tensor.float else args[0].double()


class Measured:
    """Error sums of every tensor, over one or more draws of inputs."""

    def __init__(self) -> None:
        self.counts: list[int] = []  # tokens of each expert
        self.tensors: dict[str, list[Errors]] = {}  # one Errors, or one for each expert
        self.numbers: dict[str, float] = {}  # of a tensor whose errors hang on few numbers
        self.checks: list[Row] = []  # of single draws: routing

    def __add__(self, other: Measured) -> Measured:
        total = Measured()
        total.counts = [a + b for a, b in zip(self.counts, other.counts)]
        total.tensors = {
            k: [a + b for a, b in zip(v, other.tensors[k])] for k, v in self.tensors.items()
        }
        total.numbers = {k: n + other.numbers[k] for k, n in self.numbers.items()}
        total.checks = self.checks + other.checks
        return total

    def rows(
        self,
        dtype: torch.dtype,
        x_rms: float,
        in_fp8: tuple[str, ...] = (),
        autocast: bool = False,
    ) -> list[Row]:
        """The law's verdict on each; FP8's own on the tensors `in_fp8`."""
        wrong = (check for check in self.checks if not check.passed)
        rows = [next(wrong, check) for check in self.checks[:1]]
        for name in sorted(self.tensors, key=_ORDER.index):
            parts = self.tensors[name]
            rows.append(
                law.row(
                    name,
                    parts,
                    dtype,
                    x_rms=x_rms if name.startswith("output") else None,
                    counts=self.counts if len(parts) > 1 else None,
                    fp8=name in in_fp8,
                    numbers=self.numbers.get(name),
                    autocast=autocast,
                )
            )
        return rows


_ORDER = (
    "top_k_weights",
    "output",
    "output_no_grad",
    "d_hidden_states",
    "d_gate_up_proj",
    "d_up_proj",
    "d_down_proj",
    "d_gate_up_proj_bias",
    "d_up_proj_bias",
    "d_down_proj_bias",
    "d_router",
    "d_router_inputs",
    "d_top_k_weights",
)
_BY_SLOT = ("top_k_weights", "d_router", "d_router_inputs", "d_top_k_weights")
"""Tensors whose errors hang on a number a slot: those of d_router are K numbers times the input."""


def measure(
    block: nn.Module, family: Family, given: Inputs, ours: Run, hf: list[Run], dtype: torch.dtype
) -> Measured:
    """Errors of every tensor that `ours` has, beside Hugging Face's.

    Args:
        block: a copy of the block, whose weights are read.
        family: what it computes.
        given: the inputs, with the choice of experts that all of them had.
        ours, hf: runs on them; of FP8 experts Hugging Face's in the order of `implementations`.
        dtype: that decides which logits are a near-tie.
    """
    index, d_out = ours["index"], given.d_out.double()
    x = given.x.double().requires_grad_()
    weights = ours["weights"].double().requires_grad_()
    measured, route, logits = Measured(), None, None
    if family.router:
        route = getattr(block, family.router).weight.detach().double().requires_grad_()
        logits = x @ route.mT
        weights = family.weights(logits, index)
        measured.checks.append(routing(index, ours["logits"], logits.detach(), dtype))
        # against float64 weights of the logits that each of them had
        own, *theirs = (family.weights(run["logits"].double(), index) for run in (ours, *hf))
        shifted = [run["weights"].double() - their + own for run, their in zip(hf, theirs)]
        measured.tensors["top_k_weights"] = [law.measure(ours["weights"], shifted, own)]

    truth = _experts(block, family, (x, weights, index, d_out), ours, hf, measured)
    backward = "d_hidden_states" in truth
    if family.shared_expert:
        gate_proj, up, down = (
            getattr(block.shared_expert, name).weight.detach().double()
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        shared = (F.silu(x @ gate_proj.mT) * (x @ up.mT)) @ down.mT
        truth["output"] += shared.detach()
        if backward:
            truth["d_hidden_states"] += torch.autograd.grad(shared, x, d_out)[0]
    if backward and family.router:
        d_weights = truth["d_top_k_weights"]
        d_x, truth["d_router"], d_logits = torch.autograd.grad(
            weights, [x, route, logits], d_weights
        )
        truth["d_hidden_states"] += d_x
        if family.renormalize and index.shape[1] == 1:
            del truth["d_router"]  # a single weight is always 1: its gradient is rounding noise
    experts = find_experts(block)
    apart = is_quantised(experts) and not multiplies_fp8(experts)
    for name, exact in (truth | {"output_no_grad": truth["output"]}).items():
        if name not in ours:
            continue
        beside = hf
        if apart:  # the first of Hugging Face's ways is for what wants gradients
            beside = hf[1:] if name == "output_no_grad" else hf[:1]
        theirs = [run[name.removesuffix("_no_grad")] for run in beside]
        measured.tensors[name] = [law.measure(ours[name], theirs, exact)]
    slots = int(((index >= 0) & (index < len(experts.down_proj))).sum())
    measured.numbers = {name: slots for name in _BY_SLOT if name in measured.tensors}
    if family.renormalize and "d_router" in measured.numbers:
        measured.numbers["d_router"] -= len(index)  # a token's sum to zero
    if "d_router" in measured.numbers:  # a sum of inputs, each times an error as large as d_logits
        few = law.effective(d_logits)
        measured.numbers["d_router"] = min(measured.numbers["d_router"], few)
    return measured


def _experts(
    block: nn.Module,
    family: Family,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    ours: Run,
    hf: list[Run],
    measured: Measured,
) -> Run:
    """The experts' part of output, d_hidden_states and d_top_k_weights, in float64.

    The gradients of each expert's weights are measured on the way.
    """
    x, weights, index, d_out = given
    experts = find_experts(block)
    every = [f"d_{name}" for name in projections(experts)]
    names = [name for name in every if name in ours]
    backward = any(name.startswith("d_") for name in ours)
    grads = {name: [run[name] for run in (ours, *hf)] for name in names}
    if stored_transposed(experts):
        grads |= {name: [grad.mT for grad in grads[name]] for name in every[:2] if name in grads}
    parts: dict[str, list[Errors]] = {name: [] for name in names}
    truth = {"output": torch.zeros_like(d_out)}
    if backward:
        truth["d_hidden_states"] = torch.zeros_like(d_out)
        truth["d_top_k_weights"] = torch.zeros_like(weights)
    for e in range(len(experts.down_proj)):
        token, choice = torch.where(index == e)
        measured.counts.append(len(token))
        if not len(token):
            for name in names:
                parts[name].append(law.measure_unused(grads[name][0][e], e))
            continue
        inputs = (x[token], weights[token, choice, None], *exact_weights(experts, e))
        inputs = [z.detach().double().requires_grad_(backward) for z in inputs]
        with torch.set_grad_enabled(backward):
            rows = expert(experts, family, *inputs)
        truth["output"].index_add_(0, token, rows.detach())
        if not backward:
            continue
        d_rows, d_weight, *d_projections = torch.autograd.grad(rows, inputs, d_out[token])
        truth["d_hidden_states"].index_add_(0, token, d_rows)
        truth["d_top_k_weights"][token, choice] = d_weight[:, 0]
        for name, exact in zip(every, d_projections):
            if name in names:
                our, *their = (grad[e] for grad in grads[name])
                parts[name].append(law.measure(our, their, exact[0], at=(e,)))
    measured.tensors |= parts
    return truth


def expert(
    experts: Any,
    family: Family,
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *biases: Tensor,
) -> Tensor:
    """[R, H] of one expert, given with its leading 1, for x [R, H] and weight [R, 1]."""
    if not family.own_gate:
        only = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
        options: dict[str, Any] = {"weight_on": family.weight_on, "activation": family.activation}
        return reference.fused_experts(x, up, down, only, weight, **options)
    up_bias, down_bias = biases or (0, 0)
    with Exact():
        rows = gate(experts, x @ up[0].mT + up_bias) @ down[0].mT + down_bias
        return (experts.post_expert_norm(rows) if normalises(experts) else rows) * weight
