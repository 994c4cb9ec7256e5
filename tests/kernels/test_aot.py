"""Every kernel compiles for every architecture that is promised, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "topk_kernel",
    "topk_backward_kernel",
    "count_kernel",
    "place_kernel",
    "gate_up_kernel",
    "grouped_gemm_kernel",
    "combine_kernel",
    "decode_gate_up_kernel",
    "decode_down_kernel",
    "dgate_kernel",
    "sum_partials_kernel",
    "dw_kernel",
}


@pytest.mark.parametrize("chip", ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"))
def test_compiles_ahead_of_time(chip):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests/tools/aot.py"), chip]
    command += ["--shape", "qwen3_30b", "decode"]
    command += ["llama4_scout", "one_token", "gpt_oss"] if chip == "sm_90" else []
    command += ["fp8_short"] if chip in ("sm_80", "sm_90") else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = KERNELS | ({"quantize_kernel", "fp8_hopper_kernel"} if chip == "sm_90" else set())
    assert set(re.findall(r"(\w+_kernel)", done.stdout)) == kernels
    assert "SERIALISED" not in done.stdout, "ptxas serialised the tensor-core instructions"
    if chip == "sm_90":
        spills = re.findall(r"sm_90 .* spills (\d+)", done.stdout)
        assert all(int(n) < 128 for n in spills), done.stdout
