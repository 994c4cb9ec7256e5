"""Models with experts in 4 bits, beside twins that have the dequantised weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

import moe_patch
from moe_patch.formats.packed import dequantize
from moe_patch.recognise.four_bits import FourBits
from moe_patch.recognise.parts import stored_transposed, up_name


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """{name: experts} of a model in 4 bits."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FourBits)}


def quantised(model: nn.Module, format: str = "nf4", **options) -> tuple[nn.Module, nn.Module]:
    """(the model with experts in 4 bits, a twin of it whose weights are what those stand for)."""
    twin = copy.deepcopy(model)
    report = moe_patch.quantize_experts(model, format, **{"group": 32} | options)
    assert report.quantized and not report.skipped, report
    restore(model, twin)
    return model, twin


@torch.no_grad()
def restore(model: nn.Module, twin: nn.Module) -> None:
    """Writes to the twin what the weights of the model's experts stand for."""
    for name, experts in experts_of(model).items():
        for weight in (up_name(experts), "down_proj"):
            logical = dequantize(experts.packed(weight))
            stored = logical.mT if stored_transposed(experts) else logical
            getattr(twin.get_submodule(name), weight).copy_(stored)
