"""`ExpertsQuantConfig`: what `from_pretrained` is told, and what config.json keeps of it."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats.packed import find_options
from .layouts import Layout, find_layout

METHOD = "moe_patch"
"""The `quant_method` of config.json."""
DEFAULT = "nf4"


class ExpertsQuantConfig(QuantizationConfigMixin):
    """Quantises experts to 4 bits while a model loads, or keeps the 4 bits that they have.

    from_pretrained(path, quantization_config=ExpertsQuantConfig("nf4"))

    Without arguments a checkpoint of gpt-oss (MXFP4), compressed-tensors (pack-quantized), GPTQ or
    AWQ keeps its codes and scales, and any other one is quantised to nf4. Experts alone are
    quantised, unless `linear` says how bitsandbytes is to quantise linear layers.

    Args:
        format: "nf4", "mxfp4" or "int4".
        group: Weights along the reduction that share a scale; the format's own if None.
        scale_dtype: The dtype of the scales, or its name; the format's own if None.
        zeros: Whether each group has a zero point (int4).
        linear: A BitsAndBytesConfig with load_in_4bit=True, for linear layers outside of experts
            that are neither routers nor gates; None leaves them in the model's dtype.
        skip: Names of experts modules that stay in the model's dtype, as
            "model.layers.0.mlp.experts".

    Raises:
        TypeError: Arguments that there are not, or a `linear` of another class.
        ValueError: A format, group, dtype of scales or zero points that there are not, or 8 bits.
        ImportError: `linear` from a checkpoint, without bitsandbytes.
    """

    def __init__(
        self,
        format: str | None = None,
        group: int | None = None,
        scale_dtype: torch.dtype | str | None = None,
        zeros: bool = False,
        linear: BitsAndBytesConfig | None = None,
        skip: Sequence[str] = (),
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method
        if isinstance(scale_dtype, str):
            scale_dtype = _dtype(scale_dtype)
        self.format, self.group, self.scale_dtype, self.zeros = format, group, scale_dtype, zeros
        self.linear, self.skip = _check_linear(linear), list(skip)
        # how a checkpoint is loaded, which is not saved
        self.layout: Layout | None = None
        """The layout of the checkpoint whose 4 bits are kept; None: ours, or none to keep."""
        self.linear_is_new = False
        """Whether `linear` is to quantise linear layers of a checkpoint that has 4-bit experts."""
        self.resolved()

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config of a checkpoint; `kwargs` replace entries."""
        entries = {**config_dict, **kwargs}
        linear = entries.get("linear")
        if isinstance(linear, Mapping):
            if importlib.util.find_spec("bitsandbytes") is None:
                raise ImportError(
                    "the checkpoint's linear layers are quantised by bitsandbytes, which is not "
                    "installed: pip install bitsandbytes."
                )
            entries["linear"] = BitsAndBytesConfig.from_dict(dict(linear))
        config = cls(**entries)
        return (config, {}) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of config.json."""
        dtype = None if self.scale_dtype is None else str(self.scale_dtype).removeprefix("torch.")
        return {
            "quant_method": self.quant_method,
            "format": self.format,
            "group": self.group,
            "scale_dtype": dtype,
            "zeros": self.zeros,
            "linear": None if self.linear is None else self.linear.to_dict(),
            "skip": list(self.skip),
        }

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def resolved(self) -> ExpertsQuantConfig:
        """Return a copy that names what was left to the format.

        Raises:
            ValueError: a format that does not exist, or does not have one of the options.
        """
        config = copy.copy(self)
        config.skip = list(self.skip)
        config.format = self.format or DEFAULT
        _, config.group, config.scale_dtype = find_options(
            config.format, self.group, self.scale_dtype, self.zeros
        )
        return config

    def keeping(self, found: Mapping[str, Any]) -> ExpertsQuantConfig:
        """Return the config that keeps what a checkpoint has, by its own quantization_config.

        Raises:
            ValueError: A checkpoint that cannot be kept, or one that is not what was asked for.
        """
        if found.get("quant_method") == METHOD:
            kept = type(self).from_dict(found)
        else:
            layout = find_layout(found)
            kept = type(self)(layout.format, layout.group, zeros=layout.zeros, skip=self.skip)
            kept.layout = layout
        for option in ("format", "group", "scale_dtype", "zeros"):
            asked, has = getattr(self, option), getattr(kept, option)
            if asked and asked != has:
                raise ValueError(
                    f"{option} is {asked!r}, and the checkpoint's experts are in 4 bits already, "
                    f"with {option} {has!r}: pass ExpertsQuantConfig() to keep them, or load a "
                    "checkpoint in 16 bits."
                )
        if self.linear is not None:
            if kept.linear is not None or kept.layout is not None and not kept.layout.stacked:
                raise ValueError(
                    "linear= is given, and the checkpoint's linear layers are quantised already: "
                    "leave linear out."
                )
            kept.linear, kept.linear_is_new = self.linear, True
        return kept


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"scale_dtype {name!r} is not a dtype of torch: pass one, as float32.")
    return found


def _check_linear(linear: Any) -> BitsAndBytesConfig | None:
    if linear is None:
        return None
    if not isinstance(linear, BitsAndBytesConfig):
        raise TypeError(
            f"linear is a {type(linear).__name__}: pass a transformers.BitsAndBytesConfig or None."
        )
    if not linear.load_in_4bit:
        raise ValueError("linear is not in 4 bits: pass BitsAndBytesConfig(load_in_4bit=True).")
    return linear
