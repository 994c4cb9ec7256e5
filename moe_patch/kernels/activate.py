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
_SIGMOID = tl.constexpr("""{
    .reg .f32 x;
    mul.rn.f32 x, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 x, x;
    add.rn.f32 x, x, 0f3F800000;
    rcp.approx.ftz.f32 $0, x;
}""")
"""1 / (1 + 2^(-x log2(e)))"""


class Gate(NamedTuple):
    """An Activation as one constant of a kernel, in Triton and Gluon."""

    act: Any
    """The `kernel` of an entry of ACTS, as a jit function."""
    limit: float
    """0: none."""
    alpha: float
    offset: float
    form: str
    sigmoid: Any
    """1 / (1 + exp(-x)), as a jit function."""
    source: str
    """A digest of both functions' source: Triton files compiled kernels by the text of their
    constants, and a function's shows its name alone."""


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


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sigmoid_in_ptx(x):
    """Sigmoid in 4 instructions instead of 11: what Triton's exponential and quotient do besides is
    for numbers below 2^-126. The bits are the same from -87 on; below it is 0."""
    return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], tl.float32, True, 1)


@functools.lru_cache(64)
def gate_of(activation: str, ptx: bool = False) -> Gate:
    """Return the constant for `str` of an Activation, or for an act's name; `ptx` is a Chip's."""
    found = parse(activation)
    formula, sigmoid = ACTS[found.act].kernel, _sigmoid_in_ptx if ptx else _sigmoid
    text = inspect.getsource(formula) + inspect.getsource(sigmoid.fn) + ptx * _SIGMOID.value
    source = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Gate(
        _compiled(formula), found.limit or 0.0, found.alpha, found.offset, found.form, sigmoid,
        source,
    )  # fmt: skip


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
    value, slope = GATE.act(gate, GATE.alpha, GATE.sigmoid)
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
