"""Step 3.7: experts of the usual form without HF's decorator; some layers clamp after the SiLU.

Those layers (43 and 44 of Step-3.7-Flash) run by parts: silu(gate) clamped is no known activation.
"""

from __future__ import annotations

from transformers.models.step3p7 import modeling_step3p7 as hf

from .decorated import UndecoratedExperts


class Step3p7Experts(UndecoratedExperts, hf.Step3p7Experts):
    """HF's experts, fused."""


SWAPS = {hf.Step3p7Experts: Step3p7Experts}
