"""Roles of a program's warps: two warpgroups multiply, one loads, and where a weight has 8 bits one
widens it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .widening import widen


@gluon.jit
def _do(WHAT: gl.constexpr, arguments):
    WHAT(*arguments)


@gluon.jit
def run(
    upper, lower, producer, widener,
    CONSUME: gl.constexpr, PRODUCE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Runs CONSUME with both halves' arguments, `upper` and `lower`, and PRODUCE with `producer`
    beside each other; of a widened weight also `widen` with `widener`. The last two numbers are
    registers of a thread that multiplies, and of one that loads."""
    if PLAN.widened:
        gl.warp_specialize(
            [
                (_do, (CONSUME, upper)),
                (_do, (CONSUME, lower)),
                (widen, widener),
                (_do, (PRODUCE, producer)),
            ],
            [4, 4, 4 if PLAN.copied else 1],  # TMA needs one warp
            [208, 56, 40],
        )
    else:
        gl.warp_specialize(
            [(_do, (CONSUME, upper)), (_do, (CONSUME, lower)), (_do, (PRODUCE, producer))],
            [4, 4],
            [232, 40],
        )
