"""DeepSeek-V3: its shared experts beside the routed ones (recognise/routers.py, decorated.py)."""

from __future__ import annotations

import functools

from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from ..recognise.eligibility import runs_fused
from ..recognise.original import Fused, intact, own_forward
from ..recognise.overlap import both, overlaps


class DeepseekV3MoE(Fused, hf.DeepseekV3MoE):
    """HF's block; a few tokens run their shared and routed experts at the same time."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> the same."""
        if not (overlaps(hidden_states) and intact(self) and runs_fused(hidden_states)):
            return own_forward(self, hidden_states)
        shared, routed = both(hidden_states, self.shared_experts, functools.partial(_routed, self))
        return routed + shared


def _routed(block: DeepseekV3MoE, hidden_states: Tensor) -> Tensor:
    _, top_k_weights, top_k_index = block.gate(hidden_states)
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    return block.experts(rows, top_k_index, top_k_weights).view(hidden_states.shape)


SWAPS = {hf.DeepseekV3MoE: DeepseekV3MoE}
