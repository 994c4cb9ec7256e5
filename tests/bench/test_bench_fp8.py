"""python -m moe_patch bench --dtype fp8, as far as it goes without a GPU."""

import pytest
import torch

from moe_patch import __main__, reference
from moe_patch.bench import fp8 as bench_fp8
from moe_patch.bench.fp8 import Fp8Timing
from moe_patch.bench.timing import Spread
from moe_patch.parity import law


@pytest.mark.parametrize(
    "more, found",
    [
        ("--mode backward", "--mode"),
        ("--graph", "--graph"),
        ("--dtype fp8 bf16", "other dtype"),
        ("--shape qwen3_30b dsv3_ep32", "second shape"),
    ],
)
def test_what_fp8_rows_do_not_take(more, found, capsys):
    line = f"bench --dtype fp8 {more}"
    assert __main__.main(line.split()) == 2
    assert found in capsys.readouterr().err


def test_a_line_a_timing():
    timings = [
        Fp8Timing("masked", "moe_patch", 0.06, 0.05, 0.07, 990.0, 2.0, 1.0),
        Fp8Timing("masked", "other", 0.12, 0.11, 0.13, 495.0, 1.0, 2.0),
    ]
    (table,) = bench_fp8.fp8_table(timings)
    assert table.row_count == 2 and list(table.columns[6].cells) == ["", "2.00 x as fast"]


def test_a_row_whose_parity_fails_is_not_timed(monkeypatch):
    def never():
        raise AssertionError("timed")

    failed = law.Row("out", False, note="rms error 3 x HF's")
    monkeypatch.setattr(bench_fp8, "environment", lambda _: "nowhere")
    for judged, said in (([law.Row("d_x", True), failed], "3 x HF's"), ([], "nothing to check")):
        row = bench_fp8._Row("row", {"moe_patch": never}, 1, 1, lambda judged=judged: judged)
        report = bench_fp8.bench_fp8(row)
        assert not report.passed and said in str(report)


@pytest.mark.parametrize("graph", [False, True])
def test_rows_may_be_timed_as_graphs(graph, monkeypatch):
    def times(calls, *, budget_ms):
        return {name: Spread(call(), 0.5, 2.0) for name, call in calls.items()}

    monkeypatch.setattr(bench_fp8, "times", times)
    monkeypatch.setattr(bench_fp8, "captured", lambda call: lambda: 10 * call())
    calls = {"moe_patch": lambda: 1.0}
    row = bench_fp8._Row("row", calls, 1.0, 1.0, lambda: [law.Row("out", True)], graph)
    (timing,) = bench_fp8.bench_fp8(row)
    assert timing.ms == (10.0 if graph else 1.0)


def small_inputs(dtype):
    """200 tokens of four experts, on the CPU."""
    torch.manual_seed(0)
    stored = []
    for n, k in ((256, 256), (256, 128)):
        rows, scale = reference.quantize(torch.randn(4 * n, k) * k**-0.5)
        scale = scale.view(4, n // 128, 128, -1).amax(2)
        stored += [rows.view(4, n, k), scale]
    x = torch.randn(200, 256).bfloat16()
    weight, index = torch.randn(200, 4).softmax(-1).topk(2)
    wide = [
        torch.stack([reference.dequantize(*each).to(dtype) for each in zip(*stored[i : i + 2])])
        for i in (0, 2)
    ]
    d_out = torch.randn(200, 256).to(dtype)
    return bench_fp8._Inputs(x.to(dtype), index, weight.to(dtype), tuple(stored), wide, d_out)


def test_calls_are_timed_in_turns_or_each_alone(monkeypatch):
    asked = []

    def times(calls, *, budget_ms):
        asked.append(list(calls))
        return {name: Spread(1.0, 0.5, 2.0) for name in calls}

    monkeypatch.setattr(bench_fp8, "times", times)
    calls = {"moe_patch": lambda: None, "other": lambda: None}
    for alone in (False, True):
        row = bench_fp8._Row("row", dict(calls), 1, 1, lambda: [law.Row("out", True)], alone=alone)
        assert [each.implementation for each in bench_fp8.bench_fp8(row)] == list(calls)
    assert asked == [list(calls), ["moe_patch"], ["other"]]


def test_rows_have_steps_below_512_rows_an_expert(monkeypatch):
    kinds = ("_experts", "_step", "_contiguous", "masked", "_layer")
    for kind in kinds:
        monkeypatch.setattr(bench_fp8, kind, lambda *sizes, kind=kind: (kind, sizes))
    found = list(bench_fp8.rows("dsv3_ep32", (1, 64)))
    assert {kind for kind, _ in found} == set(kinds)
    steps = [
        (name, tokens * size.top_k // size.num_experts)
        for kind, (name, size, tokens) in (row for row in found if row[0] == "_step")
    ]
    assert steps == [*(("qwen3_30b", rows) for rows in (64, 256, 384)), *(
        ("dsv3_ep32", rows) for rows in (64, 256)
    )]  # fmt: skip


def test_steps_are_judged_by_the_law(monkeypatch):
    given = small_inputs(torch.float32)
    monkeypatch.setattr(bench_fp8, "_inputs", lambda size, tokens: given)
    row = bench_fp8._step("qwen3_30b", bench_fp8.shapes.find("qwen3_30b"), 200)
    assert row.alone and row.graph
    # two products forward and two backward, of weights 1536 x 2048 and 2048 x 768
    assert row.flops == 2 * (200 * 8) * 2 * (2304 * 2048)
    passes = 2 * (128 * 2304 * 2048 + 2 * 200 * 2048)  # each weight, and the rows in and out
    assert row.bytes == pytest.approx(passes, rel=1e-4)  # nearly all of the experts are chosen
    d_x, d_weight = row.calls["moe_patch"]()
    wide_d_x, wide_d_weight = row.calls[bench_fp8.BF16]()
    assert d_x.shape == (200, 256) and d_weight.shape == (200, 2)
    leaves = [t.detach().double().requires_grad_() for t in (given.x, given.weight)]
    out = bench_fp8._exact(leaves[0], given.stored, given.index, leaves[1])
    exact = torch.autograd.grad(out, leaves, given.d_out.double())
    for ours, wide, truth in zip((d_x, d_weight), (wide_d_x, wide_d_weight), exact):
        errors = [float((each - truth).norm() / truth.norm()) for each in (ours, wide)]
        assert errors[1] < 1e-5 < errors[0] < 0.05  # these are not e4m3, nor is what they meet
    for d_x_by, d_weight_by in ((1, 1), (1.1, 1), (1, 1.1)):
        judged = bench_fp8._judge_gradients(d_x_by * d_x, d_weight_by * d_weight, given)
        assert [each.passed for each in judged] == [d_x_by == 1, d_weight_by == 1]
    judged = [(each.tensor, each.passed) for each in row.judge()]
    assert judged == [("d_x", True), ("d_top_k_weights", True)]


def test_a_forward_is_judged_by_the_law(monkeypatch):
    given = small_inputs(torch.float32)
    monkeypatch.setattr(bench_fp8, "_inputs", lambda size, tokens: given)
    right = given.ours()
    for factor in (1.0, 1.1):
        monkeypatch.setattr(bench_fp8._Inputs, "ours", lambda _, factor=factor: factor * right)
        row = bench_fp8._experts("qwen3_30b", bench_fp8.shapes.find("qwen3_30b"), 200)
        assert [(each.tensor, each.passed) for each in row.judge()] == [("out", factor == 1.0)]


@pytest.mark.parametrize("factor, passed", [(1.0, True), (1.02, False)])
def test_experts_are_judged_by_the_law(factor, passed):
    x, index, weight, stored, *_ = small_inputs(torch.bfloat16)
    weight = weight.float()
    act = [
        reference.dequantize(*reference.quantize(x.float())), *(
            reference.dequantize(stored[i], stored[i + 1]) for i in (0, 2)
        ),
    ]  # fmt: skip
    ours = torch.zeros(200, 256)
    for expert in range(4):
        token, choice = torch.where(index == expert)
        rows = reference.glu(act[0][token] @ act[1][expert].T)
        rows = reference.dequantize(*reference.quantize(rows)) @ act[2][expert].T
        ours.index_add_(0, token, rows * weight[token, choice, None])
    ours = (ours * factor).bfloat16()
    row = bench_fp8._judge_experts(ours, x, None, tuple(stored), index, weight)
    assert row.passed is passed, row
