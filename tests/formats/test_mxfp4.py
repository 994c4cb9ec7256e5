"""MXFP4: e2m1 to the nearest even, shared exponents, saturation, zeros and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from moe_patch.formats.mxfp4 import MAGNITUDES, MXFP4, VALUES
from moe_patch.formats.packed import Packed, dequantize, quantize, unpack


def e2m1(code):
    """The value of a code, from its bits: sign, two of exponent (bias 1), one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -value if code & 8 else value


def nearest_even(value):
    """The code of a scaled value: argmin over all magnitudes, ties to the even code."""
    distances = [abs(abs(value) - magnitude) for magnitude in MAGNITUDES]
    least = [code for code in range(8) if distances[code] == min(distances)]
    code = next(code for code in least if len(least) == 1 or code % 2 == 0)
    return code | (8 if math.copysign(1, value) < 0 else 0)


def quantised(values):
    """Codes and the byte of the scale of one group that starts with these values."""
    rows = torch.zeros(1, 32)
    rows[0, : len(values)] = torch.as_tensor(values)
    codes, scales, zeros = MXFP4.quantize(rows, torch.float8_e8m0fnu, False)
    assert zeros is None
    return codes[0, : len(values)].tolist(), scales.view(torch.uint8).item()


def test_values_are_e2m1():
    assert [e2m1(code) for code in range(16)] == list(VALUES)
    assert math.copysign(1, VALUES[8]) == -1


@pytest.mark.parametrize("sign", [1, -1])
def test_every_value_between_is_rounded_to_the_nearest_even(sign):
    values = [sign * step / 64 for step in range(1, 32 * 16)]  # 4 <= absmax < 8: exponent 0
    midpoints = [sign * (a + b) / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:])]
    for value in values + midpoints:
        for near in (value, math.nextafter(value, 0), math.nextafter(value, 9.0 * sign)):
            near = float(torch.tensor(near, dtype=torch.float32))
            codes, byte = quantised([4.0, near])
            assert (codes[1], byte) == (nearest_even(near), 127), near
        single = torch.tensor(value)
        for towards in (0.0, 9.0 * sign):
            near = single.nextafter(torch.tensor(towards)).item()
            assert quantised([4.0, near])[0][1] == nearest_even(near), near


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -125, -124, -3, 0, 2, 100, 127])
def test_the_scale_is_a_power_of_two_two_below_the_largest(exponent):
    for mantissa in (1.0, 1.5, 1.75, 2 - 2**-23):
        value = float(torch.tensor(mantissa * 2.0**exponent, dtype=torch.float64).float())
        codes, byte = quantised([value, -value])
        floor = math.frexp(value)[1] - 1
        assert byte == max(floor - 2 + 127, 0)
        assert codes[0] == nearest_even(value / 2.0 ** (byte - 127)) == codes[1] - 8


def test_what_is_above_six_saturates():
    assert quantised([7.99, -7.99, 6.01, 5.01]) == ([7, 15, 7, 7], 127)
    weight = torch.full((1, 1, 32), torch.finfo(torch.float32).max)
    assert dequantize(quantize(weight, "mxfp4")).unique().tolist() == [6 * 2.0**125]


def test_zeros_take_the_smallest_scale_and_keep_their_sign():
    assert quantised([0.0, -0.0]) == ([0, 8], 0)
    assert quantised([4.0, 0.2, -0.2, -0.0]) == ([6, 0, 8, 8], 127)
    weight = torch.zeros(1, 1, 32)
    weight[..., 1::2] = -0.0
    again = dequantize(quantize(weight, "mxfp4"))
    assert torch.equal(again, weight) and torch.equal(again.signbit(), weight.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_scale_times_every_code(dtype):
    """Exact, subnormals included; 255 is NaN, and what float32 cannot hold is infinite."""
    codes = (torch.arange(32) % 16).to(torch.uint8).expand(1, 256, 32)
    low_first = codes[..., ::2] | codes[..., 1::2] << 4
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    packed = Packed(low_first, scales.view(torch.float8_e8m0fnu), None, "mxfp4")
    assert torch.equal(unpack(packed.codes), codes)
    exponents = scales.double() - 127
    exact = torch.tensor(VALUES, dtype=torch.float64).repeat(2) * exponents.exp2()
    weight = dequantize(packed, dtype)
    assert weight[0, 255].isnan().all()
    assert torch.equal(weight[0, :255], exact[0, :255].to(dtype))
    assert torch.equal(weight[0, :255].signbit(), exact[0, :255].signbit())
