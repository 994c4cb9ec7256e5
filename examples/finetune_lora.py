"""Fine-tunes with LoRA on attention and on every expert: PEFT, transformers' Trainer, moe_patch.

PEFT puts adapters on the experts' own parameters (`target_parameters`) and, left alone, forms the
adapted weights of all experts at every step. Patched after `get_peft_model`, the experts compute
with the two factors instead, so nothing of the weights' size is made. The text is the Python
standard library's own source. Without a folder a small Qwen3-MoE of random weights is trained on
its bytes. Checked, with exit code 1 if it does not hold: the loss goes down, and the saved adapter,
loaded into the model again, gives the same loss. Without a GPU the kernels run in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import moe_patch
from moe_patch.shapes import Shape, build_model


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; a GPU gets a larger model by default."""
    big = DEVICE == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, help="a local checkpoint with its tokenizer")
    add("--steps", type=int, default=200 if big else 8)
    add("--batch", type=int, default=8 if big else 4)
    add("--length", type=int, default=512 if big else 16, help="tokens of each sequence")
    add("--rank", type=int, default=16 if big else 4)
    add("--lr", type=float, default=2e-3 if big else 2e-2)
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add("--unpatched", action="store_true", help="PEFT's own way, to compare")
    add("--out", type=Path, default=Path("out/finetune_lora"), help="where the adapter goes")
    return parser.parse_args(arguments)


def load(folder: Path | None) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model, and the text as token ids [N]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if folder is None:
        small = Shape("qwen3_moe", 64, 32, 4, 2, std=0.1)
        large = Shape("qwen3_moe", 512, 256, 32, 4, std=0.05)
        model = build_model(large if DEVICE == "cuda" else small, layers=2, device=DEVICE)
        return model, torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype="auto", device_map=DEVICE
    )
    ids = tokenizer(text[: 1 << 20].decode(errors="ignore"))["input_ids"]
    return model, torch.tensor(ids)


def adapters(model: PreTrainedModel, rank: int) -> LoraConfig:
    """LoRA on attention and on the experts' stacked weights, wherever the model keeps them."""
    experts = {
        ".".join(name.split(".")[-3:])
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))
    }
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,  # PEFT allows none on parameters
        target_modules=["q_proj", "v_proj"],
        target_parameters=sorted(experts),
    )


class Windows(torch.utils.data.Dataset):
    """Random windows of the text; the labels are the text itself."""

    def __init__(self, ids: torch.Tensor, length: int, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(ids) - length, (count,), generator=draw)
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self.ids[self.starts[i] : self.starts[i] + self.length].long()
        return {"input_ids": window, "labels": window}


def loss_of(model: torch.nn.Module, data: Windows) -> float:
    """Mean loss of the first windows, without gradients."""
    model.eval()
    batch = torch.stack([data[i]["input_ids"] for i in range(min(4, len(data)))]).to(DEVICE)
    with torch.no_grad():
        return model(input_ids=batch, labels=batch).loss.item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the loss went down and the saved adapter gives it again."""
    options = parse(arguments)
    torch.manual_seed(0)
    base, ids = load(options.folder)
    untouched = copy.deepcopy(base) if options.folder is None else None
    data = Windows(ids, options.length, options.steps * options.batch)
    model = get_peft_model(base, adapters(base, options.rank))
    model.print_trainable_parameters()
    if not options.unpatched:
        print(moe_patch.patch(model))  # after the adapters, so that it sees them
    before = loss_of(model, data)
    trainer = Trainer(
        model=model,
        train_dataset=data,
        args=TrainingArguments(
            output_dir=str(options.out),
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=options.lr,
            gradient_checkpointing=options.checkpointing,
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to=[],
            use_cpu=DEVICE == "cpu",
            seed=0,
        ),
    )
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    trainer.train()
    took = time.perf_counter() - begin
    after = loss_of(model, data)
    model.save_pretrained(options.out)
    fresh = load(options.folder)[0] if untouched is None else untouched
    again = PeftModel.from_pretrained(fresh, options.out)
    if not options.unpatched:
        moe_patch.patch(again)
    reloaded = loss_of(again.to(DEVICE), data)
    tokens = options.steps * options.batch * options.length
    print(f"loss {before:.3f} -> {after:.3f}, of the saved adapter {reloaded:.3f}")
    print(f"{tokens / took:,.0f} tokens/s, {took:.1f} s", end="")
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    print(f", {peak:.1f} GiB at most" if peak else "")
    holds = after < before and abs(reloaded - after) < 1e-3 * abs(after)
    print(f"the adapter in {options.out} holds" if holds else "NO: that does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
