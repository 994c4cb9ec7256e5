"""Weights in 4 bits as the kernels of `hopper/packed_weight.py` take them, unpacked in steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..formats.packed import Packed
from . import packed
from .in_steps import STEP
from .launch import cdiv
from .widen import readable


def sizes(weight: Packed, columns: int) -> dict[str, Any]:
    """Fields of a plan; tiles cover so many `columns` of the weight."""
    _, n, k = weight.shape
    return {
        "n": n, "k": k, "steps": cdiv(k, STEP),
        "format": weight.format, "group": weight.group, "zeros": weight.zeros is not None,
        "weight_e": n * k // 2, "scale_e": n * k // weight.group,
        "whole": k % STEP == 0 and n == columns,
    }  # fmt: skip


def operand(weight: Packed, in_bytes: bool = False) -> tuple[Tensor | None, ...]:
    """(codes, scales, zeros, table), arguments of a kernel; `in_bytes`: codes are looked up two at
    a time."""
    table = packed.pairs_of_codes if in_bytes else packed.values
    return weight.codes, readable(weight.scales), weight.zeros, table(weight)
