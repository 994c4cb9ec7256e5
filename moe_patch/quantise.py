"""quantize_experts(): the weights of a model's experts to 4 bits, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from . import output
from .formats.packed import find_options, quantize
from .patcher import SUPPORTED, Block, find_blocks
from .quantizer.config import ExpertsQuantConfig
from .quantizer.loader import attach, models_with_experts, why_not_attach
from .recognise.four_bits import quantise_module
from .recognise.lending import is_adapter
from .recognise.parts import up_name
from .recognise.storage import PLAIN, logical_shapes, storage_of
from .recognise.wrapped import is_dtensor, plain_class

_FEW = 4
"""So few blocks take no display of progress."""


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_experts` did; printable."""

    format: str
    group: int
    scale_dtype: torch.dtype
    before: int
    """Bytes of the model's parameters and buffers."""
    after: int
    quantized: list[str] = field(default_factory=list)
    """Names of the blocks, as in `named_modules()`; "" is the module itself."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, class, reason) of each MoE block that stays as it is."""

    def __str__(self) -> str:
        total = len(self.quantized) + len(self.skipped)
        scales = f"groups of {self.group}, scales in {str(self.scale_dtype)[6:]}"
        lines = [
            f"moe_patch: quantized {len(self.quantized)} of {total} MoE blocks to {self.format} "
            f"({scales}): {_size(self.before)} -> {_size(self.after)}"
        ]
        lines += [f"  {name or '(root)'} ({cls}): {reason}" for name, cls, reason in self.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as json.dumps takes it."""
        return {
            "format": self.format, "group": self.group, "scale_dtype": str(self.scale_dtype)[6:],
            "bytes_before": self.before, "bytes_after": self.after,
            "quantized": list(self.quantized),
            "skipped": [dict(zip(("name", "class", "reason"), each)) for each in self.skipped],
        }  # fmt: skip


def quantize_experts(
    model: nn.Module,
    format: str = "nf4",
    *,
    group: int | None = None,
    scale_dtype: torch.dtype | None = None,
    zeros: bool = False,
    progress: bool = True,
) -> QuantizationReport:
    """Quantises the weights of every supported MoE block to 4 bits, in place and block by block.

    The experts become frozen; all else stays as it is, biases among it. Routers, gates and shared
    experts keep their weights. Patch the model before or after, and add adapters after. Memory
    never holds more than the result and one block's weights. transformers' `model.dequantize()`
    makes them plain weights again: what the codes stand for.

    Args:
        model: a model of transformers, a module that holds one, a bare block or experts module.
        format: "nf4", "mxfp4" or "int4" (docs/quantization.md).
        group: weights along the reduction that share a scale; the format's own by default.
        scale_dtype: of the scales; the format's own by default.
        zeros: give each group a zero point (int4).
        progress: show a display on a terminal when there are more than a few blocks.

    Raises:
        ValueError: no MoE block that can be quantised, an unknown format, a group, dtype of scales
            or zero points that the format does not have, or a model of transformers that could not
            be saved then: quantised by others, or in 4 bits of another kind. Nothing is changed.
        TypeError: `model` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_experts takes a torch.nn.Module, found {type(model).__name__}.")
    _, group, scale_dtype = find_options(format, group, scale_dtype, zeros)
    before, todo, skipped = _bytes(model), [], []
    owners = _owners(model)
    for block in find_blocks(model):
        reason = _why_not(block, owners, group, scale_dtype)
        if reason:
            skipped.append((block.name, plain_class(block.module).__name__, reason))
        else:
            todo.append(block)
    if not todo and not any(block.is_known() for block in find_blocks(model)):
        found = ", ".join(dict.fromkeys(f"{cls} ({reason})" for _, cls, reason in skipped))
        raise ValueError(
            f"{type(model).__name__} has no MoE block that can be quantised, found "
            f"{found or 'none'}: supported are {SUPPORTED}."
        )
    config = ExpertsQuantConfig(format, group, scale_dtype, zeros)
    whole = models_with_experts(model) if todo else []
    if reason := next(filter(None, (why_not_attach(each, config) for each in whole)), None):
        raise ValueError(f"{reason}.")
    columns = TextColumn("experts to 4 bits"), BarColumn(), MofNCompleteColumn()
    with output.progress(*columns, TimeRemainingColumn()) as display:
        shown = progress and len(todo) > _FEW
        task = display.add_task("", total=len(todo), visible=shown)
        for block in todo:
            for experts in _experts(block):
                up, down = storage_of(experts).operands(experts, *_weights(experts))[:2]
                up, down = (
                    quantize(w.detach(), format, group, scale_dtype=scale_dtype, zeros=zeros)
                    for w in (up, down)
                )
                quantise_module(experts, up, down)
            display.advance(task)
    for each in whole:
        attach(each, config)
    names = [block.name for block in todo]
    return QuantizationReport(format, group, scale_dtype, before, _bytes(model), names, skipped)


def _experts(block: Block) -> Iterator[Any]:
    """The modules of a block that hold stacked weights: Ernie-VL's has two."""
    for module in block.module.modules():
        up, down = getattr(module, up_name(module), None), getattr(module, "down_proj", None)
        if isinstance(up, Tensor) and isinstance(down, Tensor):
            yield module


def _weights(experts: Any) -> tuple[Tensor, Tensor]:
    return getattr(experts, up_name(experts)), experts.down_proj


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def _why_not(
    block: Block, owners: Counter[int], group: int, scale_dtype: torch.dtype
) -> str | None:
    """None when a block can be quantised, else the reason in one sentence."""
    reasons = (_why_not_experts(block, each, owners) for each in _experts(block))
    if reason := next(filter(None, reasons), None) or block.why_not():
        return reason
    numbers = (_why_not_numbers(each, group, scale_dtype) for each in _experts(block))
    return next(filter(None, numbers), None)


def _why_not_experts(block: Block, experts: Any, owners: Counter[int]) -> str | None:
    stored, weights = storage_of(experts), _weights(experts)
    if stored is not PLAIN:
        return f"its experts are in {stored.name} already"
    if any(map(is_dtensor, weights)):
        return (
            "its weights are spread over ranks (DTensors): quantise the model before it is sharded"
        )
    if any(weight.is_meta for weight in weights):
        return "its weights are offloaded or on the meta device: load the model without offloading"
    if any(map(is_adapter, block.module.modules())):
        return "PEFT has put adapters on its experts: quantise the model before that"
    if is_parametrized(experts):
        return "its weights are computed by a parametrization: remove that before quantising"
    if any(owners[id(weight)] > 1 for weight in weights):
        return "its weights are tied to those of another module: quantising would untie them"
    return None


def _why_not_numbers(experts: Any, group: int, scale_dtype: torch.dtype) -> str | None:
    names = up_name(experts), "down_proj"
    for name, shape in zip(names, logical_shapes(experts)):
        if shape[2] % group:
            return (
                f"K = {shape[2]} of {name} is not a multiple of {group}: choose another group or "
                "format"
            )
    for name in names:
        for weight in getattr(experts, name).detach():
            if not weight.isfinite().all():
                return f"{name} has NaN or infinity: load weights that are finite"
            if weight.abs().max() > torch.finfo(scale_dtype).max:
                return f"{name} is too large for scales in {scale_dtype}: choose another dtype"
    return None


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
