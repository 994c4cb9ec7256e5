"""The warpgroup that brings a tile's operands where rows of x are gathered by token.

It copies rows by cp.async and brings weights through TMA. While the ring is full it asks for the
next tile, and for the tokens of that one's rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...compat import gluon_copy
from .ring import BK, wait_empty
from .turns import own, take, tell
from .update import load_update

copy = gluon_copy()


@gluon.constexpr_function
def rows_layout():
    """[64, 64] of x: a thread copies 16 bytes of a row at a time, eight of them a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def tokens_of(PLAN: gl.constexpr):
    """Room for the tokens of two tiles' rows."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [2 * PLAN.parts, 64], plain)


@gluon.jit
def _find(row_to_slot, tokens, turn, first, end, PLAN: gl.constexpr):
    """Keeps which rows of x a tile's are; past the end: none, -1."""
    PARTS: gl.constexpr = PLAN.parts
    local = gl.arange(0, 64, gl.SliceLayout(1, rows_layout()))
    for part in gl.static_range(PARTS):
        rows = first + 64 * part + local
        slot = gl.load(row_to_slot + rows, mask=rows < end, other=0)
        token = gl.where(rows < end, slot // PLAN.top_k, -1)
        tokens.index(turn % 2 * PARTS + part).store(token)


@gluon.jit
def _load(
    x, w, ring, tokens, turn, step, expert, first, end, n,
    BRING: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Brings columns FROM ... TO of a tile's operands, without parts past the expert's end."""
    PARTS: gl.constexpr = PLAN.parts
    by: gl.constexpr = rows_layout()
    columns = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, by)), 0)
    parts = (gl.minimum(end - first, PLAN.bm) + 63) // 64
    for count in gl.static_range(1, PARTS + 1):
        if parts == count:
            for k in range(FROM, TO, BK):
                stage = wait_empty(ring, step + (k - FROM) // BK, PLAN)
                full = ring.full.index(stage)
                BRING(w, full, ring.right.index(stage), expert, n, k, PLAN)
                for part in gl.static_range(count):
                    token = tokens.index(turn % 2 * PARTS + part).load(gl.SliceLayout(1, by))
                    source = gl.expand_dims(token.to(gl.int64) * PLAN.stride_x, 1)
                    exists = gl.expand_dims(token >= 0, 1)
                    left = ring.left.index(PARTS * stage + part)
                    copy(left, x + source + columns + k, exists)
                async_copy.mbarrier_arrive(full, increment_count=False)
    return step + (TO - FROM) // BK


@gluon.jit
def produce(
    x, w, update, row_to_slot, tokens, tiles, ring, turns,
    BRING: gl.constexpr, BRING_B: gl.constexpr, WIDTH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Fills the ring. Tiles lie WIDTH columns apart; `BRING(w, full, right, expert, n, k, PLAN)`
    begins to load a step of the weight from column n on, `BRING_B(b, full, right, expert, n, r,
    PLAN)` one of an update, from r on of its rank."""
    NUM_N: gl.constexpr = (PLAN.inner + WIDTH - 1) // WIDTH
    FILLED: gl.constexpr = min(PLAN.stages * BK, PLAN.k)
    step, turn = 0, 0
    tell(turns, 0, gl.program_id(0), tiles, NUM_N, PLAN)
    expert, first, end, column = own(turns, 0)
    _find(row_to_slot, tokens, 0, first, end, PLAN)
    while end > 0:
        n = column * WIDTH
        step = _load(x, w, ring, tokens, turn, step, expert, first, end, n, BRING, 0, FILLED, PLAN)
        # the ring is full: there is time to ask for the next tile and its rows
        tell(turns, turn + 1, take(turns), tiles, NUM_N, PLAN)
        _, below, limit, _ = own(turns, turn + 1)
        _find(row_to_slot, tokens, turn + 1, below, limit, PLAN)
        step = _load(
            x, w, ring, tokens, turn, step, expert, first, end, n, BRING, FILLED, PLAN.k, PLAN
        )
        step = load_update(update, ring, step, expert, first, end, n, BRING_B, PLAN)
        turn += 1
        expert, first, end, column = own(turns, turn)
