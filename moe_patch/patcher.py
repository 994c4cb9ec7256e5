"""patch(), unpatch(): put the fused code into a model's MoE blocks, and HF's own back.

What is patched can be read off the model itself (an ExpertsConfig, a class of SWAPS), so copies and
pickles of a patched model are patched models.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from . import compat, ranks, versions
from .compat import FSDP_WRAPPED, ORIG_MOD
from .models import SWAPS
from .models.decorated import (
    ExpertsConfig,
    UndecoratedExperts,
    register_for,
    restore_default,
    why_not_ours,
)
from .recognise import gates, lending, mlps, routers
from .recognise.eligibility import dispatches, is_decorated, why_by_parts, why_not_fused
from .recognise.original import Fused, describe, fused_within, replaced, why_replaced
from .recognise.storage import PLAIN, storage_of
from .recognise.swaps import with_adapters
from .recognise.wrapped import plain_class, replaced_forward, rewrapped, set_class
from .switch import ENABLED

LOOKS_LIKE_MOE = re.compile(r"(Experts|M[oO][eE](Block)?)$")
"""Names of classes whose modules are reported, fused or not."""

SUPPORTED = "experts with transformers' @use_experts_implementation and Llama4TextMoe"
_WRAPPERS = {"base_layer", "original_module", "module", FSDP_WRAPPED, ORIG_MOD}
"""Where PEFT, FSDP and torch.compile keep the module that they wrap."""
_METHOD = "quantization_method"
"""Attribute that transformers gives a model that it quantised while loading it."""
_patching = threading.RLock()


@dataclass(frozen=True)
class Left:
    """A part of a fused block that runs the code that it has without moe_patch."""

    name: str
    """As in `named_modules()`."""
    cls: str
    kind: str
    """"router", "gate" (two fused GEMMs, the class's own gate between them) or "adapters"."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name or '(root)'} ({self.cls}), {self.kind} not fused: {self.reason}"


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did; printable."""

    fused: list[str] = field(default_factory=list)
    """Names of the fused blocks, as in `named_modules()`; "" is the module itself."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, class, reason) of each MoE block that stays as it is, and of each router or block
    that does although its experts are fused."""
    classes: list[str] = field(default_factory=list)
    """The class names of the fused blocks."""
    routers: list[str] = field(default_factory=list)
    """Names of the fused routers of these blocks."""
    adapters: list[str] = field(default_factory=list)
    """Names of PEFT's wrappers whose factors the fused experts take."""
    shared_experts: list[str] = field(default_factory=list)
    """Names of the shared experts of these blocks whose gate is fused."""
    left: list[Left] = field(default_factory=list)
    """Routers, gates and adapters of fused blocks that are not fused; not those in `skipped`."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the model as a whole."""

    def __str__(self) -> str:
        whole = [name for name, *_ in self.skipped if not any(_is_in(name, f) for f in self.fused)]
        total = len(self.fused) + len(whole)
        kinds = ", ".join(f"{count} {name}" for name, count in Counter(self.classes).items())
        lines = [f"moe_patch: fused {len(self.fused)} of {total} MoE blocks"]
        lines[0] += f" ({kinds})" if kinds else ""
        lines += [f"  {name or '(root)'} ({cls}): {reason}" for name, cls, reason in self.skipped]
        lines += [f"  {part}" for part in (*self.left, *self.notes)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as json.dumps takes it."""
        blocks = [{"name": name, "class": cls} for name, cls in zip(self.fused, self.classes)]
        skipped = [dict(zip(("name", "class", "reason"), each)) for each in self.skipped]
        left = [
            {"name": part.name, "class": part.cls, "kind": part.kind, "reason": part.reason}
            for part in self.left
        ]
        return {
            "fused": blocks, "routers": list(self.routers), "adapters": list(self.adapters),
            "shared_experts": list(self.shared_experts),
            "skipped": skipped, "left": left, "notes": list(self.notes),
        }  # fmt: skip


def patch(model: nn.Module, *, strict: bool = True) -> PatchReport:
    """Puts the fused code into every supported MoE block of `model`, in place.

    Parameters, buffers, hooks and the state_dict stay what and where they are. A block that cannot
    be fused is left as it is and listed in the report. Patching twice is patching once. While a
    block is fused, `model.set_experts_implementation` does not change what it runs. Where ranks
    hold shards of the model (DTensors), all of them have to patch it: each waits for the next.

    Args:
        model: a model of transformers, a module that holds one (PEFT's, DDP's), or a bare block.
        strict: raise when no block is of a supported kind; otherwise the report says so.

    Raises:
        ValueError: nothing matched and strict.
        TypeError: `model` is not an nn.Module.
        RuntimeError: another rank that holds shards of the model does not patch it, or with other
            versions.
    """
    _check(model, "patch")
    report, matched, changed = PatchReport(), False, False
    fused = {
        "router": report.routers, "adapters": report.adapters,
        "shared experts": report.shared_experts,
    }  # fmt: skip
    with _patching:
        with_adapters()
        _recognise(model)
        versions.say_untested()
        compat.say_lost(compat.loaded())
        for block in find_blocks(model):
            matched = matched or block.is_known()
            cls, reason = plain_class(block.module).__name__, block.why_not()
            if reason:
                report.skipped.append((block.name, cls, reason))
            else:
                report.skipped.extend(block.left_out())
                changed = block.fuse() or changed
                for part in block.parts(besides={name for name, *_ in report.skipped}):
                    if isinstance(part, Left):
                        report.left.append(part)
                    else:
                        kind, name = part
                        fused[kind].append(name)
                report.fused.append(block.name)
                report.classes.append(cls)
        report.notes.extend(_notes(model, report))
    if strict and not matched:
        found = ", ".join(dict.fromkeys(f"{cls} ({reason})" for _, cls, reason in report.skipped))
        lost = "".join(f" ({sentence})" for sentence in compat.lost())
        raise ValueError(
            f"{type(model).__name__} has no MoE block that can be fused, found {found or 'none'}: "
            f"supported are {SUPPORTED}, and strict=False accepts a model without.{lost}"
        )
    if changed or not report.fused:
        ranks.agree(model.parameters(), blocks=len(report.fused), MOE_PATCH=int(ENABLED))
    return report


def _recognise(model: nn.Module) -> None:
    """Adds the swaps of routers and shared experts: which these are is asked, not listed."""
    for cls in {plain_class(module) for module in model.modules()}:
        if not issubclass(cls, Fused):
            routers.fused_class(cls)
            mlps.fused_class(cls)


def _notes(model: nn.Module, report: PatchReport) -> Iterator[str]:
    loaded = any(vars(m).get(_METHOD) == "bitsandbytes" for m in model.modules())
    fused = (model.get_submodule(name) for name in report.fused if loaded)
    experts = (m for block in fused for m in block.modules() if _is_known(m))
    if any(storage_of(each) is PLAIN for each in experts):
        yield (
            "bitsandbytes quantised the model's linear layers, and its experts are in 16 bits: "
            "moe_patch.quantize_experts(model) makes them 4 bits"
        )


def unpatch(model: nn.Module) -> None:
    """Puts Hugging Face's own code back into every block of `model`; harmless if not patched.

    Also undoes `from_pretrained(..., experts_implementation="moe_patch")`.

    Raises:
        TypeError: `model` is not an nn.Module.
        RuntimeError: somebody gave a module a class of their own that derives from its fused one;
            nothing is unpatched then.
    """
    _check(model, "unpatch")
    with _patching:
        modules = list(model.named_modules())
        for name, module in modules:
            _own_class(name, module)  # or raises
        for name, module in modules:
            if isinstance(vars(module).get("config"), ExpertsConfig):
                module.config = module.config.original
            # asked again: PEFT's own forward, in another thread, changes classes for its duration
            if (cls := _own_class(name, module)) is not type(module):
                set_class(module, cls)
            vars(module).pop(gates.KNOWN, None)
        for _, module in modules:
            restore_default(module)


def _check(model: nn.Module, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, found {type(model).__name__}.")


def _own_class(name: str, module: nn.Module) -> type[nn.Module]:
    """The module's class without moe_patch."""
    fused: Any = fused_within(type(module))
    if fused is None:
        return type(module)
    try:
        return rewrapped(module, fused, fused.stands_for)
    except TypeError as error:
        raise RuntimeError(
            f"moe_patch cannot unpatch {name or 'the module'}, whose class {type(module).__name__} "
            f"was derived from the fused {fused.__name__}: give it its former class, then unpatch."
        ) from error


def _is_in(name: str, block: str) -> bool:
    return name == block or not block or name.startswith(f"{block}.")


@dataclass
class Block:
    """A module that holds experts; the experts themselves when they are all there is."""

    name: str
    module: nn.Module
    experts: nn.Module

    def is_known(self) -> bool:
        """Whether its experts are decorated, or it has a fused class that holds experts."""
        swapped = _fused_class(self.module) is not None and self.module is not self.experts
        return swapped or any(map(_is_known, self.module.modules()))

    def why_not(self) -> str | None:
        """None when it can be fused, else the reason in one sentence."""
        if not self.is_known():
            return _why_unknown(self)
        reasons = (_why_not_part(m) or _why_not_routed(m) for m in self.module.modules())
        return next(filter(None, reasons), None)

    def left_out(self) -> Iterator[tuple[str, str, str]]:
        """(name, class, reason) of what stays as it is beside fused experts."""
        for name, module in self.module.named_modules(prefix=self.name):
            if reason := _why_left_out(module):
                yield name, plain_class(module).__name__, reason

    def parts(self, besides: Collection[str]) -> Iterator[Left | tuple[str, str]]:
        """What is left of the routers, gates and adapters of a fused block; (kind, name) of those
        routers, shared experts and adapters that are fused."""
        for name, module in self.module.named_modules(prefix=self.name):
            found = None if name in besides else _part(name, module)
            if found is None:
                continue
            kind, reason = found
            if reason:
                yield Left(name, plain_class(module).__name__, kind, reason)
            elif kind != "gate":
                yield kind, name

    def fuse(self) -> bool:
        """Whether anything of it was not fused yet."""
        changed = False
        for module in self.module.modules():
            fused = _fused_class(module)
            if is_decorated(module) and not isinstance(module.config, ExpertsConfig):
                gates.activation_of(module)  # now: a trace could not
                register_for(module)
                vars(module)["config"] = ExpertsConfig(module.config)
            elif fused and fused is not plain_class(module) and not _why_left_out(module):
                if issubclass(fused, UndecoratedExperts):
                    gates.activation_of(module)
                set_class(module, rewrapped(module, plain_class(module), fused))
            else:
                continue
            changed = True
        return changed


def _is_known(module: nn.Module) -> bool:
    """Whether these are experts that are fused wherever they are."""
    return is_decorated(module) or issubclass(_fused_class(module) or object, UndecoratedExperts)


def find_blocks(model: nn.Module) -> list[Block]:
    """Every module that holds experts or looks like it, fused or not."""
    modules, blocks = dict(model.named_modules()), {}
    for name, module in modules.items():
        looks = LOOKS_LIKE_MOE.search(type(module).__name__)
        path = name.split(".")
        if path[-2:-1] == ["modules_to_save"]:  # an adapter's copy of a whole module, in PEFT
            path = path[:-2]
        while path and path[-1] in _WRAPPERS:
            path.pop()
        is_experts = path[-1:] == ["experts"] or (looks and looks[0] == "Experts")
        if is_experts or is_decorated(module):
            name = ".".join(path[:-1])
        elif not looks:
            continue
        blocks[name] = Block(name, modules[name], module)
    return [block for block in blocks.values() if not _only_holds(block, blocks)]


def _only_holds(block: Block, blocks: Iterable[str]) -> bool:
    """Whether it is no MoE but the place of others: Ernie-VL's, one for text and one for images."""
    inner = any(name.startswith(f"{block.name}.") for name in blocks)
    return inner and block.module is block.experts and _fused_class(block.module) is None


def _fused_class(module: nn.Module) -> type[nn.Module] | None:
    cls = plain_class(module)
    return cls if issubclass(cls, Fused) else SWAPS.get(cls)


def _why_not_part(module: nn.Module) -> str | None:
    """Why the block with this module stays as it is."""
    if is_decorated(module):
        return why_not_ours(module) or why_not_fused(module)
    fused: Any = _fused_class(module)
    why_not = getattr(fused, "why_not_fused", None)
    return why_not and (why_replaced(fused) or why_not(module))


def _why_left_out(module: nn.Module) -> str | None:
    """Why this module stays as it is, although the experts of its block are fused."""
    cls = plain_class(module)
    fused: Any = _fused_class(module)
    if fused is None:
        is_router = routers.is_router_class(cls) and cls.__module__.startswith("transformers.")
        return routers.why_not(cls) if is_router else None
    if cls is not fused and replaced_forward(module):
        return "its forward was replaced on the instance, and that runs: patch before that"
    return why_replaced(fused)


def _part(name: str, module: Any) -> tuple[str, str | None] | None:
    """(kind, why it is not fused) of a router, a gate, shared experts or adapters in a fused
    block."""
    if issubclass(_fused_class(module) or object, mlps.FusedMLP):
        return "shared experts", None
    if routers.is_router(name, module):
        if plain_class(module) is nn.Linear:
            return "router", "the block itself chooses experts by the logits of this nn.Linear"
        return "router", routers.why_left(plain_class(module))
    if lending.is_adapter(module):
        return "adapters", lending.why_left_to_peft(module, _fused_class(module.get_base_layer()))
    if _is_known(module):
        return "gate", why_by_parts(module)
    return None


def _why_not_routed(module: nn.Module) -> str | None:
    top_k, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if isinstance(top_k, int) and isinstance(experts, int) and not 1 <= top_k <= experts:
        return f"top_k is {top_k} and there are {experts} experts: 1 to {experts} is needed"
    return None


def _why_unknown(block: Block) -> str:
    for cls in (plain_class(block.module), plain_class(block.experts)):
        if cls.__module__.startswith("transformers.") and [*replaced(cls, ["forward"])]:
            return describe(cls, "forward")
        for base in cls.__mro__[1:]:
            if dispatches(base) or base in SWAPS:
                return f"{_path(cls)} derives from {base.__name__}: only that class can be fused"
    return f"{_path(plain_class(block.experts))} is not a class that moe_patch knows"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
