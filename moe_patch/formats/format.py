"""Formats of 4-bit weights: sixteen values, groups along K, and a rule that chooses codes.

A new format is one file that makes a :class:`Format`, its place in `FORMATS` of packed.py, and its
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Chosen = tuple[Tensor, Tensor, Tensor | None]
"""Codes uint8 [..., group], scales [...] and, of a format with zero points, zeros uint8 [...]."""


@dataclass(frozen=True)
class Format:
    """A 4-bit format: value = values[code] * scale, or (code - zero) * scale with zero points."""

    name: str
    values: tuple[float, ...]
    """What each of the 16 codes stands for at scale 1, exact in float32."""
    group: int
    """Weights along K that share a scale, unless another one of `groups` is asked for."""
    groups: tuple[int, ...]
    scale_dtype: torch.dtype
    """The dtype of the scales, unless another one of `scale_dtypes` is asked for."""
    scale_dtypes: tuple[torch.dtype, ...]
    quantize: Callable[[Tensor, torch.dtype, bool], Chosen]
    """(finite float32 [..., group], dtype of the scales, with zero points?) -> Chosen. Codes are
    chosen for the scales as they are stored."""
    has_zeros: bool = False
    """Whether weights may come with a zero point for each group."""
