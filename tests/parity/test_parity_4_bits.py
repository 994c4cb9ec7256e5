"""check_parity on experts in 4 bits: kernels beside float64, and what quantisation loses apart."""

from __future__ import annotations

import copy
import json
import re
import warnings

import pytest
import torch
from families import build
from four_bits import experts_of, quantised
from tiny import tiny_block, tiny_model

import moe_patch
from moe_patch.formats.packed import dequantize
from moe_patch.models import decorated, llama4

SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "family, patched",
    (
        ("qwen3_moe", True),
        ("llama4", False),
        pytest.param("qwen3_moe", False, marks=pytest.mark.gpu),
        pytest.param("llama4", True, marks=pytest.mark.gpu),
    ),
)
def test_blocks_pass(family, patched, device):
    block, _ = quantised(tiny_block(family, device))
    if patched:
        moe_patch.patch(block)
    before = {name: (id(p), p.clone()) for name, p in block.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moe_patch")
        report = moe_patch.check_parity(block, tokens=[1, 40])
    assert report.passed, report
    assert "decode" in report.paths and "sorted" in report.paths
    assert "weights in 4 bits are always frozen" in str(report)
    for name, parameter in block.named_parameters():
        kept, value = before[name]
        assert id(parameter) == kept and torch.equal(parameter, value)


@pytest.mark.parametrize("family, path", (("gpt_oss", "sorted"), ("hy_v4", ""), ("jamba", "")))
def test_families_pass_in_half_precision(family, path, device):
    model = build(family, device, **SIZES).half()
    moe_patch.quantize_experts(model, group=32)
    report = moe_patch.check_parity(model, tokens=[40], blocks=1)
    assert report.passed and path in " ".join(report.paths), report


@pytest.mark.parametrize("family", (pytest.param("qwen3_moe", marks=pytest.mark.gpu), "llama4"))
def test_a_flipped_code_fails(family, device, monkeypatch):
    block, _ = quantised(tiny_block(family, device))
    original = decorated.fused_experts

    def flipped(x, up, down, *routing, **more):
        codes = down.codes.clone()
        codes[:, 3, 5] ^= 8
        return original(x, up, down.__class__(codes, down.scales, None, "nf4"), *routing, **more)

    for module in (decorated, llama4):
        monkeypatch.setattr(module, "fused_experts", flipped)
    report = moe_patch.check_parity(block, tokens=[40])
    assert not report.passed
    assert not next(row for row in report.rows if row.tensor == "output").passed


def test_what_quantisation_loses(device):
    original = tiny_model("qwen3_moe", device)
    model = copy.deepcopy(original)
    moe_patch.quantize_experts(model, "nf4", group=32)
    report = moe_patch.check_parity(model, tokens=[40], blocks=1, original=original)
    assert report.passed and len(report.losses) == 5
    for loss in report.losses[:-1]:
        module, _, name = loss.name.rpartition(".")
        exact = original.get_parameter(loss.name).double()
        error = dequantize(experts_of(model)[module].packed(name), torch.float64) - exact
        assert loss.value == pytest.approx(float(error.norm() / exact.norm()))
        assert loss.measure == "relative rms" and 0.05 < loss.value < 0.12 and loss.format == "nf4"
    assert report.losses[-1].name == "logits" and report.losses[-1].value > 0
    assert re.search(
        r"lost by quantisation:\n  model.layers.0.mlp.experts.gate_up_proj in nf4: ", str(report)
    )
    assert json.loads(json.dumps(report.to_dict()))["losses"][-1]["measure"] == "KL (median)"
    assert (report + report).losses == report.losses * 2


def test_an_original_that_does_not_fit():
    model, other = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match="has no experts in 4 bits: original= is for a quantised"):
        moe_patch.check_parity(model, original=other)
    moe_patch.quantize_experts(model, group=32)
    with pytest.raises(ValueError, match=r"original has .*gate_up_proj \[8, 64, 32\]: pass the"):
        moe_patch.check_parity(model, original=model)


@pytest.mark.parametrize("format", ("nf4", pytest.param("mxfp4", marks=pytest.mark.gpu)))
def test_model_level(format, device):
    model = tiny_model("qwen3_moe", device).half()
    moe_patch.quantize_experts(model, format, group=32)
    report = moe_patch.check_parity(model, tokens=[40], blocks=1, model_level=True)
    assert report.sections[-1].block == "whole model" and report.passed, report
