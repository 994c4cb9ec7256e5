"""Trains small Qwen3-MoE and Llama4 models twice, with Hugging Face's MoE blocks and patched.

The text is the Python standard library's own source, byte by byte; both runs start from the same
weights, see the same batches and compute in float32. Checked, with exit code 1 if it does not hold:
the two loss curves stay within --bound of each other and go down; then the patched model is saved,
loaded again with `moe_patch.enabled()`, and greedy generation gives the same text patched and not.
Writes one picture of the curves. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import moe_patch
from moe_patch.shapes import Shape, build_model

FAMILIES = {"qwen3_moe": "Qwen3-MoE", "llama4": "Llama4"}


@dataclass
class Result:
    """Of one family."""

    family: str
    hf: list[float]
    patched: list[float]
    text: str
    same_text: bool

    @property
    def difference(self) -> float:
        """The largest distance between the two curves."""
        return max(abs(a - b) for a, b in zip(self.hf, self.patched))

    def holds(self, bound: float) -> bool:
        """Whether the curves agree and go down, and the text is the same."""
        part = max(1, len(self.hf) // 4)
        down = all(sum(c[-part:]) < sum(c[:part]) for c in (self.hf, self.patched))
        return self.difference <= bound and down and self.same_text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; a GPU gets a larger model by default."""
    big = DEVICE == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    add("--steps", type=int, default=300 if big else 20)
    add("--hidden", type=int, default=256 if big else 64, help="hidden size")
    add("--intermediate", type=int, default=128 if big else 32, help="of each expert")
    add("--experts", type=int, default=32 if big else 4)
    add("--top-k", type=int, default=4 if big else 2, help="Qwen3-MoE's; Llama4 takes 1")
    add("--layers", type=int, default=4 if big else 2)
    add("--batch", type=int, default=16 if big else 4)
    add("--length", type=int, default=256 if big else 32, help="bytes of each sequence")
    add("--lr", type=float, default=5e-3)
    add("--seed", type=int, default=0)
    bound = 0.05 if big else 1e-3  # rounding grows with every step, and flips near-ties
    add("--bound", type=float, default=bound, help="on the distance between the curves, in nats")
    add("--new-tokens", type=int, default=64 if big else 24, help="bytes to generate")
    add("--out", type=Path, default=Path("out/train_tiny.png"), help="the picture")
    return parser.parse_args(arguments)


def standard_library() -> torch.Tensor:
    """The source of the standard library's top-level modules, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(text: torch.Tensor, options: argparse.Namespace) -> list[torch.Tensor]:
    """[batch, length] of bytes for every step."""
    generator = torch.Generator().manual_seed(options.seed)
    size = (options.steps, options.batch, 1)
    starts = torch.randint(len(text) - options.length, size, generator=generator)
    return list(text[starts + torch.arange(options.length)].long())


def train(
    model: PreTrainedModel, data: list[torch.Tensor], lr: float, progress: Progress, task: int
) -> list[float]:
    """The loss of every step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in data:
        batch = batch.to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.update(task, advance=1)
    model.eval()
    return losses


def generate(model: PreTrainedModel, prompt: str, new_tokens: int) -> str:
    """Greedy continuation of `prompt`, which comes first; no three bytes come twice.

    Without that rule so small a model writes spaces only, and equal text would mean little.
    """
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        no_repeat_ngram_size=3,
        pad_token_id=0,
    )
    return bytes(out[0].tolist()).decode(errors="replace")


def run(family: str, options: argparse.Namespace, progress: Progress) -> Result:
    """Trains one family both ways, then saves, loads and generates."""
    top_k = 1 if family == "llama4" else options.top_k
    shape = Shape(family, options.hidden, options.intermediate, options.experts, top_k, std=0.02)
    data = batches(standard_library(), options)
    curves = {}
    for way in ("Hugging Face", "moe_patch"):
        model = build_model(shape, layers=options.layers, device=DEVICE, seed=options.seed)
        if way == "moe_patch":
            progress.console.print(str(model.patch()), markup=False)
        task = progress.add_task(f"{FAMILIES[family]}, {way}", total=len(data))
        curves[way] = train(model, data, options.lr, progress, task)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with moe_patch.enabled():
            loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    loaded.to(DEVICE)
    patched = generate(loaded, "import ", options.new_tokens)
    loaded.unpatch()
    unpatched = generate(loaded, "import ", options.new_tokens)
    return Result(family, *curves.values(), text=patched, same_text=patched == unpatched)


def plot(results: Sequence[Result], path: Path) -> None:
    """The curves, and the distance between them on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(results), figsize=(5 * len(results), 5), sharex=True, squeeze=False,
        height_ratios=(2, 1), layout="constrained",
    )  # fmt: skip
    for result, (top, bottom) in zip(results, axes.T):
        top.plot(result.hf, label="Hugging Face", linewidth=3, alpha=0.5)
        top.plot(result.patched, label="moe_patch", linestyle="--", color="black")
        top.set(title=FAMILIES[result.family], ylabel="loss, nats per byte")
        top.legend()
        bottom.semilogy([max(abs(a - b), 1e-8) for a, b in zip(result.hf, result.patched)])
        bottom.set(xlabel="step", ylabel="distance")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when everything holds, else 1."""
    options = parse(arguments)
    console = Console()
    disable_progress_bar()  # transformers' own
    with Progress(console=console) as progress:
        results = [run(family, options, progress) for family in options.family]
    plot(results, options.out)
    table = Table("", "first loss", "last, HF", "last, moe_patch", "distance", "same text", "holds")
    for r in results:
        losses = (f"{loss:.4f}" for loss in (r.hf[0], r.hf[-1], r.patched[-1]))
        answers = ("yes" if yes else "NO" for yes in (r.same_text, r.holds(options.bound)))
        table.add_row(FAMILIES[r.family], *losses, f"{r.difference:.1e}", *answers)
    console.print(table)
    for r in results:
        console.print(f"{FAMILIES[r.family]} writes: {r.text!r}", markup=False)
    console.print(f"curves within {options.bound} nats asked for; picture: {options.out}")
    return 0 if all(r.holds(options.bound) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
