"""Weight gradients added to `.grad` by the kernel that computes them.

Autograd makes a whole new gradient and adds it: another buffer of the weights' size, and twice the
traffic. Here dw reads, adds in float32 and writes, wherever nothing could tell the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """The parameter behind a weight: itself, or stored [E, K, N] and used as its transpose."""

    parameter: Tensor
    transposed: bool

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor like the parameter, as the weight is."""
        return tensor.transpose(1, 2) if self.transposed else tensor


def stored(weight: Tensor) -> tuple[Tensor, bool]:
    """(what to keep of a weight for the backward; whether the weight is its transpose).

    A parameter stored [E, K, N] itself: a view would keep the memory that ZeRO-3 takes from it.
    """
    base = None if torch.compiler.is_compiling() else weight._base
    if base is None or not base.is_leaf or base.dim() != 3:
        return weight, False
    same = base.transpose(1, 2)
    is_it = weight.shape == same.shape and weight.stride() == same.stride()
    is_it = is_it and weight.data_ptr() == base.data_ptr()
    return (base, True) if is_it else (weight, False)


def leaf(parameter: Tensor, transposed: bool) -> Leaf | None:
    """Of what `stored` found; None when it is computed from something else, or needs no
    gradient."""
    if torch.compiler.is_compiling() or not (parameter.is_leaf and parameter.requires_grad):
        return None
    return Leaf(parameter, transposed)


def target(weight: Tensor, leaf: Leaf | None) -> tuple[Tensor, bool]:
    """(where the gradient of the weight goes, in the weight's shape; whether it is added there).

    Only in a backward.
    """
    if leaf is not None and _takes_more(leaf.parameter):
        return leaf.seen(leaf.parameter.grad), True
    dtype = weight.dtype
    if leaf is not None and not leaf.transposed:
        dtype = getattr(leaf.parameter, "grad_dtype", None) or dtype  # since torch 2.10
    return torch.empty_like(weight, dtype=dtype if dtype == torch.float32 else weight.dtype), False


def _takes_more(parameter: Tensor) -> bool:
    """Whether this backward ends in adding to `parameter.grad`, with no hook on the way."""
    grad = parameter.grad
    if grad is None or type(grad) is not Tensor or grad.requires_grad or grad.is_sparse:
        return False
    if grad.dtype not in (parameter.dtype, torch.float32) or grad.stride() != parameter.stride():
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this very gradient
        return False
