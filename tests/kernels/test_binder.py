"""A start that is written out is for the arguments that it was made for, and for no others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import triton

from moe_patch import compat
from moe_patch.kernels import ahead, binder


class Box:
    def __init__(self, kind, **encoded):
        self.kind, self.encoded = kind, encoded


KINDS = [(torch.bfloat16, (64, 64)), (torch.float16, (64, 64))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


@pytest.fixture(autouse=True)
def ready(monkeypatch):
    monkeypatch.setattr(compat, "cuda_device", lambda: ready.device)
    monkeypatch.setattr(compat, "cuda_stream", lambda device: 70 + device)
    monkeypatch.setattr(compat, "encode", lambda box, name, meta: [name, meta, id(box)])
    monkeypatch.setattr(ahead.THREAD, "ready", True)
    ready.device = 0


def aligned(dtype):
    memory = torch.zeros(64, dtype=dtype)
    return memory[-memory.data_ptr() % 16 // memory.element_size() :]


def drawn(rng):
    """A kernel's arguments, at least one of each sort, in any order."""
    sorts = [
        "tensor",
        "count",
        "none",
        "box",
        *rng.choices(["tensor", "count", "none", "box"], k=5),
    ]
    rng.shuffle(sorts)
    make = {
        "tensor": lambda: aligned(rng.choice(DTYPES)),
        "count": lambda: rng.randrange(2**31),
        "none": lambda: None,
        "box": lambda: Box(rng.choice(KINDS), mine=[rng.random(), 3, 4]),
    }
    return sorts, [make[sort]() for sort in sorts]


def bound(args, packed):
    """(what writes out, everything that the C function was called with)."""
    told = []
    boxes = [(i, "mine", 2 * i) for i, arg in enumerate(args) if isinstance(arg, Box)]
    settings = ("settings", None, 5)
    binary = compat.Binary(lambda *given: told.append(given), 99, settings, boxes, (None,), packed)
    return binder.written_out(binary, 0, tuple(args)), told


@pytest.mark.parametrize("packed", [False, True])
def test_starts_with_addresses_and_encodings(packed):
    rng = random.Random(packed)
    for _ in range(50):
        sorts, args = drawn(rng)
        launch, told = bound(args, packed)
        others = [_like(sort, arg, rng) for sort, arg in zip(sorts, args)]  # of the same kinds
        for given in (args, others):
            grid = tuple(rng.randrange(1, 99) for _ in range(rng.randrange(1, 4)))
            assert launch(grid, tuple(given))
            values = []
            for i, arg in enumerate(given):
                if isinstance(arg, torch.Tensor):
                    values.append(arg.data_ptr())
                elif isinstance(arg, Box):
                    values += arg.encoded.get("mine") or ["mine", 2 * i, id(arg)]
                else:
                    values.append(arg)
            values.append(None)  # of the constant
            last = [tuple(values)] if packed else values
            assert told.pop() == (*(*grid, 1, 1)[:3], 70, 99, "settings", None, 5, *last)
        assert not told


def _like(sort, arg, rng):
    if sort == "tensor":
        return aligned(arg.dtype)
    if sort == "box":
        return rng.choice([Box(arg.kind, mine=[rng.random()], other=[7]), Box(arg.kind, other=[7])])
    return rng.randrange(2**31) if sort == "count" else None


def other_dtype(sorts, args):
    at = sorts.index("tensor")
    args[at] = aligned(next(dtype for dtype in DTYPES if dtype != args[at].dtype))


def no_tensor(sorts, args):
    args[sorts.index("tensor")] = None


def no_box(sorts, args):
    args[sorts.index("box")] = None


def something(sorts, args):
    args[sorts.index("none")] = aligned(torch.float32)


def between_16_bytes(sorts, args):
    at = sorts.index("tensor")
    args[at] = args[at][1:]


def halfway_between(sorts, args):
    at = sorts.index("tensor")
    args[at] = args[at][8 // args[at].element_size() :]


def wide_count(sorts, args):
    args[sorts.index("count")] = 2**31


def wider_count(sorts, args):
    args[sorts.index("count")] = 2**35  # its low 35 bits are those of 0


def other_box(sorts, args):
    at = sorts.index("box")
    args[at] = Box(next(kind for kind in KINDS if kind != args[at].kind), mine=[1])


def other_device(sorts, args):
    ready.device = 1


def rehearsal(sorts, args):
    ahead.THREAD.ready = False


CHANGES = [
    other_dtype, no_tensor, no_box, something, between_16_bytes, halfway_between, wide_count,
    wider_count, other_box, other_device, rehearsal,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_starts_nothing_for_others(change):
    sorts, args = drawn(random.Random(1))
    launch, told = bound(args, False)
    assert launch((1,), tuple(args)) and told.pop()
    change(sorts, args)
    assert not launch((1,), tuple(args)) and not told


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_starts_nothing_where_a_profiler_listens(monkeypatch, name):
    _, args = drawn(random.Random(1))
    launch, told = bound(args, False)
    monkeypatch.setattr(triton.knobs.runtime, name, SimpleNamespace(calls=[print]))
    assert not launch((1,), tuple(args)) and not told
