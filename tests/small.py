"""Sizes that make a tiny model of every MoE family, out of its own configuration class."""

from __future__ import annotations

import contextlib

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
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
MORE = {  # what a family needs besides
    "gemma4": {"enable_moe_block": True},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "llama4": {"moe_layers": [0, 1], "intermediate_size_mlp": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
}


def shrink(config, more):
    for value in [*vars(config).values()]:
        if isinstance(value, PreTrainedConfig):
            shrink(value, more)
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
