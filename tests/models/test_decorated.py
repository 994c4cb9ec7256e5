"""Experts with Hugging Face's @use_experts_implementation: the switch and the ways back to HF."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from families import CONFIGS, decorated_classes
from tiny import assert_close, says_once, tiny_block, tiny_config, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_patch
from moe_patch import kernels, notices, reference
from moe_patch.models import decorated
from moe_patch.models.decorated import ExpertsConfig, experts_forward
from moe_patch.recognise import eligibility
from moe_patch.recognise.eligibility import is_decorated, why_by_parts, why_not_fused

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


def routed(device, num_tokens=5, experts=8):
    hidden = torch.randn(num_tokens, 64, device=device)
    scores = torch.randn(num_tokens, experts, device=device).softmax(-1)
    weights, index = scores.topk(2)
    return hidden, index, weights


@pytest.fixture
def fused(monkeypatch) -> list:
    calls, original = [], decorated.fused_experts
    monkeypatch.setattr(
        decorated,
        "fused_experts",
        lambda *args, **more: calls.append(args) or original(*args, **more),
    )
    return calls


# The config proxy


def test_config_proxy_differs_in_the_implementation_alone():
    config = tiny_config("qwen3_moe")
    proxy = ExpertsConfig(config)
    assert proxy._experts_implementation == "moe_patch" != config._experts_implementation
    assert ExpertsConfig(config, "eager")._experts_implementation == "eager"
    assert proxy.hidden_size == 64 and proxy.to_dict() == config.to_dict()
    config.hidden_size = 65
    assert proxy.hidden_size == 65
    with pytest.raises(AttributeError):
        _ = proxy.no_such_thing


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_config_proxy_survives_copies(clone):
    twin = clone(ExpertsConfig(tiny_config("qwen3_moe"), "eager"))
    assert type(twin) is ExpertsConfig
    assert (twin._experts_implementation, twin.hidden_size) == ("eager", 64)


def test_config_proxy_runs_any_implementation(device):
    experts = tiny_block("qwen3_moe", device).experts
    original = experts.config
    arguments = routed(device)
    outputs = {}
    with torch.no_grad():
        for name in ("eager", "grouped_mm", "batched_mm", "moe_patch"):
            experts.config = ExpertsConfig(original, name)
            outputs[name] = experts(*arguments)
    for output in outputs.values():
        assert_close(output, outputs["eager"])


# Who is decorated


def make_experts(weights: str = "gate_up_proj", base: type = nn.Module, **flags) -> nn.Module:
    """Experts as a family writes them, decorated with these flags."""

    class Experts(base):
        def __init__(self, config):
            super().__init__()
            self.num_experts, rows = 8, 64 if weights == "gate_up_proj" else 32
            gate_up, down = (8, rows, 64), (8, 64, 32)
            if flags.get("is_transposed"):
                gate_up, down = (8, 64, rows), (8, 32, 64)
            setattr(self, weights, nn.Parameter(torch.randn(gate_up) * 0.1))
            self.down_proj = nn.Parameter(torch.randn(down) * 0.1)
            self.act_fn = ACT2FN["silu"]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the eager forward is not the default")

    return use_experts_implementation(**flags)(Experts)(tiny_config("qwen3_moe"))


def test_is_decorated():
    assert is_decorated(make_experts())

    class Inherits(Qwen3MoeExperts):
        pass

    class Overrides(Qwen3MoeExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states, top_k_index, top_k_weights)

    config = tiny_config("qwen3_moe")
    assert is_decorated(Inherits(config))
    assert not is_decorated(Overrides(config))
    assert not is_decorated(nn.Linear(1, 1))
    assert not is_decorated(tiny_block("llama4").experts)


def test_every_decorated_class_of_this_transformers_is_recognised():
    found = decorated_classes()
    assert len(found) >= 55
    for module, name in found:
        assert eligibility.dispatches(getattr(importlib.import_module(module), name)), name


def test_subclass_that_inherits_forward_is_fused():
    block = tiny_block("qwen3_moe")
    block.experts.__class__ = type("MyExperts", (Qwen3MoeExperts,), {})
    assert moe_patch.patch(block).fused == [""]


# Why not


class OwnGate(nn.Module):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=7)) * up


BY_PARTS = [
    ({}, None),
    ({"has_bias": True}, None),
    ({"is_concatenated": False}, "the activation SiLUActivation"),  # whose gate takes halves
    ({"has_gate": False, "weights": "up_proj"}, None),
    ({"base": OwnGate}, "a gate of its own"),
]


@pytest.mark.parametrize("flags, reason", BY_PARTS)
def test_what_one_kernel_does_not_compute_goes_by_parts(flags, reason):
    experts = make_experts(**flags)
    assert why_not_fused(experts) is None and why_by_parts(experts) == reason


def test_post_expert_norm_is_unfit():
    experts = make_experts()
    experts.has_post_expert_norm = True  # the flag of the decorator since transformers 5.23
    assert "normalises" in why_not_fused(experts)


def test_gate_function_of_the_instance(device):
    experts, arguments = make_experts().to(device), routed(device)
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[1]
    assert why_by_parts(experts) == "a gate of its own"
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *arguments)
    assert_close(experts_forward(experts, *arguments), expected)


@pytest.mark.parametrize("act_fn", [ACT2FN["silu"], nn.SiLU(), F.silu])
def test_every_spelling_of_silu(act_fn):
    experts = make_experts()
    del experts.act_fn
    experts.act_fn = act_fn
    assert why_not_fused(experts) is None


@pytest.mark.parametrize("act_fn", [ACT2FN["tanh"], ACT2FN["laplace"], F.mish])
def test_other_activations(act_fn, device):
    experts, arguments = make_experts().to(device), routed(device)
    del experts.act_fn
    experts.act_fn = act_fn
    assert why_not_fused(experts) is None and "the activation" in why_by_parts(experts)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *arguments)
    assert_close(experts_forward(experts, *arguments), expected)


def test_missing_activation():
    experts = make_experts()
    del experts.act_fn
    assert "no act_fn" in why_not_fused(experts)


# What the registered function does


def test_transposed_weights(device, fused):
    experts = make_experts(is_transposed=True).to(device)
    arguments = routed(device)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *arguments)
    assert_close(experts_forward(experts, *arguments), expected)
    assert fused


@pytest.mark.parametrize("dropped", ["some", "all"])
def test_expert_parallel_sentinels(dropped, device, poison):
    """Slots of other ranks come as index == num_experts with weight 0 (expert parallelism)."""
    experts = tiny_block("qwen3_moe", device).experts
    hidden, index, weights = routed(device)
    gone = torch.zeros_like(index, dtype=torch.bool)
    gone[1:3], gone[0, 1] = True, True
    gone |= dropped == "all"
    index, weights = index.masked_fill(gone, 8), weights.masked_fill(gone, 0.0)
    hidden.requires_grad_()
    weights.requires_grad_()
    out = experts_forward(experts, hidden, index, weights)
    parameters = (experts.gate_up_proj, experts.down_proj)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (hidden, weights, *parameters), grad_out)
    want = reference.fused_experts(hidden, *parameters, index, weights)
    assert torch.equal(out[1:3], torch.zeros_like(out[1:3]))
    assert not grads[0][1:3].any() and not grads[1][gone].any()
    if dropped == "all":
        assert not any(tensor.any() for tensor in (out, *grads))
        return
    wanted = torch.autograd.grad(want, (hidden, weights, *parameters), grad_out)
    assert_close(out, want)
    for grad, other in zip(grads, wanted):
        assert_close(grad, other.masked_fill(gone, 0) if other.shape == gone.shape else other)


def test_unsupported_device_runs_hf_and_says_so_once(monkeypatch, device, fused):
    monkeypatch.setattr(kernels, "why_not", lambda device_type: f"no kernels on {device_type}")
    model = tiny_model("qwen3_moe", device)
    with torch.no_grad():
        expected = model(tokens(device)).logits
        moe_patch.patch(model)
        with says_once(f"no kernels on {device.type}"):
            actual = model(tokens(device)).logits
            model(tokens(device))
    assert torch.equal(actual, expected) and not fused


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_hf_forward_is_the_one_of_the_original_config(monkeypatch, implementation, device):
    experts = tiny_block("qwen3_moe", device).experts
    experts.config._experts_implementation = implementation
    arguments = routed(device)
    expected = experts(*arguments)
    moe_patch.patch(experts)
    monkeypatch.setattr(kernels, "why_not", lambda _: "no kernels")
    with says_once("no kernels"):
        assert torch.equal(experts(*arguments), expected)


def test_model_turned_double_runs_hf(device, fused):
    model = tiny_model("qwen3_moe", device)
    model.set_experts_implementation("eager")  # HF's grouped_mm takes no float64 either
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(tokens(device)).logits
        moe_patch.patch(model)
        model.double()
        notices._warn_uncompiled.cache_clear()
        with pytest.warns(UserWarning, match="moe_patch runs Hugging Face.*torch.float64"):
            actual = model(tokens(device)).logits
    notices._warn_uncompiled.cache_clear()
    assert torch.equal(actual, expected) and not fused


def test_weights_replaced_after_patching_run_hf(device, fused):
    class Packed(torch.Tensor):
        """What a quantiser such as torchao's leaves in place of a parameter."""

    experts = tiny_block("qwen3_moe", device).experts
    moe_patch.patch(experts)
    arguments = routed(device)
    expected = experts(*arguments).detach()
    fused.clear()
    weight = experts.gate_up_proj.detach()
    del experts.gate_up_proj
    experts.gate_up_proj = weight.as_subclass(Packed)
    with says_once("Qwen3MoeExperts is not fused, the weights are Packeds"):
        actual = experts(*arguments)
    assert_close(actual.detach().as_subclass(torch.Tensor), expected)
    assert not fused


@pytest.mark.skipif(
    "has_post_expert_norm" in inspect.signature(use_experts_implementation).parameters,
    reason="the norm is this transformers' own, which calls it",
)
def test_unfit_experts_of_a_switched_config_run_hf(device):
    """experts_implementation="moe_patch" reaches classes that patch() would have refused."""
    experts = make_experts().to(device)
    experts.config._experts_implementation = "moe_patch"
    experts.has_post_expert_norm = True
    arguments = routed(device)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *arguments)
    with says_once("Experts is not fused, each expert normalises its output"):
        assert torch.equal(experts(*arguments), expected)
        experts(*arguments)


SCRIPT = """
import torch
from tiny import tiny_block
import moe_patch
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.recognise import routers

def called(*args, **kwargs):
    raise SystemExit("fused code ran")

for module, name in ((decorated, "fused_experts"), (llama4, "fused_experts"),
                     (llama4, "select_experts"), (qwen3_moe, "select_experts"),
                     (routers, "select_experts")):
    setattr(module, name, called)
for family in {families}:
    block = tiny_block(family, "{device}")
    hidden = torch.randn(1, 3, 64, device="{device}")
    expected = block(hidden)
    print(moe_patch.patch(block))
    actual = block(hidden)
    if isinstance(actual, tuple):
        expected, actual = expected[0], actual[0]
    assert torch.equal(actual, expected)
    print("Hugging Face's forward ran")
"""


@pytest.mark.parametrize("families, value", [(["qwen3_moe", "llama4"], "0"), (["llama4"], None)])
def test_environment_variable(families, value, device):
    environment = {k: v for k, v in os.environ.items() if k != "MOE_PATCH"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    if value is not None:
        environment["MOE_PATCH"] = value
    command = [sys.executable, "-W", "error:moe_patch", "-c"]
    script = SCRIPT.format(families=families, device=device)
    done = subprocess.run([*command, script], capture_output=True, text=True, env=environment)
    if value == "0":
        assert done.returncode == 0, done.stderr
        for text in ("fused 1 of 1", "Hugging Face's forward ran"):
            assert done.stdout.count(text) == len(families)
    else:
        assert done.returncode == 1 and "fused code ran" in done.stderr, done.stderr


# Families that nothing but the decorator describes


@pytest.mark.parametrize("family", CONFIGS)
def test_family_of_the_generic_path(family, device, fused):
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).to(device).eval()
    ids = tokens(device)

    def run():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, expected_grads = run()
    report = moe_patch.patch(model)
    assert len(report.fused) == (1 if family == "deepseek_v3" else 2) and not report.skipped
    logits, grads = run()
    assert len(fused) == len(report.fused)
    assert_close(logits, expected)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        if expected_grads[name].any():
            assert_close(grad, expected_grads[name])
