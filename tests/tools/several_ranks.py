"""A model under an engine on some ranks, beside the same one whole: what sharded.py shares."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from small import MORE, shrink
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_patch
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.recognise import routers

WORLD = int(os.environ.get("WORLD_SIZE", "2"))
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.device_count() >= WORLD
CHECKS: dict[str, Callable[[], None]] = {}
QUICK: set[str] = set()
"""Of these, what runs without GPUs: the others would take the interpreter longer than they tell."""
LAYERS = 2 if ON_GPU else 1  # Triton's interpreter takes a second for a layer
SUMS = 5e-5 if ON_GPU else 1e-6 * WORLD  # what their order makes of float32, at these sizes
HALF_DRAWS = 4 if ON_GPU else 1
"""Of ids, pooled in half precision: a near-tie in the router decides a tensor of a single one."""
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


def check(
    *cases: str, quick: tuple[str, ...] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a check; one for each case, if there are any, with the case as its argument."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for case in cases:
            CHECKS[f"{function.__name__}[{case}]"] = partial(function, case)
        if not cases:
            CHECKS[function.__name__] = function
        chosen = cases if quick is None else quick
        QUICK.update([f"{function.__name__}[{case}]" for case in chosen])
        QUICK.update(() if cases else (function.__name__,))
        return function

    return add


def config(family: str, **more):
    hidden, inner, experts = (512, 256, 32) if ON_GPU else (32, 16, 4)
    size = {
        **dict.fromkeys(("hidden_size", "intermediate_size"), hidden),
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp"), inner),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
        "num_experts_per_tok": 4 if ON_GPU else 2,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 1024,
        "vocab_size": 96,
    }
    if family == "llama4_text":
        size |= {"moe_layers": [*range(LAYERS)], "num_experts_per_tok": 1}
    found = shrink(AutoConfig.for_model(family), MORE.get(family, {}) | size | more)
    for name, value in vars(found).items():
        if "layer" in name and isinstance(value, list):
            setattr(found, name, value[:LAYERS])
    return found


def saved(family: str, **more) -> str:
    """A folder with the model's file, every weight random; the same on all ranks."""
    name = "-".join([family, *(f"{key}{value}" for key, value in more.items())])
    folder = Path(os.environ["SHARED"]) / name
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(family, **more)).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05 if ON_GPU else 0.1)
        if family == "deepseek_v3" and more.get("n_group") == 1:  # all tokens to the first half
            for layer in model.model.layers:
                bias = layer.mlp.gate.e_score_correction_bias
                bias[: len(bias) // 2] += 10
        distributed.barrier()
        if distributed.get_rank() == 0:
            model.save_pretrained(folder)
        distributed.barrier()
    return str(folder)


def load(folder: str, dtype: torch.dtype = torch.float32, **more) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not more:
            more = {"device_map": device()}
        return AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, **more
        )


def device() -> str:
    return f"cuda:{distributed.get_rank()}" if ON_GPU else "cpu"


def newest() -> bool:
    """Whether transformers has the mechanism with `ep_size` and dispatch by all-to-all."""
    return hasattr(DistributedConfig, "efsdp_size")


def engine(name: str) -> dict:
    """Arguments of from_pretrained."""
    if name == "tp":
        sizes = {"tp_size": WORLD, "tp_plan": "auto"}
    elif name == "ep":
        sizes = {"tp_size": WORLD, "ep_size": WORLD} if newest() else {
            "tp_size": WORLD, "tp_plan": "auto", "enable_expert_parallel": True}  # fmt: skip
    elif name == "all_reduce":
        sizes = {"tp_size": WORLD, "ep_size": WORLD, "ep_implementation": "all_reduce"}
    elif name == "fsdp_ep":  # with more than two ranks the experts are sharded both ways
        sizes = {"fsdp_size": WORLD, "ep_size": 2}
    elif name == "tp_fsdp_ep":
        sizes = {"tp_size": 2, "fsdp_size": WORLD // 2, "ep_size": WORLD}
    else:  # two meshes of transformers 5.17: FSDP2 between the ranks that share no experts
        plan = {"tp_plan": "auto", "enable_expert_parallel": True}
        sizes = {"tp_size": 2, "fsdp_size": WORLD // 2} | plan
        mesh = distributed.init_device_mesh(
            device().split(":")[0], (WORLD // 2, 2), mesh_dim_names=("dp", "tp")
        )
        return {"distributed_config": DistributedConfig(**sizes), "device_mesh": mesh}
    return {"distributed_config": DistributedConfig(**sizes)}


def fully_sharded(model: nn.Module, parts: bool = False, mesh=None, **policy) -> nn.Module:
    """FSDP2 of every layer; parts: of routers and experts, too."""
    more = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    for layer in model.model.layers:
        if parts:
            fully_shard(layer.mlp.gate, mesh=mesh, **more)
            fully_shard(layer.mlp.experts, mesh=mesh, **more)
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def whole(tensor: Tensor | None) -> Tensor | None:
    """Of a tensor or of its shards, in float64."""
    if tensor is None:
        return None
    if hasattr(tensor, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters(tensor):
            return tensor.detach().double()
    if isinstance(tensor, DTensor):
        # torch 2.11 cannot gather _StridedShard: gate and up apart, or FSDP over the ranks of EP
        strided = any(isinstance(place, _StridedShard) for place in tensor.placements)
        tensor = _gathered(tensor) if strided else tensor.full_tensor()
    return tensor.detach().double()


def _gathered(tensor: DTensor) -> Tensor:
    """Last dimension of the mesh first, as DTensor counts split_factor."""
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    for dim, place in reversed([*enumerate(tensor.placements)]):
        if place.is_replicate():
            continue
        parts = [torch.empty_like(local) for _ in range(mesh.size(dim))]
        distributed.all_gather(parts, local.contiguous(), group=mesh.get_group(dim))
        factor = getattr(place, "split_factor", 1)
        pieces = zip(*(part.chunk(factor, place.dim) for part in parts))
        local = torch.cat([piece for group in pieces for piece in group], place.dim)
    return local


def ids(seed: int = 1) -> Tensor:
    size = (2, 256) if ON_GPU else (1, 6)
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 90, size, generator=draw).to(device())


def step(model: nn.Module, times: int = 1, draws: int = 1) -> dict[str, Tensor | None]:
    """Logits, loss and all gradients, of the embedded input too, of each draw: [draws, ...].

    A draw is a step on ids of its own, accumulated over `times` batches.
    """
    found = [_step(model, range(i * times, i * times + times)) for i in range(draws)]
    return {
        name: None if tensor is None else torch.stack([one[name] for one in found])
        for name, tensor in found[0].items()
    }


def _step(model: nn.Module, seeds: range) -> dict[str, Tensor | None]:
    embedding, grad_of = whole(model.get_input_embeddings().weight), None
    if hasattr(model, "zero_optimization"):  # DeepSpeed's engine
        from deepspeed.utils import safe_get_full_grad as grad_of
    for parameter in model.parameters():
        parameter.grad = None
    for seed in seeds:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(seed == seeds[-1])
        x = embedding[ids(seed)].to(next(model.parameters()).dtype).requires_grad_()
        out = model(inputs_embeds=x, labels=ids(seed), use_cache=False)
        out.loss.backward() if grad_of is None else model.backward(out.loss)
    found = {"logits": out.logits, "loss": out.loss, "d_input": x.grad}
    if grad_of is None:
        found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    else:
        found |= {name: grad_of(weight) for name, weight in model.module.named_parameters()}
        found["model.embed_tokens.weight"] = None  # not used, where it has numbers nevertheless
        model.step()
    return {name: whole(tensor) for name, tensor in found.items()}


@contextlib.contextmanager
def kept_by_autograd() -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept


def assert_near(
    ours: dict[str, Tensor | None],
    truth: dict[str, Tensor | None],
    theirs: dict[str, Tensor | None] | None = None,
    slack: float = 1.3,
) -> None:
    """In float32 up to the order of sums; else no further (rms) from float32's than theirs.

    Over all draws, and over all tensors together by the factor `slack`; for one tensor it is 2,
    because near-ties in the router make single tensors of two runs differ by chance.
    """
    assert ours.keys() == truth.keys()
    total = [0.0, 0.0]
    for name, t in truth.items():
        o = ours[name]
        assert (o is None) == (t is None), name
        if t is None:
            continue
        assert o.shape == t.shape, name
        assert o.isfinite().all(), name
        scale = t.square().mean().sqrt().item()
        error = (o - t).square().mean().sqrt().item()
        if theirs is None:
            assert error <= SUMS * scale or error <= 1e-9, f"{name}: {error} of {scale}"
            continue
        other = (theirs[name] - t).square().mean().sqrt().item()
        eps = 2**-8
        assert error <= 2 * other + eps * scale, f"{name}: {error}, HF's {other}, of {scale}"
        if scale:
            total = [total[0] + (error / scale) ** 2, total[1] + (other / scale) ** 2]
    assert total[0] <= slack**2 * total[1], f"all tensors: {total[0]}, HF's {total[1]}"


def truth_of(folder: str, times: int = 1, draws: int = 1) -> dict[str, Tensor | None]:
    return step(load(folder, torch.float32), times, draws)


def compare(folder: str, name: str, times: int = 1) -> None:
    """Patched against the whole model in float32, and on GPUs in bfloat16 against unpatched too."""
    for dtype, draws in ((torch.float32, 1), (torch.bfloat16, HALF_DRAWS))[: 1 + ON_GPU]:
        truth = truth_of(folder, times, draws)
        model = load(folder, dtype, **(how := engine(name)))
        if "device_mesh" in how:
            fully_sharded(model, mesh=how["device_mesh"]["dp"])
        with counted() as calls:
            theirs = step(model, times, draws) if dtype != torch.float32 else None
            assert not calls
            report = moe_patch.patch(model)
            assert len(report.fused) == LAYERS and not report.skipped, str(report)
            ours = step(model, times, draws)
        assert sorted(calls) == sorted(["experts", "router"] * LAYERS * times * draws)
        assert_near(ours, truth, theirs)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Grows by a word for each of our functions that a block came to."""
    places = [(decorated, "fused_experts", "experts"), (llama4, "fused_experts", "experts")]
    places += [(module, "select_experts", "router") for module in (llama4, qwen3_moe, routers)]
    originals = [getattr(module, name) for module, name, _ in places]
    calls: list[str] = []
    for (module, name, word), original in zip(places, originals):

        def call(*args, original=original, word=word, **more):
            calls.append(word)
            return original(*args, **more)

        setattr(module, name, call)
    try:
        yield calls
    finally:
        for (module, name, _), original in zip(places, originals):
            setattr(module, name, original)
