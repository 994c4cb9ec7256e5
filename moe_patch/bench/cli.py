"""python -m moe_patch bench: what it takes, what it prints, what it writes."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from .. import output, parity, shapes
from . import (
    block as bench,
)
from . import (
    distributed as bench_distributed,
)
from . import (
    families as bench_families,
)
from . import (
    fp8 as bench_fp8,
)
from . import (
    lora as bench_lora,
)
from . import (
    model as bench_model,
)
from . import (
    scaling,
)
from . import (
    tables as bench_tables,
)
from .block import Ceilings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = (1, 64, 1024, 4096)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Those that only `bench` has; --shape, --tokens, --dtype and --json it shares."""
    flag = command.add_argument
    flag("--mode", nargs="+", choices=bench.MODES, help="default: both; forward with --graph")
    flag("--graph", action="store_true", help="time CUDA graphs: no launches in the way")
    flag("--no-eager", action="store_true", help="leave out HF's slow loop")
    flag("--no-compile", action="store_true", help="leave out HF under torch.compile")
    flag("--csv", metavar="FILE", type=Path)
    flag("--png", metavar="FILE", type=Path, help="draw time and TFLOP/s over tokens")
    flag(
        "--families", metavar="NAME", nargs="*",
        help="time the experts of every family (or of these) at a published size instead",
    )  # fmt: skip
    flag(
        "--model-config",
        metavar="FILE",
        type=Path,
        help="time a whole model of random weights instead, from its config.json",
    )
    flag("--layers", metavar="N", type=int, help="of that model; default: all")
    flag(
        "--tasks", nargs="+", choices=bench_model.TASKS, help="of that model; default: no training"
    )
    flag(
        "--distributed", action="store_true",
        help="time expert parallelism and FSDP2 instead, on the ranks that torchrun starts",
    )  # fmt: skip
    flag(
        "--scaling", metavar="FILE", nargs="+", type=Path,
        help="CSV files of --distributed: what its first makes of more GPUs, beside the others; "
        "measures nothing",
    )  # fmt: skip
    flag("--network", metavar="GB/S", type=float, help="of a GPU to other hosts, for --scaling")
    flag(
        "--lora", metavar="RANK", type=int, nargs="?", const=16,
        help="time a training step with PEFT's adapters on frozen experts instead (rank 16)",
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Raises ValueError, in one sentence, for what cannot be asked for."""
    if options.network is not None and not options.scaling:
        raise ValueError("--network is for --scaling: name its CSV files")
    if options.layers is not None and options.layers < 1:
        raise ValueError(f"--layers {options.layers}: at least 1 layer is needed")
    for name in options.shape:
        shapes.find(name)
    if options.lora is not None:
        if options.lora < 1:
            raise ValueError(f"--lora {options.lora}: a rank of at least 1 is needed")
        if options.mode or options.graph:
            raise ValueError("--lora times forward and backward: leave out --mode and --graph")
        for name in options.shape:
            bench_lora.supported(name)
    if options.graph and "backward" in (options.mode or ()):
        raise ValueError("--graph times the forward only: leave out --mode backward")
    if "fp8" in (options.dtype or ()):
        others = ("mode", "graph", "no_eager", "no_compile", "png", "lora")
        given = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)]
        if len(options.dtype) > 1 or given or len(options.shape) > 1:
            found = given[0] if given else "other dtype and no second shape"
            raise ValueError(
                f"--dtype fp8 has rows of its own and takes no {found}: run bench twice"
            )
    ours = ("shape", "dtype", "mode", "graph", "no_eager", "no_compile", "png", "lora", "tokens")
    given = [f"--{name.replace('_', '-')}" for name in ours if getattr(options, name)]
    if options.distributed:
        own = ("--shape", "--tokens")
        given = [name for name in given if name not in own]
        given += ["--model-config"] * (options.model_config is not None)
        given += ["--families"] * (options.families is not None)
        if given:
            raise ValueError(
                f"--distributed times a model over ranks and takes no {given[0]}: run bench twice"
            )
        if len(options.shape) > 1 or len(options.tokens or ()) > 1:
            raise ValueError("--distributed takes one --shape and one number of --tokens")
        if options.shape and shapes.find(options.shape[0]).family != "qwen3_moe":
            raise ValueError(f"--distributed is of Qwen3-MoE, and {options.shape[0]} is not")
        if "RANK" not in os.environ:
            raise ValueError(
                "--distributed needs ranks: torchrun --nproc-per-node 2 -m moe_patch bench "
                "--distributed"
            )
    if options.families is not None:
        given = [name for name in given if name != "--tokens"]
        given += ["--model-config"] * (options.model_config is not None)
        if given:
            raise ValueError(
                f"--families times experts of all families and takes no {given[0]}: run bench twice"
            )
    if options.model_config:
        if given:
            raise ValueError(
                f"--model-config times a whole model and takes no {given[0]}: run bench twice"
            )
        bench_model.read_config(options.model_config, options.layers)
    elif options.tasks or (options.layers is not None and not options.distributed):
        raise ValueError("--layers and --tasks are of a whole model: name its --model-config")
    trains = set(options.tasks or ()) & set(bench_model.TRAINING)
    needs_peft = options.lora is not None or trains
    if needs_peft and importlib.util.find_spec("peft") is None:
        raise ValueError("LoRA needs PEFT, which the extra moe_patch[lora] installs")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which the extra moe_patch[bench] installs")
    taken: dict[str, str] = {}
    for flag in ("--csv", "--png", "--json"):
        file = getattr(options, flag[2:])
        if not file or str(file) == "-":
            continue
        output.check_writable(flag, file)
        other = taken.setdefault(os.path.realpath(file), flag)
        if other != flag:
            raise ValueError(f"{other} and {flag} name the same file {str(file)!r}: name two")


def run(options: argparse.Namespace) -> int:
    """Times, prints, writes. Returns 1 when parity fails, with no times shown (of that family); 2
    without a MoE. Stopped halfway, it prints the rows that it has, and raises."""
    failed: list[parity.ParityReport] = []
    rows: list[Any] = []
    try:
        with progress_bar() as progress:
            if options.distributed:
                done = _distributed(options, progress, rows)
            elif options.families is not None:
                done = _families(options, progress, rows, failed)
            elif "fp8" in (options.dtype or ()):
                done = _fp8(options, progress, rows)
            else:
                done = (_models if options.model_config else _blocks)(options, progress, rows)
    except BaseException:
        if rows and not _silent(options):
            _show(options, rows, sys.stderr if options.json == "-" else sys.stdout)
        raise
    if isinstance(done, str):
        print(f"moe_patch: {done}", file=sys.stderr)
        return 2
    if isinstance(done, parity.ParityReport):
        print(done)
        print("moe_patch: no times are shown, because parity fails", file=sys.stderr)
        return 1
    ceilings, notes = done
    if _silent(options):
        return 0
    environment = parity.environment("cuda")
    text = to_json(rows, environment=environment, ceilings=ceilings, notes=notes)
    if options.json == "-":
        print(text)
    else:
        print("\n".join([f"moe_patch bench on {environment}", *map(str, ceilings)]))
        _show(options, rows, sys.stdout)
        print("".join(f"note: {note}\n" for note in notes), end="")
    # after the tables: a disk that is full by now takes no times away
    if options.csv:
        write_csv(rows, options.csv)
    if options.png and rows:
        bench_tables.figure(rows).savefig(options.png, dpi=120)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    for report in failed:
        print(report, file=sys.stderr)
    return 1 if failed else 0


def _silent(options: argparse.Namespace) -> bool:
    """Whether another rank prints and writes."""
    return options.distributed and os.environ["RANK"] != "0"


def _show(options: argparse.Namespace, rows: Sequence[Any], file: TextIO) -> None:
    tables = bench_tables.rate_tables if options.model_config else bench_tables.timing_tables
    tables = bench_tables.family_table if options.families is not None else tables
    tables = bench_tables.fp8_table if "fp8" in (options.dtype or ()) else tables
    tables = bench_tables.distributed_table if options.distributed else tables
    for table in tables(rows):
        output.show(table, output.console(file))


def print_scaling(options: argparse.Namespace) -> None:
    """The table of --scaling. Raises ValueError for a file that is not of --distributed, and for
    options that it would not look at."""
    network = scaling.NETWORK_GB_S if options.network is None else options.network
    if not 0 < network < math.inf:
        raise ValueError(f"--network {network}: a rate above 0 is needed, in GB/s")
    own = ("scaling", "network", "command", "run")
    for name, value in vars(options).items():
        if name not in own and value not in (None, False, []):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"--scaling measures nothing and takes no {flag}: leave it out")
    rates, *others = map(scaling.read, options.scaling)
    output.show(bench_tables.scaling_table(rates, network), output.console(sys.stdout))
    for ranks, model, measured in scaling.checked(rates, others):
        print(f"{ranks} GPUs: model {model:.3f} ms, measured {measured:.3f} ms")


Done = tuple[list[Ceilings], list[str]]


def _blocks(
    options: argparse.Namespace, progress: Progress, timings: list[Any]
) -> Done | parity.ParityReport:
    dtypes = [DTYPES[name] for name in options.dtype or ["bf16"]]
    modes = options.mode or (["forward"] if options.graph else list(bench.MODES))
    names = options.shape or ["qwen3_30b", *([] if options.lora else ["llama4_scout"])]
    if options.lora:
        modes = [bench_lora.MODE]
    todo = [*itertools.product(names, dtypes, modes, options.tokens or TOKENS)]
    task = progress.add_task("", total=len(todo))
    notes = []
    for name, dtype, mode, tokens in todo:
        progress.update(task, description=f"{name} {str(dtype)[6:]} {mode} {tokens}")
        if options.lora:
            result = bench_lora.bench_lora(name, tokens, rank=options.lora, dtype=dtype)
        else:
            result = bench.bench(
                name,
                tokens,
                mode=mode,
                dtype=dtype,
                eager=not options.no_eager,
                compiled=not options.no_compile,
                graph=options.graph,
            )
        if result.report and not result.report.passed:
            return result.report
        timings += result.timings
        notes += result.notes
        progress.advance(task)
    timed = dict.fromkeys(getattr(torch, t.dtype) for t in timings)
    return [*map(bench.ceilings, timed)], notes


def _models(
    options: argparse.Namespace, progress: Progress, rates: list[Any]
) -> Done | parity.ParityReport | str:
    name, todo = options.model_config.stem, bench_model.rows(options.tasks or bench_model.DEFAULT)
    task = progress.add_task(f"{name}: building", total=len(todo))
    config = bench_model.read_config(options.model_config, options.layers)
    try:
        model = bench_model.build(config)
        progress.update(task, description=f"{name}: parity")
        report = parity.check_parity(model, blocks=1, backward=False)
    except torch.OutOfMemoryError as error:
        note = bench.short_of(error, f"{config.get_text_config().num_hidden_layers} layers")
        return [], [f"{name}: skipped, {note}: use --layers"]
    except ValueError as error:  # no block of it can be patched
        return bench.first_line(error)
    if not report.passed:
        return report
    notes = []
    for row in todo:
        progress.update(task, description="{}: {} {} x {}".format(name, *row))
        found = bench_model.rate(model, name, *row)
        (notes if isinstance(found, str) else rates).append(found)
        progress.advance(task)
    return [], notes


def _families(
    options: argparse.Namespace,
    progress: Progress,
    timings: list[Any],
    failed: list[parity.ParityReport],
) -> Done | str:
    todo = bench_families.rows()
    unknown = set(options.families) - {one.family for one in todo}
    if unknown:
        known = ", ".join(sorted({one.family for one in todo}))
        return f"no fused family is called {', '.join(sorted(unknown))}: there are {known}"
    todo = [one for one in todo if not options.families or one.family in options.families]
    task = progress.add_task("", total=len(todo))
    notes = []
    for one in todo:
        progress.update(task, description=one.family)
        tokens = tuple(options.tokens or bench_families.TOKENS)
        found = bench_families.bench_family(one, tokens)
        if isinstance(found, parity.ParityReport):
            failed.append(found)
            notes.append(f"{one.family}: no times, {found.verdict}")
        elif isinstance(found, str):
            notes.append(found)
        else:
            timings += found
        if options.csv:  # a minute or more: what is there is kept
            write_csv(timings, options.csv)
        progress.advance(task)
    return [], notes


def _fp8(
    options: argparse.Namespace, progress: Progress, timings: list[Any]
) -> Done | parity.ParityReport:
    shape = (options.shape or ["dsv3_ep32"])[0]
    task = progress.add_task("", total=None)
    for row in bench_fp8.rows(shape, tuple(options.tokens or bench_fp8.TOKENS)):
        progress.update(task, description=row.name)
        found = bench_fp8.bench_fp8(row)
        if isinstance(found, parity.ParityReport):
            return found
        timings += found
        if options.csv:
            write_csv(timings, options.csv)
    return [], []


def _distributed(
    options: argparse.Namespace, progress: Progress, found: list[Any]
) -> Done | parity.ParityReport:
    name = options.shape[0] if options.shape else "qwen3_30b"
    device = bench_distributed.start()
    task = progress.add_task(f"{name}: parity", total=len(bench_distributed.TASKS))
    for row in bench_distributed.measure(
        shapes.find(name),
        name,
        tokens=(options.tokens or [bench_distributed.TOKENS])[0],
        layers=options.layers or bench_distributed.LAYERS,
        device=device,
    ):
        if isinstance(row, parity.ParityReport):
            return row
        found.append(row)
        if options.csv and os.environ["RANK"] == "0":  # minutes: what is there is kept
            write_csv(found, options.csv)
        progress.update(task, advance=1, description=row.task)
    torch.distributed.destroy_process_group()
    return [], []


def progress_bar() -> Progress:
    """How far it is, what is under way and for how long, on stderr; gone in the end."""
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return output.progress(*columns, TimeElapsedColumn())


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """One line for each of these dataclasses, with a header; an empty file when there are none."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])] if rows else [])
        if rows:
            writer.writeheader()
        writer.writerows(map(asdict, rows))


def to_json(rows: Iterable[Any], *, ceilings: Iterable[Ceilings] = (), **about: Any) -> str:
    """The rows and what they hold for: environment, ceilings, notes."""
    found = {"ceilings": [*map(asdict, ceilings)], "timings": [*map(asdict, rows)]}
    return json.dumps(about | found, indent=2)
