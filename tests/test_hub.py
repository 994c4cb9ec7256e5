"""The kernel for Hugging Face's hub: built by .ci/hub/build.py, loaded as `kernels` loads it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("torch-cuda", "torch-rocm", "torch-universal")
LOAD = """
import importlib.util, sys
from pathlib import Path
import torch

def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
"""As kernels/importer.py has it: under the id of its metadata, from wherever it lies."""
USE = """
def step(kernel, *tensors):
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = kernel.fused_experts(*leaves)
    out.square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

torch.manual_seed(0)
weights, index = torch.rand(5, 4).topk(2)
tensors = torch.randn(5, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8), index, weights
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "moe-patch"
    build(folder)
    return folder


def build(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / ".ci" / "hub" / "build.py"), "--output", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def run(code: str, *arguments: str | Path) -> str:
    """What the code prints, in a Python of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_layout(hub):
    assert {path.name for path in hub.iterdir()} == {
        "LICENSE", "README.md", "build", "build.toml", "flake.nix", "torch-ext",
    }  # fmt: skip
    assert {path.name for path in (hub / "build").iterdir()} == set(VARIANTS)
    general = tomllib.loads((hub / "build.toml").read_text())["general"]
    assert {f"torch-{backend}" for backend in general["backends"]} < set(VARIANTS)
    assert (hub / "torch-ext" / "moe_patch" / "__init__.py").is_file()
    assert not (hub / "torch-ext" / "moe_patch" / "_ops.py").exists()  # kernel-builder makes it
    assert not [*hub.rglob("__pycache__")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_metadata_and_hashes(hub, variant):
    folder = hub / "build" / variant
    found = json.loads((folder / "metadata.json").read_text())
    assert found["name"] == "moe-patch" and found["version"] == 0
    assert found["license"] == "Apache-2.0" and found["python-depends"] == []
    assert found["id"].isidentifier()
    expected = "rocm" if variant == "torch-rocm" else "cuda"
    assert found["backend"]["type"] == expected and found["backend"]["archs"]
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "metadata.json"]
    assert found["digest"]["files"] == {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in files
    }
    ids = {json.loads((hub / "build" / v / "metadata.json").read_text())["id"] for v in VARIANTS}
    assert len(ids) == len(VARIANTS)
    assert not [path.name for path in files if b"moe_patch::" in path.read_bytes()]


def test_it_computes_what_its_twin_does_whatever_its_name(hub):
    """Two variants in one process, also by the folder that older versions of `kernels` look in."""
    code = f"""{LOAD}{USE}
hub = Path(sys.argv[1]) / "build"
kernels = [
    load("_one", hub / "torch-cuda" / "__init__.py"),
    load("_other", hub / "torch-universal" / "moe_patch" / "__init__.py"),
]
assert kernels[0].__all__ == kernels[1].__all__
truth = step(sys.modules["_one.reference"], *tensors)
for kernel in kernels:
    for ours, theirs in zip(step(kernel, *tensors), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
packed = kernels[0].quantize(torch.randn(4, 16, 32), "mxfp4")
assert kernels[0].dequantize(packed).shape == (4, 16, 32)
compiled = torch.compile(kernels[0].fused_experts, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(*tensors), truth[0].detach())
# each has its ops in a namespace of its own
for name in ("_one", kernels[1].fused_experts.__module__.partition(".")[0]):
    assert sys.modules[name + "._ops"].ops.experts_inference is not None
assert not hasattr(torch.ops.moe_patch, "experts_inference") and "moe_patch" not in sys.modules
print("ran")
"""
    assert run(code, hub).split()[-1] == "ran"


def test_the_package_kernels_loads_it(hub):
    if not any(found.name == "kernels" for found in importlib.metadata.distributions()):
        pytest.skip("the package kernels is not installed")
    code = f"""{LOAD}{USE}
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
print(kernel.__name__, step(kernel, *tensors)[0].shape)
"""
    assert run(code, hub).startswith("_moe_patch_")


def test_building_again_gives_the_same_and_spares_other_folders(hub, tmp_path):
    def files() -> dict[str, bytes]:
        return {str(p.relative_to(hub)): p.read_bytes() for p in hub.rglob("*") if p.is_file()}

    before = files()
    assert build(hub).returncode == 0 and files() == before
    (tmp_path / "thesis.txt").write_text("years of work")
    done = build(tmp_path)
    assert done.returncode == 2 and "has other files than a kernel's: name a folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
