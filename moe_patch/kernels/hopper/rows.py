"""Boxes of an expert's rows through TMA, which end where the expert does.

Rows past its end are zeros when they are loaded, whatever a neighbour has there, and are left alone
when they are stored. `boxes.rows_box` describes a tensor so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...compat import gluon_load, gluon_store
from .. import boxes
from .ring import rows_in, rows_of

async_load, async_store = gluon_load(), gluon_store()
FAR = gl.constexpr(boxes.FAR)


@gluon.jit
def as_box(shared, box):
    """Shared memory, of another shape, as a box of `box`."""
    if len(shared.shape) == len(box.block_shape):
        return shared
    else:
        return shared.reshape(box.block_shape)


@gluon.jit
def load_rows(box, row, end, column, full, to):
    """Begins to load rows `row` ... of columns `column` ... into `to` [rows, columns]; zeros from
    row `end` on. All its bytes arrive at the barrier `full`."""
    async_load(box, [FAR, end, FAR - end + row, column], full, as_box(to, box))


class Parts(NamedTuple):
    """A tensor as boxes of the rows of a part of a tile, [64, 64], and of its tail."""

    each: Any
    tail: Any


@gluon.jit
def load_parts(boxes, ring, stage, place, column, PARTS: gl.constexpr, PLAN: gl.constexpr):
    """Begins to load columns `column` ... of the first PARTS parts of a tile's rows."""
    full = ring.full.index(stage)
    for part in gl.static_range(PARTS):
        box = boxes.each if part < PLAN.parts else boxes.tail
        row = place.first + rows_in(part, PLAN)
        load_rows(box, row, place.end, column, full, rows_of(ring, stage, part, PLAN))


@gluon.jit
def store_rows(box, row, end, column, what):
    """Begins to write `what` [rows, columns] to rows `row` ... up to row `end`."""
    async_store(box, [FAR, end, FAR - end + row, column], as_box(what, box))
