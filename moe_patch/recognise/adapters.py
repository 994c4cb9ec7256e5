"""LoRA on the experts' own parameters (PEFT's target_parameters), inside the grouped GEMMs.

PEFT adds the update to all experts' weights at every forward. Here it never meets them: the experts
get the two factors and compute x W^T + (x A^T) B^T.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as peft
from torch import Tensor

from ..compat import DS_SHAPE, check_forward_args, swapped, why_no_adapters
from ..notices import warn_once
from ..ops.low_rank import LowRank, factors
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
