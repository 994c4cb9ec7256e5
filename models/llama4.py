"""Llama4: sigmoid top-k whose score multiplies the expert's input, plus one shared expert.

HF's block runs every token through every expert, nearly all with a score of zero; this one runs
only the chosen experts. Its experts are not decorated and are stored [E, H, 2I] and [E, I, H].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from transformers.models.llama4 import modeling_llama4 as hf

from ..compat import GLOBAL_HOOKS, HF_HOOK, MODULE_HOOKS, base_of, version_of
from ..notices import warn_once
from ..ops.experts import fused_experts
from ..ops.routing import select_experts, sigmoid_scores
from ..recognise.eligibility import runs_fused, why_not_silu, why_not_weights
from ..recognise.gates import all_of_deepspeed
from ..recognise.lent import low_rank_updates
from ..recognise.original import Fused, intact, own_forward, why_replaced
from ..recognise.overlap import both
from ..recognise.storage import storage_of
from ..recognise.wrapped import hooked_by_plan, replaced_forward


class Llama4Router(Fused, hf.Llama4Router):
    """HF's router with sigmoid and top-k in one kernel."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> HF's (router_scores [T, E], zero where not chosen; router_logits [T, E])."""
        if not (intact(self) and runs_fused(hidden_states, self.weight)):
            return own_forward(self, hidden_states)
        router_logits = F.linear(hidden_states, self.weight)
        watched = not torch.compiler.is_compiling() and has_torch_function_unary(router_logits)
        if watched or torch.is_grad_enabled() and router_logits.requires_grad:
            index, weights = select_experts(
                router_logits, self.top_k, score="sigmoid", dtype=torch.float32
            )
            chosen = weights.to(router_logits.dtype)
            router_scores = torch.zeros_like(router_logits).scatter(1, index, chosen)
        else:
            router_scores, index, weights = sigmoid_scores(router_logits, self.top_k)
        kept = version_of and not torch.compiler.is_compiling()
        if kept and not router_scores.is_inference():
            vars(router_scores)["choice"] = index, weights, version_of(router_scores)
        return router_scores, router_logits


class Llama4TextExperts(Fused, hf.Llama4TextExperts):
    """HF's experts, which also take the routing and then run the chosen experts only."""

    takes_low_rank = True
    has_gate = True

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """[T, H] with top_k_index and top_k_weights [T, K] -> [T, H]; alone: HF's dense forward."""
        if top_k_index is None or top_k_weights is None:
            return own_forward(self, hidden_states)
        gate_up, down, more = storage_of(self).operands(self, self.gate_up_proj, self.down_proj)
        more |= low_rank_updates(self)
        return fused_experts(
            hidden_states, gate_up, down, top_k_index, top_k_weights, weight_on="input", **more
        )

    @staticmethod
    def why_not_fused(experts: nn.Module) -> str | None:
        """None when the class can be swapped, else the reason in one sentence."""
        if replaced_forward(experts):
            return "the experts' forward was replaced on the instance: patch before that"
        return _why_not_experts(experts)


class Llama4TextMoe(Fused, hf.Llama4TextMoe):
    """HF's block that computes only what the router chose."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> HF's (out [T, H], router_logits [T, E])."""
        experts = self.experts
        if not isinstance(experts, Llama4TextExperts):
            experts = _find(experts, Llama4TextExperts)
        if experts is None or not (intact(self) and intact(experts)):
            return own_forward(self, hidden_states)
        if not runs_fused(hidden_states, reason=_why_not_experts(experts)):
            return own_forward(self, hidden_states)
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        run = functools.partial(_routed, self)
        shared, (routed, router_logits) = both(hidden_states, self.shared_expert, run)
        return shared + routed.to(shared.dtype), router_logits

    @staticmethod
    def why_not_fused(block: Any) -> str | None:
        """None when the class can be swapped, else the reason in one sentence."""
        if replaced_forward(block):
            return "the block's forward was replaced on the instance: patch before that"
        if hooked_by_plan(block.router):
            return (
                "transformers' expert parallelism expects three values from a router and Llama4's "
                "returns two: load it with a tensor-parallel plan or FSDP"
            )
        if replaced_forward(block.router):
            return "the router's forward was replaced on the instance: patch before that"
        if _find(block.experts, hf.Llama4TextExperts) is None:
            found = type(block.experts).__name__
            return f"the experts are {found} (quantised?): only Llama4TextExperts can be fused"
        return why_replaced(Llama4Router)


def _routed(block: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, H], router_logits [T, E]) of the routed experts for [T, H]."""
    router = block.router
    router_scores, router_logits = router(hidden_states)
    choice = _choice(router, router_scores)
    if choice is not None:
        try:
            return block.experts(hidden_states, *choice), router_logits
        except TypeError as error:
            # unpatched meanwhile by another thread, and perhaps patched again: HF's take no routing
            if "positional argument" not in str(error):
                raise
    num_experts = router_scores.shape[1]
    rows = hidden_states.repeat(num_experts, 1) * router_scores.T.reshape(-1, 1)  # [E * T, H]
    return block.experts(rows).view(num_experts, *hidden_states.shape).sum(0), router_logits


def _choice(router: Any, scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """(top_k_index, top_k_weights) [T, K] behind the router's scores [T, E].

    None where somebody else wrote scores, which may choose any number of experts: HF's dense pass
    takes those. Gradients go through the scores, as HF's do, and so do hooks on them.
    """
    if version_of and not torch.compiler.is_compiling():
        # full backward hooks make a view of what a module returns
        source = scores if hasattr(scores, "choice") else base_of(scores)
        *choice, version = getattr(source, "choice", (None,))
        if version is not None and version == version_of(scores) and _shows(scores, source):
            index, weights = choice
            return index, scores.gather(1, index) if scores.requires_grad else weights
    if _wrote(router):  # torch.compile and inference mode keep no attributes, or no version
        weights, index = scores.topk(router.top_k, dim=1)
        return index, weights
    warn_once(
        "moe_patch computes every expert for every token, as Hugging Face does: a hook wrote the "
        "scores of a Llama4Router, which may choose any number of experts now."
    )
    return None


def _shows(view: Tensor, source: Tensor) -> bool:
    return view is source or (view.shape, view.stride()) == (source.shape, source.stride())


def _wrote(router: Any) -> bool:
    """Whether the scores are as the router's class made them, so that top_k of them count."""
    if not isinstance(router, Llama4Router) or not intact(router):
        return False
    own = router.__dict__
    hooked = GLOBAL_HOOKS is None or own[MODULE_HOOKS[0]] or GLOBAL_HOOKS[0]
    if hooked and not all_of_deepspeed(router):
        return False
    return "forward" not in own or HF_HOOK in own


def _why_not_experts(experts: nn.Module) -> str | None:
    """None when the kernels can do what these experts do, else the reason in one sentence."""
    return why_not_weights(experts) or why_not_silu(experts.act_fn)


def _find(module: nn.Module, cls: type[nn.Module]) -> nn.Module | None:
    """The module, or what a wrapper such as PEFT's holds, that is of this class."""
    return next((child for child in module.modules() if isinstance(child, cls)), None)


SWAPS = {
    hf.Llama4Router: Llama4Router,
    hf.Llama4TextExperts: Llama4TextExperts,
    hf.Llama4TextMoe: Llama4TextMoe,
}
