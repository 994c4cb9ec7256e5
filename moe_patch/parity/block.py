"""A whole block whose truth no family here knows: its output beside Hugging Face's, routing fixed.

The experts and the router are compared by themselves (compare.py, router.py); this is for
what stands around them: shared experts, scales, sums. All three run with the routing that ours
chose: Hugging Face's code in the dtype, and Hugging Face's code in float64 with the experts' truth.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..patcher import unpatch
from . import law, passes
from .law import Row
from .passes import INFERENCE, TRAINING, Inputs, Pass
from .shadow import Family, exact_weights, find_experts, shadow
from .truth import Exact, expert


def _true_experts(experts: Any, family: Family) -> nn.Module:
    """A copy of the experts that computes in float64, an expert at a time in both directions."""

    def forward(hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)  # [T, H]
        for e in range(len(experts.down_proj)):
            token, choice = torch.where(index == e)

            def rows(x: Tensor, weight: Tensor, e: int = e) -> Tensor:
                return expert(experts, family, x, weight, *exact_weights(experts, e))

            if len(token):
                chosen = hidden_states[token], weights[token, choice, None].to(out.dtype)
                out = out.index_add(0, token, checkpoint(rows, *chosen, use_reentrant=False))
        return out

    copy = shadow(experts)
    copy.forward = forward
    return copy


class BlockComparison:
    """A block beside Hugging Face's, with its experts' routing fixed.

    Args:
        ours: the block that is judged.
        twin: a patched copy, which gives weights.
        baselines: Hugging Face's copies of it.
        family: of the experts.
    """

    def __init__(
        self, ours: nn.Module, twin: nn.Module, baselines: list[nn.Module], family: Family
    ) -> None:
        self.ours, self.baselines = ours, baselines
        experts = find_experts(twin)
        # the experts' own weights stay as they are: no weight is ever whole in float64
        self.truth = shadow(twin, torch.float64, {id(experts): _true_experts(experts, family)})
        unpatch(self.truth)

    def rows(self, given: Inputs, dtype: torch.dtype, backward: bool) -> list[Row]:
        """Judges the output without gradients, and in training with the input's gradient.

        Raises whatever the block's forward raises when it is given hidden_states alone.
        """
        rows = []
        for how in (INFERENCE, TRAINING) if backward else (INFERENCE,):
            ours = _run(self.ours, given, how)
            routing = ours.pop("index"), ours.pop("weights")
            hf = [_run(block, given, how, routing) for block in self.baselines]
            exact = Inputs(given.x.double(), given.d_out.double())
            with Exact():
                truth = _run(self.truth, exact, how, routing, grad_mode=True)
            for name, tensor in ours.items():
                parts = [law.measure(tensor, [run[name] for run in hf], truth[name])]
                note = "" if how.backward else ", no gradients"
                rows.append(law.row(f"block {name}{note}", parts, dtype))
        return rows

    def runs(self, given: Inputs) -> bool:
        """Whether Hugging Face's code runs on hidden_states alone."""
        try:
            with passes.arranged(self.baselines[0], INFERENCE, given):
                self.baselines[0](given.x[None])
        except Exception:
            return False
        return True


def _run(
    block: nn.Module,
    given: Inputs,
    how: Pass,
    routing: tuple[Tensor, Tensor] | None = None,
    grad_mode: bool = False,
) -> dict[str, Tensor]:
    """output [T, H], index and weights [T, K]; d_hidden_states with that routing held constant.

    In `grad_mode` even where no gradient is asked for: Kolibri's router has another product without
    it, which takes half precision alone.
    """
    seen: dict[str, Tensor] = {}

    def fix(_, args):
        x, index, weights = args
        index, weights = routing or (index, weights)
        seen.update(index=index.detach(), weights=weights.detach())
        return x, seen["index"], seen["weights"].to(args[2].dtype)

    experts = find_experts(block)
    with contextlib.ExitStack() as stack:
        stack.callback(experts.register_forward_pre_hook(fix).remove)
        stack.enter_context(passes.arranged(block, how, given))
        stack.enter_context(torch.set_grad_enabled(how.backward or grad_mode))
        x = given.x.detach().requires_grad_(how.backward)
        result = block(x[None])
        out = (result[0] if isinstance(result, tuple) else result).reshape(x.shape)
        run = {"output": out.detach()}
        if how.backward:
            (run["d_hidden_states"],) = torch.autograd.grad(out, x, given.d_out.to(out.dtype))
    return run | seen
