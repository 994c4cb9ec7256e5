"""Shared parts of grouped kernels for every chip: constants, places of tiles, loads, products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..precision import allows_tf32
from .activate import gate_of
from .launch import Launch
from .tiles import INTERPRET, Tile


class Layout(NamedTuple):
    """How a kernel reads a logical [E, N, K] weight and its scales, as one constant. Of weights in
    4 bits the strides count bytes of two codes."""

    stride_e: int
    stride_n: int
    stride_k: int
    scale_e: int
    scale_n: int
    scale_k: int
    tma: bool
    """The weight is a TMA descriptor, K-major or N-major; else a pointer."""
    k_major: bool
    format: str = ""
    """Of weights in 4 bits, which lie two a byte along K if K-major, else along N."""
    group: int = 0
    """How many of those share a scale."""
    ptx: bool = False
    """Their values are looked up in the registers of a warp, by PTX."""


class Tiling(NamedTuple):
    """A grouped kernel's tile and its arithmetic, as one constant."""

    bm: int
    bn: int
    bk: int
    group_m: int
    upcast: bool
    """bfloat16 is widened to float32 first: its own arithmetic is wrong in the interpreter."""
    precision: str
    """Of float32 products, from `dot_precision`."""


NO_SCALES = (0, 0, 0)
"""The scale strides of a weight without scales."""


def launches(kernel: Any) -> Callable[..., Launch]:
    """Return the function that prepares a grouped kernel's Launch and keeps it.

    It takes what a launcher has at hand, so that a launch that is kept costs one look-up.
    activation None: the kernel activates nothing. `ptx` is a Chip's.
    """

    @functools.lru_cache(1024)
    def prepare(
        tile: Tile,
        dtype: torch.dtype,
        precision: str,
        layout: Layout,
        activation: str | None,
        ptx: bool = False,
        **constants: Any,
    ) -> Launch:
        if activation is not None:
            constants["GATE"] = gate_of(activation, ptx)
        upcast = INTERPRET and dtype == torch.bfloat16
        return Launch(
            kernel, **constants,
            LAYOUT=layout,
            TILE=Tiling(tile.bm, tile.bn, tile.bk, tile.group_m, upcast, precision),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return prepare


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products stay IEEE unless the user allowed TF32, as torch.matmul does."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"


@triton.jit
def in_groups(at, tiles, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, column tile) of number `at` of `tiles` x NUM_N: equally high groups of about
    GROUP_M row tiles walk the columns side by side. One past the last has any."""
    groups = tl.maximum((tiles + GROUP_M // 2) // GROUP_M, 1)
    height = (tiles + groups - 1) // groups
    above = at // (height * NUM_N) * height
    at = at % (height * NUM_N)
    height = tl.maximum(tl.minimum(height, tiles - above), 1)
    return above + at % height, at // height


@triton.jit
def _tiles(rows, BM: tl.constexpr, TAIL: tl.constexpr):
    """Number of tiles of an expert's rows. Those beyond a multiple of BM are tails of the others
    where four suffice: a tail takes as long as twice its rows."""
    return rows // BM + (rows % BM > TAIL * tl.minimum(rows // BM, 4)).to(tl.int32)


@triton.jit
def _share(
    tile, tiles, begin, end, BM: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """(first row, the row after the last) of one of an expert's tiles, as `place` deals them."""
    share, odd, more = BM, 0, 0
    if EVEN:
        share, odd, more = (end - begin) // tiles, (end - begin) % tiles, 1
    if TAIL > 0:
        tails = (end - begin - tiles * BM + TAIL - 1) // TAIL
        share = tl.where(tails > 0, BM, share)
        odd = tl.where(tails > 0, tails, odd)
        more = tl.where(tails > 0, TAIL, more)
    first = begin + tile * share + tl.minimum(tile, odd) * more
    return first, tl.minimum(first + share + (tile < odd).to(tl.int32) * more, end)


@triton.jit
def place(
    at, tile_expert, tile_row, ends,
    NUM_N: tl.constexpr, M_MAX: tl.constexpr, BM: tl.constexpr, GROUP_M: tl.constexpr,
    LISTED: tl.constexpr = 0, EVEN: tl.constexpr = False, TAIL: tl.constexpr = 0,
):  # fmt: skip
    """(expert, first row, the row after its last, column tile) of a program.

    Programs of one expert stand together: about GROUP_M of its row tiles walk the columns side by
    side, so that a weight comes from memory once. Low tiles are one or two an expert and need no
    groups. M_MAX > 0: masked, with expert e's rows from e * M_MAX on and their count in `ends`,
    clamped to it; else tiles are listed, and `ends` are an order's expert_offsets. LISTED > 0: they
    are listed for tiles of so many rows, BM or fewer. A program that higher tiles leave over has no
    rows: its first is its end. The row after the last is the expert's; with EVEN or TAIL, for
    listed tiles of 64 rows and more, the tile's own. EVEN: an expert's rows are dealt evenly to its
    tiles instead of by BM, and the first ones have one more where they do not divide. TAIL: where
    that saves the expert a tile, its first ones have up to so many rows more.
    """
    if M_MAX > 0:
        NUM_M: tl.constexpr = (M_MAX + BM - 1) // BM
        expert = at // (NUM_M * NUM_N)
        local = at % (NUM_M * NUM_N)
        first = expert * M_MAX + local % NUM_M * BM
        end = expert * M_MAX + tl.minimum(tl.load(ends + expert), M_MAX)
        column = local // NUM_M
    else:
        listed = at // NUM_N  # a tile of the expert: each has NUM_N programs
        expert = tl.load(tile_expert + listed)
        row = tl.load(tile_row + listed)
        end = tl.load(ends + expert + 1)
        if BM < 64:
            first, column = row, at % NUM_N
        else:
            begin = tl.load(ends + expert)
            tiles = _tiles(end - begin, BM, TAIL)
            local = at - (listed - (row - begin) // (LISTED or BM)) * NUM_N
            left_over = local >= tiles * NUM_N
            tile, column = in_groups(local, tiles, NUM_N, GROUP_M)
            if EVEN or TAIL > 0:
                first, end = _share(tile, tiles, begin, end, BM, EVEN, TAIL)
            else:
                first = begin + tile * BM
            if LISTED > 0:
                first = tl.where(left_over, end, first)
    return expert, first, end, column


@triton.jit
def load_rows(rows, k0, K: tl.constexpr, TILE: tl.constexpr):
    """[BM, BK] from [BM, 1] row pointers whose columns are contiguous; zero past K."""
    k = k0 + tl.arange(0, TILE.bk)[None, :]
    tile = tl.load(rows + k) if K % TILE.bk == 0 else tl.load(rows + k, mask=k < K, other=0.0)
    return tile.to(tl.float32) if TILE.upcast else tile


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. In IEEE float32 each block is summed by itself: one long chain of K additions
    has several times the error of cuBLAS. (A plain + would be folded back into the chain.)"""
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)
