"""Setup that tests of DeepSpeed's ZeRO-3 share."""

from __future__ import annotations

import importlib.util


def compile_no_collectives() -> None:
    """Makes DeepSpeed, where it is installed, use gloo on CPUs, as it does off Linux.

    The collective of its own, for inference, takes g++ half a minute; ZeRO-3 does not call it.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
