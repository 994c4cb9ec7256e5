"""Every fused activation against its float64 twin and torch's own derivative."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from ops import BOUND, DTYPES, assert_close, gradients, in_double, moe, sample

from moe_patch import reference
from moe_patch.activation import ACTS, Act, Activation, parse
from moe_patch.kernels import activate
from moe_patch.kernels.activate import gate_of, glu
from moe_patch.ops.experts import fused_experts

OAI = Activation("silu", limit=0.7, alpha=1.702, offset=1.0)
KINDS = {act: Activation(act) for act in ACTS} | {
    "clamped": Activation("silu", limit=0.4),
    "oai": OAI,
    "clamped gelu": Activation("gelu_tanh", limit=0.5, offset=0.5),
    "interleaved": Activation(form="interleaved"),
    "gpt_oss": replace(OAI, form="interleaved"),
    "ungated": Activation("gelu", form="ungated"),
    "nemotron_h": Activation("relu2", form="ungated"),
}
EXACT = ("silu", "gelu", "gelu_tanh", "relu", "interleaved", "ungated")
"""Within BOUND in every dtype; for the others see `farthest`."""
YES = (False, True)
CASES = list(itertools.product(KINDS, DTYPES, (1, 40), ("output", "input"), YES, YES))


@pytest.mark.parametrize(
    "kind, dtype, tokens, weight_on, transposed, biased",
    sample(CASES, 40),
)
def test_output_and_every_gradient(device, kind, dtype, tokens, weight_on, transposed, biased):
    arguments = moe(
        device, dtype, tokens, 64, 48, 4, 2,
        transposed=transposed, routing="sentinel", act=KINDS[kind],
        biased=biased and weight_on == "output",
    )  # fmt: skip
    exact = in_double(arguments)
    options = {"weight_on": weight_on, "activation": KINDS[kind]}
    out = fused_experts(**arguments, **options)
    truth = reference.fused_experts(**exact, **options)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    ours = (out, *gradients(out, d_out, *arguments.values()))
    true = (truth, *gradients(truth, d_out.double(), *exact.values()))
    with torch.no_grad():
        inference = fused_experts(**arguments, **options)
    for mine, other in zip((inference, *ours), (truth, *true), strict=True):
        if kind in EXACT:
            assert_close(mine, other, dtype)
        else:
            assert (mine.double() - other).norm() <= farthest(kind, dtype) * other.norm()
    if kind != "nemotron_h":
        assert_close(inference, truth, dtype)


def farthest(kind, dtype):
    """The error in norm of a square, which doubles it, or where a clamp's edge may fall elsewhere.

    There a gradient is there or is zero: one such value in one token is 4 % in float16.
    """
    if dtype == torch.float32:
        return 1e-5
    return (2 if KINDS[kind].limit is None else 120) * BOUND[dtype]


@triton.jit
def glu_kernel(gate, up, value, by_gate, by_up, GATE: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    out, d_gate, d_up = glu(tl.load(gate + n), tl.load(up + n), GATE)
    tl.store(value + n, out)
    tl.store(by_gate + n, d_gate)
    tl.store(by_up + n, d_up)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("options", ({}, {"limit": 1.5, "offset": 0.5}), ids=("plain", "clamped"))
def test_every_act_and_its_slope_agree_with_its_twin(device, act, options):
    """In one tile, without a product before it; alpha too where the act has one."""
    activation = Activation(act, alpha=1.702 if ACTS[act].has_alpha else 1.0, **options)
    gate, up = torch.linspace(-9, 9, 256, device=device), torch.linspace(5, -5, 256, device=device)
    ours = [torch.full_like(gate, torch.nan) for _ in range(3)]
    glu_kernel[(1,)](gate, up, *ours, GATE=gate_of(str(activation)), N=256)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    truth = reference.glu(torch.cat(exact), activation)
    true = (truth, *torch.autograd.grad(truth.sum(), exact))
    for mine, other in zip(ours, true):
        torch.testing.assert_close(mine, other.float(), rtol=2e-5, atol=2e-6)


def _cube(gate, ALPHA, SIGMOID):
    return gate * gate * gate, 3.0 * gate * gate


def test_one_entry_is_a_new_activation(device, monkeypatch):
    """In the kernels, forward and backward, and in the reference; refused again without it."""
    monkeypatch.setitem(ACTS, "cube", Act(_cube, lambda gate, alpha: gate**3))
    for tokens in (1, 40):  # decoded, sorted
        arguments = moe(device, torch.float32, tokens, 64, 48, 4, 2)
        exact = in_double(arguments)
        out = fused_experts(**arguments, activation="cube")
        truth = reference.fused_experts(**exact, activation="cube")
        d_out = torch.ones_like(out)
        assert_close(out, truth, torch.float32)
        ours = gradients(out, d_out, *arguments.values())
        for mine, other in zip(ours, gradients(truth, d_out.double(), *exact.values())):
            assert (mine.double() - other).norm() <= 1e-5 * other.norm()
        with torch.no_grad():
            assert_close(fused_experts(**arguments, activation="cube"), truth, torch.float32)
    monkeypatch.undo()
    parse.cache_clear()
    with pytest.raises(ValueError, match="act is 'cube'"):
        fused_experts(**arguments, activation="cube")


def test_a_changed_formula_is_another_constant(monkeypatch):
    """Triton files compiled kernels by the text of their constants."""
    before, in_ptx = gate_of("relu"), gate_of("relu", ptx=True)
    assert repr(before) == repr(gate_of("relu None 1.0 0.0 concatenated"))
    monkeypatch.setattr(activate, "_SIGMOID", tl.constexpr("another"))
    gate_of.cache_clear()
    other_ptx = gate_of("relu", ptx=True)
    assert gate_of("relu").source == before.source
    monkeypatch.setattr(activate, "_sigmoid", triton.jit(_cube))
    gate_of.cache_clear()
    other_sigmoid = gate_of("relu")
    monkeypatch.setitem(ACTS, "relu", Act(_cube, ACTS["relu"].twin))
    gate_of.cache_clear()
    gates = before, in_ptx, other_ptx, other_sigmoid, gate_of("relu")
    assert len({each.source for each in gates}) == len(gates)
    assert all(each.source in repr(each) for each in gates)
    monkeypatch.undo()
    gate_of.cache_clear()


def test_the_name_alone_is_the_activation(device):
    arguments = moe(device, torch.float32, 5, 32, 16, 4, 2, grad=False)
    for act in ACTS:
        expected = fused_experts(**arguments, activation=Activation(act))
        assert torch.equal(fused_experts(**arguments, activation=act), expected)
    assert not torch.equal(fused_experts(**arguments), expected)


def test_what_stands_in_an_operator_comes_back():
    for one in (*KINDS.values(), Activation("silu", 7.0, 1.702, 1.0)):
        assert parse(str(one)) == one


def test_nan_and_inf_pass_a_clamp_as_torch_s_do(device):
    arguments = moe(device, torch.float32, 6, 32, 16, 4, 2, grad=False)
    arguments["hidden_states"][1, 0] = torch.nan
    arguments["hidden_states"][2] = 3e38
    ours = fused_experts(**arguments, activation=OAI)
    twin = reference.fused_experts(**arguments, activation=OAI)
    assert torch.equal(ours.isnan(), twin.isnan()) and ours[1].isnan().all()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Activation("swish"), "use one of 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'"),
        (lambda: Activation(form="split"), "use one of 'concatenated', 'interleaved', 'ungated'"),
        (lambda: Activation(limit=1.0, form="ungated"), "takes no limit"),
        (lambda: Activation("relu", alpha=2.0), "takes none"),
        (lambda: Activation(limit=0.0), "must be above 0"),
        (lambda: Activation(limit=-1.0), "must be above 0"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_an_unknown_name_is_refused(device):
    with pytest.raises(ValueError, match="act is 'tanh'"):
        fused_experts(**moe(device, torch.float32, 2, 16, 16, 2, 1), activation="tanh")


def test_compiles(device):
    arguments = moe(device, torch.float32, 6, 32, 16, 4, 2)

    def call(x):
        return fused_experts(**arguments | {"hidden_states": x}, activation=OAI)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(arguments["hidden_states"]), call(arguments["hidden_states"]))
