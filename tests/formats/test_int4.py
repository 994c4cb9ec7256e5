"""int4: the scales, zero points and ties of compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from moe_patch.formats.int4 import INT4
from moe_patch.formats.packed import dequantize, quantize, unpack

zero_points = pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])


def test_symmetric_scales_are_the_absmax_over_seven_and_a_half():
    rows = torch.zeros(1, 32)
    rows[0, :6] = torch.tensor([-15.0, 15.0, 1.0, 3.0, -1.0, 2.1])
    codes, scales, zeros = INT4.quantize(rows, torch.float32, False)
    assert scales.tolist() == [2.0] and zeros is None
    # -7.5 and 7.5 are -8 and 8, of which 7 is left; 0.5 -> 0, 1.5 -> 2, -0.5 -> 0, 1.05 -> 1
    assert codes[0, :7].tolist() == [0, 15, 8, 10, 8, 9, 8]


def test_zero_points_cover_the_range_and_zero():
    rows = torch.linspace(0, 30, 32).expand(2, 32) * torch.tensor([[1.0], [-1.0]])
    codes, scales, zeros = INT4.quantize(rows, torch.float32, True)
    assert scales.tolist() == [2.0, 2.0] and zeros.tolist() == [0, 15]
    assert codes[:, 0].tolist() == [0, 15] and codes[:, -1].tolist() == [15, 0]
    far, _, points = INT4.quantize(rows + 100, torch.float32, True)
    assert points[0] == 0 and far[0].amin() == 12  # the range begins at 0


@zero_points
def test_scales_that_vanish_in_their_dtype_give_zeros(zeros):
    weight = torch.full((1, 1, 128), 1e-9)
    packed = quantize(weight, "int4", scale_dtype=torch.float16, zeros=zeros)
    assert dequantize(packed).abs().max() == 0


@zero_points
@pytest.mark.parametrize("group", INT4.groups)
def test_compressed_tensors_has_the_same_codes(group, zeros):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(2, 24, 512) * torch.randn(2, 24, 1).exp()
    weight[0, 1] += 3
    args = QuantizationArgs(
        num_bits=4, symmetric=not zeros, group_size=group, strategy=QuantizationStrategy.GROUP
    )
    ours = quantize(weight, "int4", group, scale_dtype=torch.float32, zeros=zeros)
    for expert, rows in enumerate(weight):
        groups = rows.unflatten(-1, (-1, group))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        codes = their_quantize(rows, scale, zero, args, dtype=torch.int8)
        assert torch.equal(ours.scales[expert], scale)
        assert torch.equal(unpack(ours.codes[expert]), (codes + 8).to(torch.uint8))
        if zeros:
            assert torch.equal(ours.zeros[expert], (zero + 8).to(torch.uint8))
