"""FP8 weights with block scales: what stands where, and a sentence for what does not."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
SCALES = (torch.float32, torch.float8_e8m0fnu)


def blocks(n: int) -> int:
    """Blocks of 128 that n columns or rows fill."""
    return -(-n // 128)


def check_scaled(name: str, weight: Tensor, scale: Tensor | None, scale_name: str) -> None:
    """Of an FP8 weight [E, N, K] and the scales of its 128 x 128 blocks.

    Raises:
        TypeError: other dtypes.
        ValueError: no scales, of another shape or device, or one of both wants a gradient.
    """
    if weight.dtype != E4M3:
        raise TypeError(f"{name} is {weight.dtype}: with {scale_name} it must be {E4M3}.")
    if scale is None:
        raise ValueError(f"{name} is {weight.dtype} and has no scales: pass {scale_name}.")
    if scale.dtype not in SCALES:
        raise TypeError(f"{scale_name} is {scale.dtype}: float32 or float8_e8m0fnu is needed.")
    experts, n, k = weight.shape
    needed = (experts, blocks(n), blocks(k))
    if scale.shape != needed:
        raise ValueError(
            f"{scale_name} must be {list(needed)}, one scale for each 128 x 128 block of {name} "
            f"{list(weight.shape)}, found {list(scale.shape)}."
        )
    if scale.device != weight.device:
        raise ValueError(f"{name} is on {weight.device} and {scale_name} on {scale.device}.")
    for which, tensor in ((name, weight), (scale_name, scale)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{which} wants a gradient, and FP8 weights are frozen: pass {which}.detach()."
            )
