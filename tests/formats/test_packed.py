"""4-bit stacks of every format: bytes and codes, values, round trips, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_patch.formats.packed import (
    FORMATS,
    Packed,
    check_packed,
    dequantize,
    pack,
    quantize,
    unpack,
)

E8M0 = torch.float8_e8m0fnu
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
VARIANTS = [
    (name, group, dtype, zeros)
    for name, format in FORMATS.items()
    for group in format.groups
    for dtype in format.scale_dtypes
    for zeros in ((False, True) if format.has_zeros else (False,))
]
every_format = pytest.mark.parametrize("name", FORMATS)
every_variant = pytest.mark.parametrize("name, group, scale_dtype, zeros", VARIANTS)


def some_scales(shape, dtype):
    """Positive and far apart, and exact in every dtype that may be asked for."""
    scales = torch.randint(1, 128, shape) * torch.randint(-9, 3, shape).float().exp2()
    return scales.log2().floor().exp2().to(dtype) if dtype == E8M0 else scales.to(dtype)


def all_codes(name, group, scale_dtype, zeros):
    """A stack [3, 5, 2 * group] in which each group has every code."""
    codes = torch.stack([torch.randperm(group) % 16 for _ in range(30)]).to(torch.uint8)
    shape = (3, 5, 2)
    points = torch.randint(0, 16, shape).to(torch.uint8) if zeros else None
    return Packed(pack(codes.view(3, 5, -1)), some_scales(shape, scale_dtype), points, name)


def slow_values(packed, dtype):
    """Code by code, in Python's float64."""
    values = FORMATS[packed.format].values
    codes = unpack(packed.codes).tolist()
    scales = packed.scales.double().tolist()
    zeros = None if packed.zeros is None else packed.zeros.tolist()

    def value(e, n, k):
        code, group = codes[e][n][k], k // packed.group
        step = values[code] if zeros is None else float(code - zeros[e][n][group])
        return step * scales[e][n][group]

    experts, rows, columns = packed.shape
    return torch.tensor(
        [[[value(e, n, k) for k in range(columns)] for n in range(rows)] for e in range(experts)],
        dtype=torch.float64,
    ).to(dtype)


def test_every_byte_is_two_codes():
    every = torch.arange(256, dtype=torch.uint8)
    codes = unpack(every[:, None])
    assert codes.tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert pack(codes).flatten().tolist() == list(range(256))


def test_pack_takes_any_strides_and_dimensions():
    codes = torch.randint(0, 16, (8, 6, 4), dtype=torch.uint8)
    for view in (codes, codes.permute(2, 1, 0), codes[::2, 1:, ::2], codes[0, 0], codes[:0]):
        assert torch.equal(unpack(pack(view)), view)


def test_pack_refuses_odd_rows_and_other_dtypes():
    with pytest.raises(ValueError, match="^3 codes in a row: two make a byte"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="^codes are torch.int64: pass them as torch.uint8"):
        pack(torch.zeros(2, 4, dtype=torch.int64))


@every_format
def test_a_format_is_sixteen_floats_and_powers_of_two(name):
    format = FORMATS[name]
    assert format.name == name and len(format.values) == 16
    assert torch.tensor(format.values).tolist() == list(format.values), "exact in float32"
    assert format.group in format.groups and format.scale_dtype in format.scale_dtypes
    assert all(group & (group - 1) == 0 for group in format.groups)


@every_variant
def test_each_code_is_its_value_times_the_scale(name, group, scale_dtype, zeros):
    packed = all_codes(name, group, scale_dtype, zeros)
    check_packed("down_proj", packed)
    assert packed.shape == (3, 5, 2 * group) and packed.group == group
    single = dequantize(packed)
    for dtype in DTYPES:
        weight = dequantize(packed, dtype)
        assert weight.dtype == dtype and weight.is_contiguous()
        truth = slow_values(packed, torch.float64)
        truth = truth if dtype == torch.float64 else truth.float().to(dtype)
        assert torch.equal(weight, truth)
        assert torch.equal(weight.signbit(), truth.signbit())
    assert torch.equal(dequantize(packed, torch.float16), single.half())


@every_variant
def test_quantise_finds_the_codes_that_were_dequantised(name, group, scale_dtype, zeros):
    packed = all_codes(name, group, scale_dtype, zeros)
    for dtype in (torch.float32, torch.float64):
        weight = dequantize(packed, dtype)
        if name == "int4" and not zeros:  # an absmax of 7.5 scales is what finds the scale
            widest = 7.5 * packed.scales.to(dtype).repeat_interleave(group, -1)
            weight = torch.where(weight.abs() > 7 * widest / 7.5, widest, weight)
        again = quantize(weight, name, group, scale_dtype=scale_dtype, zeros=zeros)
        codes = unpack(packed.codes)
        if name == "int4" and not zeros:
            codes = torch.where(codes == 0, 15, codes)
        assert torch.equal(unpack(again.codes), codes)
        assert torch.equal(again.scales.float(), packed.scales.float())
        assert zeros is (again.zeros is not None)
        assert not zeros or torch.equal(again.zeros, packed.zeros)


@every_variant
def test_the_nearest_value_is_chosen(name, group, scale_dtype, zeros):
    weight = torch.randn(2, 6, 4 * group) * torch.tensor([1e-3, 30.0])[:, None, None]
    packed = quantize(weight, name, group, scale_dtype=scale_dtype, zeros=zeros)
    check_packed("down_proj", packed)
    wide = packed.scales.double().repeat_interleave(group, -1)  # [2, 6, 4 * group]
    choices = torch.tensor(FORMATS[name].values, dtype=torch.float64)
    choices = choices.expand(*weight.shape, 16)
    if zeros:
        choices = choices + 8 - packed.zeros.double().repeat_interleave(group, -1)[..., None]
    distance = (choices * wide[..., None] - weight.double()[..., None]).abs()
    chosen = (dequantize(packed, torch.float64) - weight.double()).abs()
    assert (chosen <= distance.amin(-1) + wide * 1e-5).all()  # float32 near a midpoint


@given(
    st.sampled_from(VARIANTS), st.integers(0, 3), st.integers(1, 5), st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape_dtype_and_strides(variant, experts, n, groups, dtype, seed):
    name, group, scale_dtype, zeros = variant
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, groups * group, n, generator=generator).to(dtype).mT
    options = {"scale_dtype": scale_dtype, "zeros": zeros}
    packed = quantize(weight, name, group, **options)
    check_packed("down_proj", packed)
    assert packed.shape == (experts, n, groups * group)
    plain = quantize(weight.contiguous(), name, group, **options)
    assert torch.equal(packed.codes, plain.codes)
    assert torch.equal(packed.scales.float(), plain.scales.float())
    if experts:  # an expert's codes depend on its own weights alone
        last = quantize(weight[-1:], name, group, **options)
        assert torch.equal(packed.codes[-1:], last.codes)
    error = (dequantize(packed).double() - weight.double()).abs()
    reach = weight.double().abs().unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)
    bounds = {"nf4": 0.153, "mxfp4": 0.25, "int4": 0.07}
    assert (error <= reach * (2 if zeros else 1) * bounds[name] + 1e-6).all()


@every_variant
def test_zeros_stay_zeros(name, group, scale_dtype, zeros):
    weight = torch.zeros(1, 2, 2 * group)
    weight[0, 0, :group] = torch.randn(group)
    packed = quantize(weight, name, group, scale_dtype=scale_dtype, zeros=zeros)
    assert torch.equal(dequantize(packed)[0, 1], weight[0, 1])
    assert torch.equal(dequantize(packed)[0, 0, group:], weight[0, 0, group:])


def test_the_defaults_are_the_formats_own():
    weight = torch.randn(2, 3, 256)
    assert quantize(weight).format == "nf4"
    for name, format in FORMATS.items():
        packed = quantize(weight, name)
        assert packed.group == format.group and packed.scales.dtype == format.scale_dtype
        assert packed.zeros is None and packed.device == weight.device


def test_no_gradient_flows():
    assert not quantize(torch.randn(1, 2, 64, requires_grad=True)).scales.requires_grad


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"format": "fp3"}, ValueError, "^format 'fp3' is unknown: use one of nf4, mxfp4, int4"),
        ({"group": 48}, ValueError, "^group 48: nf4 has groups of 32 or 64 or 128"),
        ({"format": "mxfp4", "group": 64}, ValueError, "^group 64: mxfp4 has groups of 32"),
        ({"scale_dtype": torch.half}, ValueError, "float16: nf4 needs torch.float32 or torch.bfl"),
        ({"zeros": True}, ValueError, "^zeros=True: nf4 has no zero points"),
        ({"weight": torch.ones(1, 2, 64).int()}, TypeError, "^the weight is torch.int32: pass"),
        ({"weight": torch.ones(2, 64)}, ValueError, r"must be \[E, N, K\], found \[2, 64\]"),
        ({"weight": torch.ones(1, 2, 96)}, ValueError, "^K = 96 .* not a multiple of 64: choose"),
        (
            {"weight": torch.tensor([1.0, float("nan")]).repeat_interleave(64).view(2, 1, 64)},
            ValueError, "^the weight of expert 1 has NaN or infinity, which nf4 cannot store",
        ),
        ({"weight": torch.full((1, 2, 64), float("inf"))}, ValueError, "expert 0 has NaN or inf"),
        (
            {
                "weight": torch.full((1, 2, 128), 1e9), "format": "int4",
                "scale_dtype": torch.float16,
            },
            ValueError, "^the weight of expert 0 is too large for scales in torch.float16",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_quantise_refuses(given, error, says):
    with pytest.raises(error, match=says) as caught:
        quantize(**{"weight": torch.ones(1, 2, 64)} | given)
    assert "\n" not in str(caught.value)


def stack(name="int4", **changes):
    packed = quantize(torch.randn(2, 3, 256), name, zeros=name == "int4")
    return dataclasses.replace(packed, **changes)


def scales(*shape, **options):
    return torch.ones(*shape, **options)


POINTS = torch.zeros(2, 3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    "packed, error, says",
    [
        (stack(format="fp3"), ValueError, "^w1 has the format 'fp3': use one of nf4, mxfp4, int4"),
        (stack(scales=None), ValueError, "^w1 has no scales: pass one for each group of int4"),
        (stack("nf4", zeros=POINTS), ValueError, "^w1 has zeros, and nf4 has no zero points"),
        (stack(codes=torch.zeros(2, 3, 128)), TypeError, "^the codes of w1 are torch.float32: p"),
        (stack(zeros=POINTS.int()), TypeError, "^the zeros of w1 are torch.int32: pass them as"),
        (stack(scales=scales(2, 3, 2).double()), TypeError, "^the scales of w1 are torch.float64"),
        (stack("mxfp4", scales=scales(2, 3, 8)), TypeError, "mxfp4 needs torch.float8_e8m0fnu"),
        (
            stack("nf4", scales=scales(2, 3, 4).half()), TypeError,
            "float16: nf4 needs torch.float32 or torch.bfloat16",
        ),
        (
            stack(codes=torch.zeros(6, 128, dtype=torch.uint8)), ValueError,
            r"^the codes of w1 must be \[E, N, K / 2\], found \[6, 128\]",
        ),
        (
            stack(scales=scales(2, 3, 3)), ValueError,
            r"must be \[2, 3, 8\] or \[2, 3, 4\] or \[2, 3, 2\] for weights \[2, 3, 256\] in .*"
            r"32 or 64 or 128, found \[2, 3, 3\]",
        ),
        (stack(scales=scales(2, 3, 16)), ValueError, r"found \[2, 3, 16\]"),
        (stack(scales=scales(2, 4, 2)), ValueError, r"found \[2, 4, 2\]"),
        (stack(scales=scales(2, 3, 0)), ValueError, r"found \[2, 3, 0\]"),
        (
            stack(codes=torch.zeros(2, 3, 24, dtype=torch.uint8)), ValueError,
            "^K = 48 of w1 is not a multiple of 32 or 64 or 128: int4 cannot store it",
        ),
        (
            stack(zeros=POINTS[..., :1]), ValueError,
            r"^the zeros of w1 must be \[2, 3, 2\], as its scales are, found \[2, 3, 1\]",
        ),
        (
            stack(scales=scales(2, 3, 2, device="meta")), ValueError,
            "^the codes of w1 are on cpu and its scales on meta: move",
        ),
        (stack(zeros=POINTS.to("meta")), ValueError, "on cpu and its zeros on meta"),
        (
            stack(scales=scales(2, 3, 2, requires_grad=True)), ValueError,
            r"^the scales of w1 want a gradient, .* frozen: pass scales.detach\(\)",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_check_refuses(packed, error, says):
    with pytest.raises(error, match=says) as caught:
        check_packed("w1", packed)
    assert "\n" not in str(caught.value)


def test_without_gradients_no_scale_wants_one():
    with torch.no_grad():
        packed = stack(scales=scales(2, 3, 2, requires_grad=True))
        assert check_packed("w1", packed) is None
