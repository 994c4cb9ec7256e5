"""Tile sizes, and the jit helpers that every grouped kernel shares.

BM rows of one expert x BN weight columns x BK of the reduction; `stages` deep software pipeline.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import has_gluon, interpreted
from ..precision import allows_tf32
from . import chips, interpreter, table
from .activate import gate_of
from .launch import Launch, power_of_two

INTERPRET: bool = interpreted()
if INTERPRET:
    interpreter.quicken()
W8, W4 = "_w8", "_w4"
"""End the names of kernels that read weights of 8 and of 4 bits, with rows of another dtype."""
ROLES = 12
"""Warps of a tile of the kernels in hopper/: two warpgroups multiply, the third loads. (dw may let
three multiply larger ones.)"""


@dataclass(frozen=True)
class Tile:
    """One kernel configuration; `group_m` row tiles share a weight column before the next (L2).
    With ROLES warps it is of a kernel in hopper/, as far as operands allow: `bm` is then the height
    for which the order lists tiles, and the kernel's own are of 128 rows."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group_m: int = 8


def block_m(num_slots: int, num_experts: int, dtype: torch.dtype) -> int:
    """Tile height from the mean rows an expert gets, known to the host."""
    rows = num_slots / max(num_experts, 1)
    if dtype == torch.float32 or INTERPRET:
        return 16 if rows <= 16 else 64
    # a second tile of the same expert costs more than the rows that a higher one leaves empty
    return 16 if rows <= 8 else 32 if rows <= 20 else 64 if rows < 192 else 128


def loaded(kernel: str, tile: Tile) -> int:
    """Columns that the tile loads at a step of its reduction: gate_up takes both halves."""
    return 2 * tile.bn if kernel.startswith("gate_up") else tile.bn


def step(kernel: str, tile: Tile, itemsize: int) -> int:
    """Bytes that it loads at one. `itemsize` is the rows', and that of plain weights."""
    bits = 8 if kernel.endswith(W8) else 4 if kernel.endswith(W4) else 8 * itemsize
    return (tile.bm * itemsize * 8 + loaded(kernel, tile) * bits) * tile.bk // 8


def held(kernel: str, tile: Tile, itemsize: int, shared: int) -> int:
    """Return how many of its steps the shared memory holds at a time."""
    room = shared - 4096
    if kernel.endswith((W8, W4)):  # widened weights lie beside those that come
        room -= loaded(kernel, tile) * tile.bk * itemsize
    return room // step(kernel, tile, itemsize)


def fit(kernel: str, tile: Tile, n: int, itemsize: int, shared: int) -> Tile:
    """The same tile with no more columns than N = n fills and no more stages than are held."""
    tile = replace(tile, bn=min(tile.bn, max(16, power_of_two(n))))
    # the index load in the loop takes two stages of the pipeline
    idle = 2 if kernel == "dw_gathered" else 0
    stages = held(kernel, tile, itemsize, shared) + idle
    return replace(tile, stages=max(1, min(tile.stages, stages)))


_forced: ContextVar[tuple[str, Tile] | None] = ContextVar("forced", default=None)


@contextlib.contextmanager
def forced(kernel: str, tile: Tile) -> Iterator[None]:
    """Inside, in this thread, `choose` answers `tile` for `kernel`."""
    token = _forced.set((kernel, tile))
    try:
        yield
    finally:
        _forced.reset(token)


def choose(
    kernel: str,
    bm: int,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tile:
    """Configuration of `kernel` (gate_up, gemm, dgate, dw, dw_gathered; the first three with `W8`
    or `W4` for such weights): measured, or `heuristic`. `dtype` is that of the rows.

    For `rows` rows an expert (mean), N = n columns and a reduction over K = k; dw reduces over the
    rows, and its k is M. The user's table goes before the shipped one.
    """
    found = _forced.get()
    if found is not None and found[0] == kernel:
        return found[1]
    return _choose(kernel, bm, rows, n, k, dtype, device)


class Product(NamedTuple):
    """The arguments of `choose`."""

    kernel: str
    bm: int
    rows: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device


@functools.cache
def _choose(*product: Any) -> Tile:
    found = Product(*product)
    return (None if INTERPRET else measured(found)) or heuristic(found)


def forget() -> None:
    """The tables are read again, as after a change to a file."""
    for cached in (_choose, table.user, table.shipped):
        cached.cache_clear()


def measured(product: Product) -> Tile | None:
    """The tables' entry that fits the device's shared memory."""
    kernel, bm, rows, n, k, dtype, device = product
    found = chips.chip(device)
    name, arch = chips.name(device), found.arch
    key = table.key(kernel, str(dtype).removeprefix("torch."), n, k, bm, rows)
    for tiles in (table.user(name, triton.__version__) if name else {}, table.shipped(name, arch)):
        if key in tiles:
            tile = fit(kernel, Tile(*tiles[key]), n, dtype.itemsize, found.shared)
            if held(kernel, tile, dtype.itemsize, found.shared) >= 1:
                return tile
    return None


def _in_little_memory(kernel: str, bm: int, rows: int) -> Tile:
    """Best tiles of a sweep for 64 to 100 KB, on an H200 held to 99 KB and mma.sync.

    docs/kernels.md has the sweep. Two to four programs share an SM, and an accumulator takes 64 or
    128 registers of a thread.
    """
    if kernel.startswith("dw"):
        return Tile(64, 128, 32, 4, 2) if rows < 512 else Tile(64, 256, 64, 4, 3)
    if bm == 128:
        return Tile(bm, 64 if kernel == "gate_up" else 128, 32, 4, 4)
    if bm == 64:
        return Tile(bm, 128 if kernel == "gate_up" else 256, 32, 4, 3)
    return Tile(bm, 64, 64, 8, 3) if kernel == "gate_up" else Tile(bm, 64, 64, 4, 4)


def heuristic(product: Product) -> Tile:
    """The tile where nothing was measured."""
    kernel, bm, rows, n, _, dtype, device = product
    chip = chips.chip(device)
    if INTERPRET:
        return Tile(bm, 32, 32, 4, 1)
    if kernel.endswith((W8, W4)):  # a scaled product, or widened weights, beside the accumulator
        halves = 2 if kernel.startswith("gate_up") else 1
        if dtype == torch.float32:
            tile = Tile(bm, 32 // halves, 32, 4, 3)
        elif chip.small:
            tile = Tile(bm, 64 // halves, 32, 4, 3)
        else:
            bn, bk = (128 if bm == 64 else 64) // halves, 128 if chip.tma and bm < 64 else 64
            tile = Tile(bm, bn, bk, 4, 3 if bm == 128 else 4)
        return fit(kernel, tile, n, dtype.itemsize, chip.shared)
    if _has_roles(product):
        bn = 128 if kernel == "gate_up" else 256
        height = 128 if kernel.startswith("dw") else bm
        return fit(kernel, Tile(height, bn, 64, ROLES, 4), n, dtype.itemsize, chip.shared)
    if kernel.startswith("dw"):
        bm = 64 if dtype == torch.float32 or chip.small else 128
    if dtype == torch.float32:
        tile = Tile(bm, 32 if kernel == "gate_up" else 64, 32, 4, 3)
    elif chip.small:
        tile = _in_little_memory(kernel, bm, rows)
    elif kernel.startswith("dw") and rows < 512:  # writes are most of it: three programs an SM
        tile = Tile(64, 256, 32, 4, 5)
    elif bm == 128:
        stages = 5 if kernel == "dw_gathered" else 4
        tile = Tile(bm, 128 if kernel == "gate_up" else 256, 64, 8, stages)
    elif bm == 64:
        tile = Tile(bm, 128, 64, 4, 4)
    else:
        tile = Tile(bm, 64, 128, 4, 4)
    return fit(kernel, tile, n, dtype.itemsize, chip.shared)


def _has_roles(product: Product) -> bool:
    """Whether a kernel in hopper/ is faster, as at every size that was measured: 64 to 4096 rows an
    expert. Left out: fewer steps than its ring has stages, and long reductions, on whose way
    programs drift apart (gate_up and dgate, tiles of 128 rows) or of which there are few (gemm, of
    64)."""
    kernel, bm, rows, n, k, dtype, device = product
    if not chips.chip(device).wgmma or dtype.itemsize != 2 or not has_gluon():
        return False
    if rows < 64:
        return False
    if kernel == "dw_gathered":
        return n >= 256
    if bm < 64 or k % 64 or k < 256:
        return False
    if kernel == "gate_up":
        return n >= 128 and (bm == 64 or k < 6144)
    if kernel == "dgate":
        return n >= 256 and (bm == 64 or k < 6144)
    return kernel == "gemm" and n >= 256 and (bm == 128 or k <= 4096)


def plan_of(tile: Tile, weight: Tensor, rank: int) -> dict[str, Any]:
    """Fields that plans of the kernels in hopper/ share: of a tile, of a weight [E, N, K], and the
    rank of an update, or 0."""
    _, n, k = weight.shape
    return {
        "n": n, "k": k, "right_turned": weight.stride(2) == 1, "rank": rank,
        "group_m": tile.group_m, "stages": tile.stages, "listed": tile.bm,
    }  # fmt: skip


def without_roles(tile: Tile, product: Product) -> Tile:
    """The tile of the kernel for every chip instead."""
    if tile.warps != ROLES:
        return tile
    kernel, n, dtype, device = product.kernel, product.n, product.dtype, product.device
    tile = replace(tile, warps=8, stages=5 if kernel.startswith("dw") else 4)
    if tile.bm == 64 and kernel != "dgate":  # which takes 0.155 ms, and 0.178 with 128 columns
        tile = replace(tile, bn=min(tile.bn, 128), warps=4)
    return fit(kernel, tile, n, dtype.itemsize, chips.chip(device).shared)


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
    activation None: the kernel activates nothing.
    """

    @functools.lru_cache(1024)
    def prepare(
        tile: Tile,
        dtype: torch.dtype,
        precision: str,
        layout: Layout,
        activation: str | None,
        **constants: Any,
    ) -> Launch:
        if activation is not None:
            constants["GATE"] = gate_of(activation)
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
def place(
    at, tile_expert, tile_row, ends,
    NUM_N: tl.constexpr, M_MAX: tl.constexpr, BM: tl.constexpr, GROUP_M: tl.constexpr,
    LISTED: tl.constexpr = 0,
):  # fmt: skip
    """(expert, first row, the row after its last, column tile) of a program.

    Programs of one expert stand together: about GROUP_M of its row tiles walk the columns side by
    side, so that a weight comes from memory once. Low tiles are one or two an expert and need no
    groups. M_MAX > 0: masked, with expert e's rows from e * M_MAX on and their count in `ends`,
    clamped to it; else tiles are listed, and `ends` are an order's expert_offsets. LISTED > 0: they
    are listed for tiles of so many rows, BM or fewer. A program that higher tiles leave over has no
    rows: its first is the expert's end.
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
            tiles = (end - begin + BM - 1) // BM
            groups = tl.maximum((tiles + GROUP_M // 2) // GROUP_M, 1)
            height = (tiles + groups - 1) // groups
            local = at - (listed - (row - begin) // (LISTED or BM)) * NUM_N
            left_over = local >= tiles * NUM_N
            above = local // (height * NUM_N) * height
            local = local % (height * NUM_N)
            height = tl.minimum(height, tiles - above)
            if LISTED > 0:
                height = tl.maximum(height, 1)
            first = begin + (above + local % height) * BM
            if LISTED > 0:
                first = tl.where(left_over, end, first)
            column = local // height
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
