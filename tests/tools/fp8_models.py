"""Tiny models with FP8 experts, and plain PyTorch in the place of HF's own FP8 kernels, which come
from the hub (moe_patch/parity/emulate.py)."""

from __future__ import annotations

import torch
from ops import quantised
from small import SMALL, shrink
from tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, FineGrainedFP8Config
from transformers.integrations import finegrained_fp8 as hf

from moe_patch import reference

CONFIGS = {
    "qwen3_moe": lambda **changes: tiny_config(
        "qwen3_moe",
        **{"hidden_size": 160, "moe_intermediate_size": 96, "num_experts": 4} | changes,
    ),
    "deepseek_v3": lambda: shrink(DeepseekV3Config(), SMALL | {"vocab_size": 128}),
}


def fp8_model(family="qwen3_moe", scale_fmt="float", linears=False, **changes):
    """(a model with FP8 experts, the same with them dequantised); `linears`: FP8Linear too."""
    config = CONFIGS[family](**changes)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    kept = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    kept = [name for name in kept if not (linears and "shared_experts" in name)]
    how = FineGrainedFP8Config(modules_to_not_convert=kept, scale_fmt=scale_fmt)
    hf.replace_with_fp8_linear(model, kept, how)
    dtype = torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu
    found = dict(plain.named_modules())
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (hf.FP8Experts, hf.FP8Linear)):
                for weight in ("gate_up_proj", "down_proj", "weight"):
                    if hasattr(module, weight):
                        fill(module, weight, getattr(found[name], weight), dtype)
            else:
                for own, parameter in module.named_parameters(recurse=False):
                    parameter.copy_(getattr(found[name], own))
                for own, buffer in module.named_buffers(recurse=False):
                    buffer.copy_(getattr(found[name], own))
    return model, plain


def fill(module, name, weight, dtype):
    """Quantises into an FP8 module, and puts what that stands for back into the plain weight."""
    whole = weight if weight.dim() == 3 else weight[None]
    bits, scale = quantised(whole, dtype)
    whole.copy_(reference.dequantize(bits, scale, torch.float32))
    template = getattr(module, f"{name}_scale_inv")
    if scale.shape[1] < template.shape[-2]:  # room for gate and up in one block: never read
        scale = torch.cat([scale, torch.full_like(scale.float(), 7.0).to(dtype)], 1)
    if weight.dim() == 2:
        bits, scale = bits[0], scale[0]
    assert template.shape == scale.shape and template.dtype == dtype
    trains = scale.dtype == torch.float32
    setattr(module, name, nn.Parameter(bits))  # FP8 is a floating dtype: it wants a gradient
    setattr(module, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=trains))
