"""NF4: bitsandbytes' codes, its thresholds, and what the last bit of a reciprocal may change."""

from __future__ import annotations

import pytest
import torch

from moe_patch.formats.nf4 import NF4, SMALLEST, VALUES
from moe_patch.formats.packed import dequantize, quantize, unpack

# dQuantizeNF4 of bitsandbytes' csrc/kernels.cu, from the lowest to the highest
THRESHOLDS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
    -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
    0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683,
    0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip


def codes_of(rows, scale_dtype=torch.float32):
    return NF4.quantize(rows, scale_dtype, False)[0]


def brute_force(rows):
    """Normalise as CUDA does, then count the thresholds that lie below."""
    normal = rows * (1.0 / rows.abs().amax(-1, keepdim=True))
    return (normal[..., None] > torch.tensor(THRESHOLDS)).sum(-1).to(torch.uint8)


def test_codes_are_those_of_the_tree():
    rows = torch.randn(500, 64) * torch.randn(500, 1).exp()
    assert torch.equal(codes_of(rows), brute_force(rows))


def test_a_threshold_belongs_to_the_lower_code():
    on = torch.tensor(THRESHOLDS)
    for rows, expected in (
        (on, torch.arange(15)),
        (on.nextafter(torch.tensor(-2.0)), torch.arange(15)),
        (on.nextafter(torch.tensor(2.0)), torch.arange(1, 16)),
    ):
        rows = torch.cat([rows, torch.ones(1)])  # the absmax is 1
        assert codes_of(rows)[:15].tolist() == expected.tolist()


def test_thresholds_are_midpoints_in_float32():
    values = torch.tensor(VALUES)
    assert torch.equal((values[:-1] + values[1:]) / 2, torch.tensor(THRESHOLDS))


def test_no_code_of_bfloat16_weights_depends_on_how_the_reciprocal_is_rounded():
    """Every ratio of two bfloat16 down to 2 ** -8, with 1 / absmax an ulp up and down."""
    mantissa = torch.arange(128, 256).float()
    largest = mantissa[:, None, None]
    rows = mantissa[None, :, None] * torch.arange(-8, 1).float().exp2()  # [128, 9]
    thresholds = torch.tensor(THRESHOLDS)
    inverse = 1.0 / largest
    found = [
        torch.bucketize(sign * rows * near, thresholds)
        for sign in (-1, 1)
        for near in (inverse, inverse.nextafter(largest), inverse.nextafter(-largest))
    ]
    for codes in (found[:3], found[3:]):
        assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])


def test_bfloat16_scales_lose_nothing_of_bfloat16_weights():
    weight = torch.randn(2, 8, 256).bfloat16()
    wide, narrow = (quantize(weight, scale_dtype=dtype) for dtype in NF4.scale_dtypes)
    assert torch.equal(wide.codes, narrow.codes)
    assert torch.equal(dequantize(wide), dequantize(narrow))


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, SMALLEST, 1e-30, 3e38])
def test_smallest_and_largest_blocks(scale):
    weight = torch.full((1, 1, 64), scale)
    weight[..., ::2] *= -1
    packed = quantize(weight)
    assert packed.scales.tolist() == [[[float(weight.abs().max())]]]
    weights = dequantize(packed)
    assert weights.isfinite().all()
    assert torch.allclose(weights, weight, rtol=0, atol=1e-38)
    if not scale:
        assert set(unpack(packed.codes).flatten().tolist()) == {VALUES.index(0.0)}


@pytest.mark.parametrize("group", NF4.groups)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bitsandbytes_has_the_same_bits(dtype, group):
    functional = pytest.importorskip("bitsandbytes", minversion="0.50").functional
    weight = torch.randn(2, 24, 512) * torch.randn(2, 24, 1).exp()
    weight[0, 0, :group] = 0
    weight = weight.to(dtype)
    theirs, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=group)
    ours = quantize(weight, group=group)
    high_first = theirs.flatten()
    theirs_low_first = high_first << 4 | high_first >> 4
    assert torch.equal(ours.codes.flatten(), theirs_low_first)
    assert torch.equal(ours.scales.flatten(), state.absmax)
    again = functional.dequantize_4bit(theirs, state)
    assert again.dtype == dtype
    assert torch.equal(dequantize(ours, dtype), again)
