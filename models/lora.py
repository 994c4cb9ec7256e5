"""LoRA on the experts' own parameters (PEFT's target_parameters), inside the grouped GEMMs.

PEFT adds the update to all experts' weights at every forward. Here it never meets them: the experts
get the two factors and compute x W^T + (x A^T) B^T.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as peft
from torch import Tensor

from ..low_rank import LowRank, factors
from .decorated import UPDATES, stored_transposed, takes_low_rank, warn_once
from .parts import up_name


class ParamWrapper(peft.ParamWrapper):
    """PEFT's wrapper of one parameter, which hands fused experts the factors of its adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the experts' forward."""
        experts = self.get_base_layer()
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        own = self.disable_adapters or self.merged or kwargs or not adapters
        if own or self.parameter_name not in (up_name(experts), "down_proj"):
            return super().forward(x, *args, **kwargs)
        if not takes_low_rank(experts, x, *args):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args)
        misfit = next(filter(None, (self._why_not_fit(name, x) for name in adapters)), None)
        if misfit:
            warn_once(f"moe_patch leaves an adapter to PEFT: {misfit}.")
            return super().forward(x, *args, **kwargs)
        updates = getattr(experts, UPDATES, {})
        setattr(experts, UPDATES, updates)  # no vars(): torch.compile, before Python 3.12
        updates[self.parameter_name] = self._low_rank(adapters)
        try:
            return self.base_layer(x, *args)
        finally:
            del updates[self.parameter_name]
            if not updates:
                delattr(experts, UPDATES)

    def _why_not_fit(self, adapter: str, x: Tensor) -> str | None:
        """None when the adapter's factors make up an update of the weights, else the reason."""
        factors = [each[adapter].weight for each in (self.lora_A, self.lora_B)]
        away = next((str(one.device) for one in factors if one.device != x.device), None)
        if away:  # meta, when accelerate offloads them: PEFT does not call the modules they are in
            return f"the factors of {adapter!r} on {self.parameter_name} are on {away}"
        a, b = (tuple(one.shape) for one in factors)
        weight = self.get_param()
        experts, *sides = getattr(weight, "ds_shape", weight.shape)  # partitioned by ZeRO-3: empty
        wide, high = sides if not self._did_swap_in_out_features else reversed(sides)
        if a[1] == wide and b[0] == high and a[0] == b[1] and not a[0] % experts:
            return None
        return (
            f"the factors of {adapter!r} on {self.parameter_name} are {list(a)} and {list(b)}, "
            f"which do not fit {experts} experts of {high} rows and {wide} columns"
        )

    def _low_rank(self, adapters: list[str]) -> LowRank:
        """Of the weights [E, N, K]; several adapters side by side."""
        packed = [
            (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
            for name in adapters
        ]
        experts, weight = self.get_base_layer(), self.get_param()
        crossed = stored_transposed(experts) == self._did_swap_in_out_features
        return factors(packed, self.num_experts, weight.dtype, crossed)


SWAPS = {peft.ParamWrapper: ParamWrapper} if hasattr(peft.ParamWrapper, "get_delta_factors") else {}
