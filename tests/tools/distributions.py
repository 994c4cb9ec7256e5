"""Builds the sdist and the wheel as `make dist` does, from a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("moe_patch", "models", "tests", "examples", "docs", ".ci", ".github")
EPOCH = "1700000000"


class Distributions(NamedTuple):
    """The files of one build."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Distributions:
    """The sdist, and the wheel that is built of it; in an empty folder, which also gets a copy of
    the sources: a build leaves its output among them."""
    source, out, unpacked = (folder / name for name in ("source", "out", "unpacked"))
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignore, copy_function=shutil.copy)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    out.mkdir()
    sdist = _run_hook("build_sdist", source, out)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (inside,) = unpacked.iterdir()
    return Distributions(sdist, _run_hook("build_wheel", inside, out))


def _run_hook(hook: str, source: Path, out: Path) -> Path:
    """What pip and `python -m build` call in the backend of pyproject.toml, without either."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out / done.stdout.split()[-1]
