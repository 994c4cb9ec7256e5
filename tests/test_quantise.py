"""quantize_experts(): what it changes, what it leaves and says, and how much memory it takes."""

from __future__ import annotations

import json
import re
import weakref

import pytest
import torch
from four_bits import experts_of
from tiny import tiny_block, tiny_model, tokens
from torch import nn

import moe_patch
from moe_patch import quantise
from moe_patch.formats.packed import quantize
from moe_patch.recognise import four_bits, parts


def test_what_changes_and_what_does_not(device):
    model = tiny_model("qwen3_moe", device)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    report = moe_patch.quantize_experts(model, group=32)
    assert report.quantized == ["model.layers.0.mlp", "model.layers.1.mlp"] and not report.skipped
    after = dict(model.named_parameters())
    for name, (parameter, value) in before.items():
        if "experts" in name:
            packed = quantize(value, "nf4", 32)
            assert torch.equal(after[name], packed.codes)
            assert torch.equal(after[f"{name}_scales"], packed.scales)
            assert not after[name].requires_grad and not after[f"{name}_scales"].requires_grad
        else:
            assert after[name] is parameter and torch.equal(parameter, value)
            assert parameter.requires_grad
    added = after.keys() - before.keys()
    assert added == {f"{name}_scales" for name in before if "experts" in name}


@pytest.mark.parametrize("family", ("qwen3_moe", "llama4"))
def test_bare_blocks_and_experts(family):
    block, alone = tiny_block(family), nn.ModuleList([tiny_block(family).experts])
    assert moe_patch.quantize_experts(block, group=32).quantized == [""]
    assert isinstance(block.experts, four_bits.FourBits)
    if family == "qwen3_moe":
        assert moe_patch.quantize_experts(alone[0], group=32).quantized == [""]
        assert torch.equal(alone[0].down_proj, block.experts.down_proj)


def test_the_report(device):
    model = tiny_model("qwen3_moe", device).half()
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = float("nan")
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    report = moe_patch.quantize_experts(model, "int4", group=32, zeros=True)
    assert report.before == size > report.after
    assert report.after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    first, second = str(report).splitlines()
    assert first == (
        "moe_patch: quantized 1 of 2 MoE blocks to int4 (groups of 32, scales in bfloat16): "
        f"{size / 1e6:.2f} MB -> {report.after / 1e6:.2f} MB"
    )
    reason = "down_proj has NaN or infinity: load weights that are finite"
    assert second == f"  model.layers.1.mlp (Qwen3MoeSparseMoeBlock): {reason}"
    found = json.loads(json.dumps(report.to_dict()))
    assert found["quantized"] == ["model.layers.0.mlp"] and found["bytes_after"] == report.after
    assert found["skipped"][0]["class"] == "Qwen3MoeSparseMoeBlock"


def test_again():
    model = tiny_model("qwen3_moe")
    moe_patch.quantize_experts(model, group=32)
    before = model.state_dict()
    report = moe_patch.quantize_experts(model, "int4", group=32)
    assert [reason for *_, reason in report.skipped] == ["its experts are in 4 bits already"] * 2
    assert not report.quantized and report.before == report.after
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _tied(model):
    for layer in model.model.layers:
        layer.mlp.experts.down_proj = model.model.layers[0].mlp.experts.down_proj


def _meta(model):
    model.to("meta")


def _replaced(model):
    for layer in model.model.layers:
        layer.mlp.experts.forward = lambda *args: args[0]


def _parametrized(model):
    for layer in model.model.layers:
        experts = layer.mlp.experts
        nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


def _large(model):
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data[0, 0, 0] = 1e6


def _integers(model):
    for layer in model.model.layers:
        weight = layer.mlp.experts.down_proj
        layer.mlp.experts.down_proj = nn.Parameter(weight.int(), requires_grad=False)


@pytest.mark.parametrize(
    "spoil, options, reason",
    (
        (_tied, {}, "are tied to those of another module"),
        (_meta, {}, "offloaded or on the meta device"),
        (_replaced, {}, "forward was replaced on the instance"),
        (_parametrized, {}, "computed by a parametrization"),
        (_large, {"format": "int4", "scale_dtype": torch.float16}, "too large for scales in torch"),
        (_integers, {}, "one dtype is needed"),
        (lambda model: None, {"group": 128}, "K = 64 of gate_up_proj is not a multiple of 128"),
        (
            lambda model: None,
            {"format": "int4", "group": None},
            "K = 64 of gate_up_proj is not a multiple of 128",
        ),
    ),
    ids=("tied", "meta", "replaced", "parametrized", "large", "integers", "group", "default"),
)
def test_what_is_skipped(spoil, options, reason):
    model = tiny_model("qwen3_moe")
    spoil(model)
    before = {name: id(p) for name, p in model.named_parameters()}
    report = moe_patch.quantize_experts(model, **{"group": 32} | options)
    assert not report.quantized and len(report.skipped) == 2
    assert all(reason in each for *_, each in report.skipped), report
    assert {name: id(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    "options, says",
    (
        ({"format": "nf3"}, "format 'nf3' is unknown: use one of nf4, mxfp4, int4"),
        ({"group": 48}, "group 48: nf4 has groups of 32 or 64 or 128"),
        ({"scale_dtype": torch.float16}, "scale_dtype torch.float16: nf4 needs torch.float32"),
        ({"zeros": True}, "zeros=True: nf4 has no zero points"),
    ),
    ids=("format", "group", "scales", "zeros"),
)
def test_bad_options_change_nothing(options, says):
    model = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match=re.escape(says)):
        moe_patch.quantize_experts(model, **options)
    assert not experts_of(model)


def test_no_experts_and_no_module():
    with pytest.raises(ValueError, match="Linear has no MoE block that can be quantised, found no"):
        moe_patch.quantize_experts(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes a torch.nn.Module, found str"):
        moe_patch.quantize_experts("Qwen/Qwen3-30B-A3B")


def test_memory_is_the_result_and_one_block(monkeypatch):
    """When a block's turn comes, the weights of those before it are gone."""
    model = tiny_model("qwen3_moe", num_hidden_layers=6)
    weights = [
        [weakref.ref(p) for p in (experts(model, i).gate_up_proj, experts(model, i).down_proj)]
        for i in range(6)
    ]
    alive, original = [], quantise.quantize

    def counting(*args, **options):
        alive.append([any(ref() is not None for ref in layer) for layer in weights])
        return original(*args, **options)

    monkeypatch.setattr(quantise, "quantize", counting)
    moe_patch.quantize_experts(model, group=32)
    expected = [[layer >= turn for layer in range(6)] for turn in range(6) for _ in range(2)]
    assert alive == expected
    assert not any(ref() for layer in weights for ref in layer)


def experts(model, layer):
    return model.model.layers[layer].mlp.experts


@pytest.mark.parametrize(
    "blocks, asked, shown", ((6, True, True), (6, False, False), (2, True, False))
)
def test_progress(blocks, asked, shown, monkeypatch):
    model, steps = tiny_model("qwen3_moe", num_hidden_layers=blocks), []

    class Display:
        __enter__ = __exit__ = lambda self, *_: self

        def add_task(self, text, total, visible):
            steps.append((total, visible))

        def advance(self, task):
            steps.append("step")

    monkeypatch.setattr(quantise.output, "progress", lambda *_: Display())
    moe_patch.quantize_experts(model, group=32, progress=asked)
    assert steps == [(blocks, shown), *["step"] * blocks]


def test_nothing_is_printed(capfd):
    moe_patch.quantize_experts(tiny_model("qwen3_moe", num_hidden_layers=6), group=32)
    assert capfd.readouterr() == ("", "")


def test_patch_says_what_bitsandbytes_left(device):
    model = tiny_model("qwen3_moe", device)
    assert not moe_patch.patch(model).notes
    model.quantization_method = "bitsandbytes"
    says = "moe_patch.quantize_experts(model) makes them 4 bits"
    assert says in str(moe_patch.patch(nn.ModuleList([model])))
    moe_patch.quantize_experts(model, group=32)
    assert says not in str(moe_patch.patch(model))
    with torch.no_grad():
        assert model(tokens()).logits.isfinite().all()


def test_experts_on_meta_take_empty_stacks(device):
    """As a loader does it, before there are weights."""
    from moe_patch.formats.packed import empty_packed

    with torch.device("meta"):
        block = tiny_block("qwen3_moe", "meta")
    filled = tiny_block("qwen3_moe")
    stacks = [
        empty_packed(getattr(block.experts, name).shape, "nf4", 32, device="meta")
        for name in (parts.up_name(block.experts), "down_proj")
    ]
    four_bits.quantise_module(block.experts, *stacks)
    four_bits.quantise_module(block.experts, *stacks)
    moe_patch.quantize_experts(filled, group=32)
    assert all(p.is_meta and not p.requires_grad for p in block.experts.parameters())
    block.load_state_dict(filled.state_dict(), assign=True)
    x = torch.randn(1, 3, 64)
    moe_patch.patch(block)
    moe_patch.patch(filled)
    assert torch.equal(block(x), filled(x))
