"""Times of every family's experts: which are timed, what is compared, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_patch import environment
from moe_patch.__main__ import main
from moe_patch.bench import families as bench_families
from moe_patch.bench.families import HF, OURS, PUBLISHED, FamilyTiming, bench_family, rows, sized
from moe_patch.bench.timing import Spread
from moe_patch.parity import ParityReport
from moe_patch.recognise.original import NAME

CPU = {"device": "cpu", "dtype": torch.float32}
ONE = environment.Support("qwen3_moe", "Qwen3MoeExperts", "silu(gate) * up", "fused", None)


@pytest.fixture
def tiny(monkeypatch):
    """Experts of a small configuration in the place of the default one."""
    config = SimpleNamespace(
        num_experts=4, hidden_size=32, moe_intermediate_size=16, hidden_act="silu",
        num_experts_per_tok=2, _experts_implementation="grouped_mm",
    )  # fmt: skip

    def build(*_):
        with torch.device("meta"):
            return Qwen3MoeExperts(config)

    monkeypatch.setattr(environment, "build", build)
    return config


def test_ours_and_hugging_face_s_default_are_timed(use, tiny, monkeypatch):
    seen = []

    def times(calls, *, budget_ms):
        for call in calls.values():
            call()
        seen.append(set(calls))
        return {OURS: Spread.of([1.0, 2.0, 3.0]), HF: Spread.of([4.0, 4.0, 9.0])}

    ran, original = [], bench_families.step

    def step(experts, *arguments):
        ran.append((experts.config._experts_implementation, arguments[2]))
        return original(experts, *arguments)

    monkeypatch.setattr(bench_families, "times", times)
    monkeypatch.setattr(bench_families, "step", step)
    found = bench_family(ONE, (1, 5), **CPU)
    assert [(t.tokens, t.mode) for t in found] == [
        (1, "forward"), (5, "forward"), (1, "backward"), (5, "backward"),
    ]  # fmt: skip
    assert all((t.ms, t.hf_ms, t.speedup, t.size) == (2, 4, 2, "32, 16, 4, 2") for t in found)
    assert seen == [{OURS, HF}] * 4
    twice = [m for m in ("forward", "backward") for _ in range(2)]
    assert ran == [(who, m) for m in twice for who in (NAME, "grouped_mm")]


def test_no_times_without_parity(use, tiny):
    use(lambda x, *args, **more: torch.zeros_like(x) + args[0].sum() * 0)
    report = bench_family(ONE, **CPU)
    assert isinstance(report, ParityReport) and not report.passed


def test_a_configuration_without_experts_is_a_note(monkeypatch, tiny):
    tiny.num_experts_per_tok = None
    assert "left out" in bench_family(ONE, **CPU)
    monkeypatch.setattr(environment, "build", lambda *_: None)
    assert "left out" in bench_family(ONE, **CPU)


def test_parity_is_judged_on_eight_experts(tiny):
    tiny.num_experts = 20
    experts = environment.build(ONE).to_empty(device="cpu")
    few = bench_families._first(experts)
    assert few.num_experts == len(few.down_proj) == len(few.gate_up_proj) == 8
    assert experts.num_experts == len(experts.down_proj) == 20
    assert few.down_proj.data_ptr() == experts.down_proj.data_ptr()


def test_every_fused_family_has_a_size():
    sizes = {one.experts: sized(one) for one in rows()}
    assert all(experts is not None and top_k for experts, top_k in sizes.values()), sizes
    for name, (_, *size) in PUBLISHED.items():
        experts, top_k = sizes[name]
        down = experts.down_proj
        assert [down.shape[1], down.shape[2], down.shape[0], top_k] == size, name
        assert isinstance(experts.config, PreTrainedConfig)
    assert sizes["DeepseekV3Experts"][0].gate_up_proj.shape == (256, 4096, 7168)
    assert "DbrxExperts" not in sizes


def test_a_family_that_fails_parity_stops_no_other(monkeypatch, capsys):
    timing = FamilyTiming("gpt_oss", "X", "a model", "1, 2, 3, 4", 1, "forward", 1.0, 2.0, 2.0)
    failing = ParityReport([], "a card")
    asked = iter([failing, [timing]])
    monkeypatch.setattr(bench_families, "bench_family", lambda one, tokens: next(asked))
    monkeypatch.setattr("moe_patch.commands.running.device", lambda: "cuda")
    monkeypatch.setattr("moe_patch.parity.environment", lambda _: "a card")
    assert main(["bench", "--families", "deepseek_v3", "gpt_oss"]) == 1
    out, err = capsys.readouterr()
    assert "deepseek_v3: no times, parity FAILED" in out and "2.00" in out and str(failing) in err


def test_the_command(monkeypatch, capsys, tmp_path):
    timing = FamilyTiming("gpt_oss", "X", "a model", "1, 2, 3, 4", 1, "forward", 1.0, 2.0, 2.0)
    monkeypatch.setattr(bench_families, "bench_family", lambda one, tokens: [timing])
    monkeypatch.setattr("moe_patch.commands.running.device", lambda: "cuda")
    monkeypatch.setattr("moe_patch.parity.environment", lambda _: "a card")
    file = tmp_path / "t.csv"
    assert main(["bench", "--families", "gpt_oss", "--csv", str(file)]) == 0
    out = capsys.readouterr().out
    assert "gpt_oss" in out and "2.00" in out and "gpt_oss,X" in file.read_text()
    assert main(["bench", "--families", "nope"]) == 2
    assert "no fused family is called nope" in capsys.readouterr().err
    assert main(["bench", "--families", "--graph"]) == 2
    assert "takes no --graph" in capsys.readouterr().err
