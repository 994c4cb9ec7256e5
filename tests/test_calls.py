"""How many Python calls of this package stand between a patched block and its kernels.

A decode step's kernels take microseconds, and so does every few calls. Counted without a GPU: the
kernels are not started, all that leads to them runs.
"""

from __future__ import annotations

import collections
import os
import sys

import pytest
import torch
from tiny import tiny_block

import moe_patch
from moe_patch.kernels.launch import Launch

HOME = os.path.dirname(os.path.abspath(moe_patch.__file__)) + os.sep
MODELS = os.path.dirname(os.path.abspath(sys.modules["moe_patch.models"].__file__)) + os.sep


def calls(function) -> collections.Counter[str]:
    """{file:function: calls} of this package's Python functions while `function` runs."""
    seen: collections.Counter[str] = collections.Counter()

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((HOME, MODELS)):
            seen[f"{os.path.relpath(code.co_filename, HOME)}:{code.co_name}"] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.fixture
def block(monkeypatch):
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)  # counted as one call each, elsewhere
    block = tiny_block("qwen3_moe").bfloat16()
    moe_patch.patch(block)
    return block


@pytest.mark.parametrize(
    "training, packed, most",
    [(False, False, 40), (True, False, 60), (False, True, 72), (True, True, 100)],
    ids=("decoding", "training", "decoding in 4 bits", "training in 4 bits"),
)
def test_few_calls_before_the_kernels(block, training, packed, most):
    if packed:
        moe_patch.quantize_experts(block, group=32)
    x = torch.randn(1, 64 if training else 1, 64, dtype=torch.bfloat16)
    with torch.set_grad_enabled(training):
        block(x)  # what is looked up once
        # a descriptor is made anew where the allocator has moved a tensor
        found = min((calls(lambda: block(x)) for _ in range(5)), key=collections.Counter.total)
    listed = "\n".join(f"{count:3} {name}" for name, count in found.most_common())
    assert found.total() <= most, f"{found.total()} calls:\n{listed}"
    assert any(name.endswith("_fused_or") for name in found), "the fused path did not run"
