"""Starts the products of `hopper/pairs.py`: weights in 4 bits, bfloat16 rows, few an expert."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..activation import parse
from ..formats.packed import Packed
from ..order import ExpertOrder
from . import chips
from .activate import Activated, gate_of
from .boxes import gluon_box
from .in_steps import GROUP, STEP, in_steps
from .launch import Launch, cdiv
from .packed import pair_unit, pairs_of_codes
from .widen import readable

ROWS = 64
"""Rows of the weight in one of a tile's two blocks."""
STAGES = 2
"""Steps that a warpgroup's ring holds; docs/kernels.md has the sweep."""


def _walkers(weight: Packed, order: ExpertOrder) -> int:
    """Warpgroups of a program. With scaled sums of 32 rows, four would spill."""
    return 3 if order.block_m == 32 and weight.format != "mxfp4" else 4


def supported(weight: Packed, order: ExpertOrder) -> bool:
    """Whether products of weights that `packed_products` multiplies are computed here instead."""
    k = weight.shape[2]
    if weight.zeros is not None or order.block_m not in (16, 32):
        return False
    if weight.format == "mxfp4":
        return k % STEP == 0 and not weight.scales.data_ptr() % 4  # four scales are a word
    return weight.group in (GROUP, 2 * GROUP)


@functools.lru_cache(1024)
def _gemm(**sizes: Any) -> Launch:
    from .hopper.pairs import gemm_pairs_kernel
    from .hopper.pairs_ring import Plan

    return Launch(gemm_pairs_kernel, PLAN=Plan(**sizes), num_warps=4)


@functools.lru_cache(1024)
def _gate_up(activation: str, **sizes: Any) -> Launch:
    from .hopper.pairs import gate_up_pairs_kernel
    from .hopper.pairs_ring import Plan

    gate = gate_of(activation, ptx=True)
    return Launch(gate_up_pairs_kernel, PLAN=Plan(**sizes), GATE=gate, num_warps=4)


def _sizes(weight: Packed, order: ExpertOrder, second: int, columns: int) -> dict[str, Any]:
    """Sizes that both kernels' plans share; in blocks, tiles cover so many `columns`."""
    _, n, k = weight.shape
    return {
        "n": n, "k": k, "group": weight.group, "second": second, "bm": order.block_m,
        "steps": cdiv(k, STEP), "stages": STAGES, "unit": pair_unit(weight.format),
        "walkers": _walkers(weight, order), "whole": n == columns,
    }  # fmt: skip


def _operands(x: Tensor, weight: Packed, order: ExpertOrder, second: int) -> tuple[Any, ...]:
    """x, in steps and in expert order, and a weight as the kernels take them."""
    (experts, n, k), codes = weight.shape, weight.codes
    steps, block = x.shape[1] // GROUP, (2, order.block_m, GROUP)
    x_box = gluon_box(x.data_ptr(), x.dtype, (steps, len(x), GROUP), block, (GROUP, x.shape[1], 1))
    shape, block = (1, experts * n, k // 8), (1, 2 * ROWS, 16)
    if second != ROWS:
        shape, block = (2 * experts, n // 2, k // 8), (2, ROWS, 16)
    words = gluon_box(codes.data_ptr(), torch.int32, shape, block)
    return x_box, words, readable(weight.scales), pairs_of_codes(weight)


def gemm(
    x: Tensor, weight: Packed, order: ExpertOrder, out: Tensor, bias: Tensor | None, ordered: bool
) -> None:
    """grouped_gemm of rows in expert order; arguments as of `packed_products.gemm`."""
    columns = cdiv(weight.shape[1], 2 * ROWS)
    start = _gemm(**_sizes(weight, order, ROWS, 2 * ROWS * columns))
    x = x if ordered else in_steps(x, "words")
    start(
        chips.programs(x.device, order.tile_expert.numel() * columns),
        *_operands(x, weight, order, ROWS), bias, out,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip


def gate_up(x: Tensor, weight: Packed, order: ExpertOrder, result: Activated) -> None:
    """gate_up of x [T, K]; arguments as of `packed_products.gate_up`."""
    width, inner = result.act.shape[1], weight.shape[1] // 2
    columns = cdiv(width, ROWS)
    start = _gate_up(
        activation=result.activation, **_sizes(weight, order, inner, 2 * ROWS * columns),
        weight_on_input=result.weight_on_input, save_pre=result.pre.numel() > 0,
        act_in_steps=result.in_steps, act_width=width,
    )  # fmt: skip
    x = in_steps(x, "words", gather=order)
    start(
        chips.programs(x.device, order.tile_expert.numel() * columns),
        *_operands(x, weight, order, inner),
        result.bias, result.slot_weight, result.act, result.pre,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip


def gates(activation: str) -> bool:
    """Whether a gate and its up lie as gate_up expects them: one behind the other."""
    return parse(activation).form == "concatenated"
