"""Tables at 60, 80 and 120 columns: every number whole, no line wider than the terminal."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import fields

import pytest
import torch
from rich.console import Console
from rich.table import Table

from moe_patch import output, parity
from moe_patch.bench import block, distributed, families, fp8, model, scaling
from moe_patch.bench.block import OURS, Timing
from moe_patch.bench.distributed import Measured
from moe_patch.bench.families import FamilyTiming
from moe_patch.bench.fp8 import Fp8Timing
from moe_patch.bench.model import Rate
from moe_patch.commands import parity as parity_command
from moe_patch.commands import tune as tune_command
from moe_patch.kernels.tiles import Tile
from moe_patch.tune import Result, measure, plan
from moe_patch.tune.blocks import Block

NUMBER = re.compile(r"\d[\w.+-]*")
widths = pytest.mark.parametrize("width", [60, 80, 120])


def numbers(text: str) -> list[str]:
    return [word.rstrip(".,;:") for word in NUMBER.findall(text)]


def check(shown: str, expected: str, width: int) -> None:
    """Every number of `expected` is in a line of `shown`, and every line fits."""
    assert max(map(len, shown.splitlines())) <= width, shown
    found = set(numbers(shown))
    missing = [number for number in numbers(expected) if number not in found]
    assert not missing, f"{missing} cut in\n{shown}"


def contents(table: Table) -> str:
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return " ".join(cell for column in columns for cell in column)


def numbered(cls: type, **given):
    """An instance with another long number in every field."""
    long = {f.name: 1234567.0 * i + 0.987 for i, f in enumerate(fields(cls), start=1)}
    return cls(**long | given)


TIMINGS = [
    numbered(
        Timing, shape="qwen3_30b", tokens=131072, dtype="bfloat16", mode="backward",
        implementation=name, limit_ms=123.456,
    )
    for name in (OURS, "HF grouped_mm, compiled")
]  # fmt: skip
TABLES = {
    "timings": lambda: block.timing_tables(TIMINGS),
    "rates": lambda: model.rate_tables(
        [numbered(Rate, model="Qwen3-30B-A3B-Instruct", layers=48, task="lora-reentrant", batch=16)]
    ),
    "families": lambda: families.family_table(
        [
            numbered(FamilyTiming, family=name, size="8192, 22528, 256, 8", mode=mode, tokens=count)
            for name in ("qwen3_omni_moe_thinker", "glm4")
            for mode in ("forward", "backward")
            for count in (1, 64, 131072)
        ]
    ),
    "fp8": lambda: fp8.fp8_table(
        [
            numbered(Fp8Timing, row="contiguous 4 x 8192 x 4096 x 7168", implementation=name)
            for name in (OURS, "torch._scaled_mm")
        ]
    ),
    "distributed": lambda: distributed.distributed_table(
        [
            numbered(
                Measured, shape="qwen3_30b", task="fsdp ep step", layers=2, transformers="5.23.0"
            )
        ]
    ),
    "scaling": lambda: [
        scaling.scaling_table(
            scaling.Rates("qwen3_30b", 2, 8192, 1.734, 4.3e9, 271.3, 187.9), scaling.NETWORK_GB_S
        )
    ],
}


@widths
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_bench(name, width):
    for table in TABLES[name]():
        file = io.StringIO()
        output.show(table, Console(file=file, width=width))
        shown = file.getvalue()
        check(shown, contents(table), width)
        check(shown, str(table.title), width)


ROWS = [
    parity.Row(
        f"{name}[expert {i}]", i != 3, 1.23e-4 + i, 4.56e-4 + i, 7.89e-3 + i, 1.01e-3 + i, i + 12.3,
        f"[red] {i}9999 of 131072 tokens chose otherwise, by at most {i}.234567e-05",
    )
    for i, name in enumerate(("output", "d_gate_up_proj", "d_hidden_states", "d_top_k_weights"))
]  # fmt: skip
REPORT = parity.ParityReport(
    [parity.Section("model.layers.47.mlp (Qwen3MoeSparseMoeBlock)", "float16", 1024, ROWS)], "card"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@widths
def test_parity_on_a_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    parity_command.show(REPORT, file)
    shown = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    check(shown, " ".join(cell for row in ROWS for cell in parity.cells(row)), width)
    assert "[red]" in shown and "parity FAILED" in shown and "float16, 1024" in shown


def test_parity_in_a_pipe():
    file = io.StringIO()
    parity_command.show(REPORT, file)
    assert file.getvalue() == f"{REPORT}\n"


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_tune(monkeypatch, capsys, width):
    if width:
        monkeypatch.setattr(output, "console", lambda file: Console(file=sys.stdout, width=width))
    block = Block("shape", 14336, 22528, 128, 4)
    tiles = Tile(128, 256, 64, 8, 4, 16), Tile(64, 128, 128, 16, 3, 8)
    measured = measure.Measured(tiles[0], 123.4567, tiles[1], 98.7654, 1.0, 1.0)
    rows = [
        Result(entry, measured, 128)
        for entry in plan.entries([block], torch.bfloat16, tokens=[131072], backward=True)
    ]
    tune_command.show(rows)
    expected = "22528 14336 4096 20 128x256x64 w8 s4 g16 123.4567 64x128x128 w16 s3 g8 98.7654"
    check(capsys.readouterr().out, expected, width or output.WIDTH)


def test_a_wide_table_is_cut_between_columns_with_the_first_one_in_each():
    table = Table("name", *(f"column{i}" for i in range(9)), title="all of it")
    table.add_row("a row", *(f"{i}234567890" for i in range(9)), style="bold")
    parts = list(output.fitted(table, 60))
    assert len(parts) > 1 and [part.title for part in parts[:2]] == ["all of it", None]
    assert all(str(part.columns[0].header) == "name" for part in parts)
    assert sum(len(part.columns) - 1 for part in parts) == 9
    assert all(part.rows[0].style == "bold" for part in parts)
    (whole,) = output.fitted(table, 200)
    assert len(whole.columns) == 10


def test_a_name_that_is_wider_than_the_terminal_is_folded():
    table = Table("name", "ms")
    table.add_row("model." * 30, "1234567.891")
    file = io.StringIO()
    output.show(table, Console(file=file, width=60))
    check(file.getvalue(), "1234567.891", 60)
    assert "".join(re.findall(r"[model.]", file.getvalue())).count("model.") >= 1
