"""Which fused class is swapped in for which class of transformers or PEFT."""

from __future__ import annotations

import sys

from torch import nn

SWAPS: dict[type[nn.Module], type[nn.Module]] = {}
"""{HF class: its fused subclass}. A module is swapped by setting `__class__`, and back.

models/ fills it when moe_patch is imported, `with_adapters` and routers.py when a model needs more.
"""


def with_adapters() -> None:
    """Adds the swaps of PEFT's classes once a model can have them; importing PEFT takes seconds."""
    if "peft.tuners.lora.layer" in sys.modules:
        from . import adapters

        SWAPS.update(adapters.SWAPS)
