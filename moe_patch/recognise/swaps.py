"""Which fused class is swapped in for which class of transformers or PEFT."""

from __future__ import annotations

import importlib.util
import sys

from torch import nn

from ..notices import warn_once
from .four_bits import WATCHERS

SWAPS: dict[type[nn.Module], type[nn.Module]] = {}
"""{HF class: its fused subclass}. A module is swapped by setting `__class__`, and back.

models/ fills it when moe_patch is imported, `with_adapters` and routers.py when a model needs more.
"""


def with_adapters() -> None:
    """Adds the swaps of PEFT's classes once a model can have them; importing PEFT takes seconds."""
    if "peft.tuners.lora.layer" in sys.modules:
        from . import adapters

        SWAPS.update(adapters.SWAPS)


def _with_four_bits() -> None:
    """Has PEFT know experts in 4 bits: it may put adapters on them at any time from now on."""
    if importlib.util.find_spec("peft") is None:
        return
    try:
        from . import adapters
    except ImportError as error:
        warn_once(f"PEFT cannot be imported, so LoRA on experts in 4 bits is not there: {error}.")
    else:
        adapters.know_four_bits()


WATCHERS.append(_with_four_bits)
