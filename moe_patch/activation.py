"""Activations that the kernels fuse: act(gate) * up and its variants, or act alone.

ACTS is the one place where an act is defined, once for the kernels and once in plain PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # no kernel runs then, and the twins need none
    tl = None


@dataclass(frozen=True)
class Act:
    """An entry of ACTS.

    `kernel(gate, ALPHA, SIGMOID)` is source for Triton and Gluon, which compile it into every
    kernel that activates: from a float32 tile it returns (act(gate), its derivative by gate). It
    may use elementwise functions of `tl` (exp, erf, abs, where, maximum), SIGMOID(x), which is
    1 / (1 + exp(-x)), numbers, and nothing else of its file. `twin(gate, alpha)` is act(gate) in
    PyTorch, in any dtype; autograd differentiates it. `has_alpha` says whether an Activation may
    set alpha, 1 for all others.
    """

    kernel: Callable[..., Any]
    twin: Callable[[Tensor, float], Tensor]
    has_alpha: bool = False


def _silu(gate, ALPHA, SIGMOID):
    sigmoid = SIGMOID(ALPHA * gate)
    return gate * sigmoid, sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid))


def _gelu(gate, ALPHA, SIGMOID):
    share = 0.5 * (1.0 + tl.erf(0.7071067811865476 * gate))
    return gate * share, share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)


def _gelu_tanh(gate, ALPHA, SIGMOID):
    # (1 + tanh(z)) / 2 is sigmoid(2 z)
    cube = 0.044715 * gate * gate
    share = SIGMOID(1.5957691216057308 * gate * (1.0 + cube))
    value = gate * share
    return value, share + value * (1.0 - share) * 1.5957691216057308 * (1.0 + 3.0 * cube)


def _relu(gate, ALPHA, SIGMOID):
    return tl.where(gate < 0, 0.0, gate), tl.where(gate > 0, 1.0, 0.0)


def _relu2(gate, ALPHA, SIGMOID):
    slope = 2.0 * tl.where(gate < 0, 0.0, gate)
    return 0.5 * slope * gate, slope


def _silu_twin(gate: Tensor, alpha: float) -> Tensor:
    return F.silu(gate) if alpha == 1 else gate * (alpha * gate).sigmoid()


ACTS: dict[str, Act] = {
    "silu": Act(_silu, _silu_twin, has_alpha=True),  # gate * sigmoid(alpha * gate)
    "gelu": Act(_gelu, lambda gate, alpha: F.gelu(gate)),  # by erf
    "gelu_tanh": Act(_gelu_tanh, lambda gate, alpha: F.gelu(gate, approximate="tanh")),
    "relu": Act(_relu, lambda gate, alpha: F.relu(gate)),
    "relu2": Act(_relu2, lambda gate, alpha: F.relu(gate) ** 2),
}
"""Every value of `Activation.act`. A new act is one entry here, and nothing anywhere else: kernels,
twins, the recognition of a model's own gate and the tests of every activation read this table."""

FORMS = ("concatenated", "interleaved", "ungated")
"""How the rows of the first projection make pairs: gate rows first, gate and up in turn, not at
all."""


@dataclass(frozen=True)
class Activation:
    """act(gate) * (up + offset), after gate is clamped to at most `limit` and up to +-`limit`.

    `act` is a name in ACTS: "silu" (gate * sigmoid(alpha * gate)), "gelu" (by erf), "gelu_tanh",
    "relu" or "relu2", its square; alpha is silu's alone. gpt-oss has limit 7, alpha 1.702, offset 1
    and rows interleaved (arXiv:2508.10925, appendix). "ungated" is act(x), without limit and
    offset.

    Raises:
        ValueError: an unknown act or form, an alpha where the act has none, a limit that is not
            above 0, a limit or an offset without a gate.
    """

    act: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    form: str = "concatenated"

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ValueError(f"act is {self.act!r}, use one of {', '.join(map(repr, ACTS))}.")
        if self.alpha != 1 and not ACTS[self.act].has_alpha:
            raise ValueError(f"alpha is {self.alpha}, and {self.act!r} takes none: leave it out.")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is {self.limit}: it must be above 0, or None.")
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}, use one of {', '.join(map(repr, FORMS))}.")
        if self.form == "ungated" and (self.limit is not None or self.offset):
            raise ValueError("an ungated activation takes no limit and no offset: leave them out.")

    def __str__(self) -> str:
        return f"{self.act} {self.limit} {self.alpha!r} {self.offset!r} {self.form}"

    def rows(self, intermediate_size: int) -> int:
        """Return the rows of the first projection, for I columns of the second."""
        return intermediate_size * (1 if self.form == "ungated" else 2)


@functools.lru_cache(64)
def parse(text: str) -> Activation:
    """Return the Activation whose `str` this is, or that of an act's name alone.

    PyTorch's custom operators take no objects, so an activation crosses them as text.
    """
    act, *numbers = text.split()
    if not numbers:
        return Activation(act)
    limit, alpha, offset, form = numbers
    limit = None if limit == "None" else float(limit)
    return Activation(act, limit, float(alpha), float(offset), form)
