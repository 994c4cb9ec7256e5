"""What watching a model's routers costs, and how close a trainer is that replays a rollout."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from moe_patch import parity
from moe_patch.__main__ import main
from moe_patch.bench import replay, timing, watch, whole
from moe_patch.commands import running
from moe_patch.parity import ParityReport, Row, Section


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return tiny_model("qwen3_moe")


def test_the_clock_runs_while_the_model_is_watched(model, monkeypatch):
    """It ticks once for each forward, and ten times more for each hook of the model's blocks."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def tick(*_):
        now[0] += 1.0 + 10.0 * (hooks() - 1)

    model.model.norm.register_forward_pre_hook(tick)
    found = watch.cost(model, "tiny", 4)
    assert found.ms == 1e3 and (found.model, found.layers, found.tokens) == ("tiny", 2, 4)
    watched = found.record_ms, found.record_host_ms, found.replay_ms, found.load_ms
    assert min(watched) > 1e4 and hooks() == 1
    table = watch.cost_table([found])
    assert list(table.columns[1].cells) == ["1000.00"]
    assert list(table.columns[2].cells) == [f"{100 * (found.record_ms / 1e3 - 1):+.1f} %"]


def test_a_trainer_with_other_routers(model):
    """What replay is for: the same choices, so that logits and probabilities come closer."""
    torch.manual_seed(0)
    rolled = replay.rollout(model, 4, 5, 6)
    assert rolled.tokens.shape == (4, 11) and rolled.logits.shape == (4, 6, 128)
    assert rolled.routing.mask.view(4, 11).sum(1).tolist() == [10] * 4
    same = replay.closeness(model, "tiny", rolled, 2)
    assert (same.other_choices, same.other_choices_replayed) == (0, 0)
    assert same.logit_error < 1e-5 and abs(same.kl) < 1e-5
    for layer in model.model.layers:
        layer.mlp.gate.weight.data += 0.02 * torch.randn_like(layer.mlp.gate.weight)
    found = replay.closeness(model, "tiny", rolled, 3)
    assert found.other_choices > 0.1 and found.other_choices_replayed == 0
    assert found.logit_error > 2 * found.logit_error_replayed > 0
    assert found.kl > 2 * found.kl_replayed > 0
    (choices,) = replay.closeness_table([found]).columns[1].cells
    assert choices == f"{found.other_choices:.2%} -> 0.00%"


@pytest.mark.parametrize("kind", ["watch", "replay"])
def test_the_commands(model, kind, tmp_path, monkeypatch, capsys):
    """With a model on the CPU; a model whose parity fails has no rows."""
    file = tmp_path / "tiny.json"
    model.config.to_json_file(file)
    cpu_build = whole.build
    monkeypatch.setattr(whole, "build", lambda config: cpu_build(config, "cpu").float())
    monkeypatch.setattr(running, "device", lambda: "cuda")
    report = ParityReport([Section("", "bfloat16", 8, [Row("output", True)])], "a card")
    monkeypatch.setattr(parity, "environment", lambda device: f"a card, {device}")
    monkeypatch.setattr(parity, "check_parity", lambda *_, **__: report)
    for name, value in {"SEQUENCES": 2, "PROMPT": 2, "NEW": 2}.items():
        monkeypatch.setattr(replay, name, value)
    monkeypatch.setattr(watch, "ROUNDS", 1)
    asked = {"watch": ("--tokens", "3"), "replay": ("--batch", "8")}[kind]
    csv = tmp_path / "rows.csv"
    line = ["bench", kind, str(file), "--layers", "1", *asked, "--csv", str(csv)]
    assert main(line) == 0, capsys.readouterr().err
    header, row = csv.read_text().splitlines()
    assert header.startswith("model,layers,") and row.startswith("tiny,1,")
    assert "tiny, 1 layers, random weights" in capsys.readouterr().out
    csv.unlink()
    report.sections[0].rows.append(Row("router logits", False))
    assert main(line) == 1 and not csv.exists()
    assert "router logits" in capsys.readouterr().out
    assert main(["bench", kind, str(tmp_path / "absent.json")]) == 2
    assert "no model config at" in capsys.readouterr().err
