"""Packaging: two folders, one package. `models/` is installed as `moe_patch.models`."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "moe_patch" / "version.py").read_text())

PLOT = ["matplotlib>=3.8"]
LORA = ["peft>=0.18"]
TEST = [
    *PLOT,
    *LORA,
    'deepspeed>=0.19; platform_system == "Linux"',  # ZeRO-3, on two processes
    "hypothesis>=6.100",
    "packaging>=24",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "setuptools>=70.1",  # test_packaging builds a wheel; before 70.1 that took the package `wheel`
]

setup(
    name="moe_patch",
    version=VERSION[1],
    description="Fused Triton MoE blocks for Hugging Face transformers, with a parity check",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # An explicit list: find_packages would ship a top-level package called `models`.
    packages=[
        "moe_patch",
        "moe_patch.bench",
        "moe_patch.bench.peers",
        "moe_patch.commands",
        "moe_patch.formats",
        "moe_patch.kernels",
        "moe_patch.kernels.hopper",
        "moe_patch.models",
        "moe_patch.ops",
        "moe_patch.parity",
        "moe_patch.quantizer",
        "moe_patch.recognise",
        "moe_patch.tune",
    ],
    package_dir={"moe_patch": "moe_patch", "moe_patch.models": "models"},
    package_data={"moe_patch": ["py.typed"], "moe_patch.kernels": ["tuned.json"]},
    zip_safe=False,
    install_requires=[
        "torch>=2.11",  # the oldest tested; its CUDA builds bring Triton 3.6
        # CUDA builds of torch pin their own Triton, CPU builds bring none. There is none for macOS.
        'triton>=3.6,<4; platform_system == "Linux"',
        "transformers>=5.17,<6",
        "accelerate>=1.10",
        "rich>=13",
        "safetensors>=0.4.3",
    ],
    extras_require={
        "bench": PLOT,
        "lora": LORA,
        "examples": [*PLOT, *LORA],
        "test": TEST,
        "dev": [*TEST, "mypy>=2", "pre-commit>=4", "ruff>=0.12"],
    },
)
