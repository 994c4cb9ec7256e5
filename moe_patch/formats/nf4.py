"""NF4: the 16 quantiles of a normal distribution of QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

The table, the thresholds and the order of the float32 operations are those of bitsandbytes: CUDA's
dQuantizeNF4 (csrc/kernels.cu) and quantize_4bit of its default backend. Its thresholds are the
midpoints of the table in float32; a value on a threshold takes the lower code.

Two differences from its CUDA kernels, which are compiled with fast math: they may round 1 / absmax
the other way (no code of bfloat16 weights depends on that), and they store code 0 in a block of
zeros, where its CPU code and this file store the code of 0.0. The scale is 0, so the values agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import Chosen, Format

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
SMALLEST = 1e-38
"""The least divisor, as in bitsandbytes: its reciprocal is finite, and zeros stay zeros."""


def quantize(rows: Tensor, scale_dtype: torch.dtype, zeros: bool = False) -> Chosen:
    """Quantise blocks, float32 [..., group], to codes and scales [...]: the absmax of each block.

    Scales that are rounded (float32 weights, bfloat16 scales) normalise as they are stored.
    """
    scales = rows.abs().amax(-1).to(scale_dtype)  # [...]
    inverse = 1.0 / scales.float().clamp(min=SMALLEST)
    values = torch.tensor(VALUES, dtype=torch.float32, device=rows.device)  # [16]
    thresholds = (values[:-1] + values[1:]) / 2  # [15]
    codes = torch.bucketize(rows * inverse[..., None], thresholds, out_int32=True)
    return codes.to(torch.uint8), scales, None


NF4 = Format(
    name="nf4",
    values=VALUES,
    group=64,
    groups=(32, 64, 128),
    scale_dtype=torch.float32,
    scale_dtypes=(torch.float32, torch.bfloat16),
    quantize=quantize,
)
