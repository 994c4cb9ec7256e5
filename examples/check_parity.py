"""Compares patched MoE blocks with Hugging Face's own code and a float64 truth.

The same as `python -m moe_patch parity`: a checkpoint folder, named shapes, or nothing for a first
look. The exit code is 0 when the parity law (docs/parity.md) holds and 1 when it does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before moe_patch imports Triton
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

from moe_patch.__main__ import main as moe_patch_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parity command with these arguments."""
    return moe_patch_main(["parity", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
