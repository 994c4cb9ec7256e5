"""Low-rank updates of expert weights: x (W + B A)^T = x W^T + (x A^T) B^T.

x A^T is a small product of its own, of which the backward needs the result anyway; its rows times B
are more steps of a kernel's reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .boxes import gluon_box, parts_box, rows_box
from .launch import power_of_two
from .tiling import dot


@dataclass(frozen=True)
class LowRank:
    """An update B[e] A[e] of the weights [E, N, K]: A [E, R, K], B [E, N, R], of any strides.

    `side` [S, R] receives x A^T, in expert order.
    """

    a: Tensor
    b: Tensor
    side: Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[1]

    def __getitem__(self, experts: slice) -> LowRank:
        """The update of these experts' weights."""
        return LowRank(self.a[experts], self.b[experts], self.side)


class Factor(NamedTuple):
    """Layout of B as kernels for every chip read it, as one constant."""

    rank: int = 0
    """R; 0: no update."""
    stride_e: int = 0
    stride_n: int = 0
    stride_r: int = 0
    step: int = 16
    """Part of the rank that is multiplied at a time."""


class Update(NamedTuple):
    """A LowRank inside a kernel."""

    side: Any
    b: Any


class Operand(NamedTuple):
    """Arguments of a kernel for every chip: the constant FACTOR, and `tensors`."""

    factor: Factor = Factor()
    tensors: Update = Update(None, None)


NO_UPDATE = Operand()
"""Arguments without an update."""


def update_operand(update: LowRank) -> Operand:
    """An update as kernels for every chip take it."""
    step = min(32, max(16, power_of_two(update.rank)))
    return Operand(Factor(update.rank, *update.b.stride(), step), Update(update.side, update.b))


@triton.jit
def add_update(
    acc, update, expert, rows, mask, n, n_mask, FACTOR: tl.constexpr, TILE: tl.constexpr
):
    """acc [BM, BN] + side B^T: of the tile's rows, and columns n of the expert's B [N, R]."""
    PRECISION: tl.constexpr = TILE.precision
    R: tl.constexpr = FACTOR.rank
    b_rows = update.b + expert.to(tl.int64) * FACTOR.stride_e
    for start in tl.range(0, R, FACTOR.step, num_stages=1):
        r = start + tl.arange(0, FACTOR.step)
        at = update.side + rows.to(tl.int64)[:, None] * R + r[None, :]
        side = tl.load(at, mask=mask[:, None] & (r[None, :] < R), other=0.0)
        at = b_rows + n[None, :] * FACTOR.stride_n + r[:, None] * FACTOR.stride_r
        b = tl.load(at, mask=n_mask[None, :] & (r[:, None] < R), other=0.0)
        if TILE.upcast:
            side, b = side.to(tl.float32), b.to(tl.float32)
        acc = dot(side, b, acc, PRECISION)
    return acc


class Boxes(NamedTuple):
    """Arguments of a kernel in hopper/: boxes of `side` [S, R], of a tile's tail of it, and of B,
    or None without an update; and B as the box has it, which has to live until the kernel is
    started."""

    rank: int = 0
    side: Any = None
    tail: Any = None
    b: Any = None
    kept: Tensor | None = None


NO_BOXES = Boxes()
"""Arguments without an update."""


def update_boxes(
    update: LowRank | None, weight: Tensor, columns: int, tail: int = 0, part: int = 64
) -> Boxes | None:
    """Boxes of 64 of the rank: `part` rows of `side`, and `tail` of them, and `columns` of B, which
    lies as the weight [E, N, K] does, [E, N, R] or [E, R, N]. None where they are not lawful."""
    if update is None:
        return NO_BOXES
    side, rank, turned = update.side, update.rank, weight.stride(2) == 1
    side_box, tail_box = parts_box(side, tail, part)
    if side_box is None:  # a rank that is not a multiple of 8
        return None
    b = (update.b if turned else update.b.mT).contiguous()
    shape, block = (b.shape[0] * b.shape[1], b.shape[2]), (columns, 64) if turned else (64, columns)
    b_box = (gluon_box if turned else rows_box)(b.data_ptr(), b.dtype, shape, block)
    return None if b_box is None else Boxes(rank, side_box, tail_box, b_box, b)
