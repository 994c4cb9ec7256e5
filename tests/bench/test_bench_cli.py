"""python -m moe_patch bench: what it refuses, prints, writes and draws; nothing is timed here."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch
from timings import H200, timing

from moe_patch import parity
from moe_patch.__main__ import main
from moe_patch.bench import block as bench
from moe_patch.bench import picture
from moe_patch.bench.block import OURS, Result
from moe_patch.bench.kind import kinds, write_csv
from moe_patch.bench.picture import figure
from moe_patch.commands import bench as command
from moe_patch.commands import running
from moe_patch.commands.bench import to_json
from moe_patch.parity import ParityReport, Row, Section
from moe_patch.usage import UsageError


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    return main(["bench", *map(str, arguments)]), *capsys.readouterr()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape", "gpt5"], "unknown shape 'gpt5'"),
        (["--model-config", "no/such.json"], "no model config at 'no/such.json'"),
        (["--layers", "2"], "--model-config"),
        (["--model-config", "x.json", "--shape", "tiny_qwen3"], "takes no --shape"),
        (["--model-config", "x.json", "--no-eager"], "takes no --no-eager"),
        (["--distributed"], "torchrun --nproc-per-node 2"),
        (["--distributed", "--graph"], "--distributed times a model over ranks and takes no"),
        (["--distributed", "--shape", "llama4_scout"], "llama4_scout is not"),
        (["--distributed", "--tokens", "1", "2"], "one number of --tokens"),
        (["--png", "no/such/folder/t.png"], "no folder for 'no/such/folder/t.png'"),
    ],
)
def test_usage_errors_are_one_sentence(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it ran"))
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and len(err.splitlines()) == 1 and words in err


def test_png_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    code, _, err = run(capsys, "--png", "t.png")
    assert code == 2 and "moe_patch[bench]" in err


@pytest.fixture
def rows(monkeypatch):
    """What the command asks bench.bench for; answers come from `rows.answer`."""
    asked = []

    def answer(name, tokens, mode, dtype, eager, compiled, graph, routing):
        asked.append((name, tokens, mode, dtype, eager, compiled, graph, routing))
        report = ParityReport([Section("", "bfloat16", 8, [Row("output", True)])], "a card")
        memory = {"kept_mb": 29.5, "peak_mb": 1300.0} if mode == "backward" else {}
        made = [
            timing(n, tokens, mode, name, ms, **memory) for n, ms in ((OURS, 2.0), ("HF eager", 9))
        ]
        return Result(made, report, [f"{name} {tokens}: HF dense left out, tired"])

    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(bench, "bench", answer)
    monkeypatch.setattr(bench, "ceilings", lambda dtype: H200)
    monkeypatch.setattr(parity, "environment", lambda device: f"a card, {device}")
    return asked


def test_command_prints_tables_ceilings_and_notes(capsys, rows):
    code, out, _ = run(capsys, "--shape", "qwen3_30b", "--tokens", 64, 1024)
    assert code == 0
    assert [row[:3] for row in rows] == [
        ("qwen3_30b", tokens, mode) for mode in bench.MODES for tokens in (64, 1024)
    ]
    assert out.startswith("moe_patch bench on a card, cuda\n")
    assert out.count("802 TFLOP/s (bfloat16 matmul), 4.29 TB/s (copy)") == 1
    assert out.count("limit 1.000 ms") == 4 and out.count("4.50 x as fast") == 4
    assert out.count("x limit") == 4 and out.count("kept MB") == out.count("peak MB") == 2
    assert out.count("29.5") == 4 and out.count(" 9.00 ") == 4
    assert out.count("note: qwen3_30b 64: HF dense left out, tired\n") == 2
    assert max(map(len, out.splitlines())) <= 120


def test_command_passes_its_options_on(capsys, rows):
    run(capsys, "--shape", "qwen3_30b", "--tokens", 1, "--graph", "--dtype", "fp16")
    assert rows == [
        ("qwen3_30b", 1, mode, torch.float16, True, True, True, "uniform") for mode in bench.MODES
    ]
    rows.clear()
    run(capsys, "--tokens", 1, "--mode", "backward", "--no-eager", "--no-compile")
    assert [row[1:] for row in rows] == [
        (1, "backward", torch.bfloat16, False, False, False, "uniform")
    ] * 2  # two shapes
    rows.clear()
    run(capsys, "--shape", "tiny_qwen3", "--tokens", 1, "--graph", "--routing", "zipf", "hot")
    assert [row[-1] for row in rows] == ["zipf", "hot"] * 2
    rows.clear()
    run(capsys, "--shape", "tiny_qwen3", "--mode", "forward")
    assert [row[1] for row in rows] == [1, 64, 1024, 4096]


def test_command_writes_its_files(capsys, rows, tmp_path):
    arguments = ("--shape", "qwen3_30b", "--tokens", 1, 64)
    files = [tmp_path / name for name in ("t.csv", "t.json", "t.png")]
    code, *_ = run(
        capsys, *arguments, "--csv", files[0], "--json", files[1], "--png", files[2]
    )  # fmt: skip
    assert code == 0
    with files[0].open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 8 and found[0]["kept_mb"] == "" and found[-1]["kept_mb"] == "29.5"
    loaded = json.loads(files[1].read_text())
    assert loaded["environment"] == "a card, cuda" and len(loaded["notes"]) == 4
    assert loaded["ceilings"] == [{"dtype": "bfloat16", "matmul_tflops": 802, "copy_tb_s": 4.29}]
    assert loaded["timings"][0]["limit_ms"] == 1.0
    assert files[2].read_bytes().startswith(b"\x89PNG\r\n")
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0 and len(json.loads(out)["timings"]) == 8


def test_command_goes_on_after_a_skipped_row(capsys, rows, monkeypatch, tmp_path):
    answer = bench.bench

    def short(name, tokens, **options):
        if tokens > 64:
            return Result([], None, [f"{name}, {tokens} tokens: skipped, too little memory"])
        return answer(name, tokens, **options)

    monkeypatch.setattr(bench, "bench", short)
    arguments = ("--shape", "qwen3_30b", "--mode", "forward", "--tokens")
    code, out, _ = run(capsys, *arguments, 99, 64)
    assert code == 0 and "note: qwen3_30b, 99 tokens: skipped" in out and "64 tokens; limit" in out
    code, out, _ = run(
        capsys, *arguments, 99, "--csv", tmp_path / "t.csv", "--png", tmp_path / "t.png"
    )
    assert code == 0 and "99 tokens: skipped" in out and "limit" not in out


def test_command_shows_no_times_when_parity_fails(capsys, rows, monkeypatch):
    report = ParityReport([Section("", "bfloat16", 8, [Row("output", False)])], "a card")
    monkeypatch.setattr(bench, "bench", lambda *_, **__: Result([], report, []))
    code, out, err = run(capsys)
    assert code == 1 and "parity FAILED" in out and "no times are shown" in err
    assert "TFLOP/s" not in out


def test_writers_take_any_dataclass(tmp_path):
    write_csv([H200], tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().split() == [
        "dtype,matmul_tflops,copy_tb_s",
        "bfloat16,802.0,4.29",
    ]
    loaded = json.loads(to_json([H200], environment="a card"))
    assert loaded["environment"] == "a card" and loaded["timings"][0]["copy_tb_s"] == 4.29


def test_figure_has_three_panels_a_mode_and_a_line_each():
    made = [
        timing(name, tokens, mode, ms=tokens / 64)
        for mode in ("forward", "backward")
        for tokens in (1024, 64)
        for name in (OURS, "HF grouped_mm")
    ]
    made.append(timing("HF batched_mm", 64))  # one point is enough
    drawing = figure(made)
    assert len(drawing.axes) == 6
    left, middle, right = drawing.axes[:3]
    lines = {line.get_label(): line for line in left.lines}
    assert list(lines) == [OURS, "HF grouped_mm", "HF batched_mm", "limit"]
    assert list(lines[OURS].get_xdata()) == [64, 1024]
    assert list(lines[OURS].get_ydata()) == [1, 16]
    assert list(lines["limit"].get_ydata()) == [1, 1] and lines["limit"].get_linestyle() == "--"
    # 600 TFLOP/s at 1 ms: the limit of 1 ms is 600 TFLOP/s, whatever the time was
    limit = next(line for line in right.lines if line.get_label() == "limit")
    assert list(limit.get_ydata()) == pytest.approx([600, 600])
    assert left.get_xscale() == left.get_yscale() == "log" and right.get_yscale() == "linear"
    assert "backward" in drawing.axes[3].get_title() and left.get_legend() is not None


def test_the_middle_panel_is_relative_to_hugging_faces_default():
    def drawn(default):
        made = [timing(n, t, ms=ms * t) for t in (1, 64) for n, ms in ((OURS, 2.0), (default, 8.0))]
        made.append(timing("HF eager", 64, ms=32.0 * 64))
        (_, middle, _) = figure(made).axes
        return middle, {line.get_label(): list(line.get_ydata()) for line in middle.lines}

    for default in ("HF grouped_mm", "HF dense", "HF grouped_mm, PEFT"):
        panel, lines = drawn(default)
        assert lines[OURS] == [0.25, 0.25] and lines[default] == [1, 1]
        assert lines["HF eager"] == [4] and lines["limit"] == [1 / 8, 1 / 512]
        assert panel.get_ylabel() == f"time relative to {default}" and panel.get_yscale() == "log"
        assert [text.get_text() for text in panel.texts] == ["4.0 x", "4.0 x"]
    panel, lines = drawn("HF batched_mm")
    assert "was not timed" in panel.get_ylabel() and not any(lines.values())


def test_a_picture_is_drawn_again_from_csv_files(capsys, tmp_path):
    made = [timing(n, t) for t in (1, 64) for n in (OURS, "HF grouped_mm")]
    made.append(timing(mode="backward", kept_mb=1.5, peak_mb=3.0))
    csv_file, png = tmp_path / "t.csv", tmp_path / "t.png"
    write_csv(made, csv_file)
    assert picture.read(csv_file) == made
    assert run(capsys, "picture", csv_file, csv_file, "--png", png) == (0, "", "")
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no rows"),
        ("task,ms\nstep,1\n", "has no 'shape'"),
        ("shape,tokens\nqwen3_30b,many\n", "is broken (invalid literal for int()"),
    ],
)
def test_a_picture_of_another_file_is_refused(capsys, tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    arguments = ("picture", tmp_path / "t.csv", "--png", tmp_path / "t.png")
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and len(err.splitlines()) == 1 and words in err, err
    assert not (tmp_path / "t.png").exists()
    code, _, err = run(capsys, *arguments[:2], "--png", tmp_path / "t.csv")
    assert code == 2 and "is a file to read" in err
    code, _, err = run(capsys, "picture", tmp_path / "none.csv", "--png", tmp_path / "t.png")
    assert code == 2 and "cannot be read: No such file" in err


# kinds and their spellings


OLD_AND_NEW = [
    ("", "block"),
    ("--shape qwen3_30b --tokens 1 64 --mode forward --graph --csv a --png b --json", None),
    ("--dtype bf16 fp16 --no-eager --no-compile --json out", None),
    ("--families", "families"),
    (
        "--families gpt_oss mixtral --tokens 1 --csv a",
        "families gpt_oss mixtral --tokens 1 --csv a",
    ),
    ("--lora --shape qwen3_30b --png b", "lora --rank 16 --shape qwen3_30b --png b"),
    ("--lora 8 --dtype fp16", "lora --rank 8 --dtype fp16"),
    ("--lor --dtype fp16", "lora --rank 16 --dtype fp16"),  # argparse takes a beginning
    ("--lora --no-eager --no-compile", "lora --rank 16"),
    ("--dtype fp8 --tokens 1 --json", "fp8 --tokens 1 --json"),
    ("--tokens 1 2 --shape dsv3_ep32 --dtype fp8", "fp8 --tokens 1 2 --shape dsv3_ep32"),
    ("--distributed --tokens 8 --layers 3", "distributed --tokens 8 --layers 3"),
    ("--model-config x.json --layers 2 --tasks decode", "model x.json --layers 2 --tasks decode"),
    ("--scaling a.csv b.csv --network 25", "scaling a.csv b.csv --network 25"),
    ("--peers --only QuACK Liger --tokens 8", "peers --only QuACK Liger --tokens 8"),
    ("--peers --routing zipf --seconds 9 --json", "peers --routing zipf --seconds 9 --json"),
    ("--quant --format nf4 --step-tokens 0", "quant --format nf4 --step-tokens 0"),
]


@pytest.mark.parametrize("old, new", OLD_AND_NEW)
def test_the_old_spelling_means_the_same(old, new):
    one, two = (command.parse(line.split()) for line in (old, new or f"block {old}"))
    assert one.kind is two.kind
    for dest, value in vars(two).items():
        assert getattr(one, dest) == value, dest


EXAMPLE = {  # of every flag that some kind takes
    "--shape": "qwen3_30b", "--tokens": "1", "--dtype": "bf16", "--mode": "forward", "--graph": "",
    "--no-eager": "", "--no-compile": "", "--csv": "a", "--png": "b", "--json": "c",
    "--families": "", "--lora": "8", "--dtype fp8": "", "--distributed": "", "--layers": "2",
    "--model-config": "x.json", "--tasks": "decode", "--scaling": "s.csv", "--network": "25",
    "--quant": "", "--format": "nf4", "--step-tokens": "8",
    "--peers": "", "--only": "PEFT", "--seconds": "9", "--routing": "zipf",
}  # fmt: skip
TAKEN = {
    "": "--shape --tokens --dtype --mode --graph --no-eager --no-compile --routing --csv --png "
    "--json",
    "--families": "--tokens --csv --json",
    "--lora": "--shape --tokens --dtype --no-eager --no-compile --csv --png --json",
    "--dtype fp8": "--shape --tokens --csv --json",
    "--distributed": "--shape --tokens --layers --csv --json",
    "--model-config": "--layers --tasks --csv --json",
    "--scaling": "--network",
    "--peers": "--only --shape --tokens --routing --seconds --csv --json",
    "--quant": "--shape --tokens --format --step-tokens --csv --json",
}


@pytest.mark.parametrize("switch", TAKEN)
def test_what_a_kind_does_not_take_is_refused(switch):
    """Every flag beside every switch; never accepted and ignored."""
    chosen = f"{switch} {EXAMPLE.get(switch, '')}"
    for flag, value in EXAMPLE.items():
        line = f"{flag} {value} {chosen}".split()
        if flag in TAKEN[switch].split():
            command.parse(line)
        elif flag not in switch and (switch or flag not in TAKEN):
            with pytest.raises((UsageError, ValueError), match=r"takes no |leave out|is for --"):
                options = command.parse(line)
                options.kind.refuse(options)


@pytest.mark.parametrize("name", kinds())
def test_help_fits_a_screen(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    for line in ([name, "--help"], ["--help"]):
        with pytest.raises(SystemExit):
            command.parse(line)
        out = capsys.readouterr().out
        assert len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 80, out
        assert f"bench {name}" in out or f"\n  {name} " in out


def test_an_unknown_kind_is_refused_with_those_that_there_are(capsys):
    code, _, err = run(capsys, "gpu")
    assert code == 2 and "no kind 'gpu'" in err and all(name in err for name in kinds())


NEW = """
from dataclasses import dataclass
from rich.table import Table
from moe_patch.bench.kind import Timed, add_files

@dataclass
class Row:
    ms: float

class New(Timed):
    name, help = "new", "a kind that was added"

    def arguments(self, flag, old):
        flag("what")
        add_files(flag)

    def measure(self, run):
        run.rows += [Row(len(text)) for text in run.each([run.options.what], str)]

    def tables(self, rows):
        yield Table(f"new, {rows[0].ms} ms", "")

KIND = New()
"""


def test_a_file_is_all_that_a_new_kind_needs(capsys, monkeypatch, tmp_path):
    import moe_patch.bench as folder

    (tmp_path / "new.py").write_text(NEW)
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(parity, "environment", lambda device: "a card")
    try:
        code, out, err = run(capsys, "new", "four", "--csv", tmp_path / "t.csv")
        assert (code, err) == (0, "") and "new, 4 ms" in out
        assert (tmp_path / "t.csv").read_text().split() == ["ms", "4"]
        with pytest.raises(SystemExit):
            run(capsys, "--help")
        assert "new          a kind that was added" in capsys.readouterr().out
        assert run(capsys, "--tokens", "x")[0] == 2  # without a kind, the old flags alone
    finally:
        sys.modules.pop("moe_patch.bench.new", None)


def test_a_kind_is_one_file():
    for name, kind in kinds().items():
        assert kind.name == name and type(kind).__module__ == f"moe_patch.bench.{name}"
