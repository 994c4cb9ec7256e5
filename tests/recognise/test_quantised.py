"""Finegrained FP8 models under the patch, beside HF's own code (tests/tools/fp8_models.py)."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from fp8_models import CONFIGS, fill, fp8_model
from tiny import assert_close, says_once, tiny_config, tokens
from torch import nn
from transformers.integrations import finegrained_fp8 as hf
from transformers.integrations.moe import use_experts_implementation

import moe_patch
from moe_patch import kernels, reference
from moe_patch.models import decorated
from moe_patch.parity import emulate
from moe_patch.recognise import quantised as fp8
from moe_patch.recognise.eligibility import why_not_fused

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("scale_fmt", ("float", "ue8m0"))
@torch.no_grad()
def test_fp8_models_are_fused_and_restored(use, ran, family, scale_fmt):
    model, plain = fp8_model(family, scale_fmt)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    theirs = model(tokens()).logits
    report = moe_patch.patch(model)
    assert len(report.fused) == 2 and not report.skipped, report
    assert moe_patch.patch(model).fused == report.fused
    assert_close(model(tokens()).logits, plain(tokens()).logits)
    assert ran == ["fused_experts"] * 2
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == before
    moe_patch.unpatch(model)
    assert torch.equal(model(tokens()).logits, theirs) and len(ran) == 2
    error = (theirs - plain(tokens()).logits).norm() / theirs.norm()
    assert 1e-3 < error < 0.3, "HF quantises the activations"


@pytest.mark.gpu
@torch.no_grad()
def test_kernels_run_an_fp8_model(device):
    model, plain = (each.to(device) for each in fp8_model())
    moe_patch.patch(model)
    ids = tokens(device, 1, 3)
    assert_close(model(ids).logits, plain(ids).logits)


@torch.no_grad()
def test_fp8_linears_stay_as_they_are(use, ran):
    model, plain = fp8_model("deepseek_v3", linears=True)
    linears = [m for m in model.modules() if isinstance(m, hf.FP8Linear)]
    classes = [type(m) for m in linears]
    assert len(moe_patch.patch(model).fused) == 2 and linears
    assert [type(m) for m in linears] == classes == [hf.FP8Linear] * len(linears)
    error = model(tokens()).logits - plain(tokens()).logits
    assert error.norm() < 0.3 * plain(tokens()).logits.norm() and ran


def test_saved_files_do_not_change(use, tmp_path):
    model, _ = fp8_model()
    saved = []
    for name in ("before", "after"):
        model.save_pretrained(tmp_path / name)
        from safetensors.torch import load_file

        saved.append(load_file(tmp_path / name / "model.safetensors"))
        moe_patch.patch(model)
    assert list(saved[0]) == list(saved[1])
    assert any("scale_inv" in name for name in saved[0])
    for name, tensor in saved[0].items():
        assert torch.equal(tensor.view(torch.uint8), saved[1][name].view(torch.uint8)), name


def test_lora_on_attention_trains_through_frozen_fp8_experts(use, ran):
    peft = pytest.importorskip("peft")
    grads = []
    for model in fp8_model():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        moe_patch.patch(model)
        model(tokens(), labels=tokens()).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if "lora" in n})
        assert all(p.grad is None for n, p in model.named_parameters() if "experts" in n)
    assert len(ran) == 4
    for name, grad in grads[0].items():
        assert_close(grad, grads[1][name])


def test_generation(use, ran):
    model, plain = fp8_model()
    moe_patch.patch(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens(), **options), plain.generate(tokens(), **options))
    assert ran


@torch.no_grad()
def test_transformers_own_switch(use, ran):
    model, plain = fp8_model()
    expected = plain(tokens()).logits  # they share their configuration
    model.set_experts_implementation("moe_patch")
    assert_close(model(tokens()).logits, expected)
    assert ran == ["fused_experts"] * 2


def experts(has_gate=True, block_size=(128, 128), fill_in=True, **config):
    """Bare FP8 experts, decorated three times over as a model of three layers has them."""
    scheme = config.pop("activation_scheme", "dynamic")
    cls = type("FP8Experts", (hf.FP8Experts,), {"forward": hf.FP8Experts.forward})
    for _ in range(3):
        how = {"experts_interface": hf.ALL_FP8_EXPERTS_FUNCTIONS, "has_gate": has_gate}
        cls = use_experts_implementation(cls, **how)
    known = tiny_config("qwen3_moe", hidden_size=40, moe_intermediate_size=72, num_experts=4)
    for name, value in config.items():
        setattr(known, name, value)
    known._experts_implementation = "eager"
    found = cls(known, block_size=block_size, activation_scheme=scheme, has_gate=has_gate)
    if fill_in:
        with torch.no_grad():
            for name in ("gate_up_proj" if has_gate else "up_proj", "down_proj"):
                weight = torch.randn(getattr(found, name).shape) * 0.3
                fill(found, name, weight, torch.float32)
    return found.eval()


def routed(dtype=torch.float32):
    draw = torch.Generator().manual_seed(2)
    x, logits = torch.randn(6, 40, generator=draw), torch.randn(6, 4, generator=draw)
    weights, index = logits.softmax(-1).topk(2)
    return x.to(dtype), index, weights.to(dtype)


@pytest.mark.parametrize(
    "has_gate, config",
    [
        (True, {"swiglu_limit": 0.5}),
        (True, {"swiglu_limit": 0.7, "swiglu_alpha": 1.702}),
        (True, {"hidden_act": "gelu"}),
        (False, {"hidden_act": "relu2"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_gates(use, ran, has_gate, config, monkeypatch):
    module, arguments = experts(has_gate, **config), routed()
    monkeypatch.setattr(emulate, "rounded", lambda x: x.float())  # HF without the activations' part
    expected = module(*arguments)
    assert moe_patch.patch(module).fused == [""]
    assert_close(module(*arguments), expected)
    assert ran == ["fused_experts"]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"block_size": None}, "have one scale a weight: blocks of 128 x 128"),
        ({"block_size": (64, 128)}, "have blocks of 64 x 128"),
        ({"activation_scheme": "static"}, "scales are static: only dynamic"),
        ({"hidden_act": "tanh"}, "the gate of these FP8 experts is none"),
        ({"down_proj_scale_inv": torch.ones(4, 2, 1)}, r"down_scale_inv is .*\[4, 1, 1\] is"),
        ({"down_proj_scale_inv": torch.ones(4, 1, 1).half()}, "float32 or float8_e8m0fnu"),
        ({"down_proj": torch.ones(4, 40, 36, dtype=torch.int8)}, "the weights are FP4"),
        (
            {"down_proj": torch.ones(4, 40, 72).to(torch.float8_e5m2)},
            "float8_e5m2: torch.float8_e4",
        ),
    ],
    ids=("whole", "64", "static", "tanh", "shape", "dtype", "fp4", "e5m2"),
)
def test_what_is_left_to_hugging_face(changes, says):
    names = {n: v for n, v in changes.items() if not isinstance(v, torch.Tensor)}
    module = experts(fill_in=False, **names)
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            floats = value.is_floating_point() and value.element_size() > 1
            setattr(module, name, nn.Parameter(value, requires_grad=floats))
    report = moe_patch.patch(nn.Sequential(module))
    assert len(report.skipped) == 1 and not report.fused
    assert re.search(says, report.skipped[0][2])
    assert why_not_fused(module) == report.skipped[0][2]


@pytest.mark.parametrize("size", (127, 128, 129, 257))
def test_a_block_that_is_not_whole_has_a_scale(size):
    module = experts(hidden_size=size, moe_intermediate_size=size, fill_in=False)
    assert why_not_fused(module) is None


@pytest.mark.parametrize("scheme", ("dynamic", "static"))
@torch.no_grad()
def test_nested_wrappers_do_not_call_each_other_for_ever(use, ran, monkeypatch, scheme):
    """Where nothing runs fused, HF's own loop runs, once."""
    module, arguments = experts(activation_scheme=scheme), routed()
    expected = module(*arguments)
    module.config._experts_implementation = "moe_patch"
    monkeypatch.setattr(kernels, "why_not", lambda _: "no kernels here")
    calls = []
    loop = hf.FP8Experts.forward
    grouped = lambda self, *args: calls.append(1) or loop(self, *args)  # noqa: E731
    monkeypatch.setitem(hf.FP8ExpertsInterface._global_mapping, "grouped_mm", grouped)
    why = "no kernels here" if scheme == "dynamic" else "scales are static"
    with says_once(why):
        assert torch.equal(module(*arguments), expected) and not ran
    assert len(calls) == (scheme == "dynamic")


@torch.no_grad()
def test_sentinels_and_a_nan_scale(device):
    module, (x, index, weights) = experts(), routed()
    index[:2], weights[:2] = 4, 0.0  # expert parallelism: of another rank
    with torch.no_grad():
        module.down_proj_scale_inv[1] = float("nan")
    moe_patch.patch(module)
    out = module.to(device)(x.to(device), index.to(device), weights.to(device)).cpu()
    assert not out[:2].any()
    assert torch.equal(out.isnan().any(1), (index == 1).any(1))


@pytest.mark.parametrize("compiled", (False, True))
def test_kernels_give_the_input_its_gradient(device, compiled):
    """Though HF leaves `requires_grad` on FP8 weights and scales."""
    module = experts(num_experts=2).to(device)
    assert module.gate_up_proj.requires_grad and module.down_proj_scale_inv.requires_grad
    moe_patch.patch(module)
    x, index = torch.randn(2, 40, device=device, requires_grad=True), torch.tensor([[0], [1]])
    index, weights = index.to(device), torch.rand(2, 1, device=device, requires_grad=True)
    whole = [
        reference.dequantize(*pair, torch.float32)
        for pair in zip((module.gate_up_proj, module.down_proj), fp8.scales(module).values())
    ]
    whole = [each.detach() for each in whole]
    if compiled:
        torch._dynamo.reset()
        module = torch.compile(module, fullgraph=True, backend="aot_eager")
    outs = module(x, index, weights), reference.fused_experts(x, *whole, index, weights)
    d_out = torch.randn(2, 40, device=device)
    grads = [torch.autograd.grad(out, (x, weights), d_out) for out in outs]
    for ours, other in zip((outs[0], *grads[0]), (outs[1], *grads[1])):
        assert_close(ours, other)


def test_a_card_without_fp8_tensor_cores_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with says_once("NVIDIA A100 has no FP8 tensor cores"):
        decorated._say_how(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decorated._say_how(torch.device("cuda"))


def test_arguments_read_the_row_that_hugging_face_reads(device):
    """Gate and up in one block of 128 rows: HF keeps two rows of scales and reads the first."""
    module = experts(moe_intermediate_size=24)
    assert module.gate_up_proj_scale_inv.shape == (4, 2, 1)
    given = fp8.scales(module)
    assert given["gate_up_scale_inv"].shape == (4, 1, 1)
    assert not any(tensor.requires_grad for tensor in given.values())
