"""What patch() and unpatch() leave as it was: parameters, files, copies, hooks, configs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tiny import (
    assert_close,
    both_families,
    layers,
    tiny_block,
    tiny_model,
    tokens,
)
from transformers import AutoModelForCausalLM

import moe_patch
from moe_patch.models import SWAPS
from moe_patch.models.decorated import ExpertsConfig

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@both_families
def test_parameters_state_dict_and_repr_stay(family):
    model = tiny_model(family)
    text = repr(model)
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    state = model.state_dict(keep_vars=True)
    moe_patch.patch(model)
    assert repr(model) == text
    for old, new in ((parameters, model.named_parameters()), (buffers, model.named_buffers())):
        new = list(new)
        assert [name for name, _ in old] == [name for name, _ in new]
        assert all(a is b for (_, a), (_, b) in zip(old, new))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    model.load_state_dict(state)
    # ZeRO-3 and others look modules up by the names of their classes
    for original, fused in SWAPS.items():
        assert fused.__bases__[-1] is original
        assert (fused.__name__, fused.__qualname__) == (original.__name__, original.__qualname__)


@both_families
def test_save_pretrained_writes_the_same_bytes(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "plain")
    moe_patch.patch(model)
    model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "patched").iterdir())
    assert "model.safetensors" in names
    for name in names:
        plain, patched = (tmp_path / folder / name for folder in ("plain", "patched"))
        assert plain.read_bytes() == patched.read_bytes(), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert not any(type(module) in SWAPS.values() for module in again.modules())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@both_families
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_patched_and_independent(family, how, device, fused_calls):
    model = tiny_model(family, device)
    moe_patch.patch(model)
    with torch.no_grad():
        expected = model(tokens(device)).logits
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        fused_calls.clear()
        assert torch.equal(twin(tokens(device)).logits, expected)
        assert len(fused_calls) == 2
        assert len(moe_patch.patch(twin).fused) == 2
        for block in layers(twin):
            config = vars(block.experts).get("config")
            assert config is None or config.original is twin.config
        moe_patch.unpatch(twin)
        fused_calls.clear()
        assert_close(twin(tokens(device)).logits, expected)
        assert not fused_calls
        model(tokens(device))
        assert len(fused_calls) == 2


@both_families
def test_dtype_and_mode_changes(family):
    plain, patched = tiny_model(family), tiny_model(family)
    moe_patch.patch(patched)
    for model in (plain, patched):
        model.train()
        model.requires_grad_(False)
        model.to(torch.bfloat16)
    assert [m.training for m in plain.modules()] == [m.training for m in patched.modules()]
    for (name, a), (other, b) in zip(plain.named_parameters(), patched.named_parameters()):
        assert (name, a.dtype, a.requires_grad) == (other, b.dtype, b.requires_grad)
        assert torch.equal(a, b)
    training = tiny_model(family).train()
    moe_patch.patch(training)
    assert all(module.training for module in training.modules())


def hook_record(model, device, names):
    """What forward and backward hooks on the named modules see, as [(hook, name, tensors)]."""
    seen, handles = [], []
    for name in names:
        module = model.get_submodule(name)

        def forward(module, args, output, name=name):
            outputs = output if isinstance(output, tuple) else (output,)
            seen.append(("forward", name, [x.detach().clone() for x in (*args, *outputs)]))

        def backward(module, grad_in, grad_out, name=name):
            grads = [g.clone() for g in (*grad_in, *grad_out) if g is not None]
            seen.append(("backward", name, grads))

        handles.append(module.register_forward_hook(forward))
        handles.append(module.register_full_backward_hook(backward))
    model(tokens(device), labels=tokens(device)).loss.backward()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    "family, names",
    [
        ("qwen3_moe", ["model.layers.0.mlp", "model.layers.0.mlp.gate"]),
        ("qwen3_moe", ["model.layers.0.mlp.experts"]),
        ("llama4", ["model.layers.0.feed_forward", "model.layers.0.feed_forward.router"]),
    ],
)
def test_hooks_see_the_same(family, names, device):
    changes = {"num_hidden_layers": 1}
    plain, patched = tiny_model(family, device, **changes), tiny_model(family, device, **changes)
    moe_patch.patch(patched)
    expected, actual = hook_record(plain, device, names), hook_record(patched, device, names)
    assert [entry[:2] for entry in actual] == [entry[:2] for entry in expected]
    assert {hook for hook, *_ in actual} == {"forward", "backward"}
    for (hook, name, tensors), (_, _, others) in zip(actual, expected):
        assert len(tensors) == len(others), (hook, name)
        for tensor, other in zip(tensors, others):
            assert tensor.dtype == other.dtype and tensor.shape == other.shape, (hook, name)
            if other.is_floating_point() and other.any():
                assert_close(tensor, other)
            else:
                assert torch.equal(tensor, other)


@both_families
def test_hooks_registered_before_stay(family, device):
    model = tiny_model(family, device, num_hidden_layers=1)
    calls = []
    (block,) = layers(model)
    for module in block.modules():
        module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    with torch.no_grad():
        model(tokens(device))
        plain = calls.copy()
        calls.clear()
        moe_patch.patch(model)
        model(tokens(device))
    # the activation inside the experts is the one module that fused code does not call
    assert [name for name in plain if name != "SiLUActivation"] == [
        name for name in calls if name != "SiLUActivation"
    ]


def test_nothing_is_set_on_llama4_experts():
    """PEFT reads attributes such as is_transposed, and shapes its adapters by them."""
    block = tiny_block("llama4")
    before = {name: set(vars(module)) for name, module in block.named_modules()}
    moe_patch.patch(block)
    assert before == {name: set(vars(module)) for name, module in block.named_modules()}
    assert not hasattr(block.experts, "is_transposed")


def test_only_the_experts_config_is_replaced():
    model = tiny_model("qwen3_moe")
    moe_patch.patch(model)
    proxies = {n for n, m in model.named_modules() if type(vars(m).get("config")) is ExpertsConfig}
    assert proxies == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert model.config._experts_implementation == "grouped_mm"
