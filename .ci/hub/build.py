"""Lay out what computes as a kernel of Hugging Face's `kernels` hub: python .ci/hub/build.py

    dist/hub/build.toml, flake.nix, README.md, LICENSE
    dist/hub/torch-ext/moe_patch/    the sources, where kernel-builder looks for them
    dist/hub/build/torch-cuda/       as `kernels` loads them: a folder a backend, with metadata.json
    dist/hub/build/torch-universal/  the same for versions of `kernels` without backends

A kernel is a package without a name of its own: `kernels` imports each version under the id in its
metadata. So its ops have that id as their namespace, which stands in _ops.py, and two versions run
in one process. Needs Python 3.11 (tomllib) and nothing else.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = (
    "activation.py", "compat.py", "fp8.py", "notices.py", "order.py", "paths.py", "precision.py",
    "reference.py", "version.py", "versions.py", "formats", "kernels", "ops",
)  # fmt: skip
"""Of moe_patch/, `ops` and what stands beneath it (tests/test_layout.py): no transformers."""
OP = """name = f"moe_patch::{function.__name__.lstrip('_')}\""""
"""How kernels/__init__.py names an op, and how a kernel does."""
OP_OF_KERNEL = """from .._ops import add_op_namespace_prefix

        name = add_op_namespace_prefix(function.__name__.lstrip("_"))"""
OPS = '''"""The namespace of this kernel's ops, which no other version has."""

import torch

ops = torch.ops.{ident}


def add_op_namespace_prefix(op_name):
    """Return the op's whole name."""
    return f"{ident}::{{op_name}}"
'''
"""_ops.py, which kernel-builder makes where it builds."""
ARCHS = {
    "cuda": {"type": "cuda", "archs": ["8.0+PTX"]},  # compiled when they run: 8.0 and later
    "rocm": {"type": "rocm", "archs": ["gfx942", "gfx950"]},
}
"""The chips of each backend that CI compiles the kernels for."""


def main() -> None:
    """Write the folder, in place of what an earlier run wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "hub", metavar="FOLDER")
    output = parser.parse_args().output
    if output.exists() and any(output.iterdir()) and not (output / "build.toml").is_file():
        parser.error(f"{output} has other files than a kernel's: name a folder that is new")
    shutil.rmtree(output, ignore_errors=True)
    write(output)
    print(output)


def write(output: Path) -> None:
    """Write the kernel's repository: its config, its card, its sources and every variant."""
    config = tomllib.loads((HERE / "build.toml").read_text(encoding="utf-8"))["general"]
    module, files = config["name"].replace("-", "_"), sources()
    output.mkdir(parents=True)
    for name in ("build.toml", "flake.nix"):
        shutil.copy(HERE / name, output)
    shutil.copy(HERE / "CARD.md", output / "README.md")
    shutil.copy(ROOT / "LICENSE", output)
    put(output / "torch-ext" / module, files)
    for backend in (*config["backends"], "universal"):
        ident = f"_{module}_{backend}_{digest(files)[:10]}"
        variant = output / "build" / f"torch-{backend}"
        built = {
            **files,
            "_ops.py": OPS.format(ident=ident).encode(),
            f"{module}/__init__.py": (HERE / "same_module.py").read_bytes(),
        }
        put(variant, built)
        metadata = {
            "id": ident,
            "name": config["name"],
            "version": config["version"],
            "license": config["license"],
            "python-depends": [],
            # `kernels` knows no backend "universal"; it reads the name of the folder
            "backend": ARCHS.get(backend, ARCHS["cuda"]),
            "digest": {
                "algorithm": "sha256",
                "files": {name: sha256(content) for name, content in sorted(built.items())},
            },
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def sources() -> dict[str, bytes]:
    """Return {path inside the kernel: content}.

    Raises:
        ValueError: ops are named in another way than OP says.
    """
    package = ROOT / "moe_patch"
    found = {"__init__.py": HERE / "kernel.py"}
    for part in PARTS:
        paths = [package / part] if part.endswith(".py") else (package / part).rglob("*")
        for path in paths:
            if path.suffix in (".py", ".json"):
                found[path.relative_to(package).as_posix()] = path
    files = {name: path.read_bytes() for name, path in sorted(found.items())}
    home, old = "kernels/__init__.py", OP.encode()
    if files[home].count(old) != 1 or any(
        b"moe_patch::" in files[n] for n in files.keys() - {home}
    ):
        raise ValueError(f"ops are to be named in {home} alone, by {OP}: mend OP")
    return files | {home: files[home].replace(old, OP_OF_KERNEL.encode())}


def put(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a folder that is new."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def digest(files: dict[str, bytes]) -> str:
    """Return a hash of names and contents, in hexadecimal digits."""
    lines = [f"{name} {sha256(content)}" for name, content in sorted(files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sha256(content: bytes) -> str:
    """Return the hash as `kernels` writes it."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


if __name__ == "__main__":
    main()
