"""Packaging: two folders, one package. `models/` is installed as `moe_patch.models`."""

import gzip
import os
import re
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
README = ROOT / "README.md"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "moe_patch" / "version.py").read_text())[1]
# OWNER is replaced before the first release, here and wherever `.ci/release-check` finds it
HOME = "https://github.com/OWNER/moe_patch"
FILES = f"{HOME}/blob/v{VERSION}"

PLOT = ["matplotlib>=3.8"]
LORA = ["peft>=0.18"]
QLORA = [*LORA, "bitsandbytes>=0.46"]
TEST = [
    *PLOT,
    *LORA,
    'deepspeed>=0.19; platform_system == "Linux"',  # ZeRO-3, on two processes
    "hypothesis>=6.100",
    "packaging>=24",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "pyyaml>=6",  # test_release reads .github and the recipe
    "setuptools>=70.1",  # test_packaging builds a wheel; before 70.1 that took the package `wheel`
]


def description() -> str:
    """README.md as an index shows it: away from the repository, where its links need the whole
    address."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    text = re.sub(r"\]\((?![a-z]+:|#)", f"]({FILES}/", text)
    return text.replace("](#", f"]({FILES}/README.md#")


class Sdist(sdist):
    """The same files give the same bytes: in order, owned by nobody, and all of one time,
    SOURCE_DATE_EPOCH, which wheels obey by themselves."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write the .tar.gz; return its name."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or epoch is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def normal(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.mode = int(epoch), 0o755 if member.mode & 0o100 else 0o644
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            return member

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=normal)  # folders in the order of their names
        return str(path)


setup(
    name="moe_patch",
    version=VERSION,
    description="Fused Triton MoE blocks for Hugging Face transformers, with a parity check",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="The moe_patch authors",
    url=HOME,
    project_urls={
        "Source": HOME,
        "Documentation": f"{FILES}/docs/README.md",
        "Changelog": f"{FILES}/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    },
    keywords=["mixture of experts", "MoE", "transformers", "triton", "LoRA", "QLoRA", "CUDA"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    cmdclass={"sdist": Sdist},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
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
        "moe_patch.routing",
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
        "qlora": QLORA,
        "examples": [*PLOT, *LORA],
        "test": TEST,
        "dev": [*TEST, "mypy>=2", "pre-commit>=4", "ruff>=0.12"],
    },
)
