"""MXFP4: e2m1 values and one power of two for 32 of them along K, the layout of gpt-oss.

Quantised as the OCP Microscaling Formats (MX) Specification v1.0, section 6.3, says: the shared
exponent is floor(log2(absmax)) less the exponent of e2m1's largest power of two, which is 2; values
are rounded to the nearest, ties to the even code, and saturate at 6.

A scale is a byte, the exponent plus 127; 255 is NaN and makes its 32 weights NaN. A group of zeros
takes the smallest scale, 2 ** -127. Zeros, and what rounds to zero, keep their sign: code 8 is -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import Chosen, Format

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
BIAS = 127
LARGEST_POWER = 2
"""floor(log2(6))."""


def quantize(rows: Tensor, scale_dtype: torch.dtype, zeros: bool = False) -> Chosen:
    """Quantise groups, float32 [..., 32], to codes and e8m0 scales [...]."""
    scales = _scales(rows.abs().amax(-1))  # [...]
    scaled = rows / scales.float()[..., None]
    codes = torch.bucketize(scaled.abs(), _thresholds(rows.device), out_int32=True)
    return torch.where(scaled.signbit(), codes + 8, codes).to(torch.uint8), scales, None


def _scales(largest: Tensor) -> Tensor:
    """The power of two of each group, e8m0 [...], from its absmax, float32 [...]."""
    exponent = largest.frexp().exponent - 1 - LARGEST_POWER  # floor(log2(largest)) - 2
    stored = (exponent + BIAS).clamp(0, 254).masked_fill(largest == 0, 0)
    return stored.to(torch.uint8).view(torch.float8_e8m0fnu)


def _thresholds(device: torch.device) -> Tensor:
    """The largest magnitude of each code but the last, float32 [7].

    A midpoint belongs to the even one of its two codes: where that is the upper one, the lower code
    ends at the float32 before the midpoint.
    """
    values = torch.tensor(MAGNITUDES, dtype=torch.float32, device=device)  # [8]
    midpoints = (values[:-1] + values[1:]) / 2  # [7]
    midpoints[1::2] = midpoints[1::2].nextafter(torch.zeros_like(midpoints[1::2]))
    return midpoints


MXFP4 = Format(
    name="mxfp4",
    values=VALUES,
    group=32,
    groups=(32,),
    scale_dtype=torch.float8_e8m0fnu,
    scale_dtypes=(torch.float8_e8m0fnu,),
    quantize=quantize,
)
