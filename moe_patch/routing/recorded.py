"""Routing: the experts that tokens were sent to, by layer; as a file, and as other batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def smallest(num_experts: int) -> torch.dtype:
    """The smallest integer type that holds their ids."""
    return next(dtype for dtype in _INTEGERS if num_experts - 1 <= torch.iinfo(dtype).max)


class Routing:
    """Experts of tokens, in the order in which a model's forwards had them.

    `top_k_index` [tokens, layers, K] is the layout of the `routed_experts` of vLLM and SGLang. A
    forward of B sequences of S tokens adds B * S tokens, sequence after sequence, padding included;
    in generation with a cache the prompt is one forward and each further token another.
    """

    def __init__(
        self,
        top_k_index: Tensor,
        *,
        num_experts: int | None = None,
        mask: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        layers: Sequence[str] = (),
        forwards: Sequence[tuple[int, int] | None] = (),
    ) -> None:
        """
        Args:
            top_k_index: [tokens, layers, K], of an integer type.
            num_experts: E of each layer; None: not known.
            mask: bool [tokens], False where a token is padding or has no choice; None: all have.
            top_k_weights: [tokens, layers, K], the routing weights.
            layers: names of the layers' blocks.
            forwards: (sequences, tokens of each) of every forward, or None where nobody knows.

        Raises:
            ValueError: shapes that do not fit together.
            TypeError: ids that are no integers, or a mask that is not bool.
        """
        if top_k_index.dim() != 3:
            raise ValueError(
                f"top_k_index must be [tokens, layers, K], found shape {tuple(top_k_index.shape)}."
            )
        if top_k_index.dtype.is_floating_point or top_k_index.dtype == torch.bool:
            raise TypeError(f"top_k_index is {top_k_index.dtype}: expert ids are integers.")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}, pass torch.bool.")
        if mask is not None and mask.shape != top_k_index.shape[:1]:
            raise ValueError(
                f"mask must be [{len(top_k_index)}], as top_k_index has so many tokens, found "
                f"shape {tuple(mask.shape)}."
            )
        if top_k_weights is not None and top_k_weights.shape != top_k_index.shape:
            raise ValueError(
                f"top_k_weights must be {list(top_k_index.shape)}, as top_k_index is, found shape "
                f"{tuple(top_k_weights.shape)}."
            )
        self.num_experts, self.layers = num_experts, tuple(layers)
        self.forwards = list(forwards)
        self._parts = [Part(top_k_index, mask, top_k_weights)]

    @property
    def top_k_index(self) -> Tensor:
        """[tokens, layers, K]."""
        return self._whole().index

    @property
    def mask(self) -> Tensor | None:
        """bool [tokens], False where a token is padding or has no choice; None: all have one."""
        return self._whole().mask

    @property
    def top_k_weights(self) -> Tensor | None:
        """[tokens, layers, K]; None where they were not kept."""
        return self._whole().weights

    def __len__(self) -> int:
        """Tokens."""
        return sum(len(part.index) for part in self._parts)

    def __repr__(self) -> str:
        tokens, layers, top_k = self.top_k_index.shape
        experts = "" if self.num_experts is None else f" of {self.num_experts}"
        return f"Routing({tokens} tokens, {layers} layers, {top_k}{experts} experts each)"

    def _whole(self) -> Part:
        if len(self._parts) != 1 or self._parts[0].ready is not None:
            self._parts = [joined(self._parts)]
        return self._parts[0]

    # Other batches

    def as_batch(self, length: int | None = None) -> Routing:
        """The routing of one forward of whole sequences [B, length], as a trainer runs it, from
        forwards of the same B sequences one after the other, as `generate` runs them.

        The last token of a generation is never an input, so that sequences have one token more than
        there are choices: tokens up to `length` are masked, and choose for themselves.

        Raises:
            ValueError: forwards of different numbers of sequences, or of unknown shape, or more
                tokens than `length`.
        """
        found = {None if shape is None else shape[0] for shape in self.forwards}
        if len(found) != 1 or None in found:
            raise ValueError(
                f"as_batch needs forwards of one number of sequences, found "
                f"{sorted(map(str, found)) or 'none'}: record each batch by itself."
            )
        (batch,) = found
        tokens = len(self) // batch
        length = tokens if length is None else length
        if tokens > length:
            raise ValueError(f"length is {length}, and each sequence has {tokens} tokens already.")
        whole, sizes = self._whole(), [b * s for b, s in self.forwards]
        mask = whole.mask
        if mask is None:
            mask = torch.ones(len(self), dtype=torch.bool, device=whole.index.device)

        def put(tensor: Tensor) -> Tensor:
            """[tokens, ...] in the order of the forwards -> [B * length, ...]."""
            parts = [part.unflatten(0, (batch, -1)) for part in tensor.split(sizes)]
            parts.append(tensor.new_zeros(batch, length - tokens, *tensor.shape[1:]))
            return torch.cat(parts, dim=1).flatten(0, 1)

        weights = None if whole.weights is None else put(whole.weights)
        return self._with(put(whole.index), put(mask), weights, [(batch, length)])

    def packed(self) -> Routing:
        """Without the tokens that are masked, for sequences that are packed one after another."""
        whole = self._whole()
        if whole.mask is None:
            return self
        kept = whole.mask.to(whole.index.device)
        weights = None if whole.weights is None else whole.weights[kept]
        return self._with(whole.index[kept], None, weights, [(1, int(kept.sum()))])

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[Tensor], attention_mask: Tensor, **more: Any
    ) -> Routing:
        """The routing of one padded forward from what a rollout engine returns for each sequence.

        Args:
            sequences: for each, the experts [tokens, layers, K] of its first tokens.
            attention_mask: [B, length], of the forward that is to replay them.
            more: `num_experts` and `layers`.

        Raises:
            ValueError: another number of sequences than the mask has, or more tokens in one.
        """
        if attention_mask.dim() != 2 or len(sequences) != len(attention_mask):
            raise ValueError(
                f"there are {len(sequences)} sequences, and attention_mask is "
                f"{list(attention_mask.shape)}: one row for each is needed."
            )
        batch, length = attention_mask.shape
        first = torch.as_tensor(sequences[0])
        index = first.new_zeros(batch, length, *first.shape[1:])
        mask = torch.zeros(batch, length, dtype=torch.bool)
        for row, (sequence, real) in enumerate(zip(sequences, attention_mask.cpu().bool())):
            places = real.nonzero()[: len(sequence), 0]
            if len(places) < len(sequence):
                raise ValueError(
                    f"sequence {row} has {len(sequence)} tokens, and its row of attention_mask "
                    f"{len(places)}."
                )
            index[row, places] = torch.as_tensor(sequence)
            mask[row, places] = True
        shape = [(batch, length)]
        return cls(index.flatten(0, 1), mask=mask.flatten(), forwards=shape, **more)

    def _with(
        self, index: Tensor, mask: Tensor | None, weights: Tensor | None, forwards: list[Any]
    ) -> Routing:
        return Routing(
            index, num_experts=self.num_experts, mask=mask, top_k_weights=weights,
            layers=self.layers, forwards=forwards,
        )  # fmt: skip

    # Files

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with `top_k_index`, and `mask` and `top_k_weights` if there are
        any."""
        whole = self._whole()
        tensors = {"top_k_index": whole.index, "mask": whole.mask, "top_k_weights": whole.weights}
        about = {
            "num_experts": self.num_experts, "layers": self.layers, "forwards": self.forwards
        }  # fmt: skip
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None},
            path,
            {"format": "pt", "routing": json.dumps(about)},
        )

    @classmethod
    def load(cls, path: str | Path) -> Routing:
        """Reads what `save` wrote, or any safetensors file with `top_k_index`.

        Raises:
            ValueError: the file has none, or is no safetensors file.
        """
        try:
            with safe_open(path, "pt") as file:
                names, about = set(file.keys()), (file.metadata() or {}).get("routing", "{}")
                if "top_k_index" not in names:
                    raise ValueError(f"{path} has no top_k_index: it has {sorted(names)}.")
                wanted = names & {"top_k_index", "mask", "top_k_weights"}
                tensors = {name: file.get_tensor(name) for name in wanted}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}.") from error
        more = json.loads(about)
        shapes = more.pop("forwards", ())
        forwards = [None if shape is None else tuple(shape) for shape in shapes]
        return cls(**tensors, **more, forwards=forwards)


@dataclass
class Part:
    """Of one forward, or of several."""

    index: Tensor
    mask: Tensor | None
    weights: Tensor | None
    ready: torch.cuda.Event | None = None
    """When copies to the host are there."""


def joined(parts: Sequence[Part]) -> Part:
    """One part, of the tokens of all."""
    for part in parts:
        if part.ready is not None:
            part.ready.synchronize()
    index = torch.cat([part.index for part in parts])
    mask = weights = None
    if any(part.mask is not None for part in parts):
        masks = [
            part.index.new_ones(len(part.index), dtype=torch.bool) if part.mask is None
            else part.mask.to(index.device)
            for part in parts
        ]  # fmt: skip
        mask = torch.cat(masks)
    if all(part.weights is not None for part in parts):
        weights = torch.cat([part.weights for part in parts])
    return Part(index, mask, weights)
