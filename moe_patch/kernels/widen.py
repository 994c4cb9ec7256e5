"""Numbers of 8 bits, as memory has them and as kernels compute with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chips


def readable(weight: Tensor) -> Tensor:
    """What a kernel is given: e4m3 as its bits where the chip cannot convert it, e8m0 always."""
    if weight.dtype == torch.float8_e8m0fnu:
        return weight.view(torch.uint8)
    if weight.dtype == torch.float8_e4m3fn and not chips.chip(weight.device).fp8:
        return weight.view(torch.uint8)
    return weight


@triton.jit
def widen(tile, DTYPE: tl.constexpr):
    """To DTYPE. Exact from e4m3, whose bits (uint8) are taken apart where chips cannot."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.int32)
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        value *= 1.329227995784916e36  # 2**120: the exponents' biases are 7 and 127
        tile = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return tile.to(DTYPE)


@triton.jit
def widen_scale(scale):
    """To float32, from e8m0's bits: 2 ** (bits - 127), NaN for 255."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 0x400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        scale = bits.to(tl.float32, bitcast=True)
    return scale
