"""python -m moe_patch env | parity | bench | tune"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import nn

from . import checkpoint, environment, kernels, output, parity, shapes, tune
from .bench import cli as bench_cli
from .bench.cli import DTYPES
from .kernels import table as kernels_table
from .models import SWAPS
from .switch import ENABLED

T = TypeVar("T")
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UsageError(Exception):
    """A request that cannot be carried out; the message is one sentence."""


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, and its subcommands with it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when it holds, 1 when parity fails, 2 when there is no answer (a usage error, a file that
        cannot be read or written, too little memory), 130 after Ctrl-C.
    """
    code = 2
    try:
        _refuse_empty(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(arguments)
        if options.command == "parity" and arguments is None:
            _interpret()
        code = options.run(options)
        # a full disk or a closed pipe shows now, and not after the exit code is chosen
        sys.stdout.flush()
        return code
    except UsageError as error:
        message = str(error)
    except KeyboardInterrupt:
        message, code = "stopped by Ctrl-C", 130
    except OSError as error:
        message, code = f"{type(error).__name__}: {error}", 2
        if error.errno in _OUTPUT_ERRORS:
            message = f"the output cannot be written: {error.strerror}"
            _forget_output()
    except Exception as error:
        message, code = _unforeseen(error), 2
    print("moe_patch:", *(line.strip() for line in message.splitlines()), file=sys.stderr)
    return code


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raises UsageError for an empty argument: a variable that is not set asks for no default."""
    for i, argument in enumerate(arguments):
        if not argument.strip() or (argument.startswith("--") and argument.endswith("=")):
            flag = argument.strip(" =") or (arguments[i - 1] if i else "")
            raise UsageError(f"the argument after {flag!r} is empty: is a shell variable not set?")


def _forget_output() -> None:
    """Sends what is still buffered for stdout nowhere: Python's exit would fail on it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(error: Exception) -> str:
    """Returns a sentence, after a traceback where the error is nobody's input."""
    first = str(error).partition("\n")[0][:200]
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in first
    if short:
        return f"too little memory, use fewer --tokens: {first or 'on the host'}"
    traceback.print_exception(error)
    return f"{type(error).__name__} was not foreseen: please report the lines above"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m moe_patch", description=__doc__)
    version = f"moe_patch {parity.versions()['moe_patch']}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "env", help="versions, GPUs, what runs here, which families are fused"
    )
    command.set_defaults(run=_env)

    command = commands.add_parser(
        "parity",
        help="compare with Hugging Face's code and a float64 truth; exit code 0 or 1",
        description="Without a folder or a shape: small Qwen3-MoE and Llama4 models in Triton's "
        "interpreter, or blocks of the sizes qwen3_30b and llama4_scout on a GPU. Exit codes: 0 "
        "when every row holds, 1 when one does not, 2 when there is no answer, 130 after Ctrl-C.",
    )
    command.add_argument("folder", nargs="?", help="a local checkpoint")
    command.add_argument("--blocks", help="of the checkpoint: a name or 'all' (default: a few)")
    command.add_argument("--model-level", action="store_true", help="compare its logits too")
    command.add_argument("--forward-only", action="store_true", help="no gradients")
    command.add_argument("--thorough", action="store_true", help="every path and way to train")
    command.add_argument("--seed", type=_seed, default=0)
    command.set_defaults(run=_parity)
    _common(command, dtypes="bf16 on a GPU, fp32 and fp16 without; a checkpoint's own")

    command = commands.add_parser(
        "bench", help="times against Hugging Face's implementations, after parity holds"
    )
    bench_cli.add_arguments(command)
    command.set_defaults(run=_bench)
    _common(command, dtypes="bf16", more=("fp8",))

    command = commands.add_parser(
        "tune",
        help="measure kernel configurations on this card, for the library to use",
        description="Writes tiles.json in $MOE_PATCH_CACHE, else in $XDG_CACHE_HOME/moe_patch, "
        "else in ~/.cache/moe_patch, after every entry: Ctrl-C keeps those. More runs add to it; "
        "delete the file to undo. It holds for this card and this Triton.",
    )
    names = ", ".join(shapes.SHAPES)
    command.add_argument("--shape", nargs="+", default=["qwen3_30b"], metavar="NAME", help=names)
    command.add_argument(
        "--tokens", nargs="+", type=_positive, default=tune.TOKENS, metavar="N", help="default: "
        + " ".join(map(str, tune.TOKENS)),
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, default="bf16")
    command.add_argument("--backward", action="store_true", help="the backward's kernels too")
    command.add_argument("--kernel", nargs="+", choices=(*tune.FORWARD, *tune.BACKWARD), default=[])
    command.add_argument("--output", type=Path, metavar="FILE", help="instead of the user's file")
    command.set_defaults(run=_tune)
    return parser


def _common(command: argparse.ArgumentParser, dtypes: str, more: tuple[str, ...] = ()) -> None:
    command.add_argument(
        "--shape", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(shapes.SHAPES)}"
    )
    command.add_argument("--tokens", nargs="+", type=_positive, metavar="N")
    command.add_argument("--dtype", nargs="+", choices=(*DTYPES, *more), help=f"default: {dtypes}")
    command.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write json, to stdout without FILE"
    )


def _whole(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def _positive(text: str) -> int:
    return _whole(text, 1, 2**31 - 1)


def _seed(text: str) -> int:
    return _whole(text, 0, 2**63 - 1)


def _interpret() -> None:
    """Without a GPU, starts this command again with Triton's interpreter.

    Triton reads the variable when it is imported, and by now transformers has imported it.
    """
    if _device() == "cuda":
        return
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _device() -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "cuda" if torch.cuda.is_available() and not interpreted else "cpu"


def _env(_: argparse.Namespace) -> int:
    lines = {name: found or "not installed" for name, found in parity.versions().items()}
    lines["platform"] = platform.platform()
    lines["CUDA of torch"] = torch.version.cuda or torch.version.hip or "none"
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        memory = f"{card.total_memory / 2**30:.0f} GiB"
        lines[f"GPU {i}"] = f"{card.name}, capability {card.major}.{card.minor}, {memory}"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        lines["driver"] = ", ".join(dict.fromkeys(answer.stdout.split())) or "unknown"
    for name in ("TRITON_INTERPRET", "MOE_PATCH"):
        lines[name] = os.environ.get(name) or "not set"
    gpu = kernels.why_not("cuda") or (None if torch.cuda.is_available() else "no GPU found")
    lines["kernels on a GPU"] = gpu or "run"
    cpu = kernels.why_not("cpu") is None
    lines["kernels on the CPU"] = "run, interpreted" if cpu else "for tests: TRITON_INTERPRET=1"
    if not ENABLED:
        lines["patched blocks"] = f"run Hugging Face's own forward ({_switch()})"
    lines["fused classes"] = ", ".join(cls.__name__ for cls in SWAPS)
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {text}" for name, text in lines.items()))
    print(f"\n{environment.table()}")
    return 0


def _switch() -> str:
    return f"MOE_PATCH={os.environ.get('MOE_PATCH') or 0}"


def _parity(options: argparse.Namespace) -> int:
    device, report = _device(), None
    off = f"{_switch()} is set, so patched blocks run Hugging Face's own forward: unset it"
    reason = kernels.why_not(device) or (None if ENABLED else off)
    if reason:
        raise UsageError(reason)
    if not options.folder and (options.blocks or options.model_level):
        flag = "--blocks" if options.blocks else "--model-level"
        raise UsageError(f"{flag} is of a checkpoint: name its folder before the options")
    if options.json and options.json != "-":
        _usage(output.check_writable, "--json", options.json)
    if device == "cpu" and "bf16" in (options.dtype or []):
        raise UsageError(
            "bf16 needs a GPU, because Triton's interpreter does not round to it: use --dtype fp32 "
            "or fp16"
        )
    more = {"thorough": True} if options.thorough else {}
    try:
        with _progress() as progress:
            task = progress.add_task("loading")
            for label, module, remark, extra in _subjects(options, device):
                progress.update(task, description=label)
                part = _usage(
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
            _show(report, sys.stderr if options.json == "-" else sys.stdout, whole=False)
        raise
    text = json.dumps(report.to_dict(), indent=2)
    if options.json == "-":
        print(text)
    else:
        _show(report, sys.stdout)
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
        if small and not _usage(shapes.find, name).tiny:
            tiny = ", ".join(n for n, shape in shapes.SHAPES.items() if shape.tiny)
            raise UsageError(f"{name} needs a GPU: without one there are {tiny}")
    if options.folder:
        model, remark = _usage(checkpoint.load, options.folder, device)
        extra = {"blocks": options.blocks, "model_level": options.model_level}
        for dtype in options.dtype or (["fp32"] if small else [None]):
            label = f"{options.folder} {dtype or ''}"
            yield label, model, remark, {"dtype": dtype and DTYPES[dtype], **extra}
    dtypes = options.dtype or (["fp32", "fp16"] if small else ["bf16"])
    for name, dtype in itertools.product(names, dtypes):
        yield f"{name} {dtype}", _usage(build, name, dtype=DTYPES[dtype], device=device), "", {}


def _usage(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls; what the function refuses becomes a usage error."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _bench(options: argparse.Namespace) -> int:
    if options.scaling:
        _usage(bench_cli.print_scaling, options)
        return 0
    _usage(bench_cli.check, options)
    if _device() == "cpu":
        raise UsageError("bench needs a GPU: times of Triton's interpreter would mean nothing")
    return bench_cli.run(options)


def _tune(options: argparse.Namespace) -> int:
    for name in options.shape:
        _usage(shapes.find, name)
    backward = [kernel for kernel in options.kernel if kernel in tune.BACKWARD]
    if backward and not options.backward:
        raise UsageError(f"{backward[0]} runs in the backward only: add --backward")
    if _device() == "cpu" or kernels.why_not("cuda"):
        raise UsageError(kernels.why_not("cuda") or "tune needs a GPU, the one it tunes for")
    results: list[tune.Result] = []
    each = [len(tune.jobs(shapes.find(n), options.backward, options.kernel)) for n in options.shape]
    code = 0
    with bench_cli.progress_bar() as progress:
        task = progress.add_task("", total=sum(each) * len(options.tokens))
        try:
            for result in _usage(
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
    _show_tiles(results)
    path = options.output or kernels_table.user_file()
    count = sum(not result.note for result in results)
    print(f"{'stopped: ' if code else ''}{count} entries in {path}")
    return code


def _show_tiles(results: Sequence[tune.Result]) -> None:
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


def _progress() -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return output.progress(*columns)


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"the report is above, but not in {file!r}: {reason}") from error


def _show(report: parity.ParityReport, file: TextIO, whole: bool = True) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
