"""record_routing(): keeps the experts that every token of a model's forwards is sent to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from . import forwards
from .layers import Call, Layer, Watcher, layers_of, watching
from .recorded import Part, Routing, smallest

_SMALL = 1 << 16
"""Choices of one layer that wait for the others' as they are: one conversion for all is faster."""


@contextlib.contextmanager
def record_routing(
    model: nn.Module, *, weights: bool = False, device: torch.device | str | None = None
) -> Iterator[Routing]:
    """Inside, the choices of every MoE layer of `model` are kept, without waiting for the GPU.

    The model may be patched or not. Forwards that gradient checkpointing runs again are not kept a
    second time. `mask` is False where a 2-D `attention_mask` says padding.

    Args:
        model: a model of transformers, one that holds it (PEFT's, DDP's), or a bare block.
        weights: keep `top_k_weights`, too.
        device: where to; None: where the model chooses. "cpu": copied to pinned memory.

    Yields:
        A Routing that grows with every forward, to be read inside or after.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: it has no MoE layer that is known, or is being recorded already; in a forward:
            layers differ in tokens or K, or some do not run.
    """
    layers = layers_of(model)
    recorder = _Recorder(layers, weights, device)
    with watching(model, layers, recorder), forwards.watched(model):
        yield recorder.routing
    recorder.finish()


class Recording(Routing):
    """A Routing that forwards add to."""

    def __init__(self, layers: list[Layer]) -> None:
        num_experts = max(layer.num_experts for layer in layers)
        nothing = torch.empty(0, len(layers), 0, dtype=smallest(num_experts))
        super().__init__(
            nothing, num_experts=num_experts, layers=[layer.name for layer in layers]
        )  # fmt: skip
        self._parts = []

    def add(self, part: Part, shape: tuple[int, int] | None) -> None:
        """Appends the tokens of a forward."""
        self._parts.append(part)
        self.forwards.append(shape)

    def _whole(self) -> Part:
        if not self._parts:
            raise ValueError("nothing was recorded: no forward of the model ran.")
        return super()._whole()


class _Recorder(Watcher):
    verb = "recorded"

    def __init__(
        self, layers: list[Layer], weights: bool, device: torch.device | str | None
    ) -> None:
        self.at = {layer: at for at, layer in enumerate(layers)}
        self.weights, self.device = weights, device
        self.routing = Recording(layers)
        self.dtype = smallest(self.routing.num_experts)
        self._seen: dict[Layer, tuple[Tensor, Tensor | None]] = {}
        self._forward = forwards.NONE

    def saw(self, call: Call) -> None:
        """Keeps the choice; the last layer's ends the forward."""
        if call.layer in self._seen:
            self.finish()  # raises
        if call.index is None or self.weights and call.weights is None:
            what = "a choice" if call.index is None else "routing weights"
            raise ValueError(
                f"the experts of {call.layer.name or 'the block'} are not told {what}: patch the "
                "model first."
            )
        weights = call.weights.detach() if self.weights else None
        index = call.index.detach()
        if index.numel() > _SMALL:
            index = index.to(self.dtype)
        self._seen[call.layer] = index, weights
        if not self._forward.covers(len(call.index)):
            self._forward = forwards.current()
        if len(self._seen) == len(self.at):
            self._add()

    def finish(self) -> None:
        """Raises ValueError where a forward did not run every layer."""
        missing = [layer.name for layer in self.at if layer not in self._seen]
        if self._seen and missing:
            self._seen = {}
            raise ValueError(
                f"a forward did not run {missing[0]}"
                + (f" and {len(missing) - 1} more MoE layers" if len(missing) > 1 else "")
                + ": a routing needs the choices of every layer."
            )

    def _add(self) -> None:
        chosen = [self._seen[layer] for layer in self.at]
        self._seen = {}
        shapes = {tuple(index.shape) for index, _ in chosen}
        if len(shapes) > 1:
            raise ValueError(
                f"the layers of a forward chose experts of shapes {sorted(shapes)}, [tokens, K]: a "
                "routing needs the same in every layer."
            )
        place = chosen[0][0].device
        index = torch.stack([each.to(place) for each, _ in chosen], dim=1)  # [T, layers, K]
        index, weights = index.to(self.dtype), None
        if self.weights:
            weights = torch.stack([each.to(place) for _, each in chosen], dim=1)
        forward = self._forward if self._forward.covers(len(index)) else forwards.NONE
        self._forward = forwards.NONE
        mask = None if forward.mask is None else forward.mask.flatten().to(place)
        self.routing.add(self._moved(Part(index, mask, weights)), forward.shape)

    def _moved(self, part: Part) -> Part:
        if self.device is None or part.index.device == torch.device(self.device):
            return part
        device = torch.device(self.device)
        index, mask, weights = (_moved(t, device) for t in (part.index, part.mask, part.weights))
        ready = None
        if device.type == "cpu" and part.index.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(part.index.device))
        return Part(index, mask, weights, ready)


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or device.type != "cpu" or not tensor.is_cuda:
        return None if tensor is None else tensor.to(device, non_blocking=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
