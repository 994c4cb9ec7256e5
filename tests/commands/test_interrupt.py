"""Ctrl-C, a closed pipe and a full disk: one line, finished rows are shown, the exit code fits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_patch import environment, kernels, parity
from moe_patch.__main__ import main
from moe_patch.bench import block
from moe_patch.bench.block import OURS, Result, Timing
from moe_patch.commands import running
from moe_patch.parity import ParityReport, Row, Section

ROOT = Path(__file__).resolve().parents[2]
STOPPED = "moe_patch: stopped by Ctrl-C\n"


def report(name: str) -> ParityReport:
    return ParityReport([Section(name, "float32", 8, [Row("output", True, 0.5)])], "a card")


def stop_after(monkeypatch, module, name, *answers, error=KeyboardInterrupt):
    """The function returns these, one a call, and then raises."""
    left = list(answers)

    def call(*_, **__):
        if not left:
            raise error() if isinstance(error, type) else error
        return left.pop(0)

    monkeypatch.setattr(module, name, call)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(running, "device", lambda: "cpu")
    monkeypatch.setattr(kernels, "why_not", lambda kind: None)


def test_parity_shows_the_sections_that_it_finished(capsys, interpreted, monkeypatch, tmp_path):
    stop_after(monkeypatch, parity, "check_parity", report("first"), report("second"))
    code = main(["parity", "--json", str(tmp_path / "report.json")])
    out, err = capsys.readouterr()
    assert code == 130 and err == STOPPED
    assert "first, float32, 8 tokens" in out and "second" in out and "5.00e-01" in out
    assert "parity passed" not in out and not (tmp_path / "report.json").exists()


def test_parity_shows_what_an_interrupted_check_had_finished(capsys, interpreted, monkeypatch):
    stop = KeyboardInterrupt()
    stop.report = report("half")
    stop_after(monkeypatch, parity, "check_parity", report("first"), error=stop)
    code = main(["parity"])
    out, err = capsys.readouterr()
    assert code == 130 and err == STOPPED and "first" in out and "half" in out


def test_parity_to_a_pipe_writes_no_json_that_looks_whole(capsys, interpreted, monkeypatch):
    stop_after(monkeypatch, parity, "check_parity", report("first"))
    code = main(["parity", "--json"])
    out, err = capsys.readouterr()
    assert code == 130 and not out and "first" in err and err.endswith(STOPPED)


def test_before_the_first_section_there_is_one_line(capsys, interpreted, monkeypatch):
    stop_after(monkeypatch, parity, "check_parity")
    assert main(["parity"]) == 130
    assert capsys.readouterr() == ("", STOPPED)


def test_a_refusal_halfway_shows_the_sections_too(capsys, interpreted, monkeypatch):
    refusal = ValueError("too wide")
    stop_after(monkeypatch, parity, "check_parity", report("first"), error=refusal)
    code = main(["parity"])
    out, err = capsys.readouterr()
    assert code == 2 and "first" in out and err == "moe_patch: too wide\n"


def row(tokens: int) -> Result:
    timing = Timing(
        "qwen3_30b", tokens, "bfloat16", "forward", OURS, ms=2.125, p10=2.0, p90=2.25,
        tflops=600.0, speedup=1.0, limit_ms=1.0,
    )  # fmt: skip
    return Result([timing], report("of the block"), [])


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt, 130), (OSError(28, "full"), 2)])
def test_bench_shows_the_rows_that_it_finished(capsys, monkeypatch, tmp_path, error, code):
    monkeypatch.setattr(running, "device", lambda: "cuda")
    stop_after(monkeypatch, block, "bench", row(16), row(64), error=error)
    arguments = ["bench", "--tokens", "16", "64", "1024", "--mode", "forward"]
    assert main([*arguments, "--csv", str(tmp_path / "t.csv")]) == code
    out, err = capsys.readouterr()
    assert err == (STOPPED if code == 130 else "moe_patch: the output cannot be written: full\n")
    assert "16 tokens; limit" in out and "64 tokens; limit" in out and out.count("2.125") == 2
    assert not (tmp_path / "t.csv").exists()


def test_env(capsys, monkeypatch):
    stop_after(monkeypatch, environment, "table")
    assert main(["env"]) == 130 and capsys.readouterr().err == STOPPED


# The process itself

SCRIPT = """
import sys, time
from moe_patch import kernels, parity
from moe_patch.__main__ import main
from moe_patch.commands import running
from moe_patch.parity import ParityReport, Row, Section

running.device = lambda: "cpu"
kernels.why_not = lambda kind: None
finished = [ParityReport([Section("first", "float32", 8, [Row("output", True)])], "a card")]

def check_parity(*_, **__):
    if finished:
        return finished.pop()
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)

parity.check_parity = check_parity
sys.exit(main(["parity"]))
"""


def start(*command: str, **more) -> subprocess.Popen:
    path = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT}"
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.Popen(
        [sys.executable, *command], env=env, text=True, preexec_fn=listening, **pipe
    )


def listening():
    """To Ctrl-C: what a shell starts in the background is not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_sigint_ends_a_process_with_130():
    process = start("-c", SCRIPT)
    for line in process.stderr:
        if line == "waiting\n":
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == STOPPED and "first, float32" in out


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    process = start("-m", "moe_patch", "env", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err and "Exception ignored" not in err
    assert err.splitlines()[-1] == "moe_patch: the output cannot be written: Broken pipe"


def test_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        process = start("-m", "moe_patch", "env", stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err and "Exception ignored" not in err
    assert "the output cannot be written: No space left on device" in err


# Before main() there is an import of seconds

IMPORTS = """
import signal, sys, types

class Loader:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            {then}

sys.meta_path.insert(0, Loader())
"""


@pytest.mark.parametrize(
    "then, code, words",
    [
        ("signal.raise_signal(signal.SIGINT)", 130, STOPPED),
        ("raise ImportError('moe_patch works with another')", 2, "moe_patch: moe_patch works with"),
        ("raise ImportError('no libstdc++')", 2, "ImportError: no libstdc++"),
    ],
)
def test_an_import_that_fails_or_is_stopped(tmp_path, monkeypatch, then, code, words):
    (tmp_path / "sitecustomize.py").write_text(IMPORTS.format(then=then))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start("-m", "moe_patch", "parity")
    _, err = process.communicate(timeout=120)
    assert process.returncode == code and words in err
    assert ("Traceback" in err) == ("libstdc" in words), err


def test_the_switch_has_to_be_a_word_for_on_or_off(monkeypatch):
    monkeypatch.setenv("MOE_PATCH", "perhaps")
    process = start("-m", "moe_patch", "env")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err
    assert "moe_patch: MOE_PATCH is 'perhaps', and moe_patch takes 0, false, off, no" in err


def test_another_program_keeps_its_own_traceback(monkeypatch):
    monkeypatch.setenv("MOE_PATCH", "perhaps")
    process = start("-c", "import moe_patch")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" in err and "ValueError: MOE_PATCH is" in err
