"""A tiny model of every family with decorated experts, from its own config class, patched."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from test_models_decorated import decorated_classes
from test_support import UNFUSED
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import moe_patch

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
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
}
NOT_BUILT = {  # need pictures, or sizes that do not shrink alone; their experts: test_support
    "deepseek_ocr2",
    "dots3_note",
    "ernie4_5_vl_moe",
    "flint",
    "glm4v_moe",
    "mistral_large4",
    "qwen4_exp",
}
NOT_GENERATING = {"granitemoehybrid", "jamba"}  # not with two layers, none of them attention
FAMILIES: dict[str, str] = {}
for module, _ in decorated_classes():
    FAMILIES.setdefault(module.split(".")[2], module)


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


def build(family, device):
    module = importlib.import_module(FAMILIES[family])
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    classes = [
        c for c in classes if issubclass(c, PreTrainedModel) and c.__module__ == FAMILIES[family]
    ]
    ends = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
    classes = [c for c in classes if c.__name__.endswith(ends) and "PreTrained" not in c.__name__]
    classes.sort(key=lambda c: next(i for i, end in enumerate(ends) if c.__name__.endswith(end)))
    cls = next(c for c in classes if not any(w in c.__name__ for w in ("Vision", "Audio", "MTP")))
    torch.manual_seed(0)
    model = cls(shrink(cls.config_class(), MORE.get(family, {}))).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NOT_BUILT | UNFUSED.keys()])
def test_patched_as_unpatched(family, device, ran):
    model = build(family, device)
    ids = torch.randint(2, 90, (2, 7), device=device)

    def run():
        model.zero_grad()
        out = model(ids, use_cache=False)[0]
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).mean().backward()
        return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def generate():
        if not model.can_generate() or family in NOT_GENERATING:
            return ids
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3
        )

    expected, expected_grads = run()
    tokens = generate()
    report = moe_patch.patch(model)
    assert report.fused and not report.skipped, report
    assert not ran
    out, grads = run()
    assert len(ran) >= len(report.fused)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        atol = 1e-4 * float(grad.abs().max()) + 1e-9
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=atol)
    assert torch.equal(generate(), tokens)
    moe_patch.unpatch(model)
    torch.testing.assert_close(run()[0], expected, rtol=0, atol=0)
