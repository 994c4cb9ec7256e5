"""Experts in 4 bits beside the same experts with dequantised weights, in every family."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from families import FAMILIES, WIDE, build
from four_bits import experts_of, quantised, restore
from tiny import assert_close, says_once, tiny_block, tiny_model, tokens

import moe_patch
from moe_patch import notices, switch
from moe_patch.recognise import four_bits

SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
MORE = {"ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32]}}
BLOCKS = ("qwen3_moe", "llama4")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experts in 4 bits, dequantised")
        yield


def routed(experts, dtype=torch.float32, tokens=5):
    draw = torch.Generator().manual_seed(3)
    hidden = experts.packed("down_proj").shape[1]
    count = len(experts.down_proj)
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    weights, index = torch.rand(tokens, count, generator=draw).topk(2)
    return x, index, weights.to(dtype)


def assert_near(actual, expected):
    """Equal up to the order of sums, in float32 or in half precision."""
    if actual.dtype == torch.float32:
        assert_close(actual, expected)
    else:
        error = (actual.double() - expected.double()).square().mean().sqrt()
        assert error <= 2**-9 * expected.double().square().mean().sqrt()
        assert expected.any()


def step(experts, dtype=torch.float32):
    """(output, gradient of the input, gradient of the routing weights)."""
    x, index, weights = routed_of(experts, dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = experts(x, index, weights)
    return out, *torch.autograd.grad(out.float().square().sum(), (x, weights))


def routed_of(experts, dtype):
    return routed(experts if hasattr(experts, "packed") else experts.like, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, dtype, device):
    model = build(family, device, **MORE.get(family, {} if family in WIDE else SIZES)).to(dtype)
    model, twin = quantised(model, scale_dtype=torch.float32)
    name, experts = next(iter(experts_of(model).items()))
    other = twin.get_submodule(name)
    vars(other)["like"] = experts
    expected = step(other, dtype)
    for each in (step(experts, dtype), _patched(model, experts, dtype)):
        for ours, theirs in zip(each, expected):
            assert_near(ours, theirs)


def _patched(model, experts, dtype):
    assert len(moe_patch.patch(model).fused) == len(experts_of(model))
    return step(experts, dtype)


def logits(model, **more):
    return model(tokens(), **more).logits


@pytest.fixture(params=BLOCKS)
def pair(request, device):
    """(a tiny model with experts in 4 bits, its twin)."""
    return quantised(tiny_model(request.param, device))


@torch.no_grad()
def test_patching_and_unpatching(pair):
    model, twin = pair
    expected, classes = logits(twin), [type(m) for m in model.modules()]
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert torch.equal(logits(model), expected)
    assert len(moe_patch.patch(model).fused) == len(experts_of(model)) == 2
    assert moe_patch.patch(model).fused
    assert_close(logits(model), expected)
    moe_patch.unpatch(model)
    assert torch.equal(logits(model), expected)
    assert [type(m) for m in model.modules()] == classes
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("family", BLOCKS)
@torch.no_grad()
def test_a_patched_model_is_quantised(family, fused_calls, device):
    model, twin = tiny_model(family, device), tiny_model(family, device)
    moe_patch.patch(model)
    moe_patch.quantize_experts(model, group=32)
    restore(model, twin)
    assert_close(logits(model), logits(twin))
    assert len(fused_calls) == 2
    moe_patch.unpatch(model)
    assert torch.equal(logits(model), logits(twin)) and len(fused_calls) == 2


@torch.no_grad()
def test_moe_patch_0_runs_dequantised(pair, monkeypatch, fused_calls):
    model, twin = pair
    moe_patch.patch(model)
    monkeypatch.setattr(switch, "ENABLED", False)
    assert torch.equal(logits(model), logits(twin)) and not fused_calls


@pytest.mark.parametrize("patched", (False, True), ids=("plain", "patched"))
@torch.no_grad()
def test_copies_and_files(pair, patched, tmp_path):
    model, _ = pair
    if patched:
        moe_patch.patch(model)
    expected, file = logits(model), tmp_path / "model.pt"
    torch.save(model, file)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(logits(other), expected)
        for name, experts in experts_of(model).items():
            assert type(other.get_submodule(name)) is type(experts)
            assert other.get_submodule(name).down_proj is not experts.down_proj


@pytest.mark.parametrize("format, more", (("nf4", {}), ("mxfp4", {}), ("int4", {"zeros": True})))
@torch.no_grad()
def test_state_dicts_give_the_same_bits(format, more, device, tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = quantised(tiny_model("qwen3_moe", device), format, **more)
    other = tiny_model("qwen3_moe", device)
    torch.nn.init.normal_(other.model.layers[0].mlp.experts.down_proj)
    moe_patch.quantize_experts(other, format, group=32, **more)
    assert not torch.equal(logits(other), logits(model))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(other), logits(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), other.state_dict()[name].view(torch.uint8))


@pytest.mark.parametrize(
    "cast", ("half", "bfloat16", "double", "to", "empty"), ids=lambda name: name
)
@pytest.mark.parametrize("format", ("nf4", "mxfp4"))
def test_casts_leave_codes_and_scales(cast, format):
    block = tiny_block("qwen3_moe")
    moe_patch.quantize_experts(block, format, group=32)
    before = {n: p.detach().clone() for n, p in block.experts.named_parameters()}
    if cast == "empty":
        block.to_empty(device="meta")
        assert all(
            p.is_meta and p.dtype == before[n].dtype for n, p in block.experts.named_parameters()
        )
        return
    block.to(torch.float16) if cast == "to" else getattr(block, cast)()
    wanted = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
    assert block.gate.weight.dtype == wanted.get(cast, torch.float16) == block.experts.weight_dtype
    for name, parameter in block.experts.named_parameters():
        assert parameter.dtype == before[name].dtype and not parameter.requires_grad
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("patched", (False, True), ids=("plain", "patched"))
@torch.no_grad()
def test_offloaded(patched):
    from accelerate import cpu_offload

    model, twin = quantised(tiny_model("qwen3_moe"))
    expected = logits(twin)
    if patched:
        moe_patch.patch(model)
    cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    assert_close(logits(model), expected)
    if not patched:
        assert len(moe_patch.patch(model).fused) == 2
        assert_close(logits(model), expected)


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("implementation", ("eager", "grouped_mm"))
def test_autograd_keeps_codes_for_dequantised_weights(family, implementation, monkeypatch, device):
    block, twin = quantised(tiny_block(family).to(device))
    if family == "qwen3_moe":
        block.experts.config._experts_implementation = implementation
    hooks, kept = four_bits._hooks, []

    def counting(stacks):
        keep, give = hooks(stacks)
        return lambda tensor: kept.append(keep(tensor)) or kept[-1], give

    monkeypatch.setattr(four_bits, "_hooks", counting)
    x = torch.randn(1, 4, 64, device=device, requires_grad=True)
    outs = [out[0] if isinstance(out, tuple) else out for out in (block(x), twin(x))]
    of_codes = [each for each in kept if isinstance(each, tuple)]
    floats = [each.numel() for each in kept if isinstance(each, torch.Tensor)]
    assert len(of_codes) >= 2 and max(floats) < 2048
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    assert torch.equal(*grads)


def test_unpatched_experts_warn_once(device):
    model, _ = quantised(tiny_model("qwen3_moe", device))
    with says_once("call moe_patch.patch"), torch.no_grad():
        logits(model)


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing_and_autocast(pair, reentrant):
    model, twin = pair
    moe_patch.patch(model)
    grads = []
    for each in (model, twin):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
        each(tokens(), labels=tokens()).loss.backward()
        grads.append(each.get_input_embeddings().weight.grad)
    assert_close(*grads)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        ours, theirs = logits(model.eval()), logits(twin.eval())
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("family", BLOCKS)
def test_compiled_blocks(family, device):
    block, twin = quantised(tiny_block(family).to(device))
    moe_patch.patch(block)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 6, 64, device=device, requires_grad=True)
    outs = [each(x) for each in (compiled, twin)]
    outs = [out[0] if isinstance(out, tuple) else out for out in outs]
    assert_close(outs[0].view(-1), outs[1].view(-1))
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    assert_close(*grads)


FROZEN = r"^requires_grad_\(True\) leaves the weights of experts in 4 bits frozen: put adapters"


@pytest.fixture
def warns_anew():
    """What was said once is said again."""
    notices._warn_uncompiled.cache_clear()
    yield
    notices._warn_uncompiled.cache_clear()


@pytest.mark.usefixtures("warns_anew")
@pytest.mark.parametrize("patched", (False, True), ids=("plain", "patched"))
@pytest.mark.parametrize("whole", (True, False), ids=("model", "layer"))
def test_requires_grad_passes_over_codes_and_scales(pair, patched, whole):
    model, _ = pair
    if patched:
        moe_patch.patch(model)
    model.requires_grad_(False)
    part = model if whole else model.model.layers[-1]
    with pytest.warns(match=FROZEN):
        assert part.requires_grad_(True) is part
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {
        id(p) for p in part.parameters() if not any(p is t for t in stored_in(model))
    }
    assert trained and not any(p.requires_grad for p in model.requires_grad_(False).parameters())


def stored_in(model):
    return [tensor for experts in experts_of(model).values() for tensor in experts.stored()]


def test_requires_grad_of_experts_alone_is_refused(device):
    experts = quantised(tiny_block("qwen3_moe").to(device))[0].experts
    with pytest.raises(RuntimeError, match="^the weights of Qwen3MoeExperts .* trained: put ada"):
        experts.requires_grad_(True)
    assert not experts.requires_grad_(False).down_proj.requires_grad
    assert torch.nn.Linear(2, 2).requires_grad_(True).weight.requires_grad


@pytest.mark.usefixtures("warns_anew")
def test_biases_of_experts_are_trained(device):
    model, _ = quantised(build("gpt_oss", device, **SIZES))
    experts = next(iter(experts_of(model).values()))
    with pytest.warns(match=FROZEN):
        experts.requires_grad_(False).requires_grad_(True)
    trained = {name for name, p in experts.named_parameters() if p.requires_grad}
    assert trained == {"gate_up_proj_bias", "down_proj_bias"}


def test_a_parametrization_on_codes_is_refused(device):
    block, _ = quantised(tiny_block("qwen3_moe").to(device))
    torch.nn.utils.parametrize.register_parametrization(
        block.experts, "down_proj", torch.nn.Identity()
    )
    with pytest.raises(RuntimeError, match="a parametrization on codes of 4-bit weights"):
        block(torch.randn(1, 2, 64, device=device))


def test_the_classes_are_made_once():
    assert four_bits.class_of(torch.nn.Linear) is four_bits.class_of(torch.nn.Linear)
