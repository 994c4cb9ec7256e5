"""model.patch(), enable() / disable() / enabled(), experts_implementation="moe_patch"."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from tiny import (
    assert_close,
    both_families,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import moe_patch
from moe_patch import pretrained
from moe_patch.models import SWAPS
from moe_patch.models.decorated import ExpertsConfig

pytestmark = pytest.mark.filterwarnings("error:moe_patch")

LOADERS = ("from_pretrained", "_from_config")


def is_patched(model: nn.Module) -> bool:
    found = {
        isinstance(vars(module.experts).get("config"), ExpertsConfig)
        or type(module) in SWAPS.values()
        for module in model.modules()
        if hasattr(module, "experts")
    }
    (patched,) = found  # all blocks or none
    return patched


@pytest.fixture(autouse=True)
def hook_is_off():
    before = [vars(PreTrainedModel)[name] for name in LOADERS]
    yield
    moe_patch.disable()
    assert [vars(PreTrainedModel)[name] for name in LOADERS] == before
    assert not pretrained._loading.get()


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    return tmp_path


# model.patch()


@both_families
def test_methods_on_every_model(family):
    model = tiny_model(family)
    report = model.patch()
    assert len(report.fused) == 2 and is_patched(model)
    assert model.patch(strict=True) == report
    model.unpatch()
    assert not is_patched(model)


class WithSubmodule(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.patch = nn.Linear(2, 3)


def test_method_gives_way_to_a_submodule_of_that_name():
    model = WithSubmodule(PreTrainedConfig())
    assert isinstance(model.patch, nn.Linear)
    assert PreTrainedModel.patch is moe_patch.patch


def test_foreign_attribute_is_left_alone(monkeypatch):
    def foreign(self):
        return "foreign"

    monkeypatch.setattr(PreTrainedModel, "patch", foreign)
    with pytest.warns(UserWarning, match=r"has an attribute 'patch'.*moe_patch.patch\(model\)"):
        pretrained.register()
    assert tiny_model("qwen3_moe").patch() == "foreign"
    assert PreTrainedModel.unpatch is moe_patch.unpatch


def test_registering_twice_is_harmless():
    pretrained.register()
    assert len(tiny_model("qwen3_moe").patch().fused) == 2


# The hook


@both_families
def test_loading_with_the_hook(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    loaders = {
        "from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(tmp_path),
        "from_config": lambda: AutoModelForCausalLM.from_config(tiny_config(family)),
        "base": lambda: AutoModel.from_pretrained(tmp_path),
    }
    for name, load in loaders.items():
        assert not is_patched(load()), name
        moe_patch.enable()
        assert is_patched(load()), name
        moe_patch.disable()
        assert not is_patched(load()), name


def test_loaded_with_the_hook_computes_the_same(folder, device, fused_calls):
    plain = AutoModelForCausalLM.from_pretrained(folder).to(device)
    with moe_patch.enabled():
        model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    with torch.no_grad():
        assert_close(model(tokens(device)).logits, plain(tokens(device)).logits)
    assert len(fused_calls) == 2


def test_class_and_loading_info(folder):
    with moe_patch.enabled():
        model, info = Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert is_patched(model) and not info["missing_keys"]


def test_disable_restores_exactly():
    before = [vars(PreTrainedModel)[name] for name in LOADERS]
    moe_patch.enable()
    assert all(vars(PreTrainedModel)[n] is not b for n, b in zip(LOADERS, before))
    moe_patch.disable()
    assert all(vars(PreTrainedModel)[n] is b for n, b in zip(LOADERS, before))
    moe_patch.disable()
    assert all(vars(PreTrainedModel)[n] is b for n, b in zip(LOADERS, before))


def test_enabling_twice_is_one_hook_and_says_so(folder):
    before = [vars(PreTrainedModel)[name] for name in LOADERS]
    moe_patch.enable()
    hooks = [vars(PreTrainedModel)[name] for name in LOADERS]
    with pytest.warns(UserWarning, match="moe_patch is enabled already, nothing changed"):
        moe_patch.enable()
    assert [vars(PreTrainedModel)[name] for name in LOADERS] == hooks
    moe_patch.disable()
    assert all(vars(PreTrainedModel)[n] is b for n, b in zip(LOADERS, before))


def test_context_inside_an_enabled_program_leaves_the_hook_on(folder):
    moe_patch.enable()
    with moe_patch.enabled():
        pass
    assert is_patched(AutoModelForCausalLM.from_pretrained(folder))


def test_exceptions_inside(folder, tmp_path):
    with contextlib.suppress(RuntimeError), moe_patch.enabled():
        raise RuntimeError
    assert not is_patched(AutoModelForCausalLM.from_pretrained(folder))
    with moe_patch.enabled():
        with pytest.raises(OSError):
            AutoModelForCausalLM.from_pretrained(tmp_path / "nothing")
        assert is_patched(AutoModelForCausalLM.from_pretrained(folder))


class Composite(PreTrainedModel):
    """A model that builds another through an Auto class, as vision-language models do."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.text = AutoModel.from_config(tiny_config("qwen3_moe"))
        self.patched_inside = is_patched(self.text)


def test_nested_auto_classes_are_patched_once_by_the_outer(monkeypatch):
    calls = []
    monkeypatch.setattr(
        pretrained, "patch", lambda model, strict: calls.append(model) or moe_patch.patch(model)
    )
    with moe_patch.enabled():
        model = Composite._from_config(PreTrainedConfig())
    assert calls == [model] and not model.patched_inside and is_patched(model)


def test_hook_under_a_foreign_wrapper_goes_inert(monkeypatch, folder):
    """Somebody wraps from_pretrained after enable(): theirs stays, ours stops patching."""
    original = vars(PreTrainedModel)["from_pretrained"]
    moe_patch.enable()
    ours = vars(PreTrainedModel)["from_pretrained"]
    foreign = classmethod(lambda cls, *args, **kwargs: ours.__func__(cls, *args, **kwargs))
    PreTrainedModel.from_pretrained = foreign
    moe_patch.disable()
    try:
        assert vars(PreTrainedModel)["from_pretrained"] is foreign
        assert not is_patched(AutoModelForCausalLM.from_pretrained(folder))
    finally:
        PreTrainedModel.from_pretrained = original


def test_hook_lists_what_it_could_not_fuse(monkeypatch):
    monkeypatch.setattr("moe_patch.patcher.why_not_fused", lambda experts: "for a reason")
    with moe_patch.enabled(), pytest.warns(UserWarning, match="fused 0 of 2.*\n.*for a reason"):
        AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))


def test_hook_is_quiet_about_models_without_experts():
    with warnings.catch_warnings(), moe_patch.enabled():
        warnings.simplefilter("error")
        model = AutoModel.from_config(tiny_config("qwen3_moe", mlp_only_layers=[0, 1]))
    assert not any(type(module) in SWAPS.values() for module in model.modules())


# experts_implementation="moe_patch"


def load(how: str, folder, **kwargs) -> nn.Module:
    if how == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    return AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), **kwargs)


@pytest.mark.parametrize("how", ["from_pretrained", "from_config"])
def test_experts_implementation(how, folder, device, fused_calls):
    model = load(how, folder, experts_implementation="moe_patch").to(device)
    assert model.config._experts_implementation == "moe_patch"
    with torch.no_grad():
        actual = model(tokens(device)).logits
        assert len(fused_calls) == 2
        model.set_experts_implementation("eager")
        expected = model(tokens(device)).logits
    assert len(fused_calls) == 2
    assert_close(actual, expected)


@pytest.mark.parametrize("patch_too", [True, False])
def test_unpatch_returns_hf_s_default(folder, device, patch_too, fused_calls):
    default = load("from_pretrained", folder).config._experts_implementation
    assert default != "moe_patch"
    model = load("from_pretrained", folder, experts_implementation="moe_patch").to(device)
    if patch_too:
        assert len(model.patch().fused) == 2
        assert type(model.model.layers[0].mlp.gate) is not Qwen3MoeTopKRouter
    model.unpatch()
    assert model.config._experts_implementation == default
    assert all(layer.mlp.experts.config is model.config for layer in model.model.layers)
    with torch.no_grad():
        model(tokens(device))
    assert not fused_calls


def test_unpatch_leaves_another_implementation_alone():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    model.patch()
    model.unpatch()
    assert model.config._experts_implementation == "eager"


def test_saved_config_has_no_trace(folder, tmp_path):
    model = load("from_pretrained", folder, experts_implementation="moe_patch")
    model.patch()
    model.save_pretrained(tmp_path / "again")
    assert "moe_patch" not in (tmp_path / "again" / "config.json").read_text()
