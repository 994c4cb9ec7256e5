"""patch(), unpatch(): put the fused code into a model's MoE blocks, and HF's own back.

What is patched can be read off the model itself (an ExpertsConfig, a class of SWAPS), so copies and
pickles of a patched model are patched models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from . import ranks
from .models import SWAPS, gates, with_adapters, with_routers
from .models.decorated import (
    ENABLED,
    ExpertsConfig,
    UndecoratedExperts,
    dispatches,
    is_decorated,
    restore_default,
    why_not_fused,
)
from .models.wrapped import plain_class, set_class

LOOKS_LIKE_MOE = re.compile(r"(Experts|M[oO][eE](Block)?)$")
"""Names of classes whose modules are reported, fused or not."""

_SUPPORTED = "experts with transformers' @use_experts_implementation and Llama4TextMoe"
_WRAPPERS = {"base_layer", "original_module", "module", "_fsdp_wrapped_module", "_orig_mod"}
"""Where PEFT, FSDP and torch.compile keep the module that they wrap."""


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did; printable."""

    fused: list[str] = field(default_factory=list)
    """Names of the fused blocks, as in `named_modules()`; "" is the module itself."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, class, reason) of each MoE block that stays as Hugging Face wrote it."""
    classes: list[str] = field(default_factory=list)
    """The class names of the fused blocks."""

    def __str__(self) -> str:
        total = len(self.fused) + len(self.skipped)
        kinds = ", ".join(f"{count} {name}" for name, count in Counter(self.classes).items())
        lines = [f"moe_patch: fused {len(self.fused)} of {total} MoE blocks"]
        lines[0] += f" ({kinds})" if kinds else ""
        lines += [f"  {name or '(root)'} ({cls}): {reason}" for name, cls, reason in self.skipped]
        return "\n".join(lines)


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch takes a torch.nn.Module, found {type(model).__name__}.")
    with_adapters()
    with_routers(model)
    report, matched, changed = PatchReport(), False, False
    for block in _blocks(model):
        matched = matched or block.is_known()
        cls, reason = plain_class(block.module).__name__, block.why_not()
        if reason:
            report.skipped.append((block.name, cls, reason))
        else:
            changed = block.fuse() or changed
            report.fused.append(block.name)
            report.classes.append(cls)
    if strict and not matched:
        found = ", ".join(dict.fromkeys(f"{cls} ({reason})" for _, cls, reason in report.skipped))
        raise ValueError(
            f"{type(model).__name__} has no MoE block that can be fused, found {found or 'none'}: "
            f"supported are {_SUPPORTED}, and strict=False accepts a model without."
        )
    if changed or not report.fused:
        ranks.agree(model.parameters(), blocks=len(report.fused), MOE_PATCH=int(ENABLED))
    return report


def unpatch(model: nn.Module) -> None:
    """Puts Hugging Face's own code back into every block of `model`; harmless if not patched.

    Also undoes `from_pretrained(..., experts_implementation="moe_patch")`.
    """
    originals = {fused: original for original, fused in SWAPS.items()}
    for module in model.modules():
        if isinstance(vars(module).get("config"), ExpertsConfig):
            module.config = module.config.original
        if plain_class(module) in originals:
            set_class(module, originals[plain_class(module)])
        vars(module).pop(gates.KNOWN, None)
    for module in model.modules():
        restore_default(module)


@dataclass
class _Block:
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

    def fuse(self) -> bool:
        """Whether anything of it was not fused yet."""
        changed = False
        for module in self.module.modules():
            if is_decorated(module) and not isinstance(module.config, ExpertsConfig):
                module.config = ExpertsConfig(module.config)
                gates.activation_of(module)  # now: a trace could not
            elif plain_class(module) in SWAPS:
                set_class(module, SWAPS[plain_class(module)])
                if isinstance(module, UndecoratedExperts):
                    gates.activation_of(module)
            else:
                continue
            changed = True
        return changed


def _is_known(module: nn.Module) -> bool:
    """Whether these are experts that are fused wherever they are."""
    return is_decorated(module) or issubclass(_fused_class(module) or object, UndecoratedExperts)


def _blocks(model: nn.Module) -> list[_Block]:
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
        blocks[name] = _Block(name, modules[name], module)
    return [block for block in blocks.values() if not _only_holds(block, blocks)]


def _only_holds(block: _Block, blocks: Iterable[str]) -> bool:
    """Whether it is no MoE but the place of others: Ernie-VL's, one for text and one for images."""
    inner = any(name.startswith(f"{block.name}.") for name in blocks)
    return inner and block.module is block.experts and _fused_class(block.module) is None


def _fused_class(module: nn.Module) -> type[nn.Module] | None:
    cls = plain_class(module)
    return cls if cls in SWAPS.values() else SWAPS.get(cls)


def _why_not_part(module: nn.Module) -> str | None:
    if is_decorated(module):
        return why_not_fused(module)
    why_not = getattr(_fused_class(module), "why_not_fused", None)
    return why_not(module) if why_not else None


def _why_not_routed(module: nn.Module) -> str | None:
    top_k, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if isinstance(top_k, int) and isinstance(experts, int) and not 1 <= top_k <= experts:
        return f"top_k is {top_k} and there are {experts} experts: 1 to {experts} is needed"
    return None


def _why_unknown(block: _Block) -> str:
    for cls in (plain_class(block.module), plain_class(block.experts)):
        for base in cls.__mro__[1:]:
            if dispatches(base) or base in SWAPS:
                return f"{_path(cls)} derives from {base.__name__}: only that class can be fused"
    return f"{_path(plain_class(block.experts))} is not a class that moe_patch knows"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
