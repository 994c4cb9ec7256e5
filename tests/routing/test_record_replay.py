"""record_routing and replay_routing: every family, training, generation, and what is refused."""

from __future__ import annotations

import contextlib
import copy

import families
import pytest
import torch
from tiny import assert_close, both_families, tiny_block, tiny_model, tokens, train_step
from torch.utils.checkpoint import checkpoint

import moe_patch
from moe_patch import Routing, notices, record_routing, replay_routing
from moe_patch.routing.layers import layers_of

NOT_BY_TOPK = {"phimoe", "zaya"}
"""Sparsemixer; a topk in three dimensions, over one class more than there are experts."""
BY_HALVES = {"ernie4_5_vl_moe"}
"""Tokens of images and of text have layers of their own."""
KINDS = {
    "afmoe", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5_moe",
    "gemma4", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "inkling", "jamba", "lfm2_moe", "llama4",
    "minimax_m2", "phimoe", "step3p7", "zaya",
}  # fmt: skip
"""Of routers and blocks: these run without a GPU, too."""
both_ways = pytest.mark.parametrize("patched", [False, True], ids=("HF's", "patched"))


def disturbed(model, by=0.02):
    """A copy that chooses otherwise."""
    model = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter)
            parameter.add_(noise * by)
    return model


@contextlib.contextmanager
def experts_inputs(model):
    """{layer: the top_k_index that its experts are called with}."""
    found, handles = {}, []
    for layer in layers_of(model):

        def hook(_, args, kwargs, name=layer.name):
            given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args)) | kwargs
            found[name] = given.get("top_k_index"), given.get("top_k_weights")

        handles.append(layer.experts.register_forward_pre_hook(hook, with_kwargs=True))
    yield found
    for handle in handles:
        handle.remove()


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in KINDS else pytest.mark.gpu)
        for family in sorted({*families.FAMILIES, "llama4"} - BY_HALVES)
    ],
)
def test_every_family(family, device):
    """What is recorded is what the experts got, and what is replayed is what was recorded."""
    model = tiny_model("llama4", device) if family == "llama4" else families.build(family, device)
    ids, run = tokens(device, 2, 5) % 30, {"use_cache": False}
    with record_routing(model) as routing, experts_inputs(model) as got:
        model(ids, **run)
    other = disturbed(model, 0.1)
    with record_routing(other) as free:
        other(ids, **run)
    assert not torch.equal(free.top_k_index, routing.top_k_index)
    moe_patch.patch(other, strict=False)
    for each, name in enumerate(routing.layers):
        index, _ = got[name]
        mine = routing.top_k_index[:, each]
        assert index is None or torch.equal(index.view_as(mine).to(mine), mine)
    if family in NOT_BY_TOPK:
        with (
            pytest.raises(RuntimeError, match="does not choose experts by topk, so that"),
            replay_routing(other, routing),
        ):
            other(ids, **run)
        return
    with (
        replay_routing(other, routing),
        experts_inputs(other) as got,
        record_routing(other, weights=True) as again,
    ):
        other(ids, **run)
    assert torch.equal(again.top_k_index, routing.top_k_index)
    for each, name in enumerate(routing.layers):
        index, weights = got[name]
        assert torch.equal(index.flatten().long(), again.top_k_index[:, each].flatten().long())
        assert torch.equal(weights.flatten(), again.top_k_weights[:, each].flatten())


@both_families
@both_ways
def test_replaying_its_own_choice_changes_no_bit(family, patched, device):
    model, ids = tiny_model(family, device), tokens(device, 2, 7)
    if patched:
        model.patch()
    plain, grads = train_step(model, ids)
    with record_routing(model) as routing:
        model(ids)
    with replay_routing(model, routing):
        out, others = train_step(model, ids)
    assert torch.equal(out.logits, plain.logits)
    assert all(torch.equal(grads[name], others[name]) for name in grads)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@both_families
@both_ways
def test_as_hugging_face_with_its_topk_overridden(family, patched, device, monkeypatch):
    """The choice of another model, put into torch.topk by hand."""
    model, ids = tiny_model(family, device), tokens(device, 2, 7)
    with record_routing(disturbed(model, 0.1)) as routing:
        pass
    other = disturbed(model, 0.1)
    with record_routing(other) as routing:
        other(ids)
    wanted = iter(routing.top_k_index.long().unbind(1))

    def topk(x, k, dim=-1, **_):
        index = next(wanted)
        assert x.shape[:-1] == index.shape[:-1] and k == index.shape[-1] and dim in (1, -1)
        return torch.return_types.topk((x.gather(-1, index), index))

    with monkeypatch.context() as patches:
        patches.setattr(torch, "topk", topk)
        expected, grads = train_step(model, ids)
    if patched:
        model.patch()
    with replay_routing(model, routing.top_k_index):
        out, others = train_step(model, ids)
    assert_close(out.logits, expected.logits)
    for name, grad in grads.items():
        assert_close(others[name], grad)


@pytest.mark.parametrize(
    "family, patched, reentrant",
    [("qwen3_moe", True, False), ("qwen3_moe", False, True), ("llama4", True, True)],
)
def test_checkpointing_takes_what_it_took(family, patched, reentrant, device):
    """Two micro-batches whose backwards run in the other order, or together."""
    model = tiny_model(family, device, num_experts_per_tok=1).train()
    if patched:
        model.patch()
    ids = tokens(device, 2, 4)
    other = disturbed(model, 0.1)
    with record_routing(other) as routing, torch.no_grad():
        other(ids[:1]), other(ids[1:])

    def step(order):
        model.zero_grad()
        with replay_routing(model, routing), record_routing(model) as again:
            losses = [model(part, labels=part).loss for part in (ids[:1], ids[1:])]
            for at in order:
                losses[at].backward()
            if not order:
                sum(losses).backward()
        assert torch.equal(again.top_k_index, routing.top_k_index)
        return [p.grad.clone() for p in model.parameters()]

    expected = step((0, 1))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for order in ((1, 0), ()):
        for ours, theirs in zip(step(order), expected, strict=True):
            assert_close(ours, theirs)


def test_a_checkpoint_that_nobody_knows(device):
    """One forward at a time is known; two are refused, whose backwards could be in any order."""
    block = tiny_block("qwen3_moe", device)
    x = torch.randn(1, 6, 64, device=device, requires_grad=True)
    with record_routing(disturbed(block, 0.2)) as routing:
        pass
    other = disturbed(block, 0.2)
    with record_routing(other) as routing, torch.no_grad():
        other(x), other(x)

    def run():
        return checkpoint(block, x, use_reentrant=False).square().sum()

    with replay_routing(block, routing), record_routing(block) as again:
        run().backward(), run().backward()
    assert torch.equal(again.top_k_index, routing.top_k_index)
    with replay_routing(block, routing):
        both = run() + run()
        with pytest.raises(RuntimeError, match="runs again after 2 forwards, and nobody knows"):
            both.backward()


@both_families
@both_ways
def test_generation(family, patched, device):
    """With a cache and padding on the left: as one batch, in a forward or step for step."""
    model = tiny_model(family, device)
    if patched:
        model.patch()
    ids = tokens(device, 2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    with record_routing(model) as rollout:
        out = model.generate(ids, **how)
    assert rollout.forwards == [(2, 5), (2, 1), (2, 1)] and len(rollout) == 14
    whole = rollout.as_batch(out.shape[1])
    assert int(whole.mask.sum()) == 14 - 2
    other = disturbed(model, 0.1)
    with replay_routing(other, whole), record_routing(other) as again:
        other(out, attention_mask=torch.cat([mask, torch.ones_like(out[:, 5:])], 1))
    assert torch.equal(again.top_k_index[whole.mask], whole.top_k_index[whole.mask])
    with replay_routing(other, rollout), record_routing(other) as again:
        other.generate(ids, **how)
    assert torch.equal(again.packed().top_k_index, rollout.packed().top_k_index)


def test_a_mask_says_which_tokens(device):
    model, ids = tiny_model("qwen3_moe", device), tokens(device, 1, 8)
    other = disturbed(model, 0.1)
    with record_routing(model) as own, torch.no_grad():
        model(ids)
    with record_routing(other) as routing, torch.no_grad():
        other(ids)
    mask = torch.arange(8, device=device) % 2 == 0
    with replay_routing(model, routing, mask=mask), record_routing(model) as found:
        model(ids)
    first = found.top_k_index[:, 0]  # later layers see what replaying changed
    assert torch.equal(first[mask], routing.top_k_index[mask, 0])
    assert torch.equal(first[~mask], own.top_k_index[~mask, 0])


def test_layers_without_experts_as_vllm_has_them(device):
    model = families.build("deepseek_v3", device)
    model = disturbed(model)
    layers = layers_of(model)
    total, ids = model.config.num_hidden_layers, tokens(device, 1, 4) % 30
    with record_routing(model) as routing, torch.no_grad():
        model(ids)
    index = torch.zeros(4, total + 1, routing.top_k_index.shape[2], dtype=torch.int32)
    for at, layer in enumerate(layers):
        index[:, layer.number] = routing.top_k_index[:, at].int().cpu()
    other = disturbed(model, 0.1)
    with replay_routing(other, index), record_routing(other) as again, torch.no_grad():
        other(ids)
    assert torch.equal(again.top_k_index, routing.top_k_index)


def test_adapters(device):
    peft = pytest.importorskip("peft")
    model, ids = tiny_model("qwen3_moe", device), tokens(device, 1, 6)
    with record_routing(model) as routing, torch.no_grad():
        model(ids)
    config = peft.LoraConfig(target_parameters=["experts.gate_up_proj"])
    adapted = peft.get_peft_model(model, config)
    for patched in (False, True):
        if patched:
            moe_patch.patch(adapted)
        with record_routing(adapted, weights=True) as again, torch.no_grad():
            adapted(ids)
        assert torch.equal(again.top_k_index, routing.top_k_index)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_run_uncompiled(in_place, device):
    block = tiny_block("qwen3_moe", device)
    x = torch.randn(1, 3, 64, device=device)
    compiled = block if in_place else torch.compile(block, backend="eager")
    if in_place:
        block.compile(backend="eager")
    notices._warn_uncompiled.cache_clear()
    with torch.no_grad():
        compiled(x)
        with (
            pytest.warns(UserWarning, match="a compiled model runs uncompiled while its routing"),
            record_routing(compiled) as routing,
        ):
            compiled(x)
    assert len(routing) == 3


def test_bare_blocks_and_two_readings(device):
    block = tiny_block("qwen3_moe", device)
    x = torch.randn(2, 3, 64, device=device)
    with record_routing(block, weights=True) as routing:
        block(x)
        assert len(routing.top_k_index) == 6
        block(x)
    assert len(routing) == 12 and routing.forwards == [None, None] and routing.layers == ("",)
    assert torch.equal(routing.top_k_index[:6], routing.top_k_index[6:])
    total = routing.top_k_weights.sum(-1)
    assert routing.top_k_weights.shape == (12, 1, 2) and bool((total > 0).all())


# What is refused


def test_a_forward_that_skips_a_layer(device):
    """As images and text skip each other's experts in Ernie 4.5 VL."""
    model, ids = tiny_model("qwen3_moe", device), tokens(device)
    with (
        pytest.raises(ValueError, match="did not run model.layers.1.mlp: a routing needs"),
        record_routing(model),
    ):
        model(ids)
        model.model.layers = model.model.layers[:1]
        model(ids)


def test_another_models_routing(device):
    model, ids = tiny_model("qwen3_moe", device), tokens(device, 1, 4)
    good = torch.arange(2).repeat(4, 2, 1)

    def refused(routing, error, says, **more):
        with pytest.raises(error, match=says), replay_routing(model, routing, **more):
            model(ids)
        assert not any(m._forward_pre_hooks for m in model.modules())

    refused(good[:, :1], ValueError, "the routing has 1 layers and the model 2 with experts")
    refused(Routing(good, num_experts=64), ValueError, "is of 64 experts a layer, and the model")
    refused(good[:, :, :1], ValueError, "has 1 experts a token, and the router of .* chooses 2")
    refused(good[:3], ValueError, "has 3 tokens, 0 of them were replayed, and a forward has 4")
    refused(good + 8, ValueError, "ids from 8 to 9, and the model has 8 experts")
    refused(good - 1, ValueError, "ids from -1 to 0, and the model")
    refused(good * 0, ValueError, "names an expert twice for a token, which no router does: mask")
    refused(good[:0], ValueError, "the routing has no tokens: record one")
    refused([[0]], TypeError, "routing is a list: pass a Routing or a tensor")
    refused(good, ValueError, r"mask must be \[4\]", mask=torch.ones(2, dtype=torch.bool))
    with replay_routing(model, good * 0, mask=torch.zeros(4, dtype=torch.bool)):
        model(ids)
    with (
        pytest.warns(UserWarning, match="2 of the 6 tokens of a replayed routing were not"),
        replay_routing(model, torch.cat([good, good[:2]])),
    ):
        model(ids)


def test_contexts_inside_contexts(device):
    model, ids = tiny_model("qwen3_moe", device), tokens(device)
    for context in (record_routing, lambda m: replay_routing(m, torch.arange(2).repeat(7, 2, 1))):
        with context(model):
            with (
                pytest.raises(ValueError, match="the model is being re.*ed already: leave that"),
                context(model),
            ):
                pass
            model(ids)
    with record_routing(model) as empty:
        pass
    with pytest.raises(ValueError, match="nothing was recorded: no forward of the model ran"):
        _ = empty.top_k_index
    with pytest.raises(ValueError, match="the routing has no tokens: record one with"):
        replay_routing(model, empty).__enter__()


def test_models_without_experts():
    with pytest.raises(ValueError, match="Linear has no MoE block of a kind that moe_patch knows"):
        record_routing(torch.nn.Linear(2, 2)).__enter__()
    with pytest.raises(TypeError, match="a torch.nn.Module is needed, found str"):
        replay_routing("model", torch.zeros(1, 1, 1).long()).__enter__()


def test_weights_that_unpatched_llama4_does_not_tell(device):
    model = tiny_model("llama4", device)
    with (
        pytest.raises(ValueError, match="are not told routing weights: patch the model first"),
        record_routing(model, weights=True),
    ):
        model(tokens(device))
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.gpu
def test_recording_to_pinned_memory_without_waiting():
    model, ids = tiny_model("qwen3_moe", "cuda"), tokens("cuda", 2, 5)
    model.patch()
    with record_routing(model) as here, torch.no_grad():
        model(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with record_routing(model, device="cpu", weights=True) as there, torch.no_grad():
            model(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.top_k_index.is_pinned() or len(there) == 10
    assert torch.equal(there.top_k_index, here.top_k_index.cpu())
