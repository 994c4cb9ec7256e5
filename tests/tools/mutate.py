"""Puts one fault at a time into the package and runs the tests that should see it.

    python tests/tools/mutate.py --sample 200 --seed 0 --jobs 2 --json mutants.json
    python tests/tools/mutate.py --again mutants.json --match ops/fp8.py

A fault is a small change of one place: a comparison, a condition, a number, an operator, a returned
value or a call left out. Each runs in a copy of the checkout, in a process forked from one that has
imported torch and transformers already. A fault that no test sees survives; the last line counts
the survivors, and `--json` keeps every verdict. docs/testing.md has the results of such a run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ops", "recognise", "parity")

TESTS = {
    "ops/accumulate": ["test_accumulate"],
    "ops/checks": ["test_experts_refusals", "test_weights", "test_experts"],
    "ops/differentiable": ["test_second_derivatives", "test_transforms"],
    "ops/fp8": ["test_fp8", "test_weights"],
    "ops/grouped": [
        "test_grouped_gemm",
        "test_transforms",
        "test_second_derivatives",
        "test_weights",
    ],
    "ops/low_rank": ["test_low_rank", "test_lora", "test_second_derivatives"],
    "ops/routing": ["test_routing", "test_second_derivatives"],
    "ops": ["test_experts", "test_low_rank", "test_weights", "test_second_derivatives"],
    "recognise/adapters": ["test_lora", "test_lora_4_bits"],
    "recognise/eligibility": [
        "test_unfit_weights",
        "test_decorated",
        "test_quantised",
        "test_patcher",
    ],
    "recognise/four_bits": ["test_four_bits", "test_lora_4_bits", "test_quantise"],
    "recognise/gates": ["test_gates", "test_act_fn", "test_parts"],
    "recognise/lending": ["test_lora", "test_report", "test_threads"],
    "recognise/lent": ["test_lora", "test_lora_4_bits", "test_threads"],
    "recognise/original": ["test_original", "test_threads"],
    "recognise/overlap": ["test_deepseek_v3"],
    "recognise/parts": ["test_parts", "test_decorated"],
    "recognise/quantised": ["test_quantised", "test_patcher"],
    "recognise/routers": ["test_routers", "test_report", "test_compare_router"],
    "recognise/storage": ["test_quantised", "test_four_bits", "test_unfit_weights", "test_lora"],
    "recognise/wrapped": ["test_original", "test_patcher", "test_decorated", "test_pretrained"],
    "recognise": [
        "test_patcher",
        "test_patcher_leaves",
        "test_decorated",
        "test_pretrained",
    ],
    "parity/emulate": ["test_emulate"],
    "parity/law": ["test_law"],
    "parity/loss": ["test_parity_4_bits"],
    "parity/router": ["test_compare_router"],
    "parity/shadow": ["test_shadow", "test_compare", "test_emulate", "test_compare_router"],
    "parity": [
        "test_parity",
        "test_compare",
        "test_emulate",
        "test_compare_router",
        "test_certificate",
    ],
}
"""Module or folder -> the tests that should see a fault in it, without the ending .py."""

_COMPARISONS = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Mutant:
    """A span of a file's text, and what stands there instead."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old[:60]} -> {new[:60]}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Every fault of a file, in the order of its text."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, name = text.encode(), str(file.relative_to(ROOT))

    def at(node: ast.AST) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    for node in _running(ast.parse(text)):
        for new in _changed(node):
            first, last = at(node)
            old = raw[first:last].decode()
            if new != old:
                yield Mutant(name, node.lineno, first, last, old, new)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of code that runs: no annotations, docstrings, error messages or imports."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
                continue
            if isinstance(child, ast.Raise):
                yield child
                continue
            yield child
            yield from _running(child)


def _changed(node: ast.AST) -> Iterator[str]:
    """What may stand in a node's place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = copy.deepcopy(node)
        left, right = ast.unparse(other.left), ast.unparse(other.comparators[0])
        yield f"({left} {_COMPARISONS[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
        yield f"({ast.unparse(node.values[0])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield f"(({left}) {_OPERATORS[type(node.op)]} ({right}))"
    elif isinstance(node, ast.IfExp):
        body, test, other = map(ast.unparse, (node.body, node.test, node.orelse))
        yield f"(({other}) if ({test}) else ({body}))"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield str(not node.value)
        elif isinstance(node.value, int):
            yield str(node.value + 1)
        elif isinstance(node.value, float):
            yield str(2 * node.value + 1)
    elif isinstance(node, ast.Return) and not (
        node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
    ):
        yield "return None"
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "pass"


def tests_of(file: str) -> list[Path]:
    """The files of tests that should see a fault in a module, the nearest first."""
    module = file.removeprefix("moe_patch/").removesuffix(".py")
    names = TESTS.get(module) or TESTS[module.split("/")[0]]
    found = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    return [found[name].relative_to(ROOT) for name in names if name in found]


def run(mutant: Mutant | None, tests: Sequence[Path], home: Path, limit: float) -> str:
    """ "killed", "survived" or "timed out", of a copy of the checkout at `home`."""
    path = home / (mutant.file if mutant else "pyproject.toml")
    whole = path.read_bytes()
    try:
        if mutant:
            path.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :])
        child = multiprocessing.get_context("fork").Process(target=_pytest, args=(home, tests))
        child.start()
        child.join(limit)
        if child.is_alive():
            child.kill()
            child.join()
            return "timed out"
        return "survived" if child.exitcode == 0 else "killed"
    finally:
        path.write_bytes(whole)


def _pytest(home: Path, tests: Sequence[Path]) -> None:
    os.chdir(home)
    sys.path.insert(0, str(home))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        code = pytest.main([*options, *map(str, tests)])
    os._exit(int(code))


def _preload() -> None:
    """Imports what every child needs, and nothing of the package."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    families = ("deepseek_v3", "llama4", "qwen3_moe")
    modeling = [f"transformers.models.{family}.modeling_{family}" for family in families]
    for name in ("torch", "triton", *modeling):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def worker(tasks: multiprocessing.Queue, limit: float, results: multiprocessing.Queue) -> None:
    """Runs tasks in a copy of the checkout: a fault or None, and the files of its tests."""
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "checkout"
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "out", ".whl")
        shutil.copytree(ROOT, home, ignore=skipped)
        while (task := tasks.get()) is not None:
            mutant, tests = task
            began = time.time()
            verdict = run(mutant, tests, home, limit)
            results.put((mutant, tests, verdict, time.time() - began))


def sample(options: argparse.Namespace) -> list[Mutant]:
    """Faults drawn at random, as many in each folder."""
    draw, chosen = random.Random(options.seed), []
    for folder in options.folders:
        files = sorted((ROOT / "moe_patch" / folder).glob("*.py"))
        every = [mutant for file in files for mutant in mutants(file)]
        share = min(len(every), options.sample // len(options.folders))
        print(f"{folder}: {len(every)} faults, {share} drawn", flush=True)
        chosen += draw.sample(every, share)
    draw.shuffle(chosen)
    return chosen


def survivors(verdicts: Path) -> list[Mutant]:
    """The faults that survived, where they are in the code of today."""
    chosen = []
    for each in json.loads(verdicts.read_text()):
        if each["verdict"] == "survived":
            same = [m for m in mutants(ROOT / each["file"]) if m.new == each["new"]]
            same = [m for m in same if m.old == each["old"]]
            where = each["line"], each["start"]
            chosen += sorted(same, key=lambda m: _far(where, (m.line, m.start)))[:1]
    return chosen


def _far(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return abs(one[0] - other[0]), abs(one[1] - other[1])


def main() -> int:
    """Prints each verdict and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), help="of moe_patch/")
    parser.add_argument("--sample", type=int, default=200, help="faults, equally many a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds a fault")
    parser.add_argument("--again", type=Path, help="only the survivors in such a file of verdicts")
    parser.add_argument("--match", default="", help="only faults whose line has this text")
    parser.add_argument("--json", type=Path, help="where to write all verdicts")
    options = parser.parse_args()
    chosen = survivors(options.again) if options.again else sample(options)
    chosen = [mutant for mutant in chosen if options.match in str(mutant)]
    spawn = multiprocessing.get_context("spawn")
    tasks, results = spawn.Queue(), spawn.Queue()
    for tests in {tuple(tests_of(mutant.file)) for mutant in chosen}:
        tasks.put((None, tests))  # tests that fail without a fault would kill every fault
    for mutant in chosen:
        tasks.put((mutant, tuple(tests_of(mutant.file))))
    count = tasks.qsize()
    for _ in range(options.jobs):
        tasks.put(None)
        spawn.Process(target=worker, args=(tasks, options.limit, results), daemon=False).start()
    verdicts, failing = [], set()
    for done in range(1, count + 1):
        mutant, tests, verdict, seconds = results.get()
        print(f"{done}/{count} {verdict} in {seconds:.0f} s: {mutant or tests}", flush=True)
        if mutant:
            verdicts.append({**asdict(mutant), "verdict": verdict, "seconds": round(seconds, 1)})
        elif verdict != "survived":
            failing.add(tests)
        if options.json:
            options.json.write_text(json.dumps(verdicts, indent=1) + "\n")
    if failing:
        print(f"no verdict counts: these fail, or take too long, without a fault: {failing}")
        return 1
    survived = [each for each in verdicts if each["verdict"] == "survived"]
    print(f"{len(verdicts)} faults, {len(survived)} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
