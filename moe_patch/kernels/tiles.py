"""Choice of a product's tile: measured, or by rule.

BM rows of one expert x BN weight columns x BK of the reduction; `stages` deep software pipeline.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..compat import has_gluon, interpreted
from . import chips, interpreter, table
from .boxes import Lying
from .launch import power_of_two

INTERPRET: bool = interpreted()
if INTERPRET:
    interpreter.quicken()
W8, W4 = "_w8", "_w4"
"""End the names of kernels that read weights of 8 and of 4 bits, with rows of another dtype."""
ROLES = 12
"""Warps of a tile of the kernels in hopper/: two warpgroups multiply, the third loads. (dw may let
three multiply larger ones.)"""
TAIL = 16
"""Rows of a tail, which tiles of gate_up's and gemm's kernels in hopper/ may have beyond 128."""


@dataclass(frozen=True)
class Tile:
    """One kernel configuration; `group_m` row tiles share a weight column before the next (L2).
    With ROLES warps it is of a kernel in hopper/, as far as operands allow: `bm` is then the height
    for which the order lists tiles, and the kernel's own are of 128 rows, perhaps with a tail."""

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
    room, each = shared - 4096, step(kernel, tile, itemsize)
    if kernel.endswith((W8, W4)):  # widened weights lie beside those that come
        widened = loaded(kernel, tile) * tile.bk * itemsize
        if tile.warps == ROLES:  # of each step
            each += widened
        else:
            room -= widened
    return room // each


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
    if INTERPRET or not _has_roles(product):
        return portable(product)
    kernel, dtype = product.kernel, product.dtype
    height = 128 if kernel.startswith("dw") else product.bm
    columns = 128 if kernel.startswith("gate_up") else 256
    tile = Tile(height, columns, 64, ROLES, 4, group_m=16)
    tile = fit(kernel, tile, product.n, dtype.itemsize, chips.chip(product.device).shared)
    return tile if tile.stages > 1 else portable(product)


def portable(product: Product) -> Tile:
    """The tile by rule of the kernel for every chip, which computes what hopper/'s leaves."""
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
    elif kernel == "dgate" and bm == 64 <= rows and chip.wgmma:
        # 0.155 ms, and 0.178 with 128 columns
        tile = Tile(bm, 256, 64, 8, 4)
    elif bm == 64:
        tile = Tile(bm, 128, 64, 4, 4)
    else:
        tile = Tile(bm, 64, 128, 4, 4)
    return fit(kernel, tile, n, dtype.itemsize, chip.shared)


def _has_roles(product: Product) -> bool:
    """Whether a kernel in hopper/ is faster, as at every size that was measured: 64 to 4096 rows an
    expert. Left out: fewer steps than its ring has stages, and long reductions of gemm of which
    there are few (tiles of 64 rows)."""
    kernel, bm, rows, n, k, dtype, device = product
    if not chips.chip(device).wgmma or dtype.itemsize != 2 or not has_gluon():
        return False
    if rows < 64:
        return False
    if kernel == "dw_gathered":
        return n >= 256
    if bm < 64 or k % 64 or k < 256:
        return False
    if kernel == "gemm" and bm == 64 and k > 4096:
        return False
    kernel = kernel.removesuffix(W8)
    columns = {"gate_up": 128, "gemm": 256, "dgate": 256}
    return kernel in columns and n >= columns[kernel]


def tail_for(weight: Tensor, slots: int) -> int:
    """Rows that tiles of gate_up's and gemm's kernels in hopper/ may have beyond 128: some where an
    expert (mean) has one tile or two, of which one less is much. Where it has many, tiles of two
    heights made programs drift apart; but a weight of 8 bits is widened anew for each tile, which
    takes longer than the tile's products."""
    rows = slots // weight.shape[0]
    return TAIL if rows >= 96 and (rows < 320 or weight.dtype.itemsize == 1) else 0


def plan_of(tile: Tile, weight: Lying, rank: int) -> dict[str, Any]:
    """Fields that plans of the kernels in hopper/ share; `rank` is an update's, or 0."""
    _, n, k = weight.shape
    return {
        "n": n, "k": k, "right_turned": not weight.turned, "rank": rank,
        "group_m": tile.group_m, "stages": tile.stages, "listed": tile.bm,
        "widened": weight.dtype == torch.float8_e4m3fn,
    }  # fmt: skip
