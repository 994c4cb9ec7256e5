"""The laws on the tests: where they are, what they import, that each of them can fail."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TREES = {
    str(path.relative_to(HERE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(HERE.rglob("*.py"))
}
TESTS = [name for name in TREES if Path(name).name.startswith("test_")]
ASSERTS = {"raises", "warns", "fail"}
"""Functions of pytest that fail a test; so does each whose name begins with assert_."""


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def called(node: ast.AST) -> set[str]:
    """Names of functions and methods that are called in it."""
    functions = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in functions}


def judges(node: ast.AST, helpers: set[str]) -> bool:
    """Whether there is an assertion in it, or a call of something that has one."""
    names = called(node)
    return (
        any(isinstance(n, ast.Assert) for n in ast.walk(node))
        or bool(names & (ASSERTS | helpers))
        or any(name.startswith("assert_") for name in names)
    )


def helpers(tree: ast.Module) -> set[str]:
    """Functions of the module that judge, by themselves or through each other."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    found: set[str] = set()
    while new := {f.name for f in functions if judges(f, found)} - found:
        found |= new
    return found


SHARED = set().union(*(helpers(tree) for name, tree in TREES.items() if name not in TESTS))


@pytest.mark.parametrize("name", TREES)
def test_nobody_imports_a_test(name):
    wrong = {m for m in imported(TREES[name]) if re.match(r"(.*\.)?(test_|conftest$)", m)}
    assert not wrong, f"{name} imports {wrong}: what tests share is in tools, fixtures in conftest"


@pytest.mark.parametrize("name", TREES)
def test_no_unused_name_is_excused(name):
    found = re.search(r"noqa: ?" + "F", (HERE / name).read_text(encoding="utf-8"))
    assert not found, f"{name}: a fixture belongs in conftest.py"


def test_every_folder_of_the_package_has_tests():
    package = {path.parent.name for path in (HERE.parent / "moe_patch").glob("*/__init__.py")}
    assert {"kernels", "ops"} <= package
    for folder in package | {"models"}:
        assert [*(HERE / folder).glob("test_*.py")], f"tests/{folder} has no test"


def test_names_are_unique():
    """pytest imports them by their names alone, from folders that are not packages."""
    names = Counter(Path(name).name for name in TREES)
    assert {name for name, count in names.items() if count > 1} <= {"conftest.py"}
    assert not [*HERE.rglob("__init__.py")]


@pytest.mark.parametrize("name", TESTS)
def test_every_test_can_fail(name):
    own = helpers(TREES[name]) | SHARED
    tests = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef)]
    for test in tests:
        if test.name.startswith("test_"):
            assert judges(test, own), f"{name}: {test.name} asserts nothing"


@pytest.mark.parametrize("name", TREES)
def test_nothing_swallows_an_assertion(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.With) and "suppress(" in ast.unparse(node.items[0]):
            where = f"{name}:{node.lineno}"
            assert not any(isinstance(n, ast.Assert) for n in ast.walk(node)), where
