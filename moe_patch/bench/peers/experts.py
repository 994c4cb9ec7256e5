"""Operands of a block's experts, and what PyTorch makes of them, one expert after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from .compare import Case, Outputs, Part


@dataclass(frozen=True)
class Experts:
    """Inputs of a step. T tokens, H hidden size, I intermediate size, E experts, K choices."""

    x: Tensor  # [T, H]
    gate_up: Tensor  # [E, 2I, H], gate rows first
    down: Tensor  # [E, H, I]
    index: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32
    d_out: Tensor  # [T, H]
    counts: list[int]  # tokens of each expert

    @property
    def products(self) -> float:
        """Flops of one product of all rows with [H, I]: gate_up takes two, down one."""
        return 2.0 * self.index.numel() * self.down.shape[1] * self.down.shape[2]


def drawn(
    case: Case, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda"
) -> Experts:
    """Random operands of a case; only its sizes count, not where its family applies weights."""
    size, index = case.size, case.index.to(device)
    experts, hidden, inner = size.num_experts, size.hidden_size, size.intermediate_size
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        made = torch.empty(*shape, dtype=dtype, device=device)
        return made.normal_(0, std, generator=draw)

    weights = torch.rand(index.shape, generator=draw, device=device) + 0.1
    return Experts(
        normal(case.tokens, hidden), normal(experts, 2 * inner, hidden, std=size.std),
        normal(experts, hidden, inner, std=size.std), index,
        weights / weights.sum(1, keepdim=True), normal(case.tokens, hidden),
        torch.bincount(index.flatten(), minlength=experts).tolist(),
    )  # fmt: skip


def parts(experts: Experts, *, backward: bool) -> Iterator[Part]:
    """The output [T, H] and, with `backward`, the gradients of everything that a token meets."""
    dtypes = experts.x.dtype, torch.float64
    sums = [_zeros(experts, torch.promote_types(dtype, torch.float32)) for dtype in dtypes]
    for expert in range(len(experts.down)):
        token, choice = torch.where(experts.index == expert)
        both = [_expert(experts, expert, token, choice, dtype, backward) for dtype in dtypes]
        for total, found in zip(sums, both):
            total["output"].index_add_(0, token, found["output"].to(total["output"].dtype))
            if backward:
                rows = found["d_hidden_states"].to(total["output"].dtype)
                total["d_hidden_states"].index_add_(0, token, rows)
                total["d_top_k_weights"][token, choice] = found["d_top_k_weights"]
        for name in ("d_gate_up_proj", "d_down_proj") if backward else ():
            yield Part(name, expert, both[0][name], both[1][name])
    for name in ("output", "d_hidden_states", "d_top_k_weights") if backward else ("output",):
        yield Part(name, ..., sums[0][name].to(experts.x.dtype), sums[1][name])


def _zeros(experts: Experts, dtype: torch.dtype) -> Outputs:
    return {
        "output": torch.zeros_like(experts.x, dtype=dtype),
        "d_hidden_states": torch.zeros_like(experts.x, dtype=dtype),
        "d_top_k_weights": torch.zeros_like(experts.weights, dtype=dtype),
    }


def _expert(
    experts: Experts, expert: int, token: Tensor, choice: Tensor, dtype: torch.dtype,
    backward: bool,
) -> Outputs:  # fmt: skip
    """One expert's share of the output and of the gradients, computed in `dtype`."""
    weight = experts.weights.to(experts.x.dtype)[token, choice, None]  # [rows, 1]
    of = experts.x[token], experts.gate_up[expert], experts.down[expert], weight
    x, gate_up, down, weight = (each.detach().to(dtype).requires_grad_(backward) for each in of)
    out = F.linear(reference.glu(F.linear(x, gate_up)), down) * weight  # [rows, H]
    found = {"output": out.detach()}
    if backward:
        d_out = experts.d_out[token].to(dtype)
        d_x, d_gate_up, d_down, d_weight = torch.autograd.grad(
            out, (x, gate_up, down, weight), d_out
        )
        found |= {"d_hidden_states": d_x, "d_gate_up_proj": d_gate_up, "d_down_proj": d_down}
        found["d_top_k_weights"] = d_weight[:, 0].to(torch.promote_types(dtype, torch.float32))
    return found
