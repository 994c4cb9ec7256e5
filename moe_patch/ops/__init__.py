"""What autograd sees and users call: functions of tensors, over the kernels, without modules."""

from .experts import fused_experts
from .grouped import expert_order, grouped_gemm
from .routing import select_experts

__all__ = ["expert_order", "fused_experts", "grouped_gemm", "select_experts"]
