"""python -m moe_patch env: what an issue report should begin with."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

import torch

from .. import compat, environment, kernels, parity, switch, versions
from ..models import SWAPS
from ..usage import Parser
from .running import PROG, Command, switch_off

HELP = "versions, GPUs, what runs here, which families are fused"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """It takes no arguments."""
    return Parser(f"{PROG} env", description=HELP).parse_args(arguments)


def run(_: argparse.Namespace) -> int:
    """Prints versions, GPUs and switches, and the table of families."""
    lines = {name: found or "not installed" for name, found in parity.versions().items()}
    lines["platform"] = platform.platform()
    lines["CUDA of torch"] = torch.version.cuda or torch.version.hip or "none"
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        memory = f"{card.total_memory / 2**30:.0f} GiB"
        lines[f"GPU {i}"] = f"{card.name}, capability {card.major}.{card.minor}, {memory}"
        if reason := kernels.why_not(f"cuda:{i}"):  # cards may differ
            lines[f"GPU {i}"] += f": {reason}"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        lines["driver"] = ", ".join(dict.fromkeys(answer.stdout.split())) or "unknown"
    for name in ("TRITON_INTERPRET", "MOE_PATCH"):
        lines[name] = os.environ.get(name) or "not set"
    lines["versions"] = versions.why_too_old() or versions.why_untested() or "tested"
    gpu = kernels.why_not("cuda") or (None if torch.cuda.is_available() else "no GPU found")
    lines["kernels on a GPU"] = gpu or "run"
    if torch.version.hip is None:
        paths = compat.fast_paths().items()
        lines["fast paths"] = "; ".join(f"{path}: {reason or 'on'}" for path, reason in paths)
    cpu = kernels.why_not("cpu") is None
    lines["kernels on the CPU"] = "run, interpreted" if cpu else "for tests: TRITON_INTERPRET=1"
    if not switch.ENABLED:
        lines["patched blocks"] = f"run Hugging Face's own forward ({switch_off()})"
    lines["fused classes"] = ", ".join(cls.__name__ for cls in SWAPS)
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {text}" for name, text in lines.items()))
    print(f"\n{environment.table()}")
    return 0


COMMAND = Command("env", HELP, parse, run)
