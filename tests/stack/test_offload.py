"""Where accelerate puts weights: device maps, CPU, disk, several GPUs in one process."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from lora import adapters
from peft import get_peft_model
from tiny import (
    assert_close,
    both_families,
    layers,
    tiny_block,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import AutoModelForCausalLM

import moe_patch
from moe_patch import notices

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


def logits(model, device):
    with torch.no_grad():
        return model(tokens(device)).logits


def experts_of(model):
    return [block.experts for block in layers(model)]


@pytest.fixture
def saved(request, tmp_path, device):
    """(a folder with a model of the family, its logits as Hugging Face has them)."""
    model = tiny_model(request.getfixturevalue("family"))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", logits(model.to(device), device)


def placed(model, device, elsewhere="disk") -> dict[str, str | int]:
    """A device map: all where the kernels run, but the second layer."""
    names = [name for name, child in model.named_children() if child is not model.model]
    names += [f"model.{name}" for name, child in model.model.named_children() if name != "layers"]
    names += [f"model.layers.{i}" for i in range(len(model.model.layers))]
    return dict.fromkeys(names, home(device)) | {"model.layers.1": elsewhere}


def home(device) -> str | int:
    """As accelerate wants it: a torch.device("cpu") is not its "cpu"."""
    return 0 if device.type == "cuda" else "cpu"


@both_families
@pytest.mark.parametrize("elsewhere", ["disk", pytest.param("cpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["the hook", "patch"])
def test_layer_elsewhere(family, elsewhere, how, saved, tmp_path, device, fused_calls):
    """Its weights are on the meta device until accelerate's hook on each module brings them."""
    folder, expected = saved
    device_map = placed(tiny_model(family), device, elsewhere)
    options = {"device_map": device_map, "offload_folder": tmp_path / "weights"}
    if how == "patch":
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert len(moe_patch.patch(model).fused) == 2
    else:
        with moe_patch.enabled():
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert experts_of(model)[1].gate_up_proj.is_meta
    for _ in range(2):
        assert_close(logits(model, device), expected)
    assert len(fused_calls) == 4
    assert experts_of(model)[1].gate_up_proj.is_meta
    moe_patch.unpatch(model)
    assert torch.equal(logits(model, device), expected) and len(fused_calls) == 4


@both_families
@pytest.mark.parametrize("order", ["patch, offload", "offload, patch"])
def test_dispatched_by_hand(family, order, tmp_path, device, fused_calls):
    model = tiny_model(family)
    expected = logits(copy.deepcopy(model).to(device), device)
    options = {"main_device": home(device), "offload_dir": tmp_path / "weights"}
    options["force_hooks"] = True  # one device is no reason for any
    steps = {
        "patch": lambda: moe_patch.patch(model),
        "offload": lambda: dispatch_model(model, placed(model, device), **options),
    }
    for step in order.split(", "):
        steps[step]()
    assert_close(logits(model, device), expected)
    assert len(fused_calls) == 2


def test_whole_model_on_disk(tmp_path, device, fused_calls):
    """Not Llama4: it reads its embedding's device, which is meta, in transformers' own forward."""
    model = tiny_model("qwen3_moe")
    expected = logits(copy.deepcopy(model).to(device), device)
    disk_offload(model, tmp_path, execution_device=device)
    moe_patch.patch(model)
    assert_close(logits(model, device), expected)
    assert len(fused_calls) == 2


@both_families
def test_offloaded_adapters_on_experts_are_left_to_peft(family, device):
    """It reads the factors where they are, on the meta device, and fails; so it stays."""
    errors = []
    for patched in (False, True):
        model = get_peft_model(tiny_model(family, device), adapters(family))
        cpu_offload(model.base_model.model.model.layers, execution_device=device)
        if patched:
            moe_patch.patch(model)
            notices._warn_uncompiled.cache_clear()
        with pytest.raises(RuntimeError) as error, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logits(model, device)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert any("on down_proj are on meta" in str(one.message) for one in said)


@both_families
def test_device_map_auto(family, saved, fused_calls):
    folder, expected = saved
    with moe_patch.enabled():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert_close(logits(model, expected.device), expected)
    assert len(fused_calls) == 2


@pytest.mark.multigpu
@both_families
@pytest.mark.parametrize("order", ["patch, dispatch", "dispatch, patch"])
def test_layers_on_two_gpus(family, order, device, fused_calls):
    """The kernels start on the GPU of their tensors, which is not the current one."""
    model = tiny_model(family)
    steps = {
        "patch": lambda: moe_patch.patch(model),
        "dispatch": lambda: dispatch_model(model, placed(model, device, 1)),
    }
    for step in order.split(", "):
        steps[step]()
    actual = logits(model, device)
    model(tokens(device), labels=tokens(device)).loss.backward()
    assert len(fused_calls) == 4
    assert experts_of(model)[1].down_proj.grad.device == torch.device("cuda", 1)
    moe_patch.unpatch(model)
    assert_close(actual, logits(model, device))


@pytest.mark.multigpu
@both_families
def test_data_parallel_threads(family, device, fused_calls):
    model = tiny_model(family, device)
    ids = tokens(device, 4, 7)
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
        moe_patch.patch(model)
        actual = nn.DataParallel(model, [0, 1])(ids, use_cache=False)[0]
    assert_close(actual, expected)
    assert len(fused_calls) == 4


@both_families
def test_replicas(family, device, fused_calls):
    """What DataParallel makes of a block for each GPU: no parameters, and a class of its own."""
    block = tiny_block(family, device)
    moe_patch.patch(block)
    hidden = torch.randn(1, 3, 64, device=device)
    with torch.no_grad():
        expected = block(hidden)
        replica = copy_as_replica(block)
        assert not list(replica.parameters())
        actual = replica(hidden)
    for one, two in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected))):
        assert torch.equal(one, two)
    assert len(fused_calls) == 2


def copy_as_replica(module):
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = copy_as_replica(child)
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach().clone())
    return replica
