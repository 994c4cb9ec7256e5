"""check_parity as a user calls it: what it checks, what it says, and what it leaves behind."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import honest
from torch import nn
from transformers import DynamicCache

import moe_patch
from moe_patch import kernels, parity
from moe_patch.models.decorated import ExpertsConfig
from moe_patch.parity import check, check_parity
from moe_patch.shapes import build, build_model, find

BLOCKS = ["tiny_qwen3", "tiny_llama4"]


def snapshot(model):
    """All that a user could notice, but for the values of parameters."""
    return {
        "classes": [type(m) for m in model.modules()],
        "attributes": [
            {k: id(v) for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()
        ],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "parameters": [
            (n, id(p), p.data_ptr(), p._version, p.requires_grad, id(p.grad))
            for n, p in model.named_parameters()
        ],
        "implementation": getattr(getattr(model, "config", None), "_experts_implementation", None),
        "random": torch.get_rng_state().tolist(),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("state", ["plain", "patched", "switched", "broken"])
@pytest.mark.parametrize("name", BLOCKS)
def test_model_is_left_as_found(use, name, state):
    model = build_model(name).train()
    model.model.layers[0].requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.layers[1].register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    if state == "patched":
        model.patch()
    elif state == "switched" and name == "tiny_qwen3":
        model.set_experts_implementation("moe_patch")
    if state == "broken":

        def fails(*_, **__):
            raise RuntimeError("a bug in a kernel")

        use(fails)
    before = snapshot(model)
    weights = copy.deepcopy(model.state_dict())
    if state == "broken":
        with pytest.raises(RuntimeError, match="a bug in a kernel"):
            check_parity(model, tokens=64)
    else:
        with torch.no_grad():
            before["grad"] = False
            report = check_parity(model, tokens=64, dtype=torch.float16, model_level=True)
            assert report.passed, report
            assert snapshot(model) == before
        before["grad"] = True
    assert snapshot(model) == before
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("name", BLOCKS)
def test_real_kernels_pass_on_a_model(name, device):
    report = check_parity(build_model(name, layers=1, device=device), tokens=24)
    assert report.passed, report
    assert len(report.sections) == 1 and report.sections[0].tokens == 24


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_30b", "llama4_scout"])
def test_real_kernels_pass_on_real_shapes(name, dtype, device):
    block = build(name, dtype=dtype, device=device)
    report = check_parity(block, tokens=[1, 7, 1024, 4096])
    assert report.passed, report


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_real_kernels_pass_on_small_shapes(name, dtype, device):
    report = check_parity(build(name, dtype=dtype, device=device), tokens=[1, 7, 65, 1000])
    assert report.passed, report


def test_works_under_inference_mode(use):
    block = build("tiny_qwen3")
    with torch.inference_mode():
        assert check_parity(block, tokens=64).passed


def test_autocast_makes_no_difference(use):
    model = build_model("tiny_llama4", layers=1).half()
    options = {"tokens": 64, "model_level": True}
    with torch.autocast("cpu", torch.bfloat16):
        inside = check_parity(model, **options)
    assert inside.rows == check_parity(model, **options).rows


def test_report_is_readable_and_serialisable(use):
    report = check_parity(build_model("tiny_qwen3"), tokens=[64, 128], backward=False)
    text = str(report)
    for word in ("model.layers.0.mlp", "float32, 64 tokens", "float32, 128 tokens", "output", "HF"):
        assert word in text
    assert text.endswith("parity passed: 23 of 23 rows hold")
    assert "torch " in report.environment and moe_patch.__version__ in report.environment
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["passed"] is True
    assert loaded["sections"][0]["rows"][2]["tensor"] == "output"
    twice = report + report
    assert len(twice.rows) == 46 and twice.passed


def test_failing_report_says_why_and_serialises(use):
    def nan(*args, **on):
        return honest(*args, **on) * math.nan

    use(nan)
    report = check_parity(build("tiny_llama4"), tokens=64)
    assert not report.passed and "FAILED" in str(report)
    row = next(line for line in str(report).splitlines() if line.startswith("  output"))
    assert " NO " in row and "inf or NaN" in row
    json.dumps(report.to_dict(), allow_nan=False)


def test_report_without_rows_has_not_passed():
    report = parity.ParityReport([], "nowhere")
    assert not report.passed and "nothing to check" in str(report)


def test_blocks_are_chosen():
    model = nn.ModuleList(build("tiny_qwen3") for _ in range(7))
    model.insert(1, build("tiny_llama4"))
    names = [str(i) for i in range(8)]

    def choose(blocks):
        return check._choose(model, names, blocks)

    assert choose(None) == ["0", "1", "4", "7"], "first, middle, last, and the other size"
    assert choose("all") == names
    assert choose(1) == ["0"] and choose(3) == ["0", "3", "7"] and choose(99) == names
    assert choose("5") == ["5"] and choose(["5", "2"]) == ["5", "2"]
    with pytest.raises(ValueError, match=r"no fused block is called '9'.*has 0, 1, 2, 3 \.\.\."):
        choose(["9"])


def test_hidden_states_replace_random_ones(use):
    model = build_model("tiny_qwen3")
    captured = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    model(input_ids=torch.randint(256, (2, 40)))
    report = check_parity(model, blocks="model.layers.1.mlp", hidden_states=captured[0])
    assert report.passed, report
    assert [section.tokens for section in report.sections] == [80]


def test_bare_experts_and_nested_blocks(use):
    assert check_parity(build("tiny_qwen3").experts, tokens=64).passed
    nested = nn.ModuleDict({"a": nn.ModuleList([build("tiny_llama4")])})
    assert "a.0 (Llama4TextMoe, 4 experts, H 64, I 48)" in str(check_parity(nested, tokens=64))


def test_adapters_are_left_out(use):
    model = build_model("tiny_qwen3", layers=1)
    config = LoraConfig(
        target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    report = check_parity(wrapped, tokens=64)
    assert report.passed, report
    assert "d_router" not in {row.tensor for row in report.rows}


def test_wrapped_llama4_is_listed(use):
    model = build_model("tiny_llama4", layers=1)
    config = LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"])
    report = check_parity(get_peft_model(model, config), tokens=64)
    assert not report.passed and "PEFT" in report.skipped[0] and "PEFT" in str(report)


def test_skipped_blocks_are_listed(use):
    model = build_model("tiny_qwen3", layers=2)
    model.model.layers[1].mlp.experts.has_post_expert_norm = True
    report = check_parity(model, tokens=64)
    assert report.passed and len(report.sections) == 1
    assert "not checked: model.layers.1.mlp" in str(report) and "normalises" in str(report)


def test_meta_weights_are_listed(use):
    report = check_parity(build("tiny_qwen3").to("meta"), tokens=64)
    assert not report.passed and "meta" in report.skipped[0]


def test_hugging_faces_way_that_does_not_run_is_named(use, monkeypatch):
    from transformers.integrations.moe import ExpertsInterface

    def refuses(*_):
        raise RuntimeError("grouped_mm needs a newer card")

    monkeypatch.setitem(ExpertsInterface._global_mapping, "grouped_mm", refuses)
    report = check_parity(build("tiny_qwen3"), tokens=64)
    assert report.passed and "HF's grouped_mm: grouped_mm needs a newer card" in str(report)


def test_bad_input_gets_one_sentence(use, monkeypatch):
    block = build("tiny_qwen3")
    with pytest.raises(ValueError, match="Linear has no MoE block"):
        check_parity(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="dtype is torch.float64"):
        check_parity(block, dtype=torch.float64)
    with pytest.raises(ValueError, match="no fused block is called 'mlp'"):
        check_parity(block, blocks=["mlp"])
    with pytest.raises(ValueError, match="hidden_states is 32 wide, the block 64"):
        check_parity(block, hidden_states=torch.randn(4, 32))
    with pytest.raises(ValueError, match="at least 1 token"):
        check_parity(block, tokens=[7, 0])
    with pytest.raises(ValueError, match="does not round to bfloat16"):
        check_parity(block, dtype=torch.bfloat16)
    monkeypatch.setattr(check, "ENABLED", False)
    with pytest.raises(RuntimeError, match="MOE_PATCH=0"):
        check_parity(block)
    monkeypatch.setattr(kernels, "why_not", lambda _: "no kernels here")
    with pytest.raises(RuntimeError, match="no kernels here.*TRITON_INTERPRET=1"):
        check_parity(block)


@pytest.mark.parametrize("name", BLOCKS)
def test_model_level(use, monkeypatch, name):
    model = build_model(name).half()
    unwanted = "a cache takes memory that is not counted"
    monkeypatch.setattr(DynamicCache, "update", lambda *_: pytest.fail(unwanted))
    report = check_parity(model, blocks=1, tokens=64, backward=False, model_level=True)
    section = report.sections[-1]
    assert section.block == "whole model" and section.tokens == 512 and section.dtype == "float16"
    assert report.passed and 0 < section.rows[0].hf_rms < 1e-3, report

    def scaled(*args, **on):
        return honest(*args, **on) * 0.97

    use(scaled)
    report = check_parity(model, blocks=1, tokens=64, backward=False, model_level=True)
    row = report.sections[-1].rows[0]
    assert not row.passed and row.ratio > 1.1


@pytest.mark.parametrize("theirs, passes", [(1.0, True), (0.9, False)])
def test_model_level_judges_the_median(use, monkeypatch, theirs, passes):
    """One token whose routing flips must not decide; all tokens a little worse must."""
    ours, hf = torch.full((512,), 1.0), torch.full((512,), theirs)
    ours[7] = 1e6
    answers = iter([ours, hf])
    monkeypatch.setattr(check, "divergence", lambda *_: next(answers))
    model = build_model("tiny_qwen3", layers=1).half()
    report = check_parity(model, tokens=64, backward=False, model_level=True)
    row = report.sections[-1].rows[0]
    assert row.passed == passes and row.ratio == pytest.approx(1 / theirs)
    assert row.note.startswith("mean 1.95e+03 beside")


def test_model_level_says_when_it_cannot(use):
    report = check_parity(build("tiny_qwen3"), tokens=64, backward=False, model_level=True)
    assert report.passed and "no vocabulary" in str(report)


def test_model_level_needs_room_for_a_copy_on_one_card(monkeypatch):
    """Six bytes a parameter, in float32 and in half, and three float32 logits of 512 tokens."""
    model = build_model("tiny_qwen3", layers=1).half()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    free = 6 * parameters + 3 * 4 * 512 * model.config.vocab_size - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    card, other = torch.device("cuda", 0), torch.device("cuda", 1)
    answer = check._model_level(model, None, 0, {card})
    assert answer == "a float32 copy needs 0 GiB of free memory"
    answer = check._model_level(model, None, 0, {card, other})
    assert answer == "the model is spread over several devices"


def test_same_seed_is_the_same_answer(use):
    """The one that is taken where none is asked for is 0."""
    block, options = build("tiny_qwen3"), {"tokens": 24, "backward": False}
    rows = check_parity(block, **options).rows
    assert rows == check_parity(block, seed=0, **options).rows
    assert rows != check_parity(block, seed=1, **options).rows


def test_one_choice_of_one_token_passes(use):
    """The pass with sentinels leaves that slot."""
    report = check_parity(build(replace(find("tiny_qwen3"), top_k=1)), tokens=1)
    assert report.passed, report
    assert any(row.tensor == "sentinels, no gradients" for row in report.rows)


def test_patched_block_stays_patched(use):
    block = build("tiny_qwen3")
    moe_patch.patch(block)
    check_parity(block, tokens=64)
    assert isinstance(block.experts.config, ExpertsConfig)
