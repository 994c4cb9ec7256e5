"""tune: candidates, what is written and when, Ctrl-C, refusals; its clock needs a GPU."""

from __future__ import annotations

import json
import os

import pytest
import torch

from moe_patch import kernels, tune
from moe_patch.__main__ import main
from moe_patch.commands import running
from moe_patch.kernels import chips, table, tiles
from moe_patch.shapes import find

CPU = torch.device("cpu")


@pytest.fixture
def interpreted(tmp_path, monkeypatch):
    """The interpreter instead of the card, which `times` would time: the last tile is fastest."""
    if not tiles.INTERPRET:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("MOE_PATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(chips, "name", lambda device: "A card")
    monkeypatch.setattr(chips, "chip", lambda device: chips.Chip("sm_90", 1 << 20))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # its state is global: one thread
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(kernels, "why_not", lambda kind: None)
    few = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda *a: [a[1], *few(*a)[-2:]])
    monkeypatch.setattr(tune, "times", lambda calls, n: {t: 1 / i for i, t in enumerate(calls, 1)})
    real = tune.tune
    monkeypatch.setattr(tune, "tune", lambda *a, **k: real(*a, **k, device=CPU))
    return tmp_path / "tiles.json"


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    try:
        code = main(["tune", *arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("shape", ("tiny_qwen3", "tiny_llama4"))
def test_every_kernel_is_tuned_and_written(capsys, interpreted, shape):
    code, out, _ = run(capsys, "--shape", shape, "--tokens", "24", "--dtype", "fp32", "--backward")
    assert code == 0 and f"6 entries in {interpreted}" in out
    (found,) = table.read(interpreted)
    kernels = sorted(name.split(" n")[0] for name in found["tiles"])
    expected = ["dgate", "dw_gathered", "dw_gathered", "gate_up", "gemm", "gemm"]
    assert kernels == [f"{name} float32" for name in expected]
    shape = find(shape)
    rows = 24 * shape.top_k // shape.num_experts
    for n, k in ((48, 64), (96, 64)):
        assert table.key("dw_gathered", "float32", n, k, 128, rows) in found["tiles"]


def test_a_tile_that_computes_otherwise_or_starts_not_is_out(interpreted, monkeypatch):
    job, tried = tune.jobs(find("tiny_qwen3"), False)[1], []
    start = tiles.Tile(16, 32, 32, 4, 1)
    wrong, nan, fine = (tiles.Tile(16, bn, 32, 4, 1) for bn in (16, 64, 128))
    full, small = tune.operands(find("tiny_qwen3"), 16, torch.float32, CPU, False)

    def broken(operands):
        tile = tiles.choose("gemm", 16, 4, 64, 48, torch.float32, CPU)
        tried.append(tile)
        out = job.run(operands)
        out[-1, -1] *= float("nan") if tile == nan else 1.5 if tile == wrong else 1
        return out

    replaced = tune.Job("gemm", 64, 48, broken)
    before, after, ms = tune._measure(replaced, [start, wrong, nan, fine], full)
    assert before == start and after == fine and set(ms) == {start, fine}

    def refuses(operands):
        if tiles.choose("gemm", 16, 4, 64, 48, torch.float32, CPU) in (wrong, start):
            raise RuntimeError("out of resource")

    monkeypatch.setattr(tune, "candidates", lambda *a: [start, wrong, fine])
    arguments = ([tune.Job("gemm", 64, 48, refuses)], small, full, 4, torch.float32, CPU)
    assert tune._compile(*arguments) == [[tiles.heuristic(*_gemm()), fine]]


def _gemm():
    return "gemm", 16, 4, 64, 48, torch.float32, CPU


def test_little_gain_keeps_the_heuristic(interpreted, monkeypatch):
    job = tune.jobs(find("tiny_qwen3"), False)[1]
    full, _ = tune.operands(find("tiny_qwen3"), 16, torch.float32, CPU, False)
    start, other = tiles.Tile(16, 32, 32, 4, 1), tiles.Tile(16, 16, 32, 4, 1)
    for share, best in ((0.985, start), (0.975, other)):
        monkeypatch.setattr(tune, "times", lambda calls, n, s=share: {start: 1.0, other: s})
        assert tune._measure(job, [start, other], full)[:2] == (start, best)


def test_ctrl_c_leaves_what_was_measured(capsys, interpreted, monkeypatch):
    clock, calls = tune.times, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # two calls an entry
            raise KeyboardInterrupt
        return clock(*arguments)

    monkeypatch.setattr(tune, "times", stop)
    code, out, err = run(capsys, "--shape", "tiny_qwen3", "--tokens", "8", "100", "--dtype", "fp32")
    assert code == 130 and f"stopped: 2 entries in {interpreted}" in out and "Traceback" not in err
    (found,) = table.read(interpreted)
    assert len(found["tiles"]) == 2
    monkeypatch.setattr(tune, "times", clock)
    assert run(capsys, "--shape", "tiny_qwen3", "--tokens", "100", "--dtype", "fp32")[0] == 0
    assert len(table.read(interpreted)[0]["tiles"]) == 4, "tuning more adds"


def test_too_little_memory_is_a_note(capsys, interpreted, monkeypatch):
    real = tune.operands

    def operands(shape, tokens, *rest):
        if tokens > 50:
            raise torch.OutOfMemoryError("")
        return real(shape, tokens, *rest)

    monkeypatch.setattr(tune, "operands", operands)
    code, out, _ = run(
        capsys,
        "--shape",
        "tiny_qwen3",
        "--tokens",
        "99",
        "8",
        "--dtype",
        "fp32",
        "--kernel",
        "gemm",
    )
    assert code == 0 and "1 entries" in out and "skipped" in out


def test_output_file(capsys, interpreted, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text("[]")
    arguments = ("--shape", "tiny_qwen3", "--tokens", "8", "--dtype", "fp32", "--output", str(mine))
    assert run(capsys, *arguments)[0] == 0
    assert len(json.loads(mine.read_text())[0]["tiles"]) == 2 and not interpreted.exists()
    mine.write_text("my thesis")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "is not overwritten" in err and mine.read_text() == "my thesis"
    code, _, err = run(capsys, *arguments[:-1], str(mine / "below"))
    assert code == 2 and "cannot be written" in err


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "tune needs a GPU"),
        ("--shape gpt5", "unknown shape 'gpt5'"),
        ("--kernel dgate", "add --backward"),
        ("--kernel conv", "invalid choice"),
        ("--tokens 0", "is not a whole number from 1"),
    ],
)
def test_refusals(capsys, monkeypatch, line, words):
    monkeypatch.setattr(running, "device", lambda: "cpu")
    code, out, err = run(capsys, *line.split())
    assert code == 2 and not out and words in err


@pytest.mark.parametrize("shared", (65_536, 101_376, 232_448))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("bm", (16, 32, 64, 128))
def test_candidates_are_few_and_fit(monkeypatch, shared, dtype, bm):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, shared))
    for kernel in (*tune.FORWARD, *tune.BACKWARD):
        for n in (48, 768):
            start = tiles.heuristic(kernel, bm, 64, n, 2048, dtype, torch.device("cuda"))
            found = tune.candidates(kernel, start, n, 2048, dtype, shared)
            assert found[0] == start and len(set(found)) == len(found) <= 20
            assert n < 768 or len(found) >= 4
            for tile in found[1:]:
                columns = tile.bn * (2 if kernel == "gate_up" else 1)
                stages = max(1, tile.stages - (2 if kernel == "dw_gathered" else 0))
                assert stages * (tile.bm + columns) * tile.bk * dtype.itemsize <= shared - 4096
                assert tile.bm * columns <= 192 * 32 * tile.warps and tile.bn < 2 * max(n, 16)
                assert tile.bm == bm or kernel.startswith("dw")
                height = 128 if kernel.startswith("dw") else bm
                name = table.key(kernel, str(dtype)[6:], n, 2048, height, 64)
                assert table._valid(name, [*vars(tile).values()])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ("tiny_qwen3", "tiny_llama4"))
def test_the_library_uses_what_was_measured(tmp_path, monkeypatch, shape):
    monkeypatch.setenv("MOE_PATCH_CACHE", str(tmp_path))
    tiles.forget()
    results = list(tune.tune([shape], [64, 1024], backward=True))
    assert len(results) == 12 and not any(result.note for result in results)
    device = torch.device("cuda", torch.cuda.current_device())
    for r in results:
        assert 0 < r.after_ms <= r.before_ms and r.compile_s > 0
        slots = r.tokens * find(shape).top_k
        height = tiles.block_m(slots, find(shape).num_experts, torch.bfloat16)
        height = 128 if r.kernel.startswith("dw") else height
        arguments = (height, r.rows, r.n, r.k, torch.bfloat16, device)
        assert tiles.measured(r.kernel, *arguments) == r.after
        assert tiles.choose(r.kernel, *arguments) == r.after
    monkeypatch.undo()
    tiles.forget()
