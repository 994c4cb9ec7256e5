"""bench quant, as far as it goes without a GPU: what is judged, refused, counted and shown."""

from __future__ import annotations

import pytest
import torch

from moe_patch import __main__
from moe_patch.bench import quant
from moe_patch.bench.quant import Batch, QuantTiming
from moe_patch.formats.packed import dequantize, quantize

SIZES = {"tokens": 6, "hidden": 64, "inner": 32, "experts": 3, "top_k": 2}


def given(device, rank=0, dtype=torch.float16):
    """A Batch and plain weights, small."""
    tokens, hidden, inner, experts, top_k = SIZES.values()
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw).to(device, dtype)

    weights, index = torch.rand(tokens, experts, generator=draw).topk(top_k)
    low_rank = {}
    if rank:
        for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            pair = normal(experts, rank, k) * 0.1, normal(experts, n, rank) * 0.1
            low_rank[f"{name}_low_rank"] = tuple(each.requires_grad_() for each in pair)
    x, d_out = normal(tokens, hidden), normal(tokens, hidden)
    batch = Batch(x, index.to(device), weights.to(device, dtype), d_out, low_rank)
    plain = normal(experts, 2 * inner, hidden) / 8, normal(experts, hidden, inner) / 6
    return batch, plain


@pytest.mark.parametrize("rank", (0, 3))
def test_a_format_is_judged_by_the_law(device, rank):
    batch, plain = given(device, rank)
    packed = tuple(quantize(weight, "mxfp4") for weight in plain)
    judged = quant.judge(packed, quant.exactly(plain, batch), batch)
    assert [row.passed for row in judged.rows] == [True] * (2 if rank else 1)
    assert judged.error < 2e-3 < 0.02 < judged.lost < 0.3


def test_another_result_fails(device, monkeypatch):
    batch, plain = given(device)
    packed = tuple(quantize(weight, "mxfp4") for weight in plain)
    real = quant.fused_experts
    monkeypatch.setattr(quant, "fused_experts", lambda *a, **more: real(*a, **more) * 1.01)
    judged = quant.judge(packed, quant.exactly(plain, batch), batch)
    assert not judged.rows[0].passed and judged.error > 5e-3


def test_what_is_lost_is_against_the_weights_before(device):
    batch, plain = given(device)
    packed = tuple(quantize(weight, "int4", group=32) for weight in plain)
    stood_for = tuple(dequantize(weight) for weight in packed)
    assert quant.judge(packed, quant.exactly(stood_for, batch), batch).lost < 2e-3


def test_steps_ask_for_the_gradient_of_the_rows_and_of_every_factor(device, monkeypatch):
    batch, plain = given(device, rank=3)
    batch = batch._replace(x=batch.x.requires_grad_())
    grad, found = torch.autograd.grad, []
    monkeypatch.setattr(torch.autograd, "grad", lambda *each: found.extend(grad(*each)))
    quant.calls_of(quant.STEP, {"a": plain}, None, batch)["a"]()
    factors = [factor for pair in batch.low_rank.values() for factor in pair]
    assert [each.shape for each in found] == [batch.x.shape, *(f.shape for f in factors)]
    assert all(each.abs().max() > 0 for each in found)


def test_bytes_are_those_of_codes_scales_and_zero_points():
    weights = tuple(torch.randn(2, 4, 128) for _ in range(2))
    assert quant.megabytes(weights) == pytest.approx(2 * 2 * 4 * 128 * 4 / 1e6)
    packed = tuple(quantize(weight, "int4", zeros=True) for weight in weights)
    assert quant.megabytes(packed) == pytest.approx(2 * 2 * 4 * (64 + 2 + 1) / 1e6)


def test_a_line_a_timing():
    about = ("qwen3_30b", 64, quant.FORWARD)
    timings = [
        QuantTiming(*about, quant.PLAIN, 0.3, 0.29, 0.31, 2.0, 1.0, 1208.0, None, None),
        QuantTiming(*about, "moe_patch nf4", 0.15, 0.1, 0.2, 4.0, 2.0, 340.0, 1e-3, 0.09),
    ]
    (table,) = quant.quant_tables(timings)
    assert table.row_count == 2 and list(table.columns[-1].cells) == ["1.00", "2.00"]
    assert list(table.columns[-2].cells) == ["", "9.0e-02"]


@pytest.mark.parametrize(
    "line, words",
    [
        (
            "bench quant --shape llama4_scout",
            "--quant compares with grouped_mm, which llama4_scout has not",
        ),
        ("bench quant --format fp3", "fp3"),
        ("bench quant --step-tokens -1", "0 or more"),
        ("bench --quant --lora", "--quant"),
    ],
)
def test_what_is_refused(line, words, capsys):
    assert __main__.main(line.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("mode", (quant.FORWARD, quant.STEP))
def test_formats_are_timed(mode):
    timings, report, notes = quant.bench_quant("qwen3_30b", 16, ["mxfp4"], mode=mode, budget_ms=50)
    assert report is None and not notes
    names = [quant.PLAIN, "moe_patch mxfp4"]
    names += [quant.WRITTEN_OUT.format("mxfp4")] if mode == quant.FORWARD else []
    assert [t.implementation for t in timings] == names
    assert all(t.ms > 0 for t in timings) and 0 < timings[1].error < timings[1].lost
