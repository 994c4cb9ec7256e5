"""Which ways through the kernels sizes choose."""

from __future__ import annotations

import torch

from .decode import decodes
from .sort_tokens import programs
from .tiles import block_m


def ways(
    tokens: int, top_k: int, gate_up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype
) -> tuple[str, ...]:
    """Names of the code paths that sizes choose, for weights [E, N, K] or stored [E, K, N].

    Tests and the certificate visit each: whether few tokens are decoded, the height of a tile, how
    many slots a program of the sort takes, and the tiles of weight gradients.
    """
    experts, slots = len(down), tokens * top_k
    index = torch.empty(tokens, top_k, device="meta")
    return (
        f"decodes {decodes(index, gate_up, down)}",
        f"rows of a tile {block_m(slots, experts, dtype)}",
        f"slots of a sort {'one program' if programs(slots) == 1 else 'several'}",
        f"many rows an expert {slots >= 512 * experts}",
    )
