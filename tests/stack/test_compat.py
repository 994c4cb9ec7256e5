"""With the rest of the ecosystem: accelerate's offloading, FSDP, PEFT's adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from peft import LoraConfig, get_peft_model
from tiny import (
    assert_close,
    both_families,
    layers,
    tiny_model,
    tokens,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moe_patch
from moe_patch.models import SWAPS

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


# accelerate: weights are on the meta device until the module that owns them is called


def logits(model, device):
    with torch.no_grad():
        return model(tokens(device)).logits


def offload(model, device):
    """The layers only: Llama4 reads the device of its embedding, which would be meta."""
    cpu_offload(model.model.layers, execution_device=device)


def swapped(model):
    return [module for module in model.modules() if type(module) in SWAPS.values()]


@both_families
@pytest.mark.parametrize("order", ["patch, offload", "offload, patch"])
def test_cpu_offload(family, order, device, fused_calls):
    model = tiny_model(family, device)
    expected = logits(model, device)
    steps = {
        "patch": lambda: moe_patch.patch(model),
        "offload": lambda: offload(model, device),
    }
    for step in order.split(", "):
        steps[step]()
    assert next(layers(model)[0].experts.parameters()).is_meta
    assert_close(logits(model, device), expected)
    assert len(fused_calls) == 2
    for module in swapped(model):
        if hasattr(module, "_old_forward"):
            assert module._old_forward.__func__ is type(module).forward
    assert len(moe_patch.patch(model).fused) == 2


@both_families
@pytest.mark.parametrize("order", ["patch, offload", "offload, patch"])
def test_unpatch_under_offload(family, order, device, fused_calls):
    model, plain = tiny_model(family, device), tiny_model(family, device)
    expected = logits(plain, device)
    offload(plain, device)
    if order == "patch, offload":
        moe_patch.patch(model)
    offload(model, device)
    if order == "offload, patch":
        moe_patch.patch(model)
    moe_patch.unpatch(model)
    for module, other in zip(model.modules(), plain.modules()):
        assert type(module) is type(other) and hasattr(module, "_hf_hook") is hasattr(
            other, "_hf_hook"
        )
        if hasattr(other, "_old_forward"):
            assert module._old_forward.__func__ is other._old_forward.__func__
    assert torch.equal(logits(model, device), expected)
    assert not fused_calls


@both_families
def test_patch_after_hooks_were_removed(family, device, fused_calls):
    """accelerate leaves the class's bound forward on the instance, which would hide the swap."""
    model = tiny_model(family, device)
    expected = logits(model, device)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload(model, device)
    remove_hook_from_submodules(model)
    model.load_state_dict(weights, assign=True)
    model.to(device)
    assert any("forward" in vars(module) for module in layers(model)[0].modules())
    assert len(moe_patch.patch(model).fused) == 2
    for module in swapped(model):
        assert module.forward.__func__ is type(module).forward
    assert_close(logits(model, device), expected)
    assert len(fused_calls) == 2
    moe_patch.unpatch(model)
    assert torch.equal(logits(model, device), expected)
    assert len(fused_calls) == 2


# FSDP2: parameters are sharded DTensors, and plain tensors while their layer runs


@both_families
@pytest.mark.parametrize("order", ["patch, shard", "shard, patch"])
def test_fully_sharded_layers(family, order, device, process_group, fused_calls):
    model = tiny_model(family, device)
    expected, expected_grads = trained(copy.deepcopy(model), device)
    steps = {
        "patch": lambda: moe_patch.patch(model),
        "shard": lambda: [fully_shard(layer) for layer in (*model.model.layers, model)],
    }
    for step in order.split(", "):
        steps[step]()
    assert isinstance(layers(model)[0].experts.gate_up_proj, DTensor)
    actual, grads = trained(model, device)
    assert len(fused_calls) == 2
    assert_close(actual, expected)
    for name, grad in grads.items():
        assert_close(grad.full_tensor(), expected_grads[name])


# PEFT: adapters on the experts' own parameters


def adapters(family: str) -> LoraConfig:
    block = "mlp" if family == "qwen3_moe" else "feed_forward"
    return LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        init_lora_weights=False,
        target_modules=["q_proj"],
        target_parameters=[f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"],
    )


def trained(model, device):
    """Gradients of every adapter after one step, and the logits."""
    out = model(tokens(device), labels=tokens(device))
    out.loss.backward()
    return out.logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@both_families
@pytest.mark.parametrize("order", ["patch first", "adapters first"])
def test_adapters_on_experts_train_the_same(family, order, device, fused_calls):
    plain, patched = tiny_model(family, device), tiny_model(family, device)
    if order == "patch first":
        moe_patch.patch(patched)
    torch.manual_seed(1)
    plain = get_peft_model(plain, adapters(family))
    torch.manual_seed(1)
    patched = get_peft_model(patched, adapters(family))
    if order == "adapters first":
        report = moe_patch.patch(patched)
        assert len(report.fused) == 2 and not report.skipped
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in patched.named_parameters()}
    expected, expected_grads = trained(plain, device)
    actual, grads = trained(patched, device)
    assert len(fused_calls) == 2
    assert_close(actual, expected)
    assert grads.keys() == expected_grads.keys()
    assert sum("experts" in name for name in grads) == 8
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name])
    moe_patch.unpatch(patched)
    fused_calls.clear()
    assert torch.equal(trained(patched, device)[0], expected) and not fused_calls


def test_merged_adapters_give_the_same_model(device, fused_calls):
    model = get_peft_model(tiny_model("qwen3_moe", device), adapters("qwen3_moe"))
    moe_patch.patch(model)
    expected = logits(model, device)
    merged = copy.deepcopy(model).merge_and_unload()
    fused_calls.clear()
    assert_close(logits(merged, device), expected)
    assert len(fused_calls) == 2
