"""How experts store their weights: plain tensors, FP8 with block scales, or 4 bits.

A new way of storing them is one :class:`Storage` here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import FakeTensor, FP8Experts
from ..ops.grouped import DTYPES
from . import quantised
from .four_bits import FourBits
from .parts import stored_transposed, up_name

_PLAIN = (Tensor, nn.Parameter, FakeTensor or Tensor)  # FakeTensor: while torch.export traces


class Storage(NamedTuple):
    """What a forward asks of the way in which weights are stored."""

    name: str
    """As a report has it; "" of plain tensors."""
    why_not: Callable[[Any, Any, Any], str | None]
    """(experts, both parameters) -> None when the kernels read them, else the reason."""
    operands: Callable[[Any, Any, Any], tuple[Any, Any, dict[str, Any]]]
    """(experts, both parameters) -> both weights [E, N, K] and more arguments of `fused_experts`;
    of experts for which there is no reason why not."""
    takes_low_rank: bool
    """Whether they can be multiplied with LoRA's factors beside them."""
    by_parts: bool
    """Whether `grouped_gemm` takes them."""


def _why_not_plain(experts: Any, gate_up: Tensor, down: Tensor) -> str | None:
    if gate_up.dtype != down.dtype:
        return f"the weights are {gate_up.dtype} and {down.dtype}: one dtype is needed"
    if gate_up.dtype not in DTYPES:
        return f"the weights are {gate_up.dtype}: bfloat16, float16 or float32 is needed"
    if type(gate_up) not in _PLAIN or type(down) not in _PLAIN:
        return f"the weights are {type(gate_up).__name__}s: plain tensors are needed"
    if gate_up.device != down.device:
        return f"the weights are on {gate_up.device} and {down.device}: one device is needed"
    return None


def _plain(experts: Any, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    turned = stored_transposed(experts)
    return (up.mT, down.mT, {}) if turned else (up, down, {})


def _fp8(experts: Any, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    # frozen, whatever `requires_grad` HF left on them
    return up.detach(), down.detach(), quantised.scales(experts)


def _why_not_four_bits(experts: Any, up: Tensor, down: Tensor) -> str | None:
    for tensor in (up, down):
        if tensor.dtype != torch.uint8:
            return f"the 4-bit codes are {tensor.dtype}: torch.uint8 is needed, load them again"
        if type(tensor) not in _PLAIN:
            return f"the 4-bit codes are {type(tensor).__name__}s: plain tensors are needed"
    if up.device != down.device:
        return f"the weights are on {up.device} and {down.device}: one device is needed"
    return None


def _four_bits(experts: Any, up: Tensor, down: Tensor) -> tuple[Any, Any, dict[str, Any]]:
    return experts.packed(up_name(experts)), experts.packed("down_proj"), {}


PLAIN = Storage("", _why_not_plain, _plain, True, True)
FP8 = Storage("FP8", quantised.why_not, _fp8, False, False)
FOUR_BITS = Storage("4 bits", _why_not_four_bits, _four_bits, True, False)


def storage_of(experts: Any) -> Storage:
    """How these experts store their weights now."""
    if isinstance(experts, FourBits):
        return FOUR_BITS
    if isinstance(experts, FP8Experts or ()) and quantised.is_quantised(experts):
        return FP8
    return PLAIN


def logical_shapes(experts: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(E, N, K) of both weights, which may be on the meta device."""
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    if isinstance(experts, FourBits):
        return experts.packed(up_name(experts)).shape, experts.packed("down_proj").shape
    (e, n, k), (f, o, i) = up.shape, down.shape
    return ((e, k, n), (f, i, o)) if stored_transposed(experts) else ((e, n, k), (f, o, i))
