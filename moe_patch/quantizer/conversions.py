"""Steps that transformers runs on a checkpoint's tensors: quantise stacks, keep them, widen others.

Each is a ConversionOps of transformers' weight conversion, which merges the tensors of a checkpoint
into those of a model, one tensor of the model at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from ..formats.checkpoints import concat, drop_zeros
from ..formats.packed import Packed, dequantize, quantize
from ..recognise.four_bits import as_parameters
from .config import ExpertsQuantConfig
from .layouts import Layout


def named(name: str, packed: Packed) -> dict[str, nn.Parameter]:
    """Return the parameters that store a stack: codes under its own name, scales, zero points."""
    return {name + part: p for part, p in as_parameters(packed).items() if p is not None}


class Step(ConversionOps):
    """A step whose refusals wait until the model is loaded.

    Transformers logs what a step raises among its tables and raises an error that names no reason;
    `ExpertsQuantizer` raises the first of `refusals` instead.
    """

    def __init__(self, refusals: list[Exception]) -> None:
        self.refusals = refusals

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # transformers copies steps for each tensor, and these have no state

    def convert(self, input_dict: dict[str, Any], **where: Any) -> dict[str, Any]:
        """Return the tensors that a step makes; none where it refuses those that it is given."""
        try:
            with torch.no_grad():
                return self.made(input_dict, where["full_layer_name"], where)
        except (TypeError, ValueError) as error:
            self.refusals.append(error)
            return {}

    def made(self, input_dict: dict[str, Any], name: str, where: dict[str, Any]) -> dict[str, Any]:
        """As `convert`, and may raise.

        Args:
            name: Of the tensor in the model, the first one where there are several.
            where: What else transformers says: the model, its config.
        """
        raise NotImplementedError

    @property
    def reverse_op(self) -> ConversionOps:
        """Nothing: `ExpertsQuantizer` takes the conversion away before a model is saved."""
        return self


class QuantizeStacks(Step):
    """Quantises each stack of experts as soon as its experts are merged.

    Args:
        transposed: Names of the stacks in the model -> whether they are stored [E, K, N].
        others: The step for the weights of linear layers, if they are quantised.
    """

    def __init__(
        self,
        refusals: list[Exception],
        config: ExpertsQuantConfig,
        transposed: dict[str, bool],
        others: ConversionOps | None,
    ) -> None:
        super().__init__(refusals)
        self.config, self.transposed, self.others = config, transposed, others

    def made(self, input_dict: dict[str, Any], name: str, where: dict[str, Any]) -> dict[str, Any]:
        """Full names -> weights, to full names -> codes, scales and zero points."""
        if not self.transposed.keys() & input_dict.keys():
            return self.others.convert(input_dict, **where)
        stored: dict[str, Any] = {}
        for name in list(input_dict):
            weight = input_dict.pop(name)
            weight = weight[0] if isinstance(weight, list) else weight
            try:
                stored |= named(
                    name, self._quantised(weight.mT if self.transposed[name] else weight)
                )
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return stored

    def _quantised(self, weight: Tensor) -> Packed:
        config = self.config
        return quantize(
            weight, config.format, config.group, scale_dtype=config.scale_dtype, zeros=config.zeros
        )


class KeepStack(Step):
    """Joins the 4-bit tensors of a checkpoint to one stack of experts, without quantising again.

    Args:
        stems: Patterns of the names of the weights that the stack is made of, in their order, less
            the parts of the layout: of the gates and of the ups, say.
    """

    def __init__(self, refusals: list[Exception], layout: Layout, stems: list[str]) -> None:
        super().__init__(refusals)
        self.layout, self.stems = layout, stems

    def pattern(self, stem: str, part: str) -> str:
        """Return the pattern of names in the checkpoint."""
        return f"{stem}{'_' if self.layout.stacked else '.'}{part}$"

    def patterns(self) -> list[str]:
        """Return the patterns of all tensors that the stack is made of."""
        return [self.pattern(stem, part) for stem in self.stems for part in self.layout.parts]

    def made(self, input_dict: dict[str, Any], name: str, where: dict[str, Any]) -> dict[str, Any]:
        """Patterns -> tensors of all experts, to full names -> codes, scales and zero points."""
        stacks = [self._stack(input_dict, stem, name) for stem in self.stems]
        packed = concat(stacks, dim=1)
        if not self.layout.zeros:
            packed = drop_zeros(packed)
        if packed.zeros is not None and not self.layout.zeros:
            raise ValueError(
                f"{name} has zero points, and the config.json of the checkpoint says "
                "that it is symmetric: convert it again."
            )
        return named(name, packed)

    def _stack(self, input_dict: dict[str, list[Tensor]], stem: str, name: str) -> Packed:
        """[E, N, K] of one kind of weight."""
        patterns = {part: self.pattern(stem, part) for part in self.layout.parts}
        lists = {part: input_dict.pop(at) for part, at in patterns.items() if at in input_dict}
        counts = sorted({len(tensors) for tensors in lists.values()})
        if len(counts) != 1:
            raise ValueError(
                f"{name} has {' or '.join(map(str, counts)) or 'no'} experts with tensors of "
                f"{stem}: load a checkpoint that is whole."
            )
        return concat(
            [
                self.layout.read(f"{name}, expert {expert}, {stem}", dict(zip(lists, tensors)))
                for expert, tensors in enumerate(zip(*lists.values()))
            ]
        )


class WidenLinear(Step):
    """Dequantises the weight of a linear layer to the dtype that it has in the model."""

    def __init__(self, refusals: list[Exception], layout: Layout) -> None:
        super().__init__(refusals)
        self.layout = layout

    def patterns(self) -> list[str]:
        """Return the patterns of names in the checkpoint, in the order of the layout's parts."""
        return [rf"\.{part}$" for part in self.layout.parts]

    def made(self, input_dict: dict[str, Any], name: str, where: dict[str, Any]) -> dict[str, Any]:
        """Patterns -> tensors of one layer, to full name -> weight [N, K]."""
        named_parts = zip(self.layout.parts, self.patterns())
        tensors = {part: input_dict[at][0] for part, at in named_parts if at in input_dict}
        packed = self.layout.read(name.removesuffix(".weight"), tensors)
        dtype = where["model"].get_parameter(name).dtype
        return {name: dequantize(packed, dtype)[0]}


# How a model's conversions change


def is_own(conversion: Any) -> bool:
    """Whether a conversion is of a checkpoint in another library's layout."""
    steps = getattr(conversion, "operations", [])
    return any(isinstance(step, KeepStack | WidenLinear) for step in steps)


def without(conversions: list[Any], stacks: Iterable[str]) -> list[Any]:
    """Return those conversions that make no stacks of experts: stacks are stored as they are."""
    return [each for each in conversions if not (is_own(each) or _makes(each, stacks))]


def keeping(
    conversions: list[Any], layout: Layout, stacks: Iterable[str], refusals: list[Exception]
) -> list[Any]:
    """Return conversions that read a layout's tensors in the place of weights.

    Raises:
        ValueError: stacks that a family does not make by merging experts alone.
    """
    kept = []  # before the family's own, whose patterns may match names that go on
    if layout.stacked:
        for which in sorted({name.rpartition(".")[2] for name in stacks}):
            step: Any = KeepStack(refusals, layout, [which])
            kept.append(WeightConverter(step.patterns(), which, [step]))
        return [*kept, *conversions]
    for conversion in conversions:
        if _makes(conversion, stacks):
            step = KeepStack(refusals, layout, _stems(conversion))
            targets = list(conversion.target_patterns)
            kept.append(WeightConverter(step.patterns(), targets, [step]))
            kept[-1].scope_prefix = conversion.scope_prefix
            kept[-1].base_model_prefix = conversion.base_model_prefix
    step = WidenLinear(refusals, layout)
    return [*kept, WeightConverter(step.patterns(), ".weight", [step]), *conversions]


def _makes(conversion: Any, stacks: Iterable[str]) -> bool:
    """Whether what a conversion makes are stacks of experts."""
    if not isinstance(conversion, WeightConverter):
        return False
    patterns = [
        ".+".join(map(re.escape, target.split(r"\1"))) for target in conversion.target_patterns
    ]
    return any(re.search(pattern, name) for pattern in patterns for name in stacks)


def _stems(conversion: WeightConverter) -> list[str]:
    """Patterns of the names that a conversion merges, less ".weight".

    Raises:
        ValueError: It does more than to merge experts, and to concatenate gates and ups.
    """
    merges = [(type(op), getattr(op, "dim", None)) for op in conversion.operations]
    stems = [source.removesuffix("$") for source in conversion.source_patterns]
    plain = merges in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if not plain or not all(stem.endswith(".weight") for stem in stems):
        raise ValueError(
            f"{conversion.target_patterns[0]} is made of {', '.join(stems)} by "
            f"{conversion.operations}: 4-bit checkpoints are kept where experts are merged and no "
            "more, load one in 16 bits."
        )
    return [stem.removesuffix(".weight") for stem in stems]


def _keeping(conversion: WeightConverter, step: KeepStack) -> WeightConverter:
    """A conversion of the same place with other sources."""
    kept = WeightConverter(step.patterns(), list(conversion.target_patterns), [step])
    kept.scope_prefix = conversion.scope_prefix
    kept.base_model_prefix = conversion.base_model_prefix
    return kept
