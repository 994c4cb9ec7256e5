"""An expert's weight in 4 bits inside a kernel: its pointers, the scales of a step, and what sums
by it take: a bias, routing weights.

A PLAN has the sizes `n` and `k` of the weight, `group`, `zeros`, its `steps` and whether they and
tiles are `whole`; of a gate and its up also their `form`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .codes import STEP


class Weight(NamedTuple):
    """Pointers: an expert's codes as words, its scales, and its zeros or anything."""

    words: Any
    scales: Any
    zeros: Any


class Groups(NamedTuple):
    """Scales [64, 4] that a thread's words of one row share, and zeros or anything."""

    scale: Any
    zero: Any


@gluon.jit
def is_there(row, k, PLAN: gl.constexpr):
    """[64, 4]: whether there are such rows, and columns from k + 32 q on."""
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    return gl.expand_dims(row < PLAN.n, 1) & gl.expand_dims(k + 32 * q < PLAN.k, 0)


@gluon.jit
def groups(weight, row, step, PLAN: gl.constexpr):
    """Groups of a step of rows `row` of an expert's weight; zero past its end."""
    k = gl.minimum(step, PLAN.steps - 1) * STEP
    q = gl.arange(0, 4, gl.SliceLayout(0, row.type.layout.parent))
    at = gl.expand_dims(row * (PLAN.k // PLAN.group), 1)
    at += gl.expand_dims((k + 32 * q) // PLAN.group, 0)
    if PLAN.whole:
        scale = gl.load(weight.scales + at)
        zero = gl.load(weight.zeros + at) if PLAN.zeros else scale
    else:
        there = is_there(row, k, PLAN)
        scale = gl.load(weight.scales + at, mask=there, other=0)
        zero = gl.load(weight.zeros + at, mask=there, other=0) if PLAN.zeros else scale
    return Groups(scale, zero)


@gluon.jit
def of_expert(w, scales, zeros, expert, PLAN: gl.constexpr):
    """The Weight of one of all experts."""
    expert = expert.to(gl.int64)
    words = (w + expert * PLAN.weight_e).to(gl.pointer_type(gl.int32), bitcast=True)
    scales += expert * PLAN.scale_e
    if PLAN.zeros:
        return Weight(words, scales, zeros + expert * PLAN.scale_e)
    else:
        return Weight(words, scales, scales)


@gluon.jit
def gate_and_up(n, PLAN: gl.constexpr):
    """(the weight's rows of gates n, how far their ups are)."""
    if PLAN.form == "interleaved":
        return 2 * n, 1
    else:
        return n, PLAN.n // 2


@gluon.jit
def add_bias(sums, bias, expert, row, PLAN: gl.constexpr):
    """Sums [64, rows of x] plus the bias of the weight's rows `row` [64]."""
    value = gl.load(bias + expert.to(gl.int64) * PLAN.n + row, mask=row < PLAN.n, other=0.0)
    return sums + gl.expand_dims(value.to(gl.float32), 1)


@gluon.jit
def by_routing(gate, up, slot_weight, row_to_slot, first, end):
    """Sums [64, rows of x] of a gate and its up, times the routing weights of rows `first` ... up
    to `end`."""
    row = first + gl.arange(0, gate.shape[1], gl.SliceLayout(0, gate.type.layout))
    slot = gl.load(row_to_slot + row, mask=row < end, other=0)
    scale = gl.expand_dims(gl.load(slot_weight + slot).to(gl.float32), 0)
    return gate * scale, up * scale
