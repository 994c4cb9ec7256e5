"""python -m moe_patch tune: measures tiles on this card, shows what they gain."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import ProgressColumn, Task
from rich.table import Table
from rich.text import Text

from .. import kernels, output, shapes, tune
from ..tune import blocks, plan
from ..tune.plan import Entry, Limit
from ..usage import DTYPES, Parser, UsageError, positive, refused
from . import running
from .running import PROG, Command

HELP = "measure kernel configurations on this card, for the library to use"
ABOUT = (
    "Measures tiles on this card and writes them, after every entry, to tiles.json in "
    "$MOE_PATCH_CACHE, else in $XDG_CACHE_HOME/moe_patch, else in ~/.cache/moe_patch. The library "
    "uses them from then on, with this card and this Triton. What matters most comes first, and "
    "Ctrl-C or the limit of time keeps what is finished. The same command continues: entries that "
    "the file has are skipped. Delete the file to undo."
)
MINUTES = 2.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options: what to tune, for how long, and where the tiles go."""
    parser = Parser(f"{PROG} tune", description=ABOUT)
    flag = parser.add_argument
    flag(
        "--shape", nargs="+", default=["qwen3_30b"], metavar="NAME",
        help=f"a checkpoint's folder or config.json, or of {', '.join(shapes.SHAPES)}; "
        "default: qwen3_30b",
    )  # fmt: skip
    flag(
        "--tokens", nargs="+", type=positive, default=[], metavar="N",
        help="measured in this order; default: numbers that give an expert 1 to 4096 rows",
    )  # fmt: skip
    flag("--dtype", choices=DTYPES, default="bf16", help="of the activations; default: bf16")
    flag(
        "--fp8", action="store_true",
        help="the kernels that read FP8 weights, instead of those that read weights in --dtype; "
        "FP8 checkpoints need no flag",
    )  # fmt: skip
    flag("--backward", action="store_true", help="the backward's kernels too")
    flag("--kernel", nargs="+", choices=plan.KERNELS, default=[], help="these alone")
    flag(
        "--minutes", type=_minutes, default=MINUTES, metavar="N",
        help=f"stop after so many, 0.5 too; default: {MINUTES:g}",
    )  # fmt: skip
    flag("--again", action="store_true", help="measure entries that the file already has, too")
    flag("--output", type=Path, metavar="FILE", help="instead of the user's file")
    return parser.parse_args(arguments)


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return number


class Left(ProgressColumn):
    """The time that is left: until all is measured, as far as that is known, or the limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__()
        self.limit = limit

    def render(self, task: Task) -> Text:
        """Return it as minutes and seconds."""
        known = math.inf if task.time_remaining is None else task.time_remaining
        minutes, seconds = divmod(math.ceil(min(known, self.limit.left())), 60)
        return Text(f"{minutes}:{seconds:02} left")


def run(options: argparse.Namespace) -> int:
    """Tunes, prints what was gained and what was not reached: 130 after Ctrl-C."""
    wanted = [refused(blocks.find, name, fp8=options.fp8) for name in options.shape]
    backward = [kernel for kernel in options.kernel if kernel in plan.BACKWARD]
    if backward and not options.backward:
        raise UsageError(f"{backward[0]} runs in the backward only: add --backward")
    if running.device() == "cpu" or kernels.why_not("cuda"):
        raise UsageError(kernels.why_not("cuda") or "tune needs a GPU, the one it tunes for")
    device, dtype = _device(), DTYPES[options.dtype]
    todo = plan.entries(
        wanted, dtype, tokens=options.tokens, backward=options.backward, kernels=options.kernel
    )
    if not todo:
        raise UsageError(
            f"--kernel {' '.join(options.kernel)} leaves nothing to tune, because "
            f"{' and '.join(options.shape)} run other kernels: leave it out to tune those"
        )
    try:
        path, known = refused(tune.open_file, options.output, device)
    except OSError as error:
        raise UsageError(f"the tiles cannot be written: {error}") from error
    skipped = 0 if options.again else sum(entry.key in known for entry in todo)
    todo = [entry for entry in todo if options.again or entry.key not in known]
    results: list[tune.Result] = []
    code = _measure(todo, dtype, path, device, Limit(60 * options.minutes), results)
    show(results)
    count = sum(result.measured is not None for result in results)
    print(f"{'stopped: ' if code else ''}{count} new entries in {path}")
    if skipped:
        print(f"skipped {skipped} entries that the file had: --again measures them anew")
    done = {result.entry for result in results}
    left = [entry for entry in todo if entry not in done]
    if left:
        print(f"not reached: {len(left)} of {len(todo)} entries, {listed(left)}")
        print("\n".join(["to continue:", *commands(options, left)]))
    return code


def _measure(
    todo: Sequence[Entry],
    dtype: torch.dtype,
    path: Path,
    device: torch.device,
    limit: Limit,
    results: list[tune.Result],
) -> int:
    """Measures in turn and appends to `results`; returns 130 after Ctrl-C, else 0."""
    with running.bar(Left(limit)) as progress:
        task = progress.add_task("", total=len(todo))

        def say(text: str) -> None:
            progress.update(task, description=text)

        try:
            for result in tune.tune(todo, dtype, path, device, limit=limit, say=say):
                results.append(result)
                progress.advance(task)
        except OSError as error:
            raise UsageError(f"the tiles cannot be written: {error}") from error
        except KeyboardInterrupt:
            return 130
    return 0


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def listed(left: Sequence[Entry]) -> str:
    """Say which rows and kernels of which shapes these are."""
    parts = []
    for name in dict.fromkeys(entry.block.name for entry in left):
        mine = [entry for entry in left if entry.block.name == name]
        rows = ", ".join(str(rows) for rows in dict.fromkeys(entry.rows for entry in mine))
        names = ", ".join(dict.fromkeys(entry.kernel for entry in mine))
        parts.append(f"of {name} at {rows} rows an expert ({names})")
    return "; ".join(parts)


def commands(options: argparse.Namespace, left: Sequence[Entry]) -> list[str]:
    """Return the command lines that measure what is left.

    The same one skips what the file has by then. With --again nothing is skipped, so that there is
    one for each shape, with the tokens that are left.
    """
    if not options.again:
        return [_line(options, options.shape, options.tokens)]
    names = dict.fromkeys(entry.block.name for entry in left)
    tokens = {n: dict.fromkeys(e.tokens for e in left if e.block.name == n) for n in names}
    return [_line(options, [name], tokens[name]) for name in names]


def _line(options: argparse.Namespace, names: Iterable[str], tokens: Iterable[int]) -> str:
    flags = {"--shape": [*names], "--tokens": [*tokens], "--kernel": options.kernel}
    flags["--dtype"] = [options.dtype] if options.dtype != "bf16" else []
    flags["--minutes"] = [f"{options.minutes:g}"] if options.minutes != MINUTES else []
    flags["--output"] = [options.output] if options.output else []
    words = [word for flag, values in flags.items() if values for word in (flag, *values)]
    words += [f"--{name}" for name in ("fp8", "backward", "again") if getattr(options, name)]
    return f"{PROG} tune {shlex.join(map(str, words))}"


def show(results: Sequence[tune.Result]) -> None:
    """Prints a table a shape, and one sentence on what its forward and its backward gain."""
    header = ("kernel", "N x K", "rows an expert", "before", "after", "ms", "ms after", "gain")
    for name in dict.fromkeys(result.entry.block.name for result in results):
        mine = [result for result in results if result.entry.block.name == name]
        table = Table(*header, title=name, title_justify="left")
        for result in mine:
            table.add_row(*_row(result))
        console = output.console(sys.stdout)
        output.show(table, console)
        for remark in _remarks(name, mine):
            console.print(remark, markup=False, highlight=False)
    found = [result.measured for result in results if result.measured]
    spent = sum(each.compile_s for each in found), sum(each.measure_s for each in found)
    if found:
        print("compiled in {:.0f} s, measured in {:.0f} s".format(*spent))


def _row(result: tune.Result) -> Iterator[str]:
    entry, found = result.entry, result.measured
    yield from (entry.kernel, f"{entry.n} x {entry.k}", str(entry.rows))
    if found is None:
        yield result.note
        return
    same, starts = found.after == found.before, math.isfinite(found.before_ms)
    yield _tile(found.before)
    yield "the same" if same else _tile(found.after)
    yield f"{found.before_ms:.4f}" if starts else "does not start"
    yield f"{found.after_ms:.4f}"
    yield f"{_gain(found.before_ms, found.after_ms):.0f} %" if starts else ""


def _gain(before: float, after: float) -> float:
    """Percent of the time that is saved."""
    return 100 * (1 - after / before)


def _remarks(name: str, results: Sequence[tune.Result]) -> Iterator[str]:
    """Gains of a shape, and where fewer experts than it has were measured."""
    said = [
        f"the kernels of one {which} take {_range(gains)} less time"
        for which in ("forward", "backward")
        if (gains := summed(results, which == "backward"))
    ]
    if said:
        yield f"{name}: summed at each number of rows, {' and '.join(said)}"
    fewer = {r.entry.rows: r for r in results if r.measured and r.experts < r.entry.block.experts}
    for rows, result in fewer.items():
        yield (
            f"{name} at {rows} rows an expert: measured with {result.experts} of its "
            f"{result.entry.block.experts} experts, which is what fits the card's free memory"
        )


def _range(gains: Sequence[float]) -> str:
    least, most = f"{min(gains):.0f}", f"{max(gains):.0f}"
    return f"{least} %" if least == most else f"{least} to {most} %"


def summed(results: Sequence[tune.Result], backward: bool) -> list[float]:
    """Return the gain of one forward, or of one backward, in percent, for each number of tokens at
    which all of its kernels were measured."""
    gains = []
    for tokens in dict.fromkeys(result.entry.tokens for result in results):
        mine = [result for result in results if result.entry.tokens == tokens]
        found = {(r.entry.kernel, r.entry.n, r.entry.k): r.measured for r in mine if r.measured}
        # two products of a block without a gate are one entry
        whole = [found.get(product[1:]) for product in plan.products(mine[0].entry.block, backward)]
        if all(each and math.isfinite(each.before_ms) for each in whole):
            before, after = sum(e.before_ms for e in whole), sum(e.after_ms for e in whole)
            gains.append(_gain(before, after))
    return gains


def _tile(tile: object) -> str:
    return "{bm}x{bn}x{bk} w{warps} s{stages} g{group_m}".format(**vars(tile))


COMMAND = Command("tune", HELP, parse, run)
