"""Small blocks of families whose router follows a rule, every parameter and buffer random."""

from __future__ import annotations

import importlib

import torch
from small import MORE, shrink
from torch import nn

BLOCKS = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe"),
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
}
GROUPED = {
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
}


def hf_block(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Hugging Face's block; groups and a bias of the choice where the family has them."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config, block = (getattr(module, name) for name in BLOCKS[family])
    more = {"num_experts": 8, "num_experts_per_tok": 2}
    more |= MORE.get(family, {}) | GROUPED.get(family, {})
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        block = block(shrink(config(), more))
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            nn.init.normal_(tensor, std=0.3 if "bias" in name else 0.15)
    return block.to(dtype).eval()
