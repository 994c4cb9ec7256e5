"""from_pretrained with ExpertsQuantConfig: quantised while it loads, saved, loaded again."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from families import FAMILIES, WIDE, build
from layouts import linear, packed_of
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config

import moe_patch
from moe_patch import ExpertsQuantConfig
from moe_patch.formats.packed import dequantize, quantize
from moe_patch.quantizer import conversions, loader
from moe_patch.quantizer.loader import stacked_experts
from moe_patch.recognise.four_bits import is_four_bits
from moe_patch.recognise.parts import stored_transposed, up_name
from moe_patch.shapes import Shape, build_model

WIDTHS = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
VALID = {
    "zaya": {"num_experts_per_tok": 1},
    "glm5_next": {"index_topk": 16, "qk_rope_head_dim": 0},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 64]},
}
"""What the configs of some families need before they can be saved."""
UNSAVED = {"dots3_note"}
"""Whose config, shrunk, its own class refuses to save."""
CHOICES = {
    "nf4": {"format": "nf4", "group": 32},
    "nf4 bf16": {"format": "nf4", "group": 32, "scale_dtype": torch.bfloat16},
    "mxfp4": {"format": "mxfp4"},
    "int4": {"format": "int4", "group": 32},
    "int4 zeros": {"format": "int4", "group": 32, "zeros": True, "scale_dtype": torch.float16},
}
choices = pytest.mark.parametrize("choice", CHOICES)


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same_bits(model, other):
    """Every tensor of two models has the same dtype and bits."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(bits(tensor), bits(theirs[name])), name


def stacks(model):
    """Name of experts -> their weights [E, N, K], as the kernels read them."""
    found = {}
    for name, experts in stacked_experts(model):
        weights = [getattr(experts, which).detach() for which in (up_name(experts), "down_proj")]
        found[name] = [w.mT.clone() if stored_transposed(experts) else w.clone() for w in weights]
    return found


def quantised_as(model, weights, **options):
    """The experts of the model are the weights, quantised as `quantize` does."""
    assert weights and dict(stacked_experts(model)).keys() == weights.keys()
    for name, experts in stacked_experts(model):
        for weight, packed in zip(weights[name], packed_of(experts).values()):
            expected = quantize(weight, **options)
            assert torch.equal(packed.codes, expected.codes), name
            assert packed.scales.dtype == expected.scales.dtype
            assert torch.equal(bits(packed.scales), bits(expected.scales)), name
            assert (packed.zeros is None) == (expected.zeros is None)
            assert packed.zeros is None or torch.equal(packed.zeros, expected.zeros), name
            assert not any(tensor.requires_grad for tensor in experts.stored())


@pytest.fixture
def plain(tmp_path):
    """(a tiny Qwen3-MoE, the folder of its checkpoint)."""
    folder = tmp_path / "plain"
    model = tiny_model("qwen3_moe")
    model.save_pretrained(folder)
    return model, folder


def load(folder, **more):
    return AutoModelForCausalLM.from_pretrained(folder, **more)


@choices
def test_quantised_while_loading_saved_and_loaded_again(choice, plain, tmp_path):
    model, folder = plain
    options = CHOICES[choice]
    loaded = load(folder, quantization_config=ExpertsQuantConfig(**options))
    quantised_as(loaded, stacks(model), **options)
    loaded.save_pretrained(tmp_path / "saved")
    same_bits(loaded, load(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "moe_patch" and config["format"] == options["format"]
    experts = next(iter(stacked_experts(loaded)))[1]
    assert config["scale_dtype"] in str(packed_of(experts)["down_proj"].scales.dtype)
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert weights[name].dtype == torch.uint8 and weights[name].shape == (8, 64, 32)
    assert weights[f"{name}_scales"].shape == (8, 64, 2)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNSAVED))
def test_every_family_loads_and_reloads(family, tmp_path):
    sizes = ({} if family in WIDE else WIDTHS) | VALID.get(family, {})
    model = build(family, "cpu", **sizes)
    weights = stacks(model)
    model.save_pretrained(tmp_path / "plain")
    config = copy.deepcopy(model.config)  # the file's may be refused: it is of a shrunk model
    loaded = type(model).from_pretrained(
        tmp_path / "plain", config=config, quantization_config=ExpertsQuantConfig("mxfp4")
    )
    quantised_as(loaded, weights, format="mxfp4")
    others = {n: p for n, p in model.state_dict().items() if n in loaded.state_dict()}
    for name, tensor in loaded.state_dict().items():
        if tensor.dtype != torch.uint8 and not name.endswith("_scales"):
            assert torch.equal(tensor, others[name]), name
    loaded.save_pretrained(tmp_path / "saved")
    config = copy.deepcopy(loaded.config)
    config.quantization_config = config.quantization_config.to_dict()  # as it is in the file
    same_bits(loaded, type(model).from_pretrained(tmp_path / "saved", config=config))


def test_llama4_loads_and_reloads(tmp_path):
    model = tiny_model("llama4")
    model.save_pretrained(tmp_path / "plain")
    loaded = load(tmp_path / "plain", quantization_config=ExpertsQuantConfig("mxfp4"))
    quantised_as(loaded, stacks(model), format="mxfp4")
    loaded.save_pretrained(tmp_path / "saved")
    same_bits(loaded, load(tmp_path / "saved"))
    assert len(loaded.patch().fused) == 2


def test_patches_as_usual_before_and_after_saving(plain, tmp_path):
    _, folder = plain
    loaded = load(folder, quantization_config=ExpertsQuantConfig(group=32))
    ids = tokens()
    with torch.no_grad():
        before = loaded(ids).logits
        assert len(loaded.patch().fused) == 2
        fused = loaded(ids).logits
        loaded.save_pretrained(tmp_path / "saved")  # patched, as it is
        again = load(tmp_path / "saved")
        again.patch()
        assert torch.equal(again(ids).logits, fused)
    torch.testing.assert_close(fused, before, rtol=1e-4, atol=1e-5)
    assert moe_patch.check_parity(again, tokens=16, backward=False).passed


def test_at_most_one_layer_is_wider_than_four_bits(plain, monkeypatch):
    """While a stack is quantised, no other is in memory but in 4 bits."""
    _, folder = plain
    loading, wide = [], []
    convert = conversions.QuantizeStacks.convert

    def watched(self, input_dict, *, model, **where):
        loading.append(list(input_dict))
        wide.append(
            [
                name
                for name in self.transposed
                if not model.get_parameter(name).is_meta
                and model.get_parameter(name).dtype != torch.uint8
            ]
        )
        return convert(self, input_dict, model=model, **where)

    monkeypatch.setattr(conversions.QuantizeStacks, "convert", watched)
    load(folder, quantization_config=ExpertsQuantConfig(group=32))
    assert [len(names) for names in loading] == [1] * 4 and not any(wide)


def test_saved_in_shards_and_through_a_base_model(plain, tmp_path):
    _, folder = plain
    loaded = load(folder, quantization_config=ExpertsQuantConfig("mxfp4"))
    loaded.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    same_bits(loaded, load(tmp_path / "saved"))
    same_bits(loaded.model, type(loaded.model).from_pretrained(tmp_path / "saved"))


def test_a_dtype_is_that_of_everything_else(plain):
    model, folder = plain
    loaded = load(folder, quantization_config=ExpertsQuantConfig("mxfp4"), dtype=torch.bfloat16)
    weights = {name: [w.bfloat16() for w in two] for name, two in stacks(model).items()}
    quantised_as(loaded, weights, format="mxfp4")
    assert loaded.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("start", ["loaded", "made"])
def test_quantised_afterwards_it_saves_and_loads(start, plain, tmp_path):
    model = load(plain[1]) if start == "loaded" else plain[0]
    weights = stacks(model)
    moe_patch.quantize_experts(model, "mxfp4")
    quantised_as(model, weights, format="mxfp4")
    assert model.is_quantized and model.hf_quantizer.is_trainable
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    same_bits(model, again)
    assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()
    moe_patch.quantize_experts(again, "nf4", group=32)  # nothing is left to quantise
    same_bits(model, again)


def test_a_model_inside_of_another_module_saves_and_loads(plain, tmp_path):
    model, _ = plain
    holder = nn.ModuleDict({"dense": nn.Linear(2, 2), "policy": model})
    moe_patch.quantize_experts(holder, "mxfp4")
    model.save_pretrained(tmp_path / "saved")
    same_bits(model, load(tmp_path / "saved"))


def test_experts_that_stay_wide_are_remembered(plain, tmp_path):
    """Those that `skip` names, and those that quantize_experts left."""
    model, folder = plain
    name = "model.layers.0.mlp.experts"
    loaded = load(folder, quantization_config=ExpertsQuantConfig("mxfp4", skip=[name]))
    later = load(folder)
    later.model.layers[0].mlp.experts.down_proj.data[0, 0, 0] = float("inf")
    moe_patch.quantize_experts(later, "mxfp4")
    for each, folder in ((loaded, tmp_path / "a"), (later, tmp_path / "b")):
        assert each.get_parameter(f"{name}.down_proj").dtype == torch.float32
        assert each.model.layers[1].mlp.experts.down_proj.dtype == torch.uint8
        assert each.config.quantization_config.skip == [name]
        each.save_pretrained(folder)
        same_bits(each, load(folder))
        same_bits(each.model, type(each.model).from_pretrained(folder))


def test_quantised_by_others_it_is_left_alone(plain):
    model, _ = plain
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="is quantised by object, which cannot save 4-bit experts"):
        moe_patch.quantize_experts(model, "mxfp4")
    assert not any(map(is_four_bits, model.modules()))


def test_other_kinds_of_four_bits_are_not_mixed(plain):
    model, _ = plain
    moe_patch.quantize_experts(model.model.layers[0], "mxfp4")
    with pytest.raises(ValueError, match="some experts are in 4 bits of another kind"):
        moe_patch.quantize_experts(model, "nf4", group=32)
    assert not is_four_bits(model.model.layers[1].mlp.experts)


@choices
@pytest.mark.parametrize("start", ["loaded", "loaded again", "made"])
def test_dequantised_it_is_a_model_in_16_bits(start, choice, plain, tmp_path):
    """Weights, classes and config as if it had never been in 4 bits, and it saves as one."""
    model, folder = plain
    options = CHOICES[choice]
    if start == "made":
        moe_patch.quantize_experts(model, **options)
    else:
        model = load(folder, quantization_config=ExpertsQuantConfig(**options))
    if start == "loaded again":
        model.save_pretrained(tmp_path / "4 bits")
        model = load(tmp_path / "4 bits")
    model.patch()
    expected = {
        f"{name}.{which}": dequantize(packed)
        for name, experts in stacked_experts(model)
        for which, packed in packed_of(experts).items()
    }
    assert model.dequantize() is model and not model.is_quantized
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    for name, weight in expected.items():
        parameter = model.get_parameter(name)
        assert torch.equal(parameter, weight) and parameter.requires_grad
    assert not any(map(is_four_bits, model.modules()))
    assert model.state_dict().keys() == plain[0].state_dict().keys() | expected.keys()
    assert len(model.patch().fused) == 2
    model.save_pretrained(tmp_path / "16 bits")
    same_bits(model, load(tmp_path / "16 bits"))
    keys = load_file(tmp_path / "16 bits" / "model.safetensors").keys()
    assert keys == load_file(folder / "model.safetensors").keys()


def test_offloaded_experts_are_not_dequantised(plain):
    model, _ = plain
    moe_patch.quantize_experts(model, "mxfp4")
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="are offloaded or spread over ranks: dequantize the"):
        model.dequantize()
    assert all(is_four_bits(experts) for _, experts in stacked_experts(model))
    assert model.is_quantized


def test_prepared_for_kbit_training_it_is_the_same_and_frozen(plain, tmp_path):
    """PEFT casts scales to float32, which loses nothing; adapters and saving go on from there."""
    from peft import prepare_model_for_kbit_training

    choice = CHOICES["nf4 bf16"]
    model = load(plain[1], quantization_config=ExpertsQuantConfig(**choice))
    expected = model(tokens()).logits
    prepared = prepare_model_for_kbit_training(model)
    assert not any(p.requires_grad for p in prepared.parameters())
    assert torch.equal(prepared(tokens()).logits, expected)
    prepared.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(tokens()).logits, expected)


@pytest.mark.gpu
def test_memory_of_loading(tmp_path):
    """At most the model, and the gate and up weights of one layer in 16 bits, twice."""
    experts, width, wide = 32, 512, 1024
    shape = Shape("qwen3_moe", width, wide, experts, 4)
    build_model(shape, layers=6, dtype=torch.bfloat16).save_pretrained(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load(
        tmp_path, quantization_config=ExpertsQuantConfig(), device_map="cuda", dtype="bfloat16"
    )
    after, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    bytes_of = experts * 3 * width * wide
    assert 6 * bytes_of * 0.5 < after - before < 6 * bytes_of * 0.7
    assert most - before < 1.05 * (after - before) + 2 * experts * 2 * wide * width * 2
    assert loaded.patch().fused


def test_trainer_takes_it_with_adapters_alone(plain):
    from transformers.trainer_utils import validate_quantization_for_training

    loaded = load(plain[1], quantization_config=ExpertsQuantConfig(group=32))
    assert loaded.hf_quantizer.is_trainable and loaded.hf_quantizer.is_serializable()
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(loaded)


# Refusals


def short(folder, part):
    """Takes tensors out of a checkpoint."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if part not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )


@pytest.mark.parametrize(
    "part, says",
    [
        ("1.mlp.experts.3.down_proj", r"down_proj \[7, 64, 16\], and .* needs \[8, 64, 16\]"),
        ("1.mlp.experts", "^the checkpoint has no model.layers.1.mlp.experts.gate_up_proj: load"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(part, says, plain):
    short(plain[1], part)
    with pytest.raises(ValueError, match=says):
        load(plain[1], quantization_config=ExpertsQuantConfig("mxfp4"))


@pytest.mark.parametrize("part", ["1.mlp.experts.down_proj_scales", "1.mlp.experts.down_proj"])
def test_a_saved_checkpoint_that_is_not_whole_is_refused(part, plain, tmp_path):
    loaded = load(plain[1], quantization_config=ExpertsQuantConfig("mxfp4"))
    loaded.save_pretrained(tmp_path / "saved")
    short(tmp_path / "saved", part)
    with pytest.raises(ValueError, match=rf"^the checkpoint has no model.layers.{part}"):
        load(tmp_path / "saved")


def test_weights_that_cannot_be_quantised_are_named(plain):
    weights = load_file(plain[1] / "model.safetensors")
    weights["model.layers.1.mlp.experts.5.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, plain[1] / "model.safetensors", {"format": "pt"})
    says = "^model.layers.1.mlp.experts.gate_up_proj: the weight of expert 5 has NaN"
    with pytest.raises(ValueError, match=says):
        load(plain[1], quantization_config=ExpertsQuantConfig("mxfp4"))


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"format": "fp3"}, ValueError, "^format 'fp3' is unknown: use one of nf4, mxfp4, int4"),
        ({"group": 16}, ValueError, "^group 16: nf4 has groups of 32 or 64 or 128"),
        ({"scale_dtype": torch.int8}, ValueError, "^scale_dtype torch.int8: nf4 needs"),
        ({"scale_dtype": "half-full"}, ValueError, "^scale_dtype 'half-full' is not a dtype"),
        ({"zeros": True}, ValueError, "^zeros=True: nf4 has no zero points"),
        ({"linear": True}, TypeError, "^linear is a bool: pass a transformers.BitsAndBytes"),
        (
            {"linear": BitsAndBytesConfig(load_in_8bit=True)}, ValueError,
            r"^linear is not in 4 bits: pass BitsAndBytesConfig\(load_in_4bit=True\)",
        ),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)  # fmt: skip
def test_configs_are_refused(options, error, says):
    with pytest.raises(error, match=says) as caught:
        ExpertsQuantConfig(**options)
    assert "\n" not in str(caught.value)


def test_models_are_refused(plain, tmp_path):
    with pytest.raises(ValueError, match="K = 32 .*not a multiple of"):
        load(plain[1], quantization_config=ExpertsQuantConfig("nf4"))
    with pytest.raises(ValueError, match="^the device_map leaves weights on disk"):
        load(
            plain[1],
            quantization_config=ExpertsQuantConfig("mxfp4"),
            device_map={"model.embed_tokens": "cpu", "model": "disk", "lm_head": "cpu"},
        )
    dense = Qwen3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(dense).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="expert"):
        load(tmp_path / "dense", quantization_config=ExpertsQuantConfig("mxfp4"))


def test_a_plan_is_refused(plain):
    quantizer = loader.ExpertsQuantizer(ExpertsQuantConfig("mxfp4"), pre_quantized=False)
    plain[0].config.distributed_config = object()
    with pytest.raises(ValueError, match="^a plan distributes the model, and 4-bit experts cannot"):
        quantizer.preprocess_model(plain[0])


# bitsandbytes


def test_without_bitsandbytes_one_sentence(plain, tmp_path, monkeypatch):
    config = ExpertsQuantConfig("mxfp4", linear=linear())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(
        ImportError, match="^linear= quantises linear layers by bitsandbytes, which"
    ):
        load(plain[1], quantization_config=config)
    with pytest.raises(ImportError, match="^the checkpoint's linear layers are quantised by bits"):
        ExpertsQuantConfig.from_dict(config.to_dict())


@pytest.mark.parametrize("later", [False, True])
def test_bitsandbytes_takes_the_linear_layers(later, plain, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    folder = plain[1]
    if later:  # the experts were quantised before
        load(folder, quantization_config=ExpertsQuantConfig("mxfp4")).save_pretrained(
            tmp_path / "a"
        )
        folder = tmp_path / "a"
    config = ExpertsQuantConfig(None if later else "mxfp4", linear=linear())
    loaded = load(folder, quantization_config=config)
    quantised_as(loaded, stacks(plain[0]), format="mxfp4")
    layer = loaded.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, bnb.nn.Linear4bit)
    assert not isinstance(loaded.lm_head, bnb.nn.Linear4bit)
    assert layer.mlp.gate.weight.dtype == torch.float32
    loaded.save_pretrained(tmp_path / "saved")
    same_bits(loaded, load(tmp_path / "saved"))
    with pytest.raises(ValueError, match="^linear= is given, and the checkpoint's linear layers"):
        load(tmp_path / "saved", quantization_config=ExpertsQuantConfig(linear=linear()))


def test_routers_that_are_linear_layers_are_left_to_themselves():
    found = []
    for family in ("qwen2_moe", "jamba", "hunyuan_v1_moe"):
        model = build(family, "cpu")
        linear_layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        chosen = [n for n in linear_layers if n.endswith(("expert_gate", "router", "gate.wg"))]
        assert loader._routers(model) == chosen
        found += chosen
    assert found
