"""Experts whose weights are in 4 bits, and Hugging Face's own code on what the weights stand for.

Their module keeps plain tensors under the names of the weights, as Hugging Face's FP8Experts does:
`gate_up_proj` (or `up_proj`) and `down_proj` are codes, uint8 [E, N, K / 2], even where the class
stores its weights [E, K, N]; `*_scales` and `*_zeros` stand beside them. All are frozen parameters,
so that state_dict, safetensors, DDP and accelerate take them as any other. Scales of e8m0 are kept
as bytes: no collective of torch sends that dtype.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..compat import APPLY, IMPLEMENTATION, MODULE_STATE
from ..formats.packed import Packed, dequantize
from ..notices import warn_once
from ..ops.low_rank import LowRank
from .lent import low_rank_updates
from .original import NAME
from .parts import stored_transposed, up_name
from .wrapped import set_class

_PARAMETERS, _, _MODULES, _ = MODULE_STATE
_PARTS = ("", "_scales", "_zeros")
"""What the names of a projection's tensors end in: codes, scales, zero points."""
WATCHERS: list[Callable[[], None]] = []
"""Called when a class of 4-bit experts is made."""

_Object: Any = object  # for type checkers: the class of the experts brings attributes of its own


class FourBits(_Object):
    """First among the bases of a class of 4-bit experts; the experts' class, fused or not, is the
    last. `wrapped.py` takes such a class for a wrapper of the experts' class."""

    within: type[nn.Module]
    """The class of the experts, of which this one knows nothing."""
    weight_format: str
    """A name in `formats.packed.FORMATS`."""
    weight_dtype: torch.dtype
    """The dtype that the weights had, and adapters on them get; follows `model.to(dtype)`."""
    around: Callable[[type], type]
    """`class_of`."""
    warns = True
    """Whether Hugging Face's forward on 4-bit weights is worth a warning."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the experts' class; where that is not patched, on dequantised weights.

        Raises:
            RuntimeError: a parametrization computes with the codes, as PEFT's do.
        """
        if "parametrizations" in vars(self)[_MODULES]:
            raise RuntimeError(
                f"{type(self).__name__} has a parametrization on codes of 4-bit weights, which are "
                "no numbers to compute with: remove it, or load the model in 16 bits."
            )
        if hasattr(type(self), "stands_for") or _implementation(self) == NAME:
            return super().forward(hidden_states, *args, **kwargs)
        if self.warns:
            _say_slow()
        return self.run_own(hidden_states, *args, **kwargs)

    def run_own(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's own forward, on dequantised weights."""
        forward = _hugging_faces(type(self)).forward
        return run_dequantised(self, forward, hidden_states, *args, **kwargs)

    def packed(self, name: str) -> Packed:
        """The weights [E, N, K] of the projection of that name, of the same memory."""
        scales, zeros = getattr(self, f"{name}_scales").detach(), getattr(self, f"{name}_zeros")
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        return Packed(getattr(self, name), scales, zeros, self.weight_format)

    def stored(self) -> list[Tensor]:
        """Codes, scales and zero points of both projections: the parameters that stay frozen."""
        names = (up_name(self), "down_proj")
        found = [getattr(self, name + part) for name in names for part in _PARTS]
        return [tensor for tensor in found if tensor is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves codes, scales and zero points as bytes: no cast of the model is to reach them."""
        kept = self.stored()

        def moved(tensor: Tensor) -> Tensor:
            if not any(tensor is each for each in kept):
                return fn(tensor)
            there = fn(tensor.view(torch.uint8))
            if there.dtype != torch.uint8:
                there = tensor.view(torch.uint8).to(there.device)
            return there.view(tensor.dtype)

        probe = torch.empty(0, dtype=self.weight_dtype, device=kept[0].device)
        dtype = fn(probe).dtype
        self.weight_dtype = dtype if dtype.is_floating_point else self.weight_dtype
        return getattr(super(), APPLY)(moved, recurse)

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        """Copies and pickles name the class of the experts: this one cannot be imported."""
        _, args, *state = super().__reduce_ex__(max(protocol, 2))
        if "within" not in vars(type(self)):  # an engine's class around it
            raise TypeError(f"{type(self).__name__} cannot be copied: copy the model before that.")
        return _new, (type(self).within,), *state


def _new(within: Any) -> Any:
    cls: Any = class_of(within)
    return cls.__new__(cls)


@functools.cache
def class_of(within: Any) -> type[FourBits]:
    """The class of 4-bit experts around a class of experts."""
    for watch in WATCHERS:
        watch()
    content = {"within": within, "__module__": within.__module__, "__doc__": within.__doc__}
    return type(f"FourBits{within.__name__}", (FourBits, within), content)


FourBits.around = staticmethod(class_of)


def is_four_bits(experts: Any) -> bool:
    """Whether the experts' weights are in 4 bits."""
    return isinstance(experts, FourBits)


def as_parameters(packed: Packed) -> dict[str, nn.Parameter | None]:
    """What a module keeps of a stack: {what the name ends in: frozen parameter}."""
    scales = packed.scales
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    tensors = zip(_PARTS, (packed.codes, scales, packed.zeros))
    return {
        part: None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        for part, tensor in tensors
    }


def quantise_module(experts: Any, up: Packed, down: Packed) -> None:
    """Turns experts into their 4-bit form, in place.

    Args:
        experts: a module with stacked weights, patched or not; they may be on the meta device.
        up: what takes the place of gate_up_proj (or up_proj), logical [E, N, K], meta or not.
        down: what takes the place of down_proj, in the same format.
    """
    first = up_name(experts)
    experts.weight_format, experts.weight_dtype = up.format, getattr(experts, first).dtype
    for name, packed in ((first, up), ("down_proj", down)):
        for suffix, frozen in as_parameters(packed).items():
            experts.register_parameter(name + suffix, frozen)
    if not is_four_bits(experts):
        within: Any = type(experts)
        around: Any = class_of(within)
        set_class(experts, around)


def dequantise_module(experts: Any, dtype: torch.dtype) -> None:
    """Gives 4-bit experts plain weights of that dtype, in place: what the codes stand for."""
    for name in (up_name(experts), "down_proj"):
        with torch.no_grad():
            weight = dequantize(experts.packed(name), dtype)
        weight = weight.mT.contiguous() if stored_transposed(experts) else weight
        for part in _PARTS[1:]:
            delattr(experts, name + part)
        experts.register_parameter(name, nn.Parameter(weight))
    set_class(experts, type(experts).within)
    del experts.weight_format, experts.weight_dtype


def _pass_over_codes() -> None:
    """Has `requires_grad_(True)` of a module leave the tensors of 4-bit experts in it frozen.

    torch's own raises at the first codes, which are integers, and has changed the parameters before
    them by then. It asks each parameter and no module, so that it cannot be answered elsewhere.
    """
    original = nn.Module.requires_grad_
    if hasattr(original, "moe_patch_original"):
        return

    @functools.wraps(original)
    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        four_bits = [m for m in self.modules() if isinstance(m, FourBits)] if requires_grad else []
        if not four_bits:
            return original(self, requires_grad)
        frozen = {id(tensor) for experts in four_bits for tensor in experts.stored()}
        others = [parameter for parameter in self.parameters() if id(parameter) not in frozen]
        if not others:
            name = getattr(self, "within", type(self)).__name__
            raise RuntimeError(
                f"the weights of {name} are in 4 bits and cannot be trained: put "
                "adapters on them, or load the model in 16 bits."
            )
        for parameter in others:
            parameter.requires_grad_(True)
        warn_once(
            "requires_grad_(True) leaves the weights of experts in 4 bits frozen: put adapters on "
            "them to train them."
        )
        return self

    vars(requires_grad_)["moe_patch_original"] = original
    nn.Module.requires_grad_ = requires_grad_  # type: ignore[method-assign]


WATCHERS.append(_pass_over_codes)


# Hugging Face's own code, on dequantised weights


def run_dequantised(
    experts: Any, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Calls Hugging Face's `forward` with a stand-in for the experts whose weights are dequantised
    to the dtype of hidden_states, with what LoRA lent added."""
    lazy = _implementation(experts) in (None, "eager")
    with dequantised(experts, hidden_states, lazy) as plain:
        return forward(plain, hidden_states, *args, **kwargs)


@contextlib.contextmanager
def dequantised(experts: Any, hidden_states: Tensor, lazy: bool = False) -> Iterator[Any]:
    """A stand-in for the experts whose weights are tensors of the dtype that hidden_states has.

    A projection is dequantised when it is asked for; with `lazy`, which suits loops over experts,
    one expert of it is. Autograd keeps no such weight: the backward makes it again.
    """
    dtype, device = hidden_states.dtype, hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # or autograd would keep what autocast casts
    lent = low_rank_updates(experts)
    up = up_name(experts)
    stacks = {
        up: _Stack(experts, up, dtype, lent.get("gate_up_low_rank")),
        "down_proj": _Stack(experts, "down_proj", dtype, lent.get("down_low_rank")),
    }
    hf: Any = _hugging_faces(type(experts))
    cls = _stand_in(hf)
    plain = cls.__new__(cls)
    plain.__dict__.update(vars(experts), _stacks=stacks, _lazy=lazy)
    parameters = vars(experts)[_PARAMETERS].items()
    plain.__dict__[_PARAMETERS] = {k: v for k, v in parameters if k not in stacks}
    if not torch.is_grad_enabled():
        yield plain
        return
    with saved_tensors_hooks(*_hooks(stacks)):
        yield plain


def _implementation(experts: Any) -> str | None:
    return getattr(getattr(experts, "config", None), IMPLEMENTATION, None)


def _hugging_faces(cls: Any) -> Any:
    """The class beneath those of moe_patch."""
    return getattr(cls, "stands_for", None) or cls.within


@functools.cache
def _stand_in(cls: Any) -> Any:
    """A class whose instances make their weights when they are asked for them."""

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 (a method of the class)
        stack = vars(self)["_stacks"].get(name)
        if stack is None:
            return cls.__getattr__(self, name)
        return stack if vars(self)["_lazy"] else stack.whole()

    content: dict[str, Any] = {"__getattr__": __getattr__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), content)


class _Stack:
    """Stacked weights, as their class stores them, that dequantise what is read of them."""

    def __init__(
        self, experts: FourBits, name: str, dtype: torch.dtype, low_rank: LowRank | None
    ) -> None:
        self.packed, self.dtype, self.low_rank = experts.packed(name), dtype, low_rank
        self.device, self.transposed = self.packed.device, stored_transposed(experts)
        e, n, k = self.packed.shape
        self.shape = torch.Size((e, k, n) if self.transposed else (e, n, k))
        self.made: dict[int, tuple[weakref.ref[Tensor], Packed]] = {}

    def whole(self) -> Tensor:
        """All of them, anew at each call."""
        return self._make(self.packed, self.low_rank, slice(None))

    def __getitem__(self, expert: Any) -> Tensor:
        if not isinstance(expert, int) and not (isinstance(expert, Tensor) and not expert.dim()):
            return self.whole()[expert]
        parts = (self.packed.codes, self.packed.scales, self.packed.zeros)
        codes, scales, zeros = (None if part is None else part[expert][None] for part in parts)
        one = replace(self.packed, codes=codes, scales=scales, zeros=zeros)
        lent = self.low_rank
        low_rank = None if lent is None else (lent[0][expert][None], lent[1][expert][None])
        return self._make(one, low_rank, 0)

    def _make(self, packed: Packed, low_rank: LowRank | None, which: Any) -> Tensor:
        with torch.no_grad():
            weight = dequantize(packed, self.dtype)
        at = weight.untyped_storage().data_ptr()
        if low_rank is not None:
            a, b = low_rank
            weight = weight + (b @ a).to(self.dtype)
        weight = (weight.mT if self.transposed else weight)[which]
        if low_rank is None:  # else autograd keeps it: it is no function of the codes alone
            self.made[at] = weakref.ref(weight), packed
        return weight

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [arg.whole() if isinstance(arg, cls) else arg for arg in args]
        named = {k: v.whole() if isinstance(v, cls) else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def _hooks(stacks: dict[str, _Stack]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What autograd does with a tensor that it keeps: of a dequantised weight it keeps the codes.

    Such a weight is known by its memory, while it is alive: whoever got that memory later is not.
    """

    def keep(tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor
        at = tensor.untyped_storage().data_ptr()
        for stack in stacks.values():
            weight, packed = stack.made.get(at, (None, None))
            if weight is not None and weight() is not None:
                strides = tensor.shape, tensor.stride(), tensor.storage_offset()
                return packed, tensor.dtype, strides
        return tensor

    def give(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        packed, dtype, strides = kept
        return dequantize(packed, dtype).as_strided(*strides)

    return keep, give


@torch.compiler.assume_constant_result
def _say_slow() -> None:
    warn_once(
        "moe_patch runs Hugging Face's own forward on experts in 4 bits, dequantised at every "
        "call, which is slow: call moe_patch.patch(model) to run fused kernels on them."
    )
