"""A router: is its choice the best, and, for one that follows a rule, the router by itself three
ways: ours, Hugging Face's class, and float64 by the rule (recognise/routers.py, reference.py).

T tokens, H hidden size, E experts, K choices a token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reference
from ..recognise.routers import FusedRouter
from . import law, passes
from .law import Errors, Row

_WEIGHTS = ("score", "renormalize", "scale", "eps")
"""What `select_experts` makes weights by; all else is for the choice."""


def routing(
    index: Tensor,
    own: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    choice: dict[str, Any] | None = None,
) -> Row:
    """Are the chosen experts [T, K] the best ones, near-ties aside?

    By the law: the same set as the float64 logits `exact` [T, E] give, for every token whose k-th
    and (k+1)-th score differ by more than 4 * eps * max|logit|. And, for every token, the best by
    the logits `own` [T, E] that the router itself returned, within float32's eps. A score is what
    `reference.choice_scores` makes of logits by `choice`; its groups must not nearly tie either.
    """
    top_k, broken, clear, choice = index.shape[1], [], len(index), choice or {}
    if top_k < exact.shape[1]:
        margin = 4 * torch.finfo(dtype).eps * float(exact.abs().max())
        scores = reference.choice_scores(exact, **choice)
        values, best = scores.topk(top_k + 1, dim=-1)
        apart = (values[:, -2] - values[:, -1] > margin) & _groups_apart(exact, margin, choice)
        other = (best[:, :-1].sort(-1).values != index.sort(-1).values).any(-1)
        wrong = law.first(other & apart)
        clear = int(apart.sum())
        if wrong is not None:
            broken.append(f"token {wrong[0]} went to experts {index[wrong[0]].tolist()}")
        own = own.double()
        scores = reference.choice_scores(own, **choice)
        worst_in = scores.gather(-1, index).min(-1).values
        best_out = scores.scatter(1, index, -torch.inf).max(-1).values
        slack = 4 * torch.finfo(torch.float32).eps * float(scores[scores.isfinite()].abs().max())
        wrong = law.first((best_out > worst_in + slack) & _groups_apart(own, slack, choice))
        if wrong is not None and not broken:
            broken.append(f"token {wrong[0]} did not get the best of its own logits")
    if (index.sort(-1).values.diff(dim=-1) == 0).any():
        broken.append("an expert was chosen twice")
    note = f"same experts; {clear} of {len(index)} tokens are no near-tie"
    return Row("routing", not broken, note="; ".join(broken) or note)


def _groups_apart(logits: Tensor, margin: float, choice: dict[str, Any]) -> Tensor:
    """[T]: whether the worst group that is kept is clearly better than the best that is not."""
    groups, kept = choice.get("num_groups", 1), choice.get("top_groups", 1)
    if groups == kept:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    one = {name: choice[name] for name in ("score", "bias") if name in choice}
    scores = reference.choice_scores(logits, **{"bias": logits.new_zeros(()), **one})
    found = reference.group_scores(scores, groups, choice.get("group_best", 2))
    found = found.sort(dim=-1, descending=True).values
    return found[:, kept - 1] - found[:, kept] > margin


def _wrong_outputs(ours: dict[str, Any], hf: dict[str, Any], dtype: torch.dtype) -> Row | None:
    """A row if a router returns other types, dtypes or shapes than Hugging Face's, or logits."""
    if ours["returned"] != hf["returned"]:
        note = f"the router returns {ours['returned']}, and Hugging Face's {hf['returned']}"
        return Row("routing", False, note=note)
    error = (ours["logits"].double() - hf["logits"].double()).square().mean().sqrt()
    size = hf["logits"].double().square().mean().sqrt()
    if not error <= 8 * torch.finfo(dtype).eps * size:
        return Row("routing", False, note="the router's logits are not Hugging Face's")
    return None


def find_router(block: nn.Module) -> str | None:
    """The name of the router in a patched block that follows a rule."""
    found = (name for name, module in block.named_modules() if isinstance(module, FusedRouter))
    return next(found, None)


class RouterComparison:
    """A fused router beside Hugging Face's class on the same weights."""

    def __init__(self, ours: Any, hf: nn.Module) -> None:
        self.ours, self.hf, self.rule = ours, hf, ours.rule

    def run(self, x: Tensor, seed: int, backward: bool) -> dict[str, Tensor]:
        """Ours on `x` [T, H], and what it was given: that, `d_scores` [T, E] and `bias` [E]."""
        experts, width = self.ours.weight.shape
        random: dict[str, Any] = {
            "generator": torch.Generator(x.device).manual_seed(seed),
            "device": x.device,
        }
        if x.shape[1] != width:  # experts that are narrower than the model
            x = torch.randn(len(x), width, **random).to(x.dtype)
        given = {"x": x, "d_scores": torch.randn(len(x), experts, **random).to(x.dtype)}
        if self.rule.given:
            given["bias"] = torch.randn(experts, **random) / 8
        return given | self._run(self.ours, given, backward)

    def measure(
        self, ours: dict[str, Tensor], dtype: torch.dtype
    ) -> tuple[dict[str, list[Errors]], dict[str, float], Row]:
        """Errors of every tensor that `run` gave, how many numbers they hang on, and the row of the
        choice.

        Hugging Face's router chooses for itself: its errors are those to the truth of its choice.
        """
        backward = "d_router" in ours
        hf = self._run(self.hf, ours, backward)
        options = self.rule.options(self.ours)
        if self.rule.given:
            options["bias"] = self._bias(ours)
        how = {name: value for name, value in options.items() if name in _WEIGHTS}
        choice = {name: value for name, value in options.items() if name not in _WEIGHTS[1:]}
        truth, theirs = (self._truth(ours, run["index"], how, backward) for run in (ours, hf))
        exact = truth.pop("logits")
        few = law.effective(truth.pop("d_logits")) if backward else math.inf
        row = _wrong_outputs(ours, hf, dtype)
        row = row or routing(ours["index"], ours["logits"], exact, dtype, choice)
        for run, exact in ((ours, truth), (hf, theirs)):  # of the logits that each of them had
            own = reference.expert_weights(run["logits"].double(), run["index"], **how)
            exact["top_k_weights"] = own
        if how.get("renormalize") and ours["index"].shape[1] == 1:
            truth = {"top_k_weights": truth["top_k_weights"]}  # a single weight is always the same
        errors = {}
        for name, exact in truth.items():
            moved = hf[name].double() - theirs[name] + exact
            errors[name] = [law.measure(ours[name], [moved], exact)]
        slots = ours["index"].numel()
        free = slots - len(ours["index"]) if how.get("renormalize") else slots  # sums of zero
        numbers = dict.fromkeys(errors, min(free, few))
        numbers["top_k_weights"] = slots
        return errors, numbers, row

    def _bias(self, given: dict[str, Tensor]) -> Tensor | None:
        return given["bias"] if getattr(self.ours, "use_expert_bias", True) else None

    def _run(self, router: Any, given: dict[str, Tensor], backward: bool) -> dict[str, Tensor]:
        x = given["x"].detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            found = router(x, *([self._bias(given)] if self.rule.given else []))
        logits, weights, index = found[::-1] if self.rule.index_first else found
        run = {"logits": logits, "top_k_weights": weights, "index": index}
        if backward:
            leaves = {"d_router_inputs": x, "d_router": router.weight}
            d_weights = given["d_scores"].gather(1, index).to(weights.dtype)
            run |= zip(leaves, torch.autograd.grad(weights, [*leaves.values()], d_weights))
        run = {name: tensor.detach() for name, tensor in run.items()}
        return run | {"returned": passes.describe(found)}

    def _truth(
        self, given: dict[str, Tensor], index: Tensor, how: dict[str, Any], backward: bool
    ) -> dict[str, Tensor]:
        """In float64, of the experts `index` [T, K]."""
        leaves = {"d_router_inputs": given["x"], "d_router": self.ours.weight}
        leaves = {n: t.detach().double().requires_grad_(backward) for n, t in leaves.items()}
        with torch.set_grad_enabled(backward):
            bias = self.ours.bias.detach().double() if self.rule.biased else None
            x, weight = leaves.values()
            logits = F.linear(x, weight, bias)
            weights = reference.expert_weights(logits, index, **how)
        found = {"logits": logits.detach()}
        if backward:
            d_weights = given["d_scores"].double().gather(1, index)
            leaves["d_logits"] = logits
            found |= zip(leaves, torch.autograd.grad(weights, [*leaves.values()], d_weights))
        return found
