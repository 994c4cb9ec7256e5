"""What a mutant is: one fault of one stage under one condition, and a question that must see it.

A question is one of those that `check_parity` asks; many leave out the gradients, to be quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import small
import torch
from faults import Change
from pipeline import Pipeline
from torch import nn

from moe_patch.parity.compare import MIN_SLOTS_BRIEFLY, Comparison
from moe_patch.parity.law import Row
from moe_patch.parity.passes import MANY
from moe_patch.shapes import Shape, build

SHAPES = {
    "qwen3": "tiny_qwen3",
    "llama4": "tiny_llama4",
    "square down_proj": Shape("qwen3_moe", 48, 48, 8, 2, std=0.15),
    "square gate_up_proj": Shape("qwen3_moe", 64, 32, 8, 2, std=0.15),
}


def block(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A tiny block of Hugging Face's."""
    if name in small.BLOCKS:
        return small.block(name, dtype, seed)
    return build(SHAPES[name], dtype=dtype, seed=seed)


@dataclass(frozen=True)
class Question:
    """What the certificate is asked."""

    block: str = "qwen3"
    tokens: int = 80
    backward: bool = False
    way: str = ""
    """Another way of running the block, of `passes.MANY`."""

    def ask(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Row]:
        """The certificate's rows about whatever is installed."""
        comparison = Comparison(block(self.block, dtype))
        if self.tokens == 1:  # the interpreter's default, or less: the law widens, draws take time
            comparison.min_slots = 16 if dtype == torch.float32 else MIN_SLOTS_BRIEFLY
        ways = [way for way in MANY if str(way) == self.way]
        assert len(ways) == bool(self.way)
        return comparison.rows(self.tokens, backward=self.backward, seed=seed, ways=ways)[0]

    def __str__(self) -> str:
        kind = "training" if self.backward else "no gradients"
        return "-".join(filter(None, (self.block, f"{self.tokens}", kind, self.way)))


@dataclass(frozen=True)
class When:
    """A condition, and how a question must differ for it to hold."""

    name: str = ""
    holds: Callable[[SimpleNamespace], Any] = lambda c: True
    tokens: int | None = None
    backward: bool | None = None
    way: str = ""


ALWAYS = When()
INFERENCE = When("without gradients", lambda c: not c.grad, backward=False)
BESIDE = When("without gradients beside training", lambda c: not c.grad, backward=True)
TRAINING = When("in training", lambda c: c.grad, backward=True)
ONE = When("of one token in training", lambda c: c.grad and c.tokens == 1, 1, True)
FEW = When("of 2 to 8 tokens", lambda c: 2 <= c.tokens <= 8, tokens=7)
MORE = When("of more than 64 tokens", lambda c: c.tokens > 64)
ODD = When("of an odd number of tokens", lambda c: c.tokens % 2 and c.tokens > 1, tokens=7)
FROZEN, FROZEN_UP, FROZEN_DOWN = (
    When(
        f"when {name} frozen", lambda c, which=which: c.grad and c.frozen == which, None, True, way
    )
    for which, name, way in (
        ("all", "experts are", "frozen experts"),
        ("up", "gate_up_proj is", "frozen first projection"),
        ("down", "down_proj is", "frozen second projection"),
    )
)
AUTOCAST = When("under autocast", lambda c: c.autocast and c.grad, None, True, "autocast")
AUTOCAST_ALONE = When(
    "under autocast without gradients",
    lambda c: c.autocast and not c.grad,
    None, False, "autocast, no gradients",
)  # fmt: skip
STRIDED = When("of strided input", lambda c: c.strided and c.grad, None, True, "strided input")
STRIDED_ALONE = When(
    "of strided input without gradients",
    lambda c: c.strided and not c.grad,
    None, False, "strided input, no gradients",
)  # fmt: skip
DROPPED = When("with dropped slots", lambda c: c.dropped and c.grad, None, True, "sentinels")
DROPPED_ALONE = When(
    "with dropped slots without gradients",
    lambda c: c.dropped and not c.grad,
    None, False, "sentinels, no gradients",
)  # fmt: skip
RECOMPUTED = When(
    "computed again by checkpointing",
    lambda c: c.recomputed,
    None, True, "gradient checkpointing",
)  # fmt: skip
ADDED = When(
    "into a .grad",
    lambda c: any((w if w.is_leaf else w._base).grad is not None for w in c.leaves.values()),
    None, True, "accumulated .grad",
)  # fmt: skip
SECOND = When("in every second run", lambda c: c.run % 2 == 0)


@dataclass(frozen=True)
class Mutant:
    """One fault of one stage."""

    stage: str
    change: Change
    when: When
    question: Question
    float32_alone: bool = False
    """The fault is a rounding of 16 bits, or of that size: float32 alone shows it."""

    @property
    def name(self) -> str:
        """Which fault, where and when."""
        what = f"{self.stage} {self.change.__name__.replace('_', ' ')} {self.when.name}".strip()
        return what if self.question.block == "qwen3" else f"{what} ({self.question.block})"

    @property
    def in_backward(self) -> bool:
        """Whether it leaves the forward as it is."""
        return not (self.stage in FORWARD or self.stage.startswith("decode"))

    def pipeline(self) -> Mutated:
        """Code that has this fault."""
        return Mutated(self)


class Mutated(Pipeline):
    """The pipeline with a mutant's fault; `changed` says whether it has changed anything."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(self._spoil)
        self.mutant, self.changed, self.runs = mutant, False, 0

    def _spoil(self, stage: str, value: torch.Tensor, c: SimpleNamespace) -> torch.Tensor:
        if stage != self.mutant.stage:
            return value
        self.runs += 1
        c.run = self.runs
        if not self.mutant.when.holds(c):
            return value
        wrong = self.mutant.change(value.clone(), c)
        self.changed = self.changed or stage == "decode index" or _differ(wrong, value)
        return wrong


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.requires_grad) != (other.dtype, other.requires_grad):
        return True
    return not torch.equal(one, other)


FORWARD = {
    "logits", "scores", "bias", "groups", "group mask", "choice", "index", "chosen", "total",
    "shares", "weights", "expert_offsets", "row_to_slot", "slot_to_row", "token of row",
    "row weights", "x rows", "gate_up weights", "pre", "act", "down weights", "rows",
    "out weights", "out slots", "out", "returned", "dense scores",
    "returned logits", "returned index",
}  # fmt: skip


def question_for(stage: str, when: When, subject: str) -> Question:
    """The cheapest that must see a fault of that stage under that condition."""
    decoded = stage.startswith("decode")
    question = Question(subject, 1 if decoded else 80, not decoded and stage not in FORWARD)
    if when.tokens:
        question = replace(question, tokens=when.tokens)
    if when.backward is not None:
        question = replace(question, backward=when.backward)
    return replace(question, way=when.way)
