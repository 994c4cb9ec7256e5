"""Shared experts whose gate is fused: which classes, when, and what stays Hugging Face's."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from tiny import assert_close, tiny_block
from torch import nn
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_deepseek
from transformers.models.llama4 import modeling_llama4 as hf_llama4
from transformers.models.qwen2_moe import modeling_qwen2_moe as hf_qwen2
from transformers.models.step3p7 import modeling_step3p7 as hf_step3p7

import moe_patch
from moe_patch.ops import glu
from moe_patch.recognise import mlps


@pytest.fixture
def gates(monkeypatch) -> list[torch.Tensor]:
    """Grows by the result of every gate that is fused."""
    found = []

    def recording(gate, up):
        found.append(glu.silu_mul(gate, up))
        return found[-1]

    monkeypatch.setattr(glu, "SMALLEST", 0)
    monkeypatch.setattr(mlps, "silu_mul", recording)
    return found


def deepseek():
    config = DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=2, n_group=1, topk_group=1,
    )  # fmt: skip
    return hf_deepseek.DeepseekV3MoE(config)


def qwen2():
    config = Qwen2MoeConfig(
        hidden_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return hf_qwen2.Qwen2MoeSparseMoeBlock(config)


BLOCKS = {
    "deepseek_v3": (deepseek, "shared_experts"),
    "qwen2_moe": (qwen2, "shared_expert"),
    "llama4": (lambda: tiny_block("llama4"), "shared_expert"),
}


@pytest.fixture(params=BLOCKS)
def block(request, device):
    """(a block, the name of its shared experts)."""
    make, name = BLOCKS[request.param]
    made = make().to(device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.2)
    return made, name


def run(block, hidden):
    """(output, gradients of its sum of squares) of a block."""
    x = torch.randn(1, 6, hidden, device=next(block.parameters()).device, requires_grad=True)
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad((out**2).sum(), [x, *block.parameters()], allow_unused=True)


def hidden_of(shared):
    return shared.gate_proj.weight.shape[1]


def test_as_hugging_face(block, gates):
    block, name = block
    shared, hf = block.get_submodule(name), copy.deepcopy(block)
    report = moe_patch.patch(block)
    assert report.shared_experts == report.to_dict()["shared_experts"] == [name]
    assert not report.skipped
    torch.manual_seed(1)
    out, grads = run(block, hidden_of(shared))
    assert len(gates) == 1 and "SiluMul" in type(gates[0].grad_fn).__name__
    torch.manual_seed(1)
    true, true_grads = run(hf, hidden_of(shared))
    assert_close(out, true)
    for ours, theirs in zip(grads, true_grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs)


def test_unpatch_and_pickles(block):
    block, name = block
    before = {n: type(m) for n, m in block.named_modules()}
    moe_patch.patch(block)
    fused = type(block.get_submodule(name))
    assert issubclass(fused, before[name]) and fused.__name__ == before[name].__name__
    for again in (pickle.loads(pickle.dumps(block)), copy.deepcopy(block)):
        assert type(again.get_submodule(name)) is fused
    moe_patch.unpatch(block)
    assert {n: type(m) for n, m in block.named_modules()} == before


def test_projections_are_called_with_their_hooks(block, gates):
    block, name = block
    moe_patch.patch(block)
    shared, seen = block.get_submodule(name), []
    for part in ("gate_proj", "up_proj", "down_proj"):
        shared.get_submodule(part).register_forward_hook(lambda *_, part=part: seen.append(part))
    shared.register_forward_hook(lambda *_: seen.append("whole"))
    run(block, hidden_of(shared))
    assert seen == ["gate_proj", "up_proj", "down_proj", "whole"]
    assert gates


@pytest.mark.parametrize("how", ["hook", "other", "instance", "keyword", "off"])
def test_what_is_left_to_hugging_face(gates, how, monkeypatch):
    """A hook on the activation, another activation, calls by keyword, and MOE_PATCH=0."""
    block = qwen2()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.2)
    shared, called = block.shared_expert, []
    if how == "instance":
        shared.act_fn.forward = lambda x: called.append(x) or F.silu(x)
    moe_patch.patch(block)
    if how == "hook":
        shared.act_fn.register_forward_hook(lambda *_: called.append(1))
    elif how == "other":
        shared.act_fn = nn.GELU()
    elif how == "off":
        monkeypatch.setattr(mlps.switch, "ENABLED", False)
    x = torch.randn(3, 32)
    out = shared(x=x) if how == "keyword" else shared(x)
    act = F.gelu if how == "other" else F.silu
    assert torch.equal(out, shared.down_proj(act(shared.gate_proj(x)) * shared.up_proj(x)))
    assert not gates
    assert bool(called) == (how in ("hook", "instance"))


def test_a_forward_replaced_on_the_class_runs(gates, monkeypatch):
    block = qwen2()
    moe_patch.patch(block)
    monkeypatch.setattr(hf_qwen2.Qwen2MoeMLP, "forward", lambda self, x: x + 1)
    x = torch.randn(3, 32)
    with pytest.warns(UserWarning, match="Qwen2MoeMLP.forward was replaced on the class"):
        assert torch.equal(block.shared_expert(x), x + 1)
    other = qwen2()
    report = moe_patch.patch(other)
    assert not gates
    (skipped,) = report.skipped
    assert skipped[:2] == ("shared_expert", "Qwen2MoeMLP") and "was replaced" in skipped[2]


def test_a_forward_replaced_on_the_instance_runs(gates):
    block = qwen2()
    block.shared_expert.forward = lambda x: x + 1
    report = moe_patch.patch(block)
    assert [name for name, *_ in report.skipped] == ["shared_expert"]
    assert not report.shared_experts
    x = torch.randn(3, 32)
    assert torch.equal(block.shared_expert(x), x + 1)
    assert not gates


def _swapped(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def _summed(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def _twice(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


def _right(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _bare(self, x):
    return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def _wider(self, x, more=None):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def written(function, **more):
    """A class in transformers' module of Qwen2-MoE with that forward, as if written there."""
    forward = FunctionType(function.__code__, vars(hf_qwen2), argdefs=function.__defaults__)
    return type("MLP", (nn.Module,), {"forward": forward, "__module__": hf_qwen2.__name__, **more})


@pytest.mark.parametrize("forward", [_swapped, _summed, _twice, _bare, _wider])
def test_classes_that_compute_something_else(forward):
    assert mlps.fused_class(written(forward)) is None
    assert mlps.fused_class(written(_right)) is not None


def test_only_transformers_classes_of_one_function():
    class Own(nn.Module):
        forward = _right

    assert mlps.fused_class(Own) is None
    assert mlps.fused_class(nn.Linear) is None
    assert mlps.fused_class(hf_qwen2.Qwen2MoeMLP) is not None
    assert mlps.fused_class(hf_step3p7.Step3p7MLP) is None  # it clamps
    assert mlps.fused_class(hf_llama4.Llama4VisionMLP) is None
    derived = type("Derived", (hf_qwen2.Qwen2MoeMLP,), {"__module__": hf_qwen2.__name__})
    assert mlps.fused_class(derived) is None  # what it changes is not looked into
    assert mlps.fused_class(written(_right, helper=hf_qwen2.Qwen2MoeMLP.forward)) is None


def test_a_forward_of_the_same_text_from_elsewhere(gates, monkeypatch):
    """Liger puts such ones on classes: they run, and nothing is said before they are in the way."""
    monkeypatch.setattr(hf_qwen2.Qwen2MoeMLP, "forward", _right)
    block = qwen2()
    assert mlps.fused_class(hf_qwen2.Qwen2MoeMLP) is None
    monkeypatch.delitem(mlps.SWAPS, hf_qwen2.Qwen2MoeMLP, raising=False)
    report = moe_patch.patch(block)
    assert not report.shared_experts and not report.skipped
    block(torch.randn(1, 3, 32))
    assert not gates


def test_an_argument_too_many_is_hugging_face_s_error():
    block = qwen2()
    moe_patch.patch(block)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        block.shared_expert(torch.randn(3, 32), y=1)


def test_most_families_with_shared_experts():
    """Classes that share a text are fused; which those are, nobody lists."""
    from transformers.models.glm4_moe import modeling_glm4_moe as glm
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    for cls in (
        glm.Glm4MoeMLP, qwen3_next.Qwen3NextMLP, hf_deepseek.DeepseekV3MLP,
        hf_llama4.Llama4TextMLP,
    ):  # fmt: skip
        assert mlps.fused_class(cls).act in inspect.getsource(cls.forward)
