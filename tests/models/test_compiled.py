"""Patched blocks under torch.compile."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_close, says_once, tiny_block

import moe_patch
from moe_patch import kernels

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda module: torch.compile(module, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_compiles_without_graph_breaks(family, device, compiled):
    block = tiny_block(family, device)
    moe_patch.patch(block)
    hidden = torch.randn(1, 5, 64, device=device)

    def run(function):
        block.zero_grad()
        leaf = hidden.clone().requires_grad_()
        out = function(leaf)
        outputs = out if isinstance(out, tuple) else (out,)
        sum(output.square().sum() for output in outputs).backward()
        return [*outputs, leaf.grad, *(parameter.grad for parameter in block.parameters())]

    expected = run(block)
    for actual, other in zip(run(compiled(block)), expected):
        assert_close(actual, other)


def test_compiled_block_on_an_unsupported_device_runs_hf(monkeypatch, device, compiled, ran):
    block = tiny_block("qwen3_moe", device)
    block.experts.config._experts_implementation = "grouped_mm"
    hidden = torch.randn(1, 5, 64, device=device)

    def why_not(device_type):
        torch._dynamo.graph_break()  # it looks at files and the environment: not to be traced
        return "no kernels"

    monkeypatch.setattr(kernels, "why_not", why_not)
    with torch.no_grad():
        expected = block(hidden)
        moe_patch.patch(block)
        with says_once("no kernels"):
            actual = compiled(block)(hidden)
    assert_close(actual, expected)
    assert not ran
