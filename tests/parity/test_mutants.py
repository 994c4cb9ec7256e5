"""The certificate fails every mutant of the fused pipeline, and passes the pipeline itself.

Each mutant has one fault, in one stage, under one condition (mutant.py, mutants.py), and one
question that must see it.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from faults import rounded_to_bfloat16
from mutant import BESIDE, SECOND, Mutant, Question, block
from mutants import mutants
from pipeline import Pipeline
from torch import Tensor

from moe_patch.parity import passes
from moe_patch.parity.compare import Comparison
from moe_patch.parity.passes import INFERENCE, MANY, TRAINING, Added, Inputs

MUTANTS = {mutant.name: mutant for mutant in mutants()}
QUESTIONS = sorted({mutant.question for mutant in MUTANTS.values()}, key=str)
SAMPLE = [name for name, m in list(MUTANTS.items())[::3] if not m.float32_alone]
"""The third that runs in bfloat16 too."""
ROUNDED = [name for name, m in MUTANTS.items() if m.change is rounded_to_bfloat16]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_honest_pipeline_passes(question, dtype):
    with Pipeline().installed():
        rows = question.ask(dtype)
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    assert question.way in {"", *(row.tensor for row in rows)}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(name):
    fails(MUTANTS[name], torch.float32)


@pytest.mark.parametrize("name", SAMPLE)
def test_mutant_fails_in_bfloat16(name):
    fails(MUTANTS[name], torch.bfloat16)


@pytest.mark.parametrize("name", ROUNDED)
def test_mutant_that_rounds_to_bfloat16_fails_in_float16(name):
    """One of three draws shows it: a fault as small as Hugging Face's own error in a gradient."""
    fails(MUTANTS[name], torch.float16, seeds=3)


def fails(mutant: Mutant, dtype: torch.dtype, *, seeds: int = 1) -> None:
    """Asserts that rows fail, on the first draw or one of `seeds`, and those alone that may."""
    for seed in range(seeds):
        pipeline = mutant.pipeline()
        with pipeline.installed():
            rows = mutant.question.ask(dtype, seed)
        failed = {row.tensor: row.note for row in rows if not row.passed}
        if failed:
            break
    assert pipeline.changed, "the fault changed nothing"
    assert failed, rows
    if mutant.question.way:
        assert failed.keys() == {mutant.question.way}, "it shows in no other way"
    elif mutant.when is SECOND:
        assert "repeat" in failed
    else:
        assert failed.keys() - {"repeat"}, "two runs are the same"
    if mutant.in_backward:
        assert not failed.keys() & {"routing", "top_k_weights", "output", "output_no_grad"}
    assert all(failed.values()), "each says why"


def test_mutants_are_many_and_differ():
    """At least 200, none of which gives what the pipeline or another one gives."""
    found = defaultdict(list)
    for mutant in MUTANTS.values():
        key = mutant.question, mutant.when.name
        honest, given = honest_signature(*key), signature(mutant, *key)
        assert not same(honest, given), f"{mutant.name}: changes nothing"
        for other, its in found[key]:
            assert not same(given, its), f"{mutant.name} is {other}"
        found[key].append((mutant.name, given))
    assert len(MUTANTS) >= 200


def same(one: Tensor, other: Tensor) -> bool:
    """Equal up to the order of float32 sums."""
    return bool(((one - other).abs() < 1e-6).all())


@functools.cache
def honest_signature(*key) -> Tensor:
    """The same of the pipeline itself."""
    return signature(None, *key)


def signature(mutant: Mutant | None, question: Question, when: str) -> Tensor:
    """A few numbers for every tensor that the question's run gives: 32 projections, and where NaN,
    infinities and zeros are."""
    comparison, family, given, how = asked(question)
    how = INFERENCE if when == BESIDE.name else how
    parts = []
    with (mutant.pipeline() if mutant else Pipeline()).installed():
        for _ in range(2 if when == SECOND.name else 1):
            run = passes.run(comparison.ours, family, given, how)
        if comparison.router:
            routed = comparison.router.run(given.x, 0, how.backward)
            run |= {f"router {name}": tensor for name, tensor in routed.items()}
        said = [*run["returned"].values()]
        if comparison.router:
            x = given.x.clone().requires_grad_(how.backward)
            with torch.set_grad_enabled(how.backward):
                said.append(passes.describe(comparison.router.ours(x)))
    parts.append(torch.tensor([zlib.crc32(text.encode()) for text in said]).double())
    for name in sorted(run):
        tensor = run[name].after if isinstance(run[name], Added) else run[name]
        if isinstance(tensor, Tensor):
            flat = tensor.detach().double().flatten()
            where = (flat.isnan(), flat.isinf(), flat == 0)
            flat = flat.nan_to_num(0, 0, 0)
            flat = torch.stack(
                [flat / max(float(flat.norm()), 1e-30), *(z.double() for z in where)]
            )
            size = torch.tensor([float(tensor.double().nan_to_num(0, 0, 0).norm())]).double()
            parts += [(flat @ projections(flat.shape[1])).flatten(), size]
    return torch.cat(parts)


@functools.cache
def projections(size: int) -> Tensor:
    """Random directions, each a column."""
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(size)).double()


@functools.cache
def asked(question: Question) -> tuple:
    """What a question's way runs: a comparison, a family, inputs and the way."""
    comparison = Comparison(block(question.block))
    family, tokens, experts = comparison.family, question.tokens, comparison.num_experts
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    given = Inputs(draw(tokens, comparison.hidden_size), draw(tokens, comparison.hidden_size))
    default = TRAINING if question.backward else INFERENCE
    how = next((way for way in MANY if str(way) == question.way), default)
    if family.router is None or how.sentinels:
        family = replace(family, router=None, shared_expert=False)
        given.weights, given.index = draw(tokens, experts).softmax(-1).topk(comparison.top_k)
    if how.sentinels:
        given.index.view(-1)[::3] = experts
    if how.accumulate:
        named = comparison.twin.experts.named_parameters()
        given.before = {name: draw(*parameter.shape) for name, parameter in named}
    return comparison, family, given, how
