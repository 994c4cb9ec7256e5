"""Products with weights in 4 bits on Hopper, and the order in which they sum over a step."""

from __future__ import annotations

import random

import pytest
import torch

from moe_patch.formats.packed import Packed, dequantize, quantize
from moe_patch.kernels import chips, gate_up, grouped_gemm, packed, packed_products
from moe_patch.kernels.in_steps import in_steps, width
from moe_patch.kernels.low_rank import LowRank
from moe_patch.ops.grouped import sort

HOWS = (
    ("nf4", {}),
    ("nf4", {"group": 128, "scale_dtype": torch.bfloat16}),
    ("mxfp4", {}),
    ("int4", {}),
    ("int4", {"group": 32, "zeros": True}),
    ("int4", {"group": 64, "scale_dtype": torch.float16, "zeros": True}),
    ("int4", {"scale_dtype": torch.float32}),
)
ROWS = (2, 14, 60, 300)
"""An expert's on average: one for each height of a tile."""


def in_order(x, steps):
    """Columns of x as `hopper/codes.py` says, or `hopper/pairs.py`, with zeros past the end."""
    wide = x.new_zeros(len(x), width(x.shape[1]))
    wide[:, : x.shape[1]] = x
    place = torch.arange(wide.shape[1], device=x.device)
    r, s, p, q, h = place // 64 % 2, place // 32 % 2, place // 8 % 4, place // 2 % 4, place % 2
    if steps == "words":
        p, q, h = place // 8 % 4, place // 2 % 4, place % 2
        return wide[:, place // 32 * 32 + 8 * q + 2 * p + h]
    within = 2 * p + h if steps == "bytes" else 4 * h + p
    return wide[:, place // 128 * 128 + 32 * q + 16 * s + 8 * r + within]


@pytest.mark.parametrize("rows,columns", [(1, 32), (5, 128), (37, 288), (16, 1000)])
@pytest.mark.parametrize("steps", ["halves", "bytes", "words"])
def test_in_steps(device, rows, columns, steps):
    wider = torch.randn(rows, columns + 8, device=device).half()
    x = wider[:, :columns]
    assert torch.equal(in_steps(x, steps), in_order(x, steps))


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or not chips.chip(device).wgmma:
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.fixture
def elsewhere(monkeypatch):
    """Calls a function where the kernels for any chip do its products."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(packed_products, "supported", lambda *_: False)
            return function()

    return call


def random_rows(draw, device, rows):
    """(order of slots, tokens, choices, expert of every row, rows that there are)."""
    experts, top_k = draw.randint(1, 9), draw.choice((1, 2, 3))
    tokens = max(1, experts * draw.randint(rows, 2 * rows) // top_k)
    index = (torch.rand(tokens, top_k) ** draw.choice((1, 1, 3)) * experts).long()
    if draw.random() < 0.4:
        index[torch.rand(tokens, top_k) < 0.2] = experts  # dropped
    order, _ = sort(index.to(device), experts, torch.bfloat16)
    used = int(order.expert_offsets[-1])
    of_row = index.to(device).flatten()[order.row_to_slot[:used].long()]
    return order, tokens, top_k, of_row, used


def some_columns(draw, order, most):
    """A number of rows of a weight that products are computed here for: an even one."""
    by = 32 if order.block_m >= 64 else 2
    return by * draw.randint(1, most // by)


def of_rows(x, weight, of_row):
    """x [R, K] times the weight of each row's expert, in float64."""
    return torch.cat([x[row : row + 1] @ weight[e].T for row, e in enumerate(of_row.tolist())])


def as_looked_up(weight, order, activation=None):
    """Weights that a kernel here multiplies, before they are rounded: NF4's values as its table has
    them, see `test_pairs_are_nf4_values`."""
    wide = dequantize(weight, torch.float64)
    if weight.format != "nf4" or packed_products.steps_of(weight, order, activation) == "halves":
        return wide
    pairs = packed.pairs_of_codes(weight)[::17] & 0xFFFF  # of the bytes with a code twice
    values = (pairs << 16).view(torch.float32).double() * packed.PAIR_UNIT
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(-2).long()
    scales = weight.scales.double().repeat_interleave(weight.group, -1)
    return values[codes] * scales[..., : wide.shape[-1]]


def assert_as_close(mine, other, truths):
    """Errors of `mine` are those of the kernels for any chip: one rounding of the same sums. Each
    has a truth of its own."""
    (own, true), error, theirs = truths, mine.double() - truths[0], other.double() - truths[1]
    assert error.norm() <= 1.02 * theirs.norm() + 1e-6 * true.norm()
    assert error.abs().max() <= 2 * theirs.abs().max() + 1e-6
    assert (own - true).norm() <= 1.2e-3 * true.norm()  # the table's: 1.06e-3 in groups of 128


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("how", range(len(HOWS)))
def test_gemm(hopper, elsewhere, how, rows):
    draw = random.Random(10 * how + rows)
    torch.manual_seed(draw.randrange(1 << 30))
    format, options = HOWS[how]
    order, tokens, top_k, of_row, used = random_rows(draw, hopper, rows)
    experts, slots = order.expert_offsets.numel() - 1, tokens * top_k
    k = 128 * draw.randint(2, 7) if draw.random() < 0.5 else options.get("group", 128) * 5
    n = draw.choice((128 * draw.randint(1, 4), some_columns(draw, order, 300)))
    weight = quantize(torch.randn(experts, n, k, device=hopper).bfloat16(), format, **options)
    bias = torch.randn(experts, n, device=hopper).bfloat16() if draw.random() < 0.5 else None
    x = torch.randn(slots, k, device=hopper).bfloat16()

    def product():
        out = torch.full((slots, n), 7.0, device=hopper, dtype=torch.bfloat16)
        return grouped_gemm.grouped_gemm(x, weight, order, out=out, bias=bias)

    assert packed_products.supported(weight, order, x.dtype)
    mine, other = product(), elsewhere(product)
    truths = [
        of_rows(x[:used].double(), wide, of_row) + (0 if bias is None else bias.double()[of_row])
        for wide in (as_looked_up(weight, order), dequantize(weight, torch.float64))
    ]
    assert_as_close(mine[:used], other[:used], truths)
    assert bool((mine[used:] == 7).all())
    assert torch.equal(product(), mine)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("how", range(len(HOWS)))
def test_gate_up(hopper, elsewhere, how, rows):
    """Act in its own order and in steps, the pre-activation, biases, weights on the input."""
    draw = random.Random(1000 + 10 * how + rows)
    torch.manual_seed(draw.randrange(1 << 30))
    format, options = HOWS[how]
    order, tokens, top_k, of_row, used = random_rows(draw, hopper, rows)
    experts = order.expert_offsets.numel() - 1
    k = 128 * draw.randint(2, 5) if draw.random() < 0.5 else options.get("group", 128) * 5
    inner = draw.choice((128 * draw.randint(1, 3), some_columns(draw, order, 400) // 2))
    dense = torch.randn(experts, 2 * inner, k, device=hopper).bfloat16() * 0.1
    weight = quantize(dense, format, **options)
    x = torch.randn(tokens, k, device=hopper).bfloat16()
    slot_weight = torch.rand(tokens, top_k, device=hopper).bfloat16()
    bias = torch.randn(experts, 2 * inner, device=hopper).bfloat16()
    how = {
        "weight_on_input": draw.random() < 0.3,
        "activation": draw.choice(("silu", "gelu_tanh", "silu 7.0 1.702 1.0 interleaved")),
        "bias": draw.choice((None, bias)),
    }

    def product(save_pre=True, **more):
        return gate_up.gate_up(x, weight, order, slot_weight, save_pre=save_pre, **how, **more)

    assert packed_products.supported(weight, order, x.dtype)
    act, pre = product()
    other_act, other_pre = elsewhere(product)
    rows_of_x = x[order.row_to_slot[:used].long() // top_k].double()
    looked_up = as_looked_up(weight, order, how["activation"])
    truths = [
        of_rows(rows_of_x, wide, of_row)
        + (0 if how["bias"] is None else how["bias"].double()[of_row])
        for wide in (looked_up, dequantize(weight, torch.float64))
    ]
    assert_as_close(pre[:used], other_pre[:used], truths)
    assert (act[:used].double() - other_act[:used].double()).norm() <= (
        0.01 * other_act[:used].double().norm()
    )
    again, empty = product(save_pre=False)
    assert torch.equal(again[:used], act[:used]) and not empty.numel()
    steps = packed_products.steps_of(weight, order, how["activation"])
    for save_pre in (True, False):
        stepped, kept = product(save_pre, act_in_steps=True)
        assert torch.equal(stepped[:used], in_order(act[:used], steps))
        assert not save_pre or torch.equal(kept[:used], pre[:used])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [60, 300])
@pytest.mark.parametrize("how", range(len(HOWS)))
def test_updates(hopper, elsewhere, how, rows):
    """Low-rank ones, in both products, of rows as they are and in steps."""
    draw = random.Random(2000 + 10 * how + rows)
    torch.manual_seed(draw.randrange(1 << 30))
    format, options = HOWS[how]
    order, tokens, top_k, of_row, used = random_rows(draw, hopper, rows)
    experts, k = order.expert_offsets.numel() - 1, 128 * draw.randint(2, 5)
    inner, rank = 128 * draw.randint(2, 4), draw.choice((8, 16, 64, 72, 136))

    def drawn(n, k):
        dense = torch.randn(experts, n, k, device=hopper) * 0.1
        a, b = (torch.randn(experts, *size, device=hopper) * 0.1 for size in ((rank, k), (n, rank)))
        side = torch.empty(tokens * top_k, rank, device=hopper, dtype=torch.bfloat16)
        return quantize(dense, format, **options), LowRank(a.bfloat16(), b.bfloat16(), side)

    (up, first), (down, second) = drawn(2 * inner, k), drawn(k, inner)
    x = torch.randn(tokens, k, device=hopper).bfloat16()
    by = torch.rand(tokens, top_k, device=hopper).bfloat16()

    def products(act_in_steps=False):
        act, pre = gate_up.gate_up(
            x, up, order, by, weight_on_input=False, save_pre=True, low_rank=first,
            act_in_steps=act_in_steps,
        )  # fmt: skip
        out = torch.full((tokens * top_k, k), 7.0, device=hopper, dtype=torch.bfloat16)
        grouped_gemm.grouped_gemm(act, down, order, out=out, low_rank=second, in_steps=act_in_steps)
        return pre[:used], second.side[:used].clone(), out[:used]

    assert packed_products.supported(up, order, x.dtype, first)
    found, others = (products(), products(True)), elsewhere(products)
    for mine in found:
        for one, other in zip(mine, others):
            assert (one.double() - other.double()).norm() <= 8e-3 * other.double().norm()
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][2], products()[2])


@pytest.mark.gpu
@pytest.mark.parametrize("height", [16, 32, 64, 128])
def test_every_code_and_scale_of_mxfp4(hopper, elsewhere, height):
    """All 16 codes at all scales, exactly; what is too large is never a number that looks right."""
    scales = torch.arange(256, dtype=torch.uint8, device=hopper)
    codes = torch.arange(16, dtype=torch.uint8, device=hopper).repeat(256, 16)  # [256, 256]
    weight = Packed(
        (codes[:, ::2] | codes[:, 1::2] << 4)[None].contiguous(),  # [1, 256, 128]
        scales[None, :, None].repeat(1, 1, 8).view(torch.float8_e8m0fnu), None, "mxfp4",
    )  # fmt: skip
    x = torch.eye(256, device=hopper).bfloat16()  # a row of the product for each column
    one = torch.zeros(256, 1, dtype=torch.long, device=hopper)
    order, _ = sort(one, 1, torch.bfloat16, height)

    def product():
        out = torch.empty(256, 256, device=hopper, dtype=torch.bfloat16)
        return grouped_gemm.grouped_gemm(x, weight, order, out=out)

    assert packed_products.supported(weight, order, x.dtype)
    mine, other = product(), elsewhere(product)
    by_pairs = packed_products.steps_of(weight, order) == "words"
    lowest, largest = (2, 252) if by_pairs else (32, 158)
    ordinary = slice(lowest, largest + 1)  # below, sums may be zero
    assert torch.equal(mine[:, ordinary], other[:, ordinary])
    below = (mine[:, :lowest].float() - other[:, :lowest].float()).abs().max()
    assert bool(below <= (2.0**-123 if by_pairs else 2.0**-96))
    above, nonzero = mine[:, largest + 1 :], other[:, largest + 1 :] != 0  # NaN, too
    assert not bool(above[nonzero].isfinite().any())
