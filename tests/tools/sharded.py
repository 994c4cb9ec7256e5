"""Checks that test_distributed.py runs on all ranks at once: python tests/tools/sharded.py RESULTS

Every function marked with `check` is called on all ranks, in order, in one process group; what it
raises is its failure. A model under an engine is compared with the same model whole, on one rank,
as Hugging Face wrote it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file
from several_ranks import (
    CHECKS,
    FAMILIES,
    HALF_DRAWS,
    LAYERS,
    ON_GPU,
    QUICK,
    WORLD,
    assert_near,
    check,
    compare,
    config,
    counted,
    device,
    engine,
    fully_sharded,
    ids,
    kept_by_autograd,
    load,
    newest,
    saved,
    step,
    truth_of,
    whole,
)
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils.logging import disable_progress_bar
from zero3 import compile_no_collectives

import moe_patch
from moe_patch import ranks, versions
from moe_patch.bench import distributed as bench_distributed
from moe_patch.models import decorated
from moe_patch.shapes import Shape

# transformers' plans


@check(*FAMILIES, quick=FAMILIES[:1])
def tensor_parallel(family: str) -> None:
    compare(saved(family), "tp")


@check()
def tensor_parallel_llama4() -> None:
    """Hugging Face's own block cannot be trained so: it adds in place to a view of DTensor's."""
    model = load(folder := saved("llama4_text"), **engine("tp"))
    assert len(moe_patch.patch(model).fused) == LAYERS
    with counted() as calls:
        ours = step(model)
    assert sorted(calls) == ["experts"] * LAYERS + ["router"] * LAYERS
    assert_near(ours, truth_of(folder))


@check(*FAMILIES, quick=FAMILIES[:1])
def expert_parallel(family: str) -> None:
    compare(saved(family), "ep")


@check()
def expert_parallel_without_gradients() -> None:
    """Inference, where transformers 5.23 reduces instead of exchanging tokens; then unpatched."""
    model = load(folder := saved("qwen3_moe"), **engine("ep"))
    names = ("forward", "_old_forward")
    before = [[vars(m).get(name) for name in names] for m in model.modules()]
    with torch.no_grad():
        expected, truth = model(ids()).logits, load(folder)(ids()).logits
        moe_patch.patch(model)
        ours = model(ids()).logits
        assert_near({"logits": whole(ours)}, {"logits": whole(truth)})
        moe_patch.unpatch(model)
        assert torch.equal(model(ids()).logits, expected)
    assert before == [[vars(m).get(name) for name in names] for m in model.modules()]


@check()
def a_rank_without_tokens() -> None:
    """Every token goes to experts of rank 0; accumulated over two steps."""
    compare(saved("deepseek_v3", n_group=1, topk_group=1), "ep", times=2)


@check("fsdp_ep", "all_reduce")
def newest_engines(name: str) -> None:
    """What transformers 5.17 has not: tokens exchanged between ranks with batches of their own."""
    if newest():
        compare(saved("qwen3_moe"), name)


@check()
def two_dimensions() -> None:
    """Experts spread both ways: over ranks that share them, and those shares by FSDP2."""
    if WORLD > 2:
        compare(saved("qwen3_moe"), "tp_fsdp_ep" if newest() else "meshes")


@check()
def saved_whole() -> None:
    """save_pretrained of shards of a patched model writes the file that they were read from."""
    model = load(folder := saved("qwen3_moe"), **engine("ep"))
    moe_patch.patch(model)
    target = Path(os.environ["SHARED"]) / "again"
    model.save_pretrained(target)
    distributed.barrier()
    one, two = (load_file(Path(f) / "model.safetensors") for f in (folder, target))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# FSDP2


@check("before", "after", "parts_before", "parts_after", quick=("parts_after",))
def with_fsdp(when: str) -> None:
    """Patched before or after; also where router and experts are wrapped on their own.

    Two steps accumulated; nothing kept for the backward keeps whole weights alive; unpatched, every
    class is Hugging Face's again.
    """
    folder, parts = saved("mixtral"), when.startswith("parts")
    model = load(folder)
    if when.endswith("before"):
        moe_patch.patch(model)
        fully_sharded(model, parts)
    else:
        fully_sharded(model, parts)
        moe_patch.patch(model)
    with counted() as calls, kept_by_autograd() as kept:
        loss = model(ids(), labels=ids(), use_cache=False).loss
    weights = [t for t in kept if t.dim() == 3 and t.shape[0] == model.config.num_local_experts]
    assert len(weights) == 2 * LAYERS and not any(t.untyped_storage().size() for t in weights)
    loss.backward()
    assert sorted(calls) == ["experts"] * LAYERS + ["router"] * LAYERS
    assert_near(step(model, 2), truth_of(folder, 2))
    moe_patch.unpatch(model)
    classes = {
        base
        for module in model.modules()
        for base in type(module).__mro__
        if base.__module__.startswith("moe_patch")
    }
    assert not classes, classes


@check()
def mixed_precision() -> None:
    """Half precision of float32 shards: no further from the truth than unpatched."""
    folder, half = saved("qwen3_moe"), torch.bfloat16 if ON_GPU else torch.float16
    model = load(folder)
    fully_sharded(model, param_dtype=half, reduce_dtype=torch.float32)
    theirs = step(model, draws=HALF_DRAWS)
    moe_patch.patch(model)
    with counted() as calls:
        ours = step(model, draws=HALF_DRAWS)
    assert len(calls) == 2 * LAYERS * HALF_DRAWS
    assert all(p.grad.dtype == torch.float32 for p in model.model.layers.parameters())
    assert_near(ours, truth_of(folder, draws=HALF_DRAWS), theirs)


@check("fsdp", "ep", "both", quick=())
def resumed(name: str) -> None:
    """The example, from its last checkpoint: the same losses, bit for bit."""
    example = load_example()
    line = f"--engine {name} --steps 3 --save-every 2 --out {os.environ['SHARED']}/{name}"
    line += " --ep-size 2" * (name == "both")
    if ON_GPU:
        line += " --hidden 256 --intermediate 128 --experts 16 --layers 2 --length 256"
    with Progress(console=Console(quiet=True)) as progress:
        losses = example.train(example.parse(line.split()), progress)
        again = example.train(example.parse(f"{line} --resume".split()), progress)
    assert list(losses) == [0, 1, 2] and again == {2: losses[2]}, (losses, again)


def load_example():
    path = Path(__file__).resolve().parents[2] / "examples" / "train_distributed.py"
    spec = importlib.util.spec_from_file_location("train_distributed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@check("before", "after", quick=("before",))
def through_accelerate(when: str) -> None:
    """FullyShardedDataParallelPlugin of version 2, patched before or after it shards."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    model = load(folder := saved("qwen3_moe"))
    if when == "before":
        moe_patch.patch(model)
    if ON_GPU:
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = Accelerator(fsdp_plugin=plugin).prepare(model, optimizer)
    else:  # it shards on accelerators only: the part of `prepare` that does
        state = SimpleNamespace(fsdp_plugin=plugin)
        accelerator = SimpleNamespace(
            state=state, device=torch.device("cpu"), is_main_process=True, mixed_precision="no"
        )
        model = fsdp2_prepare_model(accelerator, model)
    moe_patch.patch(model)
    assert isinstance(model.model.layers[0], FSDPModule)
    with counted() as calls:
        ours = step(model)
    assert len(calls) == 2 * LAYERS
    assert_near(ours, truth_of(folder))


# DeepSpeed

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
}


@check("before", "after", "loaded", quick=("after", "loaded"))
def zero3(when: str) -> None:
    """Patched before or after DeepSpeed shards it, or after transformers has loaded it in shards.

    Nothing kept for the backward keeps whole weights alive.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    folder = saved("llama4_text" if when == "after" else "mixtral")  # stored transposed, or not
    truth = truth_of(folder, draws=HALF_DRAWS)
    for dtype in (torch.float32, torch.bfloat16)[: 1 + ON_GPU]:
        with counted() as calls:
            half = dtype != torch.float32
            theirs = step(with_zero3(folder, dtype, None), draws=HALF_DRAWS) if half else None
            assert not calls
            model = with_zero3(folder, dtype, when)
            with kept_by_autograd() as kept:
                loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        assert sorted(calls) == ["experts"] * LAYERS + ["router"] * LAYERS
        experts = model.module.config.num_local_experts
        assert kept and not any(t.dim() == 3 and t.shape[0] == experts for t in kept)
        model.backward(loss)
        model.step()
        assert_near(step(model, draws=HALF_DRAWS), truth, theirs)


def zero3_engine(model: nn.Module, settings: dict = ZERO3) -> nn.Module:
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    return deepspeed.initialize(model=model, config=settings, optimizer=optimizer)[0]


def with_zero3(folder: str, dtype: torch.dtype, patched: str | None) -> nn.Module:
    settings = ZERO3 | {"bf16": {"enabled": dtype != torch.float32}}
    if patched == "loaded":
        alive = HfDeepSpeedConfig(settings)  # from_pretrained looks for it
        model = load(folder, dtype, low_cpu_mem_usage=True)
        assert not any(parameter.numel() for parameter in model.parameters()), alive
    else:
        model = load(folder, dtype)
    if patched == "before":
        moe_patch.patch(model)
    engine = zero3_engine(model, settings)
    if patched in ("after", "loaded"):
        moe_patch.patch(model)
    return engine


# Experts in 4 bits

FOUR_BITS = {"moe_intermediate_size": 32}
"""The widths that a group of 32 divides."""


def in_4_bits(folder: str) -> nn.Module:
    """With scales of a dtype (e8m0) that collectives do not send."""
    model = load(folder)
    assert len(moe_patch.quantize_experts(model, "mxfp4").quantized) == LAYERS
    return model


@check("fsdp", "zero3")
def four_bits_sharded(name: str) -> None:
    """Quantised, then sharded: as the same model whole on one rank, and codes stay frozen.

    FSDP2 takes no integers before torch 2.12.
    """
    if name == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return
    folder = saved("qwen3_moe", **FOUR_BITS)
    model, truth = in_4_bits(folder), step(in_4_bits(folder))
    if name == "fsdp":
        if versions.release(torch.__version__) < (2, 12):
            with pytest.raises(RuntimeError, match="floating point dtype can require gradients"):
                fully_sharded(model, parts=True)
            return
        fully_sharded(model, parts=True)
    else:
        model = zero3_engine(model)
    moe_patch.patch(model)
    with counted() as calls:
        ours = step(model)
    assert calls.count("experts") == LAYERS
    assert_near(ours, truth)
    frozen = [p for n, p in model.named_parameters() if "experts." in n]
    assert len(frozen) == 4 * LAYERS and not any(p.requires_grad for p in frozen)


@check()
def four_bits_under_ddp() -> None:
    """It sends all parameters to the other ranks, frozen ones too."""

    def step(model: nn.Module) -> dict:
        loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        loss.backward()
        grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        return {name: whole(tensor) for name, tensor in (grads | {"loss": loss}).items()}

    folder = saved("qwen3_moe", **FOUR_BITS)
    model, truth = in_4_bits(folder), step(in_4_bits(folder))
    moe_patch.patch(model)
    assert_near(step(DistributedDataParallel(model)), truth)


# Routing


@check("tp", "ep", "fsdp_ep", "fsdp", quick=("ep", "fsdp_ep", "fsdp"))
def routing_replayed(name: str) -> None:
    """Every rank records what the whole model chooses, replays other experts as the whole model
    does, gradients included, and counts them."""
    if name == "fsdp_ep" and not newest():
        return
    folder = saved("qwen3_moe")
    alone, model = load(folder), load(folder, **({} if name == "fsdp" else engine(name)))
    if name == "fsdp":
        fully_sharded(model, parts=True)
    moe_patch.patch(model)
    with torch.no_grad():
        with moe_patch.record_routing(alone) as truth:
            alone(ids(0))
        with moe_patch.record_routing(model) as ours:
            model(ids(0))
    assert torch.equal(ours.top_k_index, truth.top_k_index)
    others = (truth.top_k_index.long() + 1) % truth.num_experts
    with moe_patch.replay_routing(alone, others):
        expected = step(alone)
    with (
        moe_patch.replay_routing(model, others),
        moe_patch.expert_load(model) as seen,
        moe_patch.record_routing(model) as again,
    ):
        assert_near(step(model), expected)
    assert torch.equal(again.top_k_index.long(), others)
    counts = torch.stack([others[:, at].flatten().bincount(minlength=truth.num_experts)
                          for at in range(LAYERS)])  # fmt: skip
    assert torch.equal(seen.counts, counts) and not seen.dropped.any()
    seen.all_reduce()
    assert torch.equal(seen.counts, counts * WORLD)


# What is refused


def refused(kind: type[Exception], *words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"nothing refused, {words}")


@check()
def patched_on_one_rank() -> None:
    """Found out in the time that ranks are given, without a collective that nobody joins."""
    model = load(saved("qwen3_moe"), **engine("ep"))
    patient = ranks.WARN_AFTER, ranks.FAIL_AFTER
    ranks.WARN_AFTER, ranks.FAIL_AFTER = (timedelta(seconds=s) for s in (0.1, 0.4))
    if distributed.get_rank() == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            refused(
                RuntimeError, "rank 1 has not", "patch on every rank, or on none",
                call=lambda: moe_patch.patch(model),
            )  # fmt: skip
        assert any("rank 0 waits for" in str(one.message) for one in caught)
    else:
        ranks._turns[tuple(range(WORLD))] += 1
    ranks.WARN_AFTER, ranks.FAIL_AFTER = patient
    distributed.barrier()


@check()
def other_versions() -> None:
    """All ranks say so."""
    model, own = load(saved("qwen3_moe"), **engine("ep")), ranks.__version__
    me = distributed.get_rank()
    after = (me + 1) % WORLD
    ranks.__version__ = f"0.0.{me}"
    try:
        refused(
            RuntimeError, f"rank {after} patched", f"moe_patch 0.0.{after} and not 0.0.{me}",
            call=lambda: moe_patch.patch(model),
        )  # fmt: skip
    finally:
        ranks.__version__ = own


@check()
def experts_that_do_not_divide() -> None:
    """transformers' own sentence, which has both numbers."""
    folder = saved("qwen3_moe", num_experts=7, num_local_experts=7)
    refused(ValueError, "7 experts", f"{WORLD} ", call=lambda: load(folder, **engine("ep")))


@check()
def experts_in_4_bits_under_a_plan() -> None:
    """Neither are shards quantised, nor quantised experts sharded."""
    folder, kept = saved("qwen3_moe", **FOUR_BITS), Path(os.environ["SHARED"]) / "in 4 bits"
    if distributed.get_rank() == 0:
        in_4_bits(folder).save_pretrained(kept)
    distributed.barrier()
    for name in ("tp", "ep"):
        report = moe_patch.quantize_experts(load(folder, **engine(name)), "mxfp4")
        assert len(report.skipped) == LAYERS and "spread over ranks" in str(report), str(report)
        words = "4-bit experts cannot be sharded", "without tp_plan and distributed_config"
        refused(ValueError, *words, call=lambda name=name: load(str(kept), **engine(name)))
        config = moe_patch.ExpertsQuantConfig("mxfp4")
        more = {**engine(name), "quantization_config": config}
        refused(ValueError, *words, call=lambda more=more: load(folder, **more))


@check()
def parity_of_shards() -> None:
    """A block is compared on one rank, where all of it has to be."""
    model = load(saved("qwen3_moe"), **engine("ep"))
    refused(ValueError, "spread over ranks", call=lambda: moe_patch.check_parity(model))


@check()
def law_under_expert_parallelism() -> None:
    """What bench --distributed judges by: it holds, and does not for a tenth less."""
    found = config("qwen3_moe")
    sizes = (found.hidden_size, found.moe_intermediate_size, found.num_experts)
    shape = Shape("qwen3_moe", *sizes, found.num_experts_per_tok)
    about = ("", "", WORLD), LAYERS, 12, shape, torch.device(device()), torch.float32
    bench = bench_distributed._Bench(*about)
    block = bench.load(saved("qwen3_moe"), "ep")[0].model.layers[0].mlp
    report = bench.parity(block)
    assert report.passed, str(report)
    honest = decorated.fused_experts
    decorated.fused_experts = lambda *args, **more: honest(*args, **more) * 0.9
    try:
        failed = [row.tensor for row in bench.parity(block).rows if not row.passed]
    finally:
        decorated.fused_experts = honest
    assert "output" in failed and "d_top_k_weights" in failed and len(failed) == 5, failed


@check()
def no_plan() -> None:
    """transformers' own sentence again; and ours where its plan for Llama4 cannot work."""
    if newest():
        folder = saved("llama4_text")
        return refused(ValueError, "no `ep_plan`", call=lambda: load(folder, **engine("ep")))
    folder = saved("granitemoe")
    refused(ValueError, "expert-parallel plan", call=lambda: load(folder, **engine("ep")))
    report = moe_patch.patch(load(saved("llama4_text"), **engine("ep")), strict=False)
    assert not report.fused and "three values from a router" in str(report)


def main() -> None:
    """Runs what is asked for and writes {check: None or its traceback} of this rank."""
    rank = int(os.environ["RANK"])
    if ON_GPU:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    disable_progress_bar()
    compile_no_collectives()
    distributed.init_process_group(
        "nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=120 if ON_GPU else 30),
        device_id=torch.device("cuda", rank) if ON_GPU else None,
    )  # fmt: skip
    results = {}
    for name in sys.argv[2:] or [n for n in CHECKS if ON_GPU or n in QUICK]:
        begin = time.perf_counter()
        try:
            CHECKS[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        seconds = time.perf_counter() - begin
        print(f"{seconds:6.1f} s  {name}  {'FAILED' if results[name] else ''}", flush=True)
        Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(results))
        if results[name]:  # the ranks are no longer at the same place
            os._exit(1)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
