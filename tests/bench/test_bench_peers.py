"""Rows of other libraries: they are judged like ours, and missing or broken ones are notes."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch
from rich.progress import Progress
from timings import timing

from moe_patch import parity, reference
from moe_patch.__main__ import main
from moe_patch.bench import fp8, lora, peers
from moe_patch.bench import routing as routed
from moe_patch.bench.kind import Run
from moe_patch.bench.peers import (
    compare,
    deep_gemm,
    experts,
    grouped_nf4,
    liger,
    peft,
    quack,
)
from moe_patch.bench.peers.compare import Case, Compared, Peer, PeerTiming
from moe_patch.bench.timing import OURS, Spread
from moe_patch.commands import running
from moe_patch.formats.packed import Packed, dequantize
from moe_patch.parity import ParityReport, Row, Section
from moe_patch.shapes import find

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def case(tokens=40, routing="uniform", **sizes):
    size = replace(find("tiny_qwen3"), **sizes)
    return Case("tiny_qwen3", size, tokens, routing, routed.choices(routing, size, tokens))


@pytest.fixture
def timed(monkeypatch):
    """Calls run and are not timed; the names of what would have been."""
    names = []

    def times(calls, *, budget_ms):
        names.append(list(calls))
        return {name: Spread(2.0 * (n + 1), 1.0, 9.0) for n, name in enumerate(calls)}

    monkeypatch.setattr(compare, "times", times)
    monkeypatch.setattr(compare, "rounds", lambda calls, _: {name: [1.0] for name in calls})
    monkeypatch.setattr(compare, "environment", lambda _: "nowhere")
    return names


@pytest.fixture
def install(monkeypatch):
    """Puts modules with these attributes where imports find them."""

    def put(name, **attributes):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return put


# stand-ins that compute what the packages document, in plain PyTorch


def each(cu_seqlens):
    ends = cu_seqlens.tolist()
    return enumerate(map(slice, ends, ends[1:]))


def gemm_act(a, b, *, activation, cu_seqlens_m, A_idx, config, tuned, store_preact):
    assert activation == "swiglu" and not tuned
    pre = torch.cat([a[A_idx[rows]] @ b[e] for e, rows in each(cu_seqlens_m)])
    act = torch.nn.functional.silu(pre[:, ::2]) * pre[:, 1::2]
    return pre if store_preact else None, act


def gemm_dact(
    a, b, pre, *, activation, colvec_scale, colvec_reduce, cu_seqlens_m, A_idx, config,
    dynamic_scheduler, tuned,
):  # fmt: skip
    d_act = torch.cat([a[A_idx[rows]] @ b[e] for e, rows in each(cu_seqlens_m)]).float()
    pre = pre.float().requires_grad_()
    act = torch.nn.functional.silu(pre[:, ::2]) * pre[:, 1::2]
    (d_pre,) = torch.autograd.grad(act, pre, d_act * colvec_scale[:, None])
    weighted = act.detach() * colvec_scale[:, None]
    return d_pre.to(a.dtype), weighted.to(a.dtype), (act.detach() * d_act).sum(1)


def gemm(a, b, out, *, config, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None):
    for e, rows in each(cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k):
        if cu_seqlens_k is None:
            out[rows] = a[rows] @ b[e]
        else:
            out[e] = a[:, A_idx[rows]] @ b[rows]


@pytest.fixture
def with_quack(install):
    def put(**broken):
        functions = {"gemm_act": gemm_act, "gemm_dact": gemm_dact, "gemm_tuned": gemm}
        install("quack")
        install("quack.gemm_config", GemmConfig=types.SimpleNamespace)
        install("quack.gemm_interface", **functions | broken)

    return put


class LigerFusedMoEFunction:
    """Liger's function, computed by its documentation."""

    @staticmethod
    def apply(x, gate_up, down, index, weights):
        assert index.dtype == torch.int32
        return reference.fused_experts(x, gate_up, down, index, weights)


def on_cpu(dtype, **more):
    return experts.drawn(case(**more), dtype=dtype, device="cpu")


# rows


@dtypes
def test_quack_computes_what_we_do(with_quack, timed, dtype):
    with_quack()
    rows = list(quack.comparisons("here", on_cpu(dtype)))
    assert [row.name for row in rows] == list(quack.ROWS) and len(rows) == 7
    for row in rows:
        found = compare.compare(row, "QuACK", seconds=60)
        assert found.report is None and not found.notes, (found.report, found.notes)
        ours, theirs = found.timings
        assert (ours.implementation, theirs.implementation) == (OURS, "QuACK")
        assert theirs.configuration == "256 x 128, cluster 2" and theirs.speedup == 2
        limit = 4 * torch.finfo(dtype).eps
        assert 0 < ours.error < limit and 0 < theirs.error < limit, row.name
    assert timed == [[OURS, "QuACK"]] * 7


def test_weights_are_reordered_for_quack():
    pre = torch.arange(6.0)[None]  # gates 0 1 2, ups 3 4 5
    assert quack.interleaved(pre).tolist() == [[0, 3, 1, 4, 2, 5]]
    weight = torch.randn(3, 8, 5)
    assert torch.equal(quack.concatenated(quack.interleaved(weight)), weight)


@dtypes
@pytest.mark.parametrize("routing", ["uniform", "hot"])
def test_liger_computes_what_we_do(install, timed, dtype, routing):
    install("liger_kernel")
    install("liger_kernel.ops", LigerFusedMoEFunction=LigerFusedMoEFunction)
    of = on_cpu(dtype, routing=routing)
    forward, backward = liger.comparisons("here", of)
    assert backward.flops == 3 * forward.flops == 18 * 80 * 64 * 48
    for row in (forward, backward):
        found = compare.compare(row, "Liger", seconds=60)
        assert found.report is None and not found.notes, (str(found.report), found.notes)
        assert all(0 < t.error < 8 * torch.finfo(dtype).eps for t in found.timings)


def in_groups(rows, codes, scales, sizes, ids, turned):
    """Rows of sorted groups times an expert's weight each, in bitsandbytes' layout."""
    assert all(sizes) and ids.dtype == torch.int32
    ours = (codes << 4 | codes >> 4).contiguous()
    weight = dequantize(Packed(ours, scales, None, "nf4"), rows.dtype)
    weight = weight if turned else weight.mT
    parts = zip(rows.split(list(sizes)), ids.tolist(), strict=True)
    return torch.cat([part @ weight[expert] for part, expert in parts])


@dtypes
@pytest.mark.parametrize("routing", ["uniform", "hot"])
def test_grouped_nf4_computes_what_we_do(install, timed, dtype, routing):
    install(
        "nf4_grouped", gemm_4bit_grouped=functools.partial(in_groups, turned=False),
        dgrad_4bit_grouped=functools.partial(in_groups, turned=True),
    )  # fmt: skip
    of = on_cpu(dtype, intermediate_size=64, routing=routing)
    rows = list(grouped_nf4.comparisons("here", of))
    assert len(rows) == 5 and timed == []
    for row in rows:
        found = compare.compare(row, "it", seconds=9)
        assert found.report is None and not found.notes, (str(found.report), found.notes)
        assert all(0 < t.error < 8 * torch.finfo(dtype).eps for t in found.timings), row.name
    assert [row.flops / rows[1].flops for row in rows] == [2, 1, 1, 2, 3]
    assert timed == [[OURS, "it"]] * 5
    (found,) = grouped_nf4.compared(case(), 9)
    assert not found.timings and "grouped-nf4-gemm left out" in found.notes[0]


@pytest.mark.parametrize("masked", [False, True])
def test_deep_gemm_computes_what_we_do(install, timed, monkeypatch, masked):
    captured = []
    monkeypatch.setattr(compare, "captured", lambda call: captured.append(call) or call)
    groups, m, n, k, count = 2, 128, 128, 256, 48
    lhs, lhs_scale = reference.quantize(torch.randn(groups * m, k))
    rhs = reference.quantize_weight(torch.randn(groups, n, k))
    if masked:
        lhs, lhs_scale = lhs.view(groups, m, k), lhs_scale.view(groups, m, -1)
    of = fp8.Operands(lhs, lhs_scale, *rhs)
    rows = torch.tensor([count] * groups if masked else [0, m, 2 * m], dtype=torch.int32)
    twin = reference.fp8_masked_grouped_gemm if masked else reference.fp8_grouped_gemm
    ours = functools.partial(twin, *of, rows)
    judged = (-1, slice(0, count)) if masked else (slice(m, 2 * m),)
    product = fp8.Product("row", 1e9, of, rows, lambda: ours().bfloat16(), judged)
    asked = []

    def contiguous(a, b, out, of_row):
        asked.append(of_row.tolist())
        out.copy_(ours())

    def by_mask(a, b, out, masked_m, mean):
        asked.append(mean)
        out.copy_(ours())

    install(
        "deep_gemm", get_mn_major_tma_aligned_tensor=lambda scale: scale,
        m_grouped_fp8_gemm_nt_contiguous=contiguous, m_grouped_fp8_gemm_nt_masked=by_mask,
    )  # fmt: skip
    found = compare.compare(deep_gemm.comparison(product), "DeepGEMM", seconds=9)
    assert found.report is None and not found.notes, found.notes
    assert asked[0] == (count if masked else [0] * m + [1] * m)
    ours, theirs = found.timings
    assert ours.error == theirs.error and 0 < ours.error < 1e-2 and ours.tflops == 0.5
    assert len(captured) == 2 * masked, "masked rows are timed as graphs, both sides"


def test_peft_s_row_is_bench_lora_s(monkeypatch):
    rows = [Row("output", True, our_rms=1e-3, hf_rms=2e-3), Row("d_a", True, 3e-3, 1e-3)]
    report = ParityReport([Section("", "bfloat16", 8, rows)], "a card")
    made = [timing(name, ms=ms) for name, ms in ((lora.FROZEN, 1), (lora.PEFT, 6), (OURS, 2))]
    monkeypatch.setattr(lora, "bench_lora", lambda *_: lora.Result(made, report, ["a note"]))
    (found,) = peft.compared(Case("qwen3_30b", find("qwen3_30b"), 8, "uniform", None), 9)
    assert found.notes == ["a note"]
    assert [(t.implementation, t.ms, t.error) for t in found.timings] == [
        ("PEFT", 6, 2e-3),
        (OURS, 2, 3e-3),
    ]
    (found,) = peft.compared(Case("llama4_scout", find("llama4_scout"), 8, "uniform", None), 9)
    assert not found.timings and "PEFT left out" in found.notes[0]
    monkeypatch.setattr(lora, "bench_lora", raises)
    (found,) = peft.compared(Case("qwen3_30b", find("qwen3_30b"), 8, "uniform", None), 9)
    assert "row of PEFT is left out, AssertionError: tile_n 192" in found.notes[0]


@pytest.mark.gpu
def test_ours_holds_at_real_sizes():
    size = find("qwen3_30b")
    here = Case("qwen3_30b", size, 1024, "zipf", routed.choices("zipf", size, 1024))
    for module in (quack, liger, grouped_nf4):
        for row in module.comparisons("here", experts.drawn(here)):
            found = compare.compare(replace(row, theirs=raises), "it", seconds=9, budget_ms=20)
            assert found.report is None and len(found.timings) == 1, str(found.report)


# failures


def raises(*_, **__):
    raise AssertionError("tile_n 192\nis too wide")


def test_a_peer_that_raises_is_a_note(with_quack, timed):
    with_quack(gemm_act=raises)
    row = next(iter(quack.comparisons("here", on_cpu(torch.float32))))
    found = compare.compare(row, "QuACK", seconds=60)
    assert found.notes == ["here, gate_up: QuACK left out, AssertionError: tile_n 192"]
    assert [t.implementation for t in found.timings] == [OURS] and timed == [[OURS]]


def test_configurations_that_fail_or_come_too_late_are_noted(with_quack, timed, monkeypatch):
    def some(*args, config, **more):
        return raises() if config.tile_n == 192 else gemm_act(*args, config=config, **more)

    with_quack(gemm_act=some)
    row = next(iter(quack.comparisons("here", on_cpu(torch.float32))))
    (note,) = compare.compare(row, "QuACK", seconds=60).notes
    assert "QuACK failed in 4 configurations, AssertionError: tile_n 192" in note
    clock = iter(range(1000))
    monkeypatch.setattr(compare.time, "perf_counter", lambda: next(clock))
    late, failed = compare.compare(row, "QuACK", seconds=5).notes
    assert "tried 6 of 14 configurations in 5 seconds" in late and "failed in 2" in failed


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_peer_s_nan_has_no_error_and_does_not_touch_our_verdict(with_quack, timed, wrong):
    with_quack(gemm_tuned=lambda a, b, out, **_: out.fill_(wrong))
    rows = {row.name: row for row in quack.comparisons("here", on_cpu(torch.float32))}
    found = compare.compare(rows["down"], "QuACK", seconds=60)
    assert found.report is None and found.timings[1].error is None
    assert found.timings[0].error < 1e-5


def test_a_wrong_peer_has_a_large_error(with_quack, timed):
    with_quack(gemm_tuned=lambda a, b, out, **_: out.zero_())
    rows = {row.name: row for row in quack.comparisons("here", on_cpu(torch.float32))}
    for name in ("down", "d_hidden rows", "d_gate_up_proj", "d_down_proj"):
        assert compare.compare(rows[name], "QuACK", seconds=60).timings[1].error == 1


@pytest.mark.parametrize("name", ["gate_up", "down", "dgate", "d_hidden rows", "d_gate_up_proj"])
def test_where_ours_is_wrong_nothing_is_timed(with_quack, timed, name):
    with_quack()
    rows = {row.name: row for row in quack.comparisons("here", on_cpu(torch.float16))}
    row = rows[name]
    (call,) = row.ours.calls.values()

    def broken(made):
        return {tensor: value * 1.01 for tensor, value in row.ours.read(made).items()}

    wrong = compare.Contender({"": call}, broken)
    found = compare.compare(replace(row, ours=wrong), "QuACK", seconds=60)
    assert not found.report.passed and not found.timings and not timed
    assert f"here, {name}" in str(found.report)


def test_a_gpu_that_is_lost_is_reported(monkeypatch):
    def lost():
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(compare.LostDevice, match="lost after ValueError: its kernel"):
        compare.alive(ValueError("its kernel"))


# the command


TIMINGS = [
    PeerTiming("here", "down", OURS, "", 2.0, 1.9, 2.2, 600.0, 1.5e-3, 1.0),
    PeerTiming("here", "down", "QuACK", "256 x 128", 3.0, 2.9, 3.2, 400.0, None, 1.5),
    PeerTiming("FP8", "masked", OURS, "", 2.0, 1.9, 2.2, 600.0, 1.5e-3, 1.0),
]


def test_a_table_for_each_case():
    first, second = peers.peer_tables(TIMINGS)
    assert first.row_count == 2 and second.row_count == 1 and first.title == "here"
    cells = [list(column.cells) for column in first.columns]
    assert cells[1] == [OURS, "QuACK (256 x 128)"]
    assert cells[5] == ["1.50e-03", "not finite"] and cells[6] == ["", "1.50 x as fast"]


def compared(case, seconds):
    print("a peer talks")
    yield Compared(TIMINGS[:2], None, [f"{case.label}, down: it left out, Error: why"])


@pytest.fixture
def known(monkeypatch, install):
    """One peer that is installed, one that is not, one that cannot be imported."""
    install("here_it_is")
    made = {
        name: Peer(name, package, f"pip install {package}", compared)
        for name, package in (("A", "here_it_is"), ("B", "no_such_package"), ("C", "this_breaks"))
    }
    original = importlib.util.find_spec
    found = {"this_breaks": ModuleSpec("this_breaks", None)}
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: found.get(name) or original(name)
    )
    monkeypatch.setattr(peers, "PEERS", made)
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(parity, "environment", lambda _: "a card")


def test_missing_peers_are_notes_that_say_how_to_install_them(known, capsys, tmp_path):
    arguments = ["--shape", "tiny_qwen3", "--tokens", "8", "16", "--csv", str(tmp_path / "t.csv")]
    assert main(["bench", "--peers", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "a peer talks" in err and len(found["timings"]) == 4
    assert found["notes"][:2] == [
        "tiny_qwen3, 8 tokens, down: it left out, Error: why",
        "To install A: pip install here_it_is",
    ]
    assert found["notes"][3] == ("B is not installed. To install it: pip install no_such_package")
    assert found["notes"][4].startswith("C cannot be imported, ")
    assert found["notes"][4].endswith("To install it: pip install this_breaks")
    assert len(found["notes"]) == 5 and len((tmp_path / "t.csv").read_text().splitlines()) == 5
    assert main(["bench", "peers", *arguments[:4], "--routing", "hot"]) == 0
    out = capsys.readouterr().out
    assert "note: tiny_qwen3, 8 tokens, hot routing: the busiest expert has" in out
    assert "1.50 x as fast" in out and "note: B is not installed" in out


def measured(monkeypatch, one, **more):
    options = {"shape": ["tiny_qwen3"], "tokens": [8], "routing": None, "only": None}
    options |= {"seconds": None, "csv": None}
    run = Run(argparse.Namespace(**options | more), Progress(disable=True))
    monkeypatch.setattr(peers, "PEERS", {one.name: one})
    return run, peers.KIND.measure(run)


def test_a_report_that_fails_ends_the_run(known, monkeypatch):
    report = ParityReport([Section("", "bfloat16", 8, [Row("out", False)])], "a card")
    one = Peer("A", "here_it_is", "pip", lambda *_: iter([Compared([], report)]))
    run, found = measured(monkeypatch, one)
    assert found is report and not run.rows


def test_too_little_memory_and_a_lost_gpu_are_notes(known, monkeypatch):
    def short(*_):
        yield Compared(TIMINGS[:1])
        raise torch.OutOfMemoryError("too much")

    run, found = measured(monkeypatch, Peer("A", "here_it_is", "pip", short))
    assert found is None and len(run.rows) == 1 and "A skipped, the GPU has too" in run.notes[0]

    def lost(*_):
        raise compare.LostDevice("the GPU is lost after E: x")

    run, found = measured(monkeypatch, Peer("A", "here_it_is", "pip", lost), tokens=[8, 16])
    assert found is None and len(run.notes) == 1 and "rows after it were not" in run.notes[0]


@pytest.mark.parametrize(
    "more, words",
    [
        ("--only Unknown", "invalid choice: 'Unknown'"),
        ("--shape gpt5", "unknown shape 'gpt5'"),
        ("--routing nowhere", "--routing is 'nowhere'"),
        ("--seconds 0", "'0' is not a whole number"),
        ("--mode forward", "takes no --mode"),
    ],
)
def test_usage_errors_are_one_sentence(capsys, more, words):
    assert main(["bench", "--peers", *more.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_nothing_of_a_peer_is_imported_before_it_runs():
    code = """
import sys
import moe_patch
from moe_patch.bench import fp8, lora, peers
from moe_patch.commands import bench
bench.parse(["peers"]), bench.parse(["--peers"]), bench.parse(["fp8"])
print(sorted({name.split(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""
    names = [peer.package for peer in peers.PEERS.values()]
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
