"""int4: sixteen evenly spaced values, symmetric about code 8 or with a zero point for each group.

Scales and zero points are those of compressed-tensors (quantization/utils/helpers.py,
calculate_qparams) in float32: symmetric, scale = absmax / 7.5; with zero points, (max - min) / 15
over a range that holds 0. Quotients are rounded to the nearest, ties to the even code. A group of
zeros has scale 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import Chosen, Format

MIDDLE = 8
"""The code that stands for zero where there are no zero points."""


def quantize(rows: Tensor, scale_dtype: torch.dtype, zeros: bool = False) -> Chosen:
    """Quantise groups, float32 [..., group], to codes, scales [...] and, if asked, zeros [...]."""
    low = rows.amin(-1).clamp(max=0)  # [...]
    high = rows.amax(-1).clamp(min=0)  # [...]
    scales = (high - low) / 15 if zeros else torch.maximum(-low, high) / 7.5
    scales = scales.to(scale_dtype)
    divisor = scales.float()
    divisor = divisor.masked_fill(divisor == 0, 1)
    # counted from code 8, as compressed-tensors does: a sum that ties there ties here
    zero = (-MIDDLE - low / divisor).clamp(-8, 7).round() if zeros else torch.zeros_like(low)
    codes = (rows / divisor[..., None] + zero[..., None]).clamp(-8, 7).round() + MIDDLE
    return codes.to(torch.uint8), scales, (zero + MIDDLE).to(torch.uint8) if zeros else None


INT4 = Format(
    name="int4",
    values=tuple(float(code - MIDDLE) for code in range(16)),
    group=128,
    groups=(32, 64, 128),
    scale_dtype=torch.bfloat16,
    scale_dtypes=(torch.float32, torch.bfloat16, torch.float16),
    quantize=quantize,
    has_zeros=True,
)
