"""DeepSeek-V3's block, patched against Hugging Face's: shared experts beside the routed ones."""

import copy

import pytest
import torch
from small import shrink
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

import moe_patch
from moe_patch.models import deepseek_v3
from moe_patch.recognise import overlap


def build(device):
    torch.manual_seed(0)
    config = shrink(DeepseekV3Config(), {})
    config._experts_implementation = "eager"
    block = hf.DeepseekV3MoE(config).to(device).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block


@pytest.fixture
def pair(device):
    """Hugging Face's block, and its patched copy."""
    block = build(device)
    patched = copy.deepcopy(block)
    report = moe_patch.patch(patched)
    assert report.fused == [""] and report.classes == ["DeepseekV3MoE"]
    return block, patched


def test_forward_and_gradients(pair, device):
    block, patched = pair
    x = torch.randn(2, 9, block.config.hidden_size, device=device, requires_grad=True)
    out, expected = patched(x), block(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (out, expected))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_both_parts_at_once(pair, device, monkeypatch):
    """As on a GPU; there is one stream on a CPU."""
    block, patched = pair
    x, calls = torch.randn(2, 9, block.config.hidden_size, device=device), []
    monkeypatch.setattr(deepseek_v3, "overlaps", lambda _: True)
    if str(device) == "cpu":
        monkeypatch.setattr(overlap, "overlaps", lambda _: False)
    both = deepseek_v3.both
    monkeypatch.setattr(deepseek_v3, "both", lambda *a: calls.append("both") or both(*a))
    for part in (patched.gate, patched.experts, patched.shared_experts):
        part.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    with torch.no_grad():
        torch.testing.assert_close(patched(x), block(x), rtol=1e-4, atol=1e-5)
    # parts as modules: hooks, adapters and offloading rely on it
    assert sorted(calls) == ["DeepseekV3Experts", "DeepseekV3MLP", "DeepseekV3TopkRouter", "both"]


def test_unpatch_puts_the_class_back(pair):
    _, patched = pair
    assert type(patched) is deepseek_v3.DeepseekV3MoE and type(patched).__name__ == "DeepseekV3MoE"
    moe_patch.unpatch(patched)
    assert type(patched) is hf.DeepseekV3MoE


def test_a_block_with_a_forward_of_its_own_has_its_experts_fused(device):
    block = build(device)
    forward = block.forward
    block.forward = lambda x: 2 * forward(x)
    x = torch.randn(1, 3, block.config.hidden_size, device=device)
    expected = block(x)
    assert moe_patch.patch(block).fused == [""]
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_in_a_cuda_graph(pair, device):
    block, patched = pair
    x = torch.randn(1, 4, block.config.hidden_size, device=device)
    with torch.no_grad():
        patched(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = patched(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, block(x), rtol=1e-4, atol=1e-5)
