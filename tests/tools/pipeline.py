"""The fused pipeline in plain PyTorch, stage by stage, with a hook on every stage.

It computes what the kernels do, in float32 with one rounding at the end, and is broken on purpose
by tests of the certificate. T tokens, H hidden size, I intermediate size, E experts, K choices a
token, S = T*K slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_patch import kernels
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.paths import ran
from moe_patch.recognise import routers
from moe_patch.reference import group_scores

COLUMNS = 16
"""Columns of I that share a partial sum of the routing weights' gradient."""

Fault = Callable[[str, Any, SimpleNamespace], Any]
"""(stage, what it gives, everything seen so far) -> what it is to give instead."""


class Pipeline:
    """select_experts, sigmoid_scores and fused_experts; `fault` may change what a stage gives."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault

    def at(self, stage: str, value: Any, seen: SimpleNamespace) -> Any:
        """The value, or what the fault makes of it."""
        if self.fault is None:
            return value
        value = self.fault(stage, value, seen)
        return value

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, patched blocks run this."""
        with contextlib.ExitStack() as stack:
            for module, name, function in (
                (kernels, "why_not", lambda _: None),
                (decorated, "fused_experts", self.fused_experts),
                (llama4, "fused_experts", self.fused_experts),
                (qwen3_moe, "select_experts", self.select_experts),
                (llama4, "select_experts", self.select_experts),
                (routers, "select_experts", self.select_experts),
                (routers.Rule, "run", self.route(routers.Rule.run)),
                (llama4, "sigmoid_scores", self.sigmoid_scores),
            ):
                stack.enter_context(mock.patch.object(module, name, function))
            yield

    # Routing

    def route(self, run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """A routers.Rule's `run`: what a router of its family returns."""

        def returned(rule: routers.Rule, *args: Any) -> tuple[Tensor, ...]:
            logits, weights, index = run(rule, *args)[:: -1 if rule.index_first else 1]
            c = SimpleNamespace(tokens=len(index), grad=torch.is_grad_enabled())
            logits = self.at("returned logits", logits, c)
            index = self.at("returned index", index, c)
            return (logits, weights, index)[:: -1 if rule.index_first else 1]

        return returned

    def select_experts(
        self,
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
    ) -> tuple[Tensor, Tensor]:
        """As moe_patch.ops.routing.select_experts."""
        grad = torch.is_grad_enabled() and router_logits.requires_grad
        c = SimpleNamespace(
            tokens=len(router_logits), top_k=top_k, score=score, renormalize=renormalize,
            dtype=dtype or router_logits.dtype, scale=scale, eps=eps, bias=bias, grad=grad,
            num_groups=num_groups, top_groups=top_groups, group_best=group_best,
            group_fill=group_fill, autocast=torch.is_autocast_enabled("cpu"),
        )  # fmt: skip
        with torch.autocast("cpu", enabled=False):
            if grad:
                return _Select.apply(self, c, router_logits)
            return self.choose(c, router_logits)

    def sigmoid_scores(self, router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As moe_patch.ops.routing.sigmoid_scores."""
        logits = router_logits.detach()
        index, weights = self.select_experts(logits, top_k, score="sigmoid", dtype=torch.float32)
        scores = torch.zeros_like(logits).scatter(1, index, weights.to(logits.dtype))
        c = SimpleNamespace(tokens=len(logits), grad=False, index=index, autocast=False)
        return self.at("dense scores", scores, c), index, weights

    def choose(self, c: SimpleNamespace, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, choice and weights; `c` keeps what a backward needs."""
        c.logits = self.at("logits", router_logits.float(), c)  # [T, E]
        found = c.logits.softmax(-1) if c.score == "softmax" else c.logits.sigmoid()
        c.scores = self.at("scores", found, c)
        choice = c.logits
        if c.bias is not None or c.num_groups != c.top_groups:
            choice = c.scores if c.bias is None else c.scores + self.at("bias", c.bias.float(), c)
        if c.num_groups != c.top_groups:
            groups = self.at("groups", group_scores(choice, c.num_groups, c.group_best), c)
            keep = groups.sort(dim=-1, descending=True, stable=True).indices[:, : c.top_groups]
            mask = torch.ones_like(groups, dtype=torch.bool).scatter(1, keep, False)
            c.mask = self.at(
                "group mask", mask.repeat_interleave(choice.shape[1] // c.num_groups, 1), c
            )
            choice = choice.masked_fill(c.mask, c.group_fill)
        choice = self.at("choice", choice, c)
        index = choice.sort(dim=-1, descending=True, stable=True).indices[:, : c.top_k]
        c.index = self.at("index", index, c)  # [T, K]
        c.chosen = self.at("chosen", c.scores.gather(1, c.index), c)
        c.total = self.at("total", c.chosen.sum(-1, keepdim=True) + c.eps, c)
        weights = c.chosen / c.total if c.renormalize else c.chosen
        c.shares = self.at("shares", weights, c)
        weights = c.shares * c.scale
        return c.index, self.at("weights", weights, c).to(c.dtype)

    def choose_backward(self, c: SimpleNamespace, d_weights: Tensor) -> Tensor:
        """d_logits [T, E]."""
        d_shares = self.at("d_shares", d_weights.float() * c.scale, c)
        if c.renormalize:
            inner = self.at("inner", (d_shares * c.shares).sum(-1, keepdim=True), c)
            d_shares = (d_shares - inner) / c.total
        c.d_chosen = self.at("d_chosen", d_shares, c)
        d_scores = torch.zeros_like(c.scores).scatter(1, c.index, c.d_chosen)
        if c.score == "softmax":
            mean = self.at("mean", (d_scores * c.scores).sum(-1, keepdim=True), c)
            d_logits = c.scores * (d_scores - mean)
        else:
            d_logits = d_scores * self.at("sigmoid'", c.scores * (1 - c.scores), c)
        return self.at("d_logits", d_logits, c)

    # Experts

    def fused_experts(
        self,
        hidden_states: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        weight_on: str = "output",
        activation: str = "silu",
    ) -> Tensor:
        """As moe_patch.fused_experts, with SiLU."""
        assert str(activation) == "silu"
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else gate_up_proj.dtype
        given = (hidden_states, gate_up_proj, down_proj)
        frozen = [not torch.is_grad_enabled() or not w.requires_grad for w in given[1:]]
        tensors = *(tensor.to(dtype) for tensor in given), top_k_index, top_k_weights
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        c = SimpleNamespace(
            tokens=len(hidden_states), top_k=top_k_index.shape[1], experts=len(down_proj),
            on_input=weight_on == "input", grad=grad, autocast=autocast, dtype=dtype,
            strided=not hidden_states.is_contiguous(),
            dropped=bool((top_k_index >= len(down_proj)).any()),
            frozen={(True, True): "all", (True, False): "up", (False, True): "down"}.get(
                tuple(frozen), ""
            ),
            recomputed=torch._C._current_graph_task_id() != -1,
            leaves={"up": given[1], "down": given[2]},
        )  # fmt: skip
        with torch.autocast("cpu", enabled=False):
            if grad:
                ran("sorted")
                out = _Experts.apply(self, c, *tensors)
            elif c.tokens == 1:
                ran("decode")
                out = self.decode(c, *tensors)
            else:
                ran("sorted")
                out = self.by_sort(c, *tensors)
        return self.at("returned", out.to(hidden_states.dtype), c)

    def sort(self, c: SimpleNamespace, index: Tensor) -> None:
        """Slots in expert order; those with an id past the last expert come last."""
        experts = index.reshape(-1)
        experts = torch.where((experts < 0) | (experts >= c.experts), c.experts, experts)
        counts = torch.bincount(experts, minlength=c.experts + 1)[: c.experts]
        c.counts = counts
        c.offsets = self.at("expert_offsets", F.pad(counts.cumsum(0), (1, 0)), c)  # [E + 1]
        c.row_to_slot = experts.sort(stable=True).indices  # [S]
        slot_to_row = torch.empty_like(c.row_to_slot)
        slot_to_row[c.row_to_slot] = torch.arange(len(experts))
        c.slot_to_row = slot_to_row.masked_fill(experts == c.experts, -1)  # [S]
        c.row_to_slot = self.at("row_to_slot", c.row_to_slot, c)
        c.slot_to_row = self.at("slot_to_row", c.slot_to_row, c)
        c.token = self.at("token of row", c.row_to_slot // c.top_k, c)  # [S]

    def gemm(self, c: SimpleNamespace, rows: Tensor, weights: Tensor) -> Tensor:
        """[S, K] times each row's expert of [E, N, K]; zeros where no expert is."""
        out = rows.new_zeros(len(rows), weights.shape[1])
        ends = c.offsets.clamp(0, len(rows)).tolist()
        for e, (begin, end) in enumerate(zip(ends, ends[1:])):
            if end > begin:
                out[begin:end] = rows[begin:end] @ weights[e].T
        return out

    def dw(self, c: SimpleNamespace, left: Tensor, right: Tensor) -> Tensor:
        """[E, M, N] of [S, M] and [S, N]."""
        out = left.new_zeros(c.experts, left.shape[1], right.shape[1])
        ends = c.offsets.clamp(0, len(left)).tolist()
        for e, (begin, end) in enumerate(zip(ends, ends[1:])):
            if end > begin:
                out[e] = left[begin:end].T @ right[begin:end]
        return out

    def combine(
        self, c: SimpleNamespace, rows: Tensor, name: str, weights: Tensor | None = None
    ) -> Tensor:
        """[T, H]: each token's sum of its rows, weighted."""
        picked = rows[c.slot_to_row.clamp(min=0)]
        if weights is not None:
            picked = picked * self.at(f"{name} weights", weights, c).reshape(-1, 1)
        picked = picked.masked_fill((c.slot_to_row < 0)[:, None], 0)
        picked = self.at(f"{name} slots", picked.view(c.tokens, c.top_k, -1), c)
        return self.at(name, picked.sum(1), c)

    def by_sort(
        self,
        c: SimpleNamespace,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Forward with a sort; `c` keeps what a backward needs."""
        self.sort(c, index)
        c.weights, c.x = weights.float(), x.float()
        scale = self.at("row weights", c.weights.reshape(-1)[c.row_to_slot], c)[:, None]
        rows = self.at("x rows", c.x[c.token], c)
        pre = self.gemm(c, rows, self.at("gate_up weights", up.float(), c))
        pre = self.at("pre", pre, c)  # [S, 2I]
        c.pre = self.at("saved pre", pre, c)
        gate, up = (pre * scale if c.on_input else pre).chunk(2, dim=-1)
        c.gate, c.up, c.scale = gate, up, scale
        act = self.at("act", F.silu(gate) * up, c)  # [S, I]
        rows = self.gemm(c, act, self.at("down weights", down.float(), c))
        rows = self.at("rows", rows, c)  # [S, H]
        out = self.combine(c, rows, "out", None if c.on_input else c.weights)
        return out.to(x.dtype)

    def decode(
        self,
        c: SimpleNamespace,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """One token without gradients."""
        c.valid = (index >= 0) & (index < c.experts)  # [T, K]
        c.index = self.at("decode index", index.where(c.valid, 0), c)
        c.x = x.float()
        scale = self.at("decode weights", weights.float(), c)
        ups = self.at("decode gate_up weights", up[c.index].float(), c)  # [T, K, 2I, H]
        pre = self.at(
            "decode pre", torch.einsum("th,tknh->tkn", self.at("decode x", c.x, c), ups), c
        )
        gate, up = (pre * scale[..., None] if c.on_input else pre).chunk(2, dim=-1)
        c.gate, c.up = gate, up
        act = self.at("decode act", F.silu(gate) * up, c)  # [T, K, I]
        downs = self.at("decode down weights", down[c.index].float(), c)  # [T, K, H, I]
        rows = torch.einsum("tki,tkhi->tkh", act, downs)
        rows = rows if c.on_input else rows * scale[..., None]
        rows = self.at("decode rows", rows, c) * c.valid[..., None]
        return self.at("decode out", rows.sum(1), c).to(x.dtype)

    def backward(self, c: SimpleNamespace, d_out: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
        """Gradients of x, gate_up_proj, down_proj and the routing weights in float32."""
        c.d_out = d_out.float()
        slot_scale = c.weights.reshape(-1)[c.row_to_slot]
        d_rows = self.at("d_out rows", c.d_out[c.token], c)  # [S, H]
        c.d_rows = d_rows
        d_act = self.gemm(c, d_rows, self.at("dgate weights", down.float().mT, c))
        d_act = self.at("d_act", d_act, c)  # [S, I]
        c.scale = scale = self.at("dgate scale", slot_scale, c)[:, None]
        pre = self.at("dgate pre", c.pre, c)
        gate, gated = (pre * scale if c.on_input else pre).chunk(2, dim=-1)
        c.gate, c.up, c.sig = gate, gated, gate.sigmoid()
        act = gate * c.sig * gated
        by_gate = self.at("silu'", c.sig * (1 + gate * (1 - c.sig)), c) * gated
        by_up = self.at("silu", gate * c.sig, c)
        if c.on_input:
            d_gate, d_up = d_act * by_gate, d_act * by_up
            one, other = pre.chunk(2, dim=-1)
            products = d_gate * one + d_up * other
            d_gate, d_up = d_gate * scale, d_up * scale
        else:
            products, c.unweighted = d_act * act, act
            d_act, act = d_act * scale, act * scale
            d_gate, d_up = d_act * by_gate, d_act * by_up
        d_gate, d_up = self.at("d_gate", d_gate, c), self.at("d_up", d_up, c)
        d_pre = self.at("d_pre", torch.cat([d_gate, d_up], -1), c)  # [S, 2I]
        c.d_pre, c.act = d_pre, act
        partials = F.pad(products, (0, -products.shape[1] % COLUMNS))
        partials = self.at("d_scale", partials.unflatten(1, (-1, COLUMNS)).sum(-1), c)
        d_weights = partials.sum(-1)[c.slot_to_row.clamp(min=0)]
        d_weights = d_weights.masked_fill(c.slot_to_row < 0, 0).view(c.tokens, c.top_k)
        d_weights = self.at("d_weights", d_weights, c)
        d_down = self.dw(c, self.at("dw_down left", d_rows, c), self.at("dw_down right", act, c))
        rows = self.at("dw_gate_up right", c.x[c.token], c)
        d_up = self.dw(c, self.at("dw_gate_up left", d_pre, c), rows)
        rows = self.gemm(c, self.at("dx left", d_pre, c), self.at("dx weights", up.float().mT, c))
        rows = self.at("dx rows", rows, c)  # [S, H]
        return [
            self.combine(c, rows, "d_hidden"),
            self.at("d_gate_up_proj", d_up, c),
            self.at("d_down_proj", d_down, c),
            d_weights,
        ]


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pipeline, c, logits):
        index, weights = pipeline.choose(c, logits)
        ctx.pipeline, ctx.c, ctx.dtype = pipeline, c, logits.dtype
        ctx.mark_non_differentiable(index)
        return index, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _, d_weights):
        with torch.autocast("cpu", enabled=False):
            return None, None, ctx.pipeline.choose_backward(ctx.c, d_weights).to(ctx.dtype)


_KEPT = ("pre", "row_to_slot", "slot_to_row", "token", "offsets")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pipeline, c, x, up, down, index, weights):
        out = pipeline.by_sort(c, x, up, down, index, weights)
        kept = (getattr(c, name) for name in _KEPT)
        ctx.save_for_backward(x, up, down, weights, *kept)
        ctx.pipeline, ctx.c = pipeline, c
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (x, up, down, weights, *kept), c = ctx.saved_tensors, ctx.c
        vars(c).update(zip(_KEPT, kept), x=x.float(), weights=weights.float())
        with torch.autocast("cpu", enabled=False):
            grads = ctx.pipeline.backward(c, d_out, up, down)
        d_x, d_up, d_down, d_weights = (
            grad.to(like.dtype) for grad, like in zip(grads, (x, up, down, weights))
        )
        return None, None, d_x, d_up, d_down, None, d_weights
