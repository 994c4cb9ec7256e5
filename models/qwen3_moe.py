"""Qwen3-MoE: softmax over all experts, top-k, optional renormalisation. Experts: decorated.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from ..ops.routing import select_experts
from ..recognise.eligibility import runs_fused
from ..recognise.original import Fused, intact, own_forward


class Qwen3MoeTopKRouter(Fused, hf.Qwen3MoeTopKRouter):
    """HF's router with scores, top-k and renormalisation in one kernel."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> HF's (router_logits [T, E], router_scores [T, K], router_indices [T, K])."""
        if not (intact(self) and runs_fused(hidden_states, self.weight)):
            return own_forward(self, hidden_states)
        router_logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        router_indices, router_scores = select_experts(
            router_logits, self.top_k, renormalize=self.norm_topk_prob
        )
        return router_logits, router_scores, router_indices


SWAPS = {hf.Qwen3MoeTopKRouter: Qwen3MoeTopKRouter}
