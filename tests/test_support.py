"""The table of families is read off the installed transformers, and nothing in it is silent."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from families import UNFUSED, decorated_classes
from torch import nn
from transformers.models.jamba import modeling_jamba

from moe_patch import environment
from moe_patch.environment import families

UNSWITCHED = {  # with experts that transformers itself cannot switch
    "dbrx", "doge", "jetmoe", "longcat_flash", "nllb_moe", "switch_transformers",
}  # fmt: skip


def test_every_family_is_there_once_and_says_what_becomes_of_it():
    found = families()
    assert {one.experts for one in found} >= {name for _, name in decorated_classes()}
    assert len({(one.family, one.experts) for one in found}) == len(found)
    for one in found:
        assert one.experts and one.router in ("fused", "HF")
        assert bool(one.gate) == one.fused == (one.reason is None)
        if one.fused:
            assert (one.router == "fused") == (one.router_reason is None)
            assert (one.adapters_reason is not None) == one.gate.startswith("by parts")


def test_what_is_not_fused_is_known():
    reasons = {one.family: one.reason for one in families() if not one.fused}
    for family, reason in reasons.items():
        expected = UNFUSED.get(family, "transformers has no switch")
        assert expected in reason, f"{family}: {reason}"
    new = reasons.keys() - UNFUSED.keys() - UNSWITCHED
    assert new <= {"aria"}, f"{new} of this transformers are new: fuse them or list them here"


OAI = "gate * sigmoid(1.702 gate) * (up + 1), clamped at 7"


@pytest.mark.parametrize(
    "family, gate, router",
    [
        ("qwen3_moe", "silu(gate) * up", "fused"),
        ("llama4", "silu(gate) * up", "fused"),
        ("mixtral", "silu(gate) * up", "fused"),
        ("gemma4", "gelu_tanh(gate) * up", "HF"),
        ("gpt_oss", f"{OAI}, interleaved, biases", "fused"),
        ("nemotron_h", "relu2, no gate", "fused"),
        ("ernie4_5_vl_moe", "silu(gate) * up", "HF"),
        ("deepseek_v4", "silu(gate) * up, clamped at 10", "HF"),
        ("minimax_m3_vl", OAI, "fused"),
    ],
)
def test_gates_and_routers(family, gate, router):
    (one,) = (one for one in families() if one.family == family)
    assert (one.gate, one.router) == (gate, router)


def test_a_family_of_unknown_form_is_a_line_not_a_crash():
    class Experts(nn.Module):
        def __init__(self, config):
            raise RuntimeError("needs a network")

    module = ModuleType("new_family")
    Experts.__module__ = "new_family"
    module.Experts = Experts
    (line,) = environment._of(module, "new_family")
    assert line.experts == "Experts" and "no switch" in line.reason
    assert environment._build(Experts, module) is None


def test_table_and_command(capsys):
    from moe_patch.__main__ import main

    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert environment.table() in out and "torch" in out
    lines = environment.table().splitlines()
    assert any("FP8Experts" in line for line in lines)
    left = [one for one in families() if one.fused and one.router_reason]
    assert all(len(reason) < 180 for line in lines for reason in line.split("; "))
    adapters = [one for one in families() if one.fused and one.adapters_reason]
    sections = sum(1 + len(rows) for rows in (left, adapters) if rows)
    assert any(line.startswith("in 4 bits (quantize_experts") for line in lines)
    assert len(lines) == len(families()) + 5 + sections
    assert any("Gemma4TextRouter: its code uses config" in line for line in lines)
    chooses = [one.family for one in left if "its block itself chooses" in one.router_reason]
    assert set(chooses) <= {"jamba"} and (chooses or hasattr(modeling_jamba, "JambaTopKRouter"))
    assert torch.get_default_device().type == "cpu"
