"""Commands that a stranger types: one line on stderr, exit code 2, nothing written, nothing run."""

from __future__ import annotations

import json
import os

import pytest

from moe_patch import kernels, parity, tune
from moe_patch.__main__ import main
from moe_patch.commands import bench, running
from moe_patch.version import __version__

SECTION = parity.Section("a block", "float32", 8, [parity.Row("output", True)])
REPORT = parity.ParityReport([SECTION], "a card")


@pytest.fixture
def idle(monkeypatch):
    """A GPU to ask for; whatever would compute fails the test."""
    monkeypatch.setattr(running, "device", lambda: "cuda")
    monkeypatch.setattr(kernels, "why_not", lambda kind: None)
    for module, name in ((parity, "check_parity"), (bench, "measure"), (tune, "tune")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it ran"))


@pytest.fixture
def quick(monkeypatch):
    """Parity of the tiny shapes that costs nothing and passes."""
    monkeypatch.setattr(running, "device", lambda: "cpu")
    monkeypatch.setattr(kernels, "why_not", lambda kind: None)
    monkeypatch.setattr(parity, "check_parity", lambda *_, **__: REPORT)


def refused(capsys, *arguments: str) -> str:
    """The one line that the command answers."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out)
    assert err.startswith("moe_patch: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "required: command"),
        ("dance", "invalid choice: 'dance'"),
        ("parity --tokens abc", "'abc' is not a whole number from 1"),
        ("parity --tokens 0", "'0' is not a whole number from 1"),
        ("parity --tokens -3", "'-3' is not a whole number from 1"),
        ("parity --tokens 1e3", "'1e3' is not a whole number"),
        ("parity --tokens 99999999999", "'99999999999' is not a whole number"),
        ("parity --tokens", "--tokens: expected at least one argument"),
        ("parity --seed x", "'x' is not a whole number from 0"),
        ("parity --seed -1", "'-1' is not a whole number from 0"),
        ("parity --seed 9223372036854775808", "is not a whole number from 0"),
        ("parity --dtype bf61", "invalid choice: 'bf61'"),
        ("parity --dtype fp8", "invalid choice: 'fp8'"),
        ("parity --shape qwen", "unknown shape 'qwen'"),
        ("parity --blocks model.layers.0.mlp", "--blocks is of a checkpoint"),
        ("parity --model-level", "--model-level is of a checkpoint"),
        ("parity --frobnicate", "unrecognized arguments: --frobnicate"),
        ("parity one two", "unrecognized arguments: two"),
        ("parity --json no/such/folder/report.json", "no folder for 'no/such"),
        ("parity --json .", "--json '.' is a folder"),
        ("bench --mode sideways", "invalid choice: 'sideways'"),
        ("bench --tokens many", "'many' is not a whole number"),
        ("bench --lora many", "--lora: invalid int value"),
        ("bench --lora -1", "a rank of at least 1"),
        ("bench --layers 0 --distributed", "--layers 0: at least 1"),
        ("bench --network 50", "--network is for --scaling"),
        ("bench --csv .", "--csv '.' is a folder"),
        ("bench --csv out --json out", "--csv and --json name the same file"),
        ("bench --scaling no/such.csv", "cannot be read: No such file"),
        ("bench --scaling no/such.csv --network 0", "--network 0.0: a rate above 0"),
        ("bench --scaling no/such.csv --network nan", "--network nan: a rate above 0"),
        ("bench --scaling no/such.csv --json out", "takes no --json"),
        ("tune --shape tiny", "unknown shape 'tiny'"),
        ("tune --tokens 0", "'0' is not a whole number from 1"),
        ("tune --dtype fp8", "invalid choice: 'fp8'"),
        ("tune --kernel dgate", "add --backward"),
        ("env --json", "unrecognized arguments: --json"),
    ],
)
def test_usage_errors_are_one_line(capsys, tmp_path, monkeypatch, idle, line, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, *line.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, before",
    [
        (["parity", ""], "parity"),
        (["parity", " "], "parity"),
        (["parity", "--json", ""], "--json"),
        (["parity", "--json="], "--json"),
        (["parity", "folder", "--blocks", ""], "--blocks"),
        (["parity", "--tokens", ""], "--tokens"),
        (["bench", "--csv", ""], "--csv"),
        (["bench", "--model-config", ""], "--model-config"),
        (["tune", "--output", ""], "--output"),
        ([""], ""),
    ],
)
def test_an_empty_argument_is_refused(capsys, idle, arguments, before):
    err = refused(capsys, *arguments)
    assert f"the argument after {before!r} is empty" in err and "shell variable" in err


def test_help_is_not_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["parity", "--help"])
    assert stop.value.code == 0 and "130 after Ctrl-C" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"moe_patch {__version__}\n"


# --json FILE


def test_json_that_cannot_be_written_is_known_before(capsys, tmp_path, idle):
    for name, words in (("a" * 300, "File name too long"), ("file/below", "no folder for")):
        (tmp_path / "file").write_text("mine")
        assert words in refused(capsys, "parity", "--json", str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_asking_changes_nothing_when_the_run_fails(capsys, tmp_path, quick, monkeypatch):
    def fails(*_, **__):
        raise ValueError("no block")

    monkeypatch.setattr(parity, "check_parity", fails)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("an old report")
    (tmp_path / "link.json").symlink_to(new)
    for file in (old, new, tmp_path / "link.json"):
        assert "no block" in refused(capsys, "parity", "--json", str(file))
    assert old.read_text() == "an old report" and not new.exists()


def test_json_goes_through_a_link(capsys, tmp_path, quick):
    (tmp_path / "link.json").symlink_to(tmp_path / "new.json")
    assert main(["parity", "--json", str(tmp_path / "link.json")]) == 0
    assert json.loads((tmp_path / "new.json").read_text())["passed"] is True


def test_json_goes_to_a_pipe(quick):
    read, write = os.pipe()
    try:
        assert main(["parity", "--shape", "tiny_qwen3", "--json", f"/dev/fd/{write}"]) == 0
    finally:
        os.close(write)
    with open(read) as answer:
        assert json.load(answer)["passed"] is True


def test_a_disk_that_is_full_in_the_end_loses_no_report(capsys, quick):
    code = main(["parity", "--shape", "tiny_qwen3", "--json", "/dev/full"])
    out, err = capsys.readouterr()
    assert code == 2 and "parity passed" in out
    assert err == (
        "moe_patch: the report is above, but not in '/dev/full': No space left on device\n"
    )


# What nobody foresees


@pytest.mark.parametrize(
    "error, words",
    [
        (MemoryError(), "too little memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "fewer --tokens"),
    ],
)
def test_too_little_memory_is_a_sentence(capsys, quick, monkeypatch, error, words):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(parity, "check_parity", fails)
    assert words in refused(capsys, "parity")


def test_an_error_of_our_own_is_not_a_row_that_fails(capsys, quick, monkeypatch):
    monkeypatch.setattr(parity, "check_parity", lambda *_, **__: 1 // 0)
    code = main(["parity"])
    err = capsys.readouterr().err
    assert code == 2 and "Traceback" in err and "ZeroDivisionError was not foreseen" in err


def test_thorough_is_passed_on_when_asked_for(capsys, quick, monkeypatch):
    asked = []
    monkeypatch.setattr(parity, "check_parity", lambda *_, **more: asked.append(more) or REPORT)
    main(["parity", "--shape", "tiny_qwen3", "--dtype", "fp32"])
    main(["parity", "--shape", "tiny_qwen3", "--dtype", "fp32", "--thorough"])
    assert "thorough" not in asked[0] and asked[1]["thorough"] is True


@pytest.mark.parametrize("text", ["[1, 2]", "{", "", '{"model_type": "nope"}', "\x00", "3"])
def test_a_model_config_that_is_none(capsys, tmp_path, idle, text):
    (tmp_path / "config.json").write_text(text)
    err = refused(capsys, "bench", "--model-config", str(tmp_path / "config.json"))
    assert "is no config of this transformers" in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task,ms\n",
        "task,shape,ranks,tokens,ms,gb_s\nall_reduce,,,,,\n",
        "task,shape,ranks,tokens,ms,gb_s\nep block forward,qwen3_30b,2,8,1,1\n"
        "all_reduce,qwen3_30b,2,8,x,1\nall_to_all,qwen3_30b,2,8,1,1\n",
        "task,shape,ranks,tokens,ms,gb_s\nep block forward,qwen3_30b,2,8,1,1\n"
        "all_reduce,qwen3_30b,2,8,1,1\nall_to_all,qwen3_30b,2,8,1,1\n",
        "\x00,\xff",
    ],
)
def test_a_scaling_file_that_is_none(capsys, tmp_path, idle, text):
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    err = refused(capsys, "bench", "--scaling", str(tmp_path / "t.csv"))
    assert "the CSV file of a whole bench --distributed is read" in err
