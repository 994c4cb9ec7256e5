"""How a warpgroup writes the sums that it has in registers: from there, or through TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...compat import gluon_store

async_store = gluon_store()


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
def store(
    acc, out, m0, m_end, n0, n_end,
    ROW: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Writes sums to rows m0 ... of `out`, ROW elements apart, up to row m_end and column n_end, or
    adds them. They are not to push operands out of the L2 cache."""
    WIDE: gl.constexpr = out.dtype.element_ty.primitive_bitwidth > 16
    by: gl.constexpr = acc.type.layout if WIDE else _by_quads(acc.shape[0], acc.shape[1])
    m = m0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, by))
    n = n0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, by))
    to = out + gl.expand_dims(m.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(m < m_end, 1) & gl.expand_dims(n < n_end, 0)
    if ADD:
        old = gl.load(to, mask=inside, other=0.0)
        acc += gl.convert_layout(old, acc.type.layout).to(gl.float32)
    new = gl.convert_layout(acc.to(out.dtype.element_ty), by)
    gl.store(to, new, mask=inside, cache_modifier=".cs")


@gluon.jit
def staged_for(dtype: gl.constexpr, PLAN: gl.constexpr):
    """Two boxes [64, 64] for each warpgroup, by way of which sums are stored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(dtype, [2 * PLAN.parts, 64, 64], layout)


@gluon.jit
def in_halves(acc):
    """Both halves of the columns."""
    halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    return halves.permute((0, 2, 1)).split()


@gluon.jit
def store_box(
    sums, out, box, staged, row, end, column,
    ROW: gl.constexpr, N: gl.constexpr, ADD: gl.constexpr, PART: gl.constexpr, WAY: gl.constexpr,
):  # fmt: skip
    """Writes sums [64, 64] to rows `row` ... of `out`, ROW elements apart, up to row `end` and
    column N, or adds them, by way of one of PART's two boxes in `staged`: through TMA, which may be
    at work when it returns, but for sums of which some rows are another's. Boxes take both ways in
    turns; before those of the second kind everything is waited for."""
    by: gl.constexpr = _by_quads(64, 64)
    m = row + gl.arange(0, 64, gl.SliceLayout(1, by))
    n = column + gl.arange(0, 64, gl.SliceLayout(0, by))
    to = out + gl.expand_dims(m.to(gl.int64) * ROW, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(m < end, 1) & gl.expand_dims(n < N, 0)
    if ADD:
        old = gl.load(to, mask=inside, other=0.0)
        sums += gl.convert_layout(old, sums.type.layout).to(gl.float32)
    tma.store_wait(1)
    by_way = staged.index(2 * PART + WAY)
    by_way.store(sums.to(staged.dtype))
    if row + 64 <= end:
        fence_async_shared()
        async_store(box, [row, column], by_way)
    else:
        gl.store(to, by_way.load(by), mask=inside)


@gluon.jit
def store_boxes(
    acc, out, box, staged, row, end, column,
    ROW: gl.constexpr, N: gl.constexpr, ADD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Writes sums [64, 256], or adds them; arguments as of `store_box`."""
    if row + 64 > end:
        tma.store_wait(0)
    left, right = in_halves(acc)
    boxes = in_halves(left) + in_halves(right)
    for i in gl.static_range(4):
        n = column + 64 * i
        store_box(boxes[i], out, box, staged, row, end, n, ROW, N, ADD, PART, i % 2)
