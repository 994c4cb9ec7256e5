"""PEFT's adapters on experts in 4 bits: the same shapes, numbers and files as beside 16 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from four_bits import experts_of, quantised
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import assert_close, tiny_model, tokens

import moe_patch
from moe_patch.recognise import lent

EXPERTS = {
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "llama4": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    "gpt_oss": ["experts.gate_up_proj", "experts.down_proj"],
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],
}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*experts in 4 bits, dequantised"),
    pytest.mark.parametrize("family", EXPERTS),
]


def make(family, device="cpu"):
    if family in ("qwen3_moe", "llama4"):
        return tiny_model(family, device)
    return build(family, device, **SIZES)


def config(family, **more):
    options = {"r": 2, "target_modules": [], "init_lora_weights": False}
    return LoraConfig(**options | {"target_parameters": EXPERTS[family]} | more)


def adapted(model, family, **more):
    torch.manual_seed(1)
    return get_peft_model(model, config(family, **more))


def adapters_of(model):
    return {n: (p.shape, p.dtype) for n, p in model.named_parameters() if "lora" in n}


def step(model):
    """(logits, {name: gradient of each adapter})."""
    model.zero_grad()
    ids = tokens()[:1, :6] % 16
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if not p.requires_grad)
    assert not lent._lent.here.entries
    return out.logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same_step(model, twin):
    (ours, grads), (theirs, expected) = step(model), step(twin)
    assert_close(ours, theirs)
    assert grads.keys() == expected.keys() and grads
    for name, grad in grads.items():
        assert_close(grad, expected[name])


@pytest.mark.parametrize("order", ("unpatched", "patched", "patched before"))
def test_a_training_step(family, order, device):
    model, twin = quantised(make(family, device))
    if order == "patched before":
        moe_patch.patch(model)
    model, twin = adapted(model, family), adapted(twin, family)
    named = [adapters_of(each) for each in (model, twin)]
    assert named[0] == named[1] and named[0]
    if order == "patched":
        report = moe_patch.patch(model)
        assert len(report.adapters) == len(named[0]) // 2 and not report.left, report
    assert_same_step(model, twin)
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        assert_close(*(each(input_ids=tokens()[:1, :6] % 16).logits for each in (model, twin)))
    moe_patch.unpatch(model)
    assert_same_step(model, twin)


def test_adapters_of_either_load_on_the_other(family, device, tmp_path):
    model, twin = quantised(make(family, device))
    bare = copy.deepcopy(model), copy.deepcopy(twin)
    model, twin = adapted(model, family), adapted(twin, family)
    model.save_pretrained(tmp_path / "4")
    twin.save_pretrained(tmp_path / "16")
    other = PeftModel.from_pretrained(bare[0], tmp_path / "16", is_trainable=True)
    moe_patch.patch(other)
    assert_same_step(other, PeftModel.from_pretrained(bare[1], tmp_path / "4", is_trainable=True))


def test_several_adapters(family, device):
    model, twin = (adapted(each, family) for each in quantised(make(family, device)))
    for each in (model, twin):
        torch.manual_seed(2)
        each.add_adapter("second", config(family, r=4))
    moe_patch.patch(model)
    for names in ("second", ["default", "second"]):
        for each in (model, twin):
            each.base_model.set_adapter(names)
        assert_same_step(model, twin)
    copied = copy.deepcopy(model)
    assert torch.equal(step(copied)[0], step(model)[0])


@pytest.mark.parametrize("how", ("merge_and_unload", "merge_adapter"))
def test_merging_is_refused_before_anything_is_merged(family, how, device):
    """Attention's adapters, which come before the experts', stay adapters."""
    model = quantised(make(family, device))[0]
    linear = next(n for n, m in model.named_modules() if n.endswith(("q_proj", "lm_head")))
    model = adapted(model, family, target_modules=[linear])
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    assert any(f"{linear}.lora_A" in name for name in before)
    with pytest.raises(ValueError, match="in 4 bits, and an adapter cannot be merged into that"):
        getattr(model, how)()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[n] is p and torch.equal(p, value) for n, (p, value) in before.items())
    without = model.unload()
    assert not [n for n, _ in without.named_parameters() if "lora" in n]


def test_adapters_on_attention_alone_are_merged(family, device):
    model = quantised(make(family, device))[0]
    linear = next(n for n, m in model.named_modules() if n.endswith(("q_proj", "lm_head")))
    model = adapted(model, family, target_modules=[linear], target_parameters=None)
    expected = step(model)[0]
    merged = model.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora" in n] and experts_of(merged)
    with torch.no_grad():
        assert_close(merged(input_ids=tokens()[:1, :6] % 16).logits, expected)


def test_merged_after_dequantising(family, device, tmp_path):
    """As the refusal says: the adapter is merged into the weights that it was trained beside."""
    model = quantised(make(family, device))[0]
    bare = copy.deepcopy(model)
    model = adapted(model, family)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="PEFT has put adapters on experts of"):
        model.get_base_model().dequantize()
    ids = tokens()[:1, :6] % 16
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = PeftModel.from_pretrained(bare.dequantize(), tmp_path).merge_and_unload()
        assert len(moe_patch.patch(merged).fused)
        assert_close(merged(input_ids=ids).logits, expected)


def test_experts_with_adapters_are_not_quantised(family, device):
    model = adapted(make(family, device), family)
    report = moe_patch.quantize_experts(model, group=32)
    assert not report.quantized and "quantise the model before that" in report.skipped[0][2]


def test_half_precision(family, device):
    model, twin = quantised(make(family, device).half())
    model, twin = (
        get_peft_model(each, config(family), autocast_adapter_dtype=False) for each in (model, twin)
    )
    found = [adapters_of(each) for each in (model, twin)]
    assert found[0] == found[1] and {dtype for _, dtype in found[0].values()} == {torch.float16}
