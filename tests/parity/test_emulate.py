"""HF's FP8 linear in plain PyTorch, and the parity law of FP8 experts that rests on it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from fp8_models import fp8_model
from hopper import answers
from ops import quantised
from plain import honest
from tiny import assert_close
from transformers.integrations import finegrained_fp8 as hf_fp8
from transformers.integrations.moe import ExpertsInterface

import moe_patch
from moe_patch import reference
from moe_patch.kernels import chips, dgate, grouped_gemm
from moe_patch.parity import emulate, law
from moe_patch.parity.compare import Comparison
from moe_patch.shapes import build

pytestmark = pytest.mark.usefixtures("emulated")
HALF = (torch.bfloat16, torch.float16)


def test_activations_are_rounded_by_groups_of_128():
    x = torch.randn(3, 300) * torch.tensor([[1e-3], [1.0], [1e3]])
    x[1, 128:256] = 0
    found = emulate.rounded(x)
    for row in range(3):
        for first in (0, 128, 256):
            group = x[row, first : first + 128]
            scale = max(float(group.abs().max()) / 448, 1e-12)
            expected = (group / scale).to(torch.float8_e4m3fn).float() * scale
            assert_close(found[row, first : first + 128] + 1, expected + 1)
    error = (found - x).norm(dim=1) / x.norm(dim=1)
    assert (error > 0.01).all() and (error < 0.05).all()


@pytest.mark.parametrize("linear", (emulate.fp8_linear, emulate.dequantised_linear))
def test_gradients_go_through_the_dequantised_weight(linear):
    weight, scale = (each[0] for each in quantised(torch.randn(1, 136, 160)))
    x, d_out = torch.randn(5, 160, requires_grad=True), torch.randn(5, 136)
    whole = reference.dequantize(weight, scale, torch.float32)
    out = linear(x, weight, scale)
    error = (out - x @ whole.T).norm() / out.norm()
    assert 0.01 < error < 0.05 if linear is emulate.fp8_linear else error < 1e-6
    assert_close(torch.autograd.grad(out, x, d_out)[0], d_out @ whole)


def through(quantise):
    """The same with the gradient of the identity."""
    return lambda x: x + (quantise(x) - x).detach()


def w8a8(
    x, gate_up, down, index, weights, *, gate_up_scale_inv, down_scale_inv,
    activation="silu", quantise=emulate.rounded,
):  # fmt: skip
    """An honest kernel: requantises the float32 activation, and rounds once, at the end. Gradients
    know nothing of the second quantisation, those of the routing weights neither."""
    up = reference.dequantize(gate_up, gate_up_scale_inv, torch.float32)
    down = reference.dequantize(down, down_scale_inv, torch.float32)
    out = torch.zeros(x.shape)
    for expert in range(len(up)):
        token, choice = torch.where(index == expert)
        gate, rows = (through(quantise)(x[token]) @ up[expert].T).chunk(2, -1)
        act, weight = F.silu(gate) * rows, weights[token, choice, None].float()
        rows = act @ down[expert].T * weight
        rows = rows + (quantise(act) @ down[expert].T * weight - rows).detach()
        out.index_add_(0, token, rows)
    return out.to(x.dtype)


def both(with_gradients, without):
    """As fused_experts: one function for each path."""
    return lambda *args, **more: (with_gradients if torch.is_grad_enabled() else without)(
        *args, **more
    )


def block(inner=128):
    """Of 128 both passes multiply in FP8; of 96 both widen the weights."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": inner, "num_hidden_layers": 1}
    return fp8_model(**sizes)[0].model.layers[0].mlp


def rows(dtype, seed=0, tokens=64, inner=128):
    compared = Comparison(block(inner), dtype)
    return compared.rows(tokens, backward=True, seed=seed)[0]


@pytest.mark.parametrize(
    "dtype,seed,tokens",
    [
        (torch.bfloat16, 0, 64),
        (torch.float16, 1, 32),
        pytest.param(torch.bfloat16, 2, 9, marks=pytest.mark.gpu),
        pytest.param(torch.float16, 3, 1, marks=pytest.mark.gpu),  # many draws
    ],
)
def test_honest_kernels_pass(use, emulated, dtype, seed, tokens):
    use(honest)
    found = {row.tensor: row for row in rows(dtype, seed, tokens, inner=96)}
    assert all(row.passed for row in found.values()), found
    assert found["output"].ratio < 1
    use(w8a8)
    found = {row.tensor: row for row in rows(dtype, seed, tokens)}
    assert all(row.passed for row in found.values()), found
    for name in ("output", "output_no_grad"):
        assert 0.9 < found[name].ratio <= law.FP8_RMS_FACTOR
    assert "d_gate_up_proj" not in found, "FP8 weights are frozen"


def zeros(run, x, *args, **more):
    return run(x, *args, **more) * 0


def doubled(which):
    def fault(run, *args, **more):
        more[which] = more[which].clone()
        more[which][0, 0, 0] *= 2
        return run(*args, **more)

    fault.__name__ = f"doubled_{which}"
    return fault


def without_a_block_of_k(run, *args, gate_up_scale_inv, **more):
    gate_up_scale_inv = gate_up_scale_inv.clone()
    gate_up_scale_inv[:, :, -1] = 0
    return run(*args, gate_up_scale_inv=gate_up_scale_inv, **more)


def swapped(run, x, gate_up, *args, gate_up_scale_inv, **more):
    gate_up = gate_up.view(torch.uint8).roll(gate_up.shape[1] // 2, 1).view(gate_up.dtype)
    return run(x, gate_up, *args, gate_up_scale_inv=gate_up_scale_inv.roll(1, 1), **more)


def dropped_slot(run, x, gate_up, down, index, weights, **more):
    index = index.clone()
    index[0, 0] = len(gate_up)
    return run(x, gate_up, down, index, weights, **more)


def neighbours_scales(run, *args, down_scale_inv, **more):
    return run(*args, down_scale_inv=down_scale_inv.roll(1, 0), **more)


def shifted_activation_scales(run, *args, **more):
    """Each group by the scale of the one before it."""

    def quantise(x):
        groups = x.float().unflatten(1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        values = (groups / scale).to(torch.float8_e4m3fn).float() * scale.roll(1, 1)
        return values.view(x.shape)

    return w8a8(*args, **more, quantise=quantise)


def wrong_gradient(run, x, *args, gate_up_scale_inv, **more):
    """Of one block's scale, in the backward alone."""
    out = run(x, *args, gate_up_scale_inv=gate_up_scale_inv, **more).detach()
    gate_up_scale_inv = gate_up_scale_inv.clone()
    gate_up_scale_inv[0, 0, 0] *= 2
    other = run(x, *args, gate_up_scale_inv=gate_up_scale_inv, **more)
    return out + (other - other.detach())


FAULTS = (
    zeros,
    doubled("gate_up_scale_inv"),
    doubled("down_scale_inv"),
    without_a_block_of_k,
    swapped,
    dropped_slot,
    neighbours_scales,
)
CASES = [(fault, path) for fault in FAULTS for path in ("W8A16", "W8A8", "W8A8 without gradients")]


@pytest.mark.parametrize(
    "fault,path",
    [*CASES, (shifted_activation_scales, "W8A8"), (wrong_gradient, "W8A8")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_fail(use, emulated, fault, path):
    kernel = honest if path == "W8A16" else w8a8
    faulty = functools.partial(fault, kernel)
    if path.endswith("without gradients"):
        use(both(kernel, faulty))
        suspects = expected = {"output_no_grad"}
    else:
        use(both(faulty, kernel))
        suspects = {"output", "d_hidden_states", "d_top_k_weights", "d_router"}
        expected = {"d_hidden_states" if fault is wrong_gradient else "output"}
    found = rows(torch.bfloat16, inner=96 if path == "W8A16" else 128)
    failed = {row.tensor for row in found if not row.passed}
    assert expected <= failed <= suspects, failed


def test_the_baseline_must_be_sane(use, emulated, monkeypatch):
    use(w8a8)
    monkeypatch.setattr(emulate, "rounded", lambda x: x.float() * 1.2)
    found = {row.tensor: row for row in rows(torch.bfloat16)}
    assert "nothing to judge by" in found["output_no_grad"].note


def test_check_parity_of_a_model(use, emulated):
    model, _ = fp8_model(hidden_size=256, moe_intermediate_size=128)
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    report = moe_patch.check_parity(model, dtype=torch.float16, tokens=64, model_level=True)
    assert report.passed, report
    assert any("model level: it would need" in line for line in report.skipped)
    assert {n: (id(p), p.requires_grad) for n, p in model.named_parameters()} == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("inner", (96, 128))
def test_kernels_obey_the_law(device, emulated, dtype, inner):
    report = moe_patch.check_parity(block(inner).to(device), dtype=dtype, tokens=[2, 64])
    assert report.passed, report


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_weights_that_are_widened_on_their_way_obey_the_law(device, emulated, monkeypatch, dtype):
    """Hopper rounds their values, at 256 rows an expert."""
    through = [answers(monkeypatch, (module,)) for module in (grouped_gemm, dgate)]
    report = moe_patch.check_parity(block(320).to(device), dtype=dtype, tokens=512)
    assert report.passed, report
    assert all(any(each) == chips.chip(device).wgmma for each in through)


def test_rounded_activations_are_no_excuse_where_weights_are_widened(use, emulated):
    """There HF's dequantised weights are the law for training, and its rounded activations only for
    the pass without gradients."""
    use(w8a8)
    failed = {row.tensor for row in rows(torch.bfloat16, inner=96) if not row.passed}
    assert failed == {"output", "d_hidden_states", "d_top_k_weights", "d_router"}


@pytest.mark.parametrize("given", (None, *HALF))
def test_dtype_that_fp8_experts_are_judged_in(use, emulated, given):
    """The dtype that is asked for, else their configuration's, else bfloat16."""
    mlp = block()
    for configured in (torch.float16, torch.bfloat16, None):
        mlp.experts.config.dtype = configured
        assert Comparison(mlp, given).dtype == (given or configured or torch.bfloat16)


@pytest.mark.parametrize("inner,kernel", [(96, honest), (128, w8a8)])
def test_kernels_that_are_not_to_be_had_are_named(use, emulated, monkeypatch, inner, kernel):
    """HF fetches its own from the hub, which fails in many ways; other code's bugs are shown."""

    def offline(*_, **__):
        raise OSError("no such host\nhub.example")

    kernels = hf_fp8.FP8ExpertsInterface._global_mapping
    monkeypatch.setitem(kernels, "grouped_mm", offline)
    use(kernel)
    report = moe_patch.check_parity(block(inner), dtype=torch.float16, tokens=64)
    assert report.passed, report
    assert "HF's grouped_mm: no such host" in report.skipped
    use()
    monkeypatch.setitem(ExpertsInterface._global_mapping, "grouped_mm", offline)
    with pytest.raises(OSError, match="no such host"):
        moe_patch.check_parity(build("tiny_qwen3"), tokens=64)


@pytest.mark.parametrize("worse,passes", [(1.0, True), (1.04, True), (1.07, False)])
def test_how_much_worse_fp8_may_be(worse, passes):
    truth = torch.randn(64, 64, dtype=torch.float64)
    error = 0.04 * torch.randn(64, 64, dtype=torch.float64)
    parts = [law.measure(truth + worse * error, [truth + error.flip(0)], truth)]
    assert law.row("output", parts, torch.float16, fp8=True).passed == passes
    assert not law.row("output", parts, torch.float16).passed, "the law of other experts"
