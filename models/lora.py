"""LoRA on the experts' own parameters (PEFT's target_parameters), inside the grouped GEMMs.

PEFT adds the update to all experts' weights at every forward. Here it never meets them: the experts
get the two factors and compute x W^T + (x A^T) B^T.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import layer as peft
from torch import Tensor

from ..low_rank import LowRank, factors
from .decorated import UPDATES, takes_low_rank, warn_once


class ParamWrapper(peft.ParamWrapper):
    """PEFT's wrapper of one parameter, which hands fused experts the factors of its adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the experts' forward."""
        experts = self.get_base_layer()
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        own = self.disable_adapters or self.merged or kwargs or not adapters
        if own or self.parameter_name not in ("gate_up_proj", "down_proj"):
            return super().forward(x, *args, **kwargs)
        if not takes_low_rank(experts, x, *args):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args)
        misfit = next(filter(None, map(self._why_not_fit, adapters)), None)
        if misfit:
            warn_once(f"moe_patch leaves an adapter to PEFT: {misfit}.")
            return super().forward(x, *args, **kwargs)
        updates = vars(experts).setdefault(UPDATES, {})
        updates[self.parameter_name] = self._low_rank(adapters)
        try:
            return self.base_layer(x, *args)
        finally:
            del updates[self.parameter_name]
            if not updates:
                delattr(experts, UPDATES)

    def _why_not_fit(self, adapter: str) -> str | None:
        """None when the adapter's factors make up an update of the weights, else the reason."""
        a, b = (tuple(each[adapter].weight.shape) for each in (self.lora_A, self.lora_B))
        experts, *sides = self.get_param().shape
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
        return factors(packed, len(weight), weight.dtype, crossed)


def stored_transposed(experts: torch.nn.Module) -> bool:
    """Whether the weights are stored [E, K, N]. Llama4's class does not say so."""
    return getattr(experts, "is_transposed", "Llama4" in type(experts).__name__)


SWAPS = {peft.ParamWrapper: ParamWrapper} if hasattr(peft.ParamWrapper, "get_delta_factors") else {}
