"""Patches for the models of transformers, imported as moe_patch.models.

decorated.py covers every family whose experts use HF's @use_experts_implementation, routers.py
every router that it recognises. A file here named after a family adds what those cannot reach.
"""

from __future__ import annotations

import importlib
import sys

from torch import nn

FAMILIES = (
    "deepseek_v3",
    "llama4",
    "qwen3_moe",
    "step3p7",
)

SWAPS: dict[type[nn.Module], type[nn.Module]] = {}
"""{HF class: its fused subclass}. A module is swapped by setting `__class__`, and back."""


def with_adapters() -> None:
    """Adds the swaps of PEFT's classes once a model can have them; importing PEFT takes seconds."""
    if "peft.tuners.lora.layer" in sys.modules:
        SWAPS.update(importlib.import_module(f"{__name__}.lora").SWAPS)


def with_routers(model: nn.Module) -> None:
    """Adds the swaps of the routers in a model: which classes those are is asked, not listed."""
    for cls in {wrapped.plain_class(module) for module in model.modules()}:
        if not issubclass(cls, original.Fused):
            routers.fused_class(cls)


for _family in FAMILIES:
    try:
        SWAPS.update(importlib.import_module(f"{__name__}.{_family}").SWAPS)
    except ModuleNotFoundError as error:  # this transformers does not have the family
        if not (error.name or "").startswith("transformers.models."):
            raise

from . import original, routers, wrapped  # noqa: E402  (routers writes to SWAPS)
