"""experts.act_fn is fused while it is plain; with hooks, state or another forward it is called."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import assert_close, says_once, tiny_block
from torch import nn
from torch.nn.modules import module as hooks
from transformers.activations import ACT2FN, GELUActivation
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_patch
from moe_patch.recognise.gates import activation_of

pytestmark = [
    pytest.mark.filterwarnings("error:moe_patch runs Hugging Face"),
    pytest.mark.usefixtures("use"),
]
CONFIG = {
    "num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32, "hidden_act": "silu",
    "_experts_implementation": "grouped_mm",
}  # fmt: skip


def make(act="silu", cls=Qwen3MoeExperts):
    torch.manual_seed(0)
    experts = cls(SimpleNamespace(**CONFIG | {"hidden_act": act}))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def run(experts):
    draw = torch.manual_seed(4)
    hidden = torch.randn(6, 64, generator=draw)
    weights, index = torch.rand(6, 8, generator=draw).topk(2)
    with torch.no_grad():
        return experts(hidden, index, weights)


def pair(act="silu", cls=Qwen3MoeExperts):
    """(as Hugging Face runs it, patched)."""
    plain, patched = make(act, cls), make(act, cls)
    assert moe_patch.patch(patched).fused
    run(patched)
    return plain, patched


def double(module, args, output):
    return output * 2


def forward_hook(act):
    return act.register_forward_hook(double)


def forward_pre_hook(act):
    return act.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def own_forward(act):
    theirs = act.forward
    act.forward = lambda x: theirs(x) * 2


HOOKS = [forward_hook, forward_pre_hook, own_forward]


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("change", HOOKS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_and_forwards_of_the_instance(act, change, when, ran):
    plain, patched = pair(act)
    before = run(plain)
    if when == "before":
        moe_patch.unpatch(patched)
    for experts in (plain, patched):
        change(experts.act_fn)
    moe_patch.patch(patched)
    ran.clear()
    expected = run(plain)
    assert not torch.allclose(expected, before, rtol=1e-3, atol=1e-3)
    assert_close(run(patched), expected)
    assert ran == ["by_parts"]


def test_a_hook_that_is_removed_is_forgotten(ran):
    _, patched = pair("gelu")
    handle = patched.act_fn.register_forward_hook(double)
    run(patched)
    handle.remove()
    ran.clear()
    run(patched)
    assert ran == ["fused_experts"]


def test_deepspeed_s_hooks_leave_the_numbers_alone(ran):
    """Not those of others beside them."""
    _, patched = pair("gelu")

    def fetch(module, args):
        """ZeRO-3 brings parameters so."""

    fetch.__module__ = "deepspeed.runtime.zero.parameter_offload"
    patched.act_fn.register_forward_pre_hook(fetch)
    ran.clear()
    run(patched)
    patched.act_fn.register_forward_hook(double)
    run(patched)
    assert ran == ["fused_experts", "by_parts"]


@pytest.mark.parametrize(
    "backward", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_fire(backward, ran):
    _, patched = pair()
    calls = []
    getattr(patched.act_fn, backward)(lambda *_: calls.append(1) and None)
    hidden = torch.randn(6, 64, requires_grad=True)
    weights, index = torch.rand(6, 8).topk(2)
    ran.clear()
    patched(hidden, index, weights).sum().backward()
    assert calls and ran == ["by_parts"]


GLOBAL = [
    hooks.register_module_forward_hook,
    hooks.register_module_forward_pre_hook,
    hooks.register_module_full_backward_hook,
    hooks.register_module_full_backward_pre_hook,
]


@pytest.mark.parametrize("register", GLOBAL)
def test_hooks_on_all_modules_see_it(register, ran):
    _, patched = pair()
    seen = []
    handle = register(lambda module, *_: seen.append(module) and None)
    try:
        hidden = torch.randn(6, 64, requires_grad=True)
        weights, index = torch.rand(6, 8).topk(2)
        ran.clear()
        patched(hidden, index, weights).sum().backward()
    finally:
        handle.remove()
    assert patched.act_fn in seen and ran == ["by_parts"]


def set_gelu_s_function(experts):
    experts.act_fn.act = F.relu


def set_mish(experts):
    experts.act_fn = ACT2FN["mish"]


def set_doubled(experts):
    del experts.act_fn
    experts.act_fn = lambda x: F.gelu(x) * 2


def set_sequential(experts):
    experts.act_fn = nn.Sequential(nn.SiLU(), nn.ReLU())


def set_gate(experts):
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[1]


@pytest.mark.parametrize(
    "change", [set_gelu_s_function, set_mish, set_doubled, set_sequential, set_gate]
)
def test_what_is_set_later_is_computed(change):
    plain, patched = pair("gelu")
    before = run(plain)
    for experts in (plain, patched):
        change(experts)
    expected = run(plain)
    assert not torch.allclose(expected, before, rtol=1e-3, atol=1e-3)
    assert_close(run(patched), expected)


@pytest.mark.parametrize("cls", [GELUActivation, nn.SiLU])
def test_forward_replaced_on_the_activation_s_class(cls, monkeypatch):
    plain, patched = pair()
    for experts in (plain, patched):
        experts.act_fn = cls()
    run(patched)
    monkeypatch.setattr(cls, "forward", lambda self, x: torch.tanh(x))
    assert_close(run(patched), run(plain))


class Child(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "act_fn", [nn.Sequential(nn.SiLU(), nn.Dropout(0.5)), Child(), nn.Identity()], ids=str
)
def test_only_exact_classes_are_plain(act_fn):
    """Silent in eval, where it would be asked, and something else in training."""
    experts = make()
    experts.act_fn = act_fn
    experts.eval()
    assert activation_of(experts) is None
    moe_patch.patch(experts)
    if isinstance(act_fn, nn.Sequential):
        experts.train()
        hidden, weights = torch.randn(6, 64), torch.rand(6, 8).topk(2)
        outs = [experts(hidden, weights.indices, weights.values) for _ in range(2)]
        assert not torch.equal(*outs)
    else:
        plain = make()
        plain.act_fn = act_fn
        assert_close(run(experts), run(plain))


# Gates of classes: what they read of their experts


class Base(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = 8
        self.gate_up_proj = nn.Parameter(torch.empty(8, 64, 64))
        self.down_proj = nn.Parameter(torch.empty(8, 64, 32))
        self.act_fn = ACT2FN["silu"]
        self.cap = 0.5
        self.config = config

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("grouped_mm runs instead")


@use_experts_implementation
class Capped(Base):
    """A number under a name of its own."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.cap)) * up.clamp(min=-self.cap, max=self.cap)


@use_experts_implementation
class ByMode(Base):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * (up * 2 if self.training else up)


@use_experts_implementation
class ByConfig(Base):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up if self.config.num_experts == 8 else gate


@use_experts_implementation
class Remembering(Base):
    def _apply_gate(self, gate_up):
        self.seen = gate_up.shape
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@use_experts_implementation
class Crossed(Base):
    """SiLU's gate unless 0 < gate < up."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up + torch.relu(gate) * torch.relu(up - gate)


def closed(factor):
    @use_experts_implementation
    class Closed(Base):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up * factor[0]

    return Closed


def test_any_number_that_a_gate_reads_is_part_of_the_question(ran):
    plain, patched = pair(cls=Capped)
    for cap in (0.5, 0.1, 0.7):
        for experts in (plain, patched):
            experts.cap = cap
        ran.clear()
        assert_close(run(patched), run(plain))
        assert ran == ["fused_experts"]
    assert activation_of(patched) == "silu 0.7 1.0 0.0 concatenated"
    for experts in (plain, patched):
        experts.act_fn.register_forward_hook(double)
    assert_close(run(patched), run(plain))


@pytest.mark.parametrize("cls", [ByMode, ByConfig, Remembering, Crossed, closed([1])])
def test_gates_that_are_no_fused_activation_are_called(cls, ran):
    plain, patched = pair(cls=cls)
    assert activation_of(patched.eval()) is None
    for training in (False, True):
        plain.train(training)
        patched.train(training)
        ran.clear()
        assert_close(run(patched), run(plain))
        assert ran == ["by_parts"]


# Where by parts is not possible, Hugging Face's own forward runs


@pytest.mark.parametrize("change", [*HOOKS, "relu"])
def test_llama4_asks_at_every_forward(change):
    hidden = torch.randn(1, 5, 64)
    plain, patched = tiny_block("llama4"), tiny_block("llama4")
    moe_patch.patch(patched)
    before = patched(hidden)[0]
    for block in (plain, patched):
        if change == "relu":
            block.experts.act_fn = nn.ReLU()
        else:
            change(block.experts.act_fn)
    expected = plain(hidden)
    assert not torch.allclose(expected[0], before, rtol=1e-3, atol=1e-3)
    with says_once("only SiLU without hooks can be fused"):
        for ours, theirs in zip(patched(hidden), expected):
            assert_close(ours, theirs)
        patched(hidden)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels' plain twins cannot be compiled"
)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_compiled_experts_see_a_hook(act):
    plain, patched = pair(act)
    expected = run(plain)
    torch._dynamo.reset()
    assert_close(run(torch.compile(patched, fullgraph=True, backend="eager")), expected)
    torch._dynamo.reset()
    for experts in (plain, patched):
        experts.act_fn.register_forward_hook(double)
    # grouped_mm's own graph is not Hugging Face's to break: only ours is compiled
    compiled = torch.compile(patched, backend="eager")
    assert_close(run(compiled), run(plain))
    torch._dynamo.reset()
