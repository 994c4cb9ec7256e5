"""parity FOLDER where the folder is broken: one line, exit code 2, and never random weights."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, both_families, tiny_model
from transformers.utils import logging

import moe_patch
from moe_patch import checkpoint
from moe_patch.__main__ import main
from moe_patch.commands import running

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{family: folder of a whole checkpoint in shards or in one file}, to copy from."""
    root = tmp_path_factory.mktemp("saved")
    for family in CONFIGS:
        model = tiny_model(family)
        model.save_pretrained(root / family)
        model.save_pretrained(root / f"{family} shards", max_shard_size="100KB")
    return root


@pytest.fixture
def folder(saved, tmp_path):
    def copy(name="qwen3_moe"):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        return Path(shutil.copytree(saved / name, tmp_path / "bad"))

    return copy


def refusal(folder) -> str:
    """Returns what `load` says, which is one line."""
    with pytest.raises(ValueError) as caught:
        checkpoint.load(str(folder), "cpu")
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text and len(text) < 600, text
    return text


@pytest.fixture
def command(monkeypatch, use, capsys):
    """Runs `parity FOLDER`; (exit code, stdout, stderr)."""
    monkeypatch.setattr(running, "device", lambda: "cpu")

    def call(folder, *more):
        code = main(["parity", str(folder), "--tokens", "8", "--forward-only", *more])
        return code, *capsys.readouterr()

    return call


def truncate(folder, draw):
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def flip(folder, draw):
    """One bit of a header, or of the eight bytes that say how long it is."""
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    place = draw.randrange(8 + int.from_bytes(data[:8], "little"))
    data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def drop(folder, draw):
    draw.choice(sorted(folder.glob("*.safetensors"))).unlink()


def garbage(folder, draw):
    draw.choice(sorted(folder.glob("*.safetensors"))).write_bytes(draw.randbytes(5000))


def cut_json(folder, draw):
    file = draw.choice(sorted(folder.glob("*.json")))
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def flip_json(folder, draw):
    file = draw.choice(sorted({folder / "config.json", *folder.glob(INDEX)}))
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(7)
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe shards", "llama4", "llama4 shards"])
@pytest.mark.parametrize("corrupt", [truncate, flip, drop, garbage, cut_json, flip_json])
def test_at_random_it_is_refused_or_every_number_is_the_checkpoint_s(saved, folder, corrupt, name):
    good = dict(tiny_model(name.split()[0]).named_parameters())
    draw, refused = random.Random(f"{corrupt.__name__} {name}"), 0
    for _ in range(40):
        bad = folder(name)
        corrupt(bad, draw)
        try:
            model, _ = checkpoint.load(str(bad), "cpu")
        except ValueError as error:
            text = str(error)
            assert str(bad) in text and "\n" not in text and len(text) < 600, text
            refused += 1
            continue
        # a bit on which no weight hangs, or one by which transformers reads experts in another
        # order: its patterns take any character for a dot
        found = dict(model.named_parameters())
        assert found.keys() <= good.keys()
        assert all(
            torch.equal(*(of[key].flatten().sort()[0] for of in (found, good))) for key in found
        )
    assert refused >= (5 if corrupt in (cut_json, flip_json) else 36)


def test_experts_in_4_bits_load_and_are_judged(tmp_path, monkeypatch, capsys, device):
    """By the kernels themselves, which read codes, as the folder has them."""
    moe_patch.quantize_experts(model := tiny_model("qwen3_moe", num_hidden_layers=1), "mxfp4")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(running, "device", lambda: str(device))
    code = main(["parity", str(tmp_path), "--tokens", "8", "--forward-only"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "FourBits" not in out and "parity passed: 8 of 8 rows hold" in out
    weights = load_file(tmp_path / WHOLE)
    del weights["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(weights, tmp_path / WHOLE, {"format": "pt"})
    assert "the checkpoint has no model.layers.0.mlp.experts.down_proj_scales" in refusal(tmp_path)


@both_families
def test_a_whole_checkpoint_loads(folder, family):
    for name in (family, f"{family} shards"):
        model, remark = checkpoint.load(str(folder(name)), "cpu")
        good = tiny_model(family).state_dict()
        assert not remark and not model.training
        assert all(torch.equal(model.state_dict()[key], good[key]) for key in good)


def edited(folder, change):
    """The folder after `change` of its tensors by name."""
    tensors = load_file(folder / WHOLE)
    change(tensors)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    return folder


def test_weights_that_are_missing(folder):
    gone = "model.layers.1.self_attn.q_proj.weight"
    said = refusal(edited(folder(), lambda t: t.pop(gone)))
    assert "random weights would prove nothing: it lacks " + gone in said
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert "experts" in refusal(edited(folder(), lambda t: t.pop(gone)))
    bad = edited(folder(), lambda t: [t.pop(key) for key in list(t) if "self_attn" in key])
    assert "and 9 more" in refusal(bad)


def test_weights_of_another_shape(folder):
    def change(tensors):
        tensors["lm_head.weight"] = torch.zeros(3, 64)

    said = refusal(edited(folder(), change))
    assert "lm_head.weight is [3, 64] and the model's [128, 64]" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder, value):
    def change(tensors):
        tensors["model.layers.0.mlp.gate.weight"][0, 0] = value

    said = refusal(edited(folder(), change))
    assert "NaN or infinite: model.layers.0.mlp.gate.weight" in said


def test_where_nothing_can_be_checked_there_is_no_answer(folder, command):
    bad = folder()
    config = json.loads((bad / "config.json").read_text()) | {"num_experts_per_tok": 99}
    (bad / "config.json").write_text(json.dumps(config))
    code, out, err = command(bad)
    assert code == 2 and "top_k is 99" in out and err.startswith("moe_patch: nothing was checked")


def test_weights_too_many_are_told(folder, command):
    code, out, _ = command(edited(folder(), lambda t: t.update(extra=torch.zeros(3))))
    assert code == 0 and "not checked: weights of" in out and "no place for them: extra" in out


class Evil:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_pickles_are_not_executed(folder, tmp_path):
    bad = folder()
    tensors = load_file(bad / WHOLE)
    (bad / WHOLE).unlink()
    torch.save(tensors, bad / "pytorch_model.bin")
    assert checkpoint.load(str(bad), "cpu")[1] == ""
    file = str(tmp_path / "executed")
    for protocol in (2, 4):
        torch.save(
            {**tensors, "x": Evil(file)}, bad / "pytorch_model.bin", pickle_protocol=protocol
        )
        assert "holds more than tensors" in refusal(bad)
        (bad / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(file), protocol))
        assert "holds more than tensors" in refusal(bad)
    assert not os.path.exists(file)
    (bad / "pytorch_model.bin").write_bytes(b"garbage")
    refusal(bad)


def test_code_of_a_checkpoint_is_not_executed_nor_asked_about(folder, tmp_path):
    bad = folder()
    config = json.loads((bad / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C"}}
    (bad / "config.json").write_text(json.dumps(config))
    (bad / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'executed')!r})")
    refusal(bad)
    assert not (tmp_path / "executed").exists()


def test_folders_without_a_checkpoint(folder, tmp_path):
    empty = folder()
    (empty / WHOLE).unlink()
    assert "no weights" in refusal(empty)
    (empty / "config.json").write_text('{"model_type": "no such model"}')
    (empty / WHOLE).write_bytes(b"")
    assert "does not load" in refusal(empty)
    for name in (tmp_path / "config.json", tmp_path / ("x" * 300)):
        assert "no checkpoint in" in refusal(name)


def test_what_transformers_says_is_left_as_it_was(folder):
    logging.set_verbosity_info()
    logging.enable_progress_bar()  # an example may have switched it off in this process
    try:
        checkpoint.load(str(folder()), "cpu")
        refusal(edited(folder(), lambda t: t.pop("lm_head.weight")))
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


@pytest.mark.parametrize("corrupt", [truncate, flip, drop, garbage, cut_json])
def test_the_command_answers_in_one_line(folder, command, corrupt):
    bad = folder("qwen3_moe shards")
    corrupt(bad, random.Random(corrupt.__name__))
    code, out, err = command(bad)
    assert code == 2 and not out and err.count("\n") == 1, err
    assert err.startswith("moe_patch: ") and str(bad) in err


def test_a_model_without_experts(command, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    code, out, err = command(tmp_path)
    assert code == 2 and not out and "LlamaForCausalLM has no MoE block" in err
