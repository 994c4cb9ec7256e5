"""Fused mixture-of-experts in Triton: the differentiable core of the package moe_patch.

    fused_experts(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)

computes the experts of a MoE block, forward and backward, without waiting for the GPU; weights may
be in 16 bits, in FP8 with block scales (`fp8`) or in 4 bits (`quantize`).
"""

from . import fp8
from .formats.packed import Packed, dequantize, quantize
from .ops import expert_order, fused_experts, grouped_gemm, select_experts
from .version import __version__

__all__ = [
    "Packed",
    "__version__",
    "dequantize",
    "expert_order",
    "fp8",
    "fused_experts",
    "grouped_gemm",
    "quantize",
    "select_experts",
]
