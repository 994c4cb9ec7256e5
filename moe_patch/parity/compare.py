"""One block, three ways: ours, Hugging Face's own, and the float64 truth, on the same inputs.

T tokens, H hidden size, I intermediate size, E experts, K choices a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import kernels
from ..models.decorated import UndecoratedExperts
from ..patcher import patch
from ..paths import recorded
from ..recognise.eligibility import is_decorated
from ..recognise.storage import FOUR_BITS, FP8, PLAIN, logical_shapes, storage_of
from . import law, passes
from .block import BlockComparison
from .law import Row
from .passes import INFERENCE, TRAINING, Added, Inputs, Pass, Run
from .router import RouterComparison, find_router
from .shadow import (
    Family,
    adapted,
    dtype_of,
    family_of,
    find_experts,
    hugging_face,
    implementations,
    multiplies_fp8,
    plain_arithmetic,
    projections,
    runs_ours,
    shadow,
    trained,
)
from .truth import measure

_SEED = 0x6D6F65
"""Added to seeds: weights drawn by the same one would begin with the inputs themselves."""

MIN_SLOTS = 128
"""Slots that a verdict needs: a rms over a handful of numbers says nothing."""

MIN_SLOTS_BRIEFLY = 32
"""Slots that are enough for a check that is not thorough; the law widens its factors for fewer than
MIN_SLOTS. (64 runs of one token take ten seconds on a GPU, half a minute in the interpreter.)"""

_FEW_TOKENS = (1, 7)
_MANY_TOKENS = (50, 200, 1000, 3200, 8192)
_MANY_TOKENS_INTERPRETED = (80,)
"""Numbers of tokens that may be taken. Each that is taken compiles its kernels."""


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _repeat(first: Run, second: Run) -> Row:
    """Two runs of ours on the same inputs: the same bits, everywhere."""
    differ = _differ(first, second)
    note = f"two runs differ in {', '.join(differ)}" if differ else "two runs, the same bits"
    return Row("repeat", not differ, note=note)


def _differ(run: Run, other: Run) -> list[str]:
    """Names of what both have whose bits are not the same."""
    names = [k for k in run if k in other and isinstance(run[k], Tensor)]
    return [k for k in names if not _same_bits(run[k], other[k])]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(z.contiguous().view(torch.uint8) for z in (a, b)))


def _without_gradients(alone: Run) -> Run:
    """Entries that a run without gradients adds to one in training."""
    own = {k: v for k, v in alone.items() if k.endswith("_no_grad")}
    outputs = (k for k in alone if k.startswith("router output"))
    return own | {f"{k}, no gradients": alone[k] for k in outputs}


class Comparison:
    """A block beside Hugging Face's, ready to be compared at any number of tokens.

    A patched block is run itself, with its hooks and whatever was put on it. One that is not
    patched yet, or that is to run in another dtype, is compared as a patched copy of it.

    Args:
        block: patched or not; it is left as it was.
        dtype: to run in; that of the experts by default (then no weight is copied), of FP8 experts
            that of their configuration or bfloat16.

    Raises:
        ValueError: the block cannot be fused, or not be compared.
    """

    def __init__(self, block: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.ours = self.twin = shadow(block, dtype)
        self.twin.train(False)
        report = patch(self.twin)
        if not report.fused:
            raise ValueError(f"it cannot be fused: {report}")
        self.family, experts = family_of(self.twin), find_experts(self.twin)
        known = is_decorated(experts) or isinstance(experts, UndecoratedExperts)
        if self.family.router is None and not known:
            raise ValueError("it is wrapped by PEFT: check the model before that")
        (_, _, hidden), (_, _, inner) = logical_shapes(experts)
        self.num_experts, self.hidden_size, self.intermediate_size = (
            len(experts.down_proj), hidden, inner,
        )  # fmt: skip
        self.stored, self.device = storage_of(experts), experts.down_proj.device
        self.quantised = self.stored is FP8
        self.dtype = dtype_of(experts)
        self.in_fp8: tuple[str, ...] = ()
        if self.quantised:
            self.dtype = dtype or getattr(experts.config, "dtype", None) or torch.bfloat16
            self.in_fp8 = ("output_no_grad",)
            if multiplies_fp8(experts):
                self.in_fp8 += ("output", "d_hidden_states", "d_top_k_weights", "d_router")
        self.live = runs_ours(block) and dtype_of(find_experts(block)) == dtype_of(experts)
        if self.live:
            self.ours = block
        self.baselines = {way: hugging_face(self.twin, way) for way in implementations(self.twin)}
        self.router = None
        name = find_router(self.ours) if self.family.router is None else None
        if name is not None:
            hf = next(iter(self.baselines.values())).get_submodule(name)
            self.router = RouterComparison(self.ours.get_submodule(name), hf)
        self.refused: dict[str, str] = {}  # what did not run, and why
        self.whole = None
        if adapted(self.ours):
            self.refused["block output"] = "PEFT's adapters are no part of the truth"
        elif self.family.router is None and find_experts(self.ours) is not self.ours:
            ways = list(self.baselines.values())
            self.whole = BlockComparison(self.ours, self.twin, ways, self.family)
        self.paths: set[str] = set()  # which of our ways through the experts ran
        self.min_slots = MIN_SLOTS

    @property
    def top_k(self) -> int:
        """K, of the block's own router or configuration; 2 where neither says."""
        if self.family.router:
            return getattr(self.twin, self.family.router).top_k
        config = getattr(find_experts(self.twin), "config", None)
        return min(getattr(config, "num_experts_per_tok", None) or 2, self.num_experts)

    def token_counts(self) -> list[int]:
        """Few tokens, and as few numbers of many, up to 8192, as reach every other code path."""
        experts = find_experts(self.twin)
        up, down = (getattr(experts, name) for name in projections(experts)[:2])
        if self.stored is FOUR_BITS:
            up, down, _ = self.stored.operands(experts, up, down)

        def ways(count: int) -> set[str]:
            return set(kernels.ways.ways(count, self.top_k, up, down, self.dtype))

        reached = set().union(*map(ways, _FEW_TOKENS))
        tried = _MANY_TOKENS if self.device.type == "cuda" else _MANY_TOKENS_INTERPRETED
        many = {count: ways(count) for count in tried}
        every = reached.union(*many.values())
        for length in range(len(many) + 1):
            for counts in itertools.combinations(many, length):
                if reached.union(*(many[count] for count in counts)) == every:
                    return [*_FEW_TOKENS, *counts]
        raise AssertionError("all of them reach what any of them reaches")

    def rows(
        self,
        tokens: int,
        *,
        backward: bool,
        seed: int,
        hidden_states: Tensor | None = None,
        ways: Sequence[Pass] = (),
    ) -> tuple[list[Row], str]:
        """Every row of the law, one for each other way of running the block, and a remark.

        Few tokens are drawn again and their errors pooled, until `min_slots` slots are in the sums.
        Draws of given hidden_states have random signs, after the first.
        """
        generator = torch.Generator(self.device).manual_seed(_SEED + seed)
        measured, repeat, slots, draws, scale = None, None, 0, 0, None
        extra: list[Row] = []
        with plain_arithmetic(), recorded() as paths:
            while slots < self.min_slots:
                given = self._inputs(tokens, generator, hidden_states, signs=draws > 0)
                if hidden_states is None:
                    scale = scale or self._scale(given)
                    given.x = given.x * scale
                ours = self._run_ours(given, backward)
                if ours["index"] is None or not paths:
                    note = "the patched block ran HF's own forward"
                    return [Row("fused", False, note=note)], ""
                repeat = repeat or _repeat(ours, self._run_ours(given, backward))
                given.index = ours["index"]
                hf = self._run_baselines(given, TRAINING if backward else INFERENCE)
                new = measure(self.twin, self.family, given, ours, hf, self.dtype)
                if backward and not torch.equal(given.index, ours["index_no_grad"]):
                    note = "without gradients other experts are chosen"
                    new.checks.append(Row("routing", False, note=note))
                if self.router:
                    with passes.arranged(self.ours, TRAINING if backward else INFERENCE, given):
                        first, again = (
                            self.router.run(given.x, seed + draws, backward) for _ in range(2)
                        )
                    errors, numbers, row = self.router.measure(first, self.dtype)
                    new.checks.append(row)
                    if backward:
                        with passes.arranged(self.ours, INFERENCE, given):
                            alone = self.router.run(given.x, seed + draws, False)
                        found, _, row = self.router.measure(alone, self.dtype)
                        errors["top_k_weights"] = [
                            errors["top_k_weights"][0] + found["top_k_weights"][0]
                        ]
                        new.checks.append(row)
                    new.tensors |= errors
                    new.numbers |= numbers
                    repeat = _repeat(first, again) if repeat.passed else repeat
                if measured is None:
                    extra = [
                        self._returned(ours, hf, self.dtype),
                        *self._others(ours, hf, given, ways),
                    ]
                    extra += self._whole(given, backward, generator)
                measured = new if measured is None else measured + new
                slots, draws = slots + given.index.numel(), draws + 1
        self.paths |= paths
        remarks = [f"pooled over {draws} draws"] if draws > 1 else []
        remarks += [f"input {scale} * randn"] if scale not in (None, 1) else []
        judged = measured.rows(self.dtype, _rms(given.x), self.in_fp8)
        return [*judged, repeat, *extra], ", ".join(remarks)

    def _run_ours(self, given: Inputs, backward: bool) -> Run:
        """A training pass and one without gradients, where other kernels run; or that alone."""
        alone = passes.run(self.ours, self.family, given, INFERENCE)
        if not backward:
            if self.quantised:
                alone["output_no_grad"] = alone.pop("output")
            return alone
        run = passes.run(self.ours, self.family, given, TRAINING)
        run["returned"] |= {f"{k}, no gradients": v for k, v in alone["returned"].items()}
        alone["output_no_grad"], alone["index_no_grad"] = alone["output"], alone["index"]
        return run | _without_gradients(alone)

    def _run_baselines(self, given: Inputs, how: Pass, family: Family | None = None) -> list[Run]:
        runs, family = [], family or self.family
        for name, block in list(self.baselines.items()):
            try:
                run = passes.run(block, family, given, how)
                if how == TRAINING:
                    alone = passes.run(block, family, given, INFERENCE)
                    returned = alone["returned"].items()
                    run["returned"] |= {f"{k}, no gradients": v for k, v in returned}
                    run |= _without_gradients(alone)
                runs.append(run)
            except Exception as error:
                # FP8's kernels are fetched, which fails in many ways
                expected = isinstance(error, RuntimeError) or self.quantised
                memory = isinstance(error, torch.OutOfMemoryError)
                if memory or name != "grouped_mm" or not expected:
                    raise
                self.refused[f"HF's {name}"] = str(error).splitlines()[0]
                if how in (TRAINING, INFERENCE):
                    del self.baselines[name]
        return runs

    def _returned(self, ours: Run, hf: list[Run], dtype: torch.dtype) -> Row:
        """Do the modules return what Hugging Face's do: types, dtypes, shapes, requires_grad; and
        are what a router returns besides the routing the same numbers?"""
        for what, found in ours["returned"].items():
            theirs = [run["returned"].get(what) for run in hf]
            if found not in theirs and any(theirs):
                note = f"{what}: {found}, and Hugging Face's returns {theirs[0]}"
                return Row("return value", False, note=note)
        eps = torch.finfo(dtype).eps
        for name in (name for name in ours if name.startswith("router output")):
            others = [run[name] for run in hf if name in run]
            near = (_rms(ours[name].double() - z.double()) <= 8 * eps * _rms(z) for z in others)
            if others and not any(near):
                return Row("return value", False, note=f"{name} is not Hugging Face's")
        count = len(ours["returned"])
        return Row("return value", True, note=f"{count} of the same types, dtypes and shapes")

    def _whole(self, given: Inputs, backward: bool, generator: torch.Generator) -> list[Row]:
        if self.whole is None:
            return []
        width = self.router.ours.weight.shape[1] if self.router else self.hidden_size
        if width != self.hidden_size:  # experts that are narrower than the model
            x, d_out = torch.randn(2, len(given.x), width, generator=generator, device=self.device)
            given = Inputs(x.to(self.dtype), d_out.to(self.dtype))
        try:
            return self.whole.rows(given, self.dtype, backward)
        except Exception as error:  # it is no block but a decoder layer, say
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self.whole.runs(given):
                return [Row("block output", False, note=f"the patched block raises: {reason}")]
            self.refused["block output"] = f"it does not run on hidden_states alone: {reason}"
            return []

    # Other ways of running the block

    def _others(self, ours: Run, hf: list[Run], given: Inputs, ways: Sequence[Pass]) -> list[Row]:
        rows = []
        for how in ways:
            reason = self._why_not(how)
            if reason is not None:
                self.refused[f"the pass with {how}"] = reason
                continue
            try:
                rows.append(self._other(ours, hf, given, how))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                first = str(error).strip().splitlines()[:1]
                note = " ".join([f"raises {type(error).__name__}", *first])
                rows.append(Row(str(how), False, note=note))
        return rows

    def _why_not(self, how: Pass) -> str | None:
        if self.stored is not PLAIN and (how.frozen or how.accumulate):
            return f"weights in {self.stored.name} are always frozen"
        if self.family.shared_expert and how.sentinels:
            return "Llama4's block takes no ids of experts"
        return None

    def _other(self, base: Run, base_hf: list[Run], given: Inputs, how: Pass) -> Row:
        """The pass `how` on the inputs of `base`: the same bits as there, or else the law."""
        family, block, given = self.family, self.ours, replace(given)
        if how.sentinels:
            family, given = self._with_sentinels(base, given)
        if how.accumulate:
            # a copy's parameters: those of a live model may have hooks on what adds to their .grad
            block, given.before = self.twin, self._before(base_hf)
        free = replace(given, index=None) if family.router else given
        ours = passes.run(block, family, free, how)
        if not how.backward and "output_no_grad" in base:
            ours["output_no_grad"] = ours.pop("output")
        differ = _differ(ours, base)
        own = how.autocast or how.sentinels or how.accumulate
        wanted = {k for k in base if k.startswith("d_")} if how.backward and not own else set()
        wanted -= {f"d_{name}" for name in how.frozen_names(find_experts(self.twin))}
        if wanted - ours.keys():
            note = f"no gradient for {', '.join(sorted(wanted - ours.keys()))}"
            return Row(str(how), False, note=note)
        if not own and not differ:
            found = {k.removesuffix(", no gradients"): v for k, v in base["returned"].items()}
            suffix = "" if how.backward else ", no gradients"
            for what, text in ours["returned"].items():
                if text != base["returned"].get(what + suffix, found.get(what)):
                    return Row(str(how), False, note=f"{what}: {text}")
            kind = "in training" if how.backward else "without gradients"
            return Row(str(how), True, note=f"the same bits as {kind}")
        if ours["index"] is not None:
            given.index = ours["index"]
        return self._by_law(ours, given, family, how, base_hf)

    def _by_law(
        self, ours: Run, given: Inputs, family: Family, how: Pass, base_hf: list[Run]
    ) -> Row:
        dtype = passes.autocast_dtype(self.dtype, self.device) if how.autocast else self.dtype
        if how.accumulate:
            hf = [self._added(run, given) for run in base_hf]
        elif how.sentinels:
            valid = passes.valid(given.index, self.num_experts)
            runs = self._run_baselines(passes.legal(given, valid), how, family)
            hf = [passes.drop(run, valid) for run in runs]
        else:
            # what checkpointing computes again would not have its choice forced again
            hf = self._run_baselines(given, replace(how, checkpoint=False), family)
        if how.sentinels and how.backward:
            stray = law.first(ours["d_top_k_weights"].masked_fill(valid, 0) != 0)
            if stray is not None:
                note = f"a dropped slot has a gradient, at {list(stray)}"
                return Row(str(how), False, note=note)
        if how.autocast:
            row = self._returned(ours, hf, dtype)
            if not row.passed:
                return replace(row, tensor=str(how))
        measured = measure(self.twin, family, given, ours, hf, dtype)
        rows = measured.rows(dtype, _rms(given.x), self.in_fp8, how.autocast)
        return _condensed(str(how), rows)

    def _before(self, hf: list[Run]) -> dict[str, Tensor]:
        """A `.grad` for every parameter of the experts, of the size of the gradient to come."""
        generator = torch.Generator(self.device).manual_seed(1)
        before, experts = {}, find_experts(self.twin)
        for name in trained(experts):
            parameter = getattr(experts, name)
            grad = torch.empty_like(parameter).normal_(generator=generator)
            before[name] = grad.mul_(_rms(hf[0][f"d_{name}"])).detach()
        return before

    def _added(self, run: Run, given: Inputs) -> Run:
        """The run with what autograd would have added to each `.grad`."""
        return run | {
            f"d_{name}": Added(before + run[f"d_{name}"], before)
            for name, before in given.before.items()
        }

    def _with_sentinels(self, base: Run, given: Inputs) -> tuple[Family, Inputs]:
        """Every third slot dropped; its weight stays, since nothing must come of it.

        Never the first: of a single slot nothing would be left to compare.
        """
        index = base["index"].clone()
        index.view(-1)[1::3] = self.num_experts
        given.index, given.weights = index, base["weights"].to(given.x.dtype)
        return replace(self.family, router=None, shared_expert=False), given

    # Inputs

    def _inputs(
        self, tokens: int, generator: torch.Generator, hidden_states: Tensor | None, signs: bool
    ) -> Inputs:
        hidden, experts = self.hidden_size, self.num_experts

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        if hidden_states is None:
            x = randn(tokens, hidden).to(self.dtype)
        else:
            x = hidden_states.detach().reshape(-1, hidden).to(self.device, self.dtype)
            x = x * randn(*x.shape).sign().to(x.dtype) if signs else x
        given = Inputs(x, randn(len(x), hidden).to(self.dtype))
        if self.family.router is None:
            weights, given.index = randn(len(x), experts).softmax(-1).topk(self.top_k)
            given.weights = (weights / weights.sum(-1, keepdim=True)).to(self.dtype)
        return given

    def _scale(self, given: Inputs) -> int:
        """The power of two that makes an output of random inputs alive: small weights need it."""
        block = next(iter(self.baselines.values()))
        scale = 1
        while scale < 1 << 10:
            few = slice(0, 64)
            scaled = Inputs(
                given.x[few] * scale,
                given.d_out[few],
                None if given.index is None else given.index[few],
                None if given.weights is None else given.weights[few],
            )
            output = passes.run(block, self.family, scaled, INFERENCE)["output"]
            if _rms(output) >= 2 * law.ALIVE * scale:
                return scale
            scale *= 2
        return 1


def _condensed(name: str, rows: list[Row]) -> Row:
    """One row for many: what failed, or the worst ratio."""
    failed = [row for row in rows if not row.passed]
    if failed:
        return replace(failed[0], tensor=name, note=f"{failed[0].tensor}: {failed[0].note}")
    worst = max(rows, key=lambda row: row.ratio or 0.0)
    return replace(worst, tensor=name, note=f"worst of {len(rows)}: {worst.tensor}")
