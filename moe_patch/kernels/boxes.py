"""Boxes of tensors that travel through the Tensor Memory Accelerator (TMA), where that is lawful.

A kernel is given a descriptor of boxes, or the tensor itself, which it reads by pointers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat
from . import chips


def lawful(
    pointer: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    begins: tuple[int, ...] = (),
) -> bool:
    """Whether the hardware takes boxes `block` of a tensor of these strides, in elements.

    Boxes begin at multiples of `block`, and in the last dimension at multiples of it past each of
    `begins`. The rules are those of cuTensorMapEncodeTiled in the CUDA driver API (at most five
    dimensions of 1 to 2^32 elements, the last contiguous; the base and the other strides multiples
    of 16 bytes, strides below 2^40), and one of the copy itself: a box that begins between 16 bytes
    is an illegal instruction on an H200, which ends the CUDA context.
    """
    steps = [stride * itemsize for stride in strides[:-1]]
    columns = (block[-1], *begins)
    return (
        len(shape) <= 5
        and all(0 < size <= 2**32 for size in shape)
        and strides[-1] == 1
        and pointer % 16 == 0
        and all(0 < step < 2**40 and step % 16 == 0 for step in steps)
        and all(column * itemsize % 16 == 0 for column in columns)
    )


def box(
    tensor: Tensor, block: tuple[int, ...], *, halves: int = 1, begins: tuple[int, ...] = ()
) -> tuple[Any, bool]:
    """(a descriptor of boxes `block`, True), or (the tensor itself, False) without lawful ones.

    halves = 2, of [E, N, K]: boxes [1, 2, BN, BK] with BN rows of each half of N. `begins` as
    `lawful` has it. The descriptor does not keep the tensor alive.
    """
    found = _box(
        tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device,
        block, halves, begins,
    )  # fmt: skip
    return (tensor, False) if found is None else (found, True)


@functools.lru_cache(4096)
def _box(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
    block: tuple[int, ...],
    halves: int,
    begins: tuple[int, ...],
) -> Any:
    if not chips.chip(device).tma:
        return None
    if halves == 2:
        (experts, n, k), (stride_e, stride_n, _) = shape, strides
        shape, strides = (experts, 2, n // 2, k), (stride_e, n // 2 * stride_n, stride_n, 1)
    if not lawful(pointer, dtype.itemsize, shape, strides, block, begins):
        return None
    return _described(pointer, dtype, shape, strides, block)


@functools.lru_cache(4096)
def gluon_box(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    block: tuple[int, ...],
    strides: tuple[int, ...] = (),
) -> Any:
    """A descriptor for Gluon, of a tensor with these strides, in elements; (): contiguous.

    None where boxes are not lawful. It does not keep the memory alive.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if not strides:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if not lawful(pointer, dtype.itemsize, shape, strides, block):
        return None
    plain = _described(pointer, dtype, shape, strides, block)
    swizzled = min(128, block[-1] * dtype.itemsize)
    layout = NVMMASharedLayout(swizzled, 8 * dtype.itemsize, len(block))
    found = TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)
    return _of_kind(found, dtype, block)


class Lying(NamedTuple):
    """How a tensor [E, N, K] lies in memory."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Lying:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def turned(self) -> bool:
        """Whether it lies as [E, K, N]."""
        return self.strides[2] != 1

    def lines(self) -> tuple[int, int] | None:
        """[E * N, K], or [E * K, N], as it lies; None where that is not contiguous."""
        (experts, n, k), (stride_e, *strides) = self.shape, self.strides
        if self.turned:
            n, k = k, n
            strides.reverse()
        whole = strides == [k, 1] and (experts == 1 or stride_e == n * k)
        return (experts * n, k) if whole else None


def weight_box(weight: Tensor, columns: int, reduction: int) -> Any:
    """A `gluon_box` of [E, N, K], over all experts' lines as they lie: boxes [columns, reduction]
    of [E * N, K], or [reduction, columns] of [E * K, N] where that is contiguous."""
    return _weight_box(weight.data_ptr(), Lying.of(weight), columns, reduction)


@functools.lru_cache(4096)
def _weight_box(pointer: int, weight: Lying, columns: int, reduction: int) -> Any:
    block = (reduction, columns) if weight.turned else (columns, reduction)
    lines = weight.lines()
    return None if lines is None else gluon_box(pointer, weight.dtype, lines, block)


FAR = 2**30
"""More than any tensor has rows; see `rows_box`."""


@functools.lru_cache(4096)
def rows_box(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    block: tuple[int, int],
    stride: int = 0,
) -> Any:
    """A `gluon_box` of [rows, columns], rows `stride` elements apart (0: contiguous), for boxes
    that may end at any row.

    It has four dimensions. Element (FAR, end, FAR - end + row, column) is (row, column), since a
    step in the second or third is a row forwards, one in the first a row backwards, and addresses
    are counted modulo 2^64 bytes. A box that begins there leaves the third dimension, of size FAR,
    where it would pass row `end`. `triton.tools.ragged_tma` does the same. (A descriptor that
    begins FAR rows earlier would need three. With one that began outside the tensor, an H200 read
    illegal addresses where columns of a box were outside, too.)
    """
    rows, columns = shape
    row = stride or columns
    if not 0 < rows <= FAR:
        return None
    sizes = (2**31 - 1, 2**31 - 1, FAR, columns)
    return gluon_box(pointer, dtype, sizes, (1, 1, *block), (2**34 - row, row, row, 1))


def parts_box(rows: Tensor, tail: int, part: int = 64) -> tuple[Any, Any]:
    """A `rows_box` of 64 columns of [rows, columns], for the rows of a `part` of a tile, and one
    for the tile's tail, or None where tiles have none."""
    pointer, dtype, shape, stride = rows.data_ptr(), rows.dtype, rows.shape, rows.stride(0)
    each = rows_box(pointer, dtype, shape, (part, 64), stride)
    return each, rows_box(pointer, dtype, shape, (tail, 64), stride) if tail else None


@dataclass(frozen=True)
class _Memory:
    """Address and dtype of a tensor, for a descriptor that keeps nothing alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def _described(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> Any:
    found = compat.tensor_descriptor()(
        _Memory(pointer, dtype), list(shape), list(strides), list(block)
    )
    return _of_kind(found, dtype, block)


def _of_kind(descriptor: Any, dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The descriptor, with what a kernel is compiled for and room for what `Launch` makes of it."""
    descriptor.kind, descriptor.encoded = _kind(dtype, block), {}
    return descriptor


@functools.cache
def _kind(dtype: torch.dtype, block: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """One object for each."""
    return dtype, block
