"""Loads a local checkpoint for `python -m moe_patch parity` and `load`, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from . import shapes

WEIGHTS = ("*.safetensors", "*.bin")
_TOLD = 3
"""Names of weights in a sentence; the others are counted."""


def load(folder: str, device: torch.device | str) -> tuple[nn.Module, str]:
    """Returns the causal language model of a folder in its own dtype, in eval mode, and a remark.

    Every weight comes from the checkpoint, since parity of random weights would say nothing about
    it. The remark names weights that the model has no place for; "" when there are none.

    Raises:
        ValueError: the folder holds no checkpoint, or not all of one, or a broken one, or weights
            that are NaN.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        here = sorted(path.parent.name for path in Path().glob("*/config.json"))
        raise ValueError(
            f"no checkpoint in {folder!r}, a folder with a config.json is needed: here is "
            f"{_few(here) or 'none'}, and --shape takes {', '.join(shapes.SHAPES)}"
        )
    if not any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        raise ValueError(
            f"{folder} has a config.json and no weights: a file of {' or '.join(WEIGHTS)} is needed"
        )
    place = {} if torch.device(device).type == "cpu" else {"device_map": device}
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                dtype="auto",
                **place,
            )
    # a broken file raises what its reader raises: SafetensorError, UnpicklingError, KeyError ...
    except Exception as error:
        raise ValueError(f"{folder} does not load: {_sentence(error)}") from error
    mismatched = [
        f"{name} is {list(found)} and the model's {list(needed)}"
        for name, found, needed in info["mismatched_keys"]
    ]
    if mismatched:
        raise ValueError(f"{folder} does not fit its config.json: {_few(mismatched)}")
    if info["missing_keys"]:
        raise ValueError(
            f"{folder} is not whole, and parity of random weights would prove nothing: it lacks "
            f"{_few(info['missing_keys'])}"
        )
    broken = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if broken:
        raise ValueError(f"{folder} has weights that are NaN or infinite: {_few(broken)}")
    remark = ""
    if info["unexpected_keys"]:
        place = f"{type(model).__name__} has no place for them"
        remark = f"weights of {folder}, because {place}: {_few(info['unexpected_keys'])}"
    return model.eval(), remark


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers draws no bars and logs nothing: the sentence afterwards says it."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _sentence(error: Exception) -> str:
    """Returns what an exception says, in one line."""
    if isinstance(error, pickle.UnpicklingError):
        return "its pickle holds more than tensors, or is broken: save the weights as safetensors"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # a line that ends in a colon says nothing without the next one
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if "CONVERSION" in str(error):
        text = "some of its experts' weights are missing or of another shape"
    if isinstance(error, KeyError | AttributeError | TypeError | IndexError):
        text = f"{type(error).__name__} {text}"
    return (text or type(error).__name__)[:300].rstrip(".")


def _finite(weight: Tensor) -> bool:
    """Whether a weight holds numbers alone; quantised ones, of a byte, are not looked at."""
    if weight.element_size() == 1 or weight.is_meta:
        return True
    return bool(weight.isfinite().all())


def _few(names: Collection[str]) -> str:
    shown, rest = sorted(names)[:_TOLD], len(names) - _TOLD
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
