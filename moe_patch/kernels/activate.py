"""Activations in kernels: what carries them, and the helper that applies them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..activation import ACTS, parse

_compiled = functools.cache(triton.jit)


class Gate(NamedTuple):
    """An Activation as one constant of a kernel, in Triton and Gluon."""

    act: Any
    """The `kernel` of an entry of ACTS, as a jit function."""
    limit: float
    """0: none."""
    alpha: float
    offset: float
    form: str
    source: str
    """A digest of act's source: Triton files compiled kernels by the text of their constants, and a
    function's shows its name alone."""


class Activated(NamedTuple):
    """Results of gate_up, and how its sums become them; `gate_up.gate_up` has the shapes."""

    act: Tensor
    pre: Tensor
    """Empty: it is not kept."""
    bias: Tensor | None
    slot_weight: Tensor
    weight_on_input: bool
    activation: str
    in_steps: bool
    """act is written in the order in which the next product reads it."""


@functools.lru_cache(64)
def gate_of(activation: str) -> Gate:
    """Return the constant for `str` of an Activation, or for an act's name."""
    found = parse(activation)
    formula = ACTS[found.act].kernel
    source = hashlib.sha256(inspect.getsource(formula).encode()).hexdigest()[:16]
    limit = found.limit or 0.0
    return Gate(_compiled(formula), limit, found.alpha, found.offset, found.form, source)


@triton.jit
def glu(gate, up, GATE: tl.constexpr):
    """In float32: (act(gate) * (up + offset), its derivatives by gate and by up); see Activation.

    NaN stays NaN, as torch.clamp leaves it.
    """
    if GATE.limit > 0:
        gate_over, up_over = gate > GATE.limit, tl.abs(up) > GATE.limit
        gate = tl.where(gate_over, GATE.limit, gate)
        up = tl.where(up_over, tl.where(up > 0, GATE.limit, -GATE.limit), up)
    if GATE.offset != 0:
        up += GATE.offset
    value, slope = GATE.act(gate, GATE.alpha)
    by_gate, by_up = slope * up, value
    if GATE.limit > 0:
        by_gate = tl.where(gate_over, 0.0, by_gate)
        by_up = tl.where(up_over, 0.0, by_up)
    return value * up, by_gate, by_up


@triton.jit
def through_gate(
    d_act, gate, up, scale, mask, GATE: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr
):  # fmt: skip
    """(d_gate, d_up, act_out, d_s [BM]) of dA' and a gate and its up, all float32; `scale` [BM, 1]
    are the routing weights. What is not in `mask` adds nothing to d_s."""
    if WEIGHT_ON_INPUT:
        up_scale = 1.0 if GATE.form == "ungated" else scale
        value, by_gate, by_up = glu(gate * scale, up * up_scale, GATE)
        d_gate, d_up = d_act * by_gate, d_act * by_up
        if GATE.form == "ungated":
            d_up = tl.zeros_like(d_up)
        d_scale = tl.sum(tl.where(mask, d_gate * gate + d_up * up, 0.0), axis=1)
        d_gate *= scale
        d_up *= scale
    else:
        value, by_gate, by_up = glu(gate, up, GATE)
        d_scale = tl.sum(tl.where(mask, d_act * value, 0.0), axis=1)
        d_act *= scale
        value *= scale
        d_gate, d_up = d_act * by_gate, d_act * by_up
    return d_gate, d_up, value, d_scale
