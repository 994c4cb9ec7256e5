"""What every test shares. Without a GPU the kernels run on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os

for _library in ("OMP", "OPENBLAS", "MKL"):  # read when torch and numpy are imported
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest
import torch

# Triton reads this when it is imported, and transformers imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MOE_PATCH_CACHE"] = "no such folder"  # nothing that was tuned on this machine
os.environ.pop("MOE_PATCH", None)  # a forgotten MOE_PATCH=0 would compare HF with HF

GPUS = 0 if os.environ.get("TRITON_INTERPRET") == "1" else torch.cuda.device_count()
torch.set_num_threads(1)  # tensors are tiny: threads that wait for each other cost 100 times more


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("moe_patch", deadline=None, derandomize=True)
    settings.load_profile("moe_patch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPUS < 1 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if GPUS < 2 and item.get_closest_marker("multigpu"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU through Triton's interpreter."""
    return torch.device("cuda" if GPUS else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same random tensors, alone or in any order."""
    torch.manual_seed(0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our functions that decorated experts came to; empty where Hugging Face's own ran."""
    from moe_patch.models import decorated

    names = []

    def recording(name):
        original = getattr(decorated, name)
        return lambda *args, **more: names.append(name) or original(*args, **more)

    for name in ("fused_experts", "by_parts"):
        monkeypatch.setattr(decorated, name, recording(name))
    return names


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds the worst: NaN in floats, True, huge integers.

    A kernel that leaves an element unwritten, or reads one, then shows.
    """

    def poisoned(allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                return fill(tensor)

        return call

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
