"""The laws of CONTRIBUTING.md that can be read off the source: floors, arrows, homes, words."""

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
FOLDERS = {"moe_patch", "models", "tests", "examples", "docs", ".ci", ".github"}

# From the ground up. A module imports what stands on a lower floor, or before it on its own; so
# there are no circles. A folder's name alone is its __init__.py.
FLOORS = tuple(
    tuple(floor.split())
    for floor in (
        "version starting notices versions compat switch output shapes checkpoint usage",
        "order activation precision paths",
        """formats formats.scaled formats.format formats.nf4 formats.mxfp4 formats.int4
        formats.packed formats.checkpoints""",
        "reference",
        """kernels kernels.ahead kernels.binder kernels.chips kernels.boxes kernels.launch
        kernels.operators kernels.interpreter kernels.table
        kernels.activate kernels.tiles kernels.tiling kernels.low_rank kernels.widen kernels.packed
        kernels.weights kernels.topk
        kernels.sort_tokens kernels.groups kernels.combine kernels.row_sums kernels.quantize
        kernels.glu
        kernels.hopper kernels.hopper.ring kernels.hopper.turns kernels.hopper.producer
        kernels.hopper.rows kernels.hopper.update kernels.hopper.stores kernels.hopper.gather
        kernels.hopper.widening kernels.hopper.roles
        kernels.hopper.gate_up kernels.hopper.gemm kernels.hopper.turned kernels.hopper.dgate
        kernels.hopper.dw_steps kernels.hopper.dw
        kernels.hopper.fp8_sums kernels.hopper.fp8
        kernels.in_steps kernels.hopper.lookup kernels.hopper.codes
        kernels.hopper.packed_weight kernels.hopper.packed
        kernels.hopper.packed_ring kernels.hopper.packed_roles
        kernels.hopper.pairs_ring kernels.hopper.pairs_sums kernels.hopper.pairs
        kernels.pairs kernels.packed_weight kernels.packed_roles kernels.packed_products
        kernels.dequantize
        kernels.grouped_gemm kernels.gate_up kernels.dgate kernels.decode_packed kernels.decode
        kernels.dw
        kernels.fp8_gemm
        kernels.ways""",
        """ops.operands ops.differentiable ops.accumulate ops.low_rank ops.routing ops.grouped
        ops.checks ops.fp8 ops.forward ops.backward ops.experts ops.glu ops""",
        "fp8",
        """recognise recognise.wrapped recognise.original recognise.parts recognise.gates
        recognise.lent recognise.four_bits recognise.quantised recognise.storage
        recognise.eligibility recognise.lending recognise.overlap
        recognise.adapters recognise.swaps recognise.routers recognise.mlps""",
        """models.decorated models.deepseek_v3 models.llama4 models.qwen3_moe models.step3p7
        models""",
        "ranks patcher",
        """quantizer.layouts quantizer.config quantizer.conversions quantizer.loader quantizer""",
        "pretrained quantise environment",
        """routing routing.recomputed routing.forwards routing.choosing routing.layers
        routing.recorded routing.record routing.replay routing.balance routing.callback
        routing.load
        routing.picture""",
        """parity.law parity.emulate parity.shadow parity.loss parity.report parity.passes
        parity.router parity.truth parity.block parity.compare parity.check parity""",
        "__init__",
        """bench bench.timing bench.routing bench.kind bench.block bench.lora bench.families
        bench.fp8 bench.quant bench.whole bench.model bench.watch bench.replay bench.distributed
        bench.scaling bench.picture bench.peers.compare bench.peers.experts
        bench.peers.quack bench.peers.liger bench.peers.deep_gemm bench.peers.peft
        bench.peers.grouped_nf4 bench.peers""",
        "tune.blocks tune.plan tune.measure tune",
        """commands commands.running commands.env commands.parity commands.bench commands.tune
        commands.load""",
        "__main__",
    )
)
HEIGHT = {name: at for at, name in enumerate(name for floor in FLOORS for name in floor)}

# room -> the rooms that it needs besides itself. A room is a folder of the package or a file beside
# them. `kernels` is the package itself, which knows where kernels run, `kernels.*` are the kernels.
ARROWS = {
    "version": set(),
    "starting": set(),
    "notices": set(),
    "versions": {"notices"},
    "compat": {"notices", "versions"},
    "switch": set(),
    "output": set(),
    "shapes": set(),
    "checkpoint": {"shapes"},
    "usage": {"shapes"},
    "order": set(),
    "activation": set(),
    "precision": {"compat"},
    "paths": set(),
    "formats": set(),
    "reference": {"activation", "formats", "order"},
    "kernels": {"activation", "compat", "formats", "order", "precision", "versions"},
    "ops": {
        "activation", "compat", "formats", "kernels", "kernels.*", "order", "paths", "reference",
    },
    "fp8": {"ops"},
    "recognise": {
        "activation", "compat", "formats", "kernels", "notices", "ops", "paths", "reference",
        "switch",
    },
    "models": {"compat", "notices", "ops", "recognise", "switch"},
    "quantizer": {"compat", "formats", "patcher", "recognise"},
    "ranks": {"compat", "recognise", "version"},
    "patcher": {"compat", "models", "ranks", "recognise", "switch", "versions"},
    "pretrained": {"compat", "models", "notices", "patcher", "quantizer", "recognise"},
    "quantise": {"formats", "output", "patcher", "quantizer", "recognise"},
    "routing": {"compat", "notices", "ops", "patcher", "recognise"},
    "environment": {"activation", "compat", "models", "recognise"},
    "parity": {
        "compat", "formats", "kernels", "models", "ops", "patcher", "paths", "precision",
        "recognise", "reference", "switch", "version",
    },
    "__init__": {
        "fp8", "ops", "parity", "patcher", "pretrained", "quantise", "quantizer", "routing",
        "starting", "version",
    },
    "bench": {
        "compat", "environment", "formats", "kernels", "ops", "order", "output", "parity",
        "patcher", "quantise", "quantizer", "recognise", "reference", "routing", "shapes",
        "usage",
    },
    "tune": {"activation", "bench", "kernels", "kernels.*", "order", "recognise", "shapes"},
    "commands": {
        "bench", "checkpoint", "compat", "environment", "kernels", "models", "output", "parity",
        "patcher", "routing", "shapes", "switch", "tune", "usage", "versions",
    },
    "__main__": {"commands", "usage", "version"},
}  # fmt: skip
# A module or a room. Not in this table: any declared dependency (test_packaging).
THIRD_PARTY = {
    "version": set(),
    "starting": set(),
    "notices": {"torch"},
    "versions": set(),
    "compat": {"torch", "triton"},  # the others by name, see `Name.find`
    "switch": set(),
    "shapes": {"torch", "transformers"},
    "order": {"torch"},
    "activation": {"torch", "triton"},
    "precision": {"torch"},
    "paths": set(),
    "formats": {"torch"},
    "reference": {"torch"},
    "kernels": {"torch", "triton"},
    "ops": {"torch"},
    "fp8": set(),
    "recognise": {"torch", "transformers"},
    "recognise.adapters": {"torch", "peft"},
    "models": {"torch", "transformers"},
    "quantizer": {"torch", "transformers"},
    "parity.law": {"torch"},
    "parity.report": {"torch"},
}
MODULES = ("models", "recognise.adapters")
"""Where nn.Modules are defined."""
FUNCTIONS = ("ops.experts", "ops.glu", "ops.grouped", "ops.low_rank", "ops.routing")
"""Where autograd functions are."""
OPS = ("ops.experts", "ops.fp8", "ops.glu", "ops.grouped", "ops.routing")
"""Where torch.ops are registered, with `kernels.op`."""
HOT = ("fp8", "formats", "kernels", "models", "notices", "ops", "recognise", "switch")
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


def room(name: str) -> str:
    return name.split(".")[0]


def inner(target: str) -> str:
    """The module of the package that an absolute dotted name is; "__init__" is the package."""
    return target.removeprefix("moe_patch").removeprefix(".") or "__init__"


def arrow(name: str, target: str) -> str | None:
    """What ARROWS must have for a module to import another one; None within a room."""
    if room(name) == room(target):
        return None
    return "kernels.*" if target.startswith("kernels.") else room(target)


def ours(name: str) -> Iterator[tuple[str, str]]:
    """(module of the package that a source imports, a sentence that says where)."""
    for target, line in imports(name):
        if target.split(".")[0] == "moe_patch":
            yield inner(target), f"{SOURCES[name].relative_to(ROOT)}:{line} imports {target}"


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


def test_every_module_stands_on_one_floor():
    names = [name for floor in FLOORS for name in floor]
    assert sorted(names) == sorted(SOURCES), "say in FLOORS where each module stands, once"
    assert {room(name) for name in SOURCES} == ARROWS.keys(), "say in ARROWS what each room needs"


@every_source
def test_imports_point_down(name):
    for target, where in ours(name):
        assert HEIGHT[target] < HEIGHT[name], f"{where}, which does not stand beneath it in FLOORS"


@every_source
def test_imports_follow_the_arrows(name):
    allowed = ARROWS[room(name)]
    for target, where in ours(name):
        needed = arrow(name, target)
        assert needed is None or needed in allowed, f"{where}; {room(name)} needs {sorted(allowed)}"
    for target, line in imports(name):
        where = f"{SOURCES[name].relative_to(ROOT)}:{line} imports {target}"
        assert target.split(".")[0] != "models", f"{where}: it is called moe_patch.models"


@pytest.mark.parametrize("start", ARROWS)
def test_no_arrow_is_idle(start):
    members = [name for name in SOURCES if room(name) == start]
    used = {arrow(name, target) for name in members for target, _ in ours(name)}
    assert ARROWS[start] <= used, f"{start} imports nothing of {sorted(ARROWS[start] - used)}"


@every_source
def test_lower_layers_import_few_packages(name):
    allowed = THIRD_PARTY.get(name, THIRD_PARTY.get(room(name)))
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
        if name not in MODULES and room(name) not in MODULES:
            assert not any(base.split(".")[-1] == "Module" for base in bases), at
        if name not in FUNCTIONS:
            assert not any(base.split(".")[-1] == "Function" for base in bases), at
    for function, line in calls(name):
        if function in ("custom_op", "triton_op", "op"):
            # kernels/__init__.py defines `op`, the one way to register
            home = OPS if function == "op" else ("kernels",)
            assert name in home, f"{where}:{line} registers an op with {function}"


@pytest.mark.parametrize(
    "name",
    [n for n in SOURCES if n != "__main__" and n not in MODULES and room(n) not in MODULES],
)
def test_no_module_class_outside_models(name):
    module = importlib.import_module("moe_patch" if name == "__init__" else f"moe_patch.{name}")
    for label, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            assert not issubclass(value, torch.nn.Module), f"{module.__name__}.{label}"


@every_source
def test_public_names_have_docstrings(name):
    assert ast.get_docstring(TREES[name]), f"{SOURCES[name].relative_to(ROOT)} says nothing"
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if node.name.endswith("_kernel"):  # its launcher, below it, says what it computes
                continue
            where = f"{SOURCES[name].relative_to(ROOT)}:{node.lineno} {node.name}"
            assert ast.get_docstring(node), f"{where} has no docstring"


@pytest.mark.parametrize("name", [name for name in SOURCES if room(name) == "kernels"])
def test_kernels_use_no_atomics(name):
    found = [f"{f} in line {line}" for f, line in calls(name) if f.startswith("atomic_")]
    if name == "kernels.hopper.turns":  # which program computes a tile changes no bit of it
        assert len(found) == 2
        return
    assert not found, f"{name}: {found}; the order of atomics is not repeatable"


@pytest.mark.parametrize("name", [name for name in SOURCES if room(name) in HOT])
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
