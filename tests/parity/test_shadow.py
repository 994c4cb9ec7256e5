"""Shadows share weights and nothing else."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model

import moe_patch
from moe_patch.models.decorated import ExpertsConfig
from moe_patch.parity.shadow import (
    family_of,
    find_experts,
    hugging_face,
    implementations,
    logical,
    shadow,
)
from moe_patch.patcher import patch
from moe_patch.shapes import build, build_model


def test_storage_is_shared_and_leaves_are_not():
    model = build_model("tiny_qwen3")
    model.requires_grad_(False)
    new = shadow(model)
    for (name, old), (same, copied) in zip(model.named_parameters(), new.named_parameters()):
        assert name == same and old is not copied and old.data_ptr() == copied.data_ptr()
        assert copied.requires_grad and copied.is_leaf and not old.requires_grad
    for old, copied in zip(model.buffers(), new.buffers()):
        assert old.data_ptr() == copied.data_ptr()
    assert new.state_dict().keys() == model.state_dict().keys()
    ids = torch.randint(256, (1, 9))
    assert torch.equal(model(input_ids=ids).logits, new(input_ids=ids).logits)


def test_cast_leaves_the_original():
    block = build("tiny_llama4")
    new = shadow(block, torch.float16)
    assert {p.dtype for p in new.parameters()} == {torch.float16}
    assert {p.dtype for p in block.parameters()} == {torch.float32}


def test_tied_weights_stay_tied():
    model = build_model("tiny_qwen3")
    model.lm_head.weight = model.model.embed_tokens.weight
    new = shadow(model)
    assert new.lm_head.weight is new.model.embed_tokens.weight


def test_hooks_and_instance_forwards_stay_behind():
    block = build("tiny_qwen3").train()
    block.register_forward_hook(lambda *_: pytest.fail("called"))
    add_hook_to_module(block.experts, AlignDevicesHook())
    block.gate.forward = lambda *_: pytest.fail("called")
    new = shadow(block)
    assert not hasattr(new.experts, "_hf_hook") and block.training and not new.training
    new(torch.randn(1, 3, 64))
    assert hasattr(block.experts, "_hf_hook")


def test_config_is_not_shared():
    """unpatch writes to it when a model was loaded with experts_implementation="moe_patch"."""
    model = build_model("tiny_qwen3")
    model.set_experts_implementation("moe_patch")
    new = shadow(model)
    assert new.config is new.model.layers[0].mlp.experts.config
    moe_patch.unpatch(new)
    assert model.config._experts_implementation == "moe_patch"
    assert new.config._experts_implementation == "grouped_mm"


def test_patching_a_shadow_leaves_the_original():
    model = build_model("tiny_llama4")
    classes = [type(module) for module in model.modules()]
    patch(shadow(model))
    assert [type(module) for module in model.modules()] == classes


def test_hugging_face_switches_one_module():
    block = build("tiny_qwen3")
    patch(block)
    ways = implementations(block)
    assert ways == ["eager", "grouped_mm"]
    for way in ways:
        experts = hugging_face(block, way).experts
        assert experts.config._experts_implementation == way
    assert isinstance(block.experts.config, ExpertsConfig)
    assert block.experts.config._experts_implementation == "moe_patch"
    llama = build("tiny_llama4")
    patch(llama)
    assert implementations(llama) == ["dense"]
    dense = hugging_face(llama, "dense")
    assert type(dense).__module__.startswith("transformers.")
    assert not type(llama).__module__.startswith("transformers.")


def test_anatomy():
    qwen, llama = build("tiny_qwen3"), build("tiny_llama4")
    for block, transposed in ((qwen, False), (llama, True)):
        experts = find_experts(block)
        assert experts is block.experts
        gate_up, down = logical(block, experts.gate_up_proj, experts.down_proj)
        assert gate_up.shape[1:] == (96, 64) and down.shape[1:] == (64, 48)
        assert (gate_up.data_ptr() == experts.gate_up_proj.data_ptr()) and (
            gate_up.is_contiguous() is not transposed
        )
    assert family_of(qwen).router == "gate" and family_of(qwen).renormalize
    assert family_of(llama).weight_on == "input" and family_of(llama).shared_expert
    assert family_of(qwen.experts).router is None


def test_adapters_are_not_part_of_the_truth():
    model = build_model("tiny_qwen3", layers=1)
    config = LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"])
    block = get_peft_model(model, config).base_model.model.model.layers[0].mlp
    assert family_of(block).router is None
    assert type(find_experts(block)).__name__ == "Qwen3MoeExperts"
