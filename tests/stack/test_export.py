"""torch.export of patched models, and torch.compile of what surrounds them."""

from __future__ import annotations

import copy

import pytest
import torch
from lora import adapters
from peft import get_peft_model
from tiny import (
    assert_close,
    assert_same_step,
    both_families,
    tiny_block,
    tiny_model,
    tokens,
    train_step,
)
from torch import nn

import moe_patch

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Logits(nn.Module):
    """What is exported: tensors in, tensors out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@both_families
def test_exported_model(family, device, tmp_path):
    """With any number of tokens; the kernels are in the program, which needs no patched model."""
    model = tiny_model(family, device, num_hidden_layers=1)
    moe_patch.patch(model)
    shapes = {"ids": {1: torch.export.Dim("length", min=2, max=64)}}
    with torch.no_grad():
        program = torch.export.export(Logits(model), (tokens(device),), dynamic_shapes=shapes)
        names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert any(name.startswith("moe_patch.") for name in names)
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
        for length in (7, 11):
            ids = tokens(device, 1, length)
            moe_patch.unpatch(model)
            assert_close(program.module()(ids), model(ids, use_cache=False).logits)


def test_compiled_training_of_a_whole_llama4(device, fused_calls):
    plain = tiny_model("llama4", device, num_hidden_layers=1)
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    expected = train_step(plain, tokens(device))
    patched.forward = torch.compile(patched.forward, backend="aot_eager", fullgraph=True)
    assert_same_step(train_step(patched, tokens(device)), expected)
    assert fused_calls


def test_compiled_adapters(device):
    """Where the wrappers look at what class of experts they hold, too."""
    plain = tiny_model("qwen3_moe", device, num_hidden_layers=1)
    plain = get_peft_model(plain, adapters("qwen3_moe"))
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    ids = tokens(device)
    results = []
    for model in (plain, compiled):
        out = model(ids, labels=ids)
        out.loss.backward()
        results.append(out.logits)
    assert_close(results[1], results[0])
    for one, two in zip(plain.parameters(), patched.parameters()):
        if one.requires_grad:
            assert_close(two.grad, one.grad)


@pytest.mark.gpu
@both_families
def test_compiled_in_cuda_graphs(family, device):
    block = tiny_block(family, device)
    moe_patch.patch(block)
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            hidden = torch.randn(1, 9, 64, device=device)
            actual, expected = compiled(hidden), block(hidden)
            if isinstance(expected, tuple):
                actual, expected = actual[0], expected[0]
            assert_close(actual, expected)
