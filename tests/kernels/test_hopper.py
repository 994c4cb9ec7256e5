"""Kernels in hopper/ beside those for every chip: the same bits, at random sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hopper import answers, copy_as
from ops import assert_close, drawn_bytes, gradients, in_double, in_fp8, moe

from moe_patch import reference
from moe_patch.kernels import chips, dgate, dw, gate_up, grouped_gemm, tiles
from moe_patch.kernels.tiles import ROLES, Product, Tile
from moe_patch.kernels.weights import suffix
from moe_patch.ops import fused_experts
from moe_patch.ops.grouped import sort

H200 = chips.nvidia(90, 232_448)
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or not chips.chip(device).wgmma:
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.fixture
def ours(monkeypatch):
    """Answers of every `_on_hopper`, in turn."""
    return answers(monkeypatch)


def random_order(draw, device, dtype):
    """(the order of slots, tokens, choices): 20 to 900 rows an expert on average, and skewed; most
    experts may have none."""
    experts, top_k = draw.randint(1, 9), draw.choice((1, 2, 3))
    tokens = max(1, experts * draw.randint(20, 900) // top_k)
    index = (torch.rand(tokens, top_k) ** draw.choice((1, 1, 4)) * experts).long()
    if draw.random() < 0.2:
        index, experts = torch.tensor(draw.sample(range(16), experts))[index], 16
    if draw.random() < 0.3:
        index[torch.rand(tokens, top_k) < 0.2] = experts  # dropped
    order, _ = sort(index.to(device), experts, dtype, draw.choice((64, 128)))
    return order, tokens, top_k


def random_tile(draw, order, bn, scale=None):
    stages = draw.choice((2, 3, 4) if scale is None else (2, 3))
    return Tile(order.block_m, bn, 64, ROLES, stages, draw.choice((1, 2, 16)))


def random_reduction(draw):
    """K of a product; where it is long, tiles are even and asked for late."""
    return 64 * draw.choice((draw.randint(4, 20), draw.randint(33, 60)))


def with_slack(draw, rows, columns, dtype, device):
    """Random [rows, columns], perhaps a part of something wider."""
    slack = 8 * draw.choice((0, 0, 1, 5))
    return torch.randn(rows, columns + slack, device=device).to(dtype)[:, :columns]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(32))
def test_grouped_gemm(number, hopper, ours):
    draw, dtype = random.Random(number), HALVES[number % 2]
    torch.manual_seed(number)
    order, tokens, top_k = random_order(draw, hopper, dtype)
    experts, slots = order.expert_offsets.numel() - 1, tokens * top_k
    n_major = draw.random() < 0.5
    n, k = 8 * draw.randint(32, 200), random_reduction(draw)
    x = with_slack(draw, slots, k, dtype, hopper)
    weight = torch.randn(experts, n, k, device=hopper).to(dtype)
    if n_major:
        weight = weight.mT.contiguous().mT
    weight, scale, wide = drawn_bytes(draw, weight)
    tile = random_tile(draw, order, 256, scale)

    def product(tile, weight, scale):
        out = torch.full((slots, n), 7.0, device=hopper, dtype=dtype)
        with tiles.forced("gemm" + suffix(weight, scale), tile):
            return grouped_gemm.grouped_gemm(x, weight, order, out=out, scale=scale)

    expected = product(replace(tile, warps=8, stages=3), wide, None)
    assert not ours
    for _ in range(3):
        assert torch.equal(product(tile, weight, scale), expected)
    assert ours == [True] * 3
    used = int(order.expert_offsets[-1])
    assert bool((expected[used:] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(32))
def test_gate_up(number, hopper, ours):
    """The bits of the kernel for every chip: ragged tiles, clamps, weights on the input."""
    draw, dtype = random.Random(number), HALVES[number % 2]
    torch.manual_seed(number)
    order, tokens, top_k = random_order(draw, hopper, dtype)
    experts, slots = order.expert_offsets.numel() - 1, tokens * top_k
    inner, k = 8 * draw.randint(16, 80), random_reduction(draw)
    x = with_slack(draw, tokens, k, dtype, hopper)
    inner = draw.choice((inner, 128 * draw.randint(1, 5)))
    weight = torch.randn(experts, 2 * inner, k, device=hopper).to(dtype) * 0.1
    if draw.random() < 0.5:
        weight = weight.mT.contiguous().mT
    slot_weight = torch.rand(tokens, top_k, device=hopper)
    how = {
        "weight_on_input": draw.random() < 0.3,
        "save_pre": draw.random() < 0.7,
        "activation": draw.choice(("silu", "gelu_tanh", "silu 7.0 1.702 1.0 concatenated")),
    }
    weight, scale, wide = drawn_bytes(draw, weight) if inner % 128 == 0 else (weight, None, weight)
    tile = random_tile(draw, order, 128, scale)

    def product(tile, weight, scale):
        made = torch.full((slots, inner), 7.0, device=hopper, dtype=dtype)
        pre = torch.full((slots, 2 * inner), 7.0, device=hopper, dtype=dtype)
        into = made, pre if how["save_pre"] else pre[:0]
        with tiles.forced("gate_up" + suffix(weight, scale), tile):
            return gate_up.gate_up(x, weight, order, slot_weight, **how, into=into, scale=scale)

    expected = product(replace(tile, warps=8, stages=3), wide, None)
    assert not ours
    for _ in range(3):
        for mine, other in zip(product(tile, weight, scale), expected, strict=True):
            assert torch.equal(mine, other)
    assert ours == [True] * 3
    used = int(order.expert_offsets[-1])
    assert all(bool((each[used:] == 7).all()) for each in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(40))
def test_dgate(number, hopper, ours):
    """The bits of the kernel for every chip, parts of the sums included; a neighbour's NaN, and
    what a dropped slot's rows hold, go nowhere."""
    draw, dtype = random.Random(number), HALVES[number % 2]
    torch.manual_seed(number)
    order, tokens, top_k = random_order(draw, hopper, dtype)
    offsets = order.expert_offsets
    experts, slots = offsets.numel() - 1, tokens * top_k
    inner, k = 8 * draw.randint(32, 120), random_reduction(draw)
    d_out = with_slack(draw, tokens, k, dtype, hopper)
    down = torch.randn(experts, k, inner, device=hopper).to(dtype) * 0.1
    if draw.random() < 0.5:
        down = down.mT.contiguous().mT
    pre = torch.randn(slots, 2 * inner, device=hopper).to(dtype)
    pre[int(offsets[-1]) :] = float("nan")
    slot_weight = torch.rand(tokens, top_k, device=hopper)
    need = {f"need_{name}": draw.random() < 0.8 for name in ("pre", "act", "scale")}
    how = {
        "weight_on_input": draw.random() < 0.3,
        "activation": draw.choice(("silu", "gelu_tanh", "silu 7.0 1.702 1.0 concatenated")),
    }
    down, scale, wide = drawn_bytes(draw, down)
    tile = random_tile(draw, order, 256, scale)

    def gradients(tile, down=down, scale=scale):
        sizes = (2 * inner, dtype), (inner, dtype), (-(-inner // 256), torch.float32)
        into = tuple(
            torch.full((slots if needed else 0, size), 7.0, device=hopper, dtype=kind)
            for needed, (size, kind) in zip(need.values(), sizes, strict=True)
        )
        with tiles.forced("dgate" + suffix(down, scale), tile):
            return dgate.dgate(
                d_out, down, order, slot_weight, pre, **how, **need, into=into, scale=scale
            )

    expected = gradients(replace(tile, warps=8, stages=3), wide, None)
    assert not ours
    for _ in range(3):
        for mine, other in zip(gradients(tile), expected, strict=True):
            assert torch.equal(mine, other)
    assert all(bool((each[int(offsets[-1]) :] == 7).all()) for each in expected)
    poisoned = draw.randrange(experts)
    own = slice(int(offsets[poisoned]), int(offsets[poisoned + 1]))
    pre[own] = float("nan")
    for mine, other in zip(gradients(tile), expected, strict=True):
        mine[own] = other[own] = 0
        assert torch.equal(mine, other)
    assert ours == [True] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("number", range(24))
def test_dw(monkeypatch, number, few, hopper, ours):
    draw, dtype = random.Random(number), HALVES[number % 2]
    monkeypatch.setattr(dw, "FEW", few)
    torch.manual_seed(number)
    order, tokens, top_k = random_order(draw, hopper, dtype)
    offsets = order.expert_offsets
    experts, slots = offsets.numel() - 1, tokens * top_k
    m, n = (8 * draw.choice((draw.randint(1, 120), draw.randint(430, 600))) for _ in range(2))
    p, q = with_slack(draw, tokens, m, dtype, hopper), with_slack(draw, slots, n, dtype, hopper)
    add, kind = draw.random() < 0.3, draw.choice((dtype, dtype, torch.float32))
    turned, gap, poisoned = draw.random() < 0.5, draw.choice((0, 0, 5, 8)), draw.randrange(experts)
    start = torch.randn(experts, m, n, device=hopper).to(kind)
    tile = Tile(128, 256, 64, ROLES, draw.choice((2, 3, 4)))

    def gradient(tile):
        out, between = copy_as(start, turned, gap)
        with tiles.forced("dw_gathered", tile):
            dw.dw(p, q, order, gather=top_k, out=out, add=add)
        assert bool((between == 7).all())
        return out

    expected = gradient(replace(tile, warps=8, stages=3))
    assert not ours
    for _ in range(3):
        assert torch.equal(gradient(tile), expected)
    q[int(offsets[poisoned]) : int(offsets[poisoned + 1])] = float("nan")
    q[int(offsets[-1]) :] = float("nan")
    lost = gradient(tile)
    rest = [expert for expert in range(experts) if expert != poisoned]
    assert torch.equal(lost[rest], expected[rest]) and ours == [True] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("used", [(), (5,), (0, 63), (0, 20, 21, 60)])
def test_dw_where_many_experts_have_no_rows(monkeypatch, few, add, used, hopper, ours):
    """Each program then has several such tiles one after the other."""
    monkeypatch.setattr(dw, "FEW", few)
    torch.manual_seed(0)
    index = torch.full((700, 1), 64)
    if used:
        index = torch.tensor(used)[torch.randint(len(used), (700, 1))]
    order, _ = sort(index.to(hopper), 64, torch.bfloat16, 128)
    p, q = (torch.randn(700, 1024, device=hopper).bfloat16() for _ in range(2))
    start = torch.randn(64, 1024, 1024, device=hopper).bfloat16()

    def gradient(tile):
        with tiles.forced("dw_gathered", tile):
            return dw.dw(p, q, order, gather=1, out=start.clone(), add=add)

    expected = gradient(Tile(128, 256, 64, 8, 3))
    assert not ours
    assert torch.equal(gradient(Tile(128, 256, 64, ROLES, 4)), expected) and ours == [True]
    assert add or not expected[[e for e in range(64) if e not in used]].any()


@pytest.mark.gpu
def test_other_operands_run_in_triton(hopper, ours):
    """Biases, a gather, and rows that no box takes."""
    index = torch.randint(0, 2, (600, 1), device=hopper)
    order, _ = sort(index, 2, torch.bfloat16, 128)
    x = torch.randn(600, 264, device=hopper).bfloat16()
    weight = torch.randn(2, 256, 256, device=hopper).bfloat16()
    bias = torch.randn(2, 256, device=hopper).bfloat16()
    out = torch.empty(600, 256, device=hopper, dtype=torch.bfloat16)
    with tiles.forced("gemm", Tile(128, 256, 64, ROLES, 4)):
        grouped_gemm.grouped_gemm(x[:, :256], weight, order, out=out, bias=bias)
        grouped_gemm.grouped_gemm(x[:, :256], weight, order, out=out, gather=1)
        assert not ours
        shifted = x[:, 1:257]
        expected = grouped_gemm.grouped_gemm(shifted.contiguous(), weight, order, out=out).clone()
        ours.clear()
        found = grouped_gemm.grouped_gemm(shifted, weight, order, out=out)
    assert ours == [False] and torch.equal(found, expected)


@pytest.mark.parametrize(
    "kernel, bm, rows, n, k, dtype, roles",
    [
        ("gemm", 128, 1024, 2048, 768, torch.bfloat16, True),
        ("gemm", 128, 1024, 2048, 1536, torch.float16, True),
        ("gemm", 128, 1024, 2048, 800, torch.bfloat16, False),
        ("gemm", 128, 1024, 2048, 768, torch.float32, False),
        ("gemm", 128, 1024, 128, 768, torch.bfloat16, False),
        ("dw_gathered", 128, 1024, 768, 2048, torch.bfloat16, True),
        ("dw_gathered", 128, 64, 768, 2048, torch.bfloat16, True),
        ("dw_gathered", 128, 32, 768, 2048, torch.bfloat16, False),
        ("dw", 128, 1024, 768, 2048, torch.bfloat16, False),
        ("gate_up", 128, 1024, 768, 2048, torch.bfloat16, True),
        ("gate_up", 128, 1024, 128, 2048, torch.bfloat16, True),
        ("gate_up", 128, 1024, 2048, 7168, torch.bfloat16, True),
        ("gate_up", 128, 256, 8192, 5120, torch.bfloat16, True),
        ("gate_up", 64, 128, 2048, 7168, torch.bfloat16, True),
        ("gate_up", 64, 64, 768, 2048, torch.float16, True),
        ("gate_up", 64, 32, 768, 2048, torch.bfloat16, False),
        ("gemm", 64, 64, 2048, 768, torch.bfloat16, True),
        ("gemm", 64, 64, 5120, 8192, torch.bfloat16, False),
        ("dgate", 128, 1024, 768, 2048, torch.bfloat16, True),
        ("dgate", 64, 64, 768, 2048, torch.bfloat16, True),
        ("dgate", 128, 1024, 2048, 7168, torch.bfloat16, True),
        ("dgate", 64, 128, 2048, 7168, torch.bfloat16, True),
        ("dgate", 64, 32, 768, 2048, torch.bfloat16, False),
        ("dgate", 128, 1024, 128, 2048, torch.bfloat16, False),
        ("gate_up_w8", 128, 256, 2048, 7168, torch.bfloat16, True),
        ("gemm_w8", 64, 64, 768, 2048, torch.bfloat16, True),
        ("dgate_w8", 128, 256, 768, 2048, torch.float16, True),
        ("dgate_w8", 32, 16, 768, 2048, torch.bfloat16, False),
        ("gate_up_w4", 128, 1024, 768, 2048, torch.bfloat16, False),
    ],
)
def test_where_they_are_faster(monkeypatch, kernel, bm, rows, n, k, dtype, roles):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    product = Product(kernel, bm, rows, n, k, dtype, CPU)
    for arch in (80, 89, 90, 100, 120):
        found = chips.nvidia(arch, 101_376 if arch in (89, 120) else 232_448)
        monkeypatch.setattr(chips, "chip", lambda device, found=found: found)
        tile = tiles.heuristic(product)
        assert (tile.warps == ROLES) == (roles and arch == 90), arch
    monkeypatch.setattr(chips, "chip", lambda device: H200)
    monkeypatch.setattr(tiles, "has_gluon", lambda: False)
    plain = tiles.heuristic(product)
    assert plain.warps != ROLES
    monkeypatch.setattr(tiles, "has_gluon", lambda: True)
    assert tiles.portable(product) == plain, "what they leave"


@pytest.mark.parametrize("rows", (80, pytest.param(700, marks=pytest.mark.gpu)))
@pytest.mark.parametrize("in_bytes", (False, True))
@pytest.mark.parametrize("kernel", ("gate_up", "gemm", "dgate"))
def test_what_they_leave(device, kernel, in_bytes, rows):
    """No box of 301 columns is lawful: the kernel for every chip, whose tiles have other columns,
    computes the same."""
    arguments = moe(device, torch.float16, rows, 256, 301, 3, 2)
    arguments = in_fp8(arguments) if in_bytes else arguments
    exact = in_double(arguments)

    def results(function, of):
        out = function(**of)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        return out, *gradients(out, d_out, *of.values())

    with tiles.forced(kernel + (tiles.W8 if in_bytes else ""), Tile(128, 512, 64, ROLES, 4)):
        ours = results(fused_experts, arguments)
    for mine, truth in zip(ours, results(reference.fused_experts, exact), strict=True):
        assert_close(mine, truth, torch.float16)


def test_64_rows_of_dgate_have_256_columns_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    for arch, rows, columns in ((80, 64, 128), (90, 64, 256), (90, 32, 128), (100, 64, 128)):
        found = chips.nvidia(arch, 232_448)
        monkeypatch.setattr(chips, "chip", lambda device, found=found: found)
        product = Product("dgate", 64, rows, 768, 2048, torch.bfloat16, CPU)
        assert tiles.portable(product).bn == columns, (arch, rows)


@pytest.mark.parametrize(
    "rows, dtype, tail",
    [
        (95, torch.float8_e4m3fn, 0),
        (96, torch.float16, 16),
        (319, torch.bfloat16, 16),
        (320, torch.bfloat16, 0),
        (1024, torch.float8_e4m3fn, 16),
    ],
)
def test_which_products_have_tails(rows, dtype, tail):
    assert tiles.tail_for(torch.empty(3, 8, 8, dtype=dtype), 3 * rows + 2) == tail
