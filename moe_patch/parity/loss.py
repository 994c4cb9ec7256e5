"""What quantising experts loses: their weights, and a model's logits, beside the original's.

This is no error of the kernels: the parity law judges those against the quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..formats.packed import dequantize
from ..recognise.four_bits import FourBits
from ..recognise.parts import stored_transposed, up_name
from .shadow import plain_arithmetic, shadow

TOKENS = (4, 128)
"""Shape of the random ids that logits are compared on."""


@dataclass(frozen=True)
class Loss:
    """How far something quantised is from the original."""

    name: str
    """A weight, as in `named_parameters()`, or "logits"."""
    format: str
    measure: str
    """"relative rms", or "KL (median)" in nats a token."""
    value: float

    def __str__(self) -> str:
        return f"{self.name} in {self.format}: {self.measure} {self.value:.2e}"


def losses(model: nn.Module, original: nn.Module, seed: int) -> list[Loss]:
    """Losses of every weight in 4 bits, and of the logits where the model has a vocabulary.

    Raises:
        ValueError: the model has no experts in 4 bits, or the original has no such weights.
    """
    found = [*_weights(model, original)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts in 4 bits: original= is for a quantised model."
        )
    if getattr(getattr(model, "config", None), "vocab_size", None):
        found.append(_logits(model, original, found[0].format, seed))
    return found


def _weights(model: nn.Module, original: nn.Module) -> Iterator[Loss]:
    modules = dict(original.named_modules())
    for place, experts in model.named_modules():
        if not isinstance(experts, FourBits):
            continue
        for name in (up_name(experts), "down_proj"):
            known = getattr(modules.get(place), name, None)
            packed = experts.packed(name)
            e, n, k = packed.shape
            shape = (e, k, n) if stored_transposed(experts) else (e, n, k)
            full = f"{place}.{name}".lstrip(".")
            if not isinstance(known, Tensor) or known.shape != shape:
                found = None if known is None else list(known.shape)
                raise ValueError(
                    f"original has {full} {found}: pass the model as it was before it was "
                    f"quantised, where it is {list(shape)}."
                )
            known = known.detach()
            known = known.mT if stored_transposed(experts) else known
            lost = total = 0.0
            for expert in range(e):
                one = slice(expert, expert + 1)
                exact = known[one].double()
                error = dequantize(packed[one], torch.float64).to(exact.device) - exact
                lost += float(error.square().sum())
                total += float(exact.square().sum())
            value = (lost / total) ** 0.5 if total else 0.0
            yield Loss(full, experts.weight_format, "relative rms", value)


def _logits(model: Any, original: Any, format: str, seed: int) -> Loss:
    """KL(original || model), each as it runs, on random ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, TOKENS, generator=generator)
    found = []
    with plain_arithmetic(), torch.no_grad():
        for each in (original, model):
            device = next(each.parameters()).device
            out = shadow(each)(input_ids=ids.to(device), use_cache=False)
            found.append(out.logits.flatten(0, 1).to(ids.device))
    value = float(divergence(*found).median())
    return Loss("logits", format, "KL (median)", value)


def divergence(truth: Tensor, logits: Tensor) -> Tensor:
    """KL of each token [T], in float64, of logits [T, V]."""
    parts = []
    for p, q in zip(truth.split(64), logits.split(64)):
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts)
