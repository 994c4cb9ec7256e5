"""Fallbacks where kernels cannot follow PyTorch, and gradients that can be differentiated again.

The kernels compute values and first gradients. Second derivatives, forward-mode AD, torch.func and
torch.jit.trace need operators that PyTorch knows: the plain twins in reference.py, or Hugging
Face's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import reference
from ..compat import dispatch_keys, why_not_kernels
from .operands import Projection, Routing

__all__ = ["experts", "gradients", "refuse_fp8", "wanted", "why_not_kernels"]


def wanted(d_out: Tensor) -> bool:
    """Asked in a backward: whether somebody differentiates or transforms the gradients.

    Grad mode is on in a backward with create_graph=True alone. is_grads_batched=True and
    autograd.functional run a vmap older than torch.func's, known by the tensors alone.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() or why_not_kernels() is not None:
        return True
    return "Batched" in repr(dispatch_keys(d_out))


def gradients(
    twin: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    need: Sequence[bool],
    d_out: Tensor,
) -> list[Tensor | None]:
    """Gradients of the needed ones of `inputs`, by operators that PyTorch can differentiate.

    Args:
        twin: computes in plain PyTorch, from `inputs`, what the kernels computed.
        inputs: as autograd kept them, with their history; None where there is none.
        need: one for each of `inputs`.
        d_out: the gradient of the result.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # partial derivatives: one input may have been computed from another
        inputs = [
            x if x is None else x.view_as(x) if needed else x.detach()
            for x, needed in zip(inputs, need)
        ]
        out = twin(*inputs)
    found = iter(
        torch.autograd.grad(
            out,
            [x for x, needed in zip(inputs, need) if needed],
            d_out,
            create_graph=create_graph,
            materialize_grads=True,
        )
    )
    return [next(found) if needed else None for needed in need]


def refuse_fp8() -> None:
    """Raises: FP8 weights and activations have first gradients alone."""
    raise RuntimeError(
        "moe_patch computes first gradients alone through FP8 weights, found create_graph=True or "
        "a transform of the backward: dequantise the weights, or run moe_patch.unpatch(model)."
    )


def experts(
    x: Tensor, gate_up: Projection, down: Projection, routing: Routing, activation: str
) -> Tensor:
    """fused_experts in plain PyTorch."""
    return reference.fused_experts(
        x, gate_up.weight, down.weight, routing.index, routing.weights,
        weight_on="input" if routing.on_input else "output", activation=activation,
        gate_up_bias=gate_up.bias, down_bias=down.bias,
        gate_up_low_rank=None if gate_up.a is None else (gate_up.a, gate_up.b),
        down_low_rank=None if down.a is None else (down.a, down.b),
        gate_up_scale_inv=gate_up.scale, down_scale_inv=down.scale,
    )  # fmt: skip
