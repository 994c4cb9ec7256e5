"""Versions older and newer than those of the tests, and the sets that `make` installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import layers, tiny_model, tokens

import moe_patch
from moe_patch import compat, kernels, notices, versions
from moe_patch.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def other(monkeypatch):
    """Has moe_patch find other versions."""
    found = versions.installed
    caches = versions.why_too_old, kernels.why_not, notices._warn_uncompiled

    def put(**packages: str | None) -> None:
        monkeypatch.setattr(versions, "installed", lambda name: {**real(), **packages}.get(name))
        for cached in caches:
            cached.cache_clear()

    def real() -> dict[str, str | None]:
        return {name: found(name) for name in (*versions.TESTED, "numpy")}

    yield put
    for cached in caches:
        cached.cache_clear()


def test_installed():
    assert versions.installed("torch") == torch.__version__
    assert versions.installed("no_such_package") is None
    assert versions.release("2.15.0a0+git1") == (2, 15) and versions.release("4.1rc1") == (4, 1)


@pytest.mark.parametrize(
    "packages, words",
    [
        ({"torch": "2.10.0+cu128"}, "torch 2.10.0.cu128 is too old .* need 2.11 or later"),
        ({"triton": "3.5.1"}, "Triton 3.5.1 is too old .* need 3.6 or later"),
        ({"torch": "1.13.1", "triton": "2.0.0"}, "torch 1.13.1 is too old"),
    ],
)
def test_old_versions_run_hugging_faces_forward(packages, words, other, device, fused_calls):
    plain, model = tiny_model("qwen3_moe", device), tiny_model("qwen3_moe", device)
    other(**packages)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(moe_patch.patch(model).fused) == 2
        ids = tokens(device)
        assert torch.equal(model(ids).logits, plain(ids).logits) and not fused_calls
        model(ids)
    said = [str(each.message) for each in said if "moe_patch" in str(each.message)]
    assert len(said) == 1 and re.search(f"Hugging Face's own forward: {words}", said[0]), said
    experts, hidden = layers(model)[0].experts, torch.randn(2, 64, device=device)
    index, weights = torch.zeros(2, 1, dtype=torch.int64, device=device), hidden[:, :1]
    with pytest.raises(RuntimeError, match=words):
        moe_patch.fused_experts(hidden, experts.gate_up_proj, experts.down_proj, index, weights)


def test_new_versions_are_used_and_said_once(other, device, fused_calls, capsys):
    other(torch="2.99.0", triton="4.0.0", transformers="5.99.1")
    model = tiny_model("qwen3_moe", device)
    words = r"not been tested with torch 2\.99\.0, Triton 4\.0\.0, transformers 5\.99\.1, only with"
    with pytest.warns(UserWarning, match=words) as said:
        moe_patch.patch(model)
        moe_patch.patch(model)
        model(tokens(device))
    assert len([each for each in said if "not been tested" in str(each.message)]) == 1
    assert len(fused_calls) == 2
    assert main(["env"]) == 0 and re.search(f"versions  .*{words}", capsys.readouterr().out)


def test_versions_of_the_tests_are_quiet(other):
    for end in (0, 1):
        other(**{name: "{}.{}.9".format(*bounds[end]) for name, bounds in versions.TESTED.items()})
        assert versions.why_too_old() is None and versions.why_untested() is None
    other(triton=None)  # a nightly build, which has another name
    assert versions.why_too_old() is None and versions.why_untested() is None


def test_setup_asks_for_the_oldest_that_is_tested():
    setup = (ROOT / "setup.py").read_text()
    for name, (oldest, _) in versions.TESTED.items():
        assert re.search(f"[\"']{name}>={oldest[0]}\\.{oldest[1]}\\b", setup), name


def test_env_says_which_fast_paths_are_on(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert main(["env"]) == 0
    line = "fast paths .*direct launches: on; TMA descriptors: on; kernels in Gluon: on"
    assert re.search(line, capsys.readouterr().out)
    lost = compat.Name("triton.tools.tensor_descriptor:Gone", "", "", "it is slow")
    monkeypatch.setattr(compat, "_DESCRIPTOR", lost)
    assert compat.fast_paths()["TMA descriptors"].endswith("so it is slow")


# Sets of make

TESTED = {"torch>=2.11.0,<=2.13.0", "triton==3.6.0", "transformers==5.17.0"}
PINNED = {'numpy==2.3.5; python_version >= "3.11"', 'numpy==2.2.6; python_version < "3.11"'}


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    "options, folder, lines",
    [
        ("", "", TESTED | PINNED),
        ("TRANSFORMERS=5.23.0", "-5.23.0", {"triton==3.6.0", "transformers==5.23.0"} | PINNED),
        (
            "TORCH=2.15.0 TRITON=3.9.0 TRANSFORMERS=5.23.0",
            "-torch2.15.0-triton3.9.0-py{}-5.23.0",
            {"torch==2.15.0", "triton==3.9.0", "transformers==5.23.0"},
        ),
        ("TRITON=3.8.0", "-triton3.8.0-py{}", {"torch>=2.11", "triton==3.8.0"} | PINNED),
        ("TORCH=2.12.1", "-torch2.12.1-py{}", {"torch==2.12.1", "triton>=3.6"} | PINNED),
    ],
)
def test_sets_of_make(options, folder, lines):
    command = ["make", "-n", "-B", "venv", f"PYTHON={sys.executable}", *options.split()]
    asked = ("VENV", "TORCH", "TRITON", "TRANSFORMERS", "MAKEFLAGS")  # .ci/run sets some of them
    clean = {name: value for name, value in os.environ.items() if name not in asked}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=clean)
    (sed,) = (line for line in run.stdout.splitlines() if line.startswith("sed "))
    sed, _, to = sed.partition(" > ")
    python = "{}.{}".format(*sys.version_info[:2])
    assert to == f".venv{folder.format(python)}/constraints.txt"
    written = subprocess.run(["sh", "-c", sed], cwd=ROOT, capture_output=True, text=True).stdout
    written = set(written.splitlines())
    assert written >= lines and (lines >= PINNED or not written & PINNED)
    assert len([line for line in written if line[:1] not in ("", "#")]) > 10
