"""patch() and unpatch(): which blocks, what the report says."""

from __future__ import annotations

import types

import pytest
import torch
from tiny import (
    assert_close,
    both_families,
    layers,
    tiny_block,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.tensor_parallel import TensorParallelLayer
from transformers.models.llama4 import modeling_llama4 as hf_llama4
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_qwen3

import moe_patch
from moe_patch.models import SWAPS
from moe_patch.patcher import PatchReport

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")

# What is patched


@both_families
def test_whole_model_computes_the_same_and_fused(family, device, fused_calls):
    model = tiny_model(family, device)
    with torch.no_grad():
        expected = model(tokens(device)).logits
        moe_patch.patch(model)
        actual = model(tokens(device)).logits
        assert len(fused_calls) == 2
        moe_patch.unpatch(model)
        restored = model(tokens(device)).logits
    assert_close(actual, expected)
    assert torch.equal(restored, expected) and len(fused_calls) == 2


@both_families
def test_nested_module_and_bare_block(family, device, fused_calls):
    block = tiny_block(family, device)
    hidden = torch.randn(1, 3, 64, device=device)
    with torch.no_grad():
        expected = block(hidden)
        holder = nn.ModuleDict({"a": nn.ModuleList([block])})
        assert moe_patch.patch(holder).fused == ["a.0"]
        actual = block(hidden)
        assert moe_patch.patch(block).fused == [""]
    if family == "llama4":
        (actual, logits), (expected, expected_logits) = actual, expected
        assert_close(logits, expected_logits)
    assert actual.shape == expected.shape
    assert_close(actual, expected)
    assert fused_calls


def test_bare_experts(device, fused_calls):
    experts = tiny_block("qwen3_moe", device).experts
    report = moe_patch.patch(experts)
    assert (report.fused, report.classes) == ([""], ["Qwen3MoeExperts"])
    index = torch.tensor([[0, 1]], device=device)
    experts(torch.randn(1, 64, device=device), index, torch.ones(1, 2, device=device))
    assert fused_calls


def test_llama4_experts_alone_get_no_routing_and_stay():
    experts = tiny_block("llama4").experts
    report = moe_patch.patch(experts, strict=False)
    assert not report.fused and [skip[1] for skip in report.skipped] == ["Llama4TextExperts"]
    assert type(experts) is hf_llama4.Llama4TextExperts


def test_wrapper_around_a_model():
    model = nn.DataParallel(tiny_model("qwen3_moe"))
    assert moe_patch.patch(model).fused[0] == "module.model.layers.0.mlp"


@both_families
def test_only_some_layers(family):
    model = tiny_model(family)
    moe_patch.patch(layers(model)[1])
    report = moe_patch.patch(model)
    assert len(report.fused) == 2


@both_families
def test_patching_twice_is_patching_once(family):
    model = tiny_model(family)
    first = moe_patch.patch(model)
    state = [(type(m), vars(m).get("config")) for m in model.modules()]
    assert moe_patch.patch(model) == first
    for module, (cls, config) in zip(model.modules(), state):
        assert type(module) is cls and vars(module).get("config") is config
    moe_patch.unpatch(model)
    moe_patch.unpatch(model)
    assert not any(type(m) in SWAPS.values() for m in model.modules())


@both_families
def test_unpatch_restores_classes_and_the_config_object(family):
    model = tiny_model(family)
    before = [(type(m), vars(m).get("config")) for m in model.modules()]
    moe_patch.patch(model)
    assert before != [(type(m), vars(m).get("config")) for m in model.modules()]
    moe_patch.unpatch(model)
    for module, (cls, config) in zip(model.modules(), before):
        assert type(module) is cls and vars(module).get("config") is config


@both_families
def test_models_of_one_config_are_patched_one_by_one(family, device, fused_calls):
    config = tiny_config(family)
    patched, plain = (AutoModelForCausalLM.from_config(config).to(device) for _ in range(2))
    moe_patch.patch(patched)
    with torch.no_grad():
        plain(tokens(device))
        assert not fused_calls
        patched(tokens(device))
        assert fused_calls


# The report


def test_report_text():
    model = tiny_model("qwen3_moe")
    assert str(moe_patch.patch(model)) == (
        "moe_patch: fused 2 of 2 MoE blocks (2 Qwen3MoeSparseMoeBlock)"
    )
    report = PatchReport(["a"], [("", "Foo", "it is odd"), ("b", "Bar", "so is it")], ["Foo"])
    assert str(report) == (
        "moe_patch: fused 1 of 3 MoE blocks (1 Foo)\n  (root) (Foo): it is odd\n  b (Bar): so is it"
    )


def test_model_without_moe_blocks():
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE block.*found none.*Llama4"):
        moe_patch.patch(model)
    report = moe_patch.patch(model, strict=False)
    assert report == PatchReport() and str(report) == "moe_patch: fused 0 of 0 MoE blocks"


def test_dense_layers_of_a_moe_family_are_not_blocks():
    model = tiny_model("qwen3_moe", mlp_only_layers=[0])
    report = moe_patch.patch(model)
    assert (report.fused, report.skipped) == (["model.layers.1.mlp"], [])


def test_unknown_moe_blocks_are_named():
    class FooMoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4)])

    with pytest.raises(ValueError, match="found FooMoE .*ModuleList.*use_experts_implementation"):
        moe_patch.patch(nn.Sequential(FooMoE()))
    report = moe_patch.patch(nn.Sequential(FooMoE()), strict=False)
    assert [skip[:2] for skip in report.skipped] == [("0", "FooMoE")]
    with_known = nn.Sequential(FooMoE(), tiny_block("qwen3_moe"))
    report = moe_patch.patch(with_known)
    assert report.fused == ["1"] and [skip[0] for skip in report.skipped] == ["0"]


def test_not_a_module():
    with pytest.raises(TypeError, match="patch takes a torch.nn.Module, found str"):
        moe_patch.patch("Qwen/Qwen3-30B-A3B")


# Blocks that stay as Hugging Face wrote them


class CustomExperts(hf_qwen3.Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * 2


class CustomMoe(hf_llama4.Llama4TextMoe):
    def forward(self, hidden_states):
        return hidden_states * 2, None


class SequentialLlama4TextExperts(nn.ModuleList):
    """The name and place of what transformers' quantisers put in."""


class Qwen3MoeExperts(nn.Module):
    """A look-alike, as remote code brings them."""


def custom_experts(block):
    block.experts.__class__ = CustomExperts


def look_alike(block):
    block.experts = Qwen3MoeExperts()


def meta(block):
    block.to("meta")


def double(block):
    block.double()


def mixed_dtypes(block):
    block.experts.down_proj.data = block.experts.down_proj.data.bfloat16()


def mixed_devices(block):
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.to("meta"))


def quantised(block):
    weight = block.experts.gate_up_proj.data.to(torch.float8_e4m3fn)
    block.experts.gate_up_proj = nn.Parameter(weight, requires_grad=False)
    block.experts.down_proj.data = block.experts.down_proj.data.to(torch.float8_e4m3fn)


def tensor_subclass(block):
    class Packed(torch.Tensor):
        pass

    del block.experts.gate_up_proj
    block.experts.gate_up_proj = torch.zeros(8, 64, 64).as_subclass(Packed)


def too_many_choices(block):
    for module in block.modules():
        if hasattr(module, "top_k"):
            module.top_k = 9


def mish(block):
    block.experts.act_fn = nn.Mish()


def post_norm(block):
    block.experts.has_post_expert_norm = True


def own_forward(block):
    block.experts.forward = lambda *args: args[0]


def own_block_forward(block):
    block.forward = types.MethodType(lambda self, hidden_states: (hidden_states, None), block)


def custom_block(block):
    block.__class__ = CustomMoe


def planned_router(block):
    TensorParallelLayer().install_forward(block.router, None)


def sequential(block):
    block.experts = SequentialLlama4TextExperts([nn.Linear(4, 4)])


COMMON = {
    meta: "meta device",
    double: "torch.float64: bfloat16, float16 or float32",
    mixed_dtypes: "torch.float32 and torch.bfloat16: one dtype",
    mixed_devices: "on cpu and meta: one device",
    quantised: "torch.float8_e4m3fn",
    tensor_subclass: "Packeds: plain tensors",
    too_many_choices: "top_k is 9 and there are 8 experts: 1 to 8",
    own_forward: "replaced on the instance",
}
QWEN3 = {
    post_norm: "normalises its output",
    custom_experts: "CustomExperts derives from Qwen3MoeExperts",
    look_alike: "test_patcher.Qwen3MoeExperts is not a class that moe_patch knows",
}
LLAMA4 = {
    mish: "the activation is Mish: only SiLU",
    custom_block: "CustomMoe derives from Llama4TextMoe",
    sequential: "SequentialLlama4TextExperts",
    own_block_forward: "replaced on the instance",
    planned_router: "expert parallelism expects three values from a router",
}
UNFIT = [("qwen3_moe", *case) for case in (COMMON | QWEN3).items()]
UNFIT += [("llama4", *case) for case in (COMMON | LLAMA4).items()]


@pytest.mark.parametrize("family, spoil, reason", UNFIT)
def test_unfit_block_stays_and_is_listed(family, spoil, reason):
    spoilt, good = tiny_block(family), tiny_block(family)
    spoil(spoilt)
    model = nn.ModuleDict({"good": good, "spoilt": spoilt})
    before = [(type(m), vars(m).get("config")) for m in spoilt.modules()]
    report = moe_patch.patch(model)
    assert report.fused == ["good"]
    assert [skip[0] for skip in report.skipped] == ["spoilt"]
    assert reason in report.skipped[0][2]
    assert f"\n  spoilt ({type(spoilt).__name__}): " in str(report)
    for module, (cls, config) in zip(spoilt.modules(), before):
        assert type(module) is cls and vars(module).get("config") is config


def test_parallel_closures_keep_the_dispatch(device, fused_calls):
    """Tensor and expert parallelism put a closure around the experts' forward, and say so."""
    block = tiny_block("qwen3_moe", device)
    original, block.experts._is_hooked = block.experts.forward, True
    block.experts.forward = lambda *args: original(*args)
    hidden = torch.randn(1, 3, 64, device=device)
    with torch.no_grad():
        expected = block(hidden)
        assert moe_patch.patch(block).fused == [""]
        assert_close(block(hidden), expected)
    assert fused_calls
