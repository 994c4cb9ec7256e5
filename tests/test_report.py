"""The patch report names every part of a fused block that is not fused, and why."""

from __future__ import annotations

import json

import peft
import pytest
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.jamba import modeling_jamba

import moe_patch
from moe_patch.patcher import Left, PatchReport
from moe_patch.recognise import routers

SIZES = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "num_experts_per_tok": 2,
}  # fmt: skip


def model(name: str, **sizes: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    return AutoModelForCausalLM.from_config(config)


def qwen3(**sizes: object) -> nn.Module:
    return model("Qwen3Moe", moe_intermediate_size=32, num_experts=4, **sizes)


def adapters(module: nn.Module, *names: str) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=list(names))
    return peft.inject_adapter_in_model(config, module)


def test_what_is_fused_is_named():
    report = moe_patch.patch(adapters(qwen3(), "experts.gate_up_proj", "experts.down_proj"))
    blocks = [f"model.layers.{i}.mlp" for i in (0, 1)]
    assert report.fused == blocks and not report.left and not report.skipped
    assert report.routers == [f"{block}.gate" for block in blocks]
    assert len(report.adapters) == 4
    assert str(report) == "moe_patch: fused 2 of 2 MoE blocks (2 Qwen3MoeSparseMoeBlock)"
    again = moe_patch.patch(model := qwen3()), moe_patch.patch(model)
    assert again[0] == again[1]


def test_a_router_that_no_rule_covers_is_a_line():
    made = model("HunYuanMoEV1", num_experts=4, moe_topk=2, pad_token_id=0)
    report = moe_patch.patch(made)
    assert len(report.fused) == 2 and not report.skipped and not report.routers
    reason = "its code uses wg, which no rule of moe_patch covers"
    names = [f"model.layers.{i}.mlp.gate" for i in (0, 1)]
    assert report.left == [Left(name, "HunYuanMoEV1Gate", "router", reason) for name in names]
    lines = str(report).splitlines()
    assert lines[0].startswith("moe_patch: fused 2 of 2") and len(lines) == 3
    assert lines[1] == f"  {names[0]} (HunYuanMoEV1Gate), router not fused: {reason}"


def test_a_block_that_chooses_itself_is_a_line():
    config = transformers.JambaConfig(**SIZES, num_experts=4)
    block = modeling_jamba.JambaSparseMoeBlock(config)
    if type(block.router) is not nn.Linear:  # since transformers 5.23
        pytest.skip("Jamba's block leaves the choice to a router of its own")
    (left,) = moe_patch.patch(block).left
    assert (left.name, left.cls, left.kind) == ("router", "Linear", "router")
    assert "the block itself chooses" in left.reason


def test_a_gate_and_its_adapters_are_lines():
    made = qwen3(hidden_act="tanh")
    report = moe_patch.patch(adapters(made, "experts.down_proj"))
    kinds = [(left.kind, left.reason) for left in report.left]
    assert kinds == 2 * [
        ("adapters", "the experts run by parts, because of the activation Tanh"),
        ("gate", "the activation Tanh"),
    ]
    assert not report.adapters and len(report.routers) == 2


def test_adapters_that_are_not_on_projections_are_a_line():
    report = moe_patch.patch(adapters(qwen3(), "mlp.gate.weight"))
    assert {left.kind for left in report.left} == {"adapters"}
    assert all("weight is not a weight of the experts" in left.reason for left in report.left)


@pytest.mark.parametrize("made", [qwen3, lambda: model("HunYuanMoEV1", num_experts=4)])
def test_the_dictionary_is_json(made):
    report = moe_patch.patch(made())
    found = json.loads(json.dumps(report.to_dict()))
    assert found.keys() == {
        "fused", "routers", "adapters", "shared_experts", "skipped", "left", "notes",
    }  # fmt: skip
    assert [block["name"] for block in found["fused"]] == report.fused
    assert [left["reason"] for left in found["left"]] == [left.reason for left in report.left]


def test_the_dictionary_of_skipped_blocks():
    report = PatchReport([""], [("a", "Foo", "it is odd")], ["Bar"])
    assert report.to_dict() == {
        "fused": [{"name": "", "class": "Bar"}],
        "routers": [],
        "adapters": [],
        "shared_experts": [],
        "skipped": [{"name": "a", "class": "Foo", "reason": "it is odd"}],
        "left": [],
        "notes": [],
    }


def test_reasons_for_classes_of_routers():
    class Router(nn.Module):
        def forward(self, x):
            return x

    assert routers.why_left(Router) == "only routers of transformers are recognised"
    Router.__module__ = "transformers.models.new.modeling_new"
    assert "put the original back" in routers.why_left(Router)
    assert not routers.is_router("a.act_fn", nn.SiLU())
    assert not routers.is_router("a.shared_expert.gate", nn.Linear(4, 1))
    assert routers.is_router("a.gate", nn.Linear(4, 2)) and routers.is_router("a.b", Router())
    assert not routers.is_router("a.gate_proj", nn.Linear(4, 2))
