"""Slots in expert order: the metadata that every grouped kernel reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Upper bound, known to the host, of the tiles that `num_slots` rows fill; at least 1."""
    return max(1, num_slots // block_m + min(num_experts, num_slots))


@dataclass(frozen=True)
class ExpertOrder:
    """Where each (token, choice) slot stands once slots are stably sorted by expert. All int32.

    Three tokens, top_k = 2, four experts, block_m = 2::

        top_k_index    = [[2, 0], [0, 4], [2, 2]]   4 == num_experts: dropped
        slot           =   0  1    2  3    4  5     slot = token * top_k + choice
        row_to_slot    = [1, 2, 0, 4, 5, 3]         dropped slots come last
        expert_offsets = [0, 2, 2, 5, 5]            expert 2 owns rows 2, 3, 4      [E + 1]
        slot_to_row    = [2, 0, 1, -1, 3, 4]        -1: dropped
        tile_expert    = [0, 2, 2, ...]             tiles of at most block_m rows   [max_tiles]
        tile_row       = [0, 2, 4, ...]             first row of each tile          [max_tiles]
        num_tiles      = [3]                        entries from here on mean nothing
        large_first    = [0, 1, 2, 3]               experts; those with more than twice the mean
                                                    of rows, rounded up, come first [E]
        num_large      = [0]                        how many those are
        taken          = [0]                        counts inside a kernel, which leaves it at 0

    Every shape follows from (T, K, E, block_m) alone, never from the routing.
    """

    expert_offsets: Tensor
    row_to_slot: Tensor
    slot_to_row: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    large_first: Tensor
    num_large: Tensor
    taken: Tensor
    block_m: int = field(kw_only=True)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in field order."""
        return (
            self.expert_offsets, self.row_to_slot, self.slot_to_row,
            self.tile_expert, self.tile_row, self.num_tiles,
            self.large_first, self.num_large, self.taken,
        )  # fmt: skip

    def apart(self) -> ExpertOrder:
        """The same for another stream: `taken` counts in one kernel at a time."""
        return replace(self, taken=torch.zeros_like(self.taken))

    @staticmethod
    def sizes(num_slots: int, num_experts: int, block_m: int) -> list[int]:
        """Lengths of the tensors, in field order."""
        tiles = max_tiles(num_slots, num_experts, block_m)
        return [num_experts + 1, num_slots, num_slots, tiles, tiles, 1, num_experts, 1, 1]

    @classmethod
    def numel(cls, num_slots: int, num_experts: int, block_m: int) -> int:
        """Length of the buffer that `view` splits."""
        if type(num_slots) is not int:  # a symbol, while torch.compile traces
            return sum(_pieces.__wrapped__(num_slots, num_experts, block_m)[0])
        return sum(_pieces(num_slots, num_experts, block_m)[0])

    @classmethod
    def view(cls, buffer: Tensor, num_slots: int, num_experts: int, block_m: int) -> ExpertOrder:
        """The tensors as views of one int32 buffer, each 16-byte aligned."""
        pieces = _pieces.__wrapped__ if torch.compiler.is_compiling() else _pieces
        lengths, kept = pieces(num_slots, num_experts, block_m)
        parts = buffer.split_with_sizes(lengths)
        return cls(*[parts[i] for i in kept], block_m=block_m)


@functools.lru_cache(1024)
def _pieces(num_slots: int, num_experts: int, block_m: int) -> tuple[list[int], list[int]]:
    """Lengths of the tensors and of what pads them to 16 bytes; which of these are theirs."""
    lengths: list[int] = []
    kept: list[int] = []
    for size in ExpertOrder.sizes(num_slots, num_experts, block_m):
        kept.append(len(lengths))
        lengths += [size, -size % 4] if size % 4 else [size]
    return lengths, kept
