"""The environment variable MOE_PATCH, which switches fused code off to find out who is to blame."""

from __future__ import annotations

import os

ON, OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def is_on(value: str | None) -> bool:
    """Whether fused code runs with that value of MOE_PATCH; unset and empty are on.

    Raises:
        ValueError: neither a word for on nor one for off.
    """
    word = (value or "").strip().lower() or ON[0]
    if word not in ON + OFF:
        raise ValueError(
            f"MOE_PATCH is {value!r}, and moe_patch takes {', '.join(OFF)} (Hugging Face's own "
            f"forward) or {', '.join(ON)} (the fused one, as when it is not set)."
        )
    return word in ON


ENABLED = is_on(os.environ.get("MOE_PATCH"))
"""False under MOE_PATCH=0: every patched module runs HF's own forward."""
