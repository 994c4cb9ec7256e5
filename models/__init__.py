"""Patches for the models of transformers, imported as moe_patch.models.

decorated.py covers every family whose experts use HF's @use_experts_implementation, and
recognise/routers.py every router that it recognises. A file here named after a family adds what
those cannot reach.
"""

from __future__ import annotations

import importlib

from ..notices import warn_once
from ..recognise.swaps import SWAPS

__all__ = ["FAMILIES", "SWAPS"]

FAMILIES = (
    "deepseek_v3",
    "llama4",
    "qwen3_moe",
    "step3p7",
)

for _family in FAMILIES:
    try:
        SWAPS.update(importlib.import_module(f"{__name__}.{_family}").SWAPS)
    except ModuleNotFoundError as error:  # this transformers does not have the family
        if not (error.name or "").startswith("transformers.models."):
            raise
    except AttributeError as error:  # it has the family, but not a class of it
        if not str(getattr(error.obj, "__name__", "")).startswith("transformers.models."):
            raise
        warn_once(f"moe_patch leaves {_family} to Hugging Face: {error}.")
