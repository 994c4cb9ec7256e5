"""Named MoE block sizes, and how to build one as Hugging Face's own initialised module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """One block: hidden size H, intermediate size I, experts E, choices per token K.

    `std` is the standard deviation of every weight, the router's too: 0.02 at real sizes. Small
    blocks need more of it, or their outputs drown in the noise of the number format.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    std: float = 0.02

    @property
    def tiny(self) -> bool:
        """Small enough for Triton's interpreter."""
        return self.num_experts * self.hidden_size * self.intermediate_size <= 1 << 20

    def flops(self, tokens: int, *, backward: bool = False) -> int:
        """Matrix flops of one pass: 6*T*K*H*I, plus Llama4's shared expert; backward adds twice."""
        experts = self.top_k + (self.family == "llama4")
        forward = 6 * tokens * experts * self.hidden_size * self.intermediate_size
        return 3 * forward if backward else forward

    def bytes(self, tokens: int, itemsize: int = 2) -> float:
        """Bytes that a forward pass moves at least: input, output, each weight that is used.

        Of E experts, T tokens with K random choices each use E*(1-(1-K/E)^T) on average; Llama4's
        shared expert is always used. The router is too small to count.
        """
        share = 1 - (1 - self.top_k / self.num_experts) ** tokens
        experts = self.num_experts * share + (self.family == "llama4")
        weights = 3 * experts * self.hidden_size * self.intermediate_size
        return itemsize * (weights + 2 * tokens * self.hidden_size)

    def __str__(self) -> str:
        return (
            f"{self.family}, H {self.hidden_size}, I {self.intermediate_size}, "
            f"{self.num_experts} experts, top-{self.top_k}"
        )


SHAPES = {
    "qwen3_30b": Shape("qwen3_moe", 2048, 768, 128, 8),
    "qwen3_235b": Shape("qwen3_moe", 4096, 1536, 128, 8),
    "dsv3_ep32": Shape("qwen3_moe", 7168, 2048, 32, 8),
    "llama4_scout": Shape("llama4", 5120, 8192, 16, 1),
    "tiny_qwen3": Shape("qwen3_moe", 64, 48, 8, 2, std=0.15),
    "tiny_llama4": Shape("llama4", 64, 48, 4, 1, std=0.15),
}


def find(name: str) -> Shape:
    """The shape of that name; ValueError naming those that exist."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: the named shapes are {', '.join(SHAPES)}")
    return SHAPES[name]


def build(
    shape: Shape | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Hugging Face's block of that shape, every parameter drawn from N(0, std), in eval mode.

    Bare blocks come from Hugging Face with a zero router and uninitialised experts, so nothing
    here relies on their own initialisation. The random state of the process is not touched.
    """
    shape = find(shape) if isinstance(shape, str) else shape
    block_class, _, config = _family(shape)
    with building(dtype, torch.device(device), seed):
        block = block_class(config).eval()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.normal_(0, shape.std)
    return block


def build_model(
    shape: Shape | str,
    *,
    layers: int = 2,
    vocab_size: int = 256,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
) -> PreTrainedModel:
    """A small causal language model with a block of that shape in every layer, in eval mode.

    Hugging Face's own initialisation with the shape's std; the auxiliary loss is on where the
    family has one; `heads` of attention are hidden_size / heads wide. The random state of the
    process is not touched.
    """
    shape = find(shape) if isinstance(shape, str) else shape
    _, model_class, config = _family(
        shape,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=shape.hidden_size // heads,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        initializer_range=shape.std,
    )
    with building(dtype, torch.device(device), seed):
        return model_class(config).eval()


def model_config(shape: Shape, **more: Any) -> PreTrainedConfig:
    """Of a model with that block; `more` are attributes besides."""
    return _family(shape, **more)[2]


def _family(shape: Shape, **more: Any) -> tuple[type, type, PreTrainedConfig]:
    """Block class, model class and a config."""
    if shape.family == "llama4":
        from transformers.models.llama4 import modeling_llama4 as hf

        config = hf.Llama4TextConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            intermediate_size_mlp=shape.intermediate_size,
            num_local_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            interleave_moe_layer_step=1,
            **{"bos_token_id": None, "eos_token_id": None} | more,
        )
        return hf.Llama4TextMoe, hf.Llama4ForCausalLM, config
    if shape.family != "qwen3_moe":
        raise ValueError(f"unknown family {shape.family!r}: there are qwen3_moe and llama4")
    from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

    config = hf.Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        **{"output_router_logits": True} | more,
    )
    return hf.Qwen3MoeSparseMoeBlock, hf.Qwen3MoeForCausalLM, config


@contextlib.contextmanager
def building(dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[None]:
    """Tensors made inside have that dtype and device; the process's random state is not touched."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(default)
