"""Routers of every family whose choice and weights `select_experts` computes: the class is asked.

Families write their routers anew, and new releases bring more. So a router is known by what its
class computes on a stand-in, for several settings and dtypes, and never by its name. A class that
reads more of its instance, or of the world, than the rules know is left to Hugging Face.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import reference
from ..ops.routing import select_experts
from .eligibility import runs_fused
from .original import Fused, Recognised, intact, methods, own_forward, replaced
from .swaps import SWAPS
from .wrapped import plain_class


@dataclass(frozen=True)
class Rule:
    """What a router computes: a product, `select_experts`, and the order of its outputs."""

    options: Callable[[Any], dict[str, Any]]
    """Arguments of `select_experts`, read off the router at every call."""
    product: str = ""
    """The dtype of hidden_states and weight: "float32", "weight" (its own), or as they are."""
    logits: torch.dtype | None = None
    """They are cast to it after the product."""
    weights: str = "logits"
    """Whose dtype the routing weights have: "logits", "hidden_states", or "float32"."""
    biased: bool = False
    """The product adds `router.bias`."""
    given: bool = False
    """The bias of the choice is an argument of forward."""
    flat: bool = True
    """hidden_states of any shape become [T, H]."""
    index_first: bool = False
    """The outputs are (index, weights, logits) instead of (logits, weights, index)."""
    autocast: bool = True
    """Under autocast too. Not where HF's dtypes then follow the list of operators it promotes."""

    def run(
        self, select: Callable[..., Any], router: Any, hidden_states: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        """HF's outputs for [..., H], by `select`: our select_experts or its twin."""
        weight, bias = router.weight, router.bias if self.biased else None
        x = hidden_states.reshape(-1, hidden_states.shape[-1]) if self.flat else hidden_states
        if self.product == "float32":
            x, weight, bias = x.float(), weight.float(), bias if bias is None else bias.float()
        elif self.product == "weight":
            x = x.to(weight.dtype)
        logits = F.linear(x, weight, bias)
        logits = logits if self.logits is None else logits.to(self.logits)
        dtype = {"logits": logits.dtype, "hidden_states": hidden_states.dtype}.get(self.weights)
        options = self.options(router)
        if self.given:
            options["bias"] = given[0]
        index, weights = select(logits, router.top_k, dtype=dtype or torch.float32, **options)
        return (index, weights, logits) if self.index_first else (logits, weights, index)


def _groups(router: Any, **more: Any) -> dict[str, Any]:
    """Absent groups are one group."""
    if router.num_group is None:
        return more
    return {"num_groups": router.num_group, "top_groups": router.topk_group, **more}


def _deepseek_v3(router: Any, **more: Any) -> dict[str, Any]:
    return _groups(
        router, score="sigmoid", bias=router.e_score_correction_bias,
        renormalize=router.norm_topk_prob, eps=1e-20, **more,
    )  # fmt: skip


def _deepseek_v2(router: Any) -> dict[str, Any]:
    scale = {"scale": router.routed_scaling_factor}
    return scale if router.topk_method == "greedy" else _groups(router, group_best=1, **scale)


def _cohere2(router: Any) -> dict[str, Any]:
    score = router.expert_selection_fn
    return {"score": score, "renormalize": score == "softmax" or router.norm_topk_prob}


def _softmax(_: Any) -> dict[str, Any]:
    return {"renormalize": True}


def _sigmoid(router: Any, **more: Any) -> dict[str, Any]:
    return {"score": "sigmoid", "renormalize": True, **more}


def _lfm2(router: Any) -> dict[str, Any]:
    norm, scale = router.norm_topk_prob, router.routed_scaling_factor
    return {"score": "sigmoid", "renormalize": norm, "eps": 1e-6, "scale": scale}


RULES = (
    # sigmoid, bias and groups: DeepSeek-V3 and its heirs, BEAM, A.X K2
    Rule(lambda r: _deepseek_v3(r, scale=r.routed_scaling_factor), product="float32"),
    Rule(_deepseek_v3, product="float32"),
    Rule(
        lambda r: _deepseek_v3(r, scale=r.routed_scaling_factor, group_fill=0.0), product="float32"
    ),
    # sigmoid and bias: MiniMax-M3, MiniMax-M2, Hunyuan 3, LFM2
    Rule(
        lambda r: _sigmoid(r, bias=r.e_score_correction_bias), product="weight", weights="float32"
    ),
    Rule(_sigmoid, product="weight", weights="float32", given=True),
    Rule(
        lambda r: _sigmoid(r, eps=1e-20, scale=r.router_scaling_factor),
        product="float32", weights="float32", given=True,
    ),
    Rule(_lfm2, given=True, flat=False, autocast=False),
    # softmax and groups: DeepSeek-V2, Mistral 4, Mistral Large 4
    Rule(_deepseek_v2, product="float32", weights="float32"),
    Rule(
        lambda r: _groups(
            r, renormalize=r.norm_topk_prob, scale=r.routed_scaling_factor, group_fill=0.0
        ),
        autocast=False,
    ),
    Rule(
        lambda r: _groups(r, renormalize=True, scale=r.routed_scaling_factor, group_fill=0.0),
        product="float32", weights="float32",
    ),
    # softmax: Qwen2-MoE and its heirs, LaraMini, Qwen3.5, Mixtral, Jamba
    Rule(lambda r: {"renormalize": r.norm_topk_prob}),
    Rule(
        lambda r: {"renormalize": r.norm_topk_prob}, product="float32", weights="hidden_states"
    ),
    Rule(_softmax),
    Rule(_softmax, weights="float32"),
    Rule(lambda r: {}, weights="hidden_states", flat=False),
    # softmax of the chosen: gpt-oss, its privacy filter, Granite, Aria, Command A
    Rule(_softmax, biased=True, flat=False),
    Rule(
        lambda r: {"renormalize": True, "scale": 1 / r.top_k},
        product="float32", biased=True, flat=False,
    ),
    Rule(_softmax, logits=torch.float32, weights="hidden_states", flat=False),
    Rule(
        _softmax, logits=torch.float32, weights="hidden_states", flat=False, index_first=True
    ),
    Rule(_softmax, flat=False, autocast=False),
    Rule(_cohere2, weights="hidden_states", flat=False),
)  # fmt: skip


class FusedRouter(Recognised):
    """Before HF's class among the bases of a fused one: `rule` instead of its forward."""

    rule: Rule

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, ...]:
        """HF's outputs, in one kernel after the product."""
        rule = getattr(type(self), "rule", None)
        if named or not intact(self) or not _runs(rule, self, hidden_states, *given):
            return own_forward(self, hidden_states, *given, **named)
        return rule.run(select_experts, self, hidden_states, *given)


def _runs(rule: Rule, router: Any, hidden_states: Tensor, *given: Any) -> bool:
    if len(given) != rule.given or not runs_fused(hidden_states, router.weight):
        return False
    if not rule.autocast and torch.is_autocast_enabled(hidden_states.device.type):
        return False
    options = rule.options(router)
    groups = options.get("num_groups", 1)
    if groups > 1 and options["top_groups"] * (router.num_experts // groups) < router.top_k:
        return False  # HF fills up with what it masked, in no order
    return rule.flat or hidden_states.dim() == 2


_asked: dict[tuple[Any, ...], type[nn.Module] | None] = {}  # a class and its functions: the answer
_asking = threading.RLock()


def fused_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class's fused subclass, known to SWAPS from then on; None when no rule is the class's.

    The answer is for the functions that the class has: with others it is asked again.
    """
    with _asking:
        functions = tuple(methods(cls).items())
        if cls in SWAPS and not issubclass(SWAPS[cls], FusedRouter):
            return SWAPS[cls]
        if (cls, functions) not in _asked:
            _asked[cls, functions] = _new_class(cls, functions)
        fused = _asked[cls, functions]
        if fused is not None:
            SWAPS[cls] = fused
        return fused


def _new_class(cls: type[nn.Module], functions: tuple[Any, ...]) -> type[nn.Module] | None:
    rule = rule_of(cls)
    if rule is None:
        return None
    members = {"rule": rule, "functions": functions, "find": staticmethod(fused_class)}
    members |= {"__module__": __name__, "__doc__": cls.__doc__}
    return type(cls.__name__, (FusedRouter, cls), members)


def rule_of(cls: type[nn.Module]) -> Rule | None:
    """The rule that a class of transformers follows, by what it computes."""
    if why_not(cls) or why_unknown(cls):
        return None
    return next((rule for rule in RULES if _follows(cls, rule)), None)


def why_not(cls: type[nn.Module]) -> str | None:
    """None where the functions of a router's class are its own, else a sentence about the first."""
    return next((sentence for _, sentence in replaced(cls, methods(cls))), None)


def why_unknown(cls: type[nn.Module]) -> str | None:
    """Why no rule is asked for a router's class: None where its methods are functions of the input
    and of attributes that rules know, else the reason in one sentence."""
    if not cls.__module__.startswith("transformers.models."):
        return "only routers of transformers are recognised"
    codes = [method.__code__ for method in methods(cls).values()]
    words = {word for code in codes for word in code.co_names}
    if "topk" not in words:
        return "it does not choose experts by topk"
    known = set(_TORCH.split()) | set(_OWN) | methods(cls).keys()
    if unknown := sorted(words - known):
        shown = len(unknown) if len(unknown) <= 4 else 3  # "and 1 more" is as long as the name
        names = ", ".join(unknown[:shown])
        if len(unknown) > shown:
            names += f" and {len(unknown) - shown} more names"
        return f"its code uses {names}, which no rule of moe_patch covers"
    if any(isinstance(const, CodeType) for code in codes for const in code.co_consts):
        return "its code has functions inside functions, which are not looked into"
    return None


def why_left(cls: type[nn.Module]) -> str | None:
    """None for a router's class that is known to be fused, else the reason in one sentence."""
    if issubclass(cls, Fused) or cls in SWAPS:
        return None
    return why_not(cls) or why_unknown(cls) or "no rule of moe_patch computes what it does"


def is_router(name: str, module: Any) -> bool:
    """Whether the module with that name in a MoE block is, or feeds, its choice of experts."""
    inline = plain_class(module) is nn.Linear and module.out_features > 1
    own_name = name.rpartition(".")[2]
    return is_router_class(plain_class(module)) or inline and own_name in ("gate", "router")


def is_router_class(cls: type[nn.Module]) -> bool:
    """Whether a class is a router, by its name."""
    return _ROUTER.search(cls.__name__) is not None


_ROUTER = re.compile(r"(Router|(?<!Forget)Gate)$")


def _follows(cls: type[nn.Module], rule: Rule) -> bool:
    """Whether both give the same outputs, wherever HF's class gives any."""
    answered = False
    run = functools.partial(rule.run, reference.select_experts)
    for setting, (x_dtype, weight_dtype, autocast) in itertools.product(_SETTINGS, _DTYPES):
        if autocast and not rule.autocast:
            continue
        router = SimpleNamespace(**setting)
        for name, method in methods(cls).items():
            setattr(router, name, functools.partial(method, router))
        x, weight, bias = _draw(32, 16) / 2, _draw(16, 16), _draw(16) - 1
        weight[:, 0] = 1
        x[24:, 0] = -50  # the logits of these rows: it shows what is added to a sum of sigmoids
        router.weight, router.bias = weight.to(weight_dtype), bias.to(weight_dtype)
        router.e_score_correction_bias = bias
        x = x.to(x_dtype).view(*((2, 16) if rule.flat else (32,)), 16)
        given = (bias if router.use_expert_bias else None,) if rule.given else ()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours = _attempt(functools.partial(run, router), x, *given)
            with _Definite():
                theirs = _attempt(router.forward, x, *given)
        if theirs is not None and not _same(ours, theirs, rule.index_first):
            return False
        answered = answered or theirs is not None
    return answered


class _Definite(TorchFunctionMode):
    """Equals are chosen by lowest id, and autocast promotes what it promotes on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "topk":
            return _stable_topk(*args, **kwargs)
        promoted = name in ("softmax", "sum") and torch.is_autocast_enabled("cpu")
        if promoted and kwargs.get("dtype") is None:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


def _stable_topk(x: Tensor, k: int, dim: int = -1, sorted: bool = True) -> torch.return_types.topk:
    found = x.sort(dim=dim, descending=True, stable=True)
    values, index = (part.narrow(dim, 0, k) for part in found)
    return torch.return_types.topk((values, index))


def _attempt(forward: Callable[..., Any], *arguments: Any) -> Any:
    with contextlib.suppress(Exception):  # it needs what it is not given
        return forward(*arguments)


def _same(ours: Any, theirs: Any, index_first: bool) -> bool:
    both = ours, theirs
    if not all(isinstance(one, tuple) and len(one) == 3 for one in both):
        return False
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return False
    (logits, weights, index), (others, other_weights, other_index) = (
        (one[2], one[1], one[0]) if index_first else one for one in both
    )
    if not torch.equal(logits, others):
        return False
    if logits.dtype != torch.float32:  # HF may choose by scores that are rounded as logits are
        return True
    tolerance = 1e-5 if weights.dtype == torch.float32 else 1e-2
    return torch.equal(index, other_index) and torch.allclose(
        weights, other_weights, rtol=tolerance, atol=0
    )


def _draw(*size: int) -> Tensor:
    """Of the standard normal distribution, the same for the same size."""
    draw = torch.Generator("cpu").manual_seed(size[0])
    return torch.randn(size, generator=draw, device="cpu", dtype=torch.float32)


_TORCH = (  # nothing random, and nothing that asks for devices or modes
    "F ValueError bool dim dtype expand float float32 functional gather linear masked_fill max nn "
    "reshape scatter_ shape sigmoid softmax sum to topk torch type type_as unsqueeze values view "
    "zeros_like"
)
_OWN = {  # of a router: settings of each
    "top_k": (3, 3, 2, 7),
    "num_experts": (16, 16, 16, 16),
    "hidden_dim": (16, 16, 16, 16),
    "norm_topk_prob": (True, False, True, True),
    "num_group": (4, 1, None, 2),
    "topk_group": (2, 1, None, 1),
    "topk_method": ("group_limited_greedy", "greedy", "greedy", "group_limited_greedy"),
    "expert_selection_fn": ("softmax", "sigmoid", "sigmoid", "softmax"),
    "use_expert_bias": (True, False, True, True),
    "routed_scaling_factor": (2.5, 0.5, 1.0, 1.5),
    "router_scaling_factor": (1.5, 0.5, 1.0, 2.5),
    "weight": (), "bias": (), "e_score_correction_bias": (),
}  # fmt: skip
_SETTINGS = [{name: settings[i] for name, settings in _OWN.items() if settings} for i in range(4)]
_DTYPES = (  # of hidden_states and weight, and whether under autocast
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.bfloat16, torch.float32, False),
    (torch.float32, torch.float32, True),
)
