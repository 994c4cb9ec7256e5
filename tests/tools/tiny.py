"""Tiny models of both families, and what tests ask of them."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.models.llama4 import modeling_llama4 as hf_llama4
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_qwen3

from moe_patch import notices

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": lambda **changes: Qwen3MoeConfig(
        **TINY | {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8} | changes
    ),
    "llama4": lambda **changes: Llama4TextConfig(
        **TINY
        | {"intermediate_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 8}
        | changes
    ),
}
BLOCKS = {
    "qwen3_moe": hf_qwen3.Qwen3MoeSparseMoeBlock,
    "llama4": hf_llama4.Llama4TextMoe,
}
both_families = pytest.mark.parametrize("family", CONFIGS)


def tiny_config(family: str, **changes) -> PreTrainedConfig:
    return CONFIGS[family](**changes)


def tiny_model(family: str, device: torch.device | str = "cpu", **changes) -> nn.Module:
    """A causal language model of two layers, every parameter random, in eval mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes)).to(device).eval()


def tiny_block(family: str, device: torch.device | str = "cpu", **changes) -> nn.Module:
    """A bare block; Hugging Face leaves its parameters zero or uninitialised, so draw them."""
    torch.manual_seed(0)
    block = BLOCKS[family](tiny_config(family, **changes))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    return block.to(device).eval()


def tokens(device: torch.device | str = "cpu", *shape: int) -> torch.Tensor:
    return torch.randint(0, 128, shape or (1, 7), generator=torch.manual_seed(1)).to(device)


def tokenizer() -> PreTrainedTokenizerFast:
    """For the vocabulary of a tiny model: w0 pads, w1 ends."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


@contextlib.contextmanager
def says_once(message: str):
    """Inside, moe_patch warns exactly once of what it runs instead, with this reason."""
    notices._warn_uncompiled.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notices._warn_uncompiled.cache_clear()
    said = [str(w.message) for w in caught if "moe_patch runs" in str(w.message)]
    assert len(said) == 1 and message in said[0], said


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums."""
    scale = expected.detach().abs().max().item()
    assert scale > 0
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6 * scale)


def layers(model: nn.Module) -> list[nn.Module]:
    """The MoE blocks of a tiny model."""
    return [module for module in model.modules() if isinstance(module, tuple(BLOCKS.values()))]


def train_step(model, ids, **kwargs):
    """(loss, outputs, every gradient) of one step."""
    model.zero_grad()
    out = model(ids, labels=ids, **kwargs)
    out.loss.backward()
    return out, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(actual, expected):
    (out, grads), (other, others) = actual, expected
    assert_close(out.loss, other.loss)
    assert_close(out.logits, other.logits)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        assert grad is not None and grad.dtype == others[name].dtype, name
        assert_close(grad, others[name])


def assert_same_scores(
    actual: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Of two routers, within a rounding; in float32 the gradients of `inputs` too."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=eps)
    if inputs and expected.dtype == torch.float32:
        grad = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
        ):
            assert_close(ours, theirs)


class Spoil(torch.autograd.Function):
    """Passes a tensor on and its gradient through `spoil`."""

    @staticmethod
    def forward(ctx, tensor, spoil):
        ctx.spoil = spoil
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.spoil(grad.clone()), None
