"""factors(): PEFT's adapters on the experts' weights as two factors, in one step of autograd.

PEFT keeps A [E*R, in], experts slowest, and B [out, R*E], experts fastest (its ParamWrapper).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import differentiable

LowRank = tuple[Tensor, Tensor]
"""(A [E, R, K], B [E, N, R]): the weights [E, N, K] are used as weight + B @ A, never formed."""

# of A [E, R, in] and B [out, R, E], where in is K, and where it is N
_TURNS = {False: ((0, 1, 2), (2, 0, 1)), True: ((0, 2, 1), (2, 1, 0))}
_BACK = {False: ((0, 1, 2), (1, 2, 0)), True: ((0, 2, 1), (2, 1, 0))}


def factors(
    adapters: Sequence[tuple[Tensor, Tensor, float]],
    num_experts: int,
    dtype: torch.dtype,
    crossed: bool = False,
) -> LowRank:
    """The adapters of one projection side by side, for `fused_experts`; differentiable.

    Args:
        adapters: (A [E*R, in], B [out, R*E], scaling) of each, as PEFT packs them.
        num_experts: E.
        dtype: of the result.
        crossed: PEFT's `in` is the projection's N, not its K: it took weights stored [E, K, N] for
            [E, N, K].

    Returns:
        (A [E, R, K], B [E, N, R]) with the scaling in B, R the sum of all ranks.
    """
    leaves = [leaf for a, b, _ in adapters for leaf in (a, b)]
    scalings = [scaling for _, _, scaling in adapters]
    return _Factors.apply(num_experts, dtype, crossed, scalings, *leaves)


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_experts, dtype, crossed, scalings, *leaves):
        ctx.options = crossed, scalings
        ctx.leaves = [(leaf.shape, leaf.dtype) for leaf in leaves]
        pairs = []
        for at, scaling in enumerate(scalings):
            a, b = leaves[2 * at : 2 * at + 2]
            a = a.view(num_experts, -1, a.shape[1]).permute(_TURNS[crossed][0])
            b = b.view(b.shape[0], -1, num_experts).permute(_TURNS[crossed][1])
            a, b = (b, a) if crossed else (a, b)
            pairs.append((_scaled(a, 1.0, dtype), _scaled(b, scaling, dtype)))
        if len(pairs) == 1:
            return pairs[0]
        return tuple(torch.cat(side, dim) for side, dim in zip(zip(*pairs), (1, 2)))

    @staticmethod
    def backward(ctx, d_a, d_b):
        (crossed, scalings), found, at = ctx.options, [], 0
        for i, scaling in enumerate(scalings):
            (a_shape, dtype), (b_shape, _) = ctx.leaves[2 * i : 2 * i + 2]
            rank = a_shape[0] // d_a.shape[0]
            ours = d_a[:, at : at + rank], d_b[:, :, at : at + rank]
            scales = (1.0, scaling)
            if crossed:
                ours, scales = ours[::-1], scales[::-1]
            for d, scale, turn, shape in zip(ours, scales, _BACK[crossed], (a_shape, b_shape)):
                found.append(_scaled(d.permute(turn), scale, dtype).view(shape))
            at += rank
        return None, None, None, None, *found


def _scaled(x: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """x * scaling, contiguous and of that dtype: x itself if it is all that."""
    if scaling == 1 and x.dtype == dtype and x.is_contiguous():
        return x
    # torch.compile takes the strides of `out` for those of x, and nothing differentiates `out`
    if torch.compiler.is_compiling() or differentiable.wanted(x):
        return (x * scaling).to(dtype).contiguous()
    return torch.mul(x, scaling, out=x.new_empty(x.shape, dtype=dtype))
