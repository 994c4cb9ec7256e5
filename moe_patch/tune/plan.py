"""Plan of a run: what it measures, in which order, how long, and with how many experts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .blocks import Block

KERNELS = ("gate_up", "gemm", "dgate", "dw_gathered")
BACKWARD = ("dgate", "dw_gathered")
"""Kernels that run in the backward only."""
FIRST = (256, 64, 16, 4)
"""Rows an expert, one number for each height of a tile; the longest products first."""
THEN = (1024, 512, 128, 32, 1, 2048, 8, 2, 4096)
"""One number for each other entry that the table can hold, the most frequent first."""
COMPARED = 6
"""Tensors of an output's size that exist at a time while two outputs are compared."""
FLUSHED = 1 << 28
"""Bytes that timing overwrites before each call, to empty the L2 cache."""


@dataclass(frozen=True)
class Entry:
    """One entry of the table: a product of a block at a number of tokens.

    `part` says which product: gate_up, down, d_x, d_gate_up, d_act or d_down. `kernel`, N = `n`,
    K = `k` and the height of the row tiles make its key.
    """

    block: Block
    tokens: int
    part: str
    kernel: str
    n: int
    k: int
    height: int
    key: str

    @property
    def rows(self) -> int:
        """Rows an expert, as launchers count them."""
        return self.tokens * self.block.top_k // self.block.experts

    @property
    def backward(self) -> bool:
        """Whether the backward computes it."""
        return self.part.startswith("d_")


def entries(
    blocks: Sequence[Block],
    dtype: torch.dtype,
    *,
    tokens: Sequence[int] = (),
    backward: bool = False,
    kernels: Collection[str] = (),
) -> list[Entry]:
    """Return what to measure, what matters most first, each key once.

    First comes one number of rows for each height of a tile, the forward before the backward, then
    the other numbers. `tokens` are measured instead, in the order in which they stand. `kernels`
    are names of KERNELS, whatever the weights' dtype; none of them means all.
    """
    from ..kernels.tiles import W8

    found: dict[str, Entry] = {}
    passes = [tokens] if tokens else [FIRST, THEN]
    for counts, back in itertools.product(passes, (False, True)[: 1 + backward]):
        for count, block in itertools.product(counts, blocks):
            for entry in _entries(block, count if tokens else block.tokens(count), dtype, back):
                if not kernels or entry.kernel.removesuffix(W8) in kernels:
                    found.setdefault(entry.key, entry)
    return list(found.values())


def _entries(block: Block, tokens: int, dtype: torch.dtype, backward: bool) -> Iterator[Entry]:
    """Yield the entries of one forward or one backward."""
    from ..kernels import table
    from ..kernels.dequantize import ROWS
    from ..kernels.tiles import block_m

    slots = tokens * block.top_k
    height, rows = block_m(slots, block.experts, dtype), slots // block.experts
    if block.fp8 and backward and rows >= ROWS:  # their weights are widened before the products
        return
    for part, kernel, n, k in products(block, backward):
        m = 128 if kernel.startswith("dw") else height
        key = table.key(kernel, str(dtype).removeprefix("torch."), n, k, m, rows)
        yield Entry(block, tokens, part, kernel, n, k, m, key)


def products(block: Block, backward: bool) -> list[tuple[str, str, int, int]]:
    """Return (part, kernel, N, K) of every product of one forward or one backward, the longest
    first. FP8 weights are frozen, so that they have no gradients."""
    from ..kernels.tiles import W8

    hidden, inner, width = block.hidden, block.inner, block.width
    gate_up, gemm, dgate, dw = "gate_up" if block.gated else "gemm", "gemm", "dgate", "dw_gathered"
    if block.fp8:
        gate_up, gemm, dgate = gate_up + W8, gemm + W8, dgate + W8
    if not backward:
        return [("gate_up", gate_up, inner, hidden), ("down", gemm, hidden, inner)]
    d_x, d_act = ("d_x", gemm, hidden, width), ("d_act", dgate, inner, hidden)
    if block.fp8:
        return [d_x, d_act]
    return [d_x, ("d_gate_up", dw, width, hidden), d_act, ("d_down", dw, inner, hidden)]


def needed(block: Block, tokens: int, dtype: torch.dtype, backward: bool) -> int:
    """Return the bytes that measuring one forward or one backward takes at its peak."""
    size, slots = dtype.itemsize, tokens * block.top_k
    weights = block.experts * (block.width + block.inner) * block.hidden
    rows = tokens * block.hidden + slots * (block.inner + (block.width if backward else 0))
    outputs = [slots * block.inner, slots * block.hidden]
    if backward:
        outputs = [slots * block.hidden, slots * (block.width + block.inner)]
        if not block.fp8:
            outputs.append(block.experts * block.width * block.hidden)
    # scores in float32 with what their top-k sorts; indices, weights and the order of slots
    routing = 12 * tokens * block.experts + 32 * slots
    read = weights * (1 if block.fp8 else size) + rows * size
    return read + COMPARED * max(outputs) * size + routing + FLUSHED


def room(free: int, total: int) -> int:
    """Return how many of a card's free bytes a run may take; other programs use the card too."""
    return free - max(1 << 29, total // 20)


def fitting(
    block: Block, tokens: int, dtype: torch.dtype, backward: bool, available: int
) -> tuple[Block, int] | None:
    """Return the block with as many of its experts as fit `available` bytes, and the tokens that
    give each of them the same number of rows; None where not one fits.

    A key does not hold the number of experts, so the entry is the same.
    """
    from ..kernels import table
    from ..kernels.tiles import block_m

    def key(slots: int, experts: int) -> str:
        return table.key("", "", 0, 0, block_m(slots, experts, dtype), slots // experts)

    slots = tokens * block.top_k
    for experts in range(block.experts, 0, -1):
        fewer = replace(block, experts=experts, top_k=min(block.top_k, experts))
        count = -(-slots * experts // (block.experts * fewer.top_k))
        same = key(count * fewer.top_k, experts) == key(slots, block.experts)
        if same and needed(fewer, count, dtype, backward) <= available:
            return fewer, count
    return None


class TimeUp(Exception):
    """Raised between two candidates once the limit is reached."""


class Limit:
    """A number of seconds from now on, by `clock`."""

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        """Seconds until the limit, from 0 on."""
        return max(0.0, self._end - self._clock())

    def check(self) -> None:
        """Raise TimeUp when nothing is left."""
        if not self.left():
            raise TimeUp
