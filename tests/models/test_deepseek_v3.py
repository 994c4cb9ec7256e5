"""DeepSeek-V3's block, patched against Hugging Face's: shared experts beside the routed ones."""

import copy
import functools

import pytest
import torch
from small import shrink
from torch._subclasses import FakeTensorMode
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


@pytest.mark.parametrize(
    "tokens, captured, pays",
    [
        (1, False, False), (15, False, False), (16, False, True), (256, False, True),
        (257, False, False), (1, True, True), (15, True, True), (257, True, False),
    ],
)  # fmt: skip
def test_how_many_tokens_pay_for_a_second_stream(tokens, captured, pays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    with FakeTensorMode(), torch.no_grad():  # no GPU is needed for tensors without memory
        for shape in ((1, tokens, 512), (tokens, 1, 512), (tokens, 512)):
            assert overlap.overlaps(torch.empty(shape, device="cuda:0")) is pays
    with torch.no_grad():
        assert not overlap.overlaps(torch.empty(tokens, 512))


@pytest.mark.gpu
@torch.no_grad()
def test_the_second_stream_waits_for_what_is_written_before(device):
    x = torch.zeros(64, 1024, device=device)
    double, triple = (functools.partial(torch.mul, other=each) for each in (2, 3))
    overlap.both(x, double, triple)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    x.fill_(1)
    out, routed = overlap.both(x, double, triple)
    assert torch.equal(out, 2 * x) and torch.equal(routed, 3 * x)


@pytest.mark.gpu
@torch.no_grad()
def test_memory_of_the_second_stream_is_kept_for_the_first(device):
    """Another thread on the same stream shares the second one, and may allocate there at once."""
    x = torch.ones(64, 1024, device=device)
    side = overlap._beside(torch.cuda.current_stream())
    out, _ = overlap.both(x, functools.partial(torch.mul, other=2), torch.clone)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    read = out.clone()
    del out
    with torch.cuda.stream(side):
        others = [torch.full_like(x, 7) for _ in range(32)]
    assert (read == 2).all() and len(others) == 32


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
