"""Trains two copies of a tiny model with Trainer under DeepSpeed's ZeRO-3, the second one patched.

One rank, on the CPU. The last line is JSON: {"plain": [losses, fused calls], "patched": ...}.
A process of its own, because DeepSpeed and accelerate keep what they were started with.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from tiny import tiny_model, tokens
from torch.distributed import TCPStore
from transformers import Trainer, TrainingArguments
from zero3 import compile_no_collectives

import moe_patch
from moe_patch.models import decorated

STEPS = 2
SETTINGS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def train(model: torch.nn.Module, folder: str) -> list[float]:
    """The loss of every step."""
    options = TrainingArguments(
        folder,
        deepspeed=SETTINGS,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens("cpu", 2, 6)]
    trainer = Trainer(model, options, train_dataset=rows)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    compile_no_collectives()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    calls, results = [], {}
    fused_experts = decorated.fused_experts
    decorated.fused_experts = lambda *args, **more: calls.append(1) or fused_experts(*args, **more)
    # both before DeepSpeed's settings are known: later models would be drawn in shards
    models = {name: tiny_model("qwen3_moe", num_hidden_layers=1) for name in ("plain", "patched")}
    moe_patch.patch(models["patched"])
    for name, model in models.items():
        results[name] = [train(model, folder), len(calls)]
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
