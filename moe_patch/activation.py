"""Activations that the kernels fuse: act(gate) * up and its variants, or act alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
FORMS = ("concatenated", "interleaved", "ungated")
"""How the rows of the first projection make pairs: gate rows first, gate and up in turn, not at
all."""


@dataclass(frozen=True)
class Activation:
    """act(gate) * (up + offset), after gate is clamped to at most `limit` and up to +-`limit`.

    `act` is "silu" (gate * sigmoid(alpha * gate)), "gelu" (by erf), "gelu_tanh", "relu" or "relu2",
    its square; alpha is silu's alone. gpt-oss has limit 7, alpha 1.702, offset 1 and rows
    interleaved (arXiv:2508.10925, appendix). "ungated" is act(x), without limit and offset.

    Raises:
        ValueError: an unknown act or form, an alpha without silu, a limit that is not above 0, a
            limit or an offset without a gate.
    """

    act: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    form: str = "concatenated"

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ValueError(f"act is {self.act!r}, use one of {', '.join(map(repr, ACTS))}.")
        if self.alpha != 1 and self.act != "silu":
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
        """Of the first projection, for I of the second."""
        return intermediate_size * (1 if self.form == "ungated" else 2)


@functools.lru_cache(64)
def parse(text: str) -> Activation:
    """From `str` of an Activation, or the name of an act alone: operators pass no objects."""
    act, *numbers = text.split()
    if not numbers:
        return Activation(act)
    limit, alpha, offset, form = numbers
    limit = None if limit == "None" else float(limit)
    return Activation(act, limit, float(alpha), float(offset), form)


@functools.lru_cache(64)
def constants(text: str) -> dict[str, Any]:
    """As kernels take it; LIMIT 0 is none."""
    found = parse(text)
    limit = found.limit or 0.0
    return {
        "ACT": found.act, "LIMIT": limit, "ALPHA": found.alpha, "OFFSET": found.offset,
        "FORM": found.form,
    }  # fmt: skip
