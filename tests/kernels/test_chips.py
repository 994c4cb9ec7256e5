"""Properties of cards, cards that are too old, and boxes that the hardware takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_patch import kernels
from moe_patch.kernels import boxes, chips, tiles

NAMES = {
    (7, 5): "Tesla T4",
    (8, 0): "NVIDIA A100",
    (8, 9): "NVIDIA GeForce RTX 4090",
    (9, 0): "NVIDIA H200",
    (12, 0): "NVIDIA GeForce RTX 5090",
}
SHARED = {(7, 5): 65_536, (8, 0): 166_912, (9, 0): 232_448}


@pytest.fixture
def machine(monkeypatch):
    """Gives this machine cards of those capabilities, cuda:0 and on."""

    def put(*capabilities):
        def properties(device):
            major, minor = capabilities[torch.device(device).index or 0]
            shared = SHARED.get((major, minor), 101_376)
            return SimpleNamespace(
                name=NAMES[major, minor],
                major=major,
                minor=minor,
                shared_memory_per_block_optin=shared,
            )

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: properties(d).name)
        monkeypatch.setattr(tiles, "INTERPRET", False)
        cached = (kernels.why_not, chips.chip)
        for function in cached:
            function.cache_clear()
        tiles.forget()
        return cached

    yield put
    for function in (kernels.why_not, chips.chip):
        function.cache_clear()
    tiles.forget()


def test_a_card_before_8_0_is_refused_by_name(machine):
    machine((7, 5))
    reason = kernels.why_not("cuda")
    assert "Tesla T4 has 7.5" in reason and "8.0 or later" in reason
    with pytest.raises(RuntimeError, match="Tesla T4"):
        kernels.require(torch.device("cuda", 0))


def test_each_card_of_a_mixed_machine_has_its_own_tiles(machine):
    machine((9, 0), (8, 9), (7, 5))
    assert [kernels.why_not(f"cuda:{i}") is None for i in range(3)] == [True, True, False]
    large, small = (
        tiles.choose("gate_up", 128, 500, 768, 2048, torch.bfloat16, torch.device("cuda", i))
        for i in range(2)
    )
    assert large.bn == 128 and small.bn == 64
    assert tiles.step("gate_up", small, 2) * small.stages < 101_376


@pytest.mark.parametrize(
    "capability, has",
    [
        (80, set()),
        (86, set()),
        (89, {"fp8"}),
        (90, {"tma", "wgmma", "fp8"}),
        (100, {"tma", "fp8"}),
        (103, {"tma", "fp8"}),
        (120, {"tma", "fp8"}),
        (121, {"tma", "fp8"}),
    ],
)
def test_what_a_capability_has(capability, has):
    chip = chips.nvidia(capability, 101_376)
    found = {name for name in ("tma", "wgmma", "fp8") if getattr(chip, name)}
    assert found == has and chip.arch == f"sm_{capability}" and chip.small
    assert chip.ptx is not tiles.INTERPRET and not chips.amd("gfx942").ptx


@given(
    pointer=st.integers(0, 64),
    itemsize=st.sampled_from((1, 2, 4)),
    shape=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    slack=st.integers(0, 20),
    columns=st.sampled_from((16, 32)),
    begin=st.integers(0, 40),
)
def test_lawful_boxes_are_those_of_the_driver(pointer, itemsize, shape, slack, columns, begin):
    """The rules as NVIDIA states them, each by itself."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1) + slack)
    block = (*(1 for _ in shape[1:]), columns)
    broken = [
        pointer % 16 != 0,
        len(shape) > 5,
        any(size < 1 for size in shape),
        any(stride * itemsize % 16 for stride in strides[:-1]),
        (columns * itemsize) % 16 != 0,
        (begin * itemsize) % 16 != 0,
    ]
    arguments = (pointer, itemsize, tuple(shape), tuple(strides), block)
    assert boxes.lawful(*arguments, (begin,)) is not any(broken)
    assert boxes.lawful(*arguments) is not any(broken[:-1])


def test_no_box_of_a_tensor_without_contiguous_rows_or_of_great_strides():
    assert boxes.lawful(0, 2, (4, 64), (64, 1), (2, 32))
    assert not boxes.lawful(0, 2, (64, 4), (1, 64), (32, 2))
    assert not boxes.lawful(0, 2, (4, 64), (1 << 40, 1), (2, 32))
    assert not boxes.lawful(0, 2, (4, 64), (0, 1), (2, 32)), "an expanded tensor"


@given(
    rows=st.integers(1, 2**30),
    columns=st.integers(1, 600).map(lambda n: 8 * n),
    more=st.integers(0, 5).map(lambda n: 8 * n),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_boxes_of_rows_find_rows_and_end_where_they_are_told(rows, columns, more, at):
    pytest.importorskip("triton.experimental.gluon")
    pointer, stride = 0x7F00_0000_0000, columns + more
    box = boxes.rows_box(pointer, torch.float16, (rows, columns), (64, 64), stride)
    end = 1 + int(at[0] * (rows - 1))
    row = min(int(at[1] * end), end - 1)
    place = boxes.FAR, end, boxes.FAR - end + row, 0
    address = pointer + 2 * sum(n * step for n, step in zip(place, box.strides))
    assert address % 2**64 == pointer + 2 * row * stride
    assert all(0 <= n < size for n, size in zip(place, box.shape))
    assert box.shape[2] - place[2] == end - row, "rows that are left of the third dimension"


def test_rows_without_a_box():
    pytest.importorskip("triton.experimental.gluon")
    for rows, stride in ((0, 64), (2**30 + 1, 64), (8, 60)):
        assert boxes.rows_box(1 << 40, torch.float16, (rows, 64), (64, 64), stride) is None
