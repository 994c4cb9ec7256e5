"""Starts the products of `hopper/packed_roles.py`: weights in 4 bits, bfloat16 rows, many an
expert."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..activation import parse
from ..formats.packed import Packed
from ..order import ExpertOrder
from . import chips, packed, packed_weight
from .activate import Activated, gate_of
from .boxes import gluon_box, rows_box
from .in_steps import LESS, STEP, Steps, in_steps
from .launch import Launch, cdiv
from .low_rank import LowRank

ROWS = 64
"""Rows of the weight that a warpgroup has of one of a tile's two blocks."""


def supported(weight: Packed, order: ExpertOrder) -> bool:
    """Whether products of weights that `packed_products` multiplies are computed here."""
    return order.block_m in (64, 128) and weight.shape[1] % 32 == 0


def takes(update: LowRank) -> bool:
    """Whether they are with this update, too: `multiply_a` has written its `side`."""
    return update.rank % 8 == 0


def steps_of(weight: Packed) -> Steps:
    """In which order of steps a product reads its rows."""
    return "bytes" if _in_bytes(weight) else "halves"


def _in_bytes(weight: Packed) -> bool:
    """Whether codes are looked up by bytes, in shared memory."""
    return weight.format not in packed.COMPUTED


@functools.lru_cache(1024)
def _gemm(**sizes: Any) -> Launch:
    from .hopper.packed_ring import Plan
    from .hopper.packed_roles import gemm_packed_roles_kernel

    return Launch(gemm_packed_roles_kernel, PLAN=Plan(**sizes), num_warps=4)


@functools.lru_cache(1024)
def _gate_up(activation: str, **sizes: Any) -> Launch:
    from .hopper.packed_ring import Plan
    from .hopper.packed_roles import gate_up_packed_roles_kernel

    gate = gate_of(activation, ptx=True)
    return Launch(gate_up_packed_roles_kernel, PLAN=Plan(**sizes), GATE=gate, num_warps=4)


def _sizes(
    weight: Packed, order: ExpertOrder, columns: int, update: LowRank | None
) -> dict[str, Any]:
    """Fields of both kernels' plans; `columns` of the weight are covered by tiles."""
    found = packed_weight.sizes(weight, columns)
    return {
        **found, "stride_x": found["steps"] * STEP, "group_m": 16, "listed": order.block_m,
        "pairs": _in_bytes(weight),
        "rank": 128 * cdiv(update.rank, 64) if update else 0,
        "stages": 3 if _in_bytes(weight) else 4,  # of 48 KB; the table takes 32
    }  # fmt: skip


def _operand(weight: Packed) -> tuple[Tensor | None, ...]:
    return packed_weight.operand(weight, _in_bytes(weight))


def _tiles(order: ExpertOrder) -> tuple[Tensor, ...]:
    return (
        order.taken, order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row,
        order.num_tiles,
    )  # fmt: skip


def gemm(
    x: Tensor, weight: Packed, order: ExpertOrder, out: Tensor, bias: Tensor | None, ordered: bool,
    update: LowRank | None = None,
) -> None:  # fmt: skip
    """grouped_gemm of rows in expert order; arguments as of `packed_products.gemm`."""
    experts, n, k = weight.shape
    columns = cdiv(n, 4 * ROWS)
    start = _gemm(**_sizes(weight, order, 4 * ROWS * columns, update))
    x = x if ordered else in_steps(x, steps_of(weight))
    words = gluon_box(weight.codes.data_ptr(), torch.int32, (experts, n, k // 8), (1, ROWS, 16))
    side, b, _, kept = _update_boxes(update, weight, "", False)
    start(
        chips.programs(x.device, order.tile_expert.numel() * columns),
        _rows_box(x, 2 * ROWS), words, *_operand(weight), side, b, bias,
        _rows_box(out, ROWS), *_tiles(order),
    )  # fmt: skip


def gate_up(
    x: Tensor, weight: Packed, order: ExpertOrder, result: Activated, update: LowRank | None = None
) -> None:
    """gate_up of x [T, K]; arguments as of `packed_products.gate_up`."""
    columns = cdiv(result.act.shape[1], 2 * ROWS)
    form = parse(result.activation).form
    start = _gate_up(
        **_sizes(weight, order, 4 * ROWS * columns, update),
        activation=result.activation, form=form, top_k=order.row_to_slot.numel() // len(x),
        weight_on_input=result.weight_on_input, save_pre=result.pre.numel() > 0,
        act_in_steps=result.in_steps, copied=True,
    )  # fmt: skip
    side, *b, kept = _update_boxes(update, weight, form, result.in_steps)
    start(
        chips.programs(x.device, order.tile_expert.numel() * columns),
        in_steps(x, steps_of(weight)),
        *_blocks(weight.codes, form, result.in_steps), *_operand(weight),
        side, *b,
        result.bias, result.slot_weight, _rows_box(result.act, ROWS), result.pre, *_tiles(order),
    )  # fmt: skip


def _rows_box(rows: Tensor, height: int) -> Any:
    return rows_box(rows.data_ptr(), rows.dtype, tuple(rows.shape), (height, 64))


def _blocks(lines: Tensor, form: str, in_steps: bool) -> tuple[Any, Any]:
    """Boxes of gates and of ups, as `bring_words` in `hopper/packed_ring.py` has them: of codes
    [E, N, K / 2], as words, or of B [E, N, R]."""
    kind = torch.int32 if lines.dtype == torch.uint8 else lines.dtype
    size, width = kind.itemsize, lines.shape[2] * lines.itemsize // kind.itemsize
    experts, n = lines.shape[:2]
    inner, across = n // 2, 16 if kind == torch.int32 else 64
    row, up = (2 * width, width) if form == "interleaved" else (width, inner * width)
    shape, block, strides = (experts, inner, width), (1, ROWS, across), (n * width, row, 1)
    if in_steps:
        shape, block = (experts, inner // 16, 2, 8, width), (1, 8, 1, 8, across)
        strides = (n * width, 16 * row, 8 * row, row, 1)
    first, second = (
        gluon_box(lines.data_ptr() + size * begin, kind, shape, block, strides) for begin in (0, up)
    )
    return first, second


def _update_boxes(
    update: LowRank | None, weight: Packed, form: str, in_steps: bool
) -> tuple[Any, Any, Any, Tensor | None]:
    """(boxes of x A^T, boxes of both blocks' B, B as they have it, which has to live until the
    kernel is started), or nothing without an update."""
    if update is None:
        return None, None, None, None
    b = update.b.contiguous()
    if weight.format == "mxfp4":  # as its values, see `hopper/codes.py`
        b = b * 2.0**-LESS
    elif b.data_ptr() % 16:  # boxes are not lawful
        b = b.clone()
    if form:
        first, second = _blocks(b, form, in_steps)
    else:
        first = second = gluon_box(b.data_ptr(), b.dtype, tuple(b.shape), (1, ROWS, 64))
    return _rows_box(update.side, 2 * ROWS), first, second, b
