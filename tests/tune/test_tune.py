"""tune: tiles that are tried, what is written and when, limits, Ctrl-C; its clock needs a GPU."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from moe_patch import kernels, tune
from moe_patch.__main__ import main
from moe_patch.commands import running
from moe_patch.commands import tune as command
from moe_patch.kernels import chips, table, tiles
from moe_patch.tune import blocks, measure, plan
from moe_patch.tune.plan import Limit, TimeUp

CPU = torch.device("cpu")
TINY = blocks.find("tiny_qwen3")


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
    monkeypatch.setattr(command, "_device", lambda: CPU)
    few = measure.candidates
    monkeypatch.setattr(measure, "candidates", lambda *a: [a[1], *few(*a)[-2:]])
    monkeypatch.setattr(
        measure, "times", lambda calls, n: {t: 1 / i for i, t in enumerate(calls, 1)}
    )
    return tmp_path / "tiles.json"


class Clock:
    """Seconds that pass with each look at it."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    try:
        code = main(["tune", *arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def tiny(*arguments, tokens=("24",), shape="tiny_qwen3"):
    return ("--shape", shape, "--dtype", "fp32", "--tokens", *tokens, *arguments)


def written(path):
    (found,) = table.read(path)
    return found["tiles"]


def entry_of(part, block=TINY, tokens=16):
    found = plan.entries([block], torch.float32, tokens=[tokens], backward=True)
    return next(entry for entry in found if entry.part == part)


# What is measured and written


@pytest.mark.parametrize("shape", ("tiny_qwen3", "tiny_llama4"))
def test_every_kernel_is_tuned_and_written(capsys, interpreted, shape):
    code, out, _ = run(capsys, *tiny("--backward", shape=shape))
    assert code == 0 and f"6 new entries in {interpreted}" in out
    found = written(interpreted)
    kernels = sorted(name.split(" n")[0] for name in found)
    expected = ["dgate", "dw_gathered", "dw_gathered", "gate_up", "gemm", "gemm"]
    assert kernels == [f"{name} float32" for name in expected]
    block = blocks.find(shape)
    rows = 24 * block.top_k // block.experts
    for n, k in ((48, 64), (96, 64)):
        assert table.key("dw_gathered", "float32", n, k, 128, rows) in found


def test_the_kernels_of_fp8_weights_are_tuned(capsys, interpreted):
    code, out, _ = run(capsys, *tiny("--backward", "--fp8"))
    assert code == 0 and "4 new entries" in out
    found = sorted(name.split(" float32")[0] for name in written(interpreted))
    assert found == ["dgate_w8", "gate_up_w8", "gemm_w8", "gemm_w8"]
    code, _, err = run(capsys, *tiny("--backward", "--fp8", "--kernel", "dw_gathered"))
    assert code == 2 and "--kernel dw_gathered leaves nothing to tune" in err


@pytest.mark.parametrize("fp8", (False, True))
@pytest.mark.parametrize("part", ("gate_up", "down", "d_x", "d_gate_up", "d_act", "d_down"))
@pytest.mark.parametrize("name", ("tiny_qwen3", "tiny_llama4"))
def test_a_part_looks_up_the_tile_under_its_key(interpreted, monkeypatch, name, part, fp8):
    """An entry that no launcher asks for would be measured for nothing."""
    block, asked = blocks.find(name, fp8=fp8), []
    if fp8 and part in ("d_gate_up", "d_down"):
        return
    full, small = measure.operands(block, 24, torch.float32, CPU, True)

    def ask(kernel, bm, rows, n, k, dtype, device):
        asked.append(table.key(kernel, "float32", n, k, bm, rows))
        return tiles.heuristic(tiles.Product(kernel, bm, rows, n, k, dtype, device))

    monkeypatch.setattr(tiles, "_choose", ask)
    entry = entry_of(part, block, 24)
    out = measure.run(entry, full)
    assert asked == [entry.key] and out.isfinite().all()
    with tiles.forced(entry.kernel, tiles.Tile(16, 16, 16, 4, 1)):
        assert measure.right(measure.run(entry, full), out)
    assert len(small.gate_up) == 1 and measure.run(entry, small).isfinite().all()
    assert len(asked) == 2, "a forced tile is not looked up"


def test_an_ungated_block_is_a_gemm(interpreted):
    block = blocks.Block("x", 64, 48, 8, 2, activation="relu2 None 1.0 0.0 ungated")
    full, _ = measure.operands(block, 24, torch.float32, CPU, True)
    found = plan.entries([block], torch.float32, tokens=[24], backward=True)
    parts = [entry.part for entry in found]
    assert parts == ["gate_up", "down", "d_gate_up", "d_act"], "the others' keys are the same"
    assert found[0].kernel == "gemm"
    for entry in found:
        assert measure.run(entry, full).isfinite().all()
    same = measure.Measured(None, 2.0, None, 1.0, 0.0, 0.0)
    results = [tune.Result(entry, same, 8) for entry in found]
    assert command.summed(results, False) == command.summed(results, True) == [50]


def test_a_tile_that_computes_otherwise_or_starts_not_is_out(interpreted, monkeypatch):
    entry, tried, real = entry_of("down"), [], measure.run
    start = tiles.Tile(16, 32, 32, 4, 1)
    wrong, nan, fine = (tiles.Tile(16, bn, 32, 4, 1) for bn in (16, 64, 128))
    full, small = measure.operands(TINY, 16, torch.float32, CPU, False)

    def broken(entry, operands):
        tile = tiles.choose("gemm", 16, 4, 64, 48, torch.float32, CPU)
        tried.append(tile)
        out = real(entry, operands)
        out[-1, -1] *= float("nan") if tile == nan else 1.5 if tile == wrong else 1
        return out

    monkeypatch.setattr(measure, "run", broken)
    after, ms = measure.fastest(entry, [start, wrong, nan, fine], start, full, Limit())
    assert after == fine and set(ms) == {start, fine}

    def refuses(entry, operands):
        if tiles.choose("gemm", 16, 4, 64, 48, torch.float32, CPU) in (wrong, start):
            raise RuntimeError("out of resource")
        return real(entry, operands)

    monkeypatch.setattr(measure, "run", refuses)
    refused = "RuntimeError: out of resource"
    found = measure.compiled(entry, [start, wrong, fine], small, Limit())
    assert found == {start: refused, wrong: refused, fine: ""}


def test_a_tile_in_use_that_does_not_start_is_replaced(capsys, interpreted, monkeypatch):
    real, chosen = (
        measure.run,
        tiles.heuristic(tiles.Product("gemm", 16, 4, 64, 48, torch.float32, CPU)),
    )

    def refuses(entry, operands):
        if tiles.choose("gemm", 16, 4, 64, 48, torch.float32, CPU) == chosen:
            raise RuntimeError("out of resource")
        return real(entry, operands)

    monkeypatch.setattr(measure, "run", refuses)
    code, out, _ = run(capsys, *tiny("--kernel", "gemm", tokens=["16"]))
    (tile,) = written(interpreted).values()
    assert code == 0 and tiles.Tile(*tile) != chosen and "does not start" in " ".join(out.split())
    monkeypatch.setattr(measure, "run", lambda *_: chosen.nothing)
    code, out, _ = run(capsys, *tiny("--kernel", "gemm", "--again", tokens=["16"]))
    assert code == 0 and "0 new entries" in out
    assert "no tile starts" in " ".join(out.split()) and "AttributeError" in out


def test_little_gain_keeps_the_tile_in_use(interpreted, monkeypatch):
    entry = entry_of("down")
    full, _ = measure.operands(TINY, 16, torch.float32, CPU, False)
    start, other = tiles.Tile(16, 32, 32, 4, 1), tiles.Tile(16, 16, 32, 4, 1)
    for share, best in ((0.985, start), (0.975, other)):
        monkeypatch.setattr(measure, "times", lambda calls, n, s=share: {start: 1.0, other: s})
        assert measure.fastest(entry, [start, other], start, full, Limit())[0] == best


def test_before_is_what_the_library_uses_now(interpreted, monkeypatch):
    entry = entry_of("down")
    full, small = measure.operands(TINY, 16, torch.float32, CPU, False)
    mine = tiles.Tile(16, 64, 16, 4, 1)
    monkeypatch.setattr(tiles, "_choose", lambda *_: mine)
    monkeypatch.setattr(measure, "times", lambda calls, n: dict.fromkeys(calls, 1.0))
    found = measure.measure(entry, full, small, torch.float32, Limit())
    assert found.before == found.after == mine


# How long it takes


def test_a_second_run_skips_what_is_there(capsys, interpreted, monkeypatch):
    assert run(capsys, *tiny(tokens=["8"]))[0] == 0
    before = interpreted.read_text()
    monkeypatch.setattr(measure, "operands", lambda *_: pytest.fail("it is there"))
    code, out, _ = run(capsys, *tiny(tokens=["8"]))
    assert code == 0 and "0 new entries" in out and "skipped 2 entries" in out
    assert "--again" in out and interpreted.read_text() == before
    monkeypatch.undo()


def test_again_measures_anew_and_more_tokens_add(capsys, interpreted, monkeypatch):
    run(capsys, *tiny(tokens=["8"]))
    code, out, _ = run(capsys, *tiny(tokens=["8", "100"]))
    assert code == 0 and "2 new entries" in out and "skipped 2" in out
    assert len(written(interpreted)) == 4
    code, out, _ = run(capsys, *tiny("--again", tokens=["8"]))
    assert code == 0 and "2 new entries" in out and "skipped" not in out
    assert len(written(interpreted)) == 4


def test_entries_of_another_triton_or_card_are_no_reason_to_skip(capsys, interpreted):
    run(capsys, *tiny())
    for change in ({"triton": "2.0.0"}, {"card": "Another"}):
        content = json.loads(interpreted.read_text())
        content[0] |= change
        interpreted.write_text(json.dumps(content[:1]))
        code, out, _ = run(capsys, *tiny())
        assert code == 0 and "2 new entries" in out and "skipped" not in out, change
        content = json.loads(interpreted.read_text())
        interpreted.write_text(json.dumps([one for one in content if one["card"] == "A card"]))


def test_the_limit_ends_the_run_between_candidates(interpreted):
    todo = plan.entries([TINY], torch.float32, tokens=[8, 100], backward=True)
    path, _ = tune.open_file(None, CPU)
    reached = []
    for seconds in (1, 6, 20, 40, 1000):
        clock = Clock(1)
        found = list(tune.tune(todo, torch.float32, path, CPU, limit=Limit(seconds, clock)))
        assert [result.entry for result in found] == todo[: len(found)]
        assert clock.now <= seconds + 3, "nothing is measured once the limit is reached"
        assert all(result.measured for result in found)
        reached.append(len(found))
    assert reached[0] == 0 and 0 < reached[2] < 12 and reached[-1] == 12
    assert reached == sorted(reached)


@pytest.mark.parametrize("step", ("compiled", "fastest"))
def test_no_candidate_is_run_after_the_limit(interpreted, monkeypatch, step):
    """Each run takes a second."""
    now, real, entry = [0.0], measure.run, entry_of("down")
    full, small = measure.operands(TINY, 16, torch.float32, CPU, False)
    tried = [tiles.Tile(16, bn, 16, 4, 1) for bn in (16, 32, 64, 128)]

    def run(*arguments):
        now[0] += 1
        return real(*arguments)

    monkeypatch.setattr(measure, "run", run)
    limit = Limit(2, lambda: now[0])
    with pytest.raises(TimeUp):
        if step == "compiled":
            measure.compiled(entry, tried, small, limit)
        else:
            measure.fastest(entry, tried, tried[0], full, limit)
    assert now == [2]


def test_what_was_not_reached_is_said_with_the_command_that_continues(
    capsys, interpreted, monkeypatch
):
    clock = Clock(1)
    monkeypatch.setattr(command, "Limit", lambda seconds: Limit(seconds, clock))
    arguments = tiny("--minutes", "0.3", "--backward", tokens=["8", "100"])
    code, out, _ = run(capsys, *arguments)
    out = " ".join(out.split())
    assert code == 0 and "not reached: " in out and " of 12 entries, of tiny_qwen3 at " in out
    line = out.split("to continue: ")[1]
    assert line == (
        "python -m moe_patch tune --shape tiny_qwen3 --tokens 8 100 --dtype fp32 "
        "--minutes 0.3 --backward"
    )
    done = len(written(interpreted))
    assert 0 < done < 12
    for _ in range(20):
        clock.now = 0.0
        code, out, _ = run(capsys, *line.split()[4:])
        assert code == 0 and f"skipped {done} entries" in out
        done = len(written(interpreted))
        if done == 12:
            break
    assert done == 12 and "not reached" not in out


def test_again_continues_with_the_tokens_that_are_left():
    options = command.parse([*tiny("--again", tokens=["8", "100"]), "--output", "my file"])
    todo = plan.entries([TINY], torch.float32, tokens=[8, 100])
    (line,) = command.commands(options, todo[2:])
    assert line == (
        "python -m moe_patch tune --shape tiny_qwen3 --tokens 100 --dtype fp32 "
        "--output 'my file' --again"
    )
    said = command.listed(todo[2:])
    assert said == "of tiny_qwen3 at 25 rows an expert (gate_up, gemm)"


def test_the_bar_shows_the_time_that_is_left():
    class Task:
        time_remaining = None

    column = command.Left(Limit(100, lambda: 0.0))
    assert str(column.render(Task())) == "1:40 left"
    Task.time_remaining = 9
    assert str(column.render(Task())) == "0:09 left"


def test_ctrl_c_leaves_what_was_measured(capsys, interpreted, monkeypatch):
    clock, calls = measure.times, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # two calls an entry
            raise KeyboardInterrupt
        return clock(*arguments)

    monkeypatch.setattr(measure, "times", stop)
    code, out, err = run(capsys, *tiny(tokens=["8", "100"]))
    assert code == 130 and f"stopped: 2 new entries in {interpreted}" in out
    assert "not reached: 2 of 4" in out and "Traceback" not in err
    assert len(written(interpreted)) == 2


# Memory


def test_where_it_does_not_fit_fewer_experts_are_measured(capsys, interpreted, monkeypatch):
    four = plan.needed(TINY, 24, torch.float32, False) - 1
    built, real = [], measure.operands
    monkeypatch.setattr(tune, "_free", lambda device: four)
    monkeypatch.setattr(measure, "operands", lambda *a: built.append(a[:2]) or real(*a))
    code, out, _ = run(capsys, *tiny())
    ((block, tokens),) = built
    assert code == 0 and block.experts < 8 and tokens < 24
    assert f"measured with {block.experts} of its 8 experts" in " ".join(out.split())
    rows = 24 * 2 // 8
    assert table.key("gate_up", "float32", 48, 64, 16, rows) in written(interpreted)


def test_too_little_memory_is_a_note(capsys, interpreted, monkeypatch):
    monkeypatch.setattr(tune, "_free", lambda device: 1000)
    code, out, _ = run(capsys, *tiny("--kernel", "gemm"))
    assert code == 0 and "0 new entries" in out and "too little memory" in " ".join(out.split())


def test_memory_that_another_program_took_is_a_note_too(capsys, interpreted, monkeypatch):
    real = measure.operands

    def operands(block, tokens, *rest):
        if tokens > 50:
            raise torch.OutOfMemoryError("")
        return real(block, tokens, *rest)

    monkeypatch.setattr(measure, "operands", operands)
    code, out, _ = run(capsys, *tiny("--kernel", "gemm", tokens=["99", "8"]))
    assert code == 0 and "1 new entries" in out and "too little memory" in " ".join(out.split())


# The command


def test_what_it_gained(capsys):
    def result(entry, before_ms, after_ms):
        tile = tiles.Tile(64, 64, 32, 4, 3), tiles.Tile(64, 128, 32, 8, 2)
        found = measure.Measured(tile[0], before_ms, tile[1], after_ms, 3.0, 1.0)
        return tune.Result(entry, found, entry.block.experts)

    todo = plan.entries([TINY], torch.float32, tokens=[8, 100], backward=True)
    ms = {"gate_up": (2, 1), "down": (2, 2), "d_x": (1, 1), "d_gate_up": (1, 0.5)}
    ms |= {"d_act": (1, 1), "d_down": (1, 1)}
    results = [result(e, *ms[e.part]) for e in todo if e.part != "d_down" or e.tokens == 8]
    assert command.summed(results, False) == [25, 25]
    assert command.summed(results, True) == [12.5], "nothing of a backward that is not whole"
    results[1] = result(todo[1], math.inf, 1)
    assert command.summed(results, False) == [25]
    command.show(results)
    out = " ".join(capsys.readouterr().out.split())
    assert "tiny_qwen3: summed at each number of rows, the kernels of one forward take 25 %" in out
    assert "the kernels of one backward take 12 % less time" in out
    assert "64x64x32 w4 s3 g8" in out and "64x128x32 w8 s2 g8" in out and "50 %" in out
    assert "does not start" in out


def test_output_file(capsys, interpreted, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text("[]")
    arguments = tiny("--output", str(mine), tokens=["8"])
    assert run(capsys, *arguments)[0] == 0
    assert len(json.loads(mine.read_text())[0]["tiles"]) == 2 and not interpreted.exists()
    mine.write_text("my thesis")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "is not overwritten" in err and mine.read_text() == "my thesis"
    code, _, err = run(capsys, *tiny("--output", str(mine / "below"), tokens=["8"]))
    assert code == 2 and "cannot be written" in err


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "tune needs a GPU"),
        ("--shape gpt5", "unknown shape 'gpt5'"),
        ("--shape gpt5", "a checkpoint's folder or its config.json"),
        ("--shape no/such/folder", "no model config at 'no/such/folder'"),
        ("--kernel dgate", "add --backward"),
        ("--kernel conv", "invalid choice"),
        ("--tokens 0", "is not a whole number from 1"),
        ("--minutes 0", "'0' is not a number of minutes above 0"),
        ("--minutes inf", "'inf' is not a number of minutes above 0"),
        ("--minutes two", "'two' is not a number of minutes above 0"),
    ],
)
def test_refusals(capsys, monkeypatch, line, words):
    monkeypatch.setattr(running, "device", lambda: "cpu")
    code, out, err = run(capsys, *line.split())
    assert code == 2 and not out and words in err and err.count("\n") == 1


# Candidates


@pytest.mark.parametrize("shared", (65_536, 101_376, 232_448))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("bm", (16, 32, 64, 128))
def test_candidates_are_few_and_fit(monkeypatch, shared, dtype, bm):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, shared))
    for kernel in (*plan.KERNELS, "gate_up_w8", "gemm_w8", "dgate_w8"):
        scaled = kernel.endswith("_w8")
        for n in (48, 768):
            start = tiles.heuristic(
                tiles.Product(kernel, bm, 64, n, 2048, dtype, torch.device("cuda"))
            )
            found = measure.candidates(kernel, start, n, 2048, dtype, shared)
            assert found[0] == start and len(set(found)) == len(found) <= 24
            assert n < 768 or len(found) >= 4, kernel
            for tile in found[1:]:
                columns = tile.bn * (2 if kernel.startswith("gate_up") else 1)
                stages = max(1, tile.stages - (2 if kernel == "dw_gathered" else 0))
                size = dtype.itemsize
                loaded = (tile.bm * size + columns * (1 if scaled else size)) * tile.bk
                widened = columns * tile.bk * size if scaled else 0
                assert stages * loaded + widened <= shared - 4096
                sums = tile.bm * columns * (2 if scaled else 1)
                assert sums <= 192 * 32 * tile.warps and tile.bn < 2 * max(n, 16)
                assert tile.bm == bm or kernel.startswith("dw")
                assert not scaled or 128 % tile.bk == 0
                height = 128 if kernel.startswith("dw") else bm
                name = table.key(kernel, str(dtype)[6:], n, 2048, height, 64)
                assert table._valid(name, [*vars(tile).values()])


def test_limit():
    now = [0.0]
    limit = Limit(3, lambda: now[0])
    limit.check()
    now[0] = 2.5
    assert limit.left() == 0.5
    limit.check()
    now[0] = 4.0
    assert limit.left() == 0
    with pytest.raises(TimeUp):
        limit.check()
    assert Limit().left() == math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", (False, True))
@pytest.mark.parametrize("shape", ("tiny_qwen3", "tiny_llama4"))
def test_the_library_uses_what_was_measured(tmp_path, monkeypatch, shape, fp8):
    monkeypatch.setenv("MOE_PATCH_CACHE", str(tmp_path))
    tiles.forget()
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    block = blocks.find(shape, fp8=fp8)
    todo = plan.entries([block], dtype, tokens=[64, 512], backward=True)
    path, known = tune.open_file(None, device)
    results = list(tune.tune(todo, dtype, path, device, limit=Limit()))
    assert not known and len(results) == len(todo) == (8 if fp8 else 12)
    for entry, found, *_ in (vars(result).values() for result in results):
        assert 0 < found.after_ms <= found.before_ms and found.compile_s > 0
        arguments = (entry.kernel, entry.height, entry.rows, entry.n, entry.k, dtype, device)
        assert tiles.measured(tiles.Product(*arguments)) == found.after == tiles.choose(*arguments)
    assert tune.open_file(None, device)[1] == {entry.key for entry in todo}
    monkeypatch.undo()
    tiles.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", (False, True))
@pytest.mark.parametrize("backward", (False, True))
def test_no_more_memory_is_taken_than_foreseen(backward, fp8):
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    block = blocks.Block("x", 1024, 512, 32, 4, fp8=fp8)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    full, small = measure.operands(block, 2048, dtype, device, backward)
    for entry in plan.entries([block], dtype, tokens=[2048], backward=backward):
        if entry.backward == backward:
            measure.measure(entry, full, small, dtype, Limit())
    taken = torch.cuda.max_memory_allocated(device) - before
    assert plan.FLUSHED < taken <= plan.needed(block, 2048, dtype, backward)
