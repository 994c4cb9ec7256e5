"""Router scores, the top-k choice and the routing weights in one kernel, and its backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launches, power_of_two


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    logits, index, weights, dense, num_tokens, STRIDE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    DENSE: tl.constexpr, NARROW: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < num_tokens)[:, None]
    token = tl.minimum(token, num_tokens - 1)
    expert = tl.arange(0, EP)[None, :]
    at = token.to(tl.int64)[:, None] * STRIDE + expert
    x = tl.load(logits + at, mask=expert < E, other=float("-inf")).to(tl.float32)

    # one key sorts by logit, then by lowest id; int32 order equals float order after the flip
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if NARROW:  # logits of 16 bits: float32 leaves its last 13 free
        key = (bits & -0x2000) | (EP - 1 - expert)
        key = tl.where(expert < E, key, -0x80000000)
        best = tl.topk(key, KP)
        chosen = EP - 1 - (best & 0x1FFF)
        bits = best & -0x2000
        bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -0x2000
        value = bits.to(tl.float32, bitcast=True)
    else:
        key = (bits.to(tl.int64) << 32) | (EP - 1 - expert).to(tl.int64)
        key = tl.where(expert < E, key, -0x7FFFFFFFFFFFFFFF)
        best = tl.topk(key, KP)
        chosen = EP - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        bits = (best >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    choice = tl.arange(0, KP)[None, :]
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        peak = tl.max(x, axis=1)[:, None]
        score = tl.exp(value - peak)
        if not RENORMALIZE:
            score = score / tl.sum(tl.where(expert < E, tl.exp(x - peak), 0.0), axis=1)[:, None]
    if RENORMALIZE:
        score = score / tl.sum(tl.where(choice < K, score, 0.0), axis=1)[:, None]
    to = token.to(tl.int64)[:, None] * K + choice
    tl.store(index + to, chosen.to(index.dtype.element_ty), mask=inside & (choice < K))
    tl.store(weights + to, score.to(weights.dtype.element_ty), mask=inside & (choice < K))
    if DENSE:
        most = 0x7FFFFFFF if NARROW else 0x7FFFFFFFFFFFFFFF
        last = tl.min(tl.where(choice < K, best, most), axis=1)[:, None]
        score = tl.where(key >= last, 1.0 / (1.0 + tl.exp(-x)), 0.0)
        at = token.to(tl.int64)[:, None] * E + expert
        tl.store(dense + at, score.to(dense.dtype.element_ty), mask=inside & (expert < E))


@triton.jit(do_not_specialize=["num_tokens"])
def topk_backward_kernel(
    logits, index, d_weights, d_logits, num_tokens, STRIDE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    EP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With s the scores and w = s / sum over the chosen when renormalised, else w = s."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (token < num_tokens)[:, None]
    token = tl.minimum(token, num_tokens - 1)
    expert = tl.arange(0, EP)[None, :]
    at = token.to(tl.int64)[:, None] * STRIDE + expert
    x = tl.load(logits + at, mask=expert < E, other=float("-inf")).to(tl.float32)
    chosen = tl.zeros([BLOCK, EP], dtype=tl.int1)
    d = tl.zeros([BLOCK, EP], dtype=tl.float32)  # gradient of the weights, dense
    for choice in range(K):
        to = token.to(tl.int64) * K + choice
        hit = expert == tl.load(index + to).to(tl.int32)[:, None]
        d = tl.where(hit, tl.load(d_weights + to).to(tl.float32)[:, None], d)
        chosen = chosen | hit
    if SIGMOID:
        s = 1.0 / (1.0 + tl.exp(-x))
        if RENORMALIZE:
            total = tl.sum(tl.where(chosen, s, 0.0), axis=1)[:, None]
            d = (d - tl.sum(tl.where(chosen, d * s, 0.0), axis=1)[:, None] / total) / total
        grad = tl.where(chosen, d * s * (1.0 - s), 0.0)
    else:  # softmax over all, or over the chosen alone once renormalised
        live = chosen if RENORMALIZE else expert < E
        peak = tl.max(tl.where(live, x, float("-inf")), axis=1)[:, None]
        p = tl.where(live, tl.exp(x - peak), 0.0)
        p = p / tl.sum(p, axis=1)[:, None]
        grad = p * (d - tl.sum(p * d, axis=1)[:, None])
    to = token.to(tl.int64)[:, None] * E + expert
    tl.store(d_logits + to, grad.to(d_logits.dtype.element_ty), mask=mask & (expert < E))


_topk, _topk_backward = launches(topk_kernel), launches(topk_backward_kernel)


def _sizes(tokens: int, experts: int) -> tuple[int, int, tuple[int]]:
    padded = power_of_two(max(experts, 2))
    block = max(1, min(1024 // padded, power_of_two(max(tokens, 1))))
    return padded, block, (cdiv(tokens, block),)


def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    dtype: torch.dtype,
    dense: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(index [T, K] int64, weights [T, K] dtype) of logits [T, E] whose rows are contiguous.

    Best first; equal logits go to the lowest expert id; scores in float32. `dense` [T, E] receives
    the chosen experts' sigmoids, zero for the others.
    """
    tokens, experts = router_logits.shape
    index = router_logits.new_empty((tokens, top_k), dtype=torch.int64)
    weights = router_logits.new_empty((tokens, top_k), dtype=dtype)
    if tokens:
        padded, block, grid = _sizes(tokens, experts)
        narrow = router_logits.element_size() == 2 and padded <= 1 << 13
        start = _topk(
            STRIDE=router_logits.stride(0), E=experts, K=top_k,
            SIGMOID=sigmoid, RENORMALIZE=renormalize, DENSE=dense is not None, NARROW=narrow,
            EP=padded, KP=max(2, power_of_two(top_k)),  # tl.topk fails on one element
            BLOCK=block, num_warps=4,
        )  # fmt: skip
        start(grid, router_logits, index, weights, weights if dense is None else dense, tokens)
    return index, weights


def topk_backward(
    router_logits: Tensor, index: Tensor, d_weights: Tensor, *, sigmoid: bool, renormalize: bool
) -> Tensor:
    """Gradient of the logits [T, E], in their dtype; d_weights [T, K] contiguous."""
    tokens, experts = router_logits.shape
    d_logits = torch.empty_like(router_logits, memory_format=torch.contiguous_format)
    if tokens:
        padded, block, grid = _sizes(tokens, experts)
        start = _topk_backward(
            STRIDE=router_logits.stride(0), E=experts, K=index.shape[1],
            SIGMOID=sigmoid, RENORMALIZE=renormalize, EP=padded, BLOCK=block, num_warps=4,
        )  # fmt: skip
        start(grid, router_logits, index, d_weights, d_logits, tokens)
    return d_logits
