"""Starts the products of `hopper/packed.py`: weights in 4 bits, bfloat16 rows."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..activation import parse
from ..compat import has_gluon
from ..formats.packed import Packed
from ..order import ExpertOrder
from . import chips, packed_roles, packed_weight, pairs
from .activate import Activated, gate_of
from .in_steps import STEP, Steps, in_steps
from .launch import Launch, cdiv
from .low_rank import LowRank
from .tiles import INTERPRET

ROWS = 64
"""Rows of the weight in one of a tile's two blocks."""
AHEAD = {16: 3, 32: 2}
"""Steps that are on their way, by the rows of x in a tile; docs/kernels.md has the sweep."""


@functools.lru_cache
def _runs_on(device: torch.device) -> bool:
    return not INTERPRET and chips.chip(device).wgmma and has_gluon()


def supported(
    weight: Packed, order: ExpertOrder, dtype: torch.dtype, update: LowRank | None = None
) -> bool:
    """Whether rows of `dtype` in this order are multiplied here, with that update.

    A single step is left to the other kernels: without its loop Triton does not compile a product.
    """
    if dtype != torch.bfloat16 or weight.turned or not _runs_on(weight.codes.device):
        return False
    if weight.shape[2] <= STEP:
        return False
    whole = weight.codes.is_contiguous() and weight.scales.is_contiguous()
    aligned = not weight.codes.data_ptr() % 16 and not weight.shape[2] % 32
    if not whole or not aligned:
        return False
    if packed_roles.supported(weight, order):
        return update is None or packed_roles.takes(update)
    return order.block_m in AHEAD and update is None


def steps_of(weight: Packed, order: ExpertOrder, activation: str | None = None) -> Steps:
    """In which order of steps a product that is `supported` reads its rows: with few rows an expert
    `pairs.py` computes it, if it computes its activation."""
    if pairs.supported(weight, order) and (activation is None or pairs.gates(activation)):
        return "words"
    return packed_roles.steps_of(weight) if packed_roles.supported(weight, order) else "halves"


def for_steps(update: LowRank, weight: Packed, order: ExpertOrder) -> LowRank:
    """Return the update of a product whose rows are `in_steps` already: A [E, R, width(K)]."""
    experts, rank, k = update.a.shape
    a = in_steps(update.a.reshape(experts * rank, k), steps_of(weight, order))
    return replace(update, a=a.view(experts, rank, -1))


@functools.lru_cache(1024)
def _gemm(**sizes: object) -> Launch:
    from .hopper.packed import Plan, gemm_packed_kernel

    return Launch(gemm_packed_kernel, PLAN=Plan(**sizes), num_warps=4)


@functools.lru_cache(1024)
def _gate_up(activation: str, **sizes: object) -> Launch:
    from .hopper.packed import Plan, gate_up_packed_kernel

    gate = gate_of(activation, ptx=True)
    return Launch(gate_up_packed_kernel, PLAN=Plan(**sizes), GATE=gate, num_warps=4)


def _sizes(weight: Packed, order: ExpertOrder, columns: int) -> dict[str, object]:
    """Fields of both kernels' plans; `columns` of the weight are covered by tiles."""
    height = order.block_m
    return {**packed_weight.sizes(weight, columns), "bm": height, "ahead": AHEAD[height]}


def gemm(
    x: Tensor,
    weight: Packed,
    order: ExpertOrder,
    out: Tensor,
    bias: Tensor | None,
    ordered: bool,
    update: LowRank | None = None,
) -> None:
    """grouped_gemm of rows in expert order, x [S, K], into out [S, N]. `ordered`: x is `in_steps`
    already. The `side` of an update is written before."""
    steps = steps_of(weight, order)
    if steps == "words":
        pairs.gemm(x, weight, order, out, bias, ordered)
        return
    if packed_roles.supported(weight, order):
        packed_roles.gemm(x, weight, order, out, bias, ordered, update)
        return
    columns = cdiv(weight.shape[1], 2 * ROWS)
    start = _gemm(
        **_sizes(weight, order, 2 * ROWS * columns),
        form="", top_k=0, weight_on_input=False, save_pre=False, act_in_steps=False,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * columns,),
        x if ordered else in_steps(x, steps), *packed_weight.operand(weight), bias, out,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip


def gate_up(
    x: Tensor, weight: Packed, order: ExpertOrder, result: Activated, update: LowRank | None = None
) -> None:
    """gate_up of x [T, K] into act [S, I], or, in steps, [S, width(I)], and, unless it is empty,
    pre [S, 2I]."""
    steps = steps_of(weight, order, result.activation)
    if steps == "words":
        pairs.gate_up(x, weight, order, result)
        return
    if packed_roles.supported(weight, order):
        packed_roles.gate_up(x, weight, order, result, update)
        return
    columns = cdiv(result.act.shape[1], ROWS)
    start = _gate_up(
        activation=result.activation, **_sizes(weight, order, 2 * ROWS * columns),
        form=parse(result.activation).form, top_k=order.row_to_slot.numel() // len(x),
        weight_on_input=result.weight_on_input, save_pre=result.pre.numel() > 0,
        act_in_steps=result.in_steps,
    )  # fmt: skip
    start(
        (order.tile_expert.numel() * columns,),
        in_steps(x, steps), *packed_weight.operand(weight),
        result.bias, result.slot_weight, result.act, result.pre,
        order.row_to_slot, order.expert_offsets, order.tile_expert, order.tile_row, order.num_tiles,
    )  # fmt: skip
