"""What of the installed transformers is fused, read off its own code: a line a family.

Nothing is listed by hand, so a family of a new release is there, with what becomes of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from . import compat
from .activation import parse
from .models import SWAPS, decorated
from .recognise import eligibility, gates, routers

_MOE = re.compile(r"^class \w*(?:Experts|SparseMoeBlock|MoE|TextMoe)\w*\(nn\.Module", re.MULTILINE)
_NAMES = re.compile(r"(Experts|MoE|SparseMLP)$")


@dataclass(frozen=True)
class Support:
    """One experts class of one family."""

    family: str
    experts: str
    gate: str  # as it is fused, "" when it is not
    router: str  # "fused" or Hugging Face's
    reason: str | None  # why it is not fused
    router_reason: str | None = None  # why the router is not
    adapters_reason: str | None = None  # why PEFT computes adapters on the experts' weights itself

    @property
    def fused(self) -> bool:
        """Whether `patch` fuses it, on a device where the kernels run and in a dtype they take."""
        return self.reason is None


@functools.cache
def families() -> tuple[Support, ...]:
    """Every family of the installed transformers that has experts, by name."""
    folder = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(folder.glob("*/modeling_*.py")):
        if not _MOE.search(path.read_text(encoding="utf-8")):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # an optional dependency of that family
            found.append(Support(path.parent.name, "", "", "", f"it is not importable: {error}"))
            continue
        found += _of(module, path.parent.name)
    return tuple(found)


def table() -> str:
    """`families` for people: what is fused first, then what is left to Hugging Face, and why."""
    found = families()
    fused = [one for one in found if one.fused]
    lines = [f"{len(fused)} of {len(found)} experts classes of this transformers are fused:"]
    for one in fused:
        router = ", router too" if one.router == "fused" else ""
        lines.append(f"  {one.family:24}{one.experts:34}{one.gate}{router}")
    lines.append(
        "in FP8 (transformers' FP8Experts) with blocks of 128 x 128 and dynamic activations: fused"
        "\n  static activations, other blocks, FP4: HF's"
    )
    lines.append("in 4 bits (quantize_experts, ExpertsQuantConfig): fused in the families above")
    lines.append("the others run Hugging Face's own code:")
    lines += [f"  {o.family:24}{o.experts:34}{o.reason}" for o in found if not o.fused]
    lines += _section(
        "routers of fused experts that run Hugging Face's own code:",
        [f"{o.family:24}{o.router_reason}" for o in fused if o.router_reason],
    )
    adapters = [f"{o.family:24}{o.adapters_reason}" for o in fused if o.adapters_reason]
    if importlib.util.find_spec("peft") and (reason := compat.why_no_adapters()):
        adapters = [f"{'every family':24}{reason}"]
    lines += _section("adapters on the weights of fused experts that PEFT computes:", adapters)
    lines += _section("private names that are gone here:", compat.lost(load=True))
    return "\n".join(lines)


def _section(title: str, rows: list[str]) -> list[str]:
    return [title, *(f"  {row}" for row in rows)] if rows else []


def _why_routers(classes: list[type[nn.Module]]) -> str | None:
    """Why the routers among a family's classes are not fused; None if one is."""
    found = {cls.__name__: _why_router(cls) for cls in classes if routers.is_router_class(cls)}
    if None in found.values():
        return None
    if not found:
        return "its block itself chooses experts"
    return "; ".join(f"{name}: {reason}" for name, reason in found.items())


def _why_router(cls: type[nn.Module]) -> str | None:
    return None if cls in SWAPS or routers.rule_of(cls) else routers.why_left(cls)


def _of(module: ModuleType, family: str) -> Iterator[Support]:
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, nn.Module)]
    classes = [cls for cls in classes if cls.__module__ == module.__name__]
    why_router = _why_routers(classes)
    router = "HF" if why_router else "fused"
    switched = [cls for cls in classes if eligibility.dispatches(cls) or _undecorated(cls)]
    for cls in switched:
        experts = _build(_undecorated(cls) or cls, module)
        if experts is None:
            yield Support(family, cls.__name__, "", router, "its configuration is not known here")
            continue
        reason = eligibility.why_not_form(experts)
        parts = None if reason else eligibility.why_by_parts(experts)
        gate = f"by parts: {parts}" if parts else ""
        if not (reason or parts):
            gate = _formula(gates.activation_of(experts))
            gate += ", biases" if experts.has_bias else ""
        adapters = f"they run by parts, because of {parts}" if parts else None
        yield Support(family, cls.__name__, gate, router, reason, why_router, adapters)
    swapped = [cls for cls in classes if cls in SWAPS and cls.__name__.endswith("Moe")]
    for cls in swapped:
        yield Support(family, cls.__name__, _formula(gates.SILU), "fused", None)
    if not switched and not swapped:
        names = [cls.__name__ for cls in classes if _NAMES.search(cls.__name__)]
        reason = "transformers has no switch for its experts (@use_experts_implementation)"
        yield Support(family, names[0] if names else "", "", router, reason)


def _undecorated(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The fused class of experts that have a file in models/ for want of HF's decorator."""
    found: Any = SWAPS.get(cls, object)
    return found if issubclass(found, decorated.UndecoratedExperts) else None


def build(one: Support, size: dict[str, int] | None = None) -> nn.Module | None:
    """The experts of the family's default configuration, on the meta device; attributes of `size`
    in the place of its own. None where that configuration is none of a MoE."""
    folder = Path(transformers.__file__).parent / "models" / one.family
    for path in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{one.family}.{path.stem}")
        if hasattr(module, one.experts):
            found = _build(getattr(module, one.experts), module, size)
            return None if isinstance(getattr(found, "config", None), _Filled) else found
    return None


def _build(
    cls: type[nn.Module], module: ModuleType, size: dict[str, int] | None = None
) -> nn.Module | None:
    """The experts of the family's default configuration, without memory."""
    parts = [part for config in _configs(module) for part in (config, *_parts(config))]
    parts = [part for part in parts if not re.search("Vision|Audio", type(part).__name__)]
    if size:
        for config in parts:
            with contextlib.suppress(Exception), torch.device("meta"):
                experts = cls(_Sized(config, size))
                experts.config = config
                return experts
        return None
    for config in (*parts, *map(_Filled, parts)):
        with contextlib.suppress(Exception), torch.device("meta"):
            return cls(config)
    return None


class _Sized:
    """A configuration with other sizes than its own, whatever it would say to them."""

    def __init__(self, config: Any, size: dict[str, int]) -> None:
        self.config, self.size = config, size

    def __getattr__(self, name: str) -> Any:
        return self.size[name] if name in self.size else getattr(self.config, name)


class _Filled:
    """A configuration whose default is no MoE: what it leaves out is a small number."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.config, name, None)
        if isinstance(found, list) and found:  # a number a modality
            found = found[0]
        return 8 if found is None else found


def _configs(module: ModuleType) -> Iterator[Any]:
    seen = [c for c in vars(module).values() if inspect.isclass(c)]
    for cls in seen:
        if issubclass(cls, transformers.PreTrainedConfig):
            with contextlib.suppress(Exception):
                yield cls()


def _parts(config: Any) -> Iterator[Any]:
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield value


def _formula(activation: str) -> str:
    """silu(gate) * up, and what the family does to them."""
    found = parse(activation)
    if found.form == "ungated":
        return f"{found.act}, no gate"
    text = f"{found.act}(gate) * up"
    if found.alpha != 1:
        text = f"gate * sigmoid({found.alpha:g} gate) * up"
    if found.offset:
        text = text.replace("up", f"(up + {found.offset:g})")
    text += "" if found.limit is None else f", clamped at {found.limit:g}"
    return text if found.form == "concatenated" else f"{text}, {found.form}"
