"""expert_load: counts against the routing itself, balance, the Trainer's callback, the command."""

from __future__ import annotations

import json

import families
import pytest
import torch
from tiny import both_families, tiny_model, tokenizer, tokens
from transformers import Trainer, TrainingArguments
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from moe_patch import expert_load, record_routing
from moe_patch.__main__ import main
from moe_patch.routing import load as load_module


@both_families
def test_counts_and_weights_are_the_routings(family, device, monkeypatch):
    """Padding apart; a whole forward's at once, or a layer's."""
    model, ids = tiny_model(family, device), tokens(device, 2, 7)
    model.patch()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with expert_load(model) as load, record_routing(model, weights=True) as routing:
        model(ids, attention_mask=mask)
        monkeypatch.setattr(load_module, "_PENDING", 1)
        model(ids, attention_mask=mask)
    index = routing.packed().top_k_index.long()
    weights = routing.packed().top_k_weights.double()
    assert len(index) == 22 and load.layers == list(routing.layers)
    for at in range(2):
        chosen = index[:, at].flatten()
        counts = torch.bincount(chosen, minlength=8)
        assert torch.equal(load.counts[at], counts)
        sums = torch.zeros(8, dtype=torch.float64, device=device)
        sums.scatter_add_(0, chosen, weights[:, at].detach().flatten())
        torch.testing.assert_close(load.mean_weights[at], sums / counts, equal_nan=True)
        assert float(load.imbalance[at]) == pytest.approx(int(counts.max()) / (44 / 8))
        assert int(load.dead[at]) == int((counts == 0).sum())
    assert load.dropped.tolist() == [0, 0]


def test_entropy_is_one_where_all_are_alike_and_zero_where_one_has_all(device):
    model = tiny_model("qwen3_moe", device)
    load = expert_load(model)
    counted = load._sums(0)
    counted[0, :8], counted[1, 3] = 5, 7
    torch.testing.assert_close(load.entropy.cpu(), torch.tensor([1.0, 0.0]).double())
    assert load.imbalance.tolist() == [1, 8] and load.dead.tolist() == [0, 7]


def test_checkpointing_counts_once_and_start_stop_reset(device):
    model, ids = tiny_model("qwen3_moe", device).train(), tokens(device, 1, 6)
    model.gradient_checkpointing_enable()
    load = expert_load(model).start()
    with pytest.raises(ValueError, match="the model is being counted already"):
        expert_load(model).start()
    model(ids, labels=ids).loss.backward()
    load.stop()
    model(ids)
    assert load.counts.sum(1).tolist() == [12, 12]
    load.reset()
    assert not load.counts.any() and bool(load.mean_weights.isnan().all())
    load.stop()


def test_the_balance_loss_is_transformers(device):
    model, ids = tiny_model("qwen3_moe", device), tokens(device, 2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    model.patch()
    with expert_load(model, keep_logits=True) as load:
        out = model(ids, attention_mask=mask, output_router_logits=True)
        ours = load.aux_loss()
    theirs = load_balancing_loss_func(out.router_logits, 8, 2, mask)
    torch.testing.assert_close(ours, theirs)
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    for mine, other in zip(
        torch.autograd.grad(ours, gates, retain_graph=True), torch.autograd.grad(theirs, gates)
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)
        assert mine.abs().max() > 0
    with pytest.raises(ValueError, match="no router logits to balance: pass keep_logits=True"):
        load.aux_loss()
    with expert_load(model, keep_logits=True) as load, pytest.raises(ValueError, match="'tanh'"):
        model(ids)
        load.aux_loss(score="tanh")


def test_the_bias_of_deepseek_evens_out_the_load(device):
    model = families.build("deepseek_v3", device, n_group=1, topk_group=1)
    ids = tokens(device, 4, 16) % 30
    gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    assert gates
    for gate in gates:
        gate.e_score_correction_bias.copy_(torch.linspace(0.2, -0.2, 8))
    seen = []
    with expert_load(model) as load, torch.no_grad():
        for _ in range(30):
            model(ids, use_cache=False)
            assert load.counts.sum() == len(gates) * ids.numel() * gates[0].top_k
            seen.append(float(load.imbalance.mean()))
            load.update_bias(speed=0.01)
            assert not load.counts.any()
    assert seen[0] > 3 and sum(seen[-5:]) / 5 < 2, seen


def test_what_balance_needs(device):
    model, ids = tiny_model("qwen3_moe", device), tokens(device)
    with expert_load(model) as load:
        with pytest.raises(ValueError, match="nothing was counted: run a forward"):
            load.update_bias()
        model(ids)
        with pytest.raises(ValueError, match="has e_score_correction_bias: balance it by"):
            load.update_bias()
    with pytest.raises(RuntimeError, match="all_reduce needs torch.distributed"):
        load.all_reduce()


def test_the_trainer_logs_it(device, tmp_path):
    model = tiny_model("qwen3_moe", device)
    model.patch()
    rows = [{"input_ids": row, "labels": row} for row in tokens(device, 8, 6).cpu()]
    load = expert_load(model)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, report_to=[], save_strategy="no",
        per_device_train_batch_size=4, disable_tqdm=True, gradient_checkpointing=True,
        use_cpu=torch.device(device).type == "cpu",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[load.callback()])
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    for log in logs:
        assert log["moe/imbalance"] >= 1 and 0 < log["moe/entropy"] <= 1
        assert log["moe/dropped"] == 0 and isinstance(log["moe/dead_experts"], int)
    assert not any(m._forward_pre_hooks for m in model.modules())


# The command


@pytest.fixture
def checkpoint(tmp_path):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    tiny_model("qwen3_moe").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    text.write_text(" ".join(f"w{i % 100 + 2}" for i in range(50)))
    return folder, text


def test_the_command_counts_draws_and_writes(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (folder, text), png, file = checkpoint, tmp_path / "load.png", tmp_path / "load.json"
    arguments = ["--text", str(text), "--tokens", "40", "--length", "16"]
    code = main(["load", str(folder), *arguments, "--png", str(png), "--json", str(file)])
    out, _ = capsys.readouterr()
    assert code == 0 and "model.layers.1.mlp" in out and f"40 tokens of {text}" in out
    assert png.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(file.read_text())
    assert found["tokens"] == 40 and found["experts"] == 8
    assert [sum(layer["counts"]) for layer in found["layers"]] == [80, 80]
    assert main(["load", str(folder), *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda folder, text: text.unlink(), "is no file: name a text in UTF-8"),
        (lambda folder, text: text.write_bytes(b"\xff\xfe\xff"), "is no UTF-8"),
        (lambda folder, text: text.write_text(""), "has no tokens"),
        (lambda folder, text: (folder / "config.json").unlink(), "no checkpoint in"),
        (
            lambda folder, text: [f.unlink() for f in folder.glob("tokenizer*")],
            "has no tokenizer: save the model's there",
        ),
    ],
    ids=("no text", "bytes", "empty", "no model", "no tokenizer"),
)
def test_the_command_refuses(checkpoint, capsys, change, says):
    folder, text = checkpoint
    change(folder, text)
    assert main(["load", str(folder), "--text", str(text)]) == 2
    out, err = capsys.readouterr()
    assert not out and says in err and len(err.strip().splitlines()) == 1
