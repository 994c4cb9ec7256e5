"""replay_routing(): a model's forwards take experts that were chosen before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..notices import warn_once
from .layers import Call, Layer, Watcher, layers_of, watching
from .recorded import Routing


@contextlib.contextmanager
def replay_routing(
    model: nn.Module, routing: Routing | Tensor, *, mask: Tensor | None = None
) -> Iterator[None]:
    """Inside, the routers of `model` compute their scores and weights as ever, gradients included,
    for the experts that `routing` names.

    Each layer takes the tokens in their order, as many as it is called with: a forward after the
    other, micro-batches and steps of generation too. What gradient checkpointing runs again takes
    what it took. The model may be patched or not.

    Args:
        model: a model of transformers, one that holds it (PEFT's, DDP's), or a bare block.
        routing: a Routing, or its ids [tokens, layers, K]. `layers` may also be all of the model's,
            as vLLM has it, those without experts among them.
        mask: bool [tokens], False where a token is to choose for itself; None: routing's own.

    Raises:
        TypeError: `model` is no nn.Module, `routing` neither a Routing nor a tensor.
        ValueError: the routing is empty or another model's: other layers, experts or ids; it names
            an expert twice for a token; the model is being replayed already; in a forward: another
            K, or more tokens than are left.
        RuntimeError: in a forward, a router that does not choose by topk, or one that runs again
            after several forwards under a checkpoint that is not transformers' or torch's.
    """
    layers = layers_of(model)
    if isinstance(routing, Tensor):
        routing = Routing(routing, mask=mask)
    elif not isinstance(routing, Routing):
        raise TypeError(f"routing is a {type(routing).__name__}: pass a Routing or a tensor.")
    elif mask is not None:
        routing = Routing(routing.top_k_index, num_experts=routing.num_experts, mask=mask)
    replay = _Replay(layers, routing)
    with watching(model, layers, replay):
        yield
    replay.say_left()


class _Replay(Watcher):
    verb, of_routers = "replayed", True

    def __init__(self, layers: list[Layer], routing: Routing) -> None:
        if not len(routing):
            raise ValueError("the routing has no tokens: record one with record_routing.")
        self.index, self.mask = _of_layers(routing.top_k_index, layers), routing.mask
        _check_experts(self.index, routing, layers)
        self.at = {layer: at for at, layer in enumerate(layers)}
        self.next = dict.fromkeys(layers, 0)
        """The first token that a layer has not had yet."""
        self.last: dict[Layer, Call] = {}
        self.pending = dict.fromkeys(layers, 0)
        """Forwards of a layer since one of them ran again."""
        self._ids: dict[tuple[int, int, torch.device], Tensor] = {}

    def given(self, call: Call, tokens: int, top_k: int, device: torch.device) -> Tensor:
        """The ids of the next tokens, or of those that the call had before."""
        begin = self._begin(call, tokens)
        total = len(self.index)
        if begin + tokens > total:
            raise ValueError(
                f"the routing has {total} tokens, {begin} of them were replayed, and a forward has "
                f"{tokens}: record as many as are to be replayed."
            )
        if top_k != self.index.shape[2]:
            raise ValueError(
                f"the routing has {self.index.shape[2]} experts a token, and the router of "
                f"{call.layer.name or 'the block'} chooses {top_k}: it is another model's."
            )
        return self._chunk(begin, tokens, device)[:, self.at[call.layer]].long()

    def _begin(self, call: Call, tokens: int) -> int:
        layer = call.layer
        if self in call.begins:
            return call.begins[self]
        if call.again:
            if self.pending[layer] > 1:
                raise RuntimeError(
                    f"{layer.name or 'the block'} runs again after {self.pending[layer]} forwards, "
                    "and nobody knows which of them: checkpoint with transformers' "
                    "gradient_checkpointing_enable, or run each backward after its forward."
                )
            self.pending[layer] = 0
            return self.last[layer].begins[self]
        begin = call.begins[self] = self.next[layer]
        self.next[layer] += tokens
        self.pending[layer] += 1
        self.last[layer] = call
        return begin

    def _chunk(self, begin: int, tokens: int, device: torch.device) -> Tensor:
        """[tokens, layers, K] with -1 for those that choose for themselves, on the device."""
        at = begin, tokens, device
        if at not in self._ids:
            ids = self.index[begin : begin + tokens].to(device, non_blocking=True)
            if self.mask is not None:
                kept = self.mask[begin : begin + tokens].to(device, non_blocking=True)
                ids = ids.to(torch.int32).masked_fill(~kept[:, None, None], -1)
            others = {key: found for key, found in self._ids.items() if key[:2] == at[:2]}
            self._ids = {**others, at: ids}  # of the forward that is under way
        return self._ids[at]

    def say_left(self) -> None:
        """Warns of tokens that no forward took."""
        left = len(self.index) - max(self.next.values())
        if left:
            warn_once(
                f"{left} of the {len(self.index)} tokens of a replayed routing were not replayed: "
                "no forward asked for them."
            )


def _of_layers(index: Tensor, layers: list[Layer]) -> Tensor:
    """[tokens, MoE layers, K]."""
    found, numbers = index.shape[1], [layer.number for layer in layers]
    if found == len(layers):
        return index
    if None not in numbers and len(set(numbers)) == len(layers) and found > max(numbers):
        return index[:, numbers]
    raise ValueError(
        f"the routing has {found} layers and the model {len(layers)} with experts: it is another "
        "model's."
    )


def _check_experts(index: Tensor, routing: Routing, layers: list[Layer]) -> None:
    experts = min(layer.num_experts for layer in layers)
    if routing.num_experts not in (None, max(layer.num_experts for layer in layers)):
        raise ValueError(
            f"the routing is of {routing.num_experts} experts a layer, and the model has "
            f"{experts}: it is another model's."
        )
    if routing.mask is not None:
        index = index[routing.mask.to(index.device)]
    if not index.numel():
        return
    least, most = int(index.min()), int(index.max())
    if least < 0 or most >= experts:
        raise ValueError(
            f"the routing has ids from {least} to {most}, and the model has {experts} experts a "
            "layer."
        )
    if any(layer.by_tokens for layer in layers):  # their choice is not given
        index = index[:, [not layer.by_tokens for layer in layers]]
    if any(bool((index[..., by:] == index[..., :-by]).any()) for by in range(1, index.shape[2])):
        raise ValueError(
            "the routing names an expert twice for a token, which no router does: mask the tokens "
            "whose choice is not known."
        )
