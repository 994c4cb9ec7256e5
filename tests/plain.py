"""Plain PyTorch in the place of the kernels, for tests of what stands around them.

Much faster than Triton's interpreter, right in bfloat16, and easy to break on purpose.
"""

from __future__ import annotations

import os

import pytest
import torch

from moe_patch import kernels, reference
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.paths import ran
from moe_patch.recognise import parts, routers

# `name=`, so that a test file can import a fixture and still name its argument like it


@pytest.fixture(autouse=True, name="one_thread")
def one_thread_fixture():
    """Tensors are tiny: on a busy machine, threads that wait for each other cost 100 times more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def honest(x, gate_up, down, index, weights, *, weight_on="output", activation="silu", **more):
    """float32 inside, one rounding at the end: what a fused kernel does."""
    tensors = (x.float(), gate_up.float(), down.float(), index, weights.float())
    for name, value in more.items():
        if value is not None:
            pair = isinstance(value, tuple)
            more[name] = tuple(z.float() for z in value) if pair else value.float()
    options = {"weight_on": weight_on, "activation": activation}
    return reference.fused_experts(*tensors, **options, **more).to(x.dtype)


def choose(logits, top_k, **how):
    return reference.select_experts(logits, top_k, **how)


@pytest.fixture(name="use")
def use_fixture(monkeypatch):
    """Puts a function in the place of fused_experts, or one in the place of select_experts."""

    monkeypatch.setattr(kernels, "why_not", lambda _: None)  # on a GPU machine: on its CPU too
    monkeypatch.setattr(kernels.fp8_gemm, "runs", lambda _: True)

    def put(experts=honest, routing=choose):
        def announced(*args, **more):
            if not torch.compiler.is_compiling():
                ran("sorted")
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
