"""bench watch: what a model's forward costs while its routing is recorded, replayed or counted."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from ..routing.load import expert_load
from ..routing.record import record_routing
from ..routing.replay import replay_routing
from ..usage import add_tokens
from .kind import Flags, Run, add_files
from .timing import seconds
from .whole import PatchedModel

TOKENS = (1, 64, 4096)
ROUNDS = 9
FORWARDS = {1: 10, 64: 10, 4096: 4}
"""Forwards of one turn, by their number of tokens; 4 of others."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one forward of `tokens` tokens; medians over turns that are interleaved."""

    model: str
    layers: int
    tokens: int
    ms: float  # nothing watches
    record_ms: float
    record_host_ms: float  # recorded to pinned memory
    replay_ms: float
    load_ms: float


def cost(model: PreTrainedModel, name: str, tokens: int) -> Cost:
    """Measures one row on a patched model."""
    config = model.config.get_text_config()
    ids = torch.randint(config.vocab_size, (1, tokens), device=model.device)
    count = FORWARDS.get(tokens, 4)
    with record_routing(model) as recorded:
        _forward(model, ids)
    whole = recorded.top_k_index.repeat(count + 1, 1, 1)
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "ms": contextlib.nullcontext,
        "record_ms": lambda: record_routing(model),
        "record_host_ms": lambda: record_routing(model, device="cpu"),
        "replay_ms": lambda: replay_routing(model, whole),
        "load_ms": lambda: expert_load(model),
    }
    found: dict[str, list[float]] = {context: [] for context in contexts}
    for _ in range(ROUNDS):
        for context, watched in contexts.items():
            with watched():
                _forward(model, ids)
                found[context].append(1e3 * seconds(lambda: _forward(model, ids), count=count))
    medians = {context: statistics.median(every) for context, every in found.items()}
    return Cost(name, config.num_hidden_layers, tokens, **medians)


def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


class Watch(PatchedModel):
    """`bench watch`."""

    name = "watch"
    help = "what recording, replaying and counting routing costs"
    about = "Of a whole patched model of random weights, after the parity of its first block."

    def arguments(self, flag: Flags, old: bool) -> None:
        super().arguments(flag, old)
        add_tokens(flag, TOKENS)
        add_files(flag)

    def measure_patched(self, run: Run, name: str, model: PreTrainedModel) -> None:
        for tokens in run.each(run.options.tokens or TOKENS, lambda tokens: f"{tokens} tokens"):
            run.rows.append(cost(model, name, tokens))

    def tables(self, rows: Sequence[Cost]) -> Iterable[Table]:
        """One table: a line for each number of tokens."""
        yield cost_table(rows)


def cost_table(rows: Sequence[Cost]) -> Table:
    """Milliseconds without, and percents more with."""
    first = rows[0]
    title = f"{first.model}, {first.layers} layers, random weights: a forward, patched"
    names = ("tokens", "ms", "record", "record to host", "replay", "load")
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        watched = row.record_ms, row.record_host_ms, row.replay_ms, row.load_ms
        more = (f"{100 * (ms / row.ms - 1):+.1f} %" for ms in watched)
        table.add_row(f"{row.tokens}", f"{row.ms:.2f}", *more)
    return table


KIND = Watch()
