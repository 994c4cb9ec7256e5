"""Keeping experts evenly busy in training: an auxiliary loss, and DeepSeek-V3's bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
def move_bias(block: nn.Module, counts: Tensor, speed: float) -> int:
    """Moves the `e_score_correction_bias` of a block's routers by `speed`, up for experts below the
    mean of the counts [E] and down above it (DeepSeek-V3, arXiv:2412.19437, 2.1.2).

    Returns:
        How many there are.
    """
    found = (getattr(module, BIAS, None) for module in block.modules())
    biases = {id(bias): bias for bias in found if isinstance(bias, Tensor)}.values()
    counts = counts.double()
    for bias in biases:
        bias += speed * (counts.mean() - counts).sign().to(bias)
    return len(biases)
