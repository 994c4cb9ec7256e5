"""The MoE layers of a model and who watches them: recordings, replays, loads.

A layer has hooks while somebody watches it, and none before and after. From the router's call to
the experts' call is one `Call`: the first says what was chosen, the second with which weights.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import COMPILED, ORIG_MOD
from ..notices import warn_once
from ..patcher import Block, find_blocks
from ..recognise.eligibility import is_decorated
from ..recognise.routers import is_router_class
from ..recognise.wrapped import hooked_by_plan, plain_class
from .choosing import Choosing
from .recomputed import in_backward, meet, remembering

_SIZES = ("num_experts", "n_routed_experts", "num_local_experts")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


class Watcher:
    """What a context of this room is to the layers; each has its own place among `layers`."""

    verb = "watched"
    """In sentences: a model that is being ..."""
    of_routers = False
    """Whether it decides or needs logits; else what experts are called with says enough."""

    def given(self, call: Call, tokens: int, top_k: int, device: torch.device) -> Tensor | None:
        """The experts to take, [T, K] int64, rows that begin with -1 excepted; None: no wish."""

    def saw(self, call: Call) -> None:
        """The layer's experts begin; not told of forwards that run again."""


class Call:
    """One run of a layer: its router, then its experts."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.again = False
        """Whether gradient checkpointing runs what ran before."""
        self.index: Tensor | None = None
        """[T, K], what was chosen; global ids under expert parallelism."""
        self.weights: Tensor | None = None
        """[T, K], with which the experts are called; None where they are not told."""
        self.logits: Tensor | None = None
        """[T, E]."""
        self.begins: dict[Watcher, int] = {}
        """Of watchers that count tokens: where this call's begin."""
        self.refused: Watcher | None = None

    @property
    def num_experts(self) -> int:
        """Columns of the logits."""
        return self.layer.num_experts

    def given(self, tokens: int, top_k: int, device: torch.device) -> Tensor | None:
        """The first watcher's wish."""
        wishes = (each.given(self, tokens, top_k, device) for each in self.layer.watchers)
        return next((wish for wish in wishes if wish is not None), None)

    def chose(self, top_k_index: Tensor) -> None:
        """Keeps the choice."""
        self.index = top_k_index

    def multiplied(self, router_logits: Tensor) -> None:
        """Keeps the logits."""
        self.logits = router_logits


class _Running(threading.local):
    """The calls that are under way in a thread."""

    def __init__(self) -> None:
        self.modes: list[Choosing] = []
        self.calls: dict[Layer, Call] = {}


class Layer:
    """A MoE layer of a model."""

    def __init__(self, block: Block) -> None:
        self.name, self.experts = block.name, experts_of(block)
        self.scopes = _scopes(block)
        self.num_experts = _num_experts(block, self.scopes)
        self.by_tokens = _chooses_by_tokens(block)
        self.watchers: list[Watcher] = []
        self._told = _told(block, self.experts)
        self._of_routers = False
        """Whether the scopes have hooks: only then a call begins before its experts."""
        self._handles: list[Any] = []
        self._running = _Running()

    @property
    def number(self) -> int | None:
        """Of the decoder layer that it is in; None where its name has none."""
        found = _NUMBER.search(self.name)
        return None if found is None else int(found[1])

    def watch(self, watcher: Watcher) -> None:
        """Puts on the hooks that it needs."""
        self.watchers.append(watcher)
        self._hook()

    def leave(self, watcher: Watcher) -> None:
        """Takes off the hooks that nobody needs any more."""
        self.watchers = [each for each in self.watchers if each is not watcher]
        self._hook()

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._of_routers = not self._told or any(each.of_routers for each in self.watchers)
        for scope in self.scopes if self.watchers and self._of_routers else ():
            self._handles += [
                scope.register_forward_pre_hook(self._begin, prepend=True),
                scope.register_forward_hook(self._end, always_call=True),
            ]
        if self.watchers:
            hook = self.experts.register_forward_pre_hook(self._experts, with_kwargs=True)
            self._handles.append(hook)

    def _call(self) -> Call:
        """A new one, which knows whether it runs again."""
        first, again = meet(self, lambda: Call(self))
        if not (again or in_backward()):
            return first
        call = Call(self)
        call.again, call.begins = True, first.begins
        return call

    def _begin(self, *_: Any) -> None:
        call = self._running.calls[self] = self._call()
        mode = Choosing(call)
        self._running.modes.append(mode)
        mode.__enter__()

    def _end(self, *_: Any) -> None:
        if self._running.modes:  # none where a hook before `_begin` raised
            self._running.modes.pop().__exit__(None, None, None)

    def _experts(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._running.calls.pop(self, None) if self._of_routers else self._call()
        if call is None:  # called without the block
            return
        index, weights = _routing(args, kwargs)
        if call.index is None:
            if self._of_routers:
                self._refuse_given(call, index)
            call.index = index
        call.weights = weights
        if not call.again:
            for watcher in self.watchers:
                watcher.saw(call)
        call.index = call.weights = call.logits = None  # a checkpoint keeps the call

    def _refuse_given(self, call: Call, index: Tensor | None) -> None:
        """Raises where a choice was to be given, and the router does not choose by topk."""
        if index is None or self.by_tokens:
            return
        for watcher in self.watchers:
            if watcher.given(call, len(index), index.shape[1], index.device) is not None:
                raise RuntimeError(
                    f"the router of {self.name or 'the block'} does not choose experts by topk, so "
                    "that its choice can be recorded and not replayed."
                )


def _routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """(top_k_index, top_k_weights) that experts are called with."""
    given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args)) | kwargs
    return given.get("top_k_index"), given.get("top_k_weights")


_LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
"""By their experts: contexts of several kinds share a layer."""


def layers_of(model: nn.Module) -> list[Layer]:
    """The model's MoE layers whose routers choose, in the order of their names in the model.

    Raises:
        TypeError: no nn.Module.
        ValueError: it has none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, found {type(model).__name__}.")
    found = []
    for block in find_blocks(model):
        if block.module is block.experts or not block.is_known():
            continue
        experts = experts_of(block)
        layer = _LAYERS.get(experts)
        if layer is None or layer.name != block.name and not layer.watchers:
            layer = _LAYERS[experts] = Layer(block)
        found.append(layer)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no MoE block of a kind that moe_patch knows: "
            "python -m moe_patch env lists them."
        )
    return found


@contextlib.contextmanager
def watching(model: nn.Module, layers: list[Layer], watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher` is told of the choices in these layers of the model, which runs uncompiled.

    Raises:
        ValueError: another watcher of its kind is there.
    """
    if any(type(each) is type(watcher) for layer in layers for each in layer.watchers):
        raise ValueError(
            f"the model is being {watcher.verb} already: leave that context before the next one."
        )
    modules = list(model.modules())
    if any(getattr(module, COMPILED, None) or hasattr(module, ORIG_MOD) for module in modules):
        warn_once(
            f"a compiled model runs uncompiled while its routing is {watcher.verb}: torch.compile "
            "does not see the hooks."
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(remembering(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            layer.watch(watcher)
            stack.callback(layer.leave, watcher)
        yield


def experts_of(block: Block) -> nn.Module:
    """The module that is called with the choice: there can be shared experts of its class, too."""
    named = {name.split(".")[0]: module for name, module in block.module.named_modules()
             if is_decorated(module)}  # fmt: skip
    return named.get("experts", block.experts)


def _scopes(block: Block) -> list[nn.Module]:
    """The modules in whose forward the choice is made: routers, or else the block."""
    found = [m for m in block.module.modules() if is_router_class(plain_class(m)) and _chooses(m)]
    # Llama4's fused block asks whether hooks wrote what its router returned
    names = {plain_class(module).__name__ for module in found}
    return found if found and "Llama4Router" not in names else [block.module]


def _told(block: Block, experts: nn.Module) -> bool:
    """Whether experts are called with the router's choice: Llama4's get inputs alone, and under
    expert parallelism ids are a rank's own."""
    named = inspect.signature(type(experts).forward).parameters
    return "top_k_index" in named and not any(map(hooked_by_plan, block.module.modules()))


def _chooses(module: nn.Module) -> bool:
    functions = (f for cls in type(module).__mro__ for f in vars(cls).values())
    return any(isinstance(f, FunctionType) and "topk" in f.__code__.co_names for f in functions)


def _chooses_by_tokens(block: Block) -> bool:
    """Whether a router is told the token's ids: the same ids, the same choice."""
    routers = (m for m in block.module.modules() if is_router_class(plain_class(m)))
    return any("input_ids" in inspect.signature(type(m).forward).parameters for m in routers)


def _num_experts(block: Block, scopes: list[nn.Module]) -> int:
    """All of them, under expert parallelism too, where experts count their own."""
    for module in (*scopes, block.module, block.experts):
        for name in _SIZES:
            if isinstance(found := getattr(module, name, None), int):
                return found
    weight: Any = getattr(scopes[0], "weight", None)
    experts: Any = experts_of(block)
    return len(experts.down_proj if weight is None else weight)
