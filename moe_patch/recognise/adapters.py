"""LoRA on the experts' own parameters (PEFT's target_parameters), inside the grouped GEMMs.

PEFT adds the update to all experts' weights at every forward. Here it never meets them: the experts
get the two factors and compute x W^T + (x A^T) B^T.

Codes of weights in 4 bits are nothing that an update can be added to, so the wrapper of such a
parameter gets a class of its own when PEFT makes it, patched or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as peft
from torch import Tensor, nn

from ..compat import (
    DS_SHAPE,
    MEASURE,
    MERGEABLE,
    check_forward_args,
    swapped,
    why_no_adapters,
    why_no_adapters_on_codes,
)
from ..notices import warn_once
from ..ops.low_rank import LowRank, factors
from .four_bits import FourBits
from .lending import takes_low_rank
from .lent import lend, take_back
from .original import Fused, intact, own_forward
from .parts import stored_transposed, up_name


class ParamWrapper(Fused, peft.ParamWrapper):
    """PEFT's wrapper of one parameter, which hands fused experts the factors of its adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the experts' forward."""
        experts, name = self.get_base_layer(), self.parameter_name
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        own = self.disable_adapters or self.merged or kwargs or not adapters
        if own or name not in (up_name(experts), "down_proj"):
            return own_forward(self, x, *args, **kwargs)
        if not (intact(self) and takes_low_rank(experts, x, *args)):
            return own_forward(self, x, *args)
        check_forward_args(self, x, *args)
        misfit = next(filter(None, (_why_not_fit(self, each, x) for each in adapters)), None)
        if misfit:
            warn_once(f"moe_patch leaves an adapter to PEFT: {misfit}.")
            return own_forward(self, x, *args)
        lend(experts, name, _low_rank(self, adapters))
        try:
            out = self.base_layer(x, *args)
        finally:
            left = take_back(experts, name)
        # nobody took them: another thread unpatches the model, and Hugging Face's forward ran
        return own_forward(self, x, *args) if left else out


class FourBitsParamWrapper(peft.ParamWrapper):
    """PEFT's wrapper of one parameter of experts in 4 bits.

    Its adapters have the shapes and the dtype that they have beside the weights in 16 bits. The
    experts get their factors, whether they run fused or not.
    """

    def get_param(self) -> Tensor:
        """What PEFT reads of the weights besides their numbers: a tensor without memory."""
        experts = self.get_base_layer()
        if self.parameter_name not in (up_name(experts), "down_proj"):
            return super().get_param()
        packed = experts.packed(self.parameter_name)
        weight = torch.empty((), dtype=experts.weight_dtype, device=packed.device)
        weight = weight.expand(packed.shape)
        return weight.mT if stored_transposed(experts) else weight

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        experts, name = self.get_base_layer(), self.parameter_name
        adapters = [adapter for adapter in active_adapters if adapter in self.lora_A]
        if not adapters:
            yield
            return
        lend(experts, name, _low_rank(self, adapters))
        try:
            yield
        finally:
            take_back(experts, name)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raises: codes have no room for an update.

        Raises:
            ValueError: always.
        """
        raise ValueError(why_not_merge(self.parameter_name))


FourBitsParamWrapper.__name__ = "ParamWrapper"  # PEFT asks for the name


def why_not_merge(parameter: str) -> str:
    """Why adapters on that parameter of experts in 4 bits are not merged, in one sentence."""
    return (
        f"{parameter} is in 4 bits, and an adapter cannot be merged into that: save the adapter, "
        "load the model and call its dequantize() or load it in 16 bits, load the adapter there, "
        "and merge."
    )


def know_four_bits() -> None:
    """Has PEFT's wrappers know parameters in 4 bits, from now on."""
    _measure_four_bits()
    _check_before_merging()


def _check_before_merging() -> None:
    """Has PEFT refuse to merge adapters on codes before it merges any other."""
    check = MERGEABLE.find()
    if check is None or hasattr(check, "moe_patch_original"):
        return

    @functools.wraps(check)
    def checked(self: Any) -> None:
        for module in self.model.modules():
            if isinstance(module, FourBitsParamWrapper):
                raise ValueError(why_not_merge(module.parameter_name))
        check(self)

    vars(checked)["moe_patch_original"] = check
    MERGEABLE.put(checked)


def _measure_four_bits() -> None:
    measure = MEASURE.find()
    if why_no_adapters_on_codes() or hasattr(measure, "moe_patch_original"):
        return

    @functools.wraps(measure)
    def measured(self: Any, module: nn.Module) -> Any:
        experts = self.get_base_layer()
        if isinstance(experts, FourBits) and type(self) is peft.ParamWrapper:
            self.__class__ = FourBitsParamWrapper
        return measure(self, module)

    vars(measured)["moe_patch_original"] = measure
    MEASURE.put(measured)


def _why_not_fit(wrapper: peft.ParamWrapper, adapter: str, x: Tensor) -> str | None:
    """None when the adapter's factors make up an update of the weights, else the reason."""
    name = wrapper.parameter_name
    pair = [each[adapter].weight for each in (wrapper.lora_A, wrapper.lora_B)]
    away = next((str(one.device) for one in pair if one.device != x.device), None)
    if away:  # meta, when accelerate offloads them: PEFT does not call the modules they are in
        return f"the factors of {adapter!r} on {name} are on {away}"
    a, b = (tuple(one.shape) for one in pair)
    weight = wrapper.get_param()
    experts, *sides = getattr(weight, DS_SHAPE, weight.shape)  # partitioned by ZeRO-3: empty
    wide, high = sides if not swapped(wrapper) else reversed(sides)
    if a[1] == wide and b[0] == high and a[0] == b[1] and not a[0] % experts:
        return None
    return (
        f"the factors of {adapter!r} on {name} are {list(a)} and {list(b)}, "
        f"which do not fit {experts} experts of {high} rows and {wide} columns"
    )


def _low_rank(wrapper: peft.ParamWrapper, adapters: list[str]) -> LowRank:
    """The update of the weights [E, N, K]; several adapters side by side."""
    packed = [
        (wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])
        for name in adapters
    ]
    experts, weight = wrapper.get_base_layer(), wrapper.get_param()
    crossed = stored_transposed(experts) == swapped(wrapper)
    return factors(packed, wrapper.num_experts, weight.dtype, crossed)


SWAPS = {} if why_no_adapters() else {peft.ParamWrapper: ParamWrapper}
