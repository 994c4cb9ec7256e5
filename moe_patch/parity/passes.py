"""One pass of a block, in each of the ways in which people run it, and all that it gives back.

T tokens, H hidden size, E experts, K choices a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..recognise.parts import up_name
from .shadow import Family, find_experts, trained


@dataclass(frozen=True)
class Pass:
    """How a block is run. The default is a training pass in eval mode: every gradient is wanted."""

    name: str = "training"
    backward: bool = True
    frozen: str = ""
    """Experts' parameters that want no gradient: "all", "up" or "down"."""
    train: bool = False
    autocast: bool = False
    checkpoint: bool = False
    strided: bool = False
    """Rows of the input stand apart, with NaN between them."""
    accumulate: bool = False
    """The experts' parameters have a `.grad` already, and `backward` adds to it."""
    sentinels: bool = False
    """Some slots go to expert E, which expert parallelism means as "none of these"."""

    def __str__(self) -> str:
        return self.name

    def frozen_names(self, experts: nn.Module) -> tuple[str, ...]:
        """Which of the experts' parameters want no gradient."""
        if self.frozen == "all":
            return trained(experts)
        return {"up": (up_name(experts),), "down": ("down_proj",), "": ()}[self.frozen]


TRAINING = Pass()
INFERENCE = Pass("no gradients", backward=False)

FEW = (
    Pass("strided input, no gradients", backward=False, strided=True),
    Pass("autocast, no gradients", backward=False, autocast=True),
    Pass("sentinels, no gradients", backward=False, sentinels=True),
)
"""Passes for every number of tokens: inference takes other kernels for a few."""

MANY = (
    *FEW,
    Pass("frozen experts", frozen="all"),
    Pass("frozen first projection", frozen="up"),
    Pass("frozen second projection", frozen="down"),
    Pass("accumulated .grad", accumulate=True),
    Pass("autocast", autocast=True),
    Pass("gradient checkpointing", checkpoint=True),
    Pass("train()", train=True),
    Pass("strided input", strided=True),
    Pass("sentinels", sentinels=True),
)


@dataclass
class Inputs:
    """What a pass is given."""

    x: Tensor  # [T, H]
    d_out: Tensor  # [T, H]
    index: Tensor | None = None  # [T, K]: forced on Hugging Face's router, given to bare experts
    weights: Tensor | None = None  # [T, K]: only for bare experts
    before: dict[str, Tensor] | None = None  # `.grad` of the experts' parameters


class Added:
    """What a pass added to a gradient: `after - before`, in float64 and a part at a time."""

    def __init__(self, after: Tensor, before: Tensor) -> None:
        self.after, self.before = after, before

    def __getitem__(self, at: int) -> Tensor:
        return self.after[at].double() - self.before[at].double()

    @property
    def mT(self) -> Added:  # noqa: N802 (as of a Tensor)
        """Both transposed."""
        return Added(self.after.mT, self.before.mT)


Run = dict[str, Any]
"""What a pass gave: output, index, weights, logits, gradients d_* (Tensors or Added), and
"returned": {what: a description of the values that a module returned}."""


class Force(TorchFunctionMode):
    """Makes a router choose `index`: torch.topk answers with the values found there."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.index = index

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            return torch.return_types.topk((scores.gather(-1, self.index), self.index))
        return func(*args, **(kwargs or {}))


def valid(index: Tensor, num_experts: int) -> Tensor:
    """Which slots [T, K] go to an expert."""
    return (index >= 0) & (index < num_experts)


def legal(given: Inputs, valid: Tensor) -> Inputs:
    """The same inputs without sentinels: a weight of zero instead."""
    return replace(given, index=given.index.where(valid, 0), weights=given.weights.where(valid, 0))


def drop(run: Run, valid: Tensor) -> Run:
    """A run on `legal` inputs, with no gradient for the weights of dropped slots."""
    if "d_top_k_weights" not in run:
        return run
    return run | {"d_top_k_weights": run["d_top_k_weights"].where(valid, 0)}


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that the autocast passes of a block in `dtype` compute in."""
    if dtype != torch.float32:
        return dtype
    return torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter's limit


def run(block: nn.Module, family: Family, given: Inputs, how: Pass = TRAINING) -> Run:
    """Runs `block` once and leaves it as it was.

    Args:
        block: with its hooks and overrides.
        family: where its parts are; without a router the experts run alone.
        given: rows of input, and what bare experts need besides.
        how: gradients or not, and so on.
    """
    experts = find_experts(block)
    with arranged(block, how, given), contextlib.ExitStack() as stack:
        seen: Run = {"returned": {}}
        x = _input(given.x, how)
        if family.router is None:
            weights = given.weights.detach().requires_grad_(how.backward)
            seen |= {"index": given.index, "weights": weights}
            out = _call(experts, how, x, given.index, weights)
            seen["returned"]["experts"] = describe(out)
        else:
            _watch(stack, block, experts, family, seen)
            if given.index is not None:
                stack.enter_context(Force(given.index))
            result = _call(block, how, x[None])
            seen["returned"]["block"] = describe(result)
            out = (result[0] if isinstance(result, tuple) else result).reshape(x.shape)
        d_out = given.d_out.to(out.dtype)
        result = seen | {"output": out.detach()}
        if how.accumulate:
            out.backward(d_out)
            for name, before in given.before.items():
                result[f"d_{name}"] = Added(getattr(experts, name).grad, before)
        elif how.backward:
            leaves = {"d_hidden_states": x, "d_top_k_weights": seen["weights"]}
            leaves |= {f"d_{name}": getattr(experts, name) for name in trained(experts)}
            if family.router:
                leaves["d_router"] = getattr(block, family.router).weight
            leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            grads = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True)
            for (name, leaf), grad in zip(leaves.items(), grads):
                result[name] = torch.zeros_like(leaf) if grad is None else grad
    result = {k: v.detach() if isinstance(v, Tensor) else v for k, v in result.items()}
    index = result.setdefault("index", given.index)
    for name in ("weights", "d_top_k_weights"):
        if name in result and index is not None and result[name].shape != index.shape:
            result[name] = result[name].gather(1, index)  # Llama4's scores over all experts
    return result


def _call(module: nn.Module, how: Pass, *args: Tensor) -> Any:
    if how.checkpoint:
        return checkpoint(module, *args, use_reentrant=False)
    return module(*args)


def _watch(
    stack: contextlib.ExitStack, block: nn.Module, experts: nn.Module, family: Family, seen: Run
) -> None:
    """Fills `seen` by hooks that go last; checkpointing calls again, and the first call counts."""

    def on_experts(_, args):
        if len(args) == 3 and "index" not in seen:  # Llama4's own experts take one argument
            seen.update(index=args[1], weights=args[2])

    def after_experts(_, args, result):
        if len(args) == 3 or not family.shared_expert:
            seen["returned"].setdefault("experts", describe(result))

    def on_router(_, args, result):
        seen["returned"].setdefault("router", describe(result))
        seen.setdefault("logits", result[family.logits])
        for i, value in enumerate(result):
            if value.is_floating_point():
                seen.setdefault(f"router output {i}", value)
        if family.shared_expert:  # Llama4's scores [T, E], should the experts get none
            seen.setdefault("weights", result[0])

    for hook in (
        experts.register_forward_pre_hook(on_experts),
        experts.register_forward_hook(after_experts),
        getattr(block, family.router).register_forward_hook(on_router),
    ):
        stack.callback(hook.remove)


def _input(x: Tensor, how: Pass) -> Tensor:
    """A leaf [T, H] with the numbers of x."""
    x = x.detach().float() if how.autocast else x.detach()
    if how.strided:
        room = x.new_full((x.shape[0], x.shape[1] + 8), torch.nan)
        room[:, : x.shape[1]] = x
        x = room[:, : x.shape[1]]
    return x.requires_grad_(how.backward)


def _seed(device: torch.device) -> None:
    """Seeds what a block may draw from. torch.manual_seed writes down a stack for each backend that
    is not there, which takes longer than a small block."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(0)


@contextlib.contextmanager
def arranged(block: nn.Module, how: Pass, given: Inputs) -> Iterator[None]:
    """The modes and the module's state that `how` asks for; all of it put back afterwards."""
    device = given.x.device
    modes = [(module, module.training) for module in block.modules()]
    wanted = [(p, p.requires_grad, p.grad) for p in block.parameters()]
    experts = find_experts(block) if how.frozen or how.accumulate else None
    dtype = autocast_dtype(given.x.dtype, device)
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in modes:
            module.training = how.train
        if how.backward:
            for parameter, _, _ in wanted:
                if parameter.is_floating_point() and parameter.element_size() > 1:
                    parameter.requires_grad_(True)
            for name in how.frozen_names(experts):
                getattr(experts, name).requires_grad_(False)
        if how.accumulate:
            for parameter, _, _ in wanted:
                parameter.grad = None
            for name, before in given.before.items():
                getattr(experts, name).grad = before.clone()
        with (
            torch.random.fork_rng(devices),
            torch.set_grad_enabled(how.backward),
            torch.autocast(device.type, dtype, enabled=how.autocast),
        ):
            _seed(device)
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad, grad in wanted:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad


def describe(value: Any) -> str:
    """Types, dtypes, shapes and whether a gradient is wanted, of whatever a module returned."""
    if isinstance(value, Tensor):
        grad = ", requires grad" if value.requires_grad else ""
        return f"{str(value.dtype)[6:]} {list(value.shape)}{grad}"
    if isinstance(value, (tuple, list)):
        return f"({'; '.join(map(describe, value))})"
    if isinstance(value, dict):
        return f"{{{'; '.join(f'{k}: {describe(v)}' for k, v in value.items())}}}"
    return type(value).__name__
