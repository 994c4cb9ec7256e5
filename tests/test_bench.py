"""Who competes, and what is written down; the clock itself needs a GPU."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from plain import one_thread_fixture, use_fixture  # noqa: F401

from moe_patch import bench
from moe_patch.bench import Timing, contenders, step, to_json, write_csv
from moe_patch.models.decorated import ExpertsConfig
from moe_patch.shapes import build

TIMING = Timing("qwen3_30b", 64, "bfloat16", "forward", "HF eager", 2.0, 1.9, 2.2, 300.0, 4.0)


def test_contenders_by_shape_and_size():
    qwen, llama = build("tiny_qwen3"), build("tiny_llama4")

    def names(block, tokens, mode="forward", eager=True):
        return list(contenders(block, tokens, mode, eager))

    every = ["moe_patch", "HF eager", "HF grouped_mm", "HF batched_mm"]
    assert names(qwen, 64) == every
    assert names(qwen, 65) == every[:3]
    assert names(qwen, 64, eager=False) == [every[0], *every[2:]]
    assert names(qwen, 4097, "backward") == [every[0], every[2]]
    assert names(llama, 64) == ["moe_patch", "HF dense"]
    assert names(llama, 64, eager=False) == ["moe_patch"]
    assert names(llama, 16385) == ["moe_patch"]


def test_contenders_run_what_they_are_called(use):
    block = build("tiny_qwen3")
    found = contenders(block, 64, "forward", True)
    implementations = [b.experts.config._experts_implementation for b in found.values()]
    assert implementations == ["moe_patch", "eager", "grouped_mm", "batched_mm"]
    assert not isinstance(block.experts.config, ExpertsConfig)
    weights = {b.experts.gate_up_proj.data_ptr() for b in found.values()}
    assert weights == {block.experts.gate_up_proj.data_ptr()}


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama4"])
def test_backward_step_computes_every_gradient(use, name, monkeypatch):
    block = contenders(build(name), 8, "backward", True)["moe_patch"]
    x, d_out, asked = torch.randn(1, 8, 64), torch.randn(1, 8, 64), []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, leaves, d: asked.extend(grad(out, leaves, d))
    )
    step(block, x, d_out, "backward")()
    assert len(asked) == 1 + len(list(block.parameters()))
    assert all(g.abs().max() > 0 for g in asked)
    step(block, x, d_out, "forward")()


def test_refuses_without_a_gpu_and_unknown_modes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="bench needs a GPU"):
        bench.bench("tiny_qwen3", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="unknown mode 'sideways'"):
        bench.bench("tiny_qwen3", 8, mode="sideways")


def test_files(tmp_path):
    write_csv([TIMING, TIMING], tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and rows[0]["implementation"] == "HF eager" and rows[1]["ms"] == "2.0"
    loaded = json.loads(to_json([TIMING], "a card"))
    assert loaded["environment"] == "a card" and loaded["timings"][0]["tflops"] == 300.0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", bench.MODES)
def test_times_are_measured(mode):
    timings, report = bench.bench("qwen3_30b", 64, mode=mode, budget_ms=200)
    assert report.passed, report
    assert {t.implementation for t in timings} >= {"moe_patch", "HF eager", "HF grouped_mm"}
    assert all(0 < t.p10 <= t.ms <= t.p90 and t.tflops > 0 for t in timings)
    assert timings[0].speedup == 1


@pytest.mark.gpu
def test_no_times_when_parity_fails(monkeypatch):
    from moe_patch.models import decorated

    fused = decorated.fused_experts
    monkeypatch.setattr(decorated, "fused_experts", lambda *a, **k: fused(*a, **k) * 0.99)
    timings, report = bench.bench("qwen3_30b", 64)
    assert not timings and not report.passed
