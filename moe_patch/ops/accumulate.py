"""Weight gradients added to `.grad` by the kernel that computes them.

Autograd makes a whole new gradient and adds it: another buffer of the weights' size, and twice the
traffic. Here dw reads, adds in float32 and writes, wherever nothing could tell the difference.

When and where: a backward that may add returns no gradient, and leaves its kernel to a pre-hook of
the parameter's AccumulateGrad node. Autograd calls it where it would have added the gradient
itself: once all of the node's inputs are there, in that node's turn, on that node's stream. What
autograd promises about reading and writing `.grad` then holds without a word about streams here,
but for one: autograd makes that stream wait for those on which it was given gradients, and it was
given none, so the hook makes it wait for the stream of the backward.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..compat import (
    ADDS_TO_GRAD,
    backward_hooks,
    base_of,
    current_graph_task,
    hooks_beside,
    post_accumulate_hooks,
    will_execute_node,
)
from ..kernels import on_device
from ..order import ExpertOrder


@dataclass(frozen=True)
class Leaf:
    """The parameter behind a weight: itself, or stored [E, K, N] and used as its transpose."""

    parameter: Tensor
    transpose: weakref.ref[Tensor] | None

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor like the parameter, as the weight is."""
        return tensor.transpose(1, 2) if self.transpose else tensor

    def watched(self) -> bool:
        """Whether hooks or `retain_grad` ask for the gradient of the parameter or its transpose."""
        weight = self.transpose() if self.transpose else None
        if weight is not None and (backward_hooks(weight) or weight.retains_grad):
            return True
        parameter = self.parameter
        return bool(backward_hooks(parameter) or post_accumulate_hooks(parameter))


class Stored(NamedTuple):
    """What to keep of a weight for the backward."""

    tensor: Tensor
    turned: bool
    """Whether the weight is the transpose of `tensor`."""
    leaf: Leaf | None
    """The parameter behind the weight; None when the weight is computed from something else, or
    needs no gradient."""


def stored(weight: Tensor) -> Stored:
    """Finds the parameter behind a weight, be it itself or stored [E, K, N] and transposed.

    Such a parameter is kept itself: a view would keep the memory that ZeRO-3 takes from it.
    """
    if torch.compiler.is_compiling():
        return Stored(weight, False, None)
    base = base_of(weight)
    if base is not None and base.is_leaf and base.dim() == 3 and _is_transpose(weight, base):
        return Stored(base, True, Leaf(base, weakref.ref(weight)) if weight.requires_grad else None)
    leaf = Leaf(weight, None) if weight.requires_grad and weight.is_leaf else None
    return Stored(weight, False, leaf)


def _is_transpose(weight: Tensor, base: Tensor) -> bool:
    same = base.transpose(1, 2)
    if weight.shape != same.shape or weight.stride() != same.stride():
        return False
    if weight.data_ptr() != base.data_ptr():
        return False
    if not weight.requires_grad:
        return True
    node = weight.grad_fn  # its gradient must be the parameter's, and nothing else
    if node is None or node.name() not in ("TransposeBackward0", "PermuteBackward0"):
        return False
    return getattr(node.next_functions[0][0], "variable", None) is base


@dataclass(frozen=True)
class Product:
    """A gradient [E, M, N] that `kernels.dw` computes: of p, gathered, and q, in expert order."""

    p: Tensor
    q: Tensor
    order: ExpertOrder
    top_k: int
    turned: bool = False
    """The weight is [E, N, M]."""

    def write(self, out: Tensor, add: bool) -> None:
        """Into `out`, like the weight, or onto what is there."""
        out = out.mT if self.turned else out
        kernels.dw.dw(self.p, self.q, self.order, gather=self.top_k, out=out, add=add)

    def on(self, stream: torch.cuda.Stream) -> Product:
        """The same for another stream. The operands' memory is kept until that has come here."""
        for tensor in (self.p, self.q, self.order.row_to_slot):  # the order is one buffer
            tensor.record_stream(stream)
        return replace(self, order=self.order.apart())


def gradient(weight: Tensor, leaf: Leaf | None, product: Product) -> Tensor | None:
    """The gradient of a weight; None when autograd's turn will add it to the parameter's `.grad`.

    Only in a backward. `leaf` is behind the weight.
    """
    adds = ADDS_TO_GRAD and leaf is not None
    adds = adds and _takes_more(leaf.parameter) and not leaf.watched()
    return None if adds and _adds_later(weight, leaf, product) else _made(weight, leaf, product)


def _made(weight: Tensor, leaf: Leaf | None, product: Product) -> Tensor:
    dtype = weight.dtype
    if leaf is not None and leaf.transpose is None:
        dtype = getattr(leaf.parameter, "grad_dtype", None) or dtype  # since torch 2.10
    out = torch.empty_like(weight, dtype=dtype if dtype == torch.float32 else weight.dtype)
    product.write(out, add=False)
    return out


def _adds_later(weight: Tensor, leaf: Leaf, product: Product) -> bool:
    """Whether the pre-hook that adds was left with the parameter's AccumulateGrad node."""
    parameter = leaf.parameter
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    task = current_graph_task()
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    if stream is not None and torch.cuda.is_current_stream_capturing():
        return False  # autograd knows which streams a capture may meet

    def add(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        if current_graph_task() != task:  # left by a backward that failed
            return None
        handle.remove()
        with on_device(weight.device):
            here = product
            if stream is not None and (own := torch.cuda.current_stream()) != stream:
                own.wait_stream(stream)
                here = product.on(own)
            if _takes_more(parameter):
                here.write(leaf.seen(parameter.grad), add=True)
                torch.autograd.graph.increment_version(parameter.grad)
                return None
            mine = leaf.seen(_made(weight, leaf, here))  # a hook has changed .grad since
        if gradients[0] is not None:
            return (gradients[0] + mine,)
        parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        return None

    handle = node.register_prehook(add)
    after = node.register_hook(_nothing)
    # somebody else's hooks are to see the gradient; so may one of ours that waits already
    alone = len(hooks_beside(handle)()) == len(hooks_beside(after)()) == 1
    after.remove()
    if not alone:
        handle.remove()
    return alone


def _nothing(*_: object) -> None:
    """A hook to find out whether there are others."""


def _takes_more(parameter: Tensor) -> bool:
    """Whether this backward ends in adding to `parameter.grad` in place."""
    grad = parameter.grad
    if grad is None or type(grad) is not Tensor or grad.requires_grad or grad.is_sparse:
        return False
    if grad.dtype not in (parameter.dtype, torch.float32) or grad.stride() != parameter.stride():
        return False
    if grad.is_inference() or torch.is_anomaly_enabled():
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return will_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this very gradient
        return False
