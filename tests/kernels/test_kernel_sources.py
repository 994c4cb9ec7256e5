"""What kernels look like: short signatures, and lines that end at the margin."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "moe_patch/kernels").rglob("*.py"))
MOST_RUNTIME, MOST_CONSTANTS = 20, 25


def jit_functions(path: Path) -> list[ast.FunctionDef]:
    """Functions under a decorator that is triton's or Gluon's jit, with or without options."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f for f in found if any("jit" in ast.unparse(d) for d in f.decorator_list)]


def parameters(function: ast.FunctionDef) -> tuple[int, int]:
    """(runtime, constexpr) parameters."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    constants = [a for a in arguments if a.annotation and "constexpr" in ast.unparse(a.annotation)]
    return len(arguments) - len(constants), len(constants)


def test_the_count_knows_both_kinds():
    source = (
        "@triton.jit(do_not_specialize=['n'])\ndef f(x, n, A: tl.constexpr, B: gl.constexpr): ..."
    )
    assert parameters(ast.parse(source).body[0]) == (2, 2)
    names = {f.name for path in KERNELS for f in jit_functions(path)}
    assert {"gate_up_kernel", "fp8_hopper_kernel", "weight_dot", "glu"} <= names


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_signatures_are_short(path):
    """What travels together is one NamedTuple: tl.constexpr for constants, or of values."""
    for function in jit_functions(path):
        runtime, constants = parameters(function)
        where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        assert runtime <= MOST_RUNTIME, f"{where} has {runtime} runtime parameters"
        assert constants <= MOST_CONSTANTS, f"{where} has {constants} constexpr parameters"


def methods_of_tuples(tree: ast.AST) -> set[str]:
    """Methods of NamedTuples that constexpr functions call. There Triton 3.9 hands them tuples of
    its own, which have a plan's fields and nothing else."""
    found = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    of_plans = [f for f in found if "constexpr_function" in map(_last, f.decorator_list)]
    names = (n.attr for f in of_plans for n in ast.walk(f) if isinstance(n, ast.Attribute))
    return {name for name in names if name in dir(NamedTuple("Plan", []))} - {"count", "index"}


def _last(decorator: ast.expr) -> str:
    return ast.unparse(decorator).rpartition(".")[2]


def test_constants_are_read_by_their_fields():
    source = "@gluon.constexpr_function\ndef f(plan): return plan._replace(n=plan.k)"
    assert methods_of_tuples(ast.parse(source)) == {"_replace"}
    for path in KERNELS:
        assert not methods_of_tuples(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("folder", ("moe_patch", "models", "tests", "examples"))
def test_no_line_runs_past_the_margin(folder):
    """Ruff says so too, and cannot be told to look away."""
    mark = "noqa: " + "E501"
    for path in sorted((ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert len(line) <= 100, f"{where} has {len(line)} columns"
            assert mark not in line, where
