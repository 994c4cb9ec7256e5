"""Models sharded over ranks: two with gloo and Triton's interpreter in CI, NCCL where GPUs are.

Starting processes and importing takes longer than most checks, so all run in one start of the
ranks (sharded.py), and here is one test of all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--layers 1 --hidden 128 --intermediate 64 --experts 8 --top-k 2"


def launch(
    folder: Path, *checks: str, world: int = 2, seconds: float, **environment: str
) -> dict[str, str]:
    """Runs the checks on `world` ranks; {check: tracebacks} of what failed."""
    common = os.environ | environment
    # here, as torchrun has it: a port found free may be another's by the time rank 0 binds it
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"SHARED": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = ROOT / "tests" / "tools" / "sharded.py"
    command = [sys.executable, str(script), str(folder / "results"), *checks]
    logs = [(folder / f"log.{rank}").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if any(rank.poll() for rank in ranks):  # the others would wait for it
            time.sleep(1)
            break
        time.sleep(0.05)
    codes = [rank.poll() for rank in ranks]
    for rank, log in zip(ranks, logs):
        rank.kill()
        rank.wait()
        log.close()
    found: dict[str, str] = {}
    for rank, code in enumerate(codes):
        file = folder / f"results.{rank}"
        for name, failure in (json.loads(file.read_text()) if file.exists() else {}).items():
            if failure:
                found[name] = found.get(name, "") + f"rank {rank}:\n{failure}\n"
        if code != 0 and not found:
            found[f"rank {rank} ended with {code}"] = (folder / f"log.{rank}").read_text()[-3000:]
    print((folder / "log.0").read_text()[-8000:])
    return found


def test_two_processes(tmp_path):
    failures = launch(tmp_path, seconds=240, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def test_four_processes(tmp_path):
    """Meshes of two dimensions, which two ranks do not have."""
    both_ways, cpus = ("two_dimensions", "newest_engines[fsdp_ep]"), {"CUDA_VISIBLE_DEVICES": ""}
    failures = launch(tmp_path, *both_ways, world=4, seconds=240, TRITON_INTERPRET="1", **cpus)
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus(tmp_path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    failures = launch(tmp_path, world=world, seconds=240)
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


@pytest.mark.multigpu
def test_a_killed_rank_ends_the_job(tmp_path):
    """With an error, in seconds: the other rank is in a collective that nobody joins."""
    kill_one_rank(tmp_path)


def kill_one_rank(folder: Path, seconds: float = 60) -> None:
    example = ROOT / "examples" / "train_distributed.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(example), "--engine", "ep", "--steps", "100000"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [*command, *SMALL.split(), "--out", str(folder), "--save-every", "5"],
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: [*folder.glob("step-*/.metadata")] or job.poll() is not None, 150)
            assert job.poll() is None, (folder / "log").read_text()[-3000:]
            os.kill(children(job.pid)[-1], signal.SIGKILL)
            until(lambda: job.poll() is not None, seconds)
            assert job.returncode not in (0, None)
        finally:
            job.kill()
            job.wait()


def children(pid: int) -> list[int]:
    """Ids of a process's own; Linux."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):  # no process, or no more
            if (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(pid):
                found.append(int(folder.name))
    return sorted(found)


def until(done: Callable[[], object], seconds: float) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
