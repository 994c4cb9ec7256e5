"""bench distributed: expert parallelism and FSDP2 on torchrun's ranks, patched or not."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from rich.table import Table
from torch import Tensor, distributed, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from ..parity import ParityReport, Section, check_parity, environment
from ..parity.law import Row, judge
from ..patcher import patch, unpatch
from ..recognise.wrapped import hooked_by_plan, is_dtensor
from ..reference import fused_experts
from ..shapes import Shape, building, find, model_config
from ..usage import add_shape, add_tokens
from .kind import Flags, Run, Timed, add_files, add_layers, check_layers
from .timing import seconds

NEWEST = hasattr(DistributedConfig, "efsdp_size")  # transformers with `ep_size`
TOKENS, LAYERS, ROUNDS = 8192, 2, 3
TASKS = (
    *("ep block forward", "ep block step", "ep forward", "ep step", "tp step", "fsdp step"),
    "fsdp ep step",
    *("all_reduce", "all_to_all", "all_gather"),
)
LENGTH = 2048
"""Tokens of a sequence."""
LOSS_BOUND = 0.01
"""Of the loss: how far patched may be from unpatched. Routers at a tie choose differently."""


@dataclass(frozen=True)
class Measured:
    """Medians of milliseconds, of the slowest rank. Without `hf_ms`: a collective alone."""

    task: str
    shape: str
    transformers: str
    ranks: int
    layers: int
    tokens: int  # of one rank
    ms: float  # patched
    hf_ms: float | None = None
    speedup: float | None = None
    tokens_s: float | None = None  # patched, of all ranks; expert parallel ranks share their tokens
    hf_tokens_s: float | None = None
    loss: float | None = None
    hf_loss: float | None = None
    mb: float | None = None  # that one rank sends in the collective
    gb_s: float | None = None


def measure(
    shape: Shape,
    name: str,
    *,
    tokens: int = TOKENS,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> Iterator[Measured | ParityReport]:
    """Measures on all ranks; each calls it, and gets the same rows.

    Parity is judged first: blocks whole, on one rank, and then under expert parallelism. A report
    that fails is the last thing that comes.

    Args:
        shape: of the blocks, Qwen3-MoE's.
        name: of that shape.
        tokens: of each rank.
        layers: of the model.
        device: of this rank.
    """  # fmt: skip
    folder = _broadcast(tempfile.mkdtemp(prefix="moe_patch-") if _rank() == 0 else None)
    try:
        config = _config(shape, layers)
        with building(dtype, device, seed=0):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        block = model.model.layers[0].mlp
        report = check_parity(block, tokens=min(tokens, 1024))
        if _rank() == 0:
            model.save_pretrained(folder)
        distributed.barrier()
        del model, block
        about = (name, transformers.__version__, distributed.get_world_size())
        bench = _Bench(about, layers, tokens, shape, device, dtype)
        model, _ = bench.load(folder, "ep")
        report += bench.parity(model.model.layers[0].mlp)
        if _any(not report.passed):
            yield report
            return
        yield from bench.expert_parallel(model)
        del model
        for engine in ("tp", "fsdp", "fsdp ep"):
            yield from bench.step(folder, engine)
        yield from bench.collectives()
        distributed.barrier()
    finally:
        if _rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Bench:
    about: tuple[str, str, int]
    layers: int
    tokens: int
    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def load(self, folder: str, engine: str) -> tuple[PreTrainedModel, int]:
        """(the model under tensor or expert parallelism over all ranks, under FSDP2 with layers
        wrapped, or under FSDP2 and expert parallelism; how many ranks have tokens of their own)."""
        world = distributed.get_world_size()
        plan, mesh, own = {"tp_size": world, "tp_plan": "auto"}, None, 1
        how: dict[str, object] = {}
        if engine == "ep":
            plan |= {"ep_size": world} if NEWEST else {"enable_expert_parallel": True}
        elif engine == "fsdp":
            how, own = {"device_map": self.device}, world
        elif engine == "fsdp ep" and NEWEST:
            plan, own = {"fsdp_size": world, "ep_size": world}, world
        elif engine == "fsdp ep":  # pairs of ranks share the experts
            own = world // 2
            plan |= {"tp_size": 2, "fsdp_size": own, "enable_expert_parallel": True}
            mesh = distributed.init_device_mesh(
                self.device.type, (own, 2), mesh_dim_names=("dp", "tp")
            )
            how = {"device_mesh": mesh}
        if engine != "fsdp":
            how |= {"distributed_config": DistributedConfig(**plan)}
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=self.dtype, **how
        )
        if engine == "fsdp" or mesh is not None:
            from torch.distributed.fsdp import fully_shard  # a second, which `env` need not wait

            mesh = None if mesh is None else mesh["dp"]
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model, own

    def parity(self, block: nn.Module) -> ParityReport:
        """The law on a block under expert parallelism, the routing of both fixed to HF's.

        Truth is the twin in float64 on one rank with all weights.
        """
        tokens, hidden = self.tokens, self.shape.hidden_size
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(1, tokens, hidden, generator=draw).to(self.device, self.dtype)
        d_out = torch.randn(1, tokens, hidden, generator=draw).to(self.device, self.dtype)
        routed: list[tuple[Tensor, ...]] = []
        with block.gate.register_forward_hook(lambda *a: routed.append(a[-1])), torch.no_grad():
            block(x)
        _, scores, index = (tensor.detach() for tensor in routed[0][:3])
        local = hooked_by_plan(block.gate)  # ids of this rank's experts, others' masked
        found = []
        for change in (unpatch, patch):
            change(block)
            found.append(self._gradients(block, x, scores, index, d_out))
        theirs, ours = found
        if local:
            here = block.experts.num_experts
            mine = index < here
            index = torch.where(mine, index + here * _rank(), 0)
            for tensor in (index, scores):  # of each slot, the rank that owns the expert
                distributed.all_reduce(tensor)
        truth = self._truth(block, x, scores, index, d_out)
        rms = x.double().square().mean().sqrt().item()
        rows: list[Row] = [
            judge(name, ours[name], [theirs[name]], truth[name], dtype=self.dtype,
                  x_rms=rms if name == "output" else None)
            for name in truth
        ]  # fmt: skip
        unpatch(block)
        section = Section(
            f"{type(block).__name__}, expert parallel", str(self.dtype)[6:], tokens, rows
        )
        return ParityReport([section], environment(self.device), [])

    def _gradients(
        self, block: nn.Module, x: Tensor, scores: Tensor, index: Tensor, d_out: Tensor
    ) -> dict[str, Tensor]:
        x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        for parameter in block.parameters():
            parameter.grad = None
        with block.gate.register_forward_hook(lambda m, a, out: (out[0], scores, index)):
            out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(d_out)
        grads = {name: _whole(getattr(block.experts, name).grad) for name in _WEIGHTS}
        for parameter in block.parameters():
            parameter.grad = None
        found = {"output": out.detach(), "d_hidden_states": x.grad}
        found |= {f"d_{name}": grad for name, grad in grads.items()}
        return found | {"d_top_k_weights": scores.grad}

    def _truth(
        self, block: nn.Module, x: Tensor, scores: Tensor, index: Tensor, d_out: Tensor
    ) -> dict[str, Tensor]:
        weights = [_whole(getattr(block.experts, name).detach()) for name in _WEIGHTS]
        leaves = [t.double().requires_grad_() for t in (x[0], *weights, scores)]
        out = fused_experts(*leaves[:3], index, leaves[3])
        grads = torch.autograd.grad(out, leaves, d_out[0].double())
        names = ("d_hidden_states", *(f"d_{name}" for name in _WEIGHTS), "d_top_k_weights")
        found = {"output": out.detach()} | dict(zip(names, grads))
        return found | {name: found[name][None] for name in ("output", "d_hidden_states")}

    def expert_parallel(self, model: PreTrainedModel) -> Iterator[Measured]:
        """A block alone; the model's forward; its training step."""
        block, hidden = model.model.layers[0].mlp, self.shape.hidden_size
        x = torch.randn(1, self.tokens, hidden, device=self.device, dtype=self.dtype)
        _same(x)
        leaf, d_out = x.clone().requires_grad_(), torch.ones_like(x)

        def block_step() -> None:
            out = block(leaf)
            (out[0] if isinstance(out, tuple) else out).backward(d_out)
            leaf.grad = None
            block.zero_grad()

        yield self._row("ep block forward", block, _no_grad(lambda: block(x)), 1)
        yield self._row("ep block step", block, block_step, 1)
        ids = self._ids(seed=0)
        forward = _no_grad(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))
        yield self._row("ep forward", model, forward, self.layers)
        yield self._row("ep step", model, _trainer(model, ids), self.layers)

    def step(self, folder: str, engine: str) -> Iterator[Measured]:
        """A training step; nothing where the ranks are too few for the engine."""
        world = distributed.get_world_size()
        if engine == "fsdp ep" and not NEWEST and (world < 4 or world % 2):
            return
        model, own = self.load(folder, engine)
        step = _trainer(model, self._ids(seed=_rank() * own // world))
        yield self._row(f"{engine} step", model, step, self.layers, own=own)

    def collectives(self) -> Iterator[Measured]:
        """What engines move, alone: of a layer's hidden states, of its slots, of its weights."""
        world, hidden = distributed.get_world_size(), self.shape.hidden_size
        states = torch.zeros(self.tokens, hidden, device=self.device, dtype=self.dtype)
        slots = states.repeat(self.shape.top_k, 1)
        back = torch.empty_like(slots)
        numel = 3 * self.shape.num_experts * hidden * self.shape.intermediate_size
        shard = states.new_zeros(numel // world)
        weights = states.new_zeros(shard.numel() * world)
        moved = (world - 1) / world
        of = states.element_size()
        calls = {
            "all_reduce": (lambda: distributed.all_reduce(states), 2 * states.numel()),
            "all_to_all": (lambda: distributed.all_to_all_single(back, slots), slots.numel()),
            "all_gather": (
                lambda: distributed.all_gather_into_tensor(weights, shard), weights.numel()
            ),
        }  # fmt: skip
        for task, (call, count) in calls.items():
            if task == "all_to_all" and self.device.type == "cpu":
                continue
            ms = statistics.median(_ms(call) for _ in range(ROUNDS))
            mb = count * of * moved / 1e6
            yield Measured(task, *self.about, 1, self.tokens, ms, mb=mb, gb_s=mb / ms)

    def _ids(self, seed: int) -> Tensor:
        length = min(LENGTH, self.tokens)
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (self.tokens // length, length), generator=draw).to(
            self.device
        )

    def _row(
        self, task: str, part: nn.Module, call: Callable[[], Tensor | None], layers: int,
        own: int = 1,
    ) -> Measured:  # fmt: skip
        """Interleaved rounds; `own`: how many ranks have tokens of their own."""
        found: dict[bool, list[float]] = {False: [], True: []}
        losses: dict[bool, float | None] = {}
        for turn in range(2 * ROUNDS):
            patched = turn % 2 == 1
            (patch if patched else unpatch)(part)
            if patched not in losses:  # this compiles
                loss = call()
                losses[patched] = None if loss is None else float(_whole(loss))
            found[patched].append(_ms(call))
        unpatch(part)
        hf, ours = (statistics.median(found[patched]) for patched in (False, True))
        rates = (1e3 * self.tokens * own / ms for ms in (ours, hf))
        loss, hf_loss = losses[True], losses[False]
        if loss is not None and abs(loss - hf_loss) > LOSS_BOUND * abs(hf_loss):
            raise RuntimeError(f"{task}: the loss is {loss} patched and {hf_loss} unpatched")
        numbers = (self.tokens, ours, hf, hf / ours, *rates, loss, hf_loss)
        return Measured(task, *self.about, layers, *numbers)


_WEIGHTS = ("gate_up_proj", "down_proj")
VOCABULARY = 4096


def _config(shape: Shape, layers: int) -> PreTrainedConfig:
    """With the attention of Qwen3-30B, as far as the hidden size allows."""
    head = min(128, shape.hidden_size // 2)
    return model_config(
        shape,
        output_router_logits=False,
        num_hidden_layers=layers,
        num_attention_heads=max(2, 2 * shape.hidden_size // head),
        # transformers 5.23 spreads them over the ranks of expert parallelism, too
        num_key_value_heads=max(2, shape.hidden_size // head // 4, distributed.get_world_size()),
        head_dim=head,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        initializer_range=shape.std,
    )


def _trainer(model: PreTrainedModel, ids: Tensor) -> Callable[[], Tensor]:
    """A step of AdamW; shards and whole weights are groups of their own, which it cannot mix."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if is_dtensor(parameter) else None
        groups.setdefault(key, []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=0.0)

    def step() -> Tensor:  # at a learning rate of 0: every step has the same loss
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _no_grad(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def _ms(call: Callable[[], object], budget_ms: float = 300.0) -> float:
    """Of one call, in a row of them that take about `budget_ms`; of the slowest rank."""
    count, first = 1, 0.0
    for _ in range(2):
        distributed.barrier()
        first = 1e3 * seconds(call, count=count, wait=_wait)
        slowest = torch.tensor(first, device=_device())
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        first = slowest.item()
        count = max(2, min(50, int(budget_ms / first)))
    return first


def _wait() -> None:
    if torch.cuda.is_available() and _device().type == "cuda":
        torch.cuda.synchronize()


def _device() -> torch.device:
    gpu = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def _rank() -> int:
    return distributed.get_rank()


def _any(flag: bool) -> bool:
    """Whether it is set on some rank."""
    found = torch.tensor(float(flag), device=_device())
    distributed.all_reduce(found)
    return bool(found.item())


def _same(tensor: Tensor) -> None:
    """On all ranks what the first one has."""
    distributed.broadcast(tensor, 0)


def _broadcast(text: str | None) -> str:
    box: list[str | None] = [text]
    distributed.broadcast_object_list(box, 0, device=_device())
    return str(box[0])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def start() -> torch.device:
    """Joins the ranks that torchrun started, one a GPU.

    Raises:
        ValueError: the host has fewer GPUs than ranks.
    """
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise ValueError(f"rank {local} of this host has no GPU of its own: there are {gpus}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    return device


def distributed_table(rows: Sequence[Measured]) -> Iterable[Table]:
    """A line a task, patched beside Hugging Face's."""
    header = ("", "HF ms", "patched ms", "HF tokens/s", "patched tokens/s", "patched is")
    first = rows[0]
    title = f"{first.shape}, {first.ranks} ranks, {first.tokens} tokens each, {first.transformers}"
    table = Table(*header, title=title, title_justify="left")
    for r in rows:
        if r.hf_ms is None:
            table.add_row(r.task, "", f"{r.ms:.3f}", "", "", f"{r.gb_s:.0f} GB/s")
            continue
        cells = [f"{r.task}, {r.layers} layers", f"{r.hf_ms:.3f}", f"{r.ms:.3f}"]
        cells += [f"{r.hf_tokens_s:.4g}", f"{r.tokens_s:.4g}", f"{r.speedup:.2f} x as fast"]
        table.add_row(*cells)
    yield table


class Distributed(Timed):
    """`bench distributed`."""

    name = "distributed"
    help = "expert parallelism and FSDP2, on the ranks that torchrun starts"
    about = "torchrun --nproc-per-node 2 -m moe_patch bench distributed ..."
    switch, does = "--distributed", "times a model over ranks"

    def arguments(self, flag: Flags, old: bool) -> None:
        add_shape(flag, "qwen3_30b; one, of Qwen3-MoE")
        add_tokens(flag, [TOKENS])
        add_layers(flag, str(LAYERS))
        add_files(flag)
        if old:
            flag("--distributed", action="store_true")

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.distributed

    def refuse(self, options: argparse.Namespace) -> None:
        check_layers(options.layers)
        for name in options.shape:
            find(name)
        if len(options.shape) > 1 or len(options.tokens or ()) > 1:
            raise ValueError("--distributed takes one --shape and one number of --tokens")
        if options.shape and find(options.shape[0]).family != "qwen3_moe":
            raise ValueError(f"--distributed is of Qwen3-MoE, and {options.shape[0]} is not")
        if "RANK" not in os.environ:
            raise ValueError(
                "--distributed needs ranks: torchrun --nproc-per-node 2 -m moe_patch bench "
                "distributed"
            )

    def measure(self, run: Run) -> ParityReport | None:
        options = run.options
        name = options.shape[0] if options.shape else "qwen3_30b"
        device = start()
        measured = measure(
            find(name),
            name,
            tokens=(options.tokens or [TOKENS])[0],
            layers=options.layers or LAYERS,
            device=device,
        )

        def label(row: Measured | ParityReport) -> str:
            return getattr(row, "task", name)

        for row in run.each(measured, label, total=len(TASKS), first=f"{name}: parity"):
            if isinstance(row, ParityReport):
                return row
            run.rows.append(row)
            if not self.silent(options):
                run.keep()
        distributed.destroy_process_group()
        return None

    tables = staticmethod(distributed_table)

    def silent(self, options: argparse.Namespace) -> bool:
        return os.environ["RANK"] != "0"


KIND = Distributed()
