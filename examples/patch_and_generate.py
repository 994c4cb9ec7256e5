"""Patches a checkpoint on disk, checks one of its MoE blocks, and compares the speed of generation.

Prints what was patched, the parity table of the middle block, and for Hugging Face's blocks and
the patched ones: tokens per second, and whether greedy generation gives the same tokens. A near-tie
between two tokens may fall differently in bfloat16; the parity table is the judge, not the text.
Nothing is downloaded. Without a GPU the kernels run in Triton's interpreter, which is slow, in
float32; the speed means nothing there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import moe_patch


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkpoint with its tokenizer")
    parser.add_argument("--prompt", default="The three laws of robotics are")
    parser.add_argument("--new-tokens", type=int, default=128 if DEVICE == "cuda" else 8)
    parser.add_argument("--dtype", default="auto" if DEVICE == "cuda" else "float32")
    parser.add_argument("--no-parity", action="store_true", help="skip the parity table")
    return parser.parse_args(arguments)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Greedy tokens after the prompt."""
    out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :]


def timed(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int
) -> tuple[torch.Tensor, float]:
    """The tokens, and how many of them a second, after a warm-up."""
    generate(model, inputs, 2)
    begin = time.perf_counter()
    tokens = generate(model, inputs, count).cpu()  # waits for the GPU
    return tokens, len(tokens) / (time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when parity holds, 1 when not, 2 when there is no checkpoint or no MoE block."""
    options = parse(arguments)
    if not (options.folder / "config.json").is_file():
        print(f"{options.folder} is no checkpoint: it has no config.json", file=sys.stderr)
        return 2
    place = {"device_map": "auto"} if DEVICE == "cuda" else {}
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, local_files_only=True, dtype=options.dtype, **place
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    inputs = dict(inputs.to(model.device))

    try:
        report = model.patch()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    passed = True
    if report.fused and not options.no_parity:
        parity = moe_patch.check_parity(model, blocks=[report.fused[len(report.fused) // 2]])
        print(f"\n{parity}\n")
        passed = parity.passed

    ours, our_speed = timed(model, inputs, options.new_tokens)
    model.unpatch()
    theirs, their_speed = timed(model, inputs, options.new_tokens)
    table = Table("blocks", "tokens/s", "")
    table.add_row("Hugging Face", f"{their_speed:.2f}", "")
    table.add_row("moe_patch", f"{our_speed:.2f}", f"{our_speed / their_speed:.2f} x")
    console = Console()
    console.print(table)
    same = int((ours == theirs).long().cumprod(0).sum())
    console.print(f"the first {same} of {len(ours)} greedy tokens are the same")
    console.print(options.prompt + tokenizer.decode(ours), markup=False)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
