"""PEFT's adapters for tiny models of both families."""

from __future__ import annotations

import torch
from peft import LoraConfig


def adapters(family, seed=1, **more):
    """PEFT's configuration for both parameters of every experts module."""
    torch.manual_seed(seed)
    block = "mlp" if family == "qwen3_moe" else "feed_forward"
    names = [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"]
    more = {"target_parameters": names, "target_modules": []} | more
    return LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False, **more)
