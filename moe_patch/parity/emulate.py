"""Hugging Face's FP8 linear in plain PyTorch: its own kernels come from the hub and want a GPU.

After transformers' integrations/finegrained_fp8.py: activations in e4m3 with a scale for each 128
of a row, products in float32, an output in the activations' dtype; the input's gradient goes
through the dequantised weight. What the parity law compares FP8 experts with (docs/parity.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..reference import dequantize, quantize


def rounded(x: Tensor) -> Tensor:
    """x [R, K] as its e4m3 version stands for it, in float32."""
    return dequantize(*quantize(x))


def fp8_linear(
    x: Tensor, weight: Tensor, scale_inv: Tensor, activation_scale: Tensor | None = None
) -> Tensor:
    """x [R, K] times the FP8 weight [N, K] with scales [ceil(N / 128), ceil(K / 128)], x quantised
    too. Differentiable in x. In the place of HF's `FP8Experts.linear`, hence the last argument."""
    whole = dequantize(weight.detach(), scale_inv.detach(), torch.float32)
    return (x + (rounded(x) - x).detach()).matmul(whole.mT).to(x.dtype)


def dequantised_linear(
    x: Tensor, weight: Tensor, scale_inv: Tensor, activation_scale: Tensor | None = None
) -> Tensor:
    """The same with x as it is and the weight dequantised to x's dtype, as a model that was loaded
    with `FineGrainedFP8Config(dequantize=True)` computes it. Dequantised anew for the backward."""

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, dequantize(weight.detach(), scale_inv.detach(), x.dtype))

    return checkpoint(linear, x, use_reentrant=False, preserve_rng_state=False)
