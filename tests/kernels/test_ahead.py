"""A call is rehearsed with tensors that have no memory, and goes on whatever comes of it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import pytest
import torch

from moe_patch import notices
from moe_patch.formats.packed import quantize
from moe_patch.kernels import ahead
from moe_patch.kernels.ahead import THREAD, compile_call, compiled_together
from moe_patch.ops.accumulate import Leaf


class Pair(NamedTuple):
    left: object
    right: object


class Launch:
    """Stands in for a kernel that is not compiled: what `launch.Launch` does then."""

    def __init__(self):
        self.compiled, self.kernel, self.constants = [], self, {"N": 4}

    def __call__(self, *args):
        if THREAD.rehearsed is not None:
            THREAD.rehearsed.append((self, (1,), args))
            return
        compile_call()

    def warmup(self, *args, grid, **constants):
        self.compiled.append((args, grid, constants))
        return constants


BUILT: list[object] = []
ACTIVE: ContextVar[bool] = ContextVar("active", default=False)


class Mode:
    """Triton's mode, which stays on if an interrupt meets its end."""

    def __init__(self, pool, ignore_errors):
        assert ignore_errors

    def __enter__(self):
        ACTIVE.set(True)

    def __exit__(self, *raised):
        if not any(raised):
            ACTIVE.set(False)


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(ahead.compat, "async_compile", lambda: Mode)
    monkeypatch.setattr(ahead.compat, "build_launcher", BUILT.append)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    BUILT.clear()
    return Launch()


def test_what_a_call_launches_is_compiled_at_its_first_launch(launch):
    @compiled_together
    def call(pair, *, scale):
        launch(pair.left, pair.right.codes)
        launch(scale, 3)
        return pair.left

    weight = quantize(torch.randn(2, 8, 64, dtype=torch.bfloat16), "nf4")
    x = torch.zeros(4, 6).T
    assert call(Pair(x, weight), scale=torch.ones(2)) is x
    ((rows, codes), grid, constants), ((scale, number), *_) = launch.compiled  # once
    assert rows.is_meta and rows.shape == x.shape and rows.stride() == x.stride()
    assert codes.is_meta and codes.dtype == torch.uint8 and codes.shape == weight.codes.shape
    assert grid == (1,) and constants == {"N": 4}
    assert scale.is_meta and scale.shape == (2,) and number == 3
    assert BUILT == [{"N": 4}] * 2


def test_a_call_in_a_call_is_the_one_that_is_rehearsed(launch):
    inner = compiled_together(lambda x: launch(x, 1))

    @compiled_together
    def outer(x):
        inner(x)
        launch(x, 2)

    outer(torch.zeros(3))
    assert [args[1] for args, *_ in launch.compiled] == [1, 1, 2]


def test_a_rehearsal_reaches_no_parameter(launch):
    """The kernel that adds to its `.grad` runs in a hook, which only the call itself may leave."""
    seen = []

    @compiled_together
    def call(leaf):
        seen.append((leaf.parameter.is_meta, leaf.parameter.grad is None))
        launch(leaf.parameter)

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    call(Leaf(parameter, None))
    assert seen == [(False, False), (True, True)]


def test_a_call_that_cannot_be_rehearsed_goes_on(launch):
    notices._warn_uncompiled.cache_clear()

    @compiled_together
    def call(x):
        launch(x)
        return x.item()

    with pytest.warns(UserWarning, match="call was not rehearsed .*one after the other"):
        assert call(torch.ones(1)) == 1
    assert not launch.compiled and THREAD.rehearsed is None and THREAD.call is None


@pytest.mark.parametrize("ready", [False, True])
def test_a_thread_is_ready_afterwards_if_it_was_before(launch, monkeypatch, ready):
    monkeypatch.setattr(THREAD, "ready", ready)
    seen = []
    call = compiled_together(lambda: (seen.append(THREAD.ready), launch()))
    call()
    assert seen == [ready, False] and THREAD.ready == ready


def test_an_interrupt_leaves_nothing_on(launch, monkeypatch):
    def interrupted(*args, grid, **constants):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "warmup", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        compiled_together(launch)(torch.zeros(3))
    assert not ACTIVE.get() and THREAD.rehearsed is None and THREAD.call is None


def test_nothing_is_rehearsed_on_one_core(launch, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    compiled_together(launch)(torch.zeros(3))
    launch(torch.zeros(3))  # outside of any call
    assert not launch.compiled
