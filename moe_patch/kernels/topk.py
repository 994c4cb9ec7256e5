"""Router scores, the top-k choice and the routing weights in one kernel, and its backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, cdiv, launches, power_of_two


@triton.jit
def _ordered(x):
    """float32 -> int32, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(bits):
    """The float32 that `_ordered` made the int32 of."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, K: tl.constexpr, KP: tl.constexpr, LEAST: tl.constexpr):
    """[BLOCK, KP]: the K largest of distinct keys [BLOCK, N], largest first, then LEAST. (tl.topk
    is twice the code, and half as slow again for many tokens of many experts.)"""
    place = tl.arange(0, KP)[None, :]
    best = tl.full([key.shape[0], KP], LEAST, key.dtype)
    for i in range(K):
        most = tl.max(key, axis=1)[:, None]
        best = tl.where(place == i, most, best)
        key = tl.where(key == most, LEAST, key)
    return best


@triton.jit
def _keep_groups(
    y, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, FILL: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """FILL for what is outside of the best groups. y [BLOCK, EP] has GP groups of one size."""
    BLOCK: tl.constexpr = y.shape[0]
    SP: tl.constexpr = y.shape[1] // GP
    y = tl.reshape(y, (BLOCK, GP, SP))
    # integers: the largest of floats depends on the compiler where there are NaNs
    bits = _ordered(y)
    most, at = tl.max(bits, axis=2, return_indices=True)
    score = _unordered(most)
    if BEST == 2:
        others = tl.where(tl.arange(0, SP)[None, None, :] == at[:, :, None], -0x80000000, bits)
        score += _unordered(tl.max(others, axis=2))
    group = tl.arange(0, GP)[None, :]
    key = (_ordered(score).to(tl.int64) << 32) | (GP - 1 - group).to(tl.int64)
    key = tl.where(group < GROUPS, key, -0x7FFFFFFFFFFFFFFF)
    last = key
    for _ in range(TOP_GROUPS - 1):
        last = tl.where(last == tl.max(last, axis=1)[:, None], -0x7FFFFFFFFFFFFFFF, last)
    kept = key >= tl.max(last, axis=1)[:, None]
    return tl.reshape(tl.where(kept[:, :, None], y, FILL), (BLOCK, GP * SP))


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    logits, bias, given, index, weights, dense, num_tokens, STRIDE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, FILL: tl.constexpr,
    GIVEN: tl.constexpr, DENSE: tl.constexpr, NARROW: tl.constexpr,
    EP: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < num_tokens)[:, None]
    token = tl.minimum(token, num_tokens - 1)
    expert = tl.arange(0, EP)[None, :]
    real = expert < E
    if GROUPS > 1:  # each padded to a power of two
        place = expert % (EP // GP)
        real = (place < E // GROUPS) & (expert // (EP // GP) < GROUPS)
        expert = expert // (EP // GP) * (E // GROUPS) + place
    at = token.to(tl.int64)[:, None] * STRIDE + expert
    x = tl.load(logits + at, mask=real, other=float("-inf")).to(tl.float32)
    if not SIGMOID:
        peak = tl.max(x, axis=1)[:, None]

    y = x  # what is chosen by
    if BIAS or GROUPS > 1:
        if SIGMOID:
            y = 1.0 / (1.0 + tl.exp(-x))
        else:
            y = tl.exp(x - peak)
            y = y / tl.sum(y, axis=1)[:, None]
        if BIAS:
            y += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
        if GROUPS > 1:
            y = tl.where(real, y, float("-inf"))
            y = _keep_groups(y, GROUPS, TOP_GROUPS, BEST, FILL, GP)

    # one key sorts by logit, then by lowest id; int32 order equals float order after the flip
    bits = _ordered(y)
    if NARROW:  # logits of 16 bits: float32 leaves its last 13 free
        key = (bits & -0x2000) | (EP - 1 - expert)
        key = tl.where(real, key, -0x80000000)
        best = _best(key, K, KP, -0x80000000)
        chosen = EP - 1 - (best & 0x1FFF)
        bits = best & -0x2000
        bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -0x2000
        value = bits.to(tl.float32, bitcast=True)
    else:
        key = (bits.to(tl.int64) << 32) | (EP - 1 - expert).to(tl.int64)
        key = tl.where(real, key, -0x7FFFFFFFFFFFFFFF)
        best = _best(key, K, KP, -0x7FFFFFFFFFFFFFFF)
        chosen = EP - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        value = _unordered((best >> 32).to(tl.int32))

    choice = tl.arange(0, KP)[None, :]
    if GIVEN:  # rows that begin with an expert
        at = given + token.to(tl.int64)[:, None] * K
        theirs = tl.load(at + choice, mask=choice < K, other=0).to(tl.int32)
        chosen = tl.where(tl.load(at) < 0, chosen, theirs)
    if BIAS or GROUPS > 1 or GIVEN:
        at = token.to(tl.int64)[:, None] * STRIDE + chosen
        value = tl.load(logits + at, mask=choice < K, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.exp(value - peak)
        if not RENORMALIZE:
            score = score / tl.sum(tl.where(real, tl.exp(x - peak), 0.0), axis=1)[:, None]
    if RENORMALIZE:
        score = score / (tl.sum(tl.where(choice < K, score, 0.0), axis=1)[:, None] + EPS)
    score = score * SCALE
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
    SCALE: tl.constexpr, EPS: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With s the scores and w = s / (sum over the chosen + EPS) when renormalised, else w = s."""
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
    d = d * SCALE
    if SIGMOID:
        s = 1.0 / (1.0 + tl.exp(-x))
        if RENORMALIZE:
            total = tl.sum(tl.where(chosen, s, 0.0), axis=1)[:, None] + EPS
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


@functools.lru_cache(1024)
def _prepare(
    tokens: int, experts: int, top_k: int, groups: int, itemsize: int, **constants: Any
) -> tuple[Launch, tuple[int]]:
    """(topk_kernel, made ready, and its grid); `itemsize` of the logits."""
    padded = _padded(experts, groups)
    block = max(1, min(1024 // padded, power_of_two(tokens)))  # tokens a program
    narrow = itemsize == 2 and padded <= 1 << 13 and groups == 1 and not constants["BIAS"]
    start = _topk(
        E=experts, K=top_k, GROUPS=groups, NARROW=narrow, EP=padded, GP=power_of_two(groups),
        KP=power_of_two(top_k), BLOCK=block, num_warps=min(4, cdiv(block * padded, 256)),
        **constants,
    )  # fmt: skip
    return start, (cdiv(tokens, block),)


def _padded(experts: int, groups: int = 1) -> int:
    """Experts in as many groups, the experts of each and the groups padded to powers of two."""
    return power_of_two(max(experts // groups, 2)) * power_of_two(groups)


def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    dtype: torch.dtype,
    scale: float = 1.0,
    eps: float = 0.0,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    group_fill: float = float("-inf"),
    dense: Tensor | None = None,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(index [T, K] int64, weights [T, K] dtype) of logits [T, E] whose rows are contiguous.

    Best first; equals go to the lowest expert id; scores in float32. With a bias [E], contiguous,
    or with groups the choice is by score and bias, else by logit. `dense` [T, E] receives the
    chosen experts' sigmoids, zero for the others; not with `given` [T, K] int64, contiguous: the
    experts of each row that does not begin with -1.
    """
    tokens, experts = router_logits.shape
    index = router_logits.new_empty((tokens, top_k), dtype=torch.int64)
    weights = router_logits.new_empty((tokens, top_k), dtype=dtype)
    if tokens:
        start, grid = _prepare(
            tokens, experts, top_k, 1 if top_groups == num_groups else num_groups,
            router_logits.element_size(), STRIDE=router_logits.stride(0),
            SIGMOID=sigmoid, RENORMALIZE=renormalize, SCALE=scale, EPS=eps, BIAS=bias is not None,
            TOP_GROUPS=top_groups, BEST=group_best, FILL=group_fill, DENSE=dense is not None,
            GIVEN=given is not None,
        )  # fmt: skip
        bias = weights if bias is None else bias
        given = index if given is None else given
        dense = weights if dense is None else dense
        start(grid, router_logits, bias, given, index, weights, dense, tokens)
    return index, weights


def topk_backward(
    router_logits: Tensor,
    index: Tensor,
    d_weights: Tensor,
    *,
    sigmoid: bool,
    renormalize: bool,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:
    """Gradient of the logits [T, E], in their dtype; d_weights [T, K] contiguous."""
    tokens, experts = router_logits.shape
    d_logits = torch.empty_like(router_logits, memory_format=torch.contiguous_format)
    if tokens:
        padded = _padded(experts)
        block = max(1, 1024 // padded)  # whatever `tokens` is: one binary
        grid = (cdiv(tokens, block),)
        start = _topk_backward(
            STRIDE=router_logits.stride(0), E=experts, K=index.shape[1],
            SIGMOID=sigmoid, RENORMALIZE=renormalize, SCALE=scale, EPS=eps,
            EP=padded, BLOCK=block, num_warps=4,
        )  # fmt: skip
        start(grid, router_logits, index, d_weights, d_logits, tokens)
    return d_logits
