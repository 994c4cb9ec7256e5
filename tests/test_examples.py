"""Every example runs, small, and says what it is for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import honest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_patch import switch
from moe_patch.shapes import Shape, build_model

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
SMALL = "--steps 5 --length 8 --batch 2 --hidden 32 --intermediate 16 --layers 1 --new-tokens 3"


def load(name):
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RUN_BELOW = {
    "check_parity", "finetune_lora", "finetune_qlora", "patch_and_generate", "rl_replay",
    "train_tiny",
}  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.gpu if path.stem in RUN_BELOW else ())
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_runs_as_a_script(path):
    ran = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "usage:" in ran.stdout


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_help_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        load(name).main(["--help"])
    out = capsys.readouterr().out
    assert not ended.value.code and "usage:" in out and len(out) > 300


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_train_tiny_with_real_kernels(family, tmp_path, capsys):
    """Curves agree, loss goes down, and the saved model writes the same text both ways."""
    picture = tmp_path / "out" / "curves.png"
    code = load("train_tiny").main([*SMALL.split(), "--family", family, "--out", str(picture)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "fused 1 of 1 MoE blocks" in out and "the same text" in out
    assert out.count("Shown: patched models learn") == 1 and "Not shown" not in out
    table = [line for line in out.splitlines() if line[:1] in set("\u250f\u2503\u2521\u2502\u2514")]
    assert table and max(map(len, table)) <= 80 and "\u2026" not in "".join(table)  # whole
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rl_replay_brings_the_trainer_closer_to_the_rollout(tmp_path, capsys, monkeypatch):
    """Both unpatched where the interpreter cannot round to bfloat16."""
    monkeypatch.setattr(switch, "ENABLED", torch.cuda.is_available())
    line = f"--steps 2 --layers 2 --batch 2 --png {tmp_path / 'kl.png'}"
    assert load("rl_replay").main(line.split()) == 0
    out = capsys.readouterr().out
    ratio = float(re.search(r"without replay is ([\d.]+) times", out)[1])
    assert ratio > 1.5, out
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")


def test_train_tiny_notices_another_curve(use, tmp_path, capsys, monkeypatch):
    """And needs no matplotlib, which `pip install .` does not bring."""
    look = importlib.util.find_spec
    found = {"matplotlib": lambda *_: None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda *name: found.get(name[0], look)(*name))
    use(lambda *args, **on: honest(*args, **on) * 0.9)
    line = f"{SMALL} --bound 1e-4 --family qwen3_moe --out {tmp_path / 'curves.png'}"
    assert load("train_tiny").main(line.split()) == 1
    out = capsys.readouterr().out
    assert "NO" in out and "Not shown: the lines with NO" in out
    assert "pip install matplotlib" in out and not (tmp_path / "curves.png").exists()


def test_train_tiny_smooths_over_the_last_steps():
    smoothed = load("train_tiny").smoothed
    assert smoothed([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    assert smoothed([4.0, 2.0], 1) == [4.0, 2.0]


def test_train_tiny_judges_bound_slope_and_text():
    example = load("train_tiny")

    def result(same_text=True, **curves):
        names = {"truth": example.TRUTH, "theirs": example.THEIRS, "ours": example.OURS}
        curves = {names[name]: seeds for name, seeds in curves.items()}
        return example.Result("llama4", curves, "text", same_text)

    good = result(truth=[[3.0, 2.0]], ours=[[3.0, 2.01]])
    assert good.holds(0.02) and not good.holds(0.001)
    assert not result(truth=[[3.0, 3.1]], ours=[[3.0, 3.1]]).holds(1)
    assert not result(truth=[[3.0, 2.0]], ours=[[3.0, 2.0]], same_text=False).holds(1)

    truth = [[3.0, 2.0]] * 3
    theirs = [[3.1, 2.1], [3.0, 1.9], [3.0, 2.1]]
    far = result(truth=truth, theirs=theirs, ours=[[3.2, 2.2], [3.1, 1.8], [3.1, 2.2]])
    assert far.further() == pytest.approx((0.1, 0.0), abs=1e-9) and not far.holds(1)
    chance = result(truth=truth, theirs=theirs, ours=[[3.0, 2.0], [3.1, 1.8], [3.0, 2.1]])
    assert chance.further() == pytest.approx((0.0, 0.1 / 3**0.5)) and chance.holds(0)
    nearer = result(truth=truth, theirs=theirs, ours=truth)
    assert nearer.holds(0)


def test_train_tiny_reads_the_standard_library():
    example = load("train_tiny")
    text = example.standard_library()
    assert text.dtype == torch.uint8 and len(text) > 1_000_000
    assert b"import " in bytes(text[:10_000].tolist())
    options = example.parse(["--steps", "3", "--batch", "2", "--length", "8"])
    one, two = example.batches(text, options), example.batches(text, options)
    assert [tuple(batch.shape) for batch in one] == [(2, 8)] * 3
    assert all(torch.equal(a, b) for a, b in zip(one, two)) and not torch.equal(one[0], one[1])
    few = example.parse(["--steps", "40", "--length", "8", "--bytes", "10"])
    found = {bytes(row.tolist()) for batch in example.batches(text, few) for row in batch}
    first = bytes(text[:9].tolist())
    assert found == {first[:8], first[1:]}
    with pytest.raises(SystemExit):
        example.parse(["--bytes", "8", "--length", "8"])


def save_letters(folder):
    """Saves a tokenizer of single characters, and counts them."""
    letters = [chr(c) for c in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(folder)
    return len(letters)


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny model with a tokenizer of single characters."""
    letters = save_letters(tmp_path)
    build_model("tiny_llama4", layers=1, vocab_size=letters).save_pretrained(tmp_path)
    return str(tmp_path)


def test_patch_and_generate(use, checkpoint, capsys):
    example = load("patch_and_generate")
    example.DEVICE = "cpu"
    code = example.main(
        [checkpoint, "--prompt", "to be", "--new-tokens", "4", "--dtype", "float32"]
    )
    out = capsys.readouterr().out
    assert code == 0, out
    for text in ("fused 1 of 1", "parity passed", "tokens/s", "the first 4 of 4 greedy tokens"):
        assert text in out
    use(lambda *args, **on: honest(*args, **on) * 0.99)
    line = [checkpoint, "--prompt", "to be", "--new-tokens", "1", "--dtype", "float32"]
    assert example.main(line) == 1
    assert example.main([*line, "--no-parity"]) == 0


def test_patch_and_generate_refuses_what_is_no_checkpoint(tmp_path, capsys):
    assert load("patch_and_generate").main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_check_parity_is_the_command(use, capsys, monkeypatch):
    from moe_patch.commands import running

    monkeypatch.setattr(running, "device", lambda: "cpu")
    example = load("check_parity")
    assert example.main(["--shape", "tiny_qwen3", "--tokens", "64", "--dtype", "fp32"]) == 0
    assert "parity passed" in capsys.readouterr().out
    assert example.main(["--shape", "nothing"]) == 2


@pytest.mark.parametrize(
    "how",
    [pytest.param([], marks=pytest.mark.gpu), ["--unpatched"], ["--checkpointing"]],
    ids=str,
)
def test_finetune_lora(how, tmp_path, capsys):
    """The loss goes down and the saved adapter gives it again, PEFT's way and ours."""
    line = ["--steps", "2", "--length", "8", "--batch", "2", "--out", str(tmp_path / "adapter")]
    code = load("finetune_lora").main([*line, *how])
    out = capsys.readouterr().out
    assert code == 0, out
    assert ("fused 2 of 2 MoE blocks" in out) == (how != ["--unpatched"])
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("text", ["the documentation", "a folder"])
def test_finetune_qlora(text, tmp_path, capsys):
    """The loss goes down, and the experts' 4-bit weights do not change."""
    line = ["--steps", "3", "--length", "8", "--out", str(tmp_path / "adapter")]
    if text == "a folder":
        (tmp_path / "some.txt").write_text("to be or not to be " * 9)
        line += ["--text", str(tmp_path), "--format", "int4"]
        line += ["--model", str(saved_in_bytes(tmp_path / "model"))]
    code = load("finetune_qlora").main(line)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "fused 2 of 2 MoE blocks" in out and "loss " in out and " -> " in out and "GiB" in out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def saved_in_bytes(folder):
    """A checkpoint of a tiny Qwen3-MoE whose tokens are characters."""
    shape = Shape("qwen3_moe", 128, 128, 4, 2, std=0.1)
    build_model(shape, layers=2, vocab_size=save_letters(folder)).save_pretrained(folder)
    return folder


def test_finetune_qlora_needs_text(tmp_path):
    with pytest.raises(SystemExit, match="has no text: pass --text a file"):
        load("finetune_qlora").main(["--text", str(tmp_path)])
