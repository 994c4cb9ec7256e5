"""Whole models of random weights, from their config.json: what the kinds of bench that run them
share."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .. import parity
from ..patcher import patch
from ..quantizer.config import METHOD
from ..shapes import building
from ..usage import UsageError
from .kind import Flags, Run, Timed, add_layers, check_layers
from .timing import first_line, short_of


def read_config(file: Path, layers: int | None = None) -> PreTrainedConfig:
    """The config in that file, with its first `layers` layers only.

    Raises:
        ValueError: there is no such config, it has fewer layers, or its experts are in 4 bits.
    """
    if not file.is_file():
        raise ValueError(f"no model config at {str(file)!r}: a config.json of transformers is read")
    try:
        config = AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    # a broken file raises whatever the class of its model_type raises
    except Exception as error:
        raise ValueError(
            f"{file} is no config of this transformers: {first_line(error)}"
        ) from error
    found = getattr(config, "quantization_config", None) or {}
    if isinstance(found, dict) and found.get("quant_method") == METHOD:
        raise ValueError(
            f"the experts of {file} are in 4 bits, and what reads this file measures 16 bits and "
            "FP8: name the checkpoint that they were quantised from, or run bench quant"
        )
    text = config.get_text_config()
    if layers is not None:
        if not 1 <= layers <= text.num_hidden_layers:
            raise ValueError(
                f"{file} has {text.num_hidden_layers} layers, {layers} were asked for: use 1 to "
                f"{text.num_hidden_layers}"
            )
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):  # caches are made one for each
            text.layer_types = text.layer_types[:layers]
    return config


def build(config: PreTrainedConfig, device: torch.device | str = "cuda") -> PreTrainedModel:
    """The model with Hugging Face's own random initialisation, bfloat16, made on the device."""
    with building(torch.bfloat16, torch.device(device), seed=0):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def checked(
    run: Run,
    name: str,
    config: PreTrainedConfig,
    make: Callable[[PreTrainedConfig], PreTrainedModel],
) -> PreTrainedModel | parity.ParityReport | None:
    """Make the model and check its first block.

    Returns:
        the model; the report, where parity fails; None, with a note, where the model does not fit.

    Raises:
        UsageError: no block of it can be patched.
    """
    try:
        with run.busy(f"{name}: building"):
            model = make(config)
        with run.busy(f"{name}: parity"):
            report = parity.check_parity(model, blocks=1, backward=False)
    except torch.OutOfMemoryError as error:
        layers = f"{config.get_text_config().num_hidden_layers} layers"
        run.notes.append(f"{name}: skipped, {short_of(error, layers)}: use --layers")
        return None
    except ValueError as error:  # no block of it can be patched
        raise UsageError(first_line(error)) from error
    return model if report.passed else report


class PatchedModel(Timed):
    """A kind of bench that patches a whole model of random weights, from its config.json."""

    def arguments(self, flag: Flags, old: bool) -> None:
        flag("config", metavar="FILE", type=Path, help="a config.json of transformers")
        add_layers(flag, "all")

    def refuse(self, options: argparse.Namespace) -> None:
        check_layers(options.layers)
        read_config(options.config, options.layers)

    def measure(self, run: Run) -> parity.ParityReport | None:
        options, name = run.options, run.options.config.stem
        model = checked(run, name, read_config(options.config, options.layers), build)
        if not isinstance(model, PreTrainedModel):
            return model
        patch(model)
        self.measure_patched(run, name, model)
        return None

    @abstractmethod
    def measure_patched(self, run: Run, name: str, model: PreTrainedModel) -> None:
        """Adds the rows of the patched model."""
