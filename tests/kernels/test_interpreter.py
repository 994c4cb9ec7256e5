"""The shortcuts in Triton's interpreter change no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "interpreted.py"


def printed(what: str, *ways: str) -> list[list[str]]:
    """Lines that the tool prints in each way."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TOOL.parents[2])}
    runs = [
        subprocess.Popen(
            [sys.executable, str(TOOL), way, what],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in ways
    ]
    return [run.communicate(timeout=300)[0].splitlines() for run in runs]


def test_the_same_bits():
    (*slow, original), (*quick, replaced) = printed("step", "slow", "quickened")
    assert quick == slow and len(quick) == 18 and len(set(quick)) > 12
    assert original == "1 __init__" and replaced == "1 measured"


def test_operators_casts_and_new_axes():
    slow, quick, forgetful = printed("operations", "slow", "quickened", "forgetful")
    assert quick == slow and forgetful == slow and len(slow) > 15_000
    names = [line.split()[0] for line in slow if not line.endswith("Error")]
    assert len(names) > len(slow) / 3 and {"to", "index", "__rsub__", "__lt__"} < set(names)
