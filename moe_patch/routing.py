"""select_experts(): fused router scores, top-k choice and routing weights, with gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .kernels import on_device, op, require

SCORES = ("softmax", "sigmoid")


def _fake(router_logits, top_k, sigmoid, renormalize, dtype):
    shape = (router_logits.shape[0], top_k)
    index = router_logits.new_empty(shape, dtype=torch.int64)
    return index, router_logits.new_empty(shape, dtype=dtype)


@op(_fake)
def _select_experts(
    router_logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if router_logits.stride(-1) != 1:
        router_logits = router_logits.contiguous()
    with on_device(router_logits.device):
        return kernels.topk.topk(
            router_logits, top_k, sigmoid=sigmoid, renormalize=renormalize, dtype=dtype
        )


@op(lambda router_logits, *_: router_logits.new_empty(router_logits.shape))
def _select_experts_backward(
    router_logits: Tensor, index: Tensor, d_weights: Tensor, sigmoid: bool, renormalize: bool
) -> Tensor:
    if router_logits.stride(-1) != 1:
        router_logits = router_logits.contiguous()
    with on_device(router_logits.device):
        return kernels.topk.topk_backward(
            router_logits, index, d_weights.contiguous(), sigmoid=sigmoid, renormalize=renormalize
        )


def _fake_sigmoid(router_logits, top_k):
    index, weights = _fake(router_logits, top_k, True, False, torch.float32)
    return router_logits.new_empty(router_logits.shape), index, weights


@op(_fake_sigmoid)
def sigmoid_scores(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Without gradient: (scores [T, E], the chosen experts' sigmoids in the dtype of the logits and
    zero for the others; index [T, K]; weights [T, K] float32). See `select_experts`."""
    if router_logits.stride(-1) != 1:
        router_logits = router_logits.contiguous()
    scores = torch.empty_like(router_logits, memory_format=torch.contiguous_format)
    with on_device(router_logits.device):
        options = {"sigmoid": True, "renormalize": False, "dtype": torch.float32}
        return scores, *kernels.topk.topk(router_logits, top_k, dense=scores, **options)


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, router_logits, top_k, sigmoid, renormalize, dtype):
        index, weights = _select_experts(router_logits, top_k, sigmoid, renormalize, dtype)
        ctx.save_for_backward(router_logits, index)
        ctx.options = (sigmoid, renormalize)
        ctx.mark_non_differentiable(index)
        return index, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _, d_weights):
        d_logits = _select_experts_backward(*ctx.saved_tensors, d_weights, *ctx.options)
        return d_logits, None, None, None, None


def select_experts(
    router_logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses `top_k` experts a token and their routing weights, as Hugging Face's routers do.

    Args:
        router_logits: [T, E], bfloat16, float16 or float32.
        top_k: K, 1 to E.
        score: "softmax" over all experts (Qwen3-MoE) or "sigmoid" of each (Llama4), in float32.
        renormalize: divide the chosen scores by their sum (`norm_topk_prob`).
        dtype: of the weights; the logits' by default.

    Returns:
        (top_k_index [T, K] int64, best first, equal logits to the lowest id;
        top_k_weights [T, K]). Differentiable in the logits through the weights.

    Raises:
        ValueError: logits not [T, E], top_k out of 1 .. E, an unknown score.
        TypeError: logits of another dtype.
        RuntimeError: the kernels cannot run on the logits' device.
    """
    if router_logits.dim() != 2:
        raise ValueError(
            f"router_logits must be [tokens, experts], found shape {tuple(router_logits.shape)}."
        )
    if not 1 <= top_k <= router_logits.shape[1]:
        raise ValueError(
            f"top_k is {top_k} and there are {router_logits.shape[1]} experts: top_k must be "
            f"1 to {router_logits.shape[1]}."
        )
    if score not in SCORES:
        raise ValueError(f"score is {score!r}, use one of {', '.join(map(repr, SCORES))}.")
    if router_logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"router_logits is {router_logits.dtype}, use bfloat16, float16 or float32."
        )
    require(router_logits.device)
    options = (top_k, score == "sigmoid", renormalize, dtype or router_logits.dtype)
    if torch.is_grad_enabled() and router_logits.requires_grad:
        return _SelectExperts.apply(router_logits, *options)
    return _select_experts(router_logits, *options)
