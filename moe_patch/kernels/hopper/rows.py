"""Boxes of an expert's rows through TMA, which end where the expert does.

Rows past its end are zeros when they are loaded, whatever a neighbour has there, and are left alone
when they are stored. `boxes.rows_box` describes a tensor so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...compat import gluon_load, gluon_store
from .. import boxes

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


@gluon.jit
def store_rows(box, row, end, column, what):
    """Begins to write `what` [rows, columns] to rows `row` ... up to row `end`."""
    async_store(box, [FAR, end, FAR - end + row, column], as_box(what, box))
