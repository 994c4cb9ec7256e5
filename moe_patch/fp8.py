"""FP8 with block scales: quantise, grouped GEMMs in three layouts, DeepSeek-V3's whole layer.

The public names; ops/fp8.py has the code and says what the numbers mean.
"""

from .ops.fp8 import grouped_gemm, masked_grouped_gemm, moe, quantize

__all__ = ["grouped_gemm", "masked_grouped_gemm", "moe", "quantize"]
