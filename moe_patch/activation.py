"""Gated activations that the kernels fuse: act(gate) * up, with the variants that families add."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

ACTS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class Activation:
    """act(gate) * (up + offset), after gate is clamped to at most `limit` and up to +-`limit`.

    `act` is "silu" (gate * sigmoid(alpha * gate)), "gelu" (by erf), "gelu_tanh" or "relu"; alpha is
    silu's alone. gpt-oss has limit 7, alpha 1.702, offset 1 (arXiv:2508.10925, appendix).

    Raises:
        ValueError: an unknown act, an alpha without silu, a limit that is not above 0.
    """

    act: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ValueError(f"act is {self.act!r}, use one of {', '.join(map(repr, ACTS))}.")
        if self.alpha != 1 and self.act != "silu":
            raise ValueError(f"alpha is {self.alpha}, and {self.act!r} takes none: leave it out.")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is {self.limit}: it must be above 0, or None.")

    def __str__(self) -> str:
        return f"{self.act} {self.limit} {self.alpha!r} {self.offset!r}"


@functools.lru_cache(64)
def parse(text: str) -> Activation:
    """From `str` of an Activation, or the name of an act alone: operators pass no objects."""
    act, *numbers = text.split()
    if not numbers:
        return Activation(act)
    limit, alpha, offset = numbers
    limit = None if limit == "None" else float(limit)
    return Activation(act, limit, float(alpha), float(offset))


@functools.lru_cache(64)
def constants(text: str) -> dict[str, Any]:
    """As kernels take it; LIMIT 0 is none."""
    found = parse(text)
    limit = found.limit or 0.0
    return {"ACT": found.act, "LIMIT": limit, "ALPHA": found.alpha, "OFFSET": found.offset}
