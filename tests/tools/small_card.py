"""An H200 as a card with 99 KB of shared memory, without wgmma and TMA: which tiles are fast there.

    python tests/tools/small_card.py sweep sweep.csv   # every candidate of every kernel
    python tests/tools/small_card.py compare           # whole blocks: the rule, and one small tile

Kernels are compiled for sm_89 (mma.sync, cp.async), and ptxas assembles that PTX for the card that
is there. The rest of an SM's 228 KB is left to its L1 cache, so that as many programs share an SM
as on such a card. Its ratio of products to bytes is near theirs: an H200 has 500 TFLOP/s by
mma.sync and 4.3 TB/s, an RTX 4090 165 and 1.0.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

ARCH, SHARED = "sm_89", 101_376
CARVEOUT, PERCENT = 9, 43  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT; of 228 KB: 100 KB


def assembler(arch: str) -> str:
    """A ptxas for the card that is there."""
    real = os.environ.get("TRITON_PTXAS_PATH") or shutil.which("ptxas")
    if real is None:
        import triton

        real = str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")
    script = Path(tempfile.mkdtemp()) / "ptxas"
    script.write_text(f'#!/bin/bash\nexec "{real}" "${{@/--gpu-name={arch}/--gpu-name=sm_90}}"\n')
    script.chmod(0o755)
    return str(script)


os.environ["TRITON_PTXAS_PATH"] = assembler(ARCH)
os.environ["TRITON_OVERRIDE_ARCH"] = ARCH.replace("_", "")
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["MOE_PATCH_CACHE"] = tempfile.mkdtemp()

import torch

import moe_patch
from moe_patch.bench.timing import captured, free, times
from moe_patch.kernels import chips, launch, table, tiles
from moe_patch.kernels.tiles import Tile
from moe_patch.shapes import Shape, build
from moe_patch.tune import measure, plan
from moe_patch.tune.blocks import Block

DEVICE = torch.device("cuda", 0)
BLOCKS = {
    "qwen3_30b": Block("qwen3_30b", 2048, 768, 128, 8),
    "gpt_oss": Block("gpt_oss", 2880, 2880, 32, 4, transposed=True),
}
TOKENS = (64, 1024, 8192)

found = chips.nvidia(89, SHARED)
chips.chip = lambda device: found
table.SHIPPED = Path(os.environ["MOE_PATCH_CACHE"]) / "none.json"
table.SHIPPED.write_text("[]")
keep = launch.Launch._keep
driver = ctypes.CDLL("libcuda.so.1")


def as_small(self, key, compiled, args):
    """Stands in for Launch._keep."""
    function = ctypes.c_void_p(compiled.function)
    assert driver.cuFuncSetAttribute(function, CARVEOUT, PERCENT) == 0
    keep(self, key, compiled, args)


launch.Launch._keep = as_small


def candidates(kernel: str, bm: int, n: int, m: int) -> list[Tile]:
    """Every tile that 99 KB and the registers hold."""
    rows = (64, 128) if kernel.startswith("dw") else (bm,)
    every = []
    for sizes in itertools.product(rows, (32, 64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        tile = tiles.fit(kernel, Tile(*sizes), n, 2, SHARED)
        registers = tile.bm * tiles.loaded(kernel, tile) // (32 * tile.warps)
        if tile.stages == sizes[-1] and 8 <= registers <= 128 and tile.bm <= max(64, m):
            every.append(tile)
    return list(dict.fromkeys(every))


def sweep(path: str, names: list[str], tokens: list[int]) -> None:
    """Writes milliseconds of every candidate."""
    lines = []
    for name, count in itertools.product(names, tokens):
        block = BLOCKS[name]
        full, small = measure.operands(block, count, torch.bfloat16, DEVICE, True)
        for entry in plan.entries([block], torch.bfloat16, tokens=[count], backward=True):

            def call(tile, on, entry=entry):
                with tiles.forced(entry.kernel, tile):
                    measure.run(entry, on)

            tried = candidates(entry.kernel, entry.height, entry.n, entry.k)
            tried = measure.compiled(entry, tried, small, plan.Limit())
            starts = [tile for tile, why_not in tried.items() if not why_not]
            calls = {t: (lambda t=t, call=call, full=full: call(t, full)) for t in starts}
            for tile, spread in times(calls, budget_ms=700).items():
                sizes = ",".join(map(str, vars(tile).values()))
                about = f"{name},{count},{entry.rows},{entry.kernel},{entry.n},{entry.k}"
                lines.append(f"{about},{full.order.block_m},{sizes},{spread.ms:.4f}")
        Path(path).write_text("\n".join(lines) + "\n")
        full = small = None
        free()
        print(name, count, len(lines), flush=True)


def one_tile(product):
    """Return the tile that every kernel had before there was a rule for such cards."""
    bm = 64 if product.kernel.startswith("dw") else product.bm
    size = product.dtype.itemsize
    return tiles.fit(product.kernel, Tile(bm, 64, 32, 4, 3), product.n, size, SHARED)


def compare(names: list[str], tokens: list[int]) -> None:
    """Prints milliseconds of whole blocks, both ways in turns, as CUDA graphs."""
    rule = tiles.heuristic
    print("| shape, T | pass | one tile, ms | the rule, ms | |\n|---|---|---|---|---|")
    for name, count in itertools.product(names, tokens):
        sizes = BLOCKS[name]
        size = Shape("qwen3_moe", sizes.hidden, sizes.inner, sizes.experts, sizes.top_k)
        block = build(size, dtype=torch.bfloat16, device=DEVICE)
        moe_patch.patch(block)
        x = torch.randn(1, count, size.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        grad = x.clone().requires_grad_()

        def forward(block=block, x=x):
            with torch.no_grad():
                block(x)

        def backward(block=block, grad=grad):
            out = block(grad)
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, [grad, *block.parameters()], out.detach())

        for kind, call in (("forward", forward), ("forward + backward", backward)):
            calls = {}
            for way, chosen in (("one tile", one_tile), ("rule", rule)):
                tiles.heuristic = chosen
                tiles.forget()
                calls[way] = captured(call)
            ms = {way: spread.ms for way, spread in times(calls, budget_ms=1000).items()}
            gain = ms["one tile"] / ms["rule"]
            print(
                f"| {name}, {count} | {kind} | {ms['one tile']:.3f} | {ms['rule']:.3f} "
                f"| {gain:.2f} x |",
                flush=True,
            )
        tiles.heuristic = rule
        block = None
        free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sweep", "compare"))
    parser.add_argument("file", nargs="?", default="sweep.csv")
    parser.add_argument("--shape", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    options = parser.parse_args()
    if options.what == "sweep":
        sweep(options.file, options.shape, options.tokens)
    else:
        compare(options.shape, options.tokens)


if __name__ == "__main__":
    sys.exit(main())
