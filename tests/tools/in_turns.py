"""Two builds, or two Tritons, timed in turns on one GPU:

    python tests/tools/in_turns.py ../before . > table.csv
    python tests/tools/in_turns.py . /tmp/triton39:. > table.csv

Each of the two arguments is a PYTHONPATH; each runs in a process of its own, and one at a time.
ROUNDS (5) rounds, each a `do_bench` median of both, the first of a round alternating. `ratio` is
the median of the rounds' ratios. ONLY keeps the rows whose block begins with it. A newer Triton may
need TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

ROWS = [
    (shape, tokens, mode)
    for shape, counts, modes in (
        ("qwen3_30b", (1, 64, 1024, 4096, 16384), ("graph", "eager")),
        ("qwen3_30b", (16, 256), ("graph",)),
        ("qwen3_30b", (1024, 4096, 16384), ("backward",)),
        ("llama4_scout", (1, 64, 1024, 4096, 16384), ("graph", "eager")),
        ("llama4_scout", (1024, 4096, 16384), ("backward",)),
        ("dsv3_ep32", (1, 64, 1024, 4096, 16384), ("graph", "eager")),
        ("dsv3_ep32", (1024, 4096, 16384), ("backward",)),
        ("qwen3_235b", (1, 64, 1024, 4096, 16384), ("graph", "eager")),
        ("qwen3_235b", (1024, 4096, 16384), ("backward",)),
    )
    for tokens in counts
    for mode in modes
] + [
    (f"fp8 {n}x{k}", rows, "masked")
    for n, k in ((4096, 7168), (7168, 2048))
    for rows in (64, 128, 192, 256)
]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
ROWS = [row for row in ROWS if row[0].startswith(os.environ.get("ONLY", ""))]


def masked(shape, rows):
    """A call of the FP8 product of 4 groups with so many rows of 256 each."""
    from moe_patch.bench import fp8

    n, k = map(int, shape.removeprefix("fp8 ").split("x"))
    (call,) = fp8.masked(4, 256, n, k, rows).calls.values()
    return call


def prepared(block, shape, tokens, mode):
    """A call of the block; "graph" is the replay of a CUDA graph."""
    import torch

    from moe_patch.bench.timing import captured
    from moe_patch.shapes import find

    torch.manual_seed(0)
    size = (1, tokens, find(shape).hidden_size)
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    if mode == "backward":
        grad = torch.randn_like(x)
        leaves = [x.requires_grad_(), *block.parameters()]

        def backward():
            out = block(x)
            out = out[0] if isinstance(out, tuple) else out
            return torch.autograd.grad(out.view_as(grad), leaves, grad, allow_unused=True)

        return backward

    def forward():
        with torch.no_grad():
            return block(x)

    return captured(forward) if mode == "graph" else forward


def serve() -> None:
    """Times what it is asked for: a line [shape, tokens, mode] in, milliseconds out."""
    import torch
    import triton
    from triton.testing import do_bench

    import moe_patch
    from moe_patch.shapes import build

    print(json.dumps([moe_patch.__file__, f"Triton {triton.__version__}"]), flush=True)
    now, block, call = None, None, None
    for line in sys.stdin:
        row = shape, tokens, mode = json.loads(line)
        if mode != "masked" and (now is None or now[0] != shape):
            block = call = None
            torch.cuda.empty_cache()
            block = build(shape, dtype=torch.bfloat16, device="cuda")
            moe_patch.patch(block)
        if now != row:
            call = None
            torch.cuda.empty_cache()
            if mode == "masked":
                call = masked(shape, tokens)
            else:
                call = prepared(block, shape, tokens, mode)
            now = row
        print(do_bench(call, warmup=15, rep=60, return_mode="median"), flush=True)


def started(path: str) -> subprocess.Popen[str]:
    """A process that serves; `path` goes before the PYTHONPATH."""
    path = ":".join(os.path.abspath(part) for part in path.split(":"))
    environment = os.environ | {"MOE_PATCH_CACHE": "none"}
    environment["PYTHONPATH"] = f"{path}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/tmp",
    )  # fmt: skip
    sys.stderr.write(process.stdout.readline())
    return process


def ask(process: subprocess.Popen[str], row: tuple[str, int, str]) -> float:
    """Milliseconds of a row."""
    process.stdin.write(json.dumps(row) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    both = [started(path) for path in sys.argv[1:3]]
    print("block,tokens,mode,first_ms,second_ms,ratio", flush=True)
    for row in ROWS:
        for process in both:
            ask(process, row)  # compiles
        found: tuple[list[float], list[float]] = [], []
        for turn in range(ROUNDS):
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                found[i].append(ask(both[i], row))
        first, second = map(statistics.median, found)
        ratio = statistics.median(b / a for a, b in zip(*found))
        print(*row, f"{first:.4f},{second:.4f},{ratio:.3f}", sep=",", flush=True)
    for process in both:
        process.kill()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
