"""Before and after a patched model: versions, checkpoints, look-alikes, a machine without us."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from families import build
from lora import adapters
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIGS,
    assert_close,
    both_families,
    tiny_block,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.monkey_patching import get_patch_mapping

import moe_patch
from moe_patch import notices
from moe_patch.environment import families

# transformers that is too old, too new


def imported_with(version, monkeypatch):
    """Runs the package's __init__ again, under another name."""
    monkeypatch.setattr(transformers, "__version__", version)
    path = Path(moe_patch.__file__)
    spec = importlib.util.spec_from_file_location(
        "moe_patch_again", path, submodule_search_locations=[str(path.parent)]
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "moe_patch_again", module)  # it imports its own files
    spec.loader.exec_module(module)


@pytest.mark.parametrize(
    "version, how", [("4.57.1", "old"), ("5.16.2", "old"), ("6.0.0.dev0", "new")]
)
def test_other_transformers_are_refused_by_version(version, how, monkeypatch):
    before = vars(PreTrainedModel).copy()
    with pytest.raises(ImportError, match=f"transformers 5.17 to 5.x.*{version}.*too {how}"):
        imported_with(version, monkeypatch)
    assert vars(PreTrainedModel) == before


# Checkpoints


NAME = "model.layers.1.mlp.experts"


def stacked(weights, model):
    """One layer as transformers 5 holds it, the other as files have it."""
    for name in ("gate_up_proj", "down_proj"):
        weights[f"{NAME}.{name}"] = model.get_parameter(f"{NAME}.{name}").detach().clone()
    return {name: t for name, t in weights.items() if not re.search(rf"{NAME}\.\d", name)}


def one_short(weights, model):
    del weights[f"{NAME}.3.down_proj.weight"]
    return weights


@pytest.mark.parametrize("convert", [stacked, one_short])
def test_half_converted_checkpoint(convert, tmp_path, device, fused_calls):
    """Loads where Hugging Face loads it, to the same weights; fails where it fails, unpatched."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(convert(load_file(path), model), path, metadata={"format": "pt"})
    with moe_patch.enabled():
        if convert is one_short:
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                AutoModelForCausalLM.from_pretrained(tmp_path)
            return
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    with torch.no_grad():
        assert_close(loaded(tokens(device)).logits, model.to(device)(tokens(device)).logits)
    assert len(fused_calls) == 2


ELSEWHERE = """
import sys
sys.modules["moe_patch"] = None  # importing it fails
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    inputs, logits, adapted = torch.load(folder + "/expected.pt")
    model = AutoModelForCausalLM.from_pretrained(folder + "/model")
    assert torch.equal(model(inputs).logits, logits)
    model = PeftModel.from_pretrained(model, folder + "/adapters")
    torch.testing.assert_close(model(inputs).logits, adapted, rtol=1e-5, atol=1e-5)
    print("loaded")
"""


def test_loads_where_we_are_not_installed(tmp_path):
    """The model as Hugging Face would compute it, and adapters."""
    folders = [tmp_path / family for family in CONFIGS]
    for folder in folders:
        model = tiny_model(folder.name)
        with torch.no_grad():
            logits = model(tokens()).logits
            model.patch()
            model.save_pretrained(folder / "model")
            model = get_peft_model(model, adapters(folder.name))
            moe_patch.patch(model)
            model.save_pretrained(folder / "adapters")
            torch.save((tokens(), logits, model(tokens()).logits), folder / "expected.pt")
    command = [sys.executable, "-c", ELSEWHERE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and done.stdout.count("loaded") == 2, done.stderr


# What is not ours to patch


def test_a_whole_family_of_remote_code_with_our_names():
    """Copied modelling code has the names and the layout, and does as it likes."""

    class Qwen3MoeExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(8, 64, 64))
            self.down_proj = nn.Parameter(torch.randn(8, 64, 32))
            self.act_fn, self.config = nn.SiLU(), tiny_config("qwen3_moe")
            self.has_gate, self.has_bias, self.is_transposed = True, False, False

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    class Llama4TextMoe(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = tiny_block("llama4").experts

    class Qwen3MoeSparseMoeBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Qwen3MoeExperts()

    model = nn.ModuleDict({"a": Qwen3MoeSparseMoeBlock(), "b": Llama4TextMoe()})
    model["c"] = tiny_block("qwen3_moe")
    classes = [type(module) for module in model["a"].modules()]
    classes += [type(module) for module in model["b"].modules()]
    report = moe_patch.patch(model)
    assert report.fused == ["c"] and [skip[0] for skip in report.skipped] == ["a", "b"]
    assert all("not a class that moe_patch knows" in skip[2] for skip in report.skipped)
    assert classes == [type(m) for name in "ab" for m in model[name].modules()]


BLOCKS = {  # of the families that transformers cannot switch
    "aria": "AriaTextMoELayer",
    "dbrx": "DbrxFFN",
    "doge": "DogeCDMoE",
    "jetmoe": "JetMoeMoE",
    "longcat_flash": "LongcatFlashMoE",
    "nllb_moe": "NllbMoeSparseMLP",
    "switch_transformers": "SwitchTransformersSparseMLP",
}
MORE = {"dbrx": {"rope_theta": 1e4}, "doge": {"is_moe": True}}


@pytest.mark.parametrize("family", [one.family for one in families() if not one.gate])
def test_blocks_that_stay_are_named(family):
    module = f"transformers.models.{family}.modeling_{family}"
    with torch.device("meta"):
        model = build(family, "meta", module, **MORE.get(family, {}))
    blocks = {n for n, m in model.named_modules() if type(m).__name__ == BLOCKS.get(family)}
    report = moe_patch.patch(model, strict=False)
    assert report.skipped and {name for name, *_ in report.skipped} >= blocks
    assert not report.fused and (blocks or family not in BLOCKS)
    assert all(name in str(report) for name in blocks)


def test_transformers_own_patching_is_not_used():
    """Its mapping changes every model of the process, and the recorders for good."""
    model = tiny_model("qwen3_moe")
    with moe_patch.enabled():
        AutoModelForCausalLM.from_config(model.config)
    assert not get_patch_mapping()


@both_families
def test_switch_that_cannot_reach_the_experts_says_so(family):
    notices._warn_uncompiled.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = AutoModelForCausalLM.from_config(
            tiny_config(family), experts_implementation="moe_patch"
        )
        model.set_experts_implementation("eager")
        model.set_experts_implementation("moe_patch")
    said = [str(one.message) for one in said if "experts_implementation" in str(one.message)]
    assert len(said) == (1 if family == "llama4" else 0)
    if said:
        assert "llama4" in said[0] and "patch" in said[0]
    assert len(model.patch().fused) == 2
    notices._warn_uncompiled.cache_clear()
