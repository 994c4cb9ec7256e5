"""python -m moe_patch parity: small models, named shapes or a checkpoint under the parity law."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from torch import nn

from .. import checkpoint, kernels, output, parity, shapes, switch
from ..usage import (
    DTYPES,
    Parser,
    UsageError,
    add_dtype,
    add_json,
    add_shape,
    add_tokens,
    refused,
    seed,
)
from . import running
from .running import PROG, Command

HELP = "compare with Hugging Face's code and a float64 truth; exit code 0 or 1"
ABOUT = (
    "Without a folder or a shape: small Qwen3-MoE and Llama4 models in Triton's "
    "interpreter, or blocks of the sizes qwen3_30b and llama4_scout on a GPU. Exit codes: 0 "
    "when every row holds, 1 when one does not, 2 when there is no answer, 130 after Ctrl-C."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What to compare, and where the report goes."""
    parser = Parser(f"{PROG} parity", description=ABOUT)
    flag = parser.add_argument
    flag("folder", nargs="?", help="a local checkpoint")
    flag("--blocks", help="of the checkpoint: a name or 'all' (default: a few)")
    flag("--model-level", action="store_true", help="compare its logits too")
    flag("--forward-only", action="store_true", help="no gradients")
    flag("--thorough", action="store_true", help="every path and way to train")
    flag("--seed", type=seed, default=0)
    add_shape(flag)
    add_tokens(flag)
    add_dtype(flag, "bf16 on a GPU, fp32 and fp16 without; a checkpoint's own")
    add_json(flag)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Compares, prints, writes: 0 when every row holds, 1 when one does not."""
    device, report = running.device(), None
    off = (
        f"{running.switch_off()} is set, so patched blocks run Hugging Face's own forward: unset it"
    )
    reason = kernels.why_not(device) or (None if switch.ENABLED else off)
    if reason:
        raise UsageError(reason)
    if not options.folder and (options.blocks or options.model_level):
        flag = "--blocks" if options.blocks else "--model-level"
        raise UsageError(f"{flag} is of a checkpoint: name its folder before the options")
    if options.json and options.json != "-":
        refused(output.check_writable, "--json", options.json)
    if device == "cpu" and "bf16" in (options.dtype or []):
        raise UsageError(
            "bf16 needs a GPU, because Triton's interpreter does not round to it: use --dtype fp32 "
            "or fp16"
        )
    more = {"thorough": True} if options.thorough else {}
    try:
        with running.spinner() as progress:
            task = progress.add_task("loading")
            for label, module, remark, extra in _subjects(options, device):
                progress.update(task, description=label)
                part = refused(
                    parity.check_parity,
                    module,
                    tokens=options.tokens,
                    backward=not options.forward_only,
                    seed=options.seed,
                    **extra,
                    **more,
                )
                if remark:
                    part = replace(part, skipped=[*part.skipped, remark])
                report = part if report is None else report + part
    except BaseException as error:
        # hours may be behind it; an interrupted check_parity leaves what it had finished
        part = getattr(error, "report", None)
        report = part if report is None else report + part if part else report
        if report:
            show(report, sys.stderr if options.json == "-" else sys.stdout, whole=False)
        raise
    text = json.dumps(report.to_dict(), indent=2)
    if options.json == "-":
        print(text)
    else:
        show(report, sys.stdout)
    if options.json and options.json != "-":
        _write(options.json, text)
    if not report.rows:
        raise UsageError("nothing was checked, and the report says why")
    return 0 if report.passed else 1


def _subjects(
    options: argparse.Namespace, device: str
) -> Iterator[tuple[str, nn.Module, str, dict[str, Any]]]:
    """(label, module, what else to tell, arguments of check_parity) of everything to compare."""
    small = device == "cpu"
    names, build = options.shape, shapes.build
    if not names and not options.folder:
        names = ["tiny_qwen3", "tiny_llama4"] if small else ["qwen3_30b", "llama4_scout"]
        build = functools.partial(shapes.build_model, layers=1) if small else shapes.build
    for name in names:
        if small and not refused(shapes.find, name).tiny:
            tiny = ", ".join(n for n, shape in shapes.SHAPES.items() if shape.tiny)
            raise UsageError(f"{name} needs a GPU: without one there are {tiny}")
    if options.folder:
        model, remark = refused(checkpoint.load, options.folder, device)
        extra = {"blocks": options.blocks, "model_level": options.model_level}
        for dtype in options.dtype or (["fp32"] if small else [None]):
            label = f"{options.folder} {dtype or ''}"
            yield label, model, remark, {"dtype": dtype and DTYPES[dtype], **extra}
    dtypes = options.dtype or (["fp32", "fp16"] if small else ["bf16"])
    for name, dtype in itertools.product(names, dtypes):
        yield f"{name} {dtype}", refused(build, name, dtype=DTYPES[dtype], device=device), "", {}


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"the report is above, but not in {file!r}: {reason}") from error


def show(report: parity.ParityReport, file: TextIO, whole: bool = True) -> None:
    """Prints a report; without its verdict when it is not whole."""
    console = Console(file=file)
    if not console.is_terminal:
        lines = str(report).splitlines()
        print("\n".join(x for x in lines if whole or x != report.verdict), file=file)
        return
    console.print(f"moe_patch parity on {report.environment}")
    for section in report.sections:
        table = Table(*parity.HEADER, title=parity.title(section), title_justify="left")
        for row in section.rows:
            table.add_row(*parity.cells(row), style=None if row.passed else "bold red")
        output.show(table, console)
    for line in report.skipped:
        console.print(f"not checked: {line}", markup=False)
    if whole:
        console.print(report.verdict, style="green" if report.passed else "bold red")


COMMAND = Command("parity", HELP, parse, run, interpreted=True)
