"""The laws on the tests: where they are, what they import, that each of them can fail."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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


def test_nobody_imports_a_test():
    """What tests share is in tools, fixtures are in conftest.py."""
    assert [*imported(ast.parse("def f():\n    from test_a import b"))] == ["test_a"]
    test = re.compile(r"(.*\.)?(test_|conftest$)")
    wrong = {name: m for name, tree in TREES.items() for m in imported(tree) if test.match(m)}
    assert not wrong


def test_no_unused_name_is_excused():
    """Fixtures that a test asks for are in conftest.py, not imported."""
    excuse = re.compile(r"noqa: ?" + "F")
    assert excuse.search("import a  # noqa: " + "F401")
    assert not [name for name in TREES if excuse.search((HERE / name).read_text(encoding="utf-8"))]


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


def idle(tree: ast.Module) -> list[str]:
    """Tests of a module that assert nothing."""
    own = helpers(tree) | SHARED
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return [f.name for f in functions if f.name.startswith("test_") and not judges(f, own)]


def swallowing(tree: ast.Module) -> list[int]:
    """Lines of `with suppress(...)` that have an assertion in them."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.With)]
    blocks = [n for n in blocks if any("suppress(" in ast.unparse(item) for item in n.items)]
    return [n.lineno for n in blocks if any(isinstance(x, ast.Assert) for x in ast.walk(n))]


def test_every_test_asserts_and_is_heard():
    none = ast.parse("def test_a():\n    b()\n\ndef test_c():\n    d()\n\ndef d():\n    assert e")
    assert idle(none) == ["test_a"]
    assert swallowing(ast.parse("with suppress(A):\n    assert b")) == [1]
    assert not {name: found for name in TESTS if (found := idle(TREES[name]))}
    assert not {name: found for name, tree in TREES.items() if (found := swallowing(tree))}
