"""The kernels that fused_experts does not show by itself: the sort, the combine, tile choice."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops import assert_close

from moe_patch import reference
from moe_patch.order import ExpertOrder


def sort(index, num_experts, block_m):
    from moe_patch.kernels.sort_tokens import sort_tokens

    numel = ExpertOrder.numel(index.numel(), num_experts, block_m)
    buffer = torch.full((numel,), -7, dtype=torch.int32, device=index.device)
    return sort_tokens(index, num_experts, block_m, buffer)


def assert_same_order(ours, twin):
    tiles = int(twin.num_tiles)
    whole = "expert_offsets row_to_slot slot_to_row num_tiles large_first num_large taken"
    for name in whole.split():
        assert torch.equal(getattr(ours, name), getattr(twin, name)), name
    for name in ("tile_expert", "tile_row"):
        assert torch.equal(getattr(ours, name)[:tiles], getattr(twin, name)[:tiles]), name


def test_the_worked_example():
    order = reference.sort_tokens(torch.tensor([[2, 0], [0, 4], [2, 2]]), 4, 2)
    assert order.row_to_slot.tolist() == [1, 2, 0, 4, 5, 3]
    assert order.expert_offsets.tolist() == [0, 2, 2, 5, 5]
    assert order.slot_to_row.tolist() == [2, 0, 1, -1, 3, 4]
    assert order.tile_expert[:3].tolist() == [0, 2, 2]
    assert order.tile_row[:3].tolist() == [0, 2, 4]
    assert order.num_tiles.tolist() == [3]
    assert order.large_first.tolist() == [0, 1, 2, 3]
    assert order.num_large.tolist() == order.taken.tolist() == [0]


def test_large_experts_come_first(device):
    # 7: dropped; the mean is 9
    index = torch.tensor([3] * 9 + [0] * 2 + [1] * 30 + [7], device=device)[:, None]
    for order in (sort(index, 5, 16), reference.sort_tokens(index, 5, 16)):
        assert order.large_first.tolist() == [1, 0, 2, 3, 4]
        assert order.num_large.tolist() == [1]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("block_m", (16, 128))
@pytest.mark.parametrize(
    "size", [(3, 2, 4), (0, 2, 4), (7, 8, 128), (70, 3, 60), (130, 1, 7), (40, 8, 512), (9, 1, 1)]
)
def test_sort_equals_its_twin(device, size, block_m):
    tokens, top_k, experts = size
    index = torch.randint(-1, experts + 1, (tokens, top_k), device=device)
    assert_same_order(sort(index, experts, block_m), reference.sort_tokens(index, experts, block_m))


@given(
    ids=st.lists(st.integers(-3, 9), max_size=90),
    experts=st.integers(1, 8),
    block_m=st.sampled_from((16, 32)),
)
def test_sort_of_any_ids(ids, experts, block_m):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    index = torch.tensor(ids, device=device, dtype=torch.int64)[:, None]
    assert_same_order(sort(index, experts, block_m), reference.sort_tokens(index, experts, block_m))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [(1000, 8, 128), (16384, 8, 128), (131072, 8, 128), (4096, 1, 16), (5000, 7, 509)]
)
@pytest.mark.parametrize("skew", (False, True))
def test_sort_at_real_sizes(device, size, skew):
    tokens, top_k, experts = size
    index = torch.randint(0, experts + 1, (tokens, top_k), device=device)
    if skew:
        index = (torch.rand(tokens, top_k, device=device) ** 4 * experts).long()
    twin = reference.sort_tokens(index, experts, 128)
    assert_same_order(sort(index, experts, 128), twin)
    assert_same_order(sort(index, experts, 128), twin)


def test_an_interpreter_that_would_fail_is_refused_by_name():
    from moe_patch.kernels import _why_not_interpreted

    assert "numpy below 2.4, and 2.4.6 is" in _why_not_interpreted("3.6.0", "2.4.6")
    assert _why_not_interpreted("3.6.0", "2.3.5") is None
    assert _why_not_interpreted("3.9.0+git1", "2.5.0rc1") is None


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("weighted", (False, True))
def test_combine_equals_its_twin_and_skips_dropped_rows(device, weighted):
    from moe_patch.kernels.combine import combine

    index = torch.randint(0, 6, (11, 3), device=device)  # 5: dropped
    order = reference.sort_tokens(index, 5, 16)
    rows = torch.randn(33, 40, device=device)
    rows[order.expert_offsets[-1] :] = float("nan")  # what a kernel may leave there
    weights = torch.rand(11, 3, device=device) if weighted else None
    ours = combine(rows, order.slot_to_row, 3, weights)
    assert_close(ours, reference.combine(rows, order.slot_to_row, 3, weights), torch.float32)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("gather", (0, 3))
def test_row_sums_are_those_of_float64(device, gather, weighted):
    """Of one expert with thousands of rows as exactly as of others, and as torch's own sum."""
    from moe_patch.kernels.row_sums import row_sums

    index = torch.randint(2, 6, (2000, 3), device=device)  # 5: dropped
    index[:, 0] = 1  # and expert 0 has none
    order = reference.sort_tokens(index, 5, 16)
    rows = torch.randn(6000 // max(gather, 1), 37, device=device) + 0.2
    if not gather:
        rows[order.expert_offsets[-1] :] = float("nan")  # what a kernel may leave there
    weights = torch.rand(2000, 3, device=device) if weighted else None
    out = torch.full((5, 37), float("nan"), device=device)
    row_sums(rows, order, gather=gather, slot_weight=weights, out=out)
    assert not out[0].any()
    for expert, (begin, end) in enumerate(itertools.pairwise(order.expert_offsets.tolist())):
        slots = order.row_to_slot[begin:end]
        mine = rows[slots // gather] if gather else rows[begin:end]
        if weighted:
            mine = mine * weights.flatten()[slots, None]
        truth, plain = mine.double().sum(0), mine.sum(0)
        error, bound = (out[expert] - truth).square().mean(), (plain - truth).square().mean()
        assert error.sqrt() <= bound.sqrt() + 1e-7 * truth.square().mean().sqrt()


def test_row_sums_keep_infinities(device):
    from moe_patch.kernels.row_sums import row_sums

    index = torch.zeros(100, 1, dtype=torch.long, device=device)
    rows, out = torch.ones(100, 4, device=device), torch.empty(1, 4, device=device)
    rows[3, 0], rows[5, 1], rows[7, 2], rows[70, 2] = math.inf, math.nan, math.inf, -math.inf
    row_sums(rows, reference.sort_tokens(index, 1, 16), out=out)
    assert out[0, 0] == math.inf and out[0, 1:3].isnan().all() and out[0, 3] == 100


@pytest.mark.parametrize("rows", (1, 8, 20, 64, 150, 200, 5000))
@pytest.mark.parametrize("shared", (65_536, 101_376, 166_912, 232_448))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_every_tile_fits_the_chip(monkeypatch, rows, shared, dtype):
    """Stages are cut until the operands fit; three 4-byte kilobytes stay for the rest."""
    from moe_patch.kernels import chips, tiles

    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, shared))
    height = tiles.block_m(rows * 128, 128, dtype)
    for kernel in ("gate_up", "gemm", "dgate", "dw", "dw_gathered"):
        tile = tiles.heuristic(
            tiles.Product(kernel, height, rows, 768, 2048, dtype, torch.device("cuda"))
        )
        columns = tile.bn * (2 if kernel == "gate_up" else 1)
        depth = tile.stages - (2 if kernel == "dw_gathered" else 0)
        assert max(depth, 1) * (tile.bm + columns) * tile.bk * dtype.itemsize <= shared - 4096
        assert tile.stages >= 1
        assert tile.bm * columns <= 256 * 128
        assert kernel.startswith("dw") or tile.bm == height


@pytest.mark.parametrize("act", ("silu", "relu2 None 1.0 0.0 ungated"))
def test_gate_up_is_started_with_a_lawful_number_of_warps(act, monkeypatch):
    """An ungated one has the tiles of gemm, which may be those of warps with roles."""
    from moe_patch.kernels import boxes, chips, gate_up, tiles

    found = []
    monkeypatch.setattr(gate_up, "_on_hopper", lambda *_: False)
    monkeypatch.setattr(gate_up, "_launches", lambda tile, *_, **__: found.append(tile) or print)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, 232_448))
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(tiles, "has_gluon", lambda: True)
    tiles._choose.cache_clear()
    x, weight = torch.zeros(300, 256).half(), torch.zeros(1, 512, 256).half()
    order = reference.sort_tokens(torch.zeros(300, 1, dtype=torch.long), 1, 128)
    how = {"weight_on_input": False, "save_pre": True, "activation": act}
    gate_up.gate_up(x, weight, order, x[:, :1], **how)
    tiles._choose.cache_clear()
    boxes._box.cache_clear()  # the CPU has no TMA
    assert [tile.warps for tile in found] == [8]


@pytest.mark.parametrize("inner, by_box", [(100, False), (104, True), (71, False)])
@pytest.mark.parametrize("turned", [False, True])
def test_no_box_begins_between_16_bytes(inner, by_box, turned, monkeypatch):
    """Pointers load both halves instead: such a box is an illegal instruction on an H200."""
    from moe_patch.kernels import boxes, chips, gate_up

    told = []

    def launches(*_, **constants):
        return lambda grid, x, weights, *rest: told.append((weights, constants["ONE_DOT"]))

    monkeypatch.setattr(gate_up, "_launches", launches)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, 232_448))
    weight = torch.zeros(2, 40, 2 * inner, dtype=torch.float16).mT
    weight = weight if turned else weight.contiguous()
    x, index = torch.zeros(3, 40, dtype=torch.float16), torch.tensor([[0], [1], [1]])
    order = reference.sort_tokens(index, 2, 16)
    gate_up.gate_up(x, weight, order, x[:, :1], weight_on_input=False, save_pre=True)
    boxes._box.cache_clear()  # the CPU has no TMA
    ((weights, one_dot),) = told
    assert isinstance(weights, torch.Tensor) == (turned and not by_box)
    assert one_dot == (not turned or not by_box)
