"""Times that nobody measured, for tests of what is made of them."""

from __future__ import annotations

from moe_patch.bench.block import OURS, Ceilings, Timing

H200 = Ceilings("bfloat16", 802.0, 4.29)


def timing(implementation=OURS, tokens=64, mode="forward", shape="qwen3_30b", ms=2.0, **more):
    row = (shape, tokens, "bfloat16", mode, implementation)
    return Timing(*row, ms, ms * 0.9, ms * 1.1, 600 / ms, ms / 2, limit_ms=1.0, **more)
