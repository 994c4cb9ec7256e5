#!/usr/bin/env python3
"""How often does the certificate fail honest code? A command, not a test.

    python tests/tools/honest_runs.py --minutes 10              # the pipeline in plain PyTorch
    python tests/tools/honest_runs.py --minutes 10 --kernels    # on a GPU, or interpreted

Compares blocks with random weights as check_parity does, with a seed of its own for every run, and
prints how many runs failed and every row of them. A run is one block at one number of tokens: all
of its rows. The exit code is 1 when more than one run in a thousand failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

for _library in ("OMP", "OPENBLAS", "MKL"):  # read when torch is imported; tensors are tiny
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mutant import block
from pipeline import Pipeline

from moe_patch.parity.compare import MIN_SLOTS_BRIEFLY, Comparison
from moe_patch.parity.law import Row
from moe_patch.parity.passes import FEW, MANY

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKS = ("qwen3", "llama4", "deepseek_v3")
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 80)
WAYS = {"none": (), "few": FEW, "many": MANY}


@dataclass(frozen=True)
class Case:
    """One run."""

    block: str
    dtype: str
    tokens: int
    inputs: str
    seed: int

    def __str__(self) -> str:
        return f"{self.block}, {self.dtype}, {self.tokens} tokens, {self.inputs}, seed {self.seed}"


def hidden_states(kind: str, tokens: int, width: int, seed: int) -> torch.Tensor | None:
    """Rows as a model has them: some channels are many times as large as others. Of rms 1 each, as
    behind a norm, or "large": with which the router is sure of itself, and gradients vanish."""
    if kind == "random":
        return None
    generator = torch.Generator().manual_seed(seed)
    channels = torch.randn(width, generator=generator).exp()
    x = torch.randn(tokens, width, generator=generator) * channels
    return x if kind == "large" else x / x.square().mean(-1, keepdim=True).sqrt()


def failures(case: Case, options: argparse.Namespace) -> tuple[Case, list[Row], float]:
    """(the case, its rows that failed, seconds)."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    with contextlib.nullcontext() if options.kernels else Pipeline().installed():
        built = block(case.block, DTYPES[case.dtype], case.seed).to(options.device)
        comparison = Comparison(built)
        comparison.min_slots = options.min_slots
        x = hidden_states(case.inputs, case.tokens, comparison.hidden_size, case.seed)
        x = x if x is None else x.to(options.device, comparison.dtype)
        rows, _ = comparison.rows(
            case.tokens, backward=True, seed=case.seed, hidden_states=x, ways=WAYS[options.ways]
        )
    return case, [row for row in rows if not row.passed], time.perf_counter() - start


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Seed by seed, so that a limit in time cuts all alike."""
    parts = options.blocks, options.dtypes, options.tokens, options.inputs
    for seed in range(options.seed, options.seed + options.seeds):
        for name, dtype, tokens, inputs in itertools.product(*parts):
            yield Case(name, dtype, tokens, inputs, seed)


def run(options: argparse.Namespace) -> Iterator[tuple[Case, list[Row], float]]:
    """Results as they come, until there are no more cases or the time is over."""
    stop = time.monotonic() + 60 * options.minutes
    left = itertools.takewhile(lambda _: time.monotonic() < stop, cases(options))
    if options.jobs == 1:
        yield from (failures(case, options) for case in left)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        while batch := list(itertools.islice(left, 16 * options.jobs)):
            yield from pool.map(failures, batch, itertools.repeat(options))


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="not the plain pipeline")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=10**6, help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--blocks", nargs="+", default=BLOCKS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument(
        "--inputs", nargs="+", choices=("random", "given", "large"), default=("random", "given")
    )
    parser.add_argument("--ways", choices=WAYS, default="none")
    parser.add_argument("--min-slots", type=int, help="by default that of check_parity")
    options = parser.parse_args(arguments)
    options.device = "cuda" if options.kernels and torch.cuda.is_available() else "cpu"
    interpreted = options.kernels and options.device == "cpu"
    options.dtypes = options.dtypes or [d for d in DTYPES if d != "bfloat16" or not interpreted]
    options.min_slots = options.min_slots or MIN_SLOTS_BRIEFLY
    return options


def main() -> int:
    """Runs, prints, and says whether honest code is safe."""
    options = parsed()
    ran, failed, seconds, rows = Counter(), Counter(), Counter(), Counter()
    for case, wrong, took in run(options):
        key = case.block, case.dtype, case.inputs, case.tokens
        ran[key] += 1
        seconds[key] += took
        failed[key] += bool(wrong)
        rows.update({row.tensor for row in wrong})
        for row in wrong:
            ratio = "" if row.ratio is None else f", ratio {row.ratio:.2f}"
            print(f"FAILED {case}: {row.tensor}{ratio}: {row.note}", flush=True)
    code = "kernels" if options.kernels else "plain pipeline"
    print(f"\n{code}, at least {options.min_slots} slots, ways: {options.ways}")
    print(f"{'block':12} {'dtype':9} {'input':7} tokens {'runs':>6} failed  s a run")
    for key in sorted(ran):
        name, dtype, inputs, tokens = key
        mean = seconds[key] / ran[key]
        print(f"{name:12} {dtype:9} {inputs:7} {tokens:6} {ran[key]:6} {failed[key]:6} {mean:8.2f}")
    total, bad = ran.total(), failed.total()
    print(f"{bad} of {total} runs failed; rows: {dict(rows) or 'none'}")
    return int(bad * 1000 > total)


if __name__ == "__main__":
    sys.exit(main())
