"""How a warpgroup writes the sums that it has in registers: from there, or through TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .rows import store_rows


@gluon.constexpr_function
def _by_quads(rows, columns):
    """Layout of a warpgroup's [rows, columns] in which a thread has eight neighbours of a row, and
    four threads 32: every row stays in the warp that has it among its sums."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, size] for size in (32, 64, 128) if size < columns]
    registers += [[8, 0]] + [[size, 0] for size in (64,) if size < rows]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _at(sums, out, m0, m_end, n0, n_end, ROW: gl.constexpr):
    """(pointers to rows m0 ... of `out`, ROW elements apart, which of them are before row m_end and
    column n_end), in the layout in which sums are stored there."""
    WIDE: gl.constexpr = out.dtype.element_ty.primitive_bitwidth > 16
    by: gl.constexpr = sums.type.layout if WIDE else _by_quads(sums.shape[0], sums.shape[1])
    m = m0 + gl.arange(0, sums.shape[0], gl.SliceLayout(1, by))
    n = n0 + gl.arange(0, sums.shape[1], gl.SliceLayout(0, by))
    to = out + gl.expand_dims(m.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    return to, gl.expand_dims(m < m_end, 1) & gl.expand_dims(n < n_end, 0)


@gluon.jit
def added(sums, out, m0, m_end, n0, n_end, ROW: gl.constexpr):
    """Sums, plus what is in rows m0 ... of `out`, ROW elements apart, up to row m_end and column
    n_end."""
    at, inside = _at(sums, out, m0, m_end, n0, n_end, ROW)
    old = gl.load(at, mask=inside, other=0.0)
    return sums + gl.convert_layout(old, sums.type.layout).to(gl.float32)


@gluon.jit
def store(sums, out, m0, m_end, n0, n_end, ROW: gl.constexpr):
    """Writes sums to rows m0 ... of `out`, ROW elements apart, up to row m_end and column n_end.
    They are not to push operands out of the L2 cache."""
    at, inside = _at(sums, out, m0, m_end, n0, n_end, ROW)
    new = gl.convert_layout(sums.to(out.dtype.element_ty), inside.type.layout)
    gl.store(at, new, mask=inside, cache_modifier=".cs")


@gluon.jit
def staged_for(dtype: gl.constexpr, PLAN: gl.constexpr, BOXES: gl.constexpr = 2):
    """Boxes [64, 64] for each warpgroup, by way of which sums are stored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    return gl.allocate_shared_memory(dtype, [BOXES * PLAN.parts, 64, 64], layout)


@gluon.jit
def in_halves(acc):
    """Both halves of the columns."""
    halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    return halves.permute((0, 2, 1)).split()


@gluon.jit
def in_quarters(acc):
    """Four quarters of the columns."""
    left, right = in_halves(acc)
    return in_halves(left) + in_halves(right)


@gluon.jit
def rounded(acc, dtype: gl.constexpr):
    """The same in a narrower dtype."""
    a, b, c, d = in_quarters(acc)
    return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@gluon.jit
def store_box(sums, box, staged, row, end, column, PART: gl.constexpr, WAY: gl.constexpr):
    """Writes sums [64, 64] to rows `row` ... up to row `end`, by way of one of PART's two boxes in
    `staged`, which take turns. It may be on its way when this returns."""
    tma.store_wait(1)
    by_way = staged.index(2 * PART + WAY)
    by_way.store(sums.to(staged.dtype))
    fence_async_shared()
    store_rows(box, row, end, column, by_way)


class Waiting(NamedTuple):
    """Sums of a tile that are written beside the next one's products."""

    quarters: Any
    """Four parts of its columns, [64, 64] each, rounded."""
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


@gluon.jit
def write_quarter(writer, QUARTER: gl.constexpr):
    """Writes one of the four parts of waiting sums."""
    quarters, row, end, column = writer.waiting
    if end > 0:
        n = column + 64 * QUARTER
        store_box(
            quarters[QUARTER], writer.boxes, writer.staged, row, end, n, writer.me, QUARTER % 2
        )
