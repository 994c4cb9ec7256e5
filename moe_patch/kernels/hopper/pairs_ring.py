"""The ring that a warpgroup's operands come through, in products with weights in 4 bits.

Each warpgroup of a program has one of its own: TMA brings codes and rows of x, and the next tile's
before the warpgroup is done with this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import gluon_barrier, gluon_load
from .. import in_steps
from .rows import as_box

async_load, barrier = gluon_load(), gluon_barrier()
STEP, GROUP = gl.constexpr(in_steps.STEP), gl.constexpr(in_steps.GROUP)
"""Columns of the reduction that a stage holds, and that a product of wgmma takes."""
ROWS = gl.constexpr(64)
"""Rows of the weight in one of a tile's two blocks."""


class Plan(NamedTuple):
    """Sizes of a product, as one constant."""

    n: int
    """Rows of an expert's weight."""
    k: int
    group: int
    """Weights that share a scale. A multiple of GROUP: sums are scaled; 32: weights are."""
    second: int
    """How many rows of the weight a tile's second block is below its first."""
    bm: int
    steps: int
    """Steps of the reduction; not fewer than stages."""
    stages: int
    unit: float
    """Factor that the table's values lack."""
    whole: bool
    """Whether tiles divide the weight."""
    walkers: int
    """Warpgroups of a program, 3 or 4."""
    weight_on_input: bool = False
    save_pre: bool = False
    act_in_steps: bool = False
    """Whether act is stored in the order in which a product reads it."""
    act_width: int = 0
    """Columns of act."""


class Operands(NamedTuple):
    """Boxes of x, in steps, and of all experts' codes as words; scales.

    x [K / 64, S, 64] as boxes [2, bm, 64]. Where a tile's second block is a gate's up, words are
    [2E, n / 2, K / 8] as boxes [2, 64, 16], else [1, E * n, K / 8] as boxes [1, 128, 16]."""

    x: Any
    words: Any
    scales: Any


class Ring(NamedTuple):
    """Memory that operands of a warpgroup pass through, and room for what it writes."""

    x: Any
    """A step's two halves, one below the other."""
    words: Any
    """Both blocks' words, one below the other."""
    full: Any
    """Barriers that say that all of a stage has come."""
    staged: Any


class Turn(NamedTuple):
    """Place of a warpgroup in its ring: a stage, and the parity of how often it was full."""

    stage: Any
    phase: Any


class Tile(NamedTuple):
    """Place of a tile: its first row of x, the row after its last, its expert, the first row of its
    weight."""

    row0: Any
    end: Any
    expert: Any
    n0: Any


class Tiles(NamedTuple):
    """The tile that is computed, the one that follows, and whether that one exists."""

    now: Any
    following: Any
    more: Any


@gluon.jit
def ring_of(dtype: gl.constexpr, PLAN: gl.constexpr):
    """A Ring with its barriers ready."""
    STAGES: gl.constexpr = PLAN.stages
    BM: gl.constexpr = PLAN.bm
    for_x: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    for_words: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return Ring(
        gl.allocate_shared_memory(dtype, [STAGES, 2 * BM, GROUP], for_x),
        gl.allocate_shared_memory(gl.int32, [STAGES, 2 * ROWS, STEP // 8], for_words),
        full, gl.allocate_shared_memory(dtype, [2, BM, ROWS], for_x),
    )  # fmt: skip


@gluon.jit
def bring(operands, ring, stage, tile, step, PLAN: gl.constexpr):
    """Starts to bring a step of a tile."""
    full, x, words = ring.full.index(stage), ring.x.index(stage), ring.words.index(stage)
    x, words = as_box(x, operands.x), as_box(words, operands.words)
    barrier()  # all have read what was in the stage
    mbarrier.expect(full, 2 * ROWS * (STEP // 2) + PLAN.bm * STEP * 2)
    if PLAN.second == ROWS:
        row = tile.expert * PLAN.n + tile.n0
        async_load(operands.words, [0, row, step * (STEP // 8)], full, words)
    else:
        async_load(operands.words, [2 * tile.expert, tile.n0, step * (STEP // 8)], full, words)
    async_load(operands.x, [2 * step, tile.row0, 0], full, x)


@gluon.jit
def next_turn(turn, PLAN: gl.constexpr):
    """The stage after this one."""
    last = turn.stage == PLAN.stages - 1
    return Turn(gl.where(last, 0, turn.stage + 1), gl.where(last, turn.phase ^ 1, turn.phase))


@gluon.jit
def _either(first, a, b):
    """Tile a where `first`, else b."""
    return Tile(
        gl.where(first, a.row0, b.row0), gl.where(first, a.end, b.end),
        gl.where(first, a.expert, b.expert), gl.where(first, a.n0, b.n0),
    )  # fmt: skip


@gluon.jit
def refill(operands, ring, turn, tiles, step, PLAN: gl.constexpr):
    """Starts to bring what is read from this stage next, if anything is."""
    ahead = step + PLAN.stages
    here = ahead < PLAN.steps
    if here | tiles.more:
        ahead = gl.where(here, ahead, ahead - PLAN.steps)
        tile = _either(here, tiles.now, tiles.following)
        bring(operands, ring, turn.stage, tile, ahead, PLAN)
