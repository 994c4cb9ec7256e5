"""Triton kernels, one a file. They import triton, torch, each other and the order of slots.

This file itself needs no Triton: it says where the kernels run and how they are called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import versions


def __getattr__(name: str) -> ModuleType:
    """kernels.topk and so on, imported when first used: Triton reads TRITON_INTERPRET then."""
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f".{name}", __name__)


@functools.cache
def why_not(device: torch.device | str) -> str | None:
    """None when the kernels run on this device, else the reason in one sentence."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it is for Linux only), so the fused kernels cannot run"
    if reason := versions.why_too_old():
        return reason
    device_type = torch.device(device).type
    if device_type == "cuda":
        return _why_not_card(torch.device(device))
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return _why_not_interpreted(versions.installed("triton"), versions.installed("numpy"))
    return f"the fused kernels need a GPU that Triton knows, and the tensors are on {device_type}"


def _why_not_card(device: torch.device) -> str | None:
    """The oldest cards that the kernels compile for are of compute capability 8.0."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(device)
    if card.major >= 8:
        return None
    return (
        "the fused kernels need an NVIDIA GPU of compute capability 8.0 or later, for bfloat16, "
        f"and {card.name} has {card.major}.{card.minor}"
    )


def _why_not_interpreted(triton: str | None, numpy: str | None) -> str | None:
    """The interpreter of Triton 3.6 fails on loop bounds with numpy 2.4; that of 3.9 does not."""
    if not triton or not numpy:
        return None
    if versions.release(triton) < (3, 9) and versions.release(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} needs numpy below 2.4, and {numpy} is installed"
    return None


def require(device: torch.device) -> None:
    """Raises RuntimeError with the reason when the kernels cannot run on `device`.

    Not while torch.compile traces: it would follow the look-ups behind `why_not`.
    """
    reason = None if torch.compiler.is_compiling() else why_not(device)
    if reason:
        raise RuntimeError(
            f"{reason}; moe_patch.reference has the same functions in plain PyTorch."
        )


_HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensors' one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _HERE


def op(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function that torch.compile sees as one opaque op with `fake`'s shapes.

    Eager calls skip the dispatcher, which costs more than a decode step's kernels.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"moe_patch::{function.__name__.lstrip('_')}"
        registered = torch.library.custom_op(name, function, mutates_args=mutates)
        registered.register_fake(fake)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return (registered if torch.compiler.is_compiling() else function)(*arguments)

        return call

    return wrap
