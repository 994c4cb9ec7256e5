"""select_experts(): fused router scores, top-k choice and routing weights, with gradient."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import kernels, reference
from ..kernels import on_device, op, require
from . import differentiable

SCORES = ("softmax", "sigmoid")


def _fake(router_logits, given, bias, top_k, dtype, *_):
    shape = (router_logits.shape[0], top_k)
    index = router_logits.new_empty(shape, dtype=torch.int64)
    return index, router_logits.new_empty(shape, dtype=dtype)


@op(_fake)
def _select_experts(
    router_logits: Tensor,
    given: Tensor | None,
    bias: Tensor | None,
    top_k: int,
    dtype: torch.dtype,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    eps: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
    group_fill: float,
) -> tuple[Tensor, Tensor]:
    if router_logits.stride(-1) != 1:
        router_logits = router_logits.contiguous()
    with on_device(router_logits.device):
        return kernels.topk.topk(
            router_logits, top_k, sigmoid=sigmoid, renormalize=renormalize, dtype=dtype,
            scale=scale, eps=eps, bias=None if bias is None else bias.contiguous(),
            num_groups=num_groups, top_groups=top_groups,
            group_best=group_best, group_fill=group_fill,
            given=None if given is None else given.contiguous(),
        )  # fmt: skip


@op(lambda router_logits, *_: router_logits.new_empty(router_logits.shape))
def _select_experts_backward(
    router_logits: Tensor,
    index: Tensor,
    d_weights: Tensor,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    eps: float,
) -> Tensor:
    if router_logits.stride(-1) != 1:
        router_logits = router_logits.contiguous()
    with on_device(router_logits.device):
        return kernels.topk.topk_backward(
            router_logits, index, d_weights.contiguous(),
            sigmoid=sigmoid, renormalize=renormalize, scale=scale, eps=eps,
        )  # fmt: skip


def _fake_sigmoid(router_logits, top_k):
    index, weights = _fake(router_logits, None, None, top_k, torch.float32)
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


def _weights(
    scores: tuple[bool, bool, float, float], dtype: torch.dtype, index: Tensor, logits: Tensor
) -> Tensor:
    """The chosen experts' weights in plain PyTorch."""
    sigmoid, renormalize, scale, eps = scores
    return reference.expert_weights(
        logits, index, score=SCORES[sigmoid], renormalize=renormalize, scale=scale, eps=eps
    ).to(dtype)


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, router_logits, given, bias, chosen, scores, groups):
        index, weights = _select_experts(router_logits, given, bias, *chosen, *scores, *groups)
        ctx.save_for_backward(router_logits, index)
        ctx.scores = scores
        ctx.mark_non_differentiable(index)
        return index, weights

    @staticmethod
    def backward(ctx, _, d_weights):
        logits, index = ctx.saved_tensors
        if differentiable.wanted(d_weights):
            twin = functools.partial(_weights, ctx.scores, d_weights.dtype, index)
            (d_logits,) = differentiable.gradients(twin, [logits], [True], d_weights)
        else:
            d_logits = _select_experts_backward(logits, index, d_weights, *ctx.scores)
        return d_logits, None, None, None, None, None


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
    """Chooses `top_k` experts a token and their routing weights, as Hugging Face's routers do.

    Args:
        router_logits: [T, E], bfloat16, float16 or float32.
        top_k: K, 1 to E.
        score: "softmax" over all experts (Qwen3-MoE) or "sigmoid" of each (Llama4), in float32.
        renormalize: divide the chosen scores by their sum (`norm_topk_prob`). Of a softmax, that
            is the softmax of the chosen logits (gpt-oss).
        dtype: of the weights; the logits' by default.
        scale: the weights are multiplied by it last (`routed_scaling_factor`).
        eps: added to the sum of renormalised sigmoids.
        bias: [E], added to the scores for the choice alone (`e_score_correction_bias`).
        num_groups: of E / num_groups neighbours each (`n_group`), of which the choice is limited
            to the `top_groups` best (`topk_group`).
        group_best: a group is as good as its best expert's score and bias (1) or the sum of its
            two best (2).
        group_fill: what score and bias of an expert become outside of those groups: with 0.0 it
            can win against negative ones.
        given: [T, K], int64: the experts of tokens whose choice is made already, ids 0 to E - 1. A
            row that begins with -1 is chosen as ever.

    A TorchFunctionMode sees the call, and may answer it.

    Returns:
        (top_k_index [T, K] int64, best first, equals to the lowest id;
        top_k_weights [T, K]). Differentiable in the logits through the weights.

    Raises:
        ValueError: logits not [T, E], top_k out of 1 .. E, an unknown score, a bias not [E], groups
            that do not divide the experts or are too small, eps without sigmoids, `given` not
            [T, K].
        TypeError: logits of another dtype, `given` not int64.
        RuntimeError: the kernels cannot run on the logits' device.
    """
    if not torch.compiler.is_compiling() and has_torch_function_unary(router_logits):
        return handle_torch_function(
            select_experts, (router_logits,), router_logits, top_k, score=score,
            renormalize=renormalize, dtype=dtype, scale=scale, eps=eps, bias=bias,
            num_groups=num_groups, top_groups=top_groups, group_best=group_best,
            group_fill=group_fill, given=given,
        )  # fmt: skip
    if router_logits.dim() != 2:
        raise ValueError(
            f"router_logits must be [tokens, experts], found shape {tuple(router_logits.shape)}."
        )
    experts = router_logits.shape[1]
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"top_k is {top_k} and there are {experts} experts: top_k must be 1 to {experts}."
        )
    if score not in SCORES:
        raise ValueError(f"score is {score!r}, use one of {', '.join(map(repr, SCORES))}.")
    if router_logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"router_logits is {router_logits.dtype}, use bfloat16, float16 or float32."
        )
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias must be [{experts}], found shape {tuple(bias.shape)}.")
    if (num_groups, top_groups) != (1, 1):
        _check_groups(experts, num_groups, top_groups, group_best)
    if eps and score != "sigmoid":
        raise ValueError(f"eps is {eps}: only sigmoids need it, leave it 0.0 with {score!r}.")
    if given is not None:
        _check_given(given, (router_logits.shape[0], top_k))
    require(router_logits.device)
    # few arguments: autograd looks at each
    chosen = top_k, dtype or router_logits.dtype
    scores = score == "sigmoid", renormalize, float(scale), eps
    groups = num_groups, top_groups, group_best, group_fill
    if differentiable.why_not_kernels():
        return reference.select_experts(
            router_logits, top_k, score=score, renormalize=renormalize, dtype=dtype, scale=scale,
            eps=eps, bias=bias, num_groups=num_groups, top_groups=top_groups,
            group_best=group_best, group_fill=group_fill, given=given,
        )  # fmt: skip
    if torch.is_grad_enabled() and router_logits.requires_grad:
        return _SelectExperts.apply(router_logits, given, bias, chosen, scores, groups)
    return _select_experts(router_logits, given, bias, *chosen, *scores, *groups)


def _check_given(given: Tensor, shape: tuple[int, int]) -> None:
    if given.shape != shape:
        raise ValueError(f"given must be {list(shape)}, found shape {tuple(given.shape)}.")
    if given.dtype != torch.int64:
        raise TypeError(f"given is {given.dtype}, pass torch.int64.")


def _check_groups(experts: int, num_groups: int, top_groups: int, group_best: int) -> None:
    if num_groups < 1 or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"num_groups is {num_groups} and top_groups {top_groups}: of {experts} experts, groups "
            f"must be an equal share and top_groups 1 to num_groups."
        )
    if group_best not in (1, 2) or experts // num_groups < group_best:
        raise ValueError(
            f"group_best is {group_best} and a group has {experts // num_groups} experts: use 1, "
            "or 2 with groups of two or more."
        )
