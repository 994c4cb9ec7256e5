"""Who competes, what the limit is, what is written and drawn; the clock itself needs a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from timings import H200

from moe_patch.bench import block as bench
from moe_patch.bench import timing as clock
from moe_patch.bench.block import OURS, Ceilings, Result, contenders, ready, short_of, step
from moe_patch.models.decorated import ExpertsConfig
from moe_patch.parity import ParityReport, Row, Section
from moe_patch.shapes import SHAPES, build

OOM = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 3.50 GiB is free. Of the allocated memory 1 GiB is allocated by PyTorch.\nMore."
)
COMPILED = "HF grouped_mm + compile"


def names(block, tokens, mode="forward", **options):
    return list(contenders(block, tokens, mode, **options))


def test_contenders_by_shape_and_size():
    qwen, llama = build("tiny_qwen3"), build("tiny_llama4")
    every = [OURS, "HF eager", "HF grouped_mm", "HF batched_mm", COMPILED]
    assert names(qwen, 64) == every
    assert names(qwen, 65) == [*every[:3], every[4]]
    assert names(qwen, 64, eager=False) == [every[0], *every[2:]]
    assert names(qwen, 64, compiled=False) == every[:4]
    assert names(qwen, 4097, "backward") == [every[0], every[2], every[4]]
    assert names(llama, 64) == [OURS, "HF dense"]
    assert names(llama, 64, eager=False) == [OURS]
    assert names(llama, 16385) == [OURS]


def test_contenders_run_what_they_are_called(use):
    block = build("tiny_qwen3")
    found = contenders(block, 64, "forward")
    implementations = [b.experts.config._experts_implementation for b in found.values()]
    assert implementations == [OURS, "eager", "grouped_mm", "batched_mm", "grouped_mm"]
    compiled = [isinstance(b, torch._dynamo.OptimizedModule) for b in found.values()]
    assert compiled == [name == COMPILED for name in found]
    assert not isinstance(block.experts.config, ExpertsConfig)
    weights = {b.experts.gate_up_proj.data_ptr() for b in found.values()}
    assert weights == {block.experts.gate_up_proj.data_ptr()}


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama4"])
def test_backward_step_computes_every_gradient(use, name, monkeypatch):
    block = contenders(build(name), 8, "backward")[OURS]
    x, d_out, asked = torch.randn(1, 8, 64), torch.randn(1, 8, 64), []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, leaves, d: asked.extend(grad(out, leaves, d))
    )
    step(block, x, d_out, "backward")()
    assert len(asked) == 1 + len(list(block.parameters()))
    assert all(g.abs().max() > 0 for g in asked)
    step(block, x, d_out, "forward")()


def test_limit_is_that_of_the_anchors():
    """The published ones, of an H200, where the formula is the same."""

    def limit(name, tokens, **mode):
        return H200.limit_ms(SHAPES[name], tokens, **mode)

    assert limit("qwen3_30b", 64) == pytest.approx(0.278, abs=0.001)  # bytes
    assert limit("qwen3_30b", 1024) == pytest.approx(0.283, abs=0.001)
    assert limit("qwen3_30b", 16384) == pytest.approx(1.54, abs=0.01)  # flops
    assert limit("qwen3_30b", 16384, backward=True) == pytest.approx(4.62, abs=0.01)
    assert limit("llama4_scout", 1) == pytest.approx(0.117, abs=0.001)
    assert limit("llama4_scout", 4096) == pytest.approx(2.57, abs=0.01)
    float32 = Ceilings("float32", 802.0, 4.29)
    assert float32.limit_ms(SHAPES["qwen3_30b"], 64) == pytest.approx(2 * limit("qwen3_30b", 64))


def test_what_of_hugging_faces_fails_is_left_out_with_the_reason():
    def fail(error):
        def call():
            raise error

        return call

    ran = []
    calls = {
        OURS: lambda: ran.append(1),
        "HF eager": fail(OOM),
        "HF batched_mm": fail(RuntimeError("no kernel\nfor this")),
        "HF grouped_mm": fail(RuntimeError()),
    }
    working, failed = ready(calls, graph=False)
    assert list(working) == [OURS] and ran == [1]
    assert "20.00 GiB" in failed["HF eager"] and "3.50 GiB free" in failed["HF eager"]
    assert failed["HF batched_mm"] == "no kernel" and failed["HF grouped_mm"] == "RuntimeError"
    with pytest.raises(RuntimeError, match="no kernel"):
        ready({OURS: calls["HF batched_mm"]}, graph=False)
    with pytest.raises(ZeroDivisionError):  # a bug is no reason
        ready({"HF eager": fail(ZeroDivisionError())}, graph=False)


def test_what_fails_is_captured_too(monkeypatch):
    def refuse(call):
        raise RuntimeError("called a synchronizing CUDA operation")

    def nothing():
        pass

    monkeypatch.setattr(clock, "captured", refuse)
    working, failed = ready({"HF eager": nothing}, graph=True)
    assert not working and "synchronizing" in failed["HF eager"]
    assert ready({"HF eager": nothing}, graph=False) == ({"HF eager": nothing}, {})


def test_message_of_memory_without_numbers():
    assert short_of(torch.OutOfMemoryError("gone")) == (
        "the GPU has too little memory for it (gone)"
    )


def test_a_spread_is_the_median_and_the_outer_deciles():
    found = clock.Spread.of([float(i) for i in range(1, 100)])
    assert (found.ms, found.p10, found.p90) == (50.0, 10.0, 90.0)


def test_the_hosts_clock_waits_before_and_after(monkeypatch):
    order, now = [], iter([10.0, 16.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: order.append("clock") or next(now))
    one = clock.seconds(lambda: order.append("call"), count=3, wait=lambda: order.append("wait"))
    assert one == 2.0 and order == ["wait", "clock", *["call"] * 3, "wait", "clock"]


@pytest.fixture
def pretend(use, monkeypatch):
    """A GPU that is not there: blocks are built on the CPU, every call takes 1 ms, 2 ms ..."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.compiler.reset()  # imports, with such a GPU, what needs the real Generator
    monkeypatch.setattr(bench, "ceilings", lambda dtype: H200)
    cpu_build, randn, generator = bench.build, torch.randn, torch.Generator
    monkeypatch.setattr(bench, "build", lambda shape, dtype, device: cpu_build(shape, dtype=dtype))
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
    monkeypatch.setattr(torch, "randn", lambda *size, **on: randn(*size))
    report = ParityReport([Section("", "bfloat16", 8, [Row("output", True)])], "a card")
    monkeypatch.setattr(bench, "check_parity", lambda block, **_: report)
    monkeypatch.setattr(
        bench,
        "times",
        lambda calls, budget_ms: {
            n: clock.Spread(i + 1, i + 0.9, i + 1.2) for i, n in enumerate(calls)
        },
    )
    monkeypatch.setattr(bench, "memory", lambda *_: (3.0, 5.0))
    return monkeypatch


def test_a_row(pretend):
    result = bench.bench("tiny_qwen3", 8, compiled=False, dtype=torch.float32)
    assert [t.implementation for t in result.timings] == names(
        build("tiny_qwen3"), 8, compiled=False
    )
    assert not result.notes and result.report.passed
    second = result.timings[1]
    assert (second.ms, second.speedup, second.mode) == (2.0, 2.0, "forward")
    assert second.tflops == pytest.approx(SHAPES["tiny_qwen3"].flops(8) / 2e9)
    assert second.limit_ms == H200.limit_ms(SHAPES["tiny_qwen3"], 8)
    assert second.kept_mb is None and second.peak_mb is None
    (first, *_) = bench.bench(
        "tiny_qwen3", 8, mode="backward", compiled=False, dtype=torch.float32
    ).timings
    assert (first.kept_mb, first.peak_mb, first.mode) == (3.0, 5.0, "backward")
    assert first.limit_ms == 3 * second.limit_ms and first.tflops == pytest.approx(
        6 * second.tflops
    )


def test_a_row_whose_parity_fails_is_not_timed(pretend):
    report = ParityReport([Section("", "bfloat16", 8, [Row("output", False)])], "a card")
    pretend.setattr(bench, "check_parity", lambda block, **_: report)
    pretend.setattr(bench, "times", lambda *_, **__: pytest.fail("it was timed"))
    assert bench.bench("tiny_qwen3", 8, compiled=False) == Result([], report, [])


def test_a_graph_row_says_so_and_names_who_cannot(pretend):
    def capture(call):
        if "eager" in call.__name__:
            raise RuntimeError("it waits")
        return call

    def named(block, x, d_out, mode):
        def call():
            pass

        call.__name__ = getattr(block.experts.config, "_experts_implementation", "")
        return call

    pretend.setattr(clock, "captured", capture)
    pretend.setattr(bench, "step", named)
    result = bench.bench("tiny_qwen3", 8, compiled=False, graph=True)
    assert {t.mode for t in result.timings} == {"forward, graph"}
    assert len(result.timings) == 3
    assert result.notes == [
        "tiny_qwen3, 8 tokens, bfloat16, forward, graph: HF eager left out, it waits"
    ]


@pytest.mark.parametrize(
    "stage, words",
    [
        ("ceilings", "the card's ceilings"),
        ("build", "the block"),
        ("check_parity", "its parity check"),
        ("times", "its run"),
    ],
)
def test_a_row_that_does_not_fit_is_skipped_with_a_note(pretend, stage, words):
    def fail(*_, **__):
        raise OOM

    pretend.setattr(bench, stage, fail)
    result = bench.bench("tiny_qwen3", 8, compiled=False)
    assert result.report is None and not result.timings
    (note,) = result.notes
    assert note == (
        "tiny_qwen3, 8 tokens, bfloat16, forward: skipped, the GPU has too little memory for "
        f"{words} (20.00 GiB more asked for, 3.50 GiB free)"
    )


def test_a_skipped_row_holds_no_memory(pretend):
    blocks = []
    built = bench.build

    def keep(*args, **kwargs):
        block = built(*args, **kwargs)
        blocks.append(weakref.ref(block))
        return block

    def fail(*_, **__):
        raise torch.OutOfMemoryError("short")

    pretend.setattr(bench, "build", keep)
    pretend.setattr(bench, "times", fail)
    bench.bench("tiny_qwen3", 8, compiled=False, dtype=torch.float32)
    bench.free()
    assert blocks and blocks[0]() is None


def test_refuses_without_a_gpu_and_unknown_modes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="bench needs a GPU"):
        bench.bench("tiny_qwen3", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="unknown mode 'sideways'"):
        bench.bench("tiny_qwen3", 8, mode="sideways")
    with pytest.raises(ValueError, match="unknown shape 'gpt5'"):
        bench.bench("gpt5", 8)


# with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", bench.MODES)
def test_times_are_measured(mode):
    result = bench.bench("qwen3_30b", 64, mode=mode, budget_ms=200)
    timings = result.timings
    assert result.report.passed, result.report
    assert not result.notes, result.notes
    assert [t.implementation for t in timings] == names(build("tiny_qwen3"), 64, mode)
    assert all(0 < t.p10 <= t.ms <= t.p90 and t.tflops > 0 for t in timings)
    limit = bench.ceilings(torch.bfloat16).limit_ms(
        SHAPES["qwen3_30b"], 64, backward=mode != "forward"
    )
    assert {t.limit_ms for t in timings} == {limit}
    assert timings[0].speedup == 1
    if mode == "backward":
        weights = 128 * 3 * 2048 * 768 * 2 / 1e6
        assert all(t.peak_mb > weights for t in timings)  # their gradients
        assert all(0 < t.kept_mb < t.peak_mb for t in timings)
        assert timings[0].kept_mb < 10 and timings[0].kept_mb <= min(t.kept_mb for t in timings)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", bench.MODES)
def test_graphs_are_timed_and_what_cannot_be_captured_is_named(mode):
    result = bench.bench("qwen3_30b", 16, mode=mode, graph=True, budget_ms=200)
    found = {t.implementation: t for t in result.timings}
    assert set(found) == {OURS, "HF grouped_mm", "HF batched_mm", COMPILED}, result.notes
    assert len(result.notes) == 1 and "HF eager left out" in result.notes[0]
    assert {t.mode for t in result.timings} == {f"{mode}, graph"}
    torch.randn(1, device="cuda")  # a capture that failed would break it


@pytest.mark.gpu
def test_a_replay_computes():
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    replay = clock.captured(lambda: out.copy_(x * 2))
    x.fill_(3)
    replay()
    assert out.tolist() == [6, 6, 6, 6]
    with pytest.raises(RuntimeError, match="synchroniz"):
        clock.captured(lambda: x.nonzero())
    torch.randn(1, device="cuda")
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_memory_is_what_is_kept():
    block = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.SiLU()).cuda()
    x, d_out = (torch.randn(1 << 22, device="cuda") for _ in range(2))  # 16.8 MB
    kept, peak = bench.memory(block, x, d_out)
    assert kept == pytest.approx(16.8, abs=2) and peak >= 2 * 16.7  # the value between the two


@pytest.mark.gpu
def test_ceilings_are_plausible():
    found = bench.ceilings(torch.bfloat16)
    assert 10 < found.matmul_tflops < 5000 and 0.05 < found.copy_tb_s < 20
    assert bench.ceilings(torch.bfloat16) is found


@pytest.mark.gpu
def test_a_card_that_is_too_small():
    total = torch.cuda.get_device_properties(0).total_memory
    bench.ceilings(torch.bfloat16)
    bench.free()
    torch.cuda.set_per_process_memory_fraction(1e9 / total)
    try:
        result = bench.bench("qwen3_30b", 64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.report is None and "too little memory for the block" in result.notes[0]
    assert bench.bench("qwen3_30b", 1, compiled=False, budget_ms=100).report.passed


@pytest.mark.gpu
def test_no_times_when_parity_fails(monkeypatch):
    from moe_patch.models import decorated

    fused = decorated.fused_experts
    monkeypatch.setattr(decorated, "fused_experts", lambda *a, **k: fused(*a, **k) * 0.99)
    result = bench.bench("qwen3_30b", 64)
    assert not result.timings and not result.report.passed
