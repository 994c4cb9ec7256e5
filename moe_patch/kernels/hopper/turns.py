"""Which program does which tile: whoever is free takes the next.

So tiles that take long are no one program's, and those at work lie close together, with their
operands in the L2 cache. The order in which tiles are done changes no bit of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Turns(NamedTuple):
    """The producer takes a tile for its program and tells the others through two slots."""

    taken: Any
    """How many tiles are, besides the first of every program; in global memory."""
    slot: Any
    full: Any
    empty: Any


@gluon.jit
def turns_of(taken, PLAN: gl.constexpr):
    """Turns with their barriers ready; `taken` is one zero in global memory."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slot = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PLAN.parts)
    return Turns(taken, slot, full, empty)


@gluon.jit
def take(turns, turn):
    """The next tile, told to the others."""
    at = gl.num_programs(0) + gl.atomic_add(turns.taken, 1, sem="relaxed")
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(turns.empty.index(turn % 2), (turn // 2) & 1 ^ 1)
    turns.slot.index(turn % 2).store(gl.full([1], at, gl.int32, one))
    mbarrier.arrive(turns.full.index(turn % 2), count=1)
    return at


@gluon.jit
def told(turns, turn):
    """The tile that the producer took."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(turns.full.index(turn % 2), (turn // 2) & 1)
    at = gl.max(turns.slot.index(turn % 2).load(one), axis=0)
    mbarrier.arrive(turns.empty.index(turn % 2), count=1)
    return at
