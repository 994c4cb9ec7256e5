"""What tune measures: blocks from names and configs, the order of the work, experts that fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model
from transformers import CONFIG_MAPPING

import moe_patch
from moe_patch import shapes
from moe_patch.kernels import table, tiles
from moe_patch.tune import blocks, plan

BF16 = torch.bfloat16
QWEN = blocks.find("qwen3_30b")
GIB = 1 << 30
OLMOE = {
    "hidden_size": 64, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Tiles as high as on a card."""
    monkeypatch.setattr(tiles, "INTERPRET", False)


def config(tmp_path, model_type="olmoe", **attributes):
    CONFIG_MAPPING[model_type](**attributes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


# Blocks


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_named_shape(name):
    shape, block = shapes.find(name), blocks.find(name)
    found = block.hidden, block.inner, block.experts, block.top_k
    assert found == (
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
    )  # fmt: skip
    assert block.transposed == block.weight_on_input == name.startswith(("llama4", "tiny_llama4"))
    assert block.name == name and not block.fp8 and block.width == 2 * block.inner
    assert blocks.find(name, fp8=True).fp8 and not blocks.find(name, fp8=True).transposed


def test_a_folder_and_its_config(tmp_path):
    file = config(tmp_path, **OLMOE)
    for name in (str(tmp_path), str(file)):
        assert blocks.find(name) == blocks.Block(name, 64, 48, 8, 2)
    assert blocks.find(str(file), fp8=True).fp8


def test_a_file_in_this_folder(tmp_path, monkeypatch):
    config(tmp_path, **OLMOE)
    monkeypatch.chdir(tmp_path)
    assert blocks.find("config.json").experts == 8


@pytest.mark.parametrize(
    "method, block_size, fp8",
    [("fp8", [128, 128], True), ("fp8", [64, 64], False), ("other", [128, 128], False)],
)
def test_an_fp8_checkpoint_is_known_by_its_config(tmp_path, method, block_size, fp8):
    file = config(tmp_path, **OLMOE)
    content = json.loads(file.read_text())
    content["quantization_config"] = {"quant_method": method, "weight_block_size": block_size}
    file.write_text(json.dumps(content))
    assert blocks.find(str(tmp_path)).fp8 is fp8


def test_a_checkpoint_in_4_bits_is_refused(tmp_path):
    """The tiles of 4-bit weights are not measured, and those of 16 bits would change nothing."""
    moe_patch.quantize_experts(model := tiny_model("qwen3_moe"), "mxfp4")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="are in 4 bits, and .*: name the checkpoint that they"):
        blocks.find(str(tmp_path))


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("mixtral", (4096, 14336, 8, 2, "silu", False)),
        ("gpt_oss", (2880, 2880, 128, 4, "silu 7.0 1.702 1.0 interleaved", True)),
        ("deepseek_v3", (7168, 2048, 256, 8, "silu", False)),
        ("nemotron_h", (4096, 7688, 8, 2, "relu2 None 1.0 0.0 ungated", False)),
    ],
)
def test_families(tmp_path, model_type, expected):
    block = blocks.find(str(config(tmp_path, model_type)))
    found = block.hidden, block.inner, block.experts, block.top_k
    assert (*found, block.activation, block.transposed) == expected
    assert block.gated is (model_type != "nemotron_h")


def test_llama4_weighs_its_inputs(tmp_path):
    block = blocks.find(str(config(tmp_path, "llama4_text")))
    assert (block.experts, block.top_k) == (16, 1) and block.transposed and block.weight_on_input
    assert not blocks.find(str(tmp_path), fp8=True).transposed


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is no config of this transformers"),
        ('{"model_type": "no such model"}', "is no config of this transformers"),
        ('{"model_type": "llama"}', "a llama model has no experts with stacked weights"),
    ],
)
def test_a_config_that_is_no_moe_is_refused(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        blocks.find(str(tmp_path))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no model config at"):
        blocks.find(str(tmp_path))


# The order


def test_default_rows_are_the_table_s_buckets_each_once():
    rows = (*plan.FIRST, *plan.THEN)
    keys = [table.key("gemm", "", 0, 0, 0, count).split()[-1] for count in rows]
    assert len(set(keys)) == len(rows) == 13 == len({*rows})
    heights = [tiles.block_m(count, 1, BF16) for count in plan.FIRST]
    assert sorted(heights) == [16, 32, 64, 128], "one number for each height of a tile"


@pytest.mark.parametrize("name", ("qwen3_30b", "dsv3_ep32", "llama4_scout", "tiny_qwen3"))
def test_default_tokens_give_the_rows(name):
    block = blocks.find(name)
    for rows in (*plan.FIRST, *plan.THEN):
        found = [e.rows for e in plan.entries([block], BF16, tokens=[block.tokens(rows)])]
        assert found == [rows, rows]


def test_what_matters_most_comes_first():
    found = plan.entries([QWEN], BF16, backward=True)
    assert len(found) == 13 * 6 == len({entry.key for entry in found})
    first, then = found[:24], found[24:]
    assert {entry.rows for entry in first} == {*plan.FIRST}
    assert [entry.backward for entry in first] == [False] * 8 + [True] * 16
    assert [entry.backward for entry in then] == [False] * 18 + [True] * 36
    assert [entry.rows for entry in first[:8]] == [256, 256, 64, 64, 16, 16, 4, 4]
    assert [entry.part for entry in first[:2]] == ["gate_up", "down"]
    flops = [entry.n * entry.k * (2 if entry.part == "gate_up" else 1) for entry in found]
    for at in range(1, len(found)):
        same = found[at].tokens == found[at - 1].tokens
        same &= found[at].backward == found[at - 1].backward
        assert not same or flops[at] <= flops[at - 1], "the longest product first"


def test_shapes_take_turns():
    other = blocks.find("llama4_scout")
    found = plan.entries([QWEN, other], BF16)
    names = [entry.block.name for entry in found[:8]]
    assert names == ["qwen3_30b"] * 2 + ["llama4_scout"] * 2 + ["qwen3_30b"] * 2 + [other.name] * 2


def test_tokens_are_taken_in_their_order_and_a_key_once():
    found = plan.entries([QWEN, QWEN], BF16, tokens=[1024, 64, 63, 4096])
    assert [entry.tokens for entry in found] == [1024, 1024, 64, 64, 4096, 4096]
    assert [e.tokens for e in plan.entries([QWEN], BF16, tokens=[60, 50])] == [60, 60]


def test_kernels_by_name():
    def kernels(**options):
        return {entry.kernel for entry in plan.entries([QWEN], BF16, **options)}

    assert kernels(kernels=["gemm"]) == {"gemm"}
    assert kernels(kernels=["dgate"]) == set()
    assert kernels(kernels=["dgate", "gate_up"], backward=True) == {"dgate", "gate_up"}
    assert kernels(backward=True) == {*plan.KERNELS}


def test_fp8_weights_have_kernels_of_their_own_and_no_gradients():
    block = blocks.find("qwen3_30b", fp8=True)
    found = plan.entries([block], BF16, backward=True)
    assert {entry.kernel for entry in found} == {"gate_up_w8", "gemm_w8", "dgate_w8"}
    assert max(entry.rows for entry in found if entry.backward) == 256, "more rows are widened"
    assert max(entry.rows for entry in found if not entry.backward) == 4096
    assert all(table.KEY.fullmatch(entry.key) for entry in found)
    named = plan.entries([block], BF16, kernels=["gate_up"])
    assert {entry.kernel for entry in named} == {"gate_up_w8"}


# Memory


def test_bytes_are_counted():
    """By hand: 128 experts of 768 x 2048, 512 tokens, 4096 slots, bfloat16."""
    weights, slots = 128 * 3 * 768 * 2048 * 2, 4096
    rows = 2 * (512 * 2048 + slots * 768)
    compared = plan.COMPARED * 2 * slots * 2048
    routing = 12 * 512 * 128 + 32 * slots
    expected = weights + rows + compared + routing + plan.FLUSHED
    assert plan.needed(QWEN, 512, BF16, False) == expected
    gradient = plan.COMPARED * 2 * 128 * 1536 * 2048
    assert plan.needed(QWEN, 512, BF16, True) == (
        expected - compared + gradient + 2 * slots * 2 * 768
    )
    fp8 = blocks.find("qwen3_30b", fp8=True)
    assert plan.needed(fp8, 512, BF16, False) == expected - weights // 2
    assert plan.needed(fp8, 512, BF16, True) < plan.needed(QWEN, 512, BF16, True) / 2


def test_room_keeps_a_margin():
    assert plan.room(24 * GIB, 24 * GIB) == 24 * GIB - 24 * GIB // 20
    assert plan.room(3 * GIB, 4 * GIB) == 3 * GIB - GIB // 2


@pytest.mark.parametrize("gib", (4, 8, 23, 140))
@pytest.mark.parametrize("name", [*shapes.SHAPES, "odd"])
def test_every_default_entry_fits_with_the_same_key(name, gib):
    """Of every shape, on every card: as many experts as fit, at the rows and height of the key."""
    block = blocks.Block("odd", 2880, 1440, 60, 7) if name == "odd" else blocks.find(name)
    for entry in plan.entries([block], BF16, backward=True):
        found = plan.fitting(block, entry.tokens, BF16, entry.backward, gib * GIB)
        assert found is not None, entry
        fewer, tokens = found
        assert 1 <= fewer.top_k <= fewer.experts <= block.experts
        assert plan.needed(fewer, tokens, BF16, entry.backward) <= gib * GIB
        again = plan.entries([fewer], BF16, tokens=[tokens], backward=True)
        assert entry.key in {other.key for other in again}
        if plan.needed(block, entry.tokens, BF16, entry.backward) <= gib * GIB:
            assert found == (block, entry.tokens), "all experts where they fit"


def test_experts_whose_rows_would_have_another_key_are_passed_over():
    """80 tokens give 60 experts 8 rows each. 59 or 58 of them cannot have exactly as many, and one
    row more makes their tiles higher."""
    block = blocks.Block("x", 2880, 1440, 60, 6)
    found = plan.fitting(block, 80, BF16, False, plan.needed(block, 80, BF16, False) - 1)
    assert found == (replace(block, experts=57), 76)


def test_fewer_experts_than_choices():
    three = replace(QWEN, experts=3, top_k=3)
    needed = plan.needed(three, 64, BF16, False)
    assert plan.fitting(QWEN, 1024, BF16, False, needed) == (three, 64)


def test_no_expert_fits():
    assert plan.fitting(QWEN, 4096, BF16, False, 1000) is None
