"""Fine-tunes a model whose experts are in 4 bits (QLoRA): PEFT, transformers' Trainer, moe_patch.

The experts are quantised while the model loads (`ExpertsQuantConfig`), adapters go on the linear
layers of attention and on the experts' own parameters (`target_parameters`), and activations are
computed again in the backward pass (gradient checkpointing). Patched, the experts run on the 4-bit
weights and never write them out. The text is a local file or folder, by default this repository's
documentation; without a model a small Qwen3-MoE of random weights learns its bytes. With --linear
bitsandbytes quantises the linear layers too. Checked, with exit code 1 if it does not hold: the
loss goes down, and the 4-bit weights are the bits that they were before. Without a GPU the kernels
run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import moe_patch
from moe_patch.shapes import Shape, build_model

DOCS = Path(__file__).resolve().parent.parent / "docs"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; a GPU gets a larger model by default."""
    big = DEVICE == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="a local checkpoint with its tokenizer, in 16 or 4 bits")
    add("--text", type=Path, default=DOCS, help="a file, or a folder whose *.md and *.txt are read")
    add("--format", help="nf4, mxfp4 or int4; nf4, or what a checkpoint in 4 bits has")
    add("--linear", action="store_true", help="linear layers in 4 bits too, by bitsandbytes")
    add("--steps", type=int, default=200 if big else 8)
    add("--batch", type=int, default=4 if big else 2)
    add("--length", type=int, default=512 if big else 16, help="tokens of each sequence")
    add("--rank", type=int, default=16 if big else 4)
    add("--lr", type=float, default=2e-4 if big else 2e-2)
    add("--out", type=Path, default=Path("out/finetune_qlora"), help="where the adapter goes")
    return parser.parse_args(arguments)


def load(options: argparse.Namespace, folder: Path) -> PreTrainedModel:
    """The model of a checkpoint, its experts in 4 bits."""
    linear = None
    if options.linear:
        linear = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=moe_patch.ExpertsQuantConfig(options.format, linear=linear),
        dtype="auto",
        device_map=DEVICE,
        local_files_only=True,
    )


def small_checkpoint(folder: str) -> Path:
    """Writes a small Qwen3-MoE of random weights, which knows 256 tokens: bytes."""
    small = Shape("qwen3_moe", 64, 64, 4, 2, std=0.1)
    large = Shape("qwen3_moe", 512, 256, 32, 4, std=0.05)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shape = large if DEVICE == "cuda" else small
    build_model(shape, layers=2, dtype=dtype).save_pretrained(folder)
    return Path(folder)


def read(path: Path) -> bytes:
    """The text of a file, or of a folder's files in the order of their names."""
    files = [path]
    if path.is_dir():
        files = sorted([*path.rglob("*.md"), *path.rglob("*.txt")])
    text = b"\n".join(file.read_bytes() for file in files if file.is_file())
    if not text:
        raise SystemExit(f"{path} has no text: pass --text a file, or a folder of *.md or *.txt.")
    return text


def tokens_of(text: bytes, model: Path | None) -> torch.Tensor:
    """Token ids [N]: a checkpoint's own, or bytes."""
    if model is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return torch.tensor(tokenizer(text.decode(errors="ignore"))["input_ids"])


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
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=sorted(experts),
    )


class Windows(torch.utils.data.Dataset):
    """Random windows of the text; the labels are the text itself."""

    def __init__(self, ids: torch.Tensor, length: int, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.starts = torch.randint(max(1, len(ids) - length), (count,), generator=draw)
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self.ids[self.starts[i] : self.starts[i] + self.length].long()
        return {"input_ids": window, "labels": window}


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights that are not floats: of codes."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}


def loss_of(model: torch.nn.Module, data: Windows) -> float:
    """Mean loss of the first windows, without gradients."""
    model.eval()
    batch = torch.stack([data[i]["input_ids"] for i in range(min(4, len(data)))]).to(DEVICE)
    with torch.no_grad():
        return model(input_ids=batch, labels=batch).loss.item()


def peak() -> str:
    """The most memory that was used: the GPU's, or the process's."""
    if DEVICE == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of the GPU"
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, and bytes on macOS
    return f"{used / 2 ** (30 if sys.platform == 'darwin' else 20):.2f} GiB of the process"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the loss went down and the 4-bit weights are as they were."""
    options = parse(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        base = load(options, options.model or small_checkpoint(scratch))
    ids = tokens_of(read(options.text), options.model)
    data = Windows(ids, options.length, options.steps * options.batch)
    model = get_peft_model(base, adapters(base, options.rank))
    model.print_trainable_parameters()
    print(moe_patch.patch(model))  # after the adapters, so that it sees them
    weights, before = frozen(model), loss_of(model, data)
    trainer = Trainer(
        model=model,
        train_dataset=data,
        args=TrainingArguments(
            output_dir=str(options.out),
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=options.lr,
            gradient_checkpointing=True,
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to=[],
            use_cpu=DEVICE == "cpu",
            seed=0,
        ),
    )
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    after = loss_of(model, data)
    model.save_pretrained(options.out)
    print(f"loss {before:.3f} -> {after:.3f}, at most {peak()}")
    now = dict(model.named_parameters())
    same = bool(weights) and all(torch.equal(now[name], w) for name, w in weights.items())
    holds = after < before and same
    print(f"the adapter is in {options.out}" if holds else "NO: that does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
