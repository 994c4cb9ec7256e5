"""QuACK: the seven products of a training step, each kernel beside ours on the same tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import kernels, reference
from ...ops.grouped import input_gradient, sort
from ...order import ExpertOrder
from .compare import (
    Call,
    Case,
    Compared,
    Comparison,
    Contender,
    Outputs,
    Part,
    Peer,
    compare,
)
from .experts import Experts, drawn

INSTALL = (
    "pip install --no-deps quack-kernels==0.6.5 nvidia-cutlass-dsl==4.7.0 "
    "nvidia-cutlass-dsl-libs-base==4.7.0 nvidia-cutlass-dsl-libs-core==4.7.0 "
    "nvidia-cutlass-dsl-libs-cu13==4.7.0 apache-tvm-ffi torch-c-dlpack-ext einops"
)
TILES = (
    (256, 128, False), (256, 192, False), (128, 256, False), (128, 128, True),
    (128, 192, True), (128, 160, True), (192, 128, True),
)  # fmt: skip
"""(rows, columns, pingpong) of Hopper's; gathers need clusters of one column."""
CLUSTERS = (2, 1)
"""Rows of a cluster."""


@dataclass(frozen=True)
class Step:
    """Operands of one training step's products, rows in expert order: S = T * K of them."""

    of: Experts
    order: ExpertOrder
    token: Tensor  # [S] int32: each row's token
    scale: Tensor  # [S] float32: each row's routing weight
    pre: Tensor  # [S, 2I], gate columns first
    act: Tensor  # [S, I]
    d_pre: Tensor  # [S, 2I]
    weighted: Tensor  # [S, I]: act times its routing weight

    @property
    def top_k(self) -> int:
        return self.of.index.shape[1]

    def parts(self, twin: Twin, *, gradient: bool = False) -> Iterator[Part]:
        """Yields what `twin` computes of each expert: its rows, or its weight gradient."""
        ends = self.order.expert_offsets.tolist()
        for expert, (begin, end) in enumerate(zip(ends, ends[1:])):
            rows = slice(begin, end)
            baseline = twin(self, expert, rows, self.of.x.dtype)
            truth = twin(self, expert, rows, torch.float64)
            where = expert if gradient else rows
            yield from (Part(name, where, baseline[name], truth[name]) for name in truth)


Twin = Callable[[Step, int, slice, torch.dtype], Outputs]
"""A product of one expert's rows, computed in a dtype."""


def step(experts: Experts) -> Step:
    """Runs our kernels once, as ops/forward.py and ops/backward.py do."""
    order, _ = sort(experts.index, len(experts.down), experts.x.dtype)
    act, pre = _gate_up(experts, order, save_pre=True)
    d_pre, weighted, _ = _dgate(experts, order, pre)
    token = order.row_to_slot // experts.index.shape[1]
    scale = experts.weights.flatten()[order.row_to_slot]
    return Step(experts, order, token.int(), scale, pre, act, d_pre, weighted)


def _gate_up(of: Experts, order: ExpertOrder, *, save_pre: bool) -> tuple[Tensor, Tensor]:
    return kernels.gate_up.gate_up(
        of.x, of.gate_up, order, of.weights, weight_on_input=False, save_pre=save_pre
    )


def _dgate(of: Experts, order: ExpertOrder, pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d_pre, weighted act, d_top_k_weights [T, K])."""
    d_pre, weighted, sums = kernels.dgate.dgate(
        of.d_out, of.down, order, of.weights, pre,
        weight_on_input=False, need_pre=True, need_act=True, need_scale=True,
    )  # fmt: skip
    d_weights = torch.empty_like(of.weights)
    return d_pre, weighted, kernels.combine.sum_partials(sums, order.slot_to_row, d_weights)


def _one(call: Call, read: Callable[[Any], Outputs]) -> Contender:
    return Contender({"": call}, read)


# The products in PyTorch


def _twin_gate_up(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    pre = of.of.x[of.token[rows]].to(dtype) @ of.of.gate_up[expert].to(dtype).T  # [rows, 2I]
    return {"pre": pre, "act": reference.glu(pre)}


def _twin_act(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    return {"act": _twin_gate_up(of, expert, rows, dtype)["act"]}


def _twin_down(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    return {"rows": of.act[rows].to(dtype) @ of.of.down[expert].to(dtype).T}  # [rows, H]


def _twin_dgate(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    pre = of.pre[rows].to(dtype).requires_grad_()  # [rows, 2I]
    wide = torch.promote_types(dtype, torch.float32)
    scale = of.scale[rows, None].to(wide).requires_grad_()  # [rows, 1]
    act = reference.glu(pre)  # [rows, I]
    out = (act @ of.of.down[expert].to(dtype).T) * scale  # [rows, H]
    d_out = of.of.d_out[of.token[rows]].to(wide)
    d_pre, d_scale = torch.autograd.grad(out, (pre, scale), d_out)
    weighted = (act * scale).to(dtype).detach()
    return {"d_pre": d_pre, "act": weighted, "d_top_k_weights": d_scale[:, 0]}


def _twin_d_hidden(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    return {"rows": of.d_pre[rows].to(dtype) @ of.of.gate_up[expert].to(dtype)}  # [rows, H]


def _twin_d_gate_up(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    x = of.of.x[of.token[rows]].to(dtype)  # [rows, H]
    return {"d_gate_up_proj": of.d_pre[rows].to(dtype).T @ x}  # [2I, H]


def _twin_d_down(of: Step, expert: int, rows: slice, dtype: torch.dtype) -> Outputs:
    d_out = of.of.d_out[of.token[rows]].to(dtype)  # [rows, H]
    return {"d_down_proj": d_out.T @ of.weighted[rows].to(dtype)}  # [H, I]


# Ours


def _ours(of: Step) -> dict[str, Contender]:
    """Our call of every product."""
    experts, order = of.of, of.order
    rows = torch.empty(len(of.act), experts.x.shape[1], dtype=of.act.dtype, device=of.act.device)
    d_gate_up, d_down = torch.empty_like(experts.gate_up), torch.empty_like(experts.down)
    dw = functools.partial(kernels.dw.dw, order=order, gather=of.top_k)
    return {
        "gate_up": _one(
            lambda: _gate_up(experts, order, save_pre=True),
            lambda made: {"act": made[0], "pre": made[1]},
        ),
        "gate_up, inference": _one(
            lambda: _gate_up(experts, order, save_pre=False), lambda made: {"act": made[0]}
        ),
        "down": _one(
            lambda: kernels.grouped_gemm.grouped_gemm(of.act, experts.down, order, out=rows),
            lambda _: {"rows": rows},
        ),
        "dgate": _one(
            lambda: _dgate(experts, order, of.pre),
            lambda made: {
                "d_pre": made[0], "act": made[1],
                "d_top_k_weights": made[2].flatten()[order.row_to_slot],
            },
        ),
        "d_hidden rows": _one(
            lambda: input_gradient(of.d_pre, experts.gate_up, None, order, out=rows),
            lambda _: {"rows": rows},
        ),
        "d_gate_up_proj": _one(
            lambda: dw(experts.x, of.d_pre, out=d_gate_up.mT),
            lambda _: {"d_gate_up_proj": d_gate_up},
        ),
        "d_down_proj": _one(
            lambda: dw(experts.d_out, of.weighted, out=d_down),
            lambda _: {"d_down_proj": d_down},
        ),
    }  # fmt: skip


# QuACK's. Its gated functions take gate and up side by side: rows g0 u0 g1 u1 ... of the weight.


def interleaved(tensor: Tensor) -> Tensor:
    """[S, 2I] or [E, 2I, H], gate first -> a copy with gate and up in turns."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def concatenated(tensor: Tensor) -> Tensor:
    """The opposite of `interleaved`."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()


def configurations() -> dict[str, Any]:
    """QuACK's GemmConfig by name."""
    make = importlib.import_module("quack.gemm_config").GemmConfig
    return {
        f"{m} x {n}{', pingpong' * pingpong}, cluster {cluster}": make(
            tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=cluster, cluster_n=1,
            is_dynamic_persistent=False, device_capacity=9,
        )
        for cluster in CLUSTERS
        for m, n, pingpong in TILES
    }  # fmt: skip


def _each(call: Callable[[Any], object], read: Callable[[Any], Outputs]) -> Contender:
    """A call in every configuration."""
    every = configurations().items()
    return Contender({name: functools.partial(call, config) for name, config in every}, read)


def _interface() -> Any:
    return importlib.import_module("quack.gemm_interface")


def _gathered(of: Step) -> dict[str, Any]:
    """Arguments of a gated product that gathers its rows."""
    ends = of.order.expert_offsets
    return {"activation": "swiglu", "cu_seqlens_m": ends, "A_idx": of.token, "tuned": False}


def _gemm() -> Callable[..., object]:
    tuned = _interface().gemm_tuned
    return getattr(tuned, "fn", tuned)  # without its own tuning


def _their_gate_up(of: Step, *, keep: bool) -> Contender:
    run = functools.partial(_interface().gemm_act, store_preact=keep, **_gathered(of))
    weight = interleaved(of.of.gate_up).mT  # [E, H, 2I]
    return _each(
        lambda config: run(of.of.x, weight, config=config),
        lambda made: ({"pre": concatenated(made[0])} if keep else {}) | {"act": made[1]},
    )


def _their_dgate(of: Step) -> Contender:
    run = functools.partial(
        _interface().gemm_dact, colvec_scale=of.scale, colvec_reduce=True,
        dynamic_scheduler=False, **_gathered(of),
    )  # fmt: skip
    pre = interleaved(of.pre)  # [S, 2I]

    def read(made: tuple[Tensor, Tensor, Tensor]) -> Outputs:
        d_pre, act, d_weights = made
        return {
            "d_pre": concatenated(d_pre), "act": act, "d_top_k_weights": d_weights.flatten(),
        }  # fmt: skip

    return _each(lambda config: run(of.of.d_out, of.of.down, pre, config=config), read)


def _their_rows(of: Step, a: Tensor, weight: Tensor) -> Contender:
    """Rows a [S, K] times each expert's weight [E, K, N]."""
    gemm, ends = _gemm(), of.order.expert_offsets
    rows = torch.empty(len(a), weight.shape[2], dtype=a.dtype, device=a.device)  # [S, N]
    return _each(
        lambda config: gemm(a, weight, rows, config=config, cu_seqlens_m=ends),
        lambda _: {"rows": rows},
    )


def _their_gradient(of: Step, name: str, a: Tensor, b: Tensor, out: Tensor) -> Contender:
    """The sum over each expert's rows of p^T q: p is gathered from a [T, M], q is b [S, N]. It goes
    to out [E, M, N], a view of the gradient or the gradient itself."""
    gemm, ends = _gemm(), of.order.expert_offsets
    turned = name == "d_gate_up_proj"
    return _each(
        lambda config: gemm(a.T, b, out, config=config, cu_seqlens_k=ends, A_idx=of.token),
        lambda _: {name: out.mT if turned else out},
    )


def _theirs(of: Step, name: str) -> Contender:
    """QuACK's call of one product.

    Raises:
        Exception: whatever the package does where it does not fit.
    """
    experts = of.of
    if name in ("gate_up", "gate_up, inference"):
        return _their_gate_up(of, keep=name == "gate_up")
    if name == "dgate":
        return _their_dgate(of)
    if name == "down":
        return _their_rows(of, of.act, experts.down.mT)
    if name == "d_hidden rows":
        return _their_rows(of, of.d_pre, experts.gate_up)
    if name == "d_gate_up_proj":
        out = torch.empty_like(experts.gate_up).mT  # [E, H, 2I]
        return _their_gradient(of, name, experts.x, of.d_pre, out)
    return _their_gradient(of, name, experts.d_out, of.weighted, torch.empty_like(experts.down))


# name -> its twin, and how many products of all rows with [H, I] it is
ROWS: dict[str, tuple[Twin, int]] = {
    "gate_up": (_twin_gate_up, 2),
    "gate_up, inference": (_twin_act, 2),
    "down": (_twin_down, 1),
    "dgate": (_twin_dgate, 1),
    "d_hidden rows": (_twin_d_hidden, 2),
    "d_gate_up_proj": (_twin_d_gate_up, 2),
    "d_down_proj": (_twin_d_down, 1),
}


def comparisons(case: str, experts: Experts) -> Iterable[Comparison]:
    """The seven rows of these experts."""
    of = step(experts)
    for name, ours in _ours(of).items():
        twin, products = ROWS[name]
        gradient = name in ("d_gate_up_proj", "d_down_proj")
        yield Comparison(
            case, name, products * experts.products, ours, functools.partial(_theirs, of, name),
            functools.partial(of.parts, twin, gradient=gradient), experts.x.dtype,
            experts.counts if gradient else None,
        )  # fmt: skip


def compared(case: Case, seconds: float) -> Iterator[Compared]:
    """Yields what each row gave."""
    for row in comparisons(case.label, drawn(case)):
        yield compare(row, PEER.name, seconds=seconds)


PEER = Peer("QuACK", "quack", INSTALL, compared)
