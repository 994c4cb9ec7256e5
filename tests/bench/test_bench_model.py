"""Whole models: the config that is read, what is built, in which order what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_patch import parity
from moe_patch.__main__ import main
from moe_patch.bench import model as bench_model
from moe_patch.bench import timing
from moe_patch.bench.model import PROMPT, Rate, rate, rows
from moe_patch.bench.whole import build, read_config
from moe_patch.commands import running
from moe_patch.models.decorated import ExpertsConfig
from moe_patch.parity import ParityReport, Row, Section
from moe_patch.shapes import Shape, build_model

REAL = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "qwen3_30b_a3b.json"


@pytest.fixture
def file(tmp_path):
    config = build_model("tiny_qwen3", layers=3).config
    config.output_router_logits = False  # an auxiliary loss has no place in generation
    config.to_json_file(tmp_path / "tiny.json")
    return tmp_path / "tiny.json"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)


def test_the_real_config():
    config = read_config(REAL)
    assert type(config).__name__ == "Qwen3MoeConfig" and config.num_hidden_layers == 48
    assert (config.num_experts, config.num_experts_per_tok) == (128, 8)
    assert (config.hidden_size, config.moe_intermediate_size) == (2048, 768)
    assert config.rope_parameters["rope_theta"] == 1e6 and config.norm_topk_prob
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624  # "30.5B"


def test_layers_are_the_first_ones(file):
    assert read_config(file).num_hidden_layers == 3
    config = read_config(file, 2)
    assert config.num_hidden_layers == 2
    assert len(build(config, "cpu").model.layers) == 2
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"has 3 layers, {layers} were asked for: use 1 to 3"):
            read_config(file, layers)


def test_configs_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="no model config at"):
        read_config(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "other.json").write_text('{"model_type": "no such model"}')
    for name in ("text.json", "other.json"):
        with pytest.raises(ValueError, match=f"{name} is no config of this transformers"):
            read_config(tmp_path / name)


def test_model_is_random_bfloat16_and_leaves_no_trace(file):
    state = torch.get_rng_state()
    model = build(read_config(file), "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert float(experts.detach().float().std()) == pytest.approx(0.15, rel=0.05)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32


def test_rows():
    assert rows(["prefill"]) == [("prefill", 1, 1024), ("prefill", 1, 8192), ("prefill", 4, 4096)]
    assert rows(["static", "decode"]) == [
        ("static", 1, 128),
        ("static", 16, 128),
        ("decode", 1, 128),
        ("decode", 16, 128),
    ]
    assert len(rows()) == 7


@pytest.mark.parametrize("task", bench_model.DEFAULT)
def test_both_ways_are_measured_and_the_model_comes_back_unpatched(
    use, file, monkeypatch, no_gpu, task
):
    """The clock is fake: it ticks once for each forward of the model, twice when unpatched."""
    now, order, resets = [0.0], [], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(order)))
    model = build(read_config(file, 1), "cpu")

    def tick(*_):
        patched = isinstance(model.model.layers[0].mlp.experts.config, ExpertsConfig)
        now[0] += 1.0 if patched else 2.0
        order.append(patched)

    model.model.register_forward_pre_hook(tick)
    asked, generate = [], model.generate
    model.generate = lambda ids, **options: asked.append(options) or generate(ids, **options)
    found = rate(model, "tiny", task, 2, 8)
    speed = 16 if task == "prefill" else 2
    assert found == Rate("tiny", 1, task, 2, 8, speed / 2, speed, 2.0)
    calls = 1 if task == "prefill" else bench_model.NEW + 1
    turns = [order[i] for i in range(0, len(order), calls)]
    if task == "static":  # each is compiled once
        assert turns == [False] * 4 + [True] * 4
    else:  # a warm-up of each, then in turn
        assert turns == [False, False, True, True, False, True, False, True]
    assert len(resets) == 2 and resets[0] == 0
    assert all(o["min_new_tokens"] == o["max_new_tokens"] for o in asked)
    caches = {o.get("cache_implementation") for o in asked}
    assert caches == {"prefill": set(), "decode": {None}, "static": {"static"}}[task]
    assert not isinstance(model.model.layers[0].mlp.experts.config, ExpertsConfig)


def test_training_steps_of_lora_come_last(use, file, no_gpu, monkeypatch):
    """Both ways train the same adapters, which stay; the experts' own weights stay frozen."""
    ordered = rows(["lora", "lora-attention", "prefill"])
    assert ordered[3:5] == [("lora-attention", 4, 1024), ("lora-attention", 1, 2048)]
    assert ordered[5:] == [("lora", 4, 1024), ("lora", 1, 2048)]
    model = build(read_config(file, 1), "cpu")
    steps, trained, train = [], {}, bench_model._train

    def counting(model, ids, optimizer):
        train(model, ids, optimizer)
        steps.append(model.model._gradient_checkpointing_func.keywords["use_reentrant"])

    monkeypatch.setattr(bench_model, "_train", counting)
    for task in ("lora", "lora-reentrant"):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        found = rate(model, "tiny", task, 2, 8)
        assert found.hf_peak_gb == found.peak_gb == 3.0 and found.tokens_s > 0
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 12 and sum("experts" in name for name in trained) == 4
        assert all("lora_" in name for name in trained)
        for name, weight in before.items():
            if name in trained:
                assert not torch.equal(trained[name], weight), name
    assert steps == [False] * 8 + [True] * 8


def test_experts_in_4_bits_train_adapters_on_attention_then_on_themselves(use, no_gpu):
    model = build(build_model(Shape("qwen3_moe", 64, 64, 4, 2), layers=1).config, "cpu")
    bench_model.quantise(model, "nf4", linear=False)
    for task, adapters in (("lora-attention", 8), ("lora", 12)):
        found = rate(model, "tiny", task, 1, 8)
        assert found.task == task and found.peak_gb == 3.0
        assert sum(p.requires_grad for p in model.parameters()) == adapters
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_experts_that_cannot_be_in_4_bits(file):
    model = build(read_config(file, 1), "cpu")
    with pytest.raises(ValueError, match="--experts nf4: model.layers.0.mlp .* 48"):
        bench_model.quantise(model, "nf4", linear=False)


def test_linear_layers_in_4_bits_need_experts_in_4_bits(file, capsys):
    assert main(["bench", "model", str(file), "--linear"]) == 2
    assert "--linear needs --experts, and bitsandbytes" in capsys.readouterr().err


def test_ligers_loss_needs_liger(file, capsys, monkeypatch):
    monkeypatch.setattr(bench_model, "find_spec", lambda name: None)
    assert main(["bench", "model", str(file), "--liger-loss"]) == 2
    assert "--liger-loss needs Liger" in capsys.readouterr().err


def test_too_little_memory_is_a_note_and_so_is_a_failure_of_hugging_faces(
    use, file, monkeypatch, no_gpu
):
    model = build(read_config(file, 1), "cpu")

    def fail(error, when):
        def tokens_s(model, *_):
            patched = isinstance(model.model.layers[0].mlp.experts.config, ExpertsConfig)
            if patched == when:
                raise error
            return 1.0

        monkeypatch.setattr(bench_model, "_tokens_s", tokens_s)

    for when in (False, True):
        fail(torch.OutOfMemoryError("none left"), when)
        assert rate(model, "tiny", "decode", 1, 8) == (
            "tiny, decode, 1 x 8: skipped, the GPU has too little memory for it (none left)"
        )
    fail(RuntimeError("no compiler\nhere"), False)
    note = rate(model, "tiny", "static", 1, 8)
    assert note == "tiny, static, 1 x 8: skipped, Hugging Face's own fails: no compiler"
    fail(RuntimeError("no compiler"), True)
    with pytest.raises(RuntimeError, match="no compiler"):
        rate(model, "tiny", "static", 1, 8)
    assert not isinstance(model.model.layers[0].mlp.experts.config, ExpertsConfig)


# the command line


@pytest.fixture
def command(file, monkeypatch, capsys):
    """Runs it, with a model on the CPU, a parity check and rates that are made up."""
    report = ParityReport([Section("", "bfloat16", 8, [Row("output", True)])], "a card")
    cpu_build = build
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(bench_model, "build", lambda config: cpu_build(config, "cpu"))
    monkeypatch.setattr(parity, "environment", lambda device: f"a card, {device}")
    monkeypatch.setattr(parity, "check_parity", lambda *_, **__: report)
    monkeypatch.setattr(
        bench_model,
        "rate",
        lambda model, name, task, *row: (
            f"{name}: {task} skipped"
            if task == "static"
            else Rate(name, len(model.model.layers), task, *row, 100.0, 150.0, 1.5)
        ),
    )

    def run(*arguments):
        code = main(["bench", "--model-config", str(file), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_command_prints_rates_and_notes(command, tmp_path):
    code, out, _ = command("--layers", 2, "--csv", tmp_path / "t.csv", "--json", tmp_path / "j")
    assert code == 0
    assert out.startswith("moe_patch bench on a card, cuda\n")
    assert "tiny, 2 layers, random weights" in out
    assert out.count("1.50 x as fast") == 5 and out.count("note: tiny: static skipped") == 2
    assert (tmp_path / "t.csv").read_text().splitlines()[1] == (
        "tiny,2,prefill,1,1024,100.0,150.0,1.5,,"
    )
    loaded = json.loads((tmp_path / "j").read_text())
    assert len(loaded["timings"]) == 5 and len(loaded["notes"]) == 2
    code, out, _ = command("--tasks", "decode")
    assert code == 0 and out.count("1.50 x as fast") == 2 and "3 layers" in out


def test_command_checks_parity_of_the_first_block_before_anything(command, monkeypatch):
    asked = []
    bad = ParityReport([Section("", "bfloat16", 8, [Row("output", False)])], "a card")

    def check(model, **options):
        asked.append(options)
        return bad

    monkeypatch.setattr(parity, "check_parity", check)
    monkeypatch.setattr(bench_model, "rate", lambda *_: pytest.fail("it was timed"))
    code, out, err = command()
    assert code == 1 and "parity FAILED" in out and "no times are shown" in err
    assert asked == [{"blocks": 1, "backward": False}]


def test_command_when_the_model_does_not_fit(command, monkeypatch):
    def fail(config):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(bench_model, "build", fail)
    code, out, _ = command("--layers", 2)
    assert code == 0
    assert "note: tiny: skipped, the GPU has too little memory for 2 layers (none left)" in out


def test_model_without_moe_blocks(command, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("LlamaForCausalLM has no MoE block that can be fused.")

    monkeypatch.setattr(parity, "check_parity", refuse)
    code, _, err = command()
    assert code == 2 and err.strip() == (
        "moe_patch: LlamaForCausalLM has no MoE block that can be fused."
    )


# with a GPU


@pytest.mark.gpu
def test_a_tiny_model_is_measured(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_model, "PREFILL", ((2, 64),))
    monkeypatch.setattr(bench_model, "BATCHES", (2,))
    arguments = ("bench", "--model-config", str(file), "--layers", "1", "--json")
    code = main([*arguments, str(tmp_path / "t.json")])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    loaded = json.loads((tmp_path / "t.json").read_text())
    assert not loaded["notes"]
    found = [(r["task"], r["batch"], r["prompt"]) for r in loaded["timings"]]
    assert found == [("prefill", 2, 64), ("decode", 2, PROMPT), ("static", 2, PROMPT)]
    for row in loaded["timings"]:
        assert row["hf_tokens_s"] > 0 and row["tokens_s"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_s"] / row["hf_tokens_s"])
