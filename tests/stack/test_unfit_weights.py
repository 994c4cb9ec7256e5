"""Weights that are not what the kernels take, or not of one piece: named, and left to HF."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    BLOCKS,
    assert_close,
    both_families,
    tiny_block,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import moe_patch
from moe_patch import notices


class Packed(torch.Tensor):
    """A tensor subclass that looks like its dtype and is computed with in its own way."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Computes with twice what is stored, as a scale would have it."""
        plain = [2 * a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        return function(*plain, **kwargs or {})


class Params4bit(nn.Parameter):
    """As bitsandbytes keeps a weight: bytes, and the rest in attributes."""


def pack(experts):
    weight = experts.gate_up_proj.detach()
    del experts.gate_up_proj
    experts.gate_up_proj = weight.as_subclass(Packed)


def to_bytes(experts):
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach().to(torch.uint8)
        setattr(experts, name, Params4bit(weight, requires_grad=False))


@pytest.fixture
def says():
    """Expects our warning, whatever was said before."""
    notices._warn_uncompiled.cache_clear()
    yield lambda reason: pytest.warns(UserWarning, match=f"moe_patch runs Hugging.*{reason}")
    notices._warn_uncompiled.cache_clear()


def run(block, device):
    with torch.no_grad():
        out = block(torch.randn(1, 5, 64, generator=torch.manual_seed(5)).to(device))
    return out[0] if isinstance(out, tuple) else out


# Quantised


@both_families
@pytest.mark.parametrize("spoil, reason", [(pack, "Packeds"), (to_bytes, "torch.uint8")])
def test_quantised_before(family, spoil, reason, device):
    block = tiny_block(family, device)
    spoil(block.experts)
    report = moe_patch.patch(block)
    assert not report.fused and reason in report.skipped[0][2]


@both_families
def test_quantised_after(family, device, says, fused_calls):
    """torchao's quantize_ replaces weights where they are."""
    block = tiny_block(family, device)
    plain = run(block, device)
    moe_patch.patch(block)
    pack(block.experts)
    expected = tiny_block(family, device)
    expected.experts.gate_up_proj.data *= 2
    with says("Packeds"):
        actual = run(block, device)
    assert_close(actual, run(expected, device))
    assert not torch.allclose(actual, plain) and not fused_calls


@both_families
def test_torchao(family, device, fused_calls):
    """Of every nn.Linear, which Llama4's router is one of."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model(family, device)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        expected = model(tokens(device)).logits
        assert len(moe_patch.patch(model).fused) == 2
        assert_close(model(tokens(device)).logits, expected)
    assert fused_calls


def test_mxfp4_experts_are_named():
    config = tiny_config("qwen3_moe", num_local_experts=8)
    block = nn.Module()
    block.experts = Mxfp4GptOssExperts(config)
    report = moe_patch.patch(nn.ModuleList([block, tiny_block("qwen3_moe")]))
    assert report.fused == ["1"]
    assert [skip[0] for skip in report.skipped] == ["0"] and "Mxfp4" in report.skipped[0][2]


# Half converted


def experts_of_a_list(experts):
    """Not stacked yet, as checkpoints before transformers 5 have them."""
    del experts.down_proj
    experts.down_proj = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(8))


def fewer_experts(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:5])


def gate_without_up(experts):
    dim = 2 if experts.gate_up_proj.shape[1] == experts.down_proj.shape[2] else 1
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().narrow(dim, 0, 32))


def other_way_round(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.detach().transpose(1, 2).contiguous())


HALF = {
    experts_of_a_list: "no gate_up_proj and down_proj tensors",
    fewer_experts: r"do not fit together",
    gate_without_up: r"do not fit together",
    other_way_round: r"do not fit together",
}


@both_families
@pytest.mark.parametrize("spoil", HALF)
def test_half_converted(family, spoil):
    block = tiny_block(family)
    spoil(block.experts)
    model = nn.ModuleList([block, tiny_block(family)])
    report = moe_patch.patch(model)
    assert report.fused == ["1"]
    ((name, cls, reason),) = report.skipped
    assert (name, cls) == ("0", BLOCKS[family].__name__) and HALF[spoil] in reason


# Sharded


def test_sizes_are_the_tensors_own(device, fused_calls):
    """Under tensor parallelism a rank has a slice, attributes are those of the whole, and the sum
    over ranks is written into the output."""
    whole = tiny_block("qwen3_moe", device).experts
    index = torch.tensor([[0, 1], [7, 3]], device=device)
    routed = torch.randn(2, 64, device=device), index, torch.rand(2, 2, device=device)
    expected = whole(*routed)
    expected.sum().backward()
    total, grads = torch.zeros_like(expected), []
    for half in (slice(0, 16), slice(16, 32)):
        experts = tiny_block("qwen3_moe", device).experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        experts.gate_up_proj = nn.Parameter(torch.cat([gate[:, half], up[:, half]], dim=1))
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[..., half].contiguous())
        assert experts.intermediate_dim == 32
        assert moe_patch.patch(experts).fused
        out = experts(*routed)
        total += out.detach()
        out.mul_(3)
        out.sum().backward()
        grads.append(experts.down_proj.grad / 3)
    assert_close(total, expected)
    assert_close(torch.cat(grads, dim=2), whole.down_proj.grad)
    assert len(fused_calls) == 2
