"""The wheel holds the package and nothing else, and the package imports from wherever it lies."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
HIDE_TRITON = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "triton":
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(code: str, cwd: Path, path: Path) -> str:
    """What `code` prints in a fresh Python that finds moe_patch at `path`."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def wheel(built) -> Path:
    return built.wheel


def test_wheel_holds_the_package_and_nothing_else(wheel):
    def sources(folder: str, inside: str) -> set[str]:
        found = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        return {f"{inside}/{path.as_posix()}" for path in found}

    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    expected = sources("moe_patch", "moe_patch") | sources("models", "moe_patch/models")
    assert code == expected | {"moe_patch/py.typed", "moe_patch/kernels/tuned.json"}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names)


def test_wheel_imports_from_another_folder(wheel, tmp_path):
    pytest.importorskip("pip")
    site = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)
    assert not (site / "models").exists()
    code = (
        "import moe_patch as p, moe_patch.models as m; print(p.__file__, m.__file__, p.__version__)"
    )
    package, models, version = run(code, tmp_path, site).split()[-3:]
    assert Path(package).parent == site / "moe_patch"
    assert Path(models).parent == site / "moe_patch" / "models"
    assert wheel.name.startswith(f"moe_patch-{version}-")


def test_checkout_imports_without_being_installed(tmp_path):
    code = "import moe_patch.models as m, sys; print(m.__file__, 'models' in sys.modules)"
    models, stray = run(code, tmp_path, ROOT).split()[-2:]
    assert Path(models) == ROOT / "models" / "__init__.py"
    assert stray == "False", "models/ is imported as moe_patch.models alone"


def test_without_triton_the_import_works_and_a_kernel_says_why_not(tmp_path):
    code = f"""{HIDE_TRITON}
import torch
import moe_patch
from moe_patch.kernels import why_not
assert "triton" not in sys.modules
x, w1, w2 = torch.randn(2, 8), torch.randn(2, 16, 8), torch.randn(2, 8, 8)
index, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
try:
    moe_patch.fused_experts(x, w1, w2, index, weights)
except RuntimeError as error:
    print(why_not("cpu"), why_not("cuda"), error, sep="\\n")
"""
    on_cpu, on_gpu, error = run(code, tmp_path, ROOT).splitlines()[-3:]
    assert on_cpu == on_gpu and "Triton is not installed" in on_cpu
    assert error.startswith(on_cpu), error


def requirements(wheel: Path, *extras: str) -> set[str]:
    """Names of what the wheel asks for, with the given extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        listed = message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    found = set()
    for requirement in map(Requirement, listed):
        extra = re.search(r"extra == \"(\w+)\"", str(requirement.marker or ""))
        if extra is None or extra[1] in extras:
            found.add(requirement.name.lower())
    return found


def third_party(nodes: Iterable[ast.AST]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - {"moe_patch", *sys.stdlib_module_names}


def test_every_import_is_a_declared_dependency(wheel):
    """At the top of a file: of install_requires. In a function: of an extra too."""
    always, lazily = requirements(wheel), requirements(wheel, "bench", "lora", "qlora")
    adapters = requirements(wheel, "lora")  # recognise/adapters.py is imported once PEFT is
    examples = requirements(wheel, "examples")
    for folder in ("moe_patch", "models", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            at_top, anywhere = third_party(tree.body), third_party(ast.walk(tree))
            missing = anywhere - examples if folder == "examples" else anywhere - lazily
            missing |= set() if folder == "examples" else at_top - always
            missing -= adapters if path.name == "adapters.py" else set()
            assert not missing, f"{path.relative_to(ROOT)} imports {sorted(missing)}"
