"""PEFT's adapters on the experts' parameters: as factors, never as W + B A."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from lora import adapters
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from small import block as small_block
from tiny import assert_close, both_families, tiny_model, tokens

import moe_patch
from moe_patch import kernels, notices
from moe_patch.models import llama4
from moe_patch.recognise import lent


@pytest.fixture
def pair(request, device):
    """(a model with adapters as PEFT runs it, the same one patched)."""
    family = request.getfixturevalue("family")
    plain = get_peft_model(tiny_model(family, device), adapters(family))
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    return plain, patched


@pytest.fixture
def formed(monkeypatch):
    """Shapes of the weights that PEFT's parametrizations form."""
    found, original = [], torch.baddbmm

    def counting(weight, *args, **options):
        found.append(tuple(weight.shape))
        return original(weight, *args, **options)

    monkeypatch.setattr(torch, "baddbmm", counting)
    return found


def step(model, device):
    """(logits, {name: gradient of each adapter}); the experts are frozen."""
    model.zero_grad()
    out = model(tokens(device), labels=tokens(device))
    out.loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if not p.requires_grad)
    return out.logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@both_families
def test_the_weights_are_never_formed(family, pair, device, formed):
    expected, expected_grads = step(pair[0], device)
    assert len(formed) >= 4
    formed.clear()
    actual, grads = step(pair[1], device)
    assert not formed
    assert_close(actual, expected)
    assert grads.keys() == expected_grads.keys() and len(grads) == 8
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name])
    assert not lent._lent.here.entries


@both_families
def test_several_adapters_disabled_and_switched(family, device, formed):
    plain = get_peft_model(tiny_model(family, device), adapters(family))
    plain.add_adapter("second", adapters(family, seed=2))
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    base = tiny_model(family, device)(tokens(device)).logits
    for active in (["default"], ["second"], ["default", "second"]):
        for model in (plain, patched):
            model.base_model.set_adapter(active)
        expected = plain(tokens(device)).logits
        formed.clear()
        assert_close(patched(tokens(device)).logits, expected)
        assert not formed and not torch.allclose(expected, base)
    with patched.disable_adapter():
        assert_close(patched(tokens(device)).logits, base)


@both_families
def test_merge_and_unmerge(family, pair, device):
    plain, patched = pair
    expected = plain(tokens(device)).logits
    patched.merge_adapter()
    assert_close(patched(tokens(device)).logits, expected)
    patched.unmerge_adapter()
    assert_close(patched(tokens(device)).logits, expected)
    assert_close(patched.merge_and_unload()(tokens(device)).logits, expected)


@both_families
def test_saved_files_are_peft_s(family, pair, device, tmp_path):
    for model, name in zip(pair, ("plain", "patched")):
        model.save_pretrained(tmp_path / name)
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("plain", "patched"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    again = PeftModel.from_pretrained(tiny_model(family, device), tmp_path / "patched")
    moe_patch.patch(again)
    assert_close(again(tokens(device)).logits, pair[0](tokens(device)).logits)


@both_families
def test_unpatch_leaves_peft_s_own(family, pair, device, formed):
    plain, patched = pair
    moe_patch.unpatch(patched)
    types = [type(module) for module in patched.modules()]
    assert ParamWrapper in types and types == [type(module) for module in plain.modules()]
    assert torch.equal(patched(tokens(device)).logits, plain(tokens(device)).logits) and formed


@both_families
def test_where_kernels_cannot_run_the_adapters_still_count(family, pair, device, monkeypatch):
    plain, patched = pair
    monkeypatch.setattr(kernels, "why_not", lambda _: "no kernels here")
    with pytest.warns(UserWarning, match="no kernels here"):
        notices._warn_uncompiled.cache_clear()
        actual = patched(tokens(device)).logits
    notices._warn_uncompiled.cache_clear()
    assert_close(actual, plain(tokens(device)).logits)


@both_families
def test_gradient_checkpointing(family, pair, device):
    plain, patched = pair
    _, expected = step(plain, device)
    for reentrant in (False, True):
        patched.train()
        patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
        patched.enable_input_require_grads()
        _, grads = step(patched, device)
        for name, grad in grads.items():
            assert_close(grad, expected[name])


def test_llama4_experts_say_that_they_take_factors():
    assert llama4.Llama4TextExperts.takes_low_rank


@both_families
def test_an_adapter_that_does_not_fit_is_left_to_peft(family, pair, device):
    """Which fails, in its own words."""
    errors = []
    notices._warn_uncompiled.cache_clear()
    for model in pair:
        for module in model.modules():
            if isinstance(module, ParamWrapper) and module.parameter_name == "down_proj":
                a = module.lora_A["default"]
                rows, columns = a.weight.shape
                a.weight = torch.nn.Parameter(torch.zeros(2 * rows, columns, device=device))
        with warnings.catch_warnings(record=True) as said, pytest.raises(RuntimeError) as error:
            warnings.simplefilter("always")
            step(model, device)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    said = [str(one.message) for one in said if "moe_patch" in str(one.message)]
    assert len(said) == 1 and "'default' on down_proj" in said[0] and "do not fit" in said[0]


@both_families
def test_peft_s_own_refusals_are_asked(family, pair, device, monkeypatch):
    """Today's are about arguments that go to PEFT anyway."""

    def refuse(*_):
        raise TypeError("not that")

    monkeypatch.setattr(ParamWrapper, "_check_forward_args", refuse)
    for model in pair:
        with pytest.raises(TypeError, match="not that"):
            model(tokens(device))


def test_adapters_on_a_bias_are_left_to_peft(device, ran):
    config = LoraConfig(
        r=2, init_lora_weights=False, target_modules=[],
        target_parameters=["experts.gate_up_proj_bias"],
    )  # fmt: skip
    block = small_block("gpt_oss").to(device)
    hidden = torch.randn(1, 5, 64, device=device)
    alone = block(hidden)[0]
    model = inject_adapter_in_model(config, block)
    expected = model(hidden)[0]
    report = moe_patch.patch(model)
    assert report.fused == [""] and not report.adapters
    assert "gate_up_proj_bias is not a weight of the experts' two" in report.left[0].reason
    assert_close(model(hidden)[0], expected)
    assert ran and not torch.allclose(expected, alone)
