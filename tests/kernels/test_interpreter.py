"""The shortcuts in Triton's interpreter change no bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEP = """
import hashlib, sys
import torch

from moe_patch import compat

if sys.argv[1] == "as it is":
    compat.INTERPRETER["no such name"] = compat.Name("triton:no_such_name", "", "", "")

from moe_patch import fused_experts
from moe_patch.kernels import interpreter

torch.manual_seed(0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    rows, gate_up, down = torch.randn(9, 24), torch.randn(4, 40, 24), torch.randn(4, 24, 20)
    inputs = [each.to(dtype).requires_grad_() for each in (rows, gate_up, down)]
    index, weights = torch.randint(0, 5, (9, 2)), torch.rand(9, 2).requires_grad_()
    out = fused_experts(*inputs, index, weights)
    one = fused_experts(inputs[0][:1].detach(), *inputs[1:], index[:1], weights[:1].detach())
    found = [out, one, *torch.autograd.grad(out.float().square().sum(), [*inputs, weights])]
    for each in found:
        print(hashlib.sha256(each.detach().float().numpy().tobytes()).hexdigest())
name = compat.INTERPRETER["tensor"].find().__name__
print(interpreter.quicken.cache_info().currsize, name)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    runs = {
        way: subprocess.Popen(
            [sys.executable, "-c", STEP, way], env=environment, stdout=subprocess.PIPE, text=True
        )
        for way in ("as it is", "quickened")
    }
    return {way: run.communicate(timeout=300)[0].splitlines() for way, run in runs.items()}


def test_the_same_bits(printed):
    *slow, original = printed["as it is"]
    *quick, replaced = printed["quickened"]
    assert quick == slow and len(quick) == 18 and len(set(quick)) > 12
    assert original == "1 __init__" and replaced == "1 measured"
