"""Sizes that make a tiny model of every MoE family, out of its own configuration class."""

from __future__ import annotations

import contextlib
import importlib

import torch
from torch import nn
from transformers import PreTrainedConfig

SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "shared_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_num_experts",), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_group"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "sliding_window"), 16),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("index_n_heads", "index_topk", "linear_num_heads"), 4),
    "linear_head_dim": 16,
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_hidden_size"), 32),
    "max_position_embeddings": 64,
    "eos_token_id": None,
}


def _rope(**more):
    return {"rope_type": "default", "rope_theta": 10000.0, **more}


MORE = {  # what a family needs besides
    "deepseek_ocr2": {"mlp_layer_types": ["sparse", "sparse"]},
    "dots3_note": {"head_dim": 64},  # a quarter of it is rotated
    "ernie4_5_vl_moe": {
        "rope_parameters": _rope(mrope_section=[3, 3, 2]), "moe_intermediate_size": [32, 16],
    },
    "gemma4": {"enable_moe_block": True},
    "flint": {"mlp_only_layers": [0]},
    "glm4v_moe": {"rope_parameters": _rope(mrope_section=[4, 2, 2])},
    "hy_v4_vl": {"rope_parameters": _rope(mrope_section=[4, 2, 2])},
    **dict.fromkeys(("inkling2", "inkling2_loop"), {"unpadded_vocab_size": 96}),
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8},
    "llama4": {"moe_layers": [0, 1], "intermediate_size_mlp": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 2},
    "mistral_large4": {"kv_source_layers": [0, 1]},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "step3p7": {"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [None, 0.05]},
}  # fmt: skip


def shrink(config, more):
    for value in [*vars(config).values()]:
        if isinstance(value, PreTrainedConfig):
            shrink(value, more)
    config.allow_global_per_layer_attribute_access = True  # not in transformers 5.17
    for name, value in (SMALL | more).items():
        with contextlib.suppress(Exception):  # some are computed, some are a layer's own
            if hasattr(config, name) or name in more:
                setattr(config, name, value)
    for name, value in [*vars(config).items()]:
        if "layer" in name and isinstance(value, list) and name not in more:
            kinds = list(dict.fromkeys(value))[-2:]
            with contextlib.suppress(Exception):
                setattr(config, name, (kinds * 2)[:2])
    return config


BLOCKS = {  # sigmoid, bias, groups, scale; softmax and groups; softmax of the chosen; a given bias
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe"),
    "gpt_oss": ("GptOssConfig", "GptOssMLP"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2SparseMoeBlock"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeMoE"),
    "nemotron_h": ("NemotronHConfig", "NemotronHMoE"),
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
}
_BLOCK_MORE = {
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1,
                    "routed_scaling_factor": 2.5},
    "nemotron_h": {"moe_latent_size": 32},
}  # fmt: skip


def block(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A bare block of one of BLOCKS in eval mode, every parameter and buffer random."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config, cls = (getattr(module, name) for name in BLOCKS[family])
    more = MORE.get(family, {}) | _BLOCK_MORE.get(family, {})
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        made = cls(shrink(config(), {"num_experts": 8, "num_experts_per_tok": 2, **more}))
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            nn.init.normal_(tensor, std=0.3 if "bias" in name else 0.15)
    return made.to(dtype).eval()
