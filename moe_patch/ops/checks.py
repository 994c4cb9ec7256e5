"""What fused_experts() takes, and a sentence for what it does not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.packed import Packed, check_packed
from ..formats.scaled import E4M3, check_scaled
from ..kernels import require
from .grouped import DTYPES
from .operands import Projection, Routing


def check(
    hidden_states: Tensor,
    gate_up: Projection,
    down: Projection,
    routing: Routing,
    weight_on: str,
    projections: int = 2,
) -> None:
    """Checks what `fused_experts` is given, and raises as it does; `projections` 1: no gate."""
    gate_up_proj, gate_up_bias, _, _, gate_up_scale_inv, _ = gate_up
    down_proj, down_bias, _, _, down_scale_inv, _ = down
    top_k_index, top_k_weights, _ = routing
    if weight_on not in ("output", "input"):
        raise ValueError(f"weight_on is {weight_on!r}, use 'output' or 'input'.")
    packed = isinstance(gate_up_proj, Packed) or isinstance(down_proj, Packed)
    if packed:
        _check_packed(gate_up_proj, down_proj)
    up_shape, down_shape = gate_up_proj.shape, down_proj.shape
    if len(hidden_states.shape) != 2 or len(up_shape) != 3 or len(down_shape) != 3:
        raise ValueError(
            "fused_experts takes hidden_states [T, H], gate_up_proj [E, 2I, H] and down_proj "
            f"[E, H, I], found {tuple(hidden_states.shape)}, {tuple(up_shape)} and "
            f"{tuple(down_shape)}."
        )
    (tokens, hidden), (experts, inner, _) = hidden_states.shape, up_shape
    fit = down_shape == (experts, hidden, inner // projections)
    if up_shape[2] != hidden or not fit:
        rows = "2I" if projections == 2 else "I"
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} needs gate_up_proj [E, {rows}, {hidden}] "
            f"and down_proj [E, {hidden}, I], found {tuple(up_shape)} and "
            f"{tuple(down_shape)}: pass weights stored the other way as .transpose(1, 2)."
        )
    if inner % projections:
        raise ValueError(f"gate_up_proj has {inner} rows an expert, an even number is needed.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != tokens:
        raise ValueError(
            f"top_k_index must be [{tokens}, K], one row a token, found {tuple(top_k_index.shape)}."
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights {tuple(top_k_weights.shape)} must have the shape of top_k_index "
            f"{tuple(top_k_index.shape)}."
        )
    if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool:
        raise TypeError(f"top_k_index is {top_k_index.dtype}, an integer dtype is needed.")
    scaled = gate_up_scale_inv is not None or down_scale_inv is not None
    if packed:
        if scaled:
            raise ValueError("weights in 4 bits bring their scales: pass no *_scale_inv.")
    elif scaled or E4M3 in (gate_up_proj.dtype, down_proj.dtype):
        check_scaled("gate_up_proj", gate_up_proj, gate_up_scale_inv, "gate_up_scale_inv")
        check_scaled("down_proj", down_proj, down_scale_inv, "down_scale_inv")
    elif gate_up_proj.dtype not in DTYPES or gate_up_proj.dtype != down_proj.dtype:
        raise TypeError(
            f"gate_up_proj is {gate_up_proj.dtype} and down_proj {down_proj.dtype}: both must be "
            "the same one of bfloat16, float16 and float32."
        )
    if hidden_states.dtype not in DTYPES or top_k_weights.dtype not in DTYPES:
        raise TypeError(
            f"hidden_states is {hidden_states.dtype} and top_k_weights {top_k_weights.dtype}: "
            "each must be bfloat16, float16 or float32."
        )
    for name, bias, size in (
        ("gate_up_bias", gate_up_bias, inner),
        ("down_bias", down_bias, hidden),
    ):
        if bias is None:
            continue
        if weight_on == "input":
            raise ValueError(f"{name} and weight_on='input' are not computed together.")
        if bias.shape != (experts, size) or bias.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be a floating-point [{experts}, {size}], found {bias.dtype} "
                f"{tuple(bias.shape)}."
            )
    device = hidden_states.device
    if not (gate_up_proj.device == down_proj.device == top_k_index.device == device):
        raise _devices(hidden_states, gate_up_proj, down_proj, top_k_index)
    for tensor in (top_k_weights, gate_up_bias, down_bias, gate_up_scale_inv, down_scale_inv):
        if tensor is not None and tensor.device != device:
            raise _devices(hidden_states, tensor)
    require(device)


def _check_packed(gate_up_proj: Tensor | Packed, down_proj: Tensor | Packed) -> None:
    """Of weights of which one at least is packed: sound, and both in one format."""
    formats = [w.format if isinstance(w, Packed) else w.dtype for w in (gate_up_proj, down_proj)]
    if formats[0] != formats[1]:
        raise TypeError(
            f"gate_up_proj is {formats[0]} and down_proj {formats[1]}: both must be in one format."
        )
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if not isinstance(weight, Packed):
            continue
        check_packed(name, weight)
        codes, scales, zeros = weight.codes, weight.scales, weight.zeros
        whole = codes.is_contiguous() and scales.is_contiguous()
        if not whole or not (zeros is None or zeros.is_contiguous()):
            raise ValueError(f"{name} has tensors with gaps: pass its .contiguous() ones.")


def _devices(*tensors: Tensor | Packed) -> ValueError:
    found = ", ".join(str(tensor.device) for tensor in tensors)
    return ValueError(f"all tensors must be on one device, found {found}.")
