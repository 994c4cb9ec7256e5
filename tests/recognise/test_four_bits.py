"""Experts in 4 bits beside the same experts with dequantised weights, in every family."""

from __future__ import annotations

import warnings

import pytest
import torch
from families import FAMILIES, WIDE, build
from four_bits import experts_of, quantised
from tiny import assert_close

import moe_patch

SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
MORE = {"ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32]}}
BLOCKS = ("qwen3_moe", "llama4")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="experts in 4 bits run Hugging Face's")
        yield


def routed(experts, dtype=torch.float32, tokens=5):
    draw = torch.Generator().manual_seed(3)
    hidden = experts.packed("down_proj").shape[1]
    count = len(experts.down_proj)
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    weights, index = torch.rand(tokens, count, generator=draw).topk(2)
    return x, index, weights.to(dtype)


def assert_near(actual, expected):
    """Equal up to the order of sums, in float32 or in half precision."""
    if actual.dtype == torch.float32:
        assert_close(actual, expected)
    else:
        error = (actual.double() - expected.double()).square().mean().sqrt()
        assert error <= 2**-9 * expected.double().square().mean().sqrt()
        assert expected.any()


def step(experts, dtype=torch.float32):
    """(output, gradient of the input, gradient of the routing weights)."""
    x, index, weights = routed_of(experts, dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = experts(x, index, weights)
    return out, *torch.autograd.grad(out.float().square().sum(), (x, weights))


def routed_of(experts, dtype):
    return routed(experts if hasattr(experts, "packed") else experts.like, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, dtype, device):
    model = build(family, device, **MORE.get(family, {} if family in WIDE else SIZES)).to(dtype)
    model, twin = quantised(model, scale_dtype=torch.float32)
    name, experts = next(iter(experts_of(model).items()))
    other = twin.get_submodule(name)
    vars(other)["like"] = experts
    expected = step(other, dtype)
    for each in (step(experts, dtype), _patched(model, experts, dtype)):
        for ours, theirs in zip(each, expected):
            assert_near(ours, theirs)


def _patched(model, experts, dtype):
    assert len(moe_patch.patch(model).fused) == len(experts_of(model))
    return step(experts, dtype)
