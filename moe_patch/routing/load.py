"""expert_load(): how many tokens each expert of each layer gets, counted where the model runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, distributed, nn

from . import forwards
from .balance import BIAS, move_bias, switch_loss
from .layers import Call, Layer, Watcher, layers_of, watching

if TYPE_CHECKING:
    from .callback import LoadCallback

_FIXED = 2.0**32
"""Routing weights are summed as integers of 2 ** -32, in any order the same."""
_PENDING = 1 << 22
"""Choices that are counted at the latest when there are so many; else a forward's at once."""


class _Pending(NamedTuple):
    """A layer's choices that are not counted yet."""

    layer: Layer
    top_k_index: Tensor
    weights: Tensor | None
    mask: Tensor | None


class ExpertLoad(Watcher):
    """Counts of what the routers of a model choose; `expert_load` makes one.

    Counting waits for no GPU; reading does. Tokens that a 2-D `attention_mask` calls padding are
    not counted, nor are forwards that gradient checkpointing runs again.
    """

    verb = "counted"

    def __init__(self, model: nn.Module, *, keep_logits: bool = False) -> None:
        self.model, self.keep_logits = model, keep_logits
        self.of_routers = keep_logits
        self._layers = layers_of(model)
        self._at = {layer: at for at, layer in enumerate(self._layers)}
        self._experts = max(layer.num_experts for layer in self._layers)
        self._open: contextlib.ExitStack | None = None
        self._first: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self.reset()

    # What is counted

    @property
    def layers(self) -> list[str]:
        """Names of the MoE blocks."""
        return [layer.name for layer in self._layers]

    @property
    def counts(self) -> Tensor:
        """Choices of each expert, int64 [layers, E]."""
        return self._sums(0)[:, :-1]

    @property
    def dropped(self) -> Tensor:
        """Choices of no expert (ids outside of 0 .. E - 1), int64 [layers]."""
        return self._sums(0)[:, -1]

    @property
    def mean_weights(self) -> Tensor:
        """The mean routing weight of each expert's choices, float64 [layers, E]; NaN without."""
        return self._sums(1)[:, :-1].double() / _FIXED / self.counts

    @property
    def entropy(self) -> Tensor:
        """Of each layer's choices, float64 [layers], over its maximum log(E): 1 where all experts
        get the same, 0 where one gets all."""
        share = self._share()
        return -torch.special.xlogy(share, share).sum(1) / torch.tensor(float(self._experts)).log()

    @property
    def imbalance(self) -> Tensor:
        """The busiest expert's choices over the mean, float64 [layers]."""
        return self._share().amax(1) * self._experts

    @property
    def dead(self) -> Tensor:
        """Experts without a choice, int64 [layers]."""
        return (self.counts == 0).sum(1)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as json.dumps takes it."""
        layers = [
            {"name": name, "counts": counts, "dropped": dropped, "entropy": entropy,
             "imbalance": imbalance, "dead": dead}
            for name, counts, dropped, entropy, imbalance, dead in zip(
                self.layers, self.counts.tolist(), self.dropped.tolist(), self.entropy.tolist(),
                self.imbalance.tolist(), self.dead.tolist(), strict=True,
            )
        ]  # fmt: skip
        return {"experts": self._experts, "layers": layers}

    def table(self) -> Table:
        """A row for each layer."""
        table = Table(title="expert load", title_justify="left")
        for name in ("layer", "choices", "max / mean", "entropy", "dead experts", "dropped"):
            table.add_column(name)
        for layer in self.to_dict()["layers"]:
            table.add_row(
                layer["name"], str(sum(layer["counts"])), f"{layer['imbalance']:.2f}",
                f"{layer['entropy']:.3f}", str(layer["dead"]), str(layer["dropped"]),
            )  # fmt: skip
        return table

    def _share(self) -> Tensor:
        counts = self.counts.double()
        return counts / counts.sum(1, keepdim=True)

    # When

    def start(self) -> ExpertLoad:
        """Counts from now on.

        Raises:
            ValueError: the model's load is being counted already.
        """
        stack = contextlib.ExitStack()
        stack.enter_context(watching(self.model, self._layers, self))
        stack.enter_context(forwards.watched(self.model))
        self._open = stack
        return self

    def stop(self) -> None:
        """Counts no more; what was counted stays."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> ExpertLoad:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def reset(self) -> None:
        """Forgets what was counted."""
        self._counted: Tensor | None = None
        self._pending: list[_Pending] = []
        self._waiting = 0
        self._logits: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def all_reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """Makes every rank's counts the sum over the ranks of a group, which have different tokens.

        Raises:
            RuntimeError: torch.distributed is not initialised.
        """
        if not distributed.is_initialized():
            raise RuntimeError(
                "all_reduce needs torch.distributed: run under torchrun, call init_process_group."
            )
        distributed.all_reduce(self._sums(), group=group)

    # Counting

    def saw(self, call: Call) -> None:
        """Takes the choice; a whole forward's are counted at once."""
        if call.index is None:
            return
        forward = forwards.current()
        mask = forward.mask if forward.covers(len(call.index)) else None
        weights = None if call.weights is None else call.weights.detach()
        self._pending.append(_Pending(call.layer, call.index.detach(), weights, mask))
        self._waiting += call.index.numel()
        if self.keep_logits and call.logits is not None:
            self._logits.append((call.logits, call.index.detach(), mask))
        if len(self._pending) >= len(self._layers) or self._waiting > _PENDING:
            self._count()

    def _sums(self, which: int | None = None) -> Tensor:
        """int64 [2, layers, E + 1]: choices and fixed-point weights, last those of no expert; or
        one of both."""
        self._count()
        if self._counted is None:
            device = next((p.device for p in self.model.parameters()), "cpu")
            self._counted = self._zeros(device)
        return self._counted if which is None else self._counted[which]

    def _zeros(self, device: torch.device | str) -> Tensor:
        shape = 2, len(self._layers), self._experts + 1
        return torch.zeros(shape, dtype=torch.int64, device=device)

    @torch.no_grad()
    def _count(self) -> None:
        pending, self._pending, self._waiting = self._pending, [], 0
        if not pending:
            return
        if self._counted is None:
            self._counted = self._zeros(pending[0].top_k_index.device)
        alike: dict[Any, list[_Pending]] = {}
        for one in pending:
            index = one.top_k_index
            kind = index.shape, index.dtype, index.device, one.weights is None
            alike.setdefault((*kind, id(one.mask)), []).append(one)
        for found in alike.values():
            self._add(self._counted, found)

    def _add(self, counted: Tensor, chosen: list[_Pending]) -> None:
        """Adds the choices of n layers with one T, K and mask: few launches, whatever n is."""
        mask = chosen[0].mask
        index = torch.stack([one.top_k_index for one in chosen])  # [n, T, K]
        index = index.to(counted.device).long()
        inside = (index >= 0) & (index < self._experts)
        place = torch.where(inside, index, self._experts) + self._firsts(counted.device, chosen)
        each = torch.ones_like(place)
        if mask is not None:
            each = each * mask.reshape(-1, 1).to(counted.device)
        counts, weighed = counted.view(2, -1)
        counts.scatter_add_(0, place.flatten(), each.flatten())
        weights = [one.weights for one in chosen if one.weights is not None]
        if weights:
            whole = torch.stack(weights).to(counted.device).double()
            fixed = (whole * _FIXED).round().long() * each
            weighed.scatter_add_(0, place.flatten(), fixed.flatten())

    def _firsts(self, device: torch.device, chosen: list[_Pending]) -> Tensor:
        """First places of these layers among all counts, int64 [n, 1, 1]."""
        key = device, tuple(self._at[one.layer] for one in chosen)
        if key not in self._first:
            every = torch.arange(len(self._layers), device=device) * (self._experts + 1)
            self._first[key] = torch.stack([every[at] for at in key[1]]).view(-1, 1, 1)
        return self._first[key]

    # Training

    def aux_loss(self, *, score: str = "softmax") -> Tensor:
        """The load balancing loss of the forwards since the last call or `reset`, differentiable in
        the routers; see `balance.switch_loss`. Needs `keep_logits=True`.

        Raises:
            ValueError: no logits were kept.
        """
        if not self._logits:
            raise ValueError(
                "there are no router logits to balance: pass keep_logits=True to expert_load, and "
                "run a forward inside."
            )
        logits, index, masks = zip(*self._logits, strict=True)
        self._logits = []
        masks = [torch.ones(len(i), dtype=torch.bool) if m is None else m.flatten()
                 for i, m in zip(index, masks, strict=True)]  # fmt: skip
        return switch_loss(logits, index, score=score, mask=masks)

    def update_bias(self, *, speed: float = 0.001) -> None:
        """Moves the routers' `e_score_correction_bias` against the counts, and resets those.

        transformers leaves this buffer as it is in training. Call it after the optimizer's step;
        under data parallelism after `all_reduce`, so that all ranks agree.

        Raises:
            ValueError: no router has such a bias, or nothing was counted.
        """
        counts = self.counts
        if not int(counts.sum()):
            raise ValueError("nothing was counted: run a forward while the load is counted.")
        blocks = map(self.model.get_submodule, self.layers)
        if not sum(move_bias(block, row, speed) for block, row in zip(blocks, counts)):
            raise ValueError(
                f"no router of {type(self.model).__name__} has {BIAS}: balance it by `aux_loss`."
            )
        self.reset()

    def callback(self, *, reset: bool = True) -> LoadCallback:
        """A callback for transformers' Trainer: with every log also `moe/imbalance`, `moe/entropy`
        (means over the layers), `moe/dead_experts` and `moe/dropped` (sums), since the last log or,
        without `reset`, since the start. Counting starts with the training and stops with it."""
        from .callback import LoadCallback  # here: it imports the Trainer's arguments

        return LoadCallback(self, reset)


def expert_load(model: nn.Module, *, keep_logits: bool = False) -> ExpertLoad:
    """Counts which experts the tokens of a model's forwards go to, in a `with` block or between
    `start()` and `stop()`.

    Args:
        model: a model of transformers, one that holds it (PEFT's, DDP's), or a bare block; patched
            or not.
        keep_logits: keep the routers' logits of each forward, with their gradients, for `aux_loss`.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: it has no MoE layer that is known.
    """
    return ExpertLoad(model, keep_logits=keep_logits)
