"""silu_mul(): the kernel against float64, and when PyTorch's operators run instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops import assert_close
from torch import func

from moe_patch.ops import glu
from moe_patch.ops.glu import silu_mul


@pytest.fixture
def starts(monkeypatch) -> list[str]:
    """Grows by the name of a kernel whenever it starts; there is no smallest size."""
    from moe_patch.kernels import glu as kernels

    names = []

    def recording(name):
        function = getattr(kernels, name)
        return lambda *args: names.append(name) or function(*args)

    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, recording(name))
    monkeypatch.setattr(glu, "SMALLEST", 0)
    return names


def drawn(device, *size, dtype=torch.float32, scale=4.0):
    """A gate and an up, with gradients."""
    return [(scale * torch.randn(size, device=device)).to(dtype).requires_grad_() for _ in range(2)]


def truth(gate, up, d_out):
    """(output, d_gate, d_up) in float64."""
    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    out = F.silu(exact[0]) * exact[1]
    return out, *torch.autograd.grad(out, exact, d_out.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(rows=st.integers(0, 70), eighths=st.integers(1, 40), seed=st.integers(0, 99))
@example(rows=0, eighths=1, seed=0)
@example(rows=256, eighths=1, seed=0)  # a whole program
@settings(max_examples=12)
def test_kernels_are_like_float64(device, dtype, rows, eighths, seed):
    torch.manual_seed(seed)
    gate, up = drawn(device, rows, 8 * eighths, dtype=dtype, scale=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glu, "SMALLEST", 0)
        out = silu_mul(gate, up)
        d_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, (gate, up), d_out)
    assert "SiluMul" in type(out.grad_fn).__name__
    for ours, true in zip((out, *grads), truth(gate, up, d_out), strict=True):
        assert_close(ours, true, dtype)
    with torch.no_grad():
        assert torch.equal(silu_mul(gate, up), out)


def test_large_and_infinite_gates(device, starts):
    """PyTorch's results where the exponential overflows, and NaN stays NaN."""
    at = [-torch.inf, -200.0, -90.0, -87.0, 88.0, 200.0, torch.inf, torch.nan]
    gate = torch.tensor(at, device=device).requires_grad_()
    up = torch.ones(8, device=device).requires_grad_()
    d_gate, d_up = torch.autograd.grad(silu_mul(gate, up).sum(), (gate, up))
    assert starts == ["forward", "backward"]
    ours = silu_mul(gate, up)
    torch.testing.assert_close(ours[1:], F.silu(gate[1:]), equal_nan=True)
    torch.testing.assert_close(d_up[1:], F.silu(gate[1:]), equal_nan=True)
    assert d_gate[1:6].tolist() == pytest.approx([0, 0, 0, 1, 1], abs=1e-30)


def test_gradients_of_one(device, starts):
    gate, up = drawn(device, 3, 16)
    d_out = torch.randn_like(gate)
    _, *true = truth(gate, up, d_out)
    for at, wanted in enumerate((gate, up)):
        arguments = [x if x is wanted else x.detach() for x in (gate, up)]
        (found,) = torch.autograd.grad(silu_mul(*arguments), wanted, d_out)
        assert_close(found, true[at], torch.float32)
    assert starts.count("backward") == 2


def test_a_gradient_that_is_not_contiguous(device, starts):
    gate, up = drawn(device, 4, 8)
    out = silu_mul(gate, up)
    d_out = torch.randn(8, 4, device=device).T
    ours = torch.autograd.grad(out, (gate, up), d_out)
    theirs = torch.autograd.grad(F.silu(gate) * up, (gate, up), d_out)
    assert starts == ["forward", "backward"]
    torch.testing.assert_close(ours, theirs)


def test_keeps_no_more_than_its_inputs(device, starts):
    kept = []
    gate, up = drawn(device, 4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        silu_mul(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]


def test_second_derivatives(device, starts):
    gate, up = drawn(device, 2, 8)

    def second(function):
        (d_gate,) = torch.autograd.grad(function(gate, up).sum(), gate, create_graph=True)
        return torch.autograd.grad((d_gate**2).sum(), (gate, up))

    ours = second(silu_mul)
    assert starts == ["forward"]
    torch.testing.assert_close(ours, second(lambda gate, up: F.silu(gate) * up))


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_transforms_are_pytorch_s(device, starts, transform):
    gate, up = (x.detach() for x in drawn(device, 4, 8))
    if transform == "vmap":
        found, true = func.vmap(silu_mul)(gate, up), F.silu(gate) * up
    elif transform == "jvp":
        found, _ = func.jvp(silu_mul, (gate, up), (up, gate))
        true = F.silu(gate) * up
    else:
        found = func.grad(lambda gate: silu_mul(gate, up).sum())(gate)
        leaf = gate.clone().requires_grad_()
        (true,) = torch.autograd.grad((F.silu(leaf) * up).sum(), leaf)
    assert not starts
    torch.testing.assert_close(found, true)


def test_what_the_kernel_does_not_take(device, starts):
    """Other strides, sizes, dtypes and subclasses: PyTorch's result, by PyTorch."""

    class Sub(torch.Tensor):
        pass

    gate, up = (x.detach() for x in drawn(device, 4, 8))
    for a, b in (
        (gate.T, up.T),
        (gate.T, up.view(8, 4)),
        (gate.view(8, 4), up.T),
        (gate[:, :7].contiguous(), up[:, :7].contiguous()),
        (gate, up[:1]),
        (gate, up.to(torch.bfloat16)),
        (gate.double(), up.double()),
        (gate.as_subclass(Sub), up.as_subclass(Sub)),
    ):
        found = silu_mul(a, b)
        assert torch.equal(found, F.silu(a) * b)
        assert type(found) is type(a)
    assert not starts
    silu_mul(gate, up)
    assert starts == ["forward"]


def test_small_tensors_with_gradients_are_pytorch_s(device, starts, monkeypatch):
    monkeypatch.setattr(glu, "SMALLEST", 33)
    gate, up = drawn(device, 4, 8)
    assert torch.equal(silu_mul(gate, up), F.silu(gate) * up)
    assert not starts
    with torch.no_grad():
        silu_mul(gate, up)
    monkeypatch.setattr(glu, "SMALLEST", 32)
    silu_mul(gate, up)
    assert starts == ["forward", "forward"]


def test_compiled_it_is_pytorch_s(device, starts):
    gate, up = (x.detach() for x in drawn(device, 4, 8))
    compiled = torch.compile(silu_mul, backend="eager", fullgraph=True)
    assert torch.equal(compiled(gate, up), F.silu(gate) * up)
    assert not starts


def test_its_backward_may_be_compiled(device, starts):
    """Compiled autograd traces the backward of a forward that was not compiled."""
    gate, up = drawn(device, 4, 8)
    out = silu_mul(gate, up)
    assert starts == ["forward"]
    compiled = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiled):
        out.sum().backward()
    for ours, true in zip((gate.grad, up.grad), truth(gate, up, torch.ones_like(gate))[1:]):
        assert_close(ours, true, torch.float32)
