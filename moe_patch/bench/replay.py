"""bench replay: how far a trainer's logits are from a rollout's, with its routing and without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from ..routing.record import record_routing
from ..routing.recorded import Routing
from ..routing.replay import replay_routing
from ..usage import positive
from .kind import Flags, Run, add_files
from .whole import PatchedModel

SEQUENCES, PROMPT, NEW = 16, 128, 64
TRAINER = (1, 4, 16)


@dataclass(frozen=True)
class Closeness:
    """A trainer that runs `batch` whole sequences at a time, beside the rollout that generated them
    with a cache, all of them at once. Of each pair, the first is without replay."""

    model: str
    layers: int
    sequences: int
    prompt: int
    new: int
    batch: int
    other_choices: float  # share of (token, layer) whose experts are not the rollout's
    other_choices_replayed: float
    logit_error: float  # rms of the difference over rms, of the generated tokens
    logit_error_replayed: float
    kl: float  # mean over the generated tokens, rollout to trainer
    kl_replayed: float


@dataclass(frozen=True)
class Rollout:
    """Sequences [B, S], the logits [B, new, V] of their new tokens, their choices as one batch."""

    tokens: Tensor
    logits: Tensor
    routing: Routing


@torch.no_grad()
def rollout(model: PreTrainedModel, sequences: int, prompt: int, new: int) -> Rollout:
    """Generates after random prompts, at temperature 1."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (sequences, prompt), device=model.device)
    with record_routing(model) as routing:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0,
            min_new_tokens=new, max_new_tokens=new, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
    logits = torch.stack(found.logits, 1)
    return Rollout(found.sequences, logits, routing.as_batch(found.sequences.shape[1]))


@torch.no_grad()
def closeness(model: PreTrainedModel, name: str, rolled: Rollout, batch: int) -> Closeness:
    """One row. Every forward takes `batch` sequences."""
    (sequences, length), new = rolled.tokens.shape, rolled.logits.shape[1]
    where = rolled.routing.mask
    told = rolled.routing.top_k_index.sort(-1).values[where]
    pairs: list[tuple[float, float, float]] = []
    for given in (None, rolled.routing):
        logits, taken = _train(model, rolled.tokens, batch, new, given)
        other = (taken.top_k_index.sort(-1).values[where] != told).any(-1)
        pairs.append((float(other.float().mean()), *_distance(rolled.logits, logits)))
    both = [of for pair in zip(*pairs, strict=True) for of in pair]
    layers = model.config.get_text_config().num_hidden_layers
    return Closeness(name, layers, sequences, length - new, new, batch, *both)


def _train(
    model: PreTrainedModel, tokens: Tensor, batch: int, new: int, given: Routing | None
) -> tuple[Tensor, Routing]:
    """Logits [B, new, V] of the same tokens as the rollout's, and what was chosen."""
    found = []
    with record_routing(model) as taken:
        if given is None:
            for part in tokens.split(batch):
                found.append(_forward(model, part, new))
        else:
            with replay_routing(model, given):
                for part in tokens.split(batch):
                    found.append(_forward(model, part, new))
    return torch.cat(found), taken


def _forward(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]


def _distance(truth: Tensor, logits: Tensor) -> tuple[float, float]:
    """(rms of the difference over rms, mean KL) of logits [B, new, V], a sequence at a time."""
    error = square = kl = 0.0
    for one, other in zip(truth.float(), logits.float(), strict=True):
        error += float((one - other).square().mean())
        square += float(one.square().mean())
        logs = one.log_softmax(-1), other.log_softmax(-1)
        kl += float(kl_div(logs[1], logs[0], log_target=True, reduction="batchmean"))
    return (error / square) ** 0.5, kl / len(truth)


class Replay(PatchedModel):
    """`bench replay`."""

    name = "replay"
    help = "how much closer to a rollout a replay brings a trainer"
    about = (
        f"A patched model of random weights generates {NEW} tokens after {PROMPT} in {SEQUENCES} "
        "sequences, and runs them again as a trainer does, in batches of another size."
    )

    def arguments(self, flag: Flags, old: bool) -> None:
        super().arguments(flag, old)
        text = f"sequences of one of the trainer's batches; default: {' '.join(map(str, TRAINER))}"
        flag("--batch", nargs="+", type=positive, metavar="N", help=text)
        add_files(flag)

    def measure_patched(self, run: Run, name: str, model: PreTrainedModel) -> None:
        torch.manual_seed(0)
        with run.busy(f"{name}: rollout"):
            rolled = rollout(model, SEQUENCES, PROMPT, NEW)
        for batch in run.each(run.options.batch or TRAINER, lambda batch: f"batches of {batch}"):
            run.rows.append(closeness(model, name, rolled, batch))

    def tables(self, rows: Sequence[Closeness]) -> Iterable[Table]:
        """One table: a line for each of the trainer's batches."""
        yield closeness_table(rows)


def closeness_table(rows: Sequence[Closeness]) -> Table:
    """Without replay -> with it."""
    first = rows[0]
    title = (
        f"{first.model}, {first.layers} layers, random weights: {first.sequences} x {first.prompt} "
        f"+ {first.new} tokens of a rollout, then of a trainer, without replay -> with it"
    )
    names = ("trainer's batch", "other experts", "logits' rms error", "mean KL")
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            f"{row.batch}",
            f"{row.other_choices:.2%} -> {row.other_choices_replayed:.2%}",
            f"{row.logit_error:.3%} -> {row.logit_error_replayed:.3%}",
            f"{row.kl:.2e} -> {row.kl_replayed:.2e}",
        )
    return table


KIND = Replay()
