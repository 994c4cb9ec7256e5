"""Llama4, patched against Hugging Face's dense forward in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import (
    assert_close,
    assert_same_scores,
    assert_same_step,
    says_once,
    tiny_block,
    tiny_config,
    tiny_model,
    tokens,
    train_step,
)
from transformers import AutoModel
from transformers.models.llama4 import modeling_llama4 as hf

import moe_patch
from moe_patch import kernels
from moe_patch.models import llama4

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@pytest.fixture(params=[1, 2], ids=["top1", "top2"])
def pair(request, device):
    """The same tiny model as Hugging Face runs it, and patched."""
    plain = tiny_model("llama4", device, num_experts_per_tok=request.param)
    patched = copy.deepcopy(plain)
    assert len(moe_patch.patch(patched).fused) == 2
    return plain, patched


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_router_returns_what_hf_returns(dtype, device):
    router = tiny_block("llama4").router.to(device, dtype)
    hidden = torch.randn(5, 64, device=device, dtype=dtype, requires_grad=True)
    expected = router(hidden)
    router.__class__ = llama4.Llama4Router
    actual = router(hidden)
    assert torch.equal(actual[1], expected[1])  # the logits
    assert torch.equal(actual[0] != 0, expected[0] != 0)  # the choice
    assert_same_scores(actual[0], expected[0], (hidden, router.weight))
    with torch.no_grad():  # another kernel writes the scores
        scores, logits = router(hidden)
    assert torch.equal(logits, expected[1])
    assert_same_scores(scores, expected[0].detach(), ())


def test_router_is_fused_in_the_model(pair, device, monkeypatch):
    original, calls = llama4.select_experts, []
    monkeypatch.setattr(
        llama4, "select_experts", lambda *a, **k: calls.append(a) or original(*a, **k)
    )
    pair[1](tokens(device))
    assert len(calls) == 2


def test_gradients_equal_hf(pair, device):
    plain, patched = pair
    ids = tokens(device, 2, 5)
    assert_same_step(train_step(patched, ids), train_step(plain, ids))


def test_recorded_router_logits(device):
    """5.17 records them from the block's output, 5.23 from the router's."""
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config("llama4")).to(device).eval()
    assert isinstance(model, hf.Llama4TextModel)
    with torch.no_grad():
        expected = model(tokens(device), output_router_logits=True).router_logits
        moe_patch.patch(model)
        actual = model(tokens(device), output_router_logits=True).router_logits
    assert len(actual) == len(expected) == 2
    for ours, theirs in zip(actual, expected):
        assert ours.shape == (7, 8)
        assert_close(ours, theirs)


def test_causal_lm_outputs_and_aux_loss(device):
    """Hugging Face's own class returns them since 5.23 only; patched must not differ."""
    plain = tiny_model("llama4", device)
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    expected = train_step(plain, tokens(device), output_router_logits=True)
    actual = train_step(patched, tokens(device), output_router_logits=True)
    assert list(actual[0].keys()) == list(expected[0].keys())
    if "aux_loss" in expected[0]:
        assert_close(actual[0].aux_loss, expected[0].aux_loss)
    assert_same_step(actual, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    model = tiny_model("llama4", device).train()
    expected = train_step(model, tokens(device))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    moe_patch.patch(model)
    assert_same_step(train_step(model, tokens(device)), expected)


def test_generate_gives_the_same_tokens(pair, device):
    plain, patched = pair
    ids = tokens(device, 2, 4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, **options)
    assert expected.shape == (2, 10)
    assert torch.equal(patched.generate(ids, **options), expected)


def test_patched_experts_still_take_hf_s_dense_call(device):
    block = tiny_block("llama4", device)
    dense = torch.randn(8 * 3, 64, device=device)
    expected = block.experts(dense)
    moe_patch.patch(block)
    assert type(block.experts) is llama4.Llama4TextExperts
    assert torch.equal(block.experts(dense), expected)


def test_only_the_chosen_experts_are_computed(monkeypatch, device):
    """The experts see every token once, not once an expert."""
    block = tiny_block("llama4", device)
    moe_patch.patch(block)
    shapes = []
    monkeypatch.setattr(
        llama4,
        "fused_experts",
        lambda hidden, gate_up, down, index, weights, weight_on: (
            shapes.append((hidden.shape, index.shape, weight_on)) or torch.zeros_like(hidden)
        ),
    )
    block(torch.randn(1, 3, 64, device=device))
    assert shapes == [((3, 64), (3, 2), "input")]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_hook_that_changes_the_router_scores_is_obeyed(device, grad, in_place):
    factors = torch.tensor([1.0, 0.5] * 4, device=device)

    def prune(router, args, output):
        scores, logits = output
        if in_place:
            scores *= factors
            return None
        return scores * factors, logits

    plain, patched = (tiny_block("llama4", device) for _ in range(2))
    moe_patch.patch(patched)
    hidden = torch.randn(1, 5, 64, device=device)
    with torch.set_grad_enabled(grad):
        before = patched(hidden)[0]
        for block in (plain, patched):
            block.router.register_forward_hook(prune)
        actual, expected = patched(hidden)[0], plain(hidden)[0]
    assert_close(actual, expected)
    assert not torch.allclose(actual, before)


def test_shared_expert_and_router_are_called_as_modules(device):
    block = tiny_block("llama4", device)
    moe_patch.patch(block)
    called = []
    for name in ("router", "experts", "shared_expert"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    block(torch.randn(1, 5, 64, device=device))
    assert sorted(called) == ["experts", "router", "shared_expert"]


def test_autocast_gives_hf_s_dtype(device):
    plain, patched = (tiny_block("llama4", device) for _ in range(2))
    moe_patch.patch(patched)
    hidden = torch.randn(1, 5, 64, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.float16):
        expected, actual = plain(hidden), patched(hidden)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)


def test_unsupported_device_runs_hf_and_says_so_once(monkeypatch, device):
    monkeypatch.setattr(kernels, "why_not", lambda device_type: f"no kernels on {device_type}")
    monkeypatch.setattr(llama4, "fused_experts", None)
    monkeypatch.setattr(llama4, "select_experts", None)
    block = tiny_block("llama4", device)
    hidden = torch.randn(1, 5, 64, device=device)
    expected = block(hidden)
    moe_patch.patch(block)
    with says_once("no kernels"):
        actual = block(hidden)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected))


def test_experts_quantised_after_patching_run_hf(device):
    """The block looks at its experts on every call, and leaves them alone if they are not ours."""
    block = tiny_block("llama4", device)
    hidden = torch.randn(1, 5, 64, device=device)
    expected = block(hidden)
    moe_patch.patch(block)
    block.experts.__class__ = hf.Llama4TextExperts
    for ours, theirs in zip(block(hidden), expected):
        assert_close(ours, theirs)


@pytest.mark.multigpu
def test_second_stream_of_another_gpu_than_the_current_one():
    block = tiny_block("llama4", torch.device("cuda", 1))
    moe_patch.patch(block)
    hidden = torch.randn(1, 40, 64, device="cuda:1")
    alone = block(hidden)[0]
    with torch.no_grad():
        for _ in range(20):
            torch.cuda._sleep(1_000_000)  # on the current GPU: what waits for it reads too early
            assert_close(block(hidden)[0], alone)
