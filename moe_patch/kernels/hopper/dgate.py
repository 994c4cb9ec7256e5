"""dgate for Hopper: rows of d_out gathered by token, and an epilogue that waits for no memory.

A tile is 128 rows of one expert by 256 columns of the activation. One warpgroup copies rows by
cp.async and brings weights through TMA; two multiply 64 rows each. Each of those has its part of
the pre-activation brought through TMA, 64 columns ahead of its epilogue, of which the first come
while it multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...compat import gluon_load
from ..activate import through_gate
from .gather import Gathered, find_tokens, gather_rows, tokens_of
from .producer import bring_weight, produce
from .ring import bytes_of_weight, multiply, pass_over, ring_of, steps_of
from .roles import run
from .rows import Parts
from .stores import in_halves
from .turns import column_tiles, tiles_of, told, turns_of
from .update import Update, bring_update

async_load = gluon_load()


class Plan(NamedTuple):
    """Sizes of a product, as one constant; see `ring`."""

    n: int
    """Columns of the activation."""
    k: int
    stride_x: int
    top_k: int
    weight_on_input: bool
    need_pre: bool
    need_act: bool
    need_scale: bool
    group_m: int
    stages: int
    right_turned: bool
    """The weight's reduction is contiguous in memory; else its columns are."""
    listed: int
    """Rows of a tile in the order's list: 128 or 64."""
    bm: int = 128
    bn: int = 256
    parts: int = 2
    rank: int = 0
    """Rank of a low-rank update; 0: there is none."""
    widened: bool = False
    left_turned: bool = False
    copied: bool = True


class Tensors(NamedTuple):
    """Tensors and boxes that an epilogue reads and writes."""

    slot_weight: Any
    gate_box: Any
    up_box: Any
    d_pre: Any
    act: Any
    d_scale: Any


class Staged(NamedTuple):
    """A warpgroup's boxes [64, 64] of gates and of ups, and the barrier that says that they have
    come."""

    gate: Any
    """[64, 32] of 32 bits, two gates each: sums in float32 pass through it, too."""
    up: Any
    full: Any


@gluon.constexpr_function
def _by_eights():
    """Layout of a warpgroup's [64, 64] in which eight threads have a row, and each eight
    neighbours: sums of a row take the order that they have in the kernel for every chip. A warp has
    the rows that it has among its sums."""
    registers = [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]]
    lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 64])


@gluon.constexpr_function
def _by_fours():
    """The same where two neighbours are one element: [64, 32]."""
    registers, lanes = [[0, 1], [0, 2], [4, 0], [8, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.constexpr_function
def _of_half_rows():
    """The same of every second eight rows, each of them in two rows: [64, 32]."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.jit
def _staged(dtype: gl.constexpr):
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    gate = gl.allocate_shared_memory(gl.float32, [64, 32], wide)
    up = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return Staged(gate, up, full)


@gluon.jit
def _bring(operands, ring, stage, turn, place, k, PARTS: gl.constexpr, PLAN: gl.constexpr):
    mbarrier.expect(ring.full.index(stage), bytes_of_weight(PLAN))
    bring_weight(operands.w, ring, stage, place, k, PLAN)
    gather_rows(operands, ring, stage, turn, k, PARTS, PLAN)


@gluon.jit
def _produce(operands, update, tiles, ring, turns, PLAN: gl.constexpr):
    produce(operands, update, tiles, ring, turns, find_tokens, _bring, bring_update, PLAN)


@gluon.jit
def _bring_pre(tensors, staged, row, column):
    """Begins to load gates and ups."""
    mbarrier.expect(staged.full, 2 * 64 * 64 * 2)
    async_load(tensors.gate_box, [row, column // 2], staged.full, staged.gate)
    async_load(tensors.up_box, [row, column], staged.full, staged.up)


@gluon.jit
def _apart(pairs, dtype: gl.constexpr):
    """[64, 64] in float32 of elements of 32 bits, two of `dtype` each."""
    pairs = pairs.to(gl.uint32, bitcast=True)
    low, high = (pairs & 0xFFFF).to(gl.uint16), (pairs >> 16).to(gl.uint16)
    both = gl.join(low, high).reshape([64, 64]).to(dtype, bitcast=True)
    return gl.convert_layout(both, _by_eights(), assert_trivial=True).to(gl.float32)


@gluon.jit
def _exchanged(sums, by_way):
    """Sums [64, 64] of a product in the layout `_by_eights`, by way of a box of half as many."""
    upper, lower = sums.reshape([4, 2, 8, 64]).permute((0, 2, 3, 1)).split()
    by_way.store(upper.reshape([64, 32]))
    upper = by_way.load(_of_half_rows()).reshape([4, 8, 64])
    by_way.store(lower.reshape([64, 32]))
    lower = by_way.load(_of_half_rows()).reshape([4, 8, 64])
    both = gl.join(upper, lower).permute((0, 3, 1, 2)).reshape([64, 64])
    return gl.convert_layout(both, _by_eights(), assert_trivial=True)


@gluon.jit
def _write(d_pre, act, m, n, d_gate, d_up, value, mask, PLAN: gl.constexpr):
    """Writes columns n [1, 64] of rows m [64, 1] to pointers; a row's eight threads fill a line of
    the cache. Addresses are computed this late because registers are few before."""
    to_pre, to_act = d_pre + (m * (2 * PLAN.n) + n), act + (m * PLAN.n + n)
    if PLAN.need_pre:
        gl.store(to_pre, d_gate, mask=mask)
        gl.store(to_pre + PLAN.n, d_up, mask=mask)
    if PLAN.need_act:
        gl.store(to_act, value, mask=mask)


@gluon.jit
def _epilogue(
    acc, scale, tensors, staged, first, end, column, PLAN: gl.constexpr, GATE: gl.constexpr
):  # fmt: skip
    """Writes 64 columns after 64; returns the sums of d_scale [64].

    In a loop, through whose first tensor the others move up: four copies of it, for two
    warpgroups, are more than the instruction cache holds. Rows past the end are computed and not
    written: masks of rows would hold the predicates that an exponential and a division need, and
    elements would go one after the other."""
    I: gl.constexpr = PLAN.n
    by: gl.constexpr = _by_eights()
    dtype: gl.constexpr = staged.up.dtype
    left, right = in_halves(acc)
    now, second = in_halves(left)
    third, fourth = in_halves(right)
    m = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, by)), 1)
    n = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, by)), 0)
    d_pre = tensors.d_pre + first.to(gl.int64) * (2 * I)
    act = tensors.act + first.to(gl.int64) * I
    before = gl.zeros([64], gl.float32, gl.SliceLayout(1, by))
    total = before
    for i in range(4):
        n0 = column + 64 * i
        exists = n < I - n0 if I % PLAN.bn else n >= 0
        mbarrier.wait(staged.full, i & 1)
        pairs = staged.gate.load(_by_fours())
        up = staged.up.load(by).to(gl.float32)
        d_act = _exchanged(now, staged.gate)
        if i < 3:
            fence_async_shared()
            _bring_pre(tensors, staged, first, n0 + 64)
        now, second, third = second, third, fourth
        gate = _apart(pairs, dtype)  # not before: half as many registers
        d_gate, d_up, value, sums = through_gate(
            d_act, gate, up, scale, exists, GATE, PLAN.weight_on_input
        )
        both = before + sums
        total = gl.where(i == 1, both, gl.where(i == 3, total + both, total))
        before = sums
        d_gate, d_up, value = d_gate.to(dtype), d_up.to(dtype), value.to(dtype)
        if first + 64 <= end:
            _write(d_pre, act, m, n + n0, d_gate, d_up, value, exists, PLAN)
        else:
            inside = exists & (m < end - first)
            _write(d_pre, act, m, n + n0, d_gate, d_up, value, inside, PLAN)
    return total


@gluon.jit
def _consume(
    tensors, staged, row_to_slot, ring, turns,
    ME: gl.constexpr, PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = steps_of(PLAN)
    NUM_N: gl.constexpr = column_tiles(PLAN)
    by: gl.constexpr = _by_eights()
    step, turn = 0, 0
    _, first, end, column = told(turns, 0)
    while end > 0:
        part = (turn + ME) % PLAN.parts  # of short tiles each warpgroup gets its share
        first += part * 64
        n0 = column * PLAN.bn
        rows = first + gl.arange(0, 64, gl.SliceLayout(1, by))
        slot = gl.load(row_to_slot + rows, mask=rows < end, other=0)
        scale = gl.expand_dims(gl.load(tensors.slot_weight + slot).to(gl.float32), 1)
        if first < end:
            fence_async_shared()
            _bring_pre(tensors, staged, first, n0)
            acc = multiply(ring, step, STEPS, part, PLAN)
            total = _epilogue(acc, scale, tensors, staged, first, end, n0, PLAN, GATE)
            if PLAN.need_scale:
                to = tensors.d_scale + rows.to(gl.int64) * NUM_N + column
                gl.store(to, total, mask=rows < end)
        else:
            pass_over(ring, step, STEPS, PLAN)
        step += STEPS
        turn += 1
        _, first, end, column = told(turns, turn)


@gluon.jit
def dgate_hopper_kernel(
    x, w, scales, side, b, slot_weight, gate_box, up_box, d_pre, act, d_scale, taken,
    row_to_slot, expert_offsets, tile_expert, tile_row, num_tiles,
    PLAN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """x [T, K] with K a multiple of 64; w as boxes [256, 64] of [E * I, K] or [64, 256] of
    [E * K, I]; pre [S, 2I] as boxes [64, 64] of its ups, and [64, 32] of its gates as pairs;
    `taken` is an order's. What is not needed is any tensor. `side` and `b` are an `Update`."""
    tiles = tiles_of(expert_offsets, tile_expert, tile_row, num_tiles, PLAN)
    ring, turns = ring_of(x.dtype.element_ty, PLAN), turns_of(taken, PLAN)
    upper, lower = _staged(x.dtype.element_ty), _staged(x.dtype.element_ty)
    tensors = Tensors(slot_weight, gate_box, up_box, d_pre, act, d_scale)
    operands = Gathered(x, w, row_to_slot, tokens_of(PLAN))
    run(
        (tensors, upper, row_to_slot, ring, turns, 0, PLAN, GATE),
        (tensors, lower, row_to_slot, ring, turns, 1, PLAN, GATE),
        (operands, Update(Parts(side, None), b), tiles, ring, turns, PLAN),
        (scales, ring, turns, False, PLAN),
        _consume, _produce, PLAN,
    )  # fmt: skip
