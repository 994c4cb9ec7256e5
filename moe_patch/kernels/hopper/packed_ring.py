"""Ring that operands of products with weights in 4 bits and many rows come through, for
`packed_roles.py`.

A stage is 128 of the reduction: rows of x in two halves, which both warpgroups that multiply read,
and the words of codes that each of them has for itself. In `ring.Ring` the words are the left
operand, and x is the right one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import gluon_load
from .codes import ROWS, STEP
from .gather import copy_rows, find_tokens
from .producer import produce
from .ring import with_barriers
from .rows import as_box, load_rows

async_load = gluon_load()


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`, `packed_weight`."""

    n: int
    """Rows of an expert's weight as it lies."""
    k: int
    format: str
    group: int
    zeros: bool
    """Whether groups have codes for zero."""
    weight_e: int
    """Bytes of codes of an expert."""
    scale_e: int
    steps: int
    """Steps of the reduction, 128 each."""
    stride_x: int
    """Columns of x, in steps: 128 * steps."""
    whole: bool
    """Whether tiles and steps divide the weight, so that nothing has to be masked."""
    pairs: bool
    """Whether codes are looked up in shared memory, two at a time."""
    stages: int
    group_m: int
    listed: int
    """Rows of a tile in the order's list: 128 or 64."""
    form: str = ""
    """How a gate and its up lie among the rows, see Activation; "" where there is none."""
    top_k: int = 1
    weight_on_input: bool = False
    save_pre: bool = False
    act_in_steps: bool = False
    """Whether act is stored in the order in which a product of `codes.py` reads it."""
    copied: bool = False
    """Rows of x are gathered by token."""
    bm: int = 128
    bn: int = 256
    bk: int = 128
    parts: int = 2
    rank: int = 0
    """Rank of a low-rank update, twice, in whole stages of 64: one is for the first block and the
    next for the second. 0: there is none."""


class Operands(NamedTuple):
    """x in steps: boxes [128, 64] of rows, or, gathered, a pointer; boxes of 64 rows of words of
    either block, see `bring_words`; for rows that are gathered, as `Gathered`."""

    x: Any
    first: Any
    second: Any
    row_to_slot: Any
    tokens: Any


class Update(NamedTuple):
    """Boxes of an update; None without one: of rows of x A^T [S, rank], [128, 64], and of 64 rows
    of either block's B [E, N, rank], which lie as those of words do."""

    side: Any
    first: Any
    second: Any


@gluon.jit
def ring_of(dtype: gl.constexpr, PLAN: gl.constexpr):
    """A Ring with its barriers ready. A stage has four boxes of words, a warpgroup's of one block
    and of the other, and two halves of x."""
    STAGES: gl.constexpr = PLAN.stages
    for_x: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    for_words: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    words = gl.allocate_shared_memory(gl.int32, [4 * STAGES, ROWS, STEP // 8], for_words)
    x = gl.allocate_shared_memory(dtype, [2 * STAGES, PLAN.bm, STEP // 2], for_x)
    return with_barriers(words, x, words, PLAN)


@gluon.jit
def first_column(column, ME: gl.constexpr, PLAN: gl.constexpr):
    """First of a warpgroup's columns of the first block, in the column tile `column`. (In steps
    they do not follow one another: the first of the places that they have then.)"""
    WIDTH: gl.constexpr = PLAN.bn if PLAN.form == "" else 2 * ROWS
    return column * WIDTH + ROWS * ME


@gluon.jit
def _corner(place, along, BLOCK: gl.constexpr, PART: gl.constexpr, PLAN: gl.constexpr):
    """Place of a warpgroup's box of a block, which begins at `along` in its lines. With
    PLAN.act_in_steps lines [E, columns, ...] are [E, columns / 16, 2, 8, ...]."""
    if PLAN.act_in_steps:
        return place.expert, place.column * 8, PART, 0, along
    else:
        n = first_column(place.column, PART, PLAN)
        if PLAN.form == "":  # neighbours
            n += 2 * ROWS * BLOCK
        return place.expert, n, along


@gluon.jit
def bring_words(operands, ring, stage, place, k, PLAN: gl.constexpr):
    """Begins to load a step of both blocks' words. With PLAN.act_in_steps they are boxes
    [1, 8, 1, 8, 16] of [E, columns / 16, 2, 8, K / 8], else [1, 64, 16] of [E, columns, K / 8];
    a gate's columns and its up's are apart."""
    full = ring.full.index(stage)
    for part in gl.static_range(2):
        for block in gl.static_range(2):
            to = ring.left.index(4 * stage + 2 * part + block)
            box = operands.second if block else operands.first
            at = _corner(place, k // 8, block, part, PLAN)
            async_load(box, at, full, as_box(to, box))


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    full = ring.full.index(stage)
    X: gl.constexpr = 0 if PLAN.copied else PLAN.bm * STEP * 2
    mbarrier.expect(full, X + 4 * ROWS * (STEP // 2))
    bring_words(operands, ring, stage, place, k, PLAN)
    for half in gl.static_range(2):
        x, column = ring.right.index(2 * stage + half), k + 64 * half
        if PLAN.copied:
            for part in gl.static_range(PARTS):
                copy_rows(operands, x.slice(64 * part, 64), turn, part, column, PLAN)
        else:
            load_rows(operands.x, place.first, place.end, column, full, x)
    if PLAN.copied:
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _find(operands, turn, place, PLAN: gl.constexpr):
    if PLAN.copied:
        find_tokens(operands, turn, place, PLAN)


@gluon.jit
def _bring_update(update, ring, stage, turn, place, r, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load 64 of an update's rank: rows of x A^T, and what both warpgroups multiply of a
    block of B, 64 rows each, as `bring_words` brings words."""
    full, r64 = ring.full.index(stage), r // 128 * 64
    mbarrier.expect(full, 2 * PLAN.bm * 64 * 2)
    side, b = ring.right.index(2 * stage), ring.right.index(2 * stage + 1)
    load_rows(update.side, place.first, place.end, r64, full, side)
    for block in gl.static_range(2):
        if r // 64 % 2 == block:
            for part in gl.static_range(2):
                box = update.second if block else update.first
                if PLAN.act_in_steps:  # (Triton reshapes no slice.)
                    to = b.reshape([1, 16, 1, 8, 64]).slice(8 * part, 8, dim=1)
                else:
                    to = b.reshape([1, 128, 64]).slice(64 * part, 64, dim=1)
                async_load(box, _corner(place, r64, block, part, PLAN), full, to)
    if PLAN.copied:  # each thread says so
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def bring_tiles(operands, update, tiles, ring, turns, PLAN: gl.constexpr):
    """Fills the ring, a tile after the other."""
    produce(operands, update, tiles, ring, turns, _find, _bring, _bring_update, PLAN)
