"""What kernels look like: short signatures, and lines that end at the margin."""

from __future__ import annotations

import ast
from pathlib import Path

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


@pytest.mark.parametrize("folder", ("moe_patch", "models", "tests", "examples"))
def test_no_line_runs_past_the_margin(folder):
    """Ruff says so too, and cannot be told to look away."""
    mark = "noqa: " + "E501"
    for path in sorted((ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert len(line) <= 100, f"{where} has {len(line)} columns"
            assert mark not in line, where
