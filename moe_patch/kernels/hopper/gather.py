"""Rows of x that are gathered by token, copied by cp.async."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...compat import gluon_copy
from .ring import BK, parts_of, rows_of

copy = gluon_copy()


class Gathered(NamedTuple):
    """The operands of a product whose rows are gathered."""

    x: Any
    """[T, K]."""
    w: Any
    """The weight's boxes."""
    row_to_slot: Any
    tokens: Any
    """Memory for the tokens of two tiles' rows."""


@gluon.constexpr_function
def rows_layout():
    """[64, 64] of x: a thread copies 16 bytes of a row at a time, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def tokens_of(PLAN: gl.constexpr):
    """Memory for the tokens of two tiles' rows."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [2 * parts_of(PLAN), 64], plain)


@gluon.jit
def find_tokens(operands, turn, place, PLAN: gl.constexpr):
    """Keeps which rows of x a tile's are; past its end: none, -1."""
    PARTS: gl.constexpr = parts_of(PLAN)
    local = gl.arange(0, 64, gl.SliceLayout(1, rows_layout()))
    for part in gl.static_range(PARTS):
        rows = place.first + 64 * part + local
        slot = gl.load(operands.row_to_slot + rows, mask=rows < place.end, other=0)
        token = gl.where(rows < place.end, slot // PLAN.top_k, -1)
        operands.tokens.index(turn % 2 * PARTS + part).store(token)


@gluon.jit
def copy_rows(operands, to, turn, part, k, PLAN: gl.constexpr):
    """Begins to copy 64 columns, from k on, of a part of a tile's rows; zeros where there is
    none."""
    by: gl.constexpr = rows_layout()
    columns = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, by)), 0)
    tokens = operands.tokens.index(turn % 2 * parts_of(PLAN) + part)
    token = tokens.slice(0, to.shape[0]).load(gl.SliceLayout(1, by))
    source = gl.expand_dims(token.to(gl.int64) * PLAN.stride_x, 1)
    copy(to, operands.x + source + columns + k, gl.expand_dims(token >= 0, 1))


@gluon.jit
def gather_rows(operands, ring, stage, turn, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to copy a step of a tile's rows."""
    for part in gl.static_range(PARTS):
        copy_rows(operands, rows_of(ring, stage, part, PLAN), turn, part, k, PLAN)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
