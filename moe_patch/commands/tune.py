"""python -m moe_patch tune: measures tiles on this card, shows them."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import kernels, output, shapes, tune
from ..kernels import table as kernels_table
from ..usage import DTYPES, Parser, UsageError, positive, refused
from . import running
from .running import PROG, Command

HELP = "measure kernel configurations on this card, for the library to use"
ABOUT = (
    "Writes tiles.json in $MOE_PATCH_CACHE, else in $XDG_CACHE_HOME/moe_patch, "
    "else in ~/.cache/moe_patch, after every entry: Ctrl-C keeps those. More runs add to it; "
    "delete the file to undo. It holds for this card and this Triton."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What to tune, and where the tiles go."""
    parser = Parser(f"{PROG} tune", description=ABOUT)
    flag = parser.add_argument
    names, tokens = ", ".join(shapes.SHAPES), " ".join(map(str, tune.TOKENS))
    flag("--shape", nargs="+", default=["qwen3_30b"], metavar="NAME", help=names)
    flag(
        "--tokens", nargs="+", type=positive, default=tune.TOKENS, metavar="N",
        help=f"default: {tokens}",
    )  # fmt: skip
    flag("--dtype", choices=DTYPES, default="bf16")
    flag("--backward", action="store_true", help="the backward's kernels too")
    flag("--kernel", nargs="+", choices=(*tune.FORWARD, *tune.BACKWARD), default=[])
    flag("--output", type=Path, metavar="FILE", help="instead of the user's file")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Tunes, prints what was found: 130 after Ctrl-C, with what is written until then."""
    for name in options.shape:
        refused(shapes.find, name)
    backward = [kernel for kernel in options.kernel if kernel in tune.BACKWARD]
    if backward and not options.backward:
        raise UsageError(f"{backward[0]} runs in the backward only: add --backward")
    if running.device() == "cpu" or kernels.why_not("cuda"):
        raise UsageError(kernels.why_not("cuda") or "tune needs a GPU, the one it tunes for")
    results: list[tune.Result] = []
    each = [len(tune.jobs(shapes.find(n), options.backward, options.kernel)) for n in options.shape]
    code = 0
    with running.bar() as progress:
        task = progress.add_task("", total=sum(each) * len(options.tokens))
        try:
            for result in refused(
                tune.tune,
                options.shape,
                options.tokens,
                dtype=DTYPES[options.dtype],
                backward=options.backward,
                kernels=options.kernel,
                output=options.output,
                say=lambda text: progress.update(task, description=text),
            ):
                results.append(result)
                progress.advance(task)
        except OSError as error:
            raise UsageError(f"the tiles cannot be written: {error}") from error
        except KeyboardInterrupt:
            code = 130
    show(results)
    path = options.output or kernels_table.user_file()
    count = sum(not result.note for result in results)
    print(f"{'stopped: ' if code else ''}{count} entries in {path}")
    return code


def show(results: Sequence[tune.Result]) -> None:
    """Prints a table a shape."""
    header = ("kernel", "N x K", "tokens", "rows an expert", "heuristic", "ms", "fastest", "ms")
    for name, group in itertools.groupby(results, lambda r: r.shape):
        table = Table(*header, title=name, title_justify="left")
        for r in group:
            row = [r.kernel, f"{r.n} x {r.k}", str(r.tokens), str(r.rows)]
            if r.note:
                table.add_row(*row, r.note)
                continue
            changed = "the same" if r.after == r.before else _tile(r.after)
            table.add_row(
                *row, _tile(r.before), f"{r.before_ms:.4f}", changed, f"{r.after_ms:.4f}"
            )  # fmt: skip
        output.show(table, output.console(sys.stdout))
    spent = [sum(r.compile_s for r in results), sum(r.measure_s for r in results)]
    print("compiled in {:.0f} s, measured in {:.0f} s".format(*spent))


def _tile(tile: Any) -> str:
    return f"{tile.bm}x{tile.bn}x{tile.bk} w{tile.warps} s{tile.stages} g{tile.group_m}"


COMMAND = Command("tune", HELP, parse, run)
