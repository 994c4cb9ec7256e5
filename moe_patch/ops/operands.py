"""What the experts are computed from, by name: two projections and the routing.

T tokens, H hidden size, I intermediate size, E experts, K choices a token, S = T*K slots, R rank of
a low-rank update. A projection maps rows of `in` numbers to rows of `out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..formats.packed import Packed


class Projection(NamedTuple):
    """One linear map of every expert: x (W + B A)^T + bias, W times its scales where it is FP8.

    A weight in 4 bits is one `Packed`, or, as operators and autograd take it, its tensors.
    """

    weight: Any  # [E, out, in], any strides; or Packed; or its codes [E, out, in / 2]
    bias: Tensor | None = None  # [E, out], contiguous
    a: Tensor | None = None  # [E, R, in], contiguous; `a` and `b` come together
    b: Tensor | None = None  # [E, out, R], contiguous
    scale: Tensor | None = None  # [E, ceil(out / 128), ceil(in / 128)], of an FP8 weight;
    # [E, out, in / group] of one in 4 bits
    zeros: Tensor | None = None  # as these, of one in 4 bits, or None

    def taken_apart(self) -> Projection:
        """With the tensors of a packed weight in its place."""
        if not isinstance(self.weight, Packed):
            return self
        codes, scales, zeros = self.weight.codes, self.weight.scales, self.weight.zeros
        return self._replace(weight=codes, scale=scales, zeros=zeros)

    def put_together(self, format: str) -> Projection:
        """The opposite: `format` is "" of a weight that is not packed."""
        if not format:
            return self
        packed = Packed(self.weight, self.scale, self.zeros, format)
        return self._replace(weight=packed, scale=None, zeros=None)


class Routing(NamedTuple):
    """Which experts each token chose, and how much each counts."""

    # not the method of tuples
    index: Tensor  # type: ignore[assignment]  # [T, K] integers; outside 0 .. E-1: dropped
    weights: Tensor  # [T, K]
    on_input: bool  # whether a weight multiplies its expert's input (Llama4), not its output


class Inputs(NamedTuple):
    """Every tensor that may want a gradient; also one entry for each, as gradients or flags."""

    hidden_states: Any  # [T, H]
    top_k_weights: Any  # [T, K]
    gate_up: Projection  # out = 2I (I when ungated), in = H
    down: Projection  # out = H, in = I

    def flat(self) -> tuple[Any, ...]:
        """All of them side by side, as autograd and operators pass them."""
        return (self.hidden_states, self.top_k_weights, *self.gate_up, *self.down)

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Inputs:
        """The opposite of `flat`."""
        hidden_states, top_k_weights, *rest = flat
        each = len(Projection._fields)
        gate_up, down = Projection(*rest[:each]), Projection(*rest[each:])
        return cls(hidden_states, top_k_weights, gate_up, down)


NUM_INPUTS = 2 + 2 * len(Projection._fields)
"""Length of `Inputs.flat()`."""
