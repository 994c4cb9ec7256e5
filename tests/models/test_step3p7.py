"""Step 3.7: an experts class without HF's decorator, swapped; its clamp is after the activation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from plain import honest
from tiny import assert_close
from torch import nn
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

import moe_patch
from moe_patch.models import SWAPS, decorated
from moe_patch.parity import check_parity
from moe_patch.recognise.eligibility import why_by_parts

CONFIG = SimpleNamespace(
    num_local_experts=4, hidden_size=32, moe_intermediate_size=16, hidden_act="silu"
)


def make(limit, device):
    experts = Step3p7Experts(CONFIG, swiglu_limit=limit)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts.to(device)


def results(experts):
    torch.manual_seed(1)
    device = experts.down_proj.device
    hidden = torch.randn(9, 32, device=device, requires_grad=True)
    weights, index = torch.rand(9, 4, device=device).topk(2)
    out = experts(hidden, index, weights.requires_grad_())
    leaves = [hidden, weights, *experts.parameters()]
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_alone(limit, device, ran):
    experts = make(limit, device)
    expected = results(experts)
    report = moe_patch.patch(experts)
    assert report.fused == [""] and report.classes == ["Step3p7Experts"]
    assert type(experts) is SWAPS[Step3p7Experts] and isinstance(experts, Step3p7Experts)
    assert why_by_parts(experts) == (None if limit is None else "a gate of its own")
    assert experts.takes_low_rank is (limit is None)
    for ours, theirs in zip(results(experts), expected, strict=True):
        assert_close(ours, theirs)
    assert ran == ["fused_experts" if limit is None else "by_parts"]
    moe_patch.unpatch(experts)
    assert type(experts) is Step3p7Experts
    assert all(map(torch.equal, results(experts), expected))
    assert len(ran) == 1


def test_the_clamp_is_after_the_activation(device):
    """A clamp before it, which the kernels know, would give silu(0.5) for large gates."""
    experts = make(0.5, device)
    moe_patch.patch(experts)
    large = torch.full((1, 4), 9.0, device=device)
    assert torch.equal(experts._apply_gate(large), torch.full((1, 2), 0.25, device=device))


def test_parity_is_judged(use):
    experts = make(None, "cpu")
    assert check_parity(experts, tokens=64).passed
    use(lambda *arguments, **options: honest(*arguments, **options) * 0.99)
    assert not check_parity(experts, tokens=64).passed


def test_parity_of_clamped_experts(device, monkeypatch):
    experts = make(0.5, device)
    assert check_parity(experts, tokens=64, backward=False).passed
    original = decorated.by_parts
    monkeypatch.setattr(decorated, "by_parts", lambda *arguments: original(*arguments) * 0.99)
    assert not check_parity(experts, tokens=64, backward=False).passed


def test_a_forward_of_the_instance_stays(device):
    blocks = nn.ModuleDict({name: nn.ModuleDict({"experts": make(None, device)}) for name in "ab"})
    blocks["b"]["experts"].forward = lambda *args: args[0]
    report = moe_patch.patch(blocks)
    assert report.fused == ["a"] and "replaced on the instance" in str(report)
