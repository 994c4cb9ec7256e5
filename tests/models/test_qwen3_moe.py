"""Qwen3-MoE, patched against Hugging Face's eager loop in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import (
    assert_close,
    assert_same_scores,
    assert_same_step,
    tiny_block,
    tiny_model,
    tokens,
    train_step,
)
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

import moe_patch
from moe_patch.models import qwen3_moe

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@pytest.fixture
def pair(device):
    """The same tiny model as Hugging Face runs it eagerly, and patched."""
    plain = tiny_model("qwen3_moe", device)
    plain.set_experts_implementation("eager")
    patched = copy.deepcopy(plain)
    assert len(moe_patch.patch(patched).fused) == 2
    return plain, patched


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_router_returns_what_hf_returns(renormalise, dtype, device):
    router = tiny_block("qwen3_moe", norm_topk_prob=renormalise).gate.to(device, dtype)
    hidden = torch.randn(2, 5, 64, device=device, dtype=dtype, requires_grad=True)
    expected = router(hidden)
    router.__class__ = qwen3_moe.Qwen3MoeTopKRouter
    actual = router(hidden)
    for ours, theirs in zip(actual, expected):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert torch.equal(actual[0], expected[0])  # the logits
    assert torch.equal(actual[2], expected[2])  # the choice
    assert_same_scores(actual[1], expected[1], (hidden, router.weight))


def test_router_is_fused_in_the_model(pair, device, monkeypatch):
    original, calls = qwen3_moe.select_experts, []
    monkeypatch.setattr(
        qwen3_moe, "select_experts", lambda *a, **k: calls.append(a) or original(*a, **k)
    )
    pair[1](tokens(device))
    assert len(calls) == 2


def test_gradients_equal_hf_eager(pair, device):
    plain, patched = pair
    ids = tokens(device, 2, 9)
    assert_same_step(train_step(patched, ids), train_step(plain, ids))


def test_router_logits_and_aux_loss(pair, device):
    plain, patched = pair
    ids = tokens(device)
    expected = train_step(plain, ids, output_router_logits=True)
    actual = train_step(patched, ids, output_router_logits=True)
    assert len(actual[0].router_logits) == len(expected[0].router_logits) == 2
    for ours, theirs in zip(actual[0].router_logits, expected[0].router_logits):
        assert_close(ours, theirs)
    assert_close(actual[0].aux_loss, expected[0].aux_loss)
    assert expected[0].aux_loss.item() > 0
    assert_same_step(actual, expected)


def test_recording_started_before_patching(device):
    """The first output_router_logits installs hooks for good; patching must not lose them."""
    model = tiny_model("qwen3_moe", device)
    with torch.no_grad():
        expected = model(tokens(device), output_router_logits=True).router_logits
        moe_patch.patch(model)
        actual = model(tokens(device), output_router_logits=True).router_logits
        moe_patch.unpatch(model)
        restored = model(tokens(device), output_router_logits=True).router_logits
    assert len(expected) == len(actual) == len(restored) == 2
    for theirs, ours, again in zip(expected, actual, restored):
        assert_close(ours, theirs)
        assert torch.equal(again, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    plain = tiny_model("qwen3_moe", device).train()
    plain.set_experts_implementation("eager")
    expected = train_step(plain, tokens(device))
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plain.enable_input_require_grads()
    moe_patch.patch(plain)
    assert_same_step(train_step(plain, tokens(device)), expected)


def test_generate_gives_the_same_tokens(pair, device):
    plain, patched = pair
    ids = tokens(device, 2, 4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, **options)
    assert expected.shape == (2, 10)
    assert torch.equal(patched.generate(ids, **options), expected)


def test_frozen_experts_and_frozen_router(pair, device):
    plain, patched = pair
    for model in pair:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        model.model.layers[0].mlp.gate.weight.requires_grad_()
    (_, expected), (_, actual) = (train_step(model, tokens(device)) for model in pair)
    assert {n for n, g in actual.items() if g is None} == {
        n for n, g in expected.items() if g is None
    }
    for name, grad in actual.items():
        if grad is not None:
            assert_close(grad, expected[name])


def test_autocast_gives_hf_s_dtype(device):
    plain, patched = (tiny_block("qwen3_moe", device) for _ in range(2))
    moe_patch.patch(patched)
    hidden = torch.randn(1, 5, 64, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.float16):
        expected, actual = plain(hidden), patched(hidden)
        routed, ours = plain.gate(hidden), patched.gate(hidden)
    assert actual.dtype == expected.dtype
    assert [x.dtype for x in ours] == [x.dtype for x in routed]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_whole_model_compiles_without_graph_breaks(pair, device):
    _, patched = pair
    torch._dynamo.reset()
    ids = tokens(device)
    with torch.no_grad():
        expected = patched(ids).logits
        compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
        assert_close(compiled(ids).logits, expected)
    torch._dynamo.reset()


def test_class_is_hf_s_to_the_outside():
    block = tiny_block("qwen3_moe")
    moe_patch.patch(block)
    assert isinstance(block.gate, hf.Qwen3MoeTopKRouter)
    assert type(block) is hf.Qwen3MoeSparseMoeBlock
    assert type(block.experts) is hf.Qwen3MoeExperts
