"""Direct launches answer as Triton's own do, whatever they are given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops import assert_close, gradients, in_double, moe
from triton.runtime.jit import JITFunction

from moe_patch import reference
from moe_patch.kernels import boxes, chips
from moe_patch.kernels import launch as launcher
from moe_patch.kernels.boxes import box
from moe_patch.kernels.launch import cdiv, power_of_two
from moe_patch.ops.experts import fused_experts


@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_cdiv_and_power_of_two(a, b):
    assert (cdiv(a, b) - 1) * b < a <= cdiv(a, b) * b
    assert power_of_two(a) // 2 < a <= power_of_two(a)
    assert power_of_two(a).bit_count() == 1


def test_descriptors_are_kept_and_keep_nothing(monkeypatch):
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, 232_448))
    tensor = torch.zeros(4, 64, dtype=torch.float16)
    one, tma = box(tensor, (2, 32))
    assert tma and one is box(tensor, (2, 32))[0] is not box(tensor, (4, 32))[0]
    assert one.base.data_ptr() == tensor.data_ptr() and one.shape == [4, 64]
    assert not any(isinstance(value, torch.Tensor) for value in vars(one.base).values())
    for other in (tensor.T, tensor[:, 1:], tensor[:0], torch.zeros(4, 12, dtype=torch.float16)):
        assert box(other, (2, 32)) == (other, False)
    boxes._box.cache_clear()  # the CPU has no TMA


@given(st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(0, 1)] * 3), st.booleans())
def test_lines_are_those_of_a_contiguous_tensor(shape, more, turned):
    """Rows and columns as a view of a larger tensor has them, itself or transposed."""
    tensor = torch.zeros([size + add for size, add in zip(shape, more)])
    tensor = tensor[: shape[0], : shape[1], : shape[2]]
    tensor = tensor.mT if turned else tensor
    lies = tensor if tensor.stride(2) == 1 else tensor.mT
    lines = (lies.shape[0] * lies.shape[1], lies.shape[2]) if lies.is_contiguous() else None
    if lines is None or lies.stride()[1:] == (lines[1], 1):  # not one row or column, strided
        assert boxes.Lying.of(tensor).lines() == lines


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_without_a_driver():
    """Kernels start as Triton starts them, and those of a call are compiled together."""
    script = Path(__file__).resolve().parents[1] / "tools" / "direct.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert told.count("told to the driver as by Triton") >= 28  # kernels, with each count
    for name in ("gate_up", "gemm", "dgate", "dw", "fp8"):
        assert f"{name}_hopper_kernel" in told
    for name in ("gate_up", "gemm"):
        assert f"{name}_packed_roles_kernel" in told
    if (os.cpu_count() or 1) > 1:
        late = {line.split()[0] for line in told.splitlines() if " in its turn: " in line}
        assert late == {"topk_kernel", "topk_backward_kernel"}  # alone in their calls
        assert told.count(" ahead: ") >= 22


@pytest.fixture
def by_triton(monkeypatch):
    """Names of the kernels that Triton's own launcher started."""
    names, original = [], JITFunction.run

    def run(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        return original(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    assert launcher.DIRECT
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 128, 64, 8, 2), (50, 128, 64, 8, 2), (1100, 256, 384, 2, 1)])
def test_the_same_bits_as_by_triton(device, by_triton, monkeypatch, size):
    """Two dtypes in turns: a binary is one's alone, even if all its operands are descriptors."""
    grad = size[0] > 1

    def answers():
        out = fused_experts(**arguments)
        return (out.detach(), *(gradients(out, out.detach(), *arguments.values()) if grad else ()))

    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        arguments = moe(device, dtype, *size, grad=grad)
        ours = [answers() for _ in range(2)]
        by_triton.clear()
        ours.append(answers())
        assert not by_triton  # known by now
        monkeypatch.setattr(launcher, "DIRECT", False)
        expected = answers()
        monkeypatch.setattr(launcher, "DIRECT", True)
        assert by_triton
        for each in ours:
            assert all(torch.equal(one, other) for one, other in zip(each, expected, strict=True))


@pytest.mark.gpu
def test_unaligned_tensors_go_through_triton(device, by_triton):
    """A binary that loads 16 bytes at once must not meet a pointer between them."""
    arguments = moe(device, torch.bfloat16, 50, 128, 64, 8, 2, grad=False)
    fused_experts(**arguments)
    memory = torch.randn(50 * 128 + 1, device=device, dtype=torch.bfloat16)
    arguments["hidden_states"] = memory[1:].view(50, 128)
    assert arguments["hidden_states"].data_ptr() % 16
    for _ in range(2):
        by_triton.clear()
        ours = fused_experts(**arguments)
        assert by_triton == ["gate_up_kernel"]
    truth = reference.fused_experts(**in_double(arguments))
    assert_close(ours, truth, torch.bfloat16)


@pytest.mark.gpu
def test_the_current_stream_is_used(device):
    """On a side stream, behind a long wait: a launch on another stream would read zeros."""
    arguments = moe(device, torch.bfloat16, 50, 128, 64, 8, 2, grad=False)
    expected = fused_experts(**arguments)
    late = torch.zeros_like(arguments["hidden_states"])
    given = arguments | {"hidden_states": late}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(arguments["hidden_states"])
        ours = fused_experts(**given)
    side.synchronize()
    assert torch.equal(ours, expected)


@pytest.mark.gpu
def test_profilers_see_every_launch(device):
    import triton

    arguments = moe(device, torch.bfloat16, 50, 128, 64, 8, 2, grad=False)
    fused_experts(**arguments)
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        fused_experts(**arguments)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert "gate_up_kernel" in names and "combine_kernel" in names
