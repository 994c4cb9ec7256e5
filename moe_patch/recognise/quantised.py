"""FP8Experts: the experts of finegrained FP8 checkpoints (HF's integrations/finegrained_fp8.py).

Weights are e4m3 with a scale in float32 or e8m0 for each 128 x 128 block. HF quantises activations,
too; here that is up to `fused_experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compat import FP8Experts
from ..formats.scaled import E4M3, SCALES
from .gates import activation_of
from .parts import up_name


def is_quantised(experts: nn.Module) -> bool:
    """Whether these are FP8Experts whose weights are still quantised."""
    if FP8Experts is None or not isinstance(experts, FP8Experts):
        return False
    return experts.down_proj.element_size() == 1


def why_not(experts: Any, up: Tensor, down: Tensor) -> str | None:
    """None when `fused_experts` takes these quantised experts, else the reason in one sentence."""
    if up.dtype == torch.int8 or down.dtype == torch.int8:
        return "the weights are FP4: FP8 with blocks of 128 x 128 can be fused"
    if up.dtype != E4M3 or down.dtype != E4M3:
        return f"the weights are {up.dtype} and {down.dtype}: {E4M3} is needed"
    block = experts.block_size
    if block is None or tuple(block) != (128, 128):
        size = "one scale a weight" if block is None else f"blocks of {block[0]} x {block[1]}"
        return f"the FP8 weights have {size}: blocks of 128 x 128 can be fused"
    if experts.activation_scheme != "dynamic":
        return f"the activations' FP8 scales are {experts.activation_scheme}: only dynamic ones can"
    if experts.has_bias:
        return "the FP8 experts have biases: only those without can be fused"
    if up.device != down.device:
        return f"the weights are on {up.device} and {down.device}: one device is needed"
    if activation_of(experts) is None:
        return "the gate of these FP8 experts is none that a kernel computes"
    if up.is_meta:  # accelerate brings them, and their scales, when called
        return None
    found = scales(experts)
    for (name, scale), weight in zip(found.items(), (up, down)):
        needed = [len(weight), *(-(-size // 128) for size in weight.shape[1:])]
        if scale.dtype not in SCALES or list(scale.shape) != needed:
            given = f"{scale.dtype} {list(scale.shape)}"
            return f"{name} is {given}: float32 or float8_e8m0fnu {needed} is needed"
    return None


def scales(experts: Any) -> dict[str, Tensor]:
    """Arguments of `fused_experts`: of the first projection, then of the second."""
    name = up_name(experts)
    up, down = getattr(experts, f"{name}_scale_inv"), experts.down_proj_scale_inv
    if getattr(experts, name).shape[1] <= 128:
        up = up[:, :1]  # HF makes room for two rows, and reads row n // 128
    return {"gate_up_scale_inv": up.detach(), "down_scale_inv": down.detach()}
