"""Trains a Qwen3-MoE of random weights on several GPUs, patched, and goes on from a checkpoint.

    torchrun --nproc-per-node 2 examples/train_distributed.py --engine fsdp
    torchrun --nproc-per-node 2 examples/train_distributed.py --engine ep
    accelerate launch --num_processes 2 examples/train_distributed.py --engine both

fsdp   every layer's weights are spread over the ranks and gathered when it runs (fully_shard)
ep     every rank has a share of the experts and all of the rest (transformers' expert parallelism)
both   experts as with ep, all weights spread as with fsdp; --ep-size ranks share the experts

The text is the Python standard library's own source, byte by byte; nothing is downloaded. Batches
follow from the step, so a run that stops can be repeated with --resume and gives the same losses.
Prints loss and tokens a second. Without a GPU the kernels run in Triton's interpreter (gloo).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton
    torch.set_num_threads(1)

from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

import moe_patch
from moe_patch.shapes import Shape, build_model

BOTH_IN_ONE = hasattr(DistributedConfig, "efsdp_size")  # transformers with `ep_size`


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; a GPU gets a larger model by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=("fsdp", "ep", "both"), default="fsdp")
    add("--ep-size", type=int, help="ranks that share the experts; default: all")
    add("--steps", type=int, default=100 if ON_GPU else 6)
    add("--hidden", type=int, default=1024 if ON_GPU else 32, help="hidden size")
    add("--intermediate", type=int, default=512 if ON_GPU else 16, help="of each expert")
    add("--experts", type=int, default=64 if ON_GPU else 4)
    add("--top-k", type=int, default=8 if ON_GPU else 2)
    add("--layers", type=int, default=8 if ON_GPU else 1)
    add("--batch", type=int, default=8 if ON_GPU else 1, help="sequences of a rank")
    add("--length", type=int, default=1024 if ON_GPU else 8, help="bytes of each sequence")
    add("--lr", type=float, default=3e-4)
    add("--unpatched", action="store_true", help="Hugging Face's own code, to compare")
    add("--out", type=Path, default=Path("out/train_distributed"), help="model and checkpoints")
    add("--save-every", type=int, default=0, metavar="STEPS", help="write checkpoints")
    add("--resume", action="store_true", help="from the last checkpoint in --out")
    add("--json", type=Path, help="write the losses {step: loss} of this run there")
    return parser.parse_args(arguments)


def device() -> torch.device:
    """This rank's."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Joins the other ranks that torchrun or accelerate started."""
    if "RANK" not in os.environ:
        raise SystemExit(f"start it with torchrun --nproc-per-node 2 {sys.argv[0]} ...")
    if ON_GPU:
        torch.cuda.set_device(device())
    backend = "nccl" if ON_GPU else "gloo"
    distributed.init_process_group(backend, device_id=device() if ON_GPU else None)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def start(options: argparse.Namespace) -> Path:
    """The folder of a model with random weights, which the first rank writes."""
    folder = options.out / "model"
    if distributed.get_rank() == 0 and not (options.resume and folder.is_dir()):
        sizes = (options.hidden, options.intermediate, options.experts, options.top_k)
        heads = 8  # which transformers 5.23 spreads over the ranks of expert parallelism, too
        model = build_model(
            Shape("qwen3_moe", *sizes), layers=options.layers, heads=heads, kv_heads=heads
        )
        model.save_pretrained(folder)
    distributed.barrier()
    return folder


def load(options: argparse.Namespace, folder: Path) -> tuple[nn.Module, int, int]:
    """(the model under its engine; which batch this rank takes; of how many at once)."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    shared = options.ep_size or world
    half = torch.bfloat16 if ON_GPU else torch.float32

    def read(dtype: torch.dtype, plan: DistributedConfig | None, **more: object) -> nn.Module:
        more |= {"device_map": device()} if plan is None else {"distributed_config": plan}
        return AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, **more
        )

    if options.engine == "ep":  # all ranks see the same batch
        new = {"ep_size": world} if BOTH_IN_ONE else {"enable_expert_parallel": True}
        return read(half, DistributedConfig(tp_size=world, tp_plan="auto", **new)), 0, 1
    if options.engine == "fsdp":
        model = read(torch.float32, None)
        shard(model, None, half)
        return model, rank, world
    if BOTH_IN_ONE:  # tokens travel to the ranks of their experts: every rank has its own batch
        plan = DistributedConfig(fsdp_size=world, ep_size=shared, fsdp_mixed_precision=ON_GPU)
        return read(torch.float32, plan), rank, world
    if world % shared:
        raise SystemExit(f"--ep-size {shared} does not divide {world} ranks")
    sizes = (world // shared, shared)
    mesh = distributed.init_device_mesh(device().type, sizes, mesh_dim_names=("dp", "tp"))
    plan = DistributedConfig(
        tp_size=shared, fsdp_size=world // shared, tp_plan="auto", enable_expert_parallel=True
    )
    model = read(torch.float32, plan, device_mesh=mesh)
    shard(model, mesh["dp"], half)
    return model, rank // shared, world // shared


def shard(model: nn.Module, mesh: distributed.DeviceMesh | None, dtype: torch.dtype) -> None:
    """FSDP2: float32 shards, layers gathered in `dtype`, gradients reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def standard_library() -> torch.Tensor:
    """The source of the standard library's top-level modules, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: torch.Tensor, options: argparse.Namespace, step: int, part: int) -> torch.Tensor:
    """[batch, length] of bytes, of this step and this part of the ranks."""
    generator = torch.Generator().manual_seed(1_000_003 * step + part)
    starts = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
    return text[starts + torch.arange(options.length)].long().to(device())


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; shards and whole weights in groups of their own, which it cannot mix in one step."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=lr)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its shards; a checkpoint that was cut short has no metadata."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    checkpoint.save(state, checkpoint_id=folder)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads what `save` wrote, also with another number of ranks."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def last_checkpoint(out: Path) -> tuple[int, Path | None]:
    """(steps that are done, its folder)."""
    found = [p.parent for p in out.glob("step-*/.metadata")]
    steps = {int(folder.name.split("-")[1]): folder for folder in found}
    return max(steps.items(), default=(0, None), key=lambda item: item[0])


def train(options: argparse.Namespace, progress: Progress) -> dict[int, float]:
    """{step: loss}, mean of all ranks."""
    first = distributed.get_rank() == 0
    model, part, parts = load(options, start(options))
    if not options.unpatched:
        report = moe_patch.patch(model)
        if first:
            progress.console.print(str(report), markup=False)
    optimizer = optimizer_of(model, options.lr)
    done, folder = last_checkpoint(options.out) if options.resume else (0, None)
    if folder is not None:
        restore(folder, model, optimizer)
    text, losses = standard_library(), {}
    tokens = options.batch * options.length * parts
    task = progress.add_task(options.engine, total=options.steps, completed=done, note="")
    begin = time.perf_counter()
    for step in range(done, options.steps):
        ids = batch(text, options, step, part)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().float()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        distributed.all_reduce(loss)
        losses[step] = loss.item() / distributed.get_world_size()
        if step == done:
            begin = time.perf_counter()  # the first step compiles
        rate = tokens * (step - done) / max(time.perf_counter() - begin, 1e-9)
        note = f"loss {losses[step]:.4f}, {rate:,.0f} tokens/s"
        progress.update(task, advance=1, note=note)
        if options.save_every and (step + 1) % options.save_every == 0:
            save(options.out / f"step-{step + 1}", model, optimizer)
    if first and losses:
        progress.console.print(f"{options.engine}, step {max(losses)}: {note}", markup=False)
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all steps were done."""
    options = parse(arguments)
    disable_progress_bar()  # transformers' own
    with process_group():
        first = distributed.get_rank() == 0
        columns = *Progress.get_default_columns(), TextColumn("{task.fields[note]}")
        with Progress(*columns, console=Console(quiet=not first)) as progress:
            losses = train(options, progress)
        if first and options.json:
            options.json.write_text(json.dumps(losses))
        distributed.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
