"""silu_mul(): the gate of an MLP that is no expert, in one kernel each way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..kernels import on_device, op
from . import differentiable
from .grouped import DTYPES

SMALLEST = 1 << 22
"""Elements from which on the kernel has gradients, too: below, an autograd.Function of Python costs
the host more than it spares the card (0.1 ms on a slow one)."""


def _plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@op(lambda d_out, gate, up: (torch.empty_like(gate), torch.empty_like(up)))
def _silu_mul_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up)."""
    with on_device(d_out.device):
        return kernels.glu.backward(d_out.contiguous(), gate, up)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        with on_device(gate.device):
            return kernels.glu.forward(gate, up)

    @staticmethod
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        if differentiable.wanted(d_out):
            return (*differentiable.gradients(_plain, (gate, up), ctx.needs_input_grad, d_out),)
        return _silu_mul_backward(d_out, gate, up)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors [...] -> [...].

    The kernel computes it in float32 and rounds once, and keeps `gate` and `up` for the backward:
    PyTorch keeps silu(gate), too. Small tensors with gradients, those that torch.compile traces and
    what the kernel cannot take are PyTorch's.
    """
    differentiated = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if differentiated and gate.numel() < SMALLEST or not _by_kernel(gate, up):
        return _plain(gate, up)
    if differentiated:
        return _SiluMul.apply(gate, up)
    with on_device(gate.device):
        return kernels.glu.forward(gate, up)


def _by_kernel(gate: Tensor, up: Tensor) -> bool:
    if torch.compiler.is_compiling() or not type(gate) is type(up) is Tensor:
        return False
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        return False
    if gate.dtype not in DTYPES or gate.numel() % kernels.glu.VECTOR:
        return False
    if not (gate.is_contiguous() and up.is_contiguous()):
        return False
    return kernels.why_not(gate.device) is None and differentiable.why_not_kernels() is None
