"""Checkpoints that other libraries quantised to 4 bits: what their quantization_config says.

The conversion of their tensors is `formats.checkpoints`. A layout that cannot be kept is refused in
one sentence, from the config alone, before anything is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..formats import checkpoints
from ..formats.packed import Packed

Config = Mapping[str, Any]
KEPT = "gpt-oss MXFP4, compressed-tensors pack-quantized, GPTQ and AWQ"


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores weights in 4 bits."""

    title: str
    parts: tuple[str, ...]
    """The last part of the names of a weight's tensors, in the checkpoint."""
    read: Callable[[str, dict[str, Tensor]], Packed]
    """(name of the weight, its tensors by `parts`) -> a stack of weights."""
    format: str
    group: int
    zeros: bool = False
    stacked: bool = False
    """Whether experts are stacked in the checkpoint, and linear layers are not quantised."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self


def find_layout(config: Config) -> Layout:
    """Return the layout that a checkpoint's quantization_config describes.

    Raises:
        ValueError: One that cannot be kept.
    """
    method = config.get("quant_method")
    if method not in _READERS:
        _refuse(f"quantised by {method!r}", f"supported are {KEPT}")
    return _READERS[method](config)


def _gpt_oss(config: Config) -> Layout:
    def read(name: str, tensors: dict[str, Tensor]) -> Packed:
        return checkpoints.from_gpt_oss(name, tensors["blocks"], tensors.get("scales"))

    return Layout("MXFP4", ("blocks", "scales"), read, "mxfp4", 32, stacked=True)


def _gptq(config: Config) -> Layout:
    form = config.get("checkpoint_format") or "gptq"
    _need_four_bits("GPTQ", config.get("bits"))
    if form not in ("gptq", "gptq_v2"):
        _refuse(f"GPTQ with checkpoint_format {form!r}", "save it as gptq or gptq_v2")
    if config.get("desc_act"):
        _refuse("GPTQ with act-order (desc_act)", "quantise it with desc_act=False")
    read = functools.partial(checkpoints.from_gptq, checkpoint_format=form)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    return Layout("GPTQ", parts, read, "int4", _group(config), not config.get("sym", True))


def _awq(config: Config) -> Layout:
    form = str(config.get("version") or config.get("format") or "gemm").lower()
    _need_four_bits("AWQ", config.get("bits", config.get("w_bit")))
    if form != "gemm":
        _refuse(f"AWQ in the layout {form!r}", 'save it in the layout "gemm"')
    group = _group({"group_size": config.get("group_size", config.get("q_group_size"))})
    parts = ("qweight", "qzeros", "scales")
    return Layout("AWQ", parts, checkpoints.from_awq, "int4", group, True)


def _compressed_tensors(config: Config) -> Layout:
    schemes = list((config.get("config_groups") or {}).values())
    weights = [scheme.get("weights") or {} for scheme in schemes]
    forms = {scheme.get("format") or config.get("format") for scheme in schemes}
    if not weights or forms != {"pack-quantized"}:
        found = ", ".join(sorted(map(str, forms))) or "no config_groups"
        _refuse(
            f"compressed-tensors in the format {found}", "supported is pack-quantized, in 4 bits"
        )
    for scheme, stored in zip(schemes, weights):
        _need_four_bits("compressed-tensors", stored.get("num_bits"))
        if scheme.get("input_activations") or scheme.get("output_activations"):
            _refuse("compressed-tensors with quantised activations", "supported are weights alone")
        if stored.get("type", "int") != "int":
            _refuse(f"compressed-tensors with {stored['type']} weights", "supported are integers")
        if stored.get("actorder") in (True, "group"):
            _refuse(
                'compressed-tensors with act-order (actorder="group")',
                'quantise it with actorder="weight" or without',
            )
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if config.get(key) and config[key].get("format") != "dense":
            _refuse(f"compressed-tensors with a {key}", "save it without")
    shared = {(_group(stored), not stored.get("symmetric", True)) for stored in weights}
    if len(shared) > 1:
        _refuse("compressed-tensors with several sizes of groups", "supported is one")
    (group, zeros), *_ = shared
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    read = checkpoints.from_compressed_tensors
    return Layout("compressed-tensors", parts, read, "int4", group, zeros)


_READERS: dict[Any, Callable[[Config], Layout]] = {
    "mxfp4": _gpt_oss,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}


def _group(config: Config) -> int:
    """Weights that share a scale as `formats.checkpoints` stores them: at most 128 of them."""
    group = config.get("group_size")
    largest = checkpoints.LARGEST_GROUP
    return largest if group in (None, -1) or group % largest == 0 else group


def _need_four_bits(title: str, bits: Any) -> None:
    if bits != 4:
        _refuse(f"{title} in {bits} bits", "supported are 4 bits")


def _refuse(found: str, needed: str) -> None:
    raise ValueError(
        f"the checkpoint is {found}, whose experts ExpertsQuantConfig cannot keep: {needed}, or "
        "load it without a quantization_config."
    )
