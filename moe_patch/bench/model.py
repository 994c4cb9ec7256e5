"""bench model: tokens a second of a whole model of random weights, as it comes and patched."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from .. import parity
from ..formats.packed import FORMATS
from ..patcher import patch, unpatch
from ..quantise import quantize_experts
from .kind import Flags, Run, Timed, add_files, add_layers, check_layers, need_peft
from .timing import first_line, free, seconds, short_of
from .whole import build, checked, read_config

TASKS = ("prefill", "decode", "static", "lora-attention", "lora", "lora-reentrant")
"""One forward of a prompt; generation; generation with a static cache, which HF compiles; a step
of training LoRA on attention, or on attention and experts, with gradient checkpointing of either
kind, which leaves adapters."""
DEFAULT, TRAINING = TASKS[:3], TASKS[3:]
PREFILL = ((1, 1024), (1, 8192), (4, 4096))
LORA = ((4, 1024), (1, 2048))
RANK = 16
BATCHES = (1, 16)
PROMPT, NEW = 128, 64
ROUNDS = 3


@dataclass(frozen=True)
class Rate:
    """Medians of tokens a second, of all sequences together; for decoding, after the first one."""

    model: str
    layers: int
    task: str
    batch: int
    prompt: int
    hf_tokens_s: float
    tokens_s: float  # patched
    speedup: float
    hf_peak_gb: float | None = None  # of a training step, the weights included
    peak_gb: float | None = None


def quantise(model: PreTrainedModel, format: str, linear: bool) -> None:
    """Puts the experts in 4 bits with bfloat16 scales, and with `linear` all linear layers but the
    head in bitsandbytes' nf4.

    Raises:
        ValueError: a block's experts cannot be quantised.
    """
    scale_dtype = None if format == "mxfp4" else torch.bfloat16
    report = quantize_experts(model, format, scale_dtype=scale_dtype, progress=False)
    if report.skipped:
        raise ValueError(f"--experts {format}: {' '.join(report.skipped[0])}")
    if linear:
        import bitsandbytes as bnb

        found = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
        for name, module in found.items():
            if module is not model.get_output_embeddings():
                sizes = module.in_features, module.out_features, module.bias is not None
                kept = bnb.nn.Linear4bit(*sizes, torch.bfloat16, quant_type="nf4", device="meta")
                weight = bnb.nn.Params4bit(module.weight.data, False, quant_type="nf4")
                kept.weight, kept.bias = weight.to(model.device), module.bias
                model.set_submodule(name, kept)
        model.is_loaded_in_4bit = True  # PEFT looks there
    free()


def rows(tasks: Sequence[str] = DEFAULT) -> list[tuple[str, int, int]]:
    """(task, batch, tokens of the prompt) of everything to measure."""
    sizes = {"prefill": PREFILL} | dict.fromkeys(TRAINING, LORA)
    decode = [(batch, PROMPT) for batch in BATCHES]
    order = ["", *TRAINING]  # adapters stay in the model
    last = sorted(tasks, key=lambda task: order.index(task if task in TRAINING else ""))
    return [(task, *size) for task in last for size in sizes.get(task, decode)]


def rate(model: PreTrainedModel, name: str, task: str, batch: int, prompt: int) -> Rate | str:
    """Measures one row, interleaved but for what is compiled. The model comes back unpatched.

    Returns:
        the row; or a note, when the GPU has too little memory or Hugging Face's own code fails.
    """
    config, row = model.config.get_text_config(), f"{name}, {task}, {batch} x {prompt}"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, prompt), generator=generator).to(model.device)
    found: dict[bool, list[float]] = {False: [], True: []}
    peaks: dict[bool, float] = {}
    note = None
    try:
        optimizer = _adapted(model, task) if task in TRAINING else None
        for patched in _turns(task):
            (patch if patched else unpatch)(model)
            if not found[patched]:
                torch.compiler.reset()  # what was compiled is of the other one
                peaks[patched] = _peak_gb(lambda: _tokens_s(model, task, ids, optimizer))
            found[patched].append(_tokens_s(model, task, ids, optimizer))
    except torch.OutOfMemoryError as error:
        note = f"{row}: skipped, {short_of(error)}"
    except RuntimeError as error:
        if patched:
            raise
        note = f"{row}: skipped, Hugging Face's own fails: {first_line(error)}"
    finally:
        unpatch(model)
    if note:
        free()
        return note
    hf, ours = (statistics.median(found[patched]) for patched in (False, True))
    memory = (peaks[False], peaks[True]) if task in TRAINING else ()
    return Rate(name, config.num_hidden_layers, task, batch, prompt, hf, ours, ours / hf, *memory)


def _turns(task: str) -> Iterator[bool]:
    """Patched or not, in order: each switch would throw away what was compiled."""
    turns = [False, True] * ROUNDS
    return iter(sorted(turns) if task == "static" else turns)


def _tokens_s(
    model: PreTrainedModel, task: str, ids: Tensor, optimizer: Optimizer | None = None
) -> float:
    if task == "prefill":
        return ids.numel() / seconds(lambda: _prefill(model, ids))
    if optimizer is not None:
        return ids.numel() / seconds(lambda: _train(model, ids, optimizer))
    more = {"cache_implementation": "static"} if task == "static" else {}

    def generate(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
            **more,
        )

    total = seconds(lambda: generate(NEW))
    return len(ids) * (NEW - 1) / (total - seconds(lambda: generate(1)))


def _prefill(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


def _adapted(model: PreTrainedModel, task: str) -> Optimizer:
    """Of LoRA on attention and, but for "lora-attention", on the experts' stacked weights;
    everything else frozen. Adapters that the model has stay."""
    from peft import LoraConfig, inject_adapter_in_model

    there = [name for name, parameter in model.named_parameters() if "lora_" in name]
    experts = {
        ".".join(name.split(".")[-3:])
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))
    }
    if not there:
        model.requires_grad_(False)
    todo = {}
    if not there:
        todo["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if task != "lora-attention" and not any("experts" in name for name in there):
        todo["target_parameters"] = sorted(experts)
    if todo:
        config = {"target_modules": []} | todo
        inject_adapter_in_model(
            LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **config), model
        )
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": task.endswith("reentrant")})
    model.enable_input_require_grads()
    return torch.optim.AdamW(_adapters(model), lr=1e-5)


def _adapters(model: PreTrainedModel) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def _train(model: PreTrainedModel, ids: Tensor, optimizer: Optimizer) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _peak_gb(call: Callable[[], object]) -> float:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() / 1e9


def rate_tables(rates: Sequence[Rate]) -> Iterable[Table]:
    """The table of a whole model, a line a task."""
    for key, group in itertools.groupby(rates, lambda r: (r.model, r.layers)):
        header = ["", "batch", "prompt", "HF tokens/s", "patched tokens/s", "patched is"]
        group = list(group)
        with_memory = any(r.peak_gb is not None for r in group)
        header += ["HF peak GB", "patched peak GB"] * with_memory
        title = "{}, {} layers, random weights".format(*key)
        table = Table(*header, title=title, title_justify="left")
        for r in group:
            cells = [r.task, f"{r.batch}", f"{r.prompt}", f"{r.hf_tokens_s:.4g}"]
            cells += [f"{r.tokens_s:.4g}", f"{r.speedup:.2f} x as fast"]
            cells += [f"{gb:.1f}" for gb in (r.hf_peak_gb, r.peak_gb) if gb is not None]
            table.add_row(*cells)
        yield table


class Model(Timed):
    """`bench model`."""

    name = "model"
    help = "a whole model of random weights, from its config.json"
    about = "Tokens a second as it comes and patched, after the parity of its first block."
    switch, does = "--model-config", "times a whole model"

    def arguments(self, flag: Flags, old: bool) -> None:
        config = ("--model-config",) if old else ("config",)
        more = {"dest": "config"} if old else {}
        flag(*config, metavar="FILE", type=Path, help="a config.json of transformers", **more)
        add_layers(flag, "all")
        text = f"of {', '.join(TASKS)}; default: {' '.join(DEFAULT)}"
        flag("--tasks", nargs="+", choices=TASKS, metavar="NAME", help=text)
        text = f"in 4 bits, {', '.join(FORMATS)}; HF's way writes them out in each forward"
        flag("--experts", choices=FORMATS, metavar="FORMAT", help=text)
        text = "with --experts: linear layers in 4 bits too, by bitsandbytes"
        flag("--linear", action="store_true", help=text)
        text = "Liger's loss fused with the head, as in Trainer's use_liger_kernel"
        flag("--liger-loss", action="store_true", help=text)
        add_files(flag)

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.config is not None

    def refuse(self, options: argparse.Namespace) -> None:
        check_layers(options.layers)
        if options.linear and not (options.experts and find_spec("bitsandbytes")):
            needs = "--linear needs --experts, and bitsandbytes, which moe_patch[qlora] installs"
            raise ValueError(needs)
        if options.liger_loss and not find_spec("liger_kernel"):
            raise ValueError("--liger-loss needs Liger: pip install --no-deps liger-kernel")
        read_config(options.config, options.layers)
        if set(options.tasks or ()) & set(TRAINING):
            need_peft()

    def measure(self, run: Run) -> parity.ParityReport | None:
        options, name = run.options, run.options.config.stem
        config = read_config(options.config, options.layers)
        if options.experts:
            name += f", experts in {options.experts}" + ", linear layers in nf4" * options.linear
        name += ", Liger's loss" * options.liger_loss

        def make(config: PreTrainedConfig) -> PreTrainedModel:
            model = build(config)
            if options.experts:
                quantise(model, options.experts, options.linear)
            if options.liger_loss:
                # here: it imports PEFT
                from transformers.integrations.liger import apply_liger_kernel

                others = dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
                apply_liger_kernel(model, {"fused_linear_cross_entropy": True} | others)
            return model

        model = checked(run, name, config, make)
        if not isinstance(model, PreTrainedModel):
            return model
        todo = rows(options.tasks or DEFAULT)
        for row in run.each(todo, lambda row: "{}: {} {} x {}".format(name, *row)):
            found = rate(model, name, *row)
            (run.notes if isinstance(found, str) else run.rows).append(found)
        return None

    tables = staticmethod(rate_tables)


KIND = Model()
