"""How a warpgroup writes the sums that it has in registers: from there, or through TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .ring import tail_of
from .rows import store_rows


@gluon.constexpr_function
def _bits(size, dim):
    """Steps of a layout's bits along one of two dimensions."""
    steps = [1 << i for i in range(size.bit_length() - 1)]
    return [[0, step] if dim else [step, 0] for step in steps]


@gluon.constexpr_function
def _by_rows(rows, columns, wide, turned):
    """Layout of a warpgroup's sums [rows, columns] in which a thread has 16 bytes of a row, and its
    neighbours those beside them. Every sum stays in the warp that computes it, which has 16 of each
    64 rows, or, `turned`, of the 64 columns. `wide`: a sum is stored in 4 bytes, else in 2."""
    row, column, vector = _bits(rows, 0), _bits(columns, 1), 2 if wide else 3
    if turned:
        beside = column[vector:4]
        down = 5 - len(beside)
        registers, warps = column[:vector] + row[down:], column[4:6]
    else:
        beside, down = column[vector : vector + 2], 3
        registers, warps = column[:vector] + column[vector + 2 :] + row[3:4] + row[6:], row[4:6]
    return gl.DistributedLinearLayout(registers, beside + row[:down], warps, [], [rows, columns])


@gluon.jit
def _at(sums, out, m0, m_end, n0, n_end, ROW: gl.constexpr, TURNED: gl.constexpr):
    """(pointers to rows m0 ... of `out`, ROW elements apart, which of them are before row m_end and
    column n_end), in the layout in which sums are stored there."""
    WIDE: gl.constexpr = out.dtype.element_ty.primitive_bitwidth > 16
    by: gl.constexpr = _by_rows(sums.shape[0], sums.shape[1], WIDE, TURNED)
    m = m0 + gl.arange(0, sums.shape[0], gl.SliceLayout(1, by))
    n = n0 + gl.arange(0, sums.shape[1], gl.SliceLayout(0, by))
    to = out + gl.expand_dims(m.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    return to, gl.expand_dims(m < m_end, 1) & gl.expand_dims(n < n_end, 0)


@gluon.jit
def store(
    sums, out, m0, m_end, n0, n_end,
    ROW: gl.constexpr, ADD: gl.constexpr = False, TURNED: gl.constexpr = False,
):  # fmt: skip
    """Writes sums to rows m0 ... of `out`, ROW elements apart, up to row m_end and column n_end; or
    adds them to what is there. `TURNED`: a warp has columns of them, else rows. They are not to
    push operands out of the L2 cache."""
    at, inside = _at(sums, out, m0, m_end, n0, n_end, ROW, TURNED)
    if ADD:
        sums = gl.convert_layout(sums, inside.type.layout)
        sums += gl.load(at, mask=inside, other=0.0).to(gl.float32)
    new = gl.convert_layout(sums.to(out.dtype.element_ty), inside.type.layout)
    gl.store(at, new, mask=inside, cache_modifier=".cs")


@gluon.jit
def staged_for(dtype: gl.constexpr, PLAN: gl.constexpr, BOXES: gl.constexpr = 2):
    """BOXES [64, 64] for each warpgroup, by way of which sums are stored; one beside a tail, whose
    rows take the memory of the other."""
    EACH: gl.constexpr = 1 if tail_of(PLAN) > 0 else BOXES
    layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    return gl.allocate_shared_memory(dtype, [EACH * PLAN.parts, 64, 64], layout)


@gluon.jit
def in_halves(acc):
    """Both halves of the columns."""
    halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    return halves.permute((0, 2, 1)).split()


@gluon.jit
def in_quarters(acc, TURNED: gl.constexpr):
    """Four quarters of the columns, each turned if rows of a result are columns of the sums."""
    left, right = in_halves(acc)
    a, b = in_halves(left)
    c, d = in_halves(right)
    if TURNED:
        return a.permute((1, 0)), b.permute((1, 0)), c.permute((1, 0)), d.permute((1, 0))
    else:
        return a, b, c, d


@gluon.jit
def rounded(acc, dtype: gl.constexpr, TURNED: gl.constexpr = False):
    """The same in a narrower dtype."""
    a, b, c, d = in_quarters(acc, TURNED)
    return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@gluon.jit
def quarter_at(row, column, quarter, down):
    """(first row, first column) in a result of a quarter of sums that begin there: each lies `down`
    rows below the one before, which is 64 where sums are turned, or else beside it."""
    return row + down * quarter, column + (64 - down) * quarter


@gluon.jit
def store_box(sums, box, staged, row, end, column, PART: gl.constexpr, WAY: gl.constexpr):
    """Writes sums [64, 64] to rows `row` ... up to row `end`, by way of one of PART's two boxes in
    `staged`, which take turns, or of its only one. It may be on its way when this returns. Of fewer
    sums, `end` is at most the row after them."""
    BOXES: gl.constexpr = 1 if staged.shape[0] == 2 else 2  # there are two warpgroups or three
    tma.store_wait(BOXES - 1)
    by_way = staged.index(BOXES * PART + WAY % BOXES)
    by_way.slice(0, sums.shape[0], dim=0).store(sums.to(staged.dtype))
    fence_async_shared()
    store_rows(box, row, end, column, by_way)


@gluon.jit
def store_tail(sums, box, staged, first, end, column, PART: gl.constexpr):
    """Writes 64 columns of a tile's tail, from `column` on: sums [64, rows], turned. PART has one
    box to do so by way of."""
    store_box(sums.permute((1, 0)), box, staged, first, end, column, PART, 0)


class Waiting(NamedTuple):
    """Sums of a tile that are written beside the next one's products."""

    quarters: Any
    """Four parts of its columns, [64, 64] each, rounded, as they lie in the result."""
    row: Any
    end: Any
    """The row after the last that is written; 0 if there are no sums."""
    column: Any


class Writer(NamedTuple):
    """Arguments of `write_quarter`: to boxes of rows, by way of a warpgroup's part of `staged`."""

    boxes: Any
    staged: Any
    waiting: Waiting
    me: gl.constexpr
    down: Any
    """Rows from a quarter to the next one: 64, or 0 if it lies beside it."""


@gluon.jit
def write_quarter(writer, QUARTER: gl.constexpr):
    """Writes one of the four parts of waiting sums."""
    quarters, row, end, column = writer.waiting
    if end > 0:
        row, column = quarter_at(row, column, QUARTER, writer.down)
        store_box(
            quarters[QUARTER], writer.boxes, writer.staged, row, end, column, writer.me, QUARTER % 2
        )
