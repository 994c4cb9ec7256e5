"""`with enabled():` in threads, tasks and generators that interleave; enable() and disable()."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_patch
from moe_patch import pretrained
from moe_patch.models.decorated import ExpertsConfig

pytestmark = pytest.mark.filterwarnings("error:moe_patch")
LOADERS = ("from_pretrained", "_from_config")


@pytest.fixture(autouse=True)
def hook_is_off():
    before = [vars(PreTrainedModel)[name] for name in LOADERS]
    yield
    assert not (pretrained._on or pretrained._originals)
    assert [vars(PreTrainedModel)[name] for name in LOADERS] == before


def load() -> bool:
    """Whether a model that is made now comes back patched."""
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", num_hidden_layers=1))
    return isinstance(model.model.layers[0].mlp.experts.config, ExpertsConfig)


def hooked() -> bool:
    return hasattr(vars(PreTrainedModel)["from_pretrained"], "moe_patch_original")


def block(steps):
    with moe_patch.enabled():
        yield
        steps.append(load())


@pytest.mark.parametrize("first", [0, 1])
def test_generators_that_interleave(first):
    steps = []
    pair = [block(steps), block(steps)]
    for generator in pair:
        next(generator)
    for at in (first, 1 - first):
        assert load() and hooked()
        next(pair[at], None)
    assert steps == [True, True]
    assert not load() and not hooked()


def test_threads_that_interleave():
    """The first to leave does not switch it off for the other."""
    entered, left = threading.Event(), threading.Event()

    def long():
        with moe_patch.enabled():
            entered.set()
            assert left.wait(60)
            return load()

    def short():
        assert entered.wait(60)
        with moe_patch.enabled():
            inside = load()
        left.set()
        return inside, load()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(long), pool.submit(short)
        assert one.result() is True and two.result() == (True, False)
    assert not load()


def test_other_threads_load_as_they_are():
    with moe_patch.enabled(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(load).result() is False
        assert load()


def test_tasks_are_contexts_of_their_own():
    async def inside(ready, go):
        with moe_patch.enabled():
            ready.set()
            await go.wait()
            return load(), await asyncio.to_thread(load)

    async def main():
        ready, go = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(ready, go))
        await ready.wait()
        outside = load()
        go.set()
        return outside, await task

    assert asyncio.run(main()) == (False, (True, True))


def test_a_context_that_outlives_the_block_is_off():
    import contextvars

    with moe_patch.enabled():
        inside = contextvars.copy_context()
        assert inside.run(load)
    assert not inside.run(load)


def test_a_generator_that_another_thread_closes():
    generator = block([])
    next(generator)
    assert load()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generator.close).result()
    assert not load() and not hooked()


def test_enable_inside_a_block_stays_on():
    with moe_patch.enabled():
        moe_patch.enable()  # no warning: a block is not enable()
        assert load()
    assert load() and hooked()
    with ThreadPoolExecutor(1) as pool:  # for everybody
        assert pool.submit(load).result()
    moe_patch.disable()
    assert not load()


def test_disable_inside_a_block_undoes_enable_alone():
    moe_patch.enable()
    with moe_patch.enabled():
        moe_patch.disable()
        assert load()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(load).result()
    assert not load() and not hooked()


def test_many_threads_leave_the_class_as_it_was():
    def work(_):
        for _ in range(200):
            with moe_patch.enabled():
                assert pretrained._is_on() and hooked()
            assert not pretrained._is_on()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not hooked()
