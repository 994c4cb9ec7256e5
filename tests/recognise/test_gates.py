"""Gates of other families than SwiGLU's: recognised by what they compute, and computed."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from families import decorated_classes
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_patch
from moe_patch.compat import GATE
from moe_patch.models import decorated
from moe_patch.parity.compare import Comparison
from moe_patch.recognise.eligibility import why_by_parts, why_not_fused
from moe_patch.recognise.gates import KNOWN, activation_of

CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts"), 8),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 32),
    "hidden_size": 64,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.702,
    "_experts_implementation": "grouped_mm",
}
CLASSES = decorated_classes()
OTHERS = {  # families whose gate is not silu(gate) * up: the fused activation that it is
    "DeepseekV4Experts": "silu 0.5 1.0 0.0 concatenated",
    "DiffusionGemmaTextExperts": "gelu_tanh None 1.0 0.0 concatenated",
    "Gemma4TextExperts": "gelu_tanh None 1.0 0.0 concatenated",
    "Glm5NextTextExperts": "silu 0.5 1.0 0.0 concatenated",
    "HYV4Experts": "silu 0.5 1.0 0.0 concatenated",
    "MiniMaxM3VLExperts": "silu 0.5 1.702 1.0 concatenated",
}


def build(module, name, **more):
    experts = getattr(importlib.import_module(module), name)(SimpleNamespace(**CONFIG | more))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def results(experts, hidden, index, weights):
    leaves = [hidden, weights, *experts.parameters()]
    out = experts(hidden, index, weights)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


WITH_OTHERS = [c for c in CLASSES if c[1] in OTHERS]  # in whole models: test_every_family
REST = [pytest.param(*c, marks=pytest.mark.gpu) for c in WITH_OTHERS[2:]]


@pytest.mark.parametrize("module, name", WITH_OTHERS[:2] + REST, ids=str)
def test_other_gates_give_hugging_face_s_results(module, name, device, ran):
    experts = build(module, name).to(device)
    assert activation_of(experts) == OTHERS[name]
    hidden = torch.randn(12, 64, device=device, requires_grad=True)
    weights, index = torch.rand(12, 8, device=device).topk(2)
    weights.requires_grad_()
    expected = results(experts, hidden, index, weights)
    report = moe_patch.patch(experts)
    assert report.fused and not report.skipped
    for ours, theirs in zip(results(experts, hidden, index, weights), expected):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
    assert ran == ["fused_experts"]
    rows, _ = Comparison(experts).rows(70, backward=True, seed=0)
    assert all(row.passed for row in rows), rows
    moe_patch.unpatch(experts)
    assert KNOWN not in vars(experts)


@pytest.mark.parametrize(
    "act", ["gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu"]
)
def test_every_activation_that_a_config_may_name(act, device):
    experts = Qwen3MoeExperts(SimpleNamespace(**CONFIG | {"hidden_act": act})).to(device)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(6, 64, device=device)
    weights, index = torch.rand(6, 8, device=device).topk(2)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
    assert moe_patch.patch(experts).fused
    torch.testing.assert_close(experts(hidden, index, weights), expected, rtol=2e-5, atol=2e-4)


def test_the_gate_is_asked_again_when_it_changes():
    experts = Qwen3MoeExperts(SimpleNamespace(**CONFIG | {"hidden_act": "gelu"}))
    assert activation_of(experts).startswith("gelu ")
    experts.act_fn = ACT2FN["relu"]
    assert activation_of(experts).startswith("relu")
    assert activation_of(copy.deepcopy(experts)) == activation_of(experts)
    experts.act_fn = ACT2FN["silu"]
    assert activation_of(experts) == "silu"
    module, name = next(c for c in CLASSES if c[1] == "DeepseekV4Experts")
    experts = build(module, name)
    for limit in (0.5, 3.0):
        experts.limit = limit
        assert activation_of(experts) == f"silu {limit} 1.0 0.0 concatenated"


class Learned(nn.Module):
    """An activation with weights of its own, in float32."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.relu(x) * self.slope


@pytest.mark.parametrize("act_fn", [Learned(), lambda x: x.nope(), lambda x: None])
def test_what_is_no_known_function_is_called(act_fn):
    experts = Qwen3MoeExperts(SimpleNamespace(**CONFIG))
    del experts.act_fn
    experts.act_fn = act_fn
    assert activation_of(experts) is None
    assert why_not_fused(experts) is None and "the activation" in why_by_parts(experts)


def test_compiles_without_graph_breaks(device, monkeypatch):
    experts = Qwen3MoeExperts(SimpleNamespace(**CONFIG | {"hidden_act": "gelu"})).to(device)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    moe_patch.patch(experts)
    hidden = torch.randn(6, 64, device=device)
    weights, index = torch.rand(6, 8, device=device).topk(2)
    assert KNOWN in vars(experts)  # the gate was asked: a trace could not
    monkeypatch.setattr(decorated, "by_parts", None)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, index, weights), experts(hidden, index, weights))


@pytest.mark.parametrize("limit", [0.03, 7.0, 1e4])
def test_a_limit_is_seen_however_far(limit):
    module, name = next(c for c in CLASSES if c[1] == "DeepseekV4Experts")
    assert (
        activation_of(build(module, name, swiglu_limit=limit))
        == f"silu {limit} 1.0 0.0 concatenated"
    )


def test_experts_without_gates_are_known_by_their_activation(monkeypatch):
    """The decorator gives those a gate too, which nobody calls."""
    experts = build(
        "transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts",
        n_routed_experts=8, mlp_hidden_act="relu2", moe_latent_size=None,
    )  # fmt: skip
    monkeypatch.setattr(type(experts), GATE, lambda *_: pytest.fail("called"))
    assert activation_of(experts) == "relu2 None 1.0 0.0 ungated"
