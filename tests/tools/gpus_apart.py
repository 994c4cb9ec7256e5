"""Spreads pytest-xdist's workers over this machine's GPUs, each of which sees one.

    python -m pytest -m "gpu and not multigpu" -n 28 -p gpus_apart

with tests/tools on PYTHONPATH. 28 tests at a time fit into two cards of 140 GB, not into one.
"""

import os
import shutil
import subprocess

worker = os.environ.get("PYTEST_XDIST_WORKER")  # none in the process that starts the workers
if worker and shutil.which("nvidia-smi"):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    count = listed.stdout.count("GPU ")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % count)
