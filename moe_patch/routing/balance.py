"""Keeping experts evenly busy in training: an auxiliary loss, and DeepSeek-V3's bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from .load import ExpertLoad

BIAS = "e_score_correction_bias"


def switch_loss(
    router_logits: Sequence[Tensor],
    top_k_index: Sequence[Tensor],
    *,
    score: str = "softmax",
    mask: Sequence[Tensor] | None = None,
) -> Tensor:
    """The load balancing loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6), over the
    tokens of all layers together as transformers' `load_balancing_loss_func` computes it.

    E times the sum over experts of the share of tokens that chose it and its mean score; K where
    all experts get the same.

    Args:
        router_logits: [T, E] of each layer, differentiable.
        top_k_index: [T, K] of each layer.
        score: "softmax", or "sigmoid" over the sum of all experts' (DeepSeek-V3).
        mask: bool [T] of each layer, False for padding, which does not count; None: there is none.

    Raises:
        ValueError: an unknown score.
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {score!r}, use 'softmax' or 'sigmoid'.")
    place = router_logits[0].device
    logits = torch.cat([each.to(place) for each in router_logits]).float()  # [layers * T, E]
    index = torch.cat([each.to(place) for each in top_k_index])  # [layers * T, K]
    if score == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = F.normalize(logits.sigmoid(), p=1, dim=-1)
    experts, real = scores.shape[1], torch.ones_like(index[:, 0])
    if mask is not None:
        real = torch.cat([each.to(place) for each in mask]).to(real)
    chosen = torch.zeros(experts, dtype=torch.int64, device=place)
    chosen.scatter_add_(0, index.flatten(), real[:, None].expand_as(index).flatten())
    tokens = real.sum()
    mean = (scores * real[:, None]).sum(0) / tokens
    return experts * (chosen / tokens * mean).sum()


@torch.no_grad()
def update_bias(load: ExpertLoad, *, speed: float = 0.001) -> int:
    """Moves the routers' `e_score_correction_bias` by `speed`, up for experts below their layer's
    mean load and down above it (DeepSeek-V3, arXiv:2412.19437, 2.1.2), and resets the counts.

    transformers leaves this buffer as it is. Call it after the optimizer's step; under data
    parallelism after `load.all_reduce()`, so that all ranks agree.

    Returns:
        How many routers have such a bias.

    Raises:
        ValueError: no router has one, or nothing was counted.
    """
    counts = load.counts.double()
    if not int(counts.sum()):
        raise ValueError("nothing was counted: run a forward while the load is counted.")
    changed = 0
    for name, layer in zip(load.layers, counts):
        for bias in _biases(load.model.get_submodule(name)):
            bias += speed * (layer.mean() - layer).sign().to(bias)
            changed += 1
    if not changed:
        raise ValueError(
            f"no router of {type(load.model).__name__} has {BIAS}: balance it by an auxiliary loss."
        )
    load.reset()
    return changed


def _biases(block: nn.Module) -> list[Tensor]:
    found = (getattr(module, BIAS, None) for module in block.modules())
    return list({id(bias): bias for bias in found if isinstance(bias, Tensor)}.values())
