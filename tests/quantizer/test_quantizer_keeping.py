"""Checkpoints that are in 4 bits already: codes and scales are kept, linear layers widened."""

from __future__ import annotations

import json

import pytest
import torch
from families import build
from layouts import describe, linear, packed_of, put, quantization_config, write, write_gpt_oss
from safetensors.torch import load_file, save_file
from tiny import assert_close, tiny_model, tokens
from transformers import AutoModelForCausalLM

from moe_patch import ExpertsQuantConfig
from moe_patch.formats.packed import dequantize
from moe_patch.quantizer.loader import stacked_experts
from moe_patch.recognise.parts import stored_transposed

METHODS = ["gptq", "awq", "compressed-tensors"]


def keep(folder, **more):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=ExpertsQuantConfig(**more), dtype=torch.float32
    )


def is_the_same(kept, reference):
    """The experts stand for the reference's weights, everything else is equal, and so is what both
    compute."""
    assert not kept.training
    plain = reference.state_dict()
    for name, experts in stacked_experts(kept):
        for which, packed in packed_of(experts).items():
            weight = plain.pop(f"{name}.{which}")
            weight = weight.mT if stored_transposed(experts) else weight
            assert torch.equal(dequantize(packed), weight), f"{name}.{which}"
        assert not any(tensor.requires_grad for tensor in experts.stored())
    state = kept.state_dict()
    for name, tensor in plain.items():
        assert torch.equal(state[name], tensor), name
    ids = tokens() % reference.config.vocab_size
    with torch.no_grad():
        assert_close(kept(ids).logits, reference(ids).logits)
        kept.patch()
        torch.testing.assert_close(kept(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5)


def reloads(kept, folder):
    """Saved and loaded again, nothing has changed."""
    kept.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    before, after = kept.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    "method, zeros",
    [(m, zeros) for m in METHODS for zeros in (False, True) if (m, zeros) != ("awq", False)],
)
def test_qwen3_moe(method, zeros, tmp_path):
    reference = tiny_model("qwen3_moe")
    write(reference, tmp_path / "theirs", method, zeros=zeros)
    kept = keep(tmp_path / "theirs")
    is_the_same(kept, reference)
    config = kept.config.quantization_config
    assert (config.format, config.group, config.zeros) == ("int4", 32, zeros)
    assert config.scale_dtype == torch.float16
    reloads(kept, tmp_path / "ours")


def test_mixtral_by_the_names_of_its_checkpoints(tmp_path):
    reference = build("mixtral", "cpu", hidden_size=64, intermediate_size=32)
    write(reference, tmp_path / "theirs", "gptq", ends=("_proj", "w1", "w2", "w3"))
    kept = keep(tmp_path / "theirs")
    is_the_same(kept, reference)
    reloads(kept, tmp_path / "ours")


def test_gpt_oss_without_kernels_of_the_hub(tmp_path):
    reference = build("gpt_oss", "cpu", hidden_size=64, intermediate_size=32)
    write_gpt_oss(reference, tmp_path / "theirs")
    kept = keep(tmp_path / "theirs")
    is_the_same(kept, reference)
    assert kept.config.quantization_config.format == "mxfp4"
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(kept.get_parameter(name).flatten(), theirs[f"{name}_blocks"].flatten())
    reloads(kept, tmp_path / "ours")


def test_gpt_oss_with_bitsandbytes_for_the_rest(tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    reference = build("gpt_oss", "cpu", hidden_size=64, intermediate_size=64)
    write_gpt_oss(reference, tmp_path)
    kept = keep(tmp_path, linear=linear())
    assert isinstance(kept.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    name, experts = next(iter(stacked_experts(kept)))
    weight = reference.get_parameter(f"{name}.down_proj")
    assert torch.equal(dequantize(packed_of(experts)["down_proj"]), weight.mT)


def test_scales_of_a_whole_row_are_repeated(tmp_path):
    reference = tiny_model("qwen3_moe", hidden_size=128, head_dim=64, moe_intermediate_size=128)
    write(reference, tmp_path, "gptq", group=128)
    config = quantization_config("gptq", -1, False)
    describe(tmp_path, config)
    kept = keep(tmp_path)
    assert kept.config.quantization_config.group == 128
    is_the_same(kept, reference)


def test_compressed_tensors_own_library_reads_what_is_kept(tmp_path):
    """The checkpoint is one that compressed-tensors loads, and it stands for the same weights."""
    pytest.importorskip("compressed_tensors")
    reference = tiny_model("qwen3_moe")
    write(reference, tmp_path, "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokens()
    with torch.no_grad():
        error = (theirs(ids).logits - keep(tmp_path)(ids).logits).abs().max()
    assert error < 1e-2  # theirs are rounded to the scales' float16


def test_a_checkpoint_of_compressed_tensors_own_library(tmp_path):
    """As llm-compressor saves it: their compressor writes each linear layer."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    reference = tiny_model("qwen3_moe")
    reference.save_pretrained(tmp_path)
    args = QuantizationArgs(num_bits=4, symmetric=True, group_size=32, strategy="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight, stem = weights.pop(name), name.removesuffix("weight")
        parts = weight.unflatten(-1, (-1, 32))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        saved = PackedQuantizationCompressor.compress(state, scheme)
        weights |= {f"{stem}{part}": t.contiguous() for part, t in saved.items() if t is not None}
        put(reference, stem[:-1], PackedQuantizationCompressor.decompress(saved, scheme)["weight"])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    group = json.loads(scheme.model_dump_json())
    describe(
        tmp_path,
        quantization_config("compressed-tensors", 32, False, config_groups={"group_0": group}),
    )
    is_the_same(keep(tmp_path), reference)


# Refusals


def scheme(**changes):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    return {"group_0": {"targets": ["Linear"], "weights": weights | changes}}


CANNOT = "whose experts ExpertsQuantConfig cannot keep"
REFUSED = {
    "act-order": ("gptq", {"desc_act": True}, f"act-order .*, {CANNOT}: quantise it with desc_act"),
    "8 bits": ("gptq", {"bits": 8}, f"GPTQ in 8 bits, {CANNOT}: supported are 4 bits"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "gemv": ("awq", {"version": "gemv"}, "AWQ in the layout 'gemv'.*save it in the layout .gemm"),
    "nvfp4": (
        "compressed-tensors", {"format": "nvfp4-pack-quantized"},
        f"in the format nvfp4-pack-quantized, {CANNOT}: supported is pack-quantized",
    ),
    "W8": ("compressed-tensors", {"config_groups": scheme(num_bits=8)}, "compressed-tensors in 8"),
    "g_idx": (
        "compressed-tensors", {"config_groups": scheme(actorder="group")}, "with act-order",
    ),
    "floats": ("compressed-tensors", {"config_groups": scheme(type="float")}, "float weights"),
    "W4A8": (
        "compressed-tensors",
        {"config_groups": {"g": scheme()["group_0"] | {"input_activations": {"num_bits": 8}}}},
        "quantised activations",
    ),
    "two groups": (
        "compressed-tensors",
        {"config_groups": scheme() | {"g": scheme(group_size=64)["group_0"]}},
        "several sizes of groups",
    ),
    "cache": ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "a kv_cache_scheme"),
    "no groups": ("compressed-tensors", {"config_groups": {}}, "no config_groups"),
    "fp8": ("gptq", {"quant_method": "fp8"}, "quantised by 'fp8'.*supported are gpt-oss MXFP4, co"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_kept_is_refused(case, tmp_path):
    method, changes, says = REFUSED[case]
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    describe(tmp_path, quantization_config(method, 32, False, **changes))
    with pytest.raises(ValueError, match=f"^the checkpoint is .*{says}") as caught:
        keep(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_options_than_the_checkpoint_has_are_refused(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    describe(tmp_path, quantization_config("gptq", 32, False))
    for options in ({"format": "nf4"}, {"format": "int4", "group": 64}):
        (name, value), *_ = list(options.items())[-1:]
        with pytest.raises(ValueError, match=f"^{name} is {value!r}, and the checkpoint's experts"):
            keep(tmp_path, **options)
    with pytest.raises(ValueError, match="^linear= is given, and the checkpoint's linear layers"):
        keep(tmp_path, linear=linear())


EXPERTS = "1.mlp.experts"


def gone(tensor):
    """No tensor."""


def change(folder, part, to):
    """Gives every tensor of that name another value; None takes it away."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(part)]:
        tensor = to(weights.pop(name))
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "method, part, to, says",
    [
        ("gptq", f"{EXPERTS}.3.up_proj.g_idx", lambda t: t.flip(0).contiguous(), "act-order"),
        ("gptq", f"{EXPERTS}.3.up_proj.qzeros", gone, "7 or 8 experts with tensors of mlp"),
        ("gptq", "q_proj.scales", gone, "^model.layers.0.*q_proj has no scales, found qweight"),
        ("gptq", f"{EXPERTS}.0.down_proj.qzeros", torch.zeros_like, "says that it is symmetric"),
        ("gptq", "scales", torch.Tensor.double, "scales of .*torch.float64"),
        ("awq", "q_proj.qweight", torch.Tensor.float, "q_proj.qweight is torch.float32"),
    ],
    ids=["act-order", "an expert", "a linear layer", "zero points", "scales", "dtype"],
)  # fmt: skip
def test_tensors_that_cannot_be_kept_are_refused(method, part, to, says, tmp_path):
    write(tiny_model("qwen3_moe"), tmp_path, method, zeros=method == "awq")
    change(tmp_path, part, to)
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        keep(tmp_path)
    assert "\n" not in str(caught.value)


def test_groups_of_another_size_than_the_config_says(tmp_path):
    write(tiny_model("qwen3_moe", moe_intermediate_size=64), tmp_path, "gptq", group_size=64)
    with pytest.raises(
        ValueError, match=r"gate_up_proj_scales \[8, 128, 2\], and .* \[8, 128, 1\]"
    ):
        keep(tmp_path)
