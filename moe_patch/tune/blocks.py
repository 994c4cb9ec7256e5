"""Blocks to tune for: named shapes, and the experts of a checkpoint's config.json."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .. import shapes
from ..activation import parse
from ..bench.families import top_k_of
from ..bench.timing import first_line
from ..bench.whole import read_config
from ..recognise.eligibility import why_by_parts
from ..recognise.gates import SILU, activation_of
from ..recognise.parts import stored_transposed, up_name


@dataclass(frozen=True)
class Block:
    """The experts of one MoE block, as far as kernels differ by them.

    H hidden size, I intermediate size, E experts, K choices a token. Weights are [E, N, K], or
    stored [E, K, N] where `transposed`; with `fp8` they are e4m3 with block scales.
    """

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    activation: str = SILU
    transposed: bool = False
    weight_on_input: bool = False
    fp8: bool = False

    @property
    def gated(self) -> bool:
        """Whether the first projection has two halves."""
        return parse(self.activation).form != "ungated"

    @property
    def width(self) -> int:
        """Columns of the first projection: 2I, or I without a gate."""
        return 2 * self.inner if self.gated else self.inner

    def tokens(self, rows: int) -> int:
        """The fewest tokens that give an expert `rows` rows, on average."""
        return -(-rows * self.experts // self.top_k)


def find(name: str, *, fp8: bool = False) -> Block:
    """Return the block of a named shape, or of a checkpoint's folder or config.json.

    `fp8` makes the weights of any of them FP8; those of an FP8 checkpoint always are.

    Raises:
        ValueError: neither is there, or the config has no experts that are fused.
    """
    path = Path(name)
    if name not in shapes.SHAPES and (path.exists() or os.sep in name):
        return of_config(name, read_config(path / "config.json" if path.is_dir() else path), fp8)
    try:
        shape = shapes.find(name)
    except ValueError as error:
        raise ValueError(
            f"{error}; a checkpoint's folder or its config.json is taken too"
        ) from None
    llama4 = shape.family == "llama4" and not fp8
    return Block(
        name, shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
        transposed=llama4, weight_on_input=shape.family == "llama4", fp8=fp8,
    )  # fmt: skip


def of_config(name: str, config: PreTrainedConfig, fp8: bool = False) -> Block:
    """Return the block of the first experts of that config's model, built without memory."""
    experts = next(filter(_is_experts, _model(name, config).modules()), None)
    top_k = top_k_of(config.get_text_config())
    if experts is None or top_k is None:
        raise ValueError(
            f"{name}: a {config.model_type} model has no experts with stacked weights: tune takes "
            f"MoE checkpoints, and the named shapes {', '.join(shapes.SHAPES)}"
        )
    cls = type(experts).__name__
    llama4 = cls.startswith("Llama4")  # not under HF's decorator; its gate is SiLU
    why = None if llama4 else why_by_parts(experts)
    if why:
        raise ValueError(
            f"{name}: {cls} runs as separate GEMMs because of {why}, and tune measures the fused "
            "kernels: there is nothing to tune for it"
        )
    activation = SILU if llama4 else activation_of(experts)
    down, transposed = experts.down_proj, stored_transposed(experts)
    num_experts, hidden, inner = (down.mT if transposed else down).shape
    fp8 = fp8 or _is_fp8(config)
    return Block(
        name, hidden, inner, num_experts, top_k, activation,
        transposed=transposed and not fp8,
        weight_on_input=llama4, fp8=fp8,
    )  # fmt: skip


def _model(name: str, config: PreTrainedConfig) -> nn.Module:
    error: Exception = ValueError(name)
    for auto in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                return auto.from_config(config)
        # a class that does not take this config raises whatever its code raises
        except Exception as found:
            error = found
    raise ValueError(f"{name}: its model cannot be built: {first_line(error)}") from error


def _is_experts(module: nn.Module) -> bool:
    weights = getattr(module, up_name(module), None), getattr(module, "down_proj", None)
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def _is_fp8(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint stores e4m3 in blocks of 128 x 128."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    return found.get("quant_method") == "fp8" and found.get("weight_block_size") in (
        [128, 128], (128, 128),
    )  # fmt: skip
