"""fused_experts() with weights in 4 bits: their float64 twin, every gradient, and what is refused.

The twin multiplies what the codes stand for, exactly; that these are the right codes is the matter
of tests/formats.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from ops import DTYPES, assert_close, gradients, in_4_bits, in_double, moe, sample

from moe_patch import kernels, paths, reference
from moe_patch.activation import Activation
from moe_patch.formats.packed import FORMATS, Packed, dequantize, quantize
from moe_patch.ops.experts import fused_experts
from moe_patch.ops.grouped import sort

HOWS = [
    ("nf4", {}),
    ("nf4", {"group": 32, "scale_dtype": torch.bfloat16}),
    ("mxfp4", {}),
    ("int4", {}),
    ("int4", {"group": 32, "scale_dtype": torch.float16, "zeros": True}),
]
SIZES = [  # T, H, I, E, K
    (7, 128, 128, 3, 2),
    (20, 256, 128, 4, 3),
    (40, 128, 256, 2, 1),
]
BIG = [(70, 384, 640, 5, 3), (1100, 256, 384, 2, 1), (1000, 512, 256, 60, 4)]
FORMS = [
    Activation(),
    Activation("gelu", form="interleaved"),
    Activation("relu2", form="ungated"),
]
NAMES = list(range(len(HOWS)))


def low_rank(arguments, rank):
    """Adds updates of both weights; returns their tensors."""
    x, found = arguments["hidden_states"], []
    draw = torch.Generator().manual_seed(3)
    for name in ("gate_up", "down"):
        experts, n, k = arguments[f"{name}_proj"].shape
        sizes = (experts, rank, k), (experts, n, rank)
        pair = tuple((torch.randn(s, generator=draw) * 0.1).to(x.device, x.dtype) for s in sizes)
        arguments[f"{name}_low_rank"] = tuple(each.requires_grad_() for each in pair)
        found += pair
    return found


def exact(arguments):
    """The float64 arguments, those of the updates among them."""
    twin = in_double(arguments)
    for name, value in arguments.items():
        if isinstance(value, tuple):
            twin[name] = tuple(in_double(dict(enumerate(value))).values())
    return twin


def flat(arguments):
    """Every tensor of the arguments, those in pairs too."""
    for value in arguments.values():
        yield from value if isinstance(value, tuple) else (value,)


def compare(arguments, **options):
    """Asserts of the output, of every gradient, and of the same without gradients."""
    dtype, twin = arguments["hidden_states"].dtype, exact(arguments)
    out = fused_experts(**arguments, **options)
    truth = reference.fused_experts(**twin, **options)
    assert_close(out, truth, dtype, "output")
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    mine = gradients(out, d_out, *flat(arguments))
    true = gradients(truth, d_out.double(), *flat(twin))
    for one, other in zip(mine, true, strict=True):
        assert_close(one, other, dtype)
    with torch.no_grad():
        assert torch.equal(fused_experts(**arguments, **options), out)
    again = gradients(fused_experts(**arguments, **options), d_out, *flat(arguments))
    assert all(torch.equal(one, other) for one, other in zip(mine, again))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "size,dtype,how,weight_on",
    sample([*itertools.product(SIZES, DTYPES, NAMES, ("output", "input"))], 9),
)
def test_output_and_every_gradient(device, size, dtype, how, weight_on):
    format, options = HOWS[how]
    arguments = moe(device, dtype, *size, routing="sentinel")
    compare(in_4_bits(arguments, format, **options), weight_on=weight_on)


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", BIG, ids=str)
def test_larger_sizes(device, size, dtype, how):
    format, options = HOWS[how]
    compare(in_4_bits(moe(device, dtype, *size), format, **options))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "how,dtype,form,rank", sample([*itertools.product(NAMES, DTYPES, (0, 1, 2), (0, 5))], 8)
)
def test_gates_biases_and_updates(device, how, dtype, form, rank):
    format, options = HOWS[how]
    act = FORMS[form]
    arguments = moe(device, dtype, 20, 128, 128, 3, 2, act=act, biased=True)
    arguments = in_4_bits(arguments, format, **options)
    if rank:
        low_rank(arguments, rank)
    compare(arguments, activation=act)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "dtype", (torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu))
)
@pytest.mark.parametrize("rank", (0, 4))
def test_experts_with_many_rows_are_widened_a_few_at_a_time(device, monkeypatch, dtype, rank):
    """Biases and updates are those of the experts at hand."""
    monkeypatch.setattr(kernels.dequantize, "ROWS", 4)  # 512
    monkeypatch.setattr(kernels.dequantize, "ROWS_LOOKED_UP", 4)
    monkeypatch.setattr(kernels.dequantize, "BYTES", 2 * 2 * 256 * 128)
    widened = []
    real = kernels.dequantize.dequantize
    monkeypatch.setattr(
        kernels.dequantize, "dequantize", lambda *each: widened.append(1) or real(*each)
    )
    arguments = moe(device, dtype, 20, 128, 128, 4, 2, biased=True)
    arguments = in_4_bits(arguments, "nf4")
    if rank:
        low_rank(arguments, rank)
    compare(arguments)
    assert len(widened) > 8


@pytest.mark.parametrize("format", FORMATS)
def test_where_codes_are_unpacked_in_registers_they_are_written_out_later(
    device, monkeypatch, format
):
    """Experts of a forward: its backward has no such products, and not all updates go with them."""
    monkeypatch.setattr(
        kernels.packed_products, "supported", lambda weight, order, dtype, update: update is None
    )
    for name, rows in (("ROWS", 4), ("ROWS_LOOKED_UP", 8), ("ROWS_COMPUTED", 16)):
        monkeypatch.setattr(kernels.dequantize, name, rows)
    weight = quantize(torch.randn(2, 64, 128, device=device), format)
    update = kernels.low_rank.LowRank(None, None, None)

    def from_rows(low_rank=None, *, backward=False):
        for rows in range(1, 20):
            index = torch.arange(2, device=device).repeat_interleave(rows)[:, None]
            order, _ = sort(index, 2, torch.bfloat16)
            how = {"backward": backward}
            if kernels.dequantize.widens(weight, None, order, torch.bfloat16, low_rank, **how):
                return rows

    assert from_rows() == (8 if format == "nf4" else 16)
    assert from_rows(backward=True) == from_rows(update) == 4


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("form", (0, 1, 2))
@pytest.mark.parametrize(
    "size",
    [(1, 256, 128, 8, 2), pytest.param((2, 384, 2048, 32, 3), marks=pytest.mark.gpu)],
    ids=str,
)
def test_decoding(device, size, how, form, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    format, options = HOWS[how]
    act = FORMS[form]
    arguments = moe(device, dtype, *size, grad=False, act=act, biased=form > 0)
    arguments = in_4_bits(arguments, format, **options)
    arguments["top_k_index"][0, 0] = -1
    truth = reference.fused_experts(**in_double(arguments), activation=act)
    with paths.recorded() as seen:
        out = fused_experts(**arguments, activation=act)
    assert seen == {"decode"}
    assert_close(out, truth, dtype)


@pytest.mark.parametrize("format", ("nf4", "mxfp4", "int4"))
@pytest.mark.parametrize("begin", (0, 1), ids=("odd stride", "unaligned"))
def test_decoding_rows_of_any_place(device, begin, format):
    arguments = in_4_bits(moe(device, torch.float16, 2, 128, 128, 32, 3, grad=False), format)
    memory = torch.zeros(2, 129, device=device, dtype=torch.float16)
    memory[:, begin : begin + 128] = arguments["hidden_states"]
    with paths.recorded() as seen:
        expected = fused_experts(**arguments)
        arguments["hidden_states"] = memory[:, begin : begin + 128]
        assert torch.equal(fused_experts(**arguments), expected)
    assert seen == {"decode"}
    truth = reference.fused_experts(**in_double(arguments))
    assert_close(expected, truth, torch.float16)


@pytest.mark.parametrize("tokens", (1, 9))
def test_projections_have_groups_of_their_own(device, tokens):
    arguments = moe(device, torch.float32, tokens, 128, 96, 8, 2)
    groups = {"gate_up_proj": 128, "down_proj": 32}
    arguments |= {n: quantize(arguments[n], "int4", group=g) for n, g in groups.items()}
    with torch.no_grad(), paths.recorded() as seen:
        out = fused_experts(**arguments)
    assert seen == {"decode" if tokens == 1 else "sorted"}
    assert_close(out, reference.fused_experts(**in_double(arguments)), torch.float32)
    (d_x,) = torch.autograd.grad(fused_experts(**arguments).sum(), arguments["hidden_states"])
    exact = in_double(arguments)
    out = reference.fused_experts(**exact)
    (truth,) = torch.autograd.grad(out.sum(), exact["hidden_states"])
    assert_close(d_x, truth, torch.float32)


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_the_kernel_writes_what_the_twin_does(device, how, dtype):
    """To the bit, every code, and the last block that is not whole."""
    format, options = HOWS[how]
    codes = torch.arange(256, dtype=torch.uint8).repeat(3 * 5 * 384 // 2 // 256 + 1)
    codes = codes[: 3 * 5 * 192].view(3, 5, 192).to(device)
    packed = quantize(torch.randn(3, 5, 384, device=device), format, **options)
    packed = replace(packed, codes=codes)
    out = torch.full((3, 5, 384), float("nan"), dtype=dtype, device=device)
    kernels.dequantize.dequantize(packed, None, out)
    assert torch.equal(out, dequantize(packed, dtype))


def test_compile_full_graph(device):
    arguments = in_4_bits(moe(device, torch.float32, 20, 128, 128, 4, 2), "nf4")
    compiled = torch.compile(fused_experts, fullgraph=True, backend="aot_eager")
    out, expected = compiled(**arguments), fused_experts(**arguments)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(out)
    for one, other in zip(
        gradients(out, d_out, *flat(arguments)), gradients(expected, d_out, *flat(arguments))
    ):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(compiled(**arguments), fused_experts(**arguments))


def test_second_derivatives(device):
    arguments = in_4_bits(moe(device, torch.float32, 6, 128, 128, 3, 2), "mxfp4")
    twin = in_double(arguments)
    found = []
    for run, inputs in ((fused_experts, arguments), (reference.fused_experts, twin)):
        x, weights = inputs["hidden_states"], inputs["top_k_weights"]
        (first,) = torch.autograd.grad(run(**inputs).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, weights)))
    for one, other in zip(*found):
        assert_close(one, other, torch.float32)


def test_packed_weights_as_a_stack(device):
    packed = quantize(torch.randn(4, 32, 128, device=device), "int4", zeros=True)
    assert packed.mT.shape == (4, 128, 32) and packed.mT.mT.shape == packed.shape
    assert torch.equal(dequantize(packed.mT), dequantize(packed).mT)
    assert len(packed) == 4
    assert torch.equal(dequantize(packed[1:3]), dequantize(packed)[1:3])


def arguments_on(device, **how):
    return in_4_bits(moe(device, torch.float16, 6, 128, 128, 3, 2, grad=False), "nf4", **how)


def test_what_is_refused(device):
    good = arguments_on(device)
    up, down = good["gate_up_proj"], good["down_proj"]
    refused = [
        ({"down_proj": dequantize(down, torch.float16)}, TypeError, "both must be in one format"),
        ({"down_proj": down.mT}, ValueError, "down_proj is turned"),
        ({"gate_up_scale_inv": up.scales}, ValueError, "pass no .*_scale_inv"),
        ({"gate_up_proj": replace(up, scales=up.scales.double())}, TypeError, "scales of gate_up"),
        ({"gate_up_proj": replace(up, format="fp3")}, (TypeError, ValueError), "fp3"),
        ({"gate_up_proj": replace(up, codes=_with_gaps(up.codes))}, ValueError, "with gaps"),
        ({"gate_up_proj": replace(up, scales=_with_gaps(up.scales))}, ValueError, "with gaps"),
    ]
    for changed, error, words in refused:
        with pytest.raises(error, match=words):
            fused_experts(**good | changed)
    other = quantize(dequantize(down), "mxfp4")
    with pytest.raises(TypeError, match="nf4 and down_proj mxfp4"):
        fused_experts(**good | {"down_proj": other})


def _with_gaps(tensor):
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def test_every_format_is_tested():
    assert {format for format, _ in HOWS} == set(FORMATS)
    assert isinstance(arguments_on(torch.device("cpu"))["gate_up_proj"], Packed)
