"""Named shapes build Hugging Face's own classes, initialised, and leave the process alone."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_patch.shapes import SHAPES, Shape, build, build_model, find

CLASSES = {"tiny_qwen3": Qwen3MoeSparseMoeBlock, "tiny_llama4": Llama4TextMoe}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_is_hugging_faces_and_initialised(name, dtype):
    block, shape = build(name, dtype=dtype), SHAPES[name]
    assert type(block) is CLASSES[name] and not block.training
    for parameter in block.parameters():
        assert parameter.dtype == dtype
        assert float(parameter.detach().float().std()) == pytest.approx(shape.std, rel=0.2)
    experts = block.experts.gate_up_proj
    assert experts.shape[0] == shape.num_experts
    assert set(experts.shape[1:]) == {shape.hidden_size, 2 * shape.intermediate_size}


@pytest.mark.parametrize("name", CLASSES)
def test_model_has_a_block_in_every_layer(name):
    model = build_model(name, layers=3)
    assert sum(isinstance(module, CLASSES[name]) for module in model.modules()) == 3
    ids = torch.randint(256, (2, 9))
    assert model(input_ids=ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("make", [build, build_model])
def test_same_seed_same_weights_and_no_trace(make):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two, other = make("tiny_qwen3"), make("tiny_qwen3"), make("tiny_qwen3", seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32
    pairs = zip(one.parameters(), two.parameters(), other.parameters())
    equal = [(torch.equal(a, b), torch.equal(a, c)) for a, b, c in pairs if a.std() > 0]
    assert all(same for same, _ in equal) and not any(differ for _, differ in equal)


def test_default_dtype_survives_a_failure():
    with pytest.raises(RuntimeError, match="negative dimension"):
        build(Shape("qwen3_moe", -8, 8, 2, 1), dtype=torch.float16)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match="unknown family 'mixtral'"):
        build(Shape("mixtral", 8, 8, 2, 1))


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown shape 'qwen4'.*qwen3_30b.*tiny_llama4"):
        find("qwen4")


def test_sizes_and_flops():
    shape = SHAPES["qwen3_30b"]
    assert (shape.hidden_size, shape.intermediate_size) == (2048, 768)
    assert shape.flops(16384) == 6 * 16384 * 8 * 2048 * 768
    assert shape.flops(1, backward=True) == 3 * shape.flops(1)
    scout = SHAPES["llama4_scout"]  # the shared expert works too
    assert scout.flops(7) == 2 * 6 * 7 * 5120 * 8192
    assert [name for name, shape in SHAPES.items() if shape.tiny] == list(CLASSES)


def test_bytes_of_the_experts_that_are_used():
    shape = SHAPES["qwen3_30b"]
    one = 3 * 2048 * 768
    assert shape.bytes(1) == pytest.approx(2 * (8 * one + 2 * 2048))
    assert shape.bytes(2) == pytest.approx(2 * ((8 + 8 * 15 / 16) * one + 4 * 2048))
    assert shape.bytes(4096) == pytest.approx(2 * (128 * one + 2 * 4096 * 2048))
    assert shape.bytes(7, itemsize=4) == 2 * shape.bytes(7)
    scout = SHAPES["llama4_scout"]  # with its shared expert
    assert scout.bytes(1) == pytest.approx(2 * (2 * 3 * 5120 * 8192 + 2 * 5120))
