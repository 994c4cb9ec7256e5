"""The laws of CONTRIBUTING.md that can be read off the source: arrows, homes, sizes, words."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"moe_patch", "models", "tests", "examples", "docs", ".ci"}
MAX_LINES = 450

# file or folder of the package -> what it may import of the package. `kernels` is the package
# itself, which knows where kernels run; `kernels.*` are its modules, the kernels.
ARROWS = {
    "order": set(),
    "law": set(),
    "ranks": {"", "models.*"},
    "shapes": set(),
    "reference": {"activation", "order"},
    "emulate": {"reference"},
    "kernels": {"kernels", "kernels.*", "activation", "order", "precision"},
    "precision": set(),
    "paths": set(),
    "accumulate": {"kernels", "order"},
    "activation": set(),
    "differentiable": {"reference"},
    "low_rank": {"differentiable"},
    "scaled": set(),
    "grouped": {
        "accumulate",
        "differentiable",
        "kernels",
        "kernels.*",
        "order",
        "reference",
        "scaled",
    },
    "checks": {"grouped", "kernels", "scaled"},
    "fp8": {"activation", "grouped", "kernels", "kernels.*", "order", "routing", "scaled"},
    "experts": {
        "accumulate",
        "activation",
        "checks",
        "differentiable",
        "fp8",
        "grouped",
        "kernels",
        "kernels.*",
        "low_rank",
        "order",
        "paths",
        "reference",
    },
    "routing": {"differentiable", "kernels", "kernels.*", "order", "reference"},
    "models": {
        "models",
        "models.*",
        "activation",
        "scaled",
        "differentiable",
        "experts",
        "grouped",
        "low_rank",
        "paths",
        "reference",
        "routing",
        "kernels",
    },
    "patcher": {"models", "models.*", "ranks"},
    "pretrained": {"models", "models.*", "patcher"},
}
# "" is the package itself, for its __version__.
BENEATH = {"", "kernels", "law", "models", "models.*", "patcher", "reference", "shapes", "experts"}
ARROWS |= {
    "shadow": BENEATH | {"emulate", "fp8", "precision"},
    "compare_router": BENEATH | {"passes"},
    "passes": BENEATH | {"shadow"},
    "truth": BENEATH | {"compare_router", "passes", "shadow"},
    "compare_block": BENEATH | {"passes", "shadow", "truth"},
    "compare": BENEATH | {"compare_block", "compare_router", "passes", "paths", "shadow", "truth"},
    "parity": BENEATH | {"compare", "passes", "paths", "shadow"},
    "bench": BENEATH | {"compare", "parity", "shadow"},
    "bench_cli": BENEATH
    | {
        "bench",
        "bench_distributed",
        "bench_families",
        "bench_fp8",
        "bench_lora",
        "bench_model",
        "bench_tables",
        "output",
        "parity",
        "scaling",
        "support",
    },
    "bench_tables": BENEATH
    | {"bench", "bench_distributed", "bench_families", "bench_fp8", "bench_model", "scaling"},
    "scaling": {"shapes"},
    "bench_distributed": BENEATH | {"parity"},
    "bench_families": BENEATH | {"bench", "parity", "shadow", "support"},
    "bench_fp8": BENEATH | {"bench", "emulate", "fp8", "parity", "scaled"},
    "bench_lora": BENEATH | {"bench", "parity", "shadow"},
    "bench_model": BENEATH | {"bench"},
    "support": BENEATH | {"activation"},
    "tune": BENEATH | {"bench", "kernels.*", "order"},
    "__init__": BENEATH | {"parity", "pretrained", "starting"},
    "checkpoint": {"shapes"},
    "output": set(),
    "starting": set(),
    "__main__": BENEATH
    | {
        "bench",
        "bench_cli",
        "checkpoint",
        "compare",
        "output",
        "parity",
        "pretrained",
        "support",
        "tune",
        "kernels.*",
    },
}
# Not in this table: any declared dependency (test_packaging).
THIRD_PARTY = {
    "order": {"torch"},
    "paths": set(),
    "precision": {"torch"},
    "law": {"torch"},
    "shapes": {"torch", "transformers"},
    "reference": {"torch"},
    "kernels": {"torch", "triton"},
    "starting": set(),
    "accumulate": {"torch"},
    "differentiable": {"torch"},
    "activation": {"torch", "triton"},
    "low_rank": {"torch"},
    "grouped": {"torch"},
    "checks": {"torch"},
    "scaled": {"torch"},
    "experts": {"torch"},
    "routing": {"torch"},
    "models": {"torch", "transformers", "peft"},
}
HOT = (
    "kernels", "accumulate", "checks", "differentiable", "experts", "fp8", "grouped", "low_rank",
    "routing", "scaled", "models",
)  # fmt: skip
SYNCHRONISES = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "masked_select"}


def sources() -> dict[str, Path]:
    """Module name inside the package -> file: `experts`, `kernels.topk`, `models.llama4` ..."""
    found = {}
    for folder, prefix in ((ROOT / "moe_patch", ()), (ROOT / "models", ("models",))):
        for path in sorted(folder.rglob("*.py")):
            parts = prefix + path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            found[".".join(parts)] = path
    return found


SOURCES = sources()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
every_source = pytest.mark.parametrize("name", SOURCES)


def unit(name: str) -> str:
    return name.split(".")[0]


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a source imports, in functions too, with their lines."""
    package = ["moe_patch", *name.split(".")]
    if SOURCES[name].name != "__init__.py" or name == "__init__":
        package = package[:-1]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                is_module = full.removeprefix("moe_patch.") in SOURCES
                yield (full if is_module else module), node.lineno


def calls(name: str) -> Iterator[tuple[str, int]]:
    """(name of the function or method, line) of every call in a source."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                yield function.attr, node.lineno
            elif isinstance(function, ast.Name):
                yield function.id, node.lineno


def tracked() -> list[Path]:
    """What git has or would add; without git, what is in the known folders and beside them."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        files = [ROOT / name for name in listed.decode().split("\0") if name]
    else:
        files = [path for path in ROOT.iterdir() if path.is_file()]
        files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
        files = [path for path in files if "__pycache__" not in path.parts]
    return [path for path in files if path.is_file()]


def test_top_level_is_what_the_user_fixed():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if path.parent != ROOT}
    assert folders <= FOLDERS, f"new at the top level: {sorted(folders - FOLDERS)}"
    for name in ("moe_patch", "models", "tests", "examples", "setup.py"):
        assert (ROOT / name).exists(), name


@every_source
def test_imports_follow_the_arrows(name):
    assert unit(name) in ARROWS, f"say in ARROWS what {unit(name)}.py may import"
    allowed = ARROWS[unit(name)]
    for target, line in imports(name):
        where = f"{SOURCES[name].relative_to(ROOT)}:{line} imports {target}"
        assert target.split(".")[0] != "models", f"{where}: it is called moe_patch.models"
        if not target.startswith("moe_patch"):
            continue
        inner = target.removeprefix("moe_patch").removeprefix(".")
        pattern = f"{unit(inner)}.*" if "." in inner else inner
        assert pattern in allowed, f"{where}; {unit(name)} may import {sorted(allowed)}"


@every_source
def test_lower_layers_import_few_packages(name):
    allowed = THIRD_PARTY.get(unit(name))
    if allowed is None:
        return
    for target, line in imports(name):
        top = target.split(".")[0]
        if top != "moe_patch" and top not in sys.stdlib_module_names:
            assert top in allowed, f"{SOURCES[name].relative_to(ROOT)}:{line} imports {top}"


@every_source
def test_modules_and_autograd_live_where_they_should(name):
    where = SOURCES[name].relative_to(ROOT)
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base) for base in node.bases]
        at = f"{where}:{node.lineno} {node.name}({', '.join(bases)})"
        if unit(name) != "models":
            assert not any(base.split(".")[-1] == "Module" for base in bases), at
        if name not in ("experts", "grouped", "low_rank", "routing"):
            assert not any(base.split(".")[-1] == "Function" for base in bases), at
    for function, line in calls(name):
        if function in ("custom_op", "triton_op", "op"):
            # kernels/__init__.py defines `op`, the one way to register; the two files use it
            home = (
                "experts",
                "fp8",
                "grouped",
                "routing",
                *(("kernels",) if function != "op" else ()),
            )
            assert name in home, f"{where}:{line} registers an op with {function}"


@pytest.mark.parametrize("name", [n for n in SOURCES if n != "__main__" and unit(n) != "models"])
def test_no_module_class_outside_models(name):
    module = importlib.import_module("moe_patch" if name == "__init__" else f"moe_patch.{name}")
    for label, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            assert not issubclass(value, torch.nn.Module), f"{module.__name__}.{label}"


@every_source
def test_file_is_short(name):
    lines = len(SOURCES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{SOURCES[name].relative_to(ROOT)} has {lines} lines: make it two"


@every_source
def test_public_names_have_docstrings(name):
    assert ast.get_docstring(TREES[name]), f"{SOURCES[name].relative_to(ROOT)} says nothing"
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if node.name.endswith("_kernel"):  # its launcher, below it, says what it computes
                continue
            where = f"{SOURCES[name].relative_to(ROOT)}:{node.lineno} {node.name}"
            assert ast.get_docstring(node), f"{where} has no docstring"


@pytest.mark.parametrize("name", [name for name in SOURCES if unit(name) == "kernels"])
def test_kernels_use_no_atomics(name):
    found = [f"{f} in line {line}" for f, line in calls(name) if f.startswith("atomic_")]
    assert not found, f"{name}: {found}; the order of atomics is not repeatable"


@pytest.mark.parametrize("name", [name for name in SOURCES if unit(name) in HOT])
def test_hot_path_never_waits_for_the_gpu(name):
    found = [f"{f} in line {line}" for f, line in calls(name) if f in SYNCHRONISES]
    assert not found, f"{SOURCES[name].relative_to(ROOT)}: {found} waits for the device"


def test_no_path_of_one_machine():
    pattern = re.compile(rb"(?<![\w.])/(work|root|opt/(pypi|wheels)|home/\w)[\w-]*/")
    for path in tracked():
        if path.suffix in (".png", ".gif", ".gz"):
            continue
        found = pattern.search(path.read_bytes())
        assert not found, f"{path.relative_to(ROOT)} names {found[0].decode()}"
