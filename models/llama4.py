"""Llama4: sigmoid top-k whose score multiplies the expert's input, plus one shared expert.

HF's block runs every token through every expert, nearly all with a score of zero; this one runs
only the chosen experts. Its experts are not decorated and are stored [E, H, 2I] and [E, I, H].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama4 import modeling_llama4 as hf

from ..experts import fused_experts
from ..routing import select_experts, sigmoid_scores
from .decorated import low_rank_updates, runs_fused, why_not_silu, why_not_weights
from .overlap import both
from .wrapped import hooked_by_plan, replaced_forward


class Llama4Router(hf.Llama4Router):
    """HF's router with sigmoid and top-k in one kernel."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> HF's (router_scores [T, E], zero where not chosen; router_logits [T, E])."""
        if not runs_fused(hidden_states, self.weight):
            return super().forward(hidden_states)
        router_logits = F.linear(hidden_states, self.weight)
        if torch.is_grad_enabled() and router_logits.requires_grad:
            index, weights = select_experts(
                router_logits, self.top_k, score="sigmoid", dtype=torch.float32
            )
            chosen = weights.to(router_logits.dtype)
            router_scores = torch.zeros_like(router_logits).scatter(1, index, chosen)
        else:
            router_scores, index, weights = sigmoid_scores(router_logits, self.top_k)
        if not torch.compiler.is_compiling() and not router_scores.is_inference():
            router_scores.choice = index, weights, router_scores._version
        return router_scores, router_logits


class Llama4TextExperts(hf.Llama4TextExperts):
    """HF's experts, which also take the routing and then run the chosen experts only."""

    takes_low_rank = True

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """[T, H] with top_k_index and top_k_weights [T, K] -> [T, H]; alone: HF's dense forward."""
        if top_k_index is None or top_k_weights is None:
            return super().forward(hidden_states)
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return fused_experts(
            hidden_states, gate_up, down, top_k_index, top_k_weights, weight_on="input",
            **low_rank_updates(self),
        )  # fmt: skip

    @staticmethod
    def why_not_fused(experts: nn.Module) -> str | None:
        """None when the class can be swapped, else the reason in one sentence."""
        if replaced_forward(experts):
            return "the experts' forward was replaced on the instance: patch before that"
        return why_not_weights(experts) or why_not_silu(experts.act_fn)


class Llama4TextMoe(hf.Llama4TextMoe):
    """HF's block that computes only what the router chose."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> HF's (out [T, H], router_logits [T, E])."""
        experts = _find(self.experts, Llama4TextExperts)
        if experts is None or not runs_fused(hidden_states, reason=why_not_weights(experts)):
            return super().forward(hidden_states)
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        shared, (routed, router_logits) = both(hidden_states, self.shared_expert, self._routed)
        return shared + routed.to(shared.dtype), router_logits

    def _routed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        router_scores, router_logits = self.router(hidden_states)
        *choice, version = getattr(router_scores, "choice", (None,))
        if version is not None and version == router_scores._version:
            top_k_index, top_k_weights = choice
        else:  # a hook on the router changed the scores: from them, as HF's block
            top_k_weights, top_k_index = router_scores.topk(self.top_k, dim=1)
        return self.experts(hidden_states, top_k_index, top_k_weights), router_logits

    @staticmethod
    def why_not_fused(block: nn.Module) -> str | None:
        """None when the class can be swapped, else the reason in one sentence."""
        if replaced_forward(block):
            return "the block's forward was replaced on the instance: patch before that"
        if hooked_by_plan(block.router):
            return (
                "transformers' expert parallelism expects three values from a router and Llama4's "
                "returns two: load it with a tensor-parallel plan or FSDP"
            )
        if _find(block.experts, hf.Llama4TextExperts) is None:
            found = type(block.experts).__name__
            return f"the experts are {found} (quantised?): only Llama4TextExperts can be fused"
        return None


def _find(module: nn.Module, cls: type[nn.Module]) -> nn.Module | None:
    """The module, or what a wrapper such as PEFT's holds, that is of this class."""
    return next((child for child in module.modules() if isinstance(child, cls)), None)


SWAPS = {
    hf.Llama4Router: Llama4Router,
    hf.Llama4TextExperts: Llama4TextExperts,
    hf.Llama4TextMoe: Llama4TextMoe,
}
