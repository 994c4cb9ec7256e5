"""The command line: exit codes, one-sentence refusals, json, and starting again interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import honest

from moe_patch import switch
from moe_patch.__main__ import main
from moe_patch.commands import running
from moe_patch.shapes import build_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_the_cpu(use, monkeypatch):
    monkeypatch.setattr(running, "device", lambda: "cpu")


@pytest.fixture
def checkpoint(tmp_path):
    build_model("tiny_qwen3", layers=2).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # argparse
        code = stop.code
    return code, *capsys.readouterr()


def test_parity_without_arguments_checks_small_models(capsys):
    code, out, _ = run(capsys, "parity", "--tokens", "64")
    assert code == 0, out
    for text in ("layers.0.mlp (Qwen3MoeSparseMoeBlock", "layers.0.feed_forward (Llama4TextMoe"):
        assert f"{text}" in out
    assert "float32, 64 tokens" in out and "float16, 64 tokens" in out
    assert out.strip().endswith("parity passed: 88 of 88 rows hold")


def test_parity_of_named_shapes(capsys):
    code, out, _ = run(
        capsys, "parity", "--shape", "tiny_qwen3", "--tokens", "64", "128", "--dtype", "fp16",
        "--forward-only",
    )  # fmt: skip
    assert code == 0
    assert out.count("Qwen3MoeSparseMoeBlock") == 2 and "d_router" not in out
    assert "float32" not in out and "128 tokens" in out


def test_parity_that_fails_is_exit_code_1(capsys, use):
    use(lambda *args, **on: honest(*args, **on) * 0.99)
    code, out, _ = run(capsys, "parity", "--shape", "tiny_qwen3", "--tokens", "64")
    assert code == 1 and "parity FAILED" in out


def test_parity_of_a_checkpoint(capsys, checkpoint):
    code, out, err = run(capsys, "parity", checkpoint, "--tokens", "64", "--model-level")
    assert code == 0, out + err
    assert "model.layers.1.mlp" in out and "model level: in float32 Hugging Face" in out
    code, out, _ = run(
        capsys, "parity", checkpoint, "--tokens", "64", "--blocks", "model.layers.1.mlp",
        "--dtype", "fp16", "--forward-only", "--model-level",
    )  # fmt: skip
    assert code == 0 and "layers.0" not in out and "whole model, float16, 512 tokens" in out


def test_json_to_stdout_is_all_of_it(capsys, tmp_path):
    arguments = ("parity", "--shape", "tiny_llama4", "--tokens", "64", "--dtype", "fp32")
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0 and json.loads(out)["passed"] is True
    code, out, _ = run(capsys, *arguments, "--json", str(tmp_path / "report.json"))
    assert code == 0 and "parity passed" in out
    assert json.loads((tmp_path / "report.json").read_text())["sections"][0]["tokens"] == 64


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("parity", "--shape", "gpt5"), ("unknown shape 'gpt5'", "qwen3_30b", "tiny_llama4")),
        (("parity", "--shape", "qwen3_30b"), ("qwen3_30b needs a GPU", "tiny_qwen3")),
        (("parity", "nowhere"), ("no checkpoint in 'nowhere'", "here is mine", "llama4_scout")),
        (("parity", "--dtype", "bf16"), ("bf16 needs a GPU", "fp16")),
        (("bench",), ("bench needs a GPU",)),
    ],
)
def test_refusals_are_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.startswith("moe_patch: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_checkpoint_without_moe_blocks(capsys, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    code, _, err = run(capsys, "parity", str(tmp_path))
    assert code == 2 and "LlamaForCausalLM has no MoE block" in err


def test_bisect_switch_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(switch, "ENABLED", False)
    code, _, err = run(capsys, "parity")
    assert code == 2 and "MOE_PATCH=0" in err


def test_env_can_be_pasted(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    for word in ("moe_patch", "torch", "triton", "transformers", "kernels on a GPU", "MOE_PATCH"):
        assert any(line.startswith(word) for line in out.splitlines()), word


def start(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "moe_patch", *arguments], env=env, capture_output=True, text=True
    )


def test_without_a_gpu_it_starts_again_interpreted():
    ran = start(
        "parity", "--shape", "tiny_llama4", "--tokens", "128", "--dtype", "fp32", "--forward-only"
    )
    if ran.returncode == 2 and "needs numpy below 2.4" in ran.stderr:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    assert "Triton's interpreter" in ran.stdout and "parity passed: 7 of 7" in ran.stdout


def test_called_from_python_it_leaves_the_process_alone(monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("replaced the process"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.set_num_threads(3)
    assert run(capsys, "parity", "--shape", "tiny_qwen3", "--tokens", "64")[0] == 0
    assert torch.get_num_threads() == 3


@pytest.mark.gpu
def test_bench_prints_a_table(capsys, monkeypatch, tmp_path):
    monkeypatch.undo()
    code, out, err = run(
        capsys, "bench", "--shape", "qwen3_30b", "--tokens", "64", "--mode", "forward",
        "--no-compile", "--csv", str(tmp_path / "t.csv"),
    )  # fmt: skip
    assert code == 0, err
    assert "HF grouped_mm" in out and (tmp_path / "t.csv").read_text().count("\n") == 5
