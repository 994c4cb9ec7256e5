"""Plain-PyTorch twins of every op, same names and signatures, any dtype and device.

They define what the kernels compute. In float64 they are the truth that the parity law
(docs/parity.md) compares with. T tokens, H hidden size, I intermediate size, E experts,
K choices a token, S = T*K slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import ACTS, Activation, parse
from .formats import packed
from .formats.packed import Packed
from .order import ExpertOrder, max_tiles


def expert_weights(
    router_logits: Tensor,
    top_k_index: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:
    """Routing weights [T, K] of the experts already chosen, in float32 (float64 for float64)."""
    weights = _scores(router_logits, score).gather(1, top_k_index)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scale


def _scores(router_logits: Tensor, score: str) -> Tensor:
    logits = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def group_scores(choice: Tensor, num_groups: int, group_best: int) -> Tensor:
    """[T, E] of experts -> [T, G]: the sum of each group's best."""
    best = choice.unflatten(1, (num_groups, -1)).sort(dim=-1, descending=True).values
    return best[..., :group_best].sum(-1)


def choice_scores(
    router_logits: Tensor,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    group_fill: float = float("-inf"),
) -> Tensor:
    """[T, E]: what :func:`select_experts` takes the best K of."""
    choice = router_logits
    if bias is not None or num_groups != top_groups:
        choice = _scores(router_logits, score)
        choice = choice if bias is None else choice + bias
    if num_groups == top_groups:
        return choice
    groups = group_scores(choice, num_groups, group_best)
    keep = groups.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    mask = torch.ones_like(groups, dtype=torch.bool).scatter(1, keep, False)
    return choice.unflatten(1, (num_groups, -1)).masked_fill(mask[..., None], group_fill).flatten(1)


def select_experts(
    router_logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    group_fill: float = float("-inf"),
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`moe_patch.ops.routing.select_experts`; ties go to the lowest expert id."""
    choice = choice_scores(
        router_logits, score=score, bias=bias, num_groups=num_groups, top_groups=top_groups,
        group_best=group_best, group_fill=group_fill,
    )  # fmt: skip
    top_k_index = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if given is not None:
        top_k_index = torch.where(given[:, :1] < 0, top_k_index, given)
    weights = expert_weights(
        router_logits, top_k_index, score=score, renormalize=renormalize, scale=scale, eps=eps
    )
    return top_k_index, weights.to(dtype or router_logits.dtype)


def sigmoid_scores(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`moe_patch.ops.routing.sigmoid_scores`."""
    index, weights = select_experts(router_logits, top_k, score="sigmoid", dtype=torch.float32)
    scores = torch.zeros_like(router_logits).scatter(1, index, weights.to(router_logits.dtype))
    return scores.detach(), index, weights.detach()


def sort_tokens(top_k_index: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """Twin of :func:`moe_patch.kernels.sort_tokens.sort_tokens`."""
    device = top_k_index.device
    experts = top_k_index.reshape(-1)
    experts = torch.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    row_to_slot = experts.sort(stable=True).indices
    slot_to_row = torch.empty_like(row_to_slot)
    slot_to_row[row_to_slot] = torch.arange(experts.numel(), device=device)
    slot_to_row[experts == num_experts] = -1
    counts = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    expert_offsets = F.pad(counts.cumsum(0), (1, 0))
    tiles = torch.full((max_tiles(experts.numel(), num_experts, block_m),), -1, device=device)
    tile_row = tiles.clone()
    first = 0
    for expert, (begin, end) in enumerate(zip(expert_offsets[:-1], expert_offsets[1:])):
        rows = torch.arange(int(begin), int(end), block_m, device=device)
        tiles[first : first + len(rows)], tile_row[first : first + len(rows)] = expert, rows
        first += len(rows)
    return ExpertOrder(
        expert_offsets=expert_offsets.int(),
        row_to_slot=row_to_slot.int(),
        slot_to_row=slot_to_row.int(),
        tile_expert=tiles.int(),
        tile_row=tile_row.int(),
        num_tiles=torch.tensor([first], dtype=torch.int32, device=device),
        **_large_first(counts),
        block_m=block_m,
    )


def _large_first(counts: Tensor) -> dict[str, Tensor]:
    """large_first, num_large and taken of an ExpertOrder, of each expert's number of rows."""
    large = counts > 2 * ((counts.sum() + len(counts) - 1) // len(counts))
    return {
        "large_first": (~large).int().sort(stable=True).indices.int(),
        "num_large": large.sum().int()[None],
        "taken": counts.new_zeros(1, dtype=torch.int32),
    }


def group_tiles(offsets: Tensor, num_rows: int, block_m: int) -> ExpertOrder:
    """Twin of :func:`moe_patch.kernels.groups.group_tiles`."""
    offsets = offsets.clamp(0, num_rows).cummax(0).values.int()
    begin, end = offsets[:-1], offsets[1:]
    rows = torch.arange(num_rows, dtype=torch.int32, device=offsets.device)
    tiles = torch.arange(
        max_tiles(num_rows, len(begin), block_m), dtype=torch.int32, device=offsets.device
    )
    counts = (end - begin + block_m - 1) // block_m
    last = counts.cumsum(0, dtype=torch.int32)  # past an expert's tiles
    expert = torch.searchsorted(last, tiles, right=True, out_int32=True)
    expert = expert.clamp(max=len(begin) - 1).long()
    return ExpertOrder(
        expert_offsets=offsets,
        row_to_slot=rows,
        slot_to_row=rows.masked_fill((rows < offsets[0]) | (rows >= offsets[-1]), -1),
        tile_expert=expert.int(),
        tile_row=begin[expert] + (tiles - (last - counts)[expert]) * block_m,
        num_tiles=last[-1:],
        **_large_first(end - begin),
        block_m=block_m,
    )


def glu(gate_up: Tensor, activation: Activation | str = "silu") -> Tensor:
    """Gated activation of [..., 2I] -> [..., I] (Shazeer 2020, arXiv:2002.05202), or ungated."""
    found = parse(str(activation))
    up: Any
    if found.form == "ungated":
        gate, up = gate_up, 1.0
    elif found.form == "interleaved":
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if found.limit is not None:
        gate, up = gate.clamp(max=found.limit), up.clamp(-found.limit, found.limit)
    if found.offset:
        up = up + found.offset
    return ACTS[found.act].twin(gate, found.alpha) * up


def combine(rows: Tensor, slot_to_row: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    """Twin of :func:`moe_patch.kernels.combine.combine`: weighted sum of each token's K rows."""
    picked = rows[slot_to_row.clamp(min=0).long()].to(
        torch.promote_types(rows.dtype, torch.float32)
    )
    if weights is not None:
        picked = picked * weights.reshape(-1, 1)
    picked = picked.masked_fill((slot_to_row < 0)[:, None], 0)
    return picked.view(-1, top_k, rows.shape[1]).sum(1).to(rows.dtype)


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder | None = None,
    *,
    m_sizes: Tensor | None = None,
    offsets: Tensor | None = None,
    gather: bool = False,
    scatter: bool = False,
    weight_scale_inv: Tensor | None = None,
) -> Tensor:
    """Twin of :func:`moe_patch.ops.grouped.grouped_gemm`; x is not quantised."""
    if weight_scale_inv is not None:
        weight = dequantize(weight, weight_scale_inv, x.dtype)
    if m_sizes is not None:
        offsets = F.pad(m_sizes.clamp(min=0).cumsum(0), (1, 0))
    if order is None:
        slots, ends = torch.arange(len(x), device=x.device), offsets.cummax(0).values
        ends = ends.clamp(0, len(x)).tolist()
    else:
        slots, ends = order.row_to_slot.long(), order.expert_offsets.tolist()
    rows = x[slots * x.shape[0] // max(len(slots), 1)] if gather else x
    out = rows.new_zeros(len(slots), weight.shape[1])
    pieces = [rows[begin:end] @ w.T for w, begin, end in zip(weight.unbind(), ends, ends[1:])]
    valid = torch.cat(pieces) if pieces else out[:0]
    place = torch.arange(ends[0], ends[-1], device=x.device)
    return out.index_copy(0, slots[place] if scatter else place, valid)


def add_bias(
    rows: Tensor, bias: Tensor, top_k_index: Tensor, order: ExpertOrder, *, scattered: bool = False
) -> Tensor:
    """Twin of :func:`moe_patch.ops.grouped.add_bias`; dropped slots get no bias."""
    expert = top_k_index.reshape(-1)
    expert = torch.where((expert < 0) | (expert >= len(bias)), len(bias), expert)
    expert = expert if scattered else expert[order.row_to_slot.long()]
    return rows + F.pad(bias, (0, 0, 0, 1))[expert]


def bias_gradient(
    d_rows: Tensor, order: list[Tensor], num_experts: int, block_m: int, scattered: bool
) -> Tensor:
    """Twin of the operator of that name in ops/grouped.py: sums [E, N] of each expert's rows."""
    expert_offsets, row_to_slot, *_ = order
    row = torch.arange(len(d_rows), dtype=expert_offsets.dtype, device=d_rows.device)
    expert = torch.searchsorted(expert_offsets[1:], row, right=True)  # E: dropped
    rows = d_rows[row_to_slot.long()] if scattered else d_rows
    return rows.new_zeros(num_experts + 1, rows.shape[1]).index_add(0, expert, rows)[:-1]


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """FP8 [..., K] times the scales of its rows [..., ceil(K / 128)], or [..., N, K] times those of
    its blocks [..., ceil(N / 128), ceil(K / 128)], rounded to `dtype`."""
    scale = scale.to(torch.promote_types(dtype, torch.float32))
    scale = scale.repeat_interleave(128, -1)[..., : x.shape[-1]]
    if scale.shape != x.shape:
        scale = scale.repeat_interleave(128, -2)[..., : x.shape[-2], :]
    return (x.to(scale.dtype) * scale).to(dtype)


def _plain(weight: Tensor | Packed, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a weight stands for; in `dtype`, if it is not plain."""
    if isinstance(weight, Packed):
        return packed.dequantize(weight, dtype)
    return weight if scale is None else dequantize(weight, scale, dtype)


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor | Packed,
    down_proj: Tensor | Packed,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    weight_on: str = "output",
    activation: Activation | str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_low_rank: tuple[Tensor, Tensor] | None = None,
    down_low_rank: tuple[Tensor, Tensor] | None = None,
    gate_up_scale_inv: Tensor | None = None,
    down_scale_inv: Tensor | None = None,
) -> Tensor:
    """Twin of :func:`moe_patch.ops.experts.fused_experts`: a loop over experts, in their dtype
    (FP8 and 4 bits: in that of hidden_states, where dequantised weights are rounded to it)."""
    dtype = hidden_states.dtype
    gate_up_proj = _plain(gate_up_proj, gate_up_scale_inv, dtype)
    down_proj = _plain(down_proj, down_scale_inv, dtype)
    if gate_up_low_rank:
        gate_up_proj = gate_up_proj + gate_up_low_rank[1] @ gate_up_low_rank[0]
    if down_low_rank:
        down_proj = down_proj + down_low_rank[1] @ down_low_rank[0]
    x = hidden_states.to(gate_up_proj.dtype)
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    # unbound at once: the gradient of an index is as large as all experts
    for expert, (gate_up, down) in enumerate(zip(gate_up_proj.unbind(), down_proj.unbind())):
        token, choice = torch.where(top_k_index == expert)
        weight = top_k_weights[token, choice, None].to(out.dtype)
        rows = x[token]
        if weight_on == "input":
            rows = (rows * weight).to(x.dtype)
        rows = rows @ gate_up.T
        rows = rows if gate_up_bias is None else rows + gate_up_bias[expert]
        rows = glu(rows, activation) @ down.T
        rows = rows if down_bias is None else rows + down_bias[expert]
        out = out.index_add(
            0, token, rows * weight if weight_on == "output" else rows.to(out.dtype)
        )
    return out.to(hidden_states.dtype)


def quantize(x: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Twin of :func:`moe_patch.fp8.quantize`."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = _scale(blocks.abs().amax(-1), ue8m0)
    q = (blocks / scale[..., None]).flatten(1)[:, : x.shape[1]]
    return q.to(torch.float8_e4m3fn), scale


def quantize_weight(weight: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """[E, N, K] -> (e4m3, float32 scales [E, ceil(N / 128), ceil(K / 128)]) as finegrained FP8
    checkpoints have them."""
    _, n, k = weight.shape
    blocks = F.pad(weight.float(), (0, -k % 128, 0, -n % 128))
    blocks = blocks.unflatten(2, (-1, 128)).unflatten(
        1, (-1, 128)
    )  # [E, N / 128, 128, K / 128, 128]
    scale = _scale(blocks.abs().amax((2, 4)), ue8m0)
    q = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :n, :k]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def _scale(largest: Tensor, ue8m0: bool) -> Tensor:
    scale = largest / 448
    scale = scale.masked_fill(scale == 0, 1)
    return scale.log2().ceil().exp2() if ue8m0 else scale


def fp8_grouped_gemm(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    offsets: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Twin of :func:`moe_patch.fp8.grouped_gemm`, computed and returned in `dtype`."""
    lhs = dequantize(lhs, lhs_scale, dtype)
    return grouped_gemm(lhs, rhs, offsets=offsets, weight_scale_inv=rhs_scale)


def fp8_masked_grouped_gemm(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Twin of :func:`moe_patch.fp8.masked_grouped_gemm`, computed in `dtype`."""
    out = lhs.new_empty(*lhs.shape[:2], rhs.shape[1], dtype=dtype) if out is None else out
    for g, count in enumerate(masked_m.clamp(0, lhs.shape[1]).tolist()):
        rows = dequantize(lhs[g, :count], lhs_scale[g, :count], dtype)
        out[g, :count] = (rows @ dequantize(rhs[g], rhs_scale[g], dtype).T).to(out.dtype)
    return out


def fp8_moe(
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    gate_up_scale_inv: Tensor,
    down_proj: Tensor,
    down_scale_inv: Tensor,
    *,
    correction_bias: Tensor | None = None,
    local_expert_offset: int = 0,
    top_k: int = 8,
    num_groups: int = 8,
    top_groups: int = 4,
    routed_scaling_factor: float = 2.5,
    activation: Activation | str = "silu",
    dtype: torch.dtype = torch.float32,
    requantize: bool = True,
) -> Tensor:
    """Twin of :func:`moe_patch.fp8.moe`, computed in `dtype`; `requantize` as in `fp8_experts`."""
    index, weights = select_experts(
        router_logits, top_k, score="sigmoid", renormalize=True, dtype=torch.float32,
        scale=routed_scaling_factor, eps=1e-20, bias=correction_bias,
        num_groups=num_groups, top_groups=top_groups,
    )  # fmt: skip
    return fp8_experts(
        hidden_states, gate_up_proj, down_proj, index - local_expert_offset, weights,
        gate_up_scale_inv, down_scale_inv, hidden_states_scale, activation,
        dtype=dtype, requantize=requantize,
    )  # fmt: skip


def fp8_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_scale_inv: Tensor,
    down_scale_inv: Tensor,
    hidden_states_scale: Tensor | None = None,
    activation: Activation | str = "silu",
    *,
    dtype: torch.dtype = torch.float32,
    requantize: bool = True,
) -> Tensor:
    """Twin of :func:`moe_patch.ops.fp8.experts`, computed in `dtype`; without `requantize` no
    activation is quantised here: the truth for both."""
    if hidden_states_scale is None and requantize:
        hidden_states, hidden_states_scale = quantize(hidden_states)
    x = hidden_states.to(dtype)
    if hidden_states_scale is not None:
        x = dequantize(hidden_states, hidden_states_scale, dtype)
    out = torch.zeros_like(x)
    for expert in range(len(down_proj)):
        token, choice = torch.where(top_k_index == expert)
        rows = x[token] @ dequantize(gate_up_proj[expert], gate_up_scale_inv[expert], dtype).T
        rows = glu(rows, activation)
        if requantize:
            rows = dequantize(*quantize(rows), dtype)
        rows = rows @ dequantize(down_proj[expert], down_scale_inv[expert], dtype).T
        out.index_add_(0, token, rows * top_k_weights[token, choice, None].to(dtype))
    return out
