"""What every test shares. Without a GPU the kernels run on the CPU, in Triton's interpreter."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator

gc.disable()  # what is imported and collected stays: pytest_collection_finish turns it on

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

# what imports Triton comes after the line that it reads
import distributions
import plain
from transformers.integrations import finegrained_fp8 as hf_fp8

from moe_patch import kernels, paths, reference
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.parity import emulate
from moe_patch.recognise import parts, routers

# tensors are tiny: on a busy machine, threads that wait for each other cost 100 times more
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("moe_patch", deadline=None, derandomize=True)
    settings.load_profile("moe_patch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPUS < 1 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if GPUS < 2 and item.get_closest_marker("multigpu"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Spares later collections of garbage the million objects that there are by now, and lets them
    be rare: Triton's interpreter makes an object for each number."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU through Triton's interpreter."""
    return torch.device("cuda" if GPUS else "cpu")


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> distributions.Distributions:
    """The sdist and the wheel."""
    return distributions.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same random tensors, alone or in any order."""
    torch.default_generator.manual_seed(0)
    if GPUS:
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def one_thread():
    """What a test sets does not last."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def alone(tmp_path_factory) -> Iterator[None]:
    """Waits until no other process runs such a test: it takes much of the GPU's memory, which it
    gives back."""
    with open(tmp_path_factory.getbasetemp().parent / "alone", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our functions that decorated experts came to; empty where Hugging Face's own ran."""
    names = []

    def recording(name):
        original = getattr(decorated, name)
        return lambda *args, **more: names.append(name) or original(*args, **more)

    for name in ("fused_experts", "by_parts"):
        monkeypatch.setattr(decorated, name, recording(name))
    return names


@pytest.fixture
def fused_calls(monkeypatch) -> list[str]:
    """Grows by the name of its caller on every call of fused_experts."""
    calls = []
    for module in (decorated, llama4):

        def counted(*args, name=module.__name__, function=module.fused_experts, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, "fused_experts", counted)
    return calls


@pytest.fixture
def use(monkeypatch):
    """Puts a function in the place of fused_experts, or one in the place of select_experts."""
    monkeypatch.setattr(kernels, "why_not", lambda _: None)  # on a GPU machine: on its CPU too
    monkeypatch.setattr(kernels.fp8_gemm, "runs", lambda _: True)

    def put(experts=plain.honest, routing=plain.choose):
        def announced(*args, **more):
            if not torch.compiler.is_compiling():
                paths.ran("sorted")
            return experts(*args, **more)

        def sigmoid_scores(logits, top_k):
            logits = logits.detach()
            index, weights = routing(logits, top_k, score="sigmoid", dtype=torch.float32)
            chosen = weights.to(logits.dtype)
            return torch.zeros_like(logits).scatter(1, index, chosen), index, weights

        monkeypatch.setattr(llama4, "sigmoid_scores", sigmoid_scores)
        for module in (decorated, llama4):
            monkeypatch.setattr(module, "fused_experts", announced)
        for module in (qwen3_moe, llama4, routers):
            monkeypatch.setattr(module, "select_experts", routing)

    if os.environ.get("TRITON_INTERPRET") != "1":  # kernels do not run on a GPU machine's CPU
        monkeypatch.setattr(
            parts,
            "expert_order",
            lambda index, experts, _: reference.sort_tokens(index, experts, 16),
        )
        monkeypatch.setattr(parts, "grouped_gemm", reference.grouped_gemm)
        monkeypatch.setattr(parts, "add_bias", reference.add_bias)
    put()
    return put


@pytest.fixture
def emulated(monkeypatch):
    """Plain PyTorch in the place of HF's FP8 linear and grouped product, which are on the hub."""

    def linear(x, weight, scale, block_size=None, bias=None, activation_scale=None, *_, **__):
        rows = emulate.fp8_linear(x.reshape(-1, x.shape[-1]), weight, scale)
        return (rows if bias is None else rows + bias).view(*x.shape[:-1], -1)

    monkeypatch.setattr(hf_fp8, "fp8_linear", linear)
    forward = hf_fp8.FP8Experts.forward  # each replaced layer wraps it once more
    init = hf_fp8.FP8Experts.__init__
    monkeypatch.setitem(hf_fp8.FP8ExpertsInterface._global_mapping, "grouped_mm", forward)
    yield
    hf_fp8.FP8Experts.forward, hf_fp8.FP8Experts.__init__ = forward, init


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
