"""Which fused activation does what an experts class's own gate does: the gate is asked.

Families write their gates anew (clamps, alphas, offsets), and new releases bring more. So a gate is
known by what it computes, not by its class.
"""

from __future__ import annotations

import functools
import itertools
from types import CodeType, NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from .. import reference
from ..activation import ACTS, FORMS, Activation
from ..compat import GATE, GLOBAL_HOOKS, MODULE_HOOKS, default_gate
from .original import replaced
from .parts import has_gate

KNOWN = "_fused_activation"
"""Attribute of experts: a question (`_question`), and the fused activation that answers it."""

SILU = "silu"

_SILUS = (nn.SiLU, getattr(activations, "SiLUActivation", nn.SiLU))

_FORWARDS = {
    cls: cls.forward
    for cls in (
        *(getattr(activations, name, None) for name in (
            "AccurateGELUActivation", "FastGELUActivation", "GELUActivation", "GELUTanh",
            "NewGELUActivation", "QuickGELUActivation", "ReLUSquaredActivation", "SiLUActivation",
        )),
        nn.GELU, nn.ReLU, nn.SiLU,
    )
    if cls is not None and not [*replaced(cls, ["forward"])]
}  # fmt: skip
"""Activations without a state: {class: its forward}."""
_FUNCTIONS = (F.silu, F.gelu, F.relu, torch.relu)
_WORDS = {
    "F", "act_fn", "chunk", "clamp", "dtype", "float", "functional", "gelu", "nn", "relu",
    "sigmoid", "silu", "tanh", "to", "torch",
}  # fmt: skip
"""Names that the code of a gate may use besides numbers of its experts."""
_HOOKS = tuple(zip(MODULE_HOOKS, GLOBAL_HOOKS or ()))
"""Where hooks are: an attribute of a module, and the dictionary of those on all modules."""

_MISSING = "missing"


def is_silu(act_fn: Any) -> bool:
    """Whether the activation is SiLU, by its class, and nothing besides."""
    if act_fn is F.silu:
        return True
    cls = type(act_fn)
    return cls in _SILUS and is_plain(act_fn)


def is_plain(act_fn: Any) -> bool:
    """Whether calling the activation does nothing but compute a known function: no state, hooks
    on it or on all modules, or another forward. So it may be computed without a call."""
    forward = _FORWARDS.get(type(act_fn))
    if forward is None:
        return any(act_fn is function for function in _FUNCTIONS)
    own = act_fn.__dict__
    if type(act_fn).forward is not forward or "forward" in own:
        return False
    if GLOBAL_HOOKS is None:
        return False
    for name, everywhere in _HOOKS:
        if own[name] or everywhere:
            return all_of_deepspeed(act_fn)
    return True


def all_of_deepspeed(module: nn.Module) -> bool:
    """Whether every hook is DeepSpeed's, which bring parameters and leave the numbers alone."""
    found = [
        hook
        for name, everywhere in _HOOKS
        for each in (getattr(module, name), everywhere)
        for hook in each.values()
    ]
    return GLOBAL_HOOKS is not None and all(
        getattr(hook, "__module__", "").startswith("deepspeed.") for hook in found
    )


def activation_of(experts: nn.Module) -> str | None:
    """For `fused_experts`; None when no fused activation does what the experts' gate does."""
    gate, act_fn = getattr(type(experts), GATE, None), getattr(experts, "act_fn", None)
    if gate is None or GATE in experts.__dict__:
        return None
    if gate is default_gate and is_silu(act_fn) and pairing_of(experts) == FORMS[0]:
        return SILU
    if act_fn is not None and not is_plain(act_fn):
        return None
    question, answer = vars(experts).get(KNOWN, (None, None))
    if question is None or not _is_same(question, experts, gate, act_fn):
        if torch.compiler.is_compiling():  # it cannot be asked there
            return None
        question = _question(experts, gate, act_fn)
        answer = _ask(experts, question) if _is_whole(question, experts) else None
        experts.__dict__[KNOWN] = question, answer
    return answer


def has_own_gate(experts: nn.Module) -> bool:
    """Whether the gate is not act_fn(gate) * up, as HF's decorator provides it."""
    return getattr(type(experts), GATE, None) is not default_gate or GATE in vars(experts)


def pairing_of(experts: nn.Module) -> str:
    """How rows of the first projection make pairs, as HF's decorator has it."""
    if not getattr(experts, "has_gate", True):
        return "ungated"
    return "concatenated" if getattr(experts, "is_concatenated", True) else "interleaved"


Question = tuple[Any, Any, tuple[tuple[str, Any], ...], tuple[tuple[str, float], ...]]
"""(gate, act_fn, what act_fn reads of itself, numbers or None that the gate reads of experts)."""


def _question(experts: nn.Module, gate: Any, act_fn: Any) -> Question:
    own = vars(act_fn) if isinstance(act_fn, nn.Module) else {}
    forward = _FORWARDS.get(type(act_fn))
    state = () if forward is None else forward.__code__.co_names
    numbers = _words(gate) if has_gate(experts) else ()
    return (
        gate,
        act_fn,
        tuple((name, own[name]) for name in state if name in own),
        tuple((name, vars(experts).get(name, _MISSING)) for name in numbers),
    )


def _words(gate: Any) -> list[str]:
    """Names that the code of a gate reads, besides those of known functions."""
    code = getattr(gate, "__code__", None)
    return [] if code is None else [word for word in code.co_names if word not in _WORDS]


def _is_whole(question: Question, experts: nn.Module) -> bool:
    """Whether the gate can depend on nothing else."""
    gate, _, _, numbers = question
    if gate is default_gate or not has_gate(experts):
        return True
    code = getattr(gate, "__code__", None)
    if code is None or code.co_freevars or [*replaced(type(experts), [GATE])]:
        return False
    nested = any(isinstance(const, CodeType) for const in code.co_consts)
    return not nested and all(type(number) in (int, float, NoneType) for _, number in numbers)


def _is_same(question: Question, experts: nn.Module, gate: Any, act_fn: Any) -> bool:
    asked_gate, asked_act_fn, state, numbers = question
    if asked_gate is not gate or asked_act_fn is not act_fn:
        return False
    for name, value in state:
        if getattr(act_fn, name) is not value:
            return False
    return all(getattr(experts, name, None) == number for name, number in numbers)


def _ask(experts: Any, question: Question) -> str | None:
    numbers = {float(number) for _, number in question[-1] if number is not None}
    limits = tuple(number for number in numbers if 0 < number < float("inf"))
    form = pairing_of(experts)
    probe, ungated = _probe(limits, form), form == "ungated"
    try:
        with torch.no_grad():
            answer = (experts.act_fn if ungated else getattr(experts, GATE))(probe.clone())
    except Exception:  # whatever it needs, it is no function of gate and up alone
        return None
    if not isinstance(answer, Tensor) or answer.shape != (len(probe), 4 if ungated else 2):
        return None
    alphas = {1.702} | numbers  # quick_gelu
    limits, offsets = ((), (0.0,)) if ungated else (limits, (0.0, 1.0))
    for act, limit, offset in itertools.product(ACTS, (None, *limits), offsets):
        for alpha in (1.0, *alphas) if ACTS[act].has_alpha else (1.0,):
            activation = Activation(act, limit, alpha, offset, form)
            expected = reference.glu(probe, activation)
            if torch.allclose(answer.to(expected), expected, rtol=1e-5, atol=1e-6):  # some cast
                return str(activation)
    return None


@functools.cache
def _probe(limits: tuple[float, ...], form: str) -> Tensor:
    """[N, 4] float64: two gates and two ups a row, near zero, in between and past the limits."""
    values = [0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 12.0, 200.0, *(1.25 * limit for limit in limits)]
    values = [0.0, *values, *(-value for value in values)]
    values = torch.tensor(values, dtype=torch.float64, device="cpu")
    gate, up = (each.reshape(-1) for each in torch.meshgrid(values, values, indexing="ij"))
    pairs = [gate, gate.roll(7), up, up.roll(3)]
    return torch.stack(pairs[::2] + pairs[1::2] if form == "interleaved" else pairs, dim=1)
