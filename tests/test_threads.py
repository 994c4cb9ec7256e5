"""Threads: forwards on one model and on two, while others patch and unpatch them."""

from __future__ import annotations

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import assert_close, both_families, tiny_block, tiny_model
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral import modeling_mixtral as hf_mixtral

import moe_patch
from moe_patch.models import SWAPS, decorated
from moe_patch.recognise import lent, original, overlap, routers

pytestmark = [
    pytest.mark.filterwarnings("error:moe_patch runs Hugging Face"),
    pytest.mark.usefixtures("use"),
]
THREADS, ROUNDS = 4, 12


@pytest.fixture(autouse=True)
def often():
    """Threads take turns every few bytecodes instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*functions):
    """Runs all of them at the same time; raises what the first of them raised."""
    barrier = threading.Barrier(len(functions))

    def start(function):
        barrier.wait(60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [one.result() for one in [pool.submit(start, f) for f in functions]]


def ids(seed):
    return torch.randint(0, 128, (1, 5 + seed % 3), generator=torch.Generator().manual_seed(seed))


def logits(model, seed):
    with torch.no_grad():
        return model(ids(seed)).logits


def step(model, seed):
    """Logits, and gradients of every parameter that wants one, without writing to .grad."""
    out = model(ids(seed), labels=ids(seed))
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [out.logits.detach(), *torch.autograd.grad(out.loss, wanted, allow_unused=True)]


def adapted(family):
    torch.manual_seed(1)
    block = "mlp" if family == "qwen3_moe" else "feed_forward"
    names = [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"]
    config = LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False,
        target_parameters=names, target_modules=[],
    )  # fmt: skip
    return get_peft_model(tiny_model(family), config)


MODELS = {"plain": tiny_model, "lora": adapted}


@both_families
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("models", [1, 2])
def test_forwards(family, kind, models):
    patched = [MODELS[kind](family) for _ in range(models)]
    for model in patched:
        moe_patch.patch(model)
    seeds = range(THREADS)
    expected = [logits(patched[0], seed) for seed in seeds]
    other = logits(tiny_model(family), 0)
    assert torch.allclose(expected[0], other, rtol=1e-3, atol=1e-3) is (kind == "plain")

    def work(seed):
        model = patched[seed % models]
        return all(torch.equal(logits(model, seed), expected[seed]) for _ in range(ROUNDS))

    assert all(together(*(lambda seed=seed: work(seed) for seed in seeds)))


@both_families
@pytest.mark.parametrize("kind", MODELS)
def test_steps(family, kind):
    model = MODELS[kind](family)
    moe_patch.patch(model)
    expected = [step(model, seed) for seed in range(THREADS)]

    def work(seed):
        return [step(model, seed) for _ in range(ROUNDS // 2)]

    for steps, want in zip(together(*(lambda s=s: work(s) for s in range(THREADS))), expected):
        for one in steps:
            for ours, theirs in zip(one, want, strict=True):
                assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def switching(model, stop):
    while not stop.is_set():
        moe_patch.patch(model)
        moe_patch.unpatch(model)


@both_families
def test_patch_and_unpatch_while_others_run(family):
    model = tiny_model(family)
    expected, stop = [logits(model, seed) for seed in range(THREADS)], threading.Event()
    working = threading.Semaphore(0)

    def work(seed):
        try:
            for _ in range(6 * ROUNDS):
                assert_close(logits(model, seed), expected[seed])
        finally:
            working.release()

    def until_done():
        with ThreadPoolExecutor(1) as pool:
            switch = pool.submit(switching, model, stop)
            for _ in range(THREADS - 1):
                working.acquire()
            stop.set()
            switch.result()

    together(until_done, *(lambda seed=seed: work(seed) for seed in range(THREADS - 1)))
    assert not any(original.fused_within(type(module)) for module in model.modules())
    assert torch.equal(logits(model, 0), expected[0])


@both_families
def test_adapters_count_while_another_thread_unpatches(family):
    """PEFT's own forward writes to the model: only one thread may run it, and none may patch."""
    model = adapted(family)
    expected = logits(model, 0)
    for _ in range(ROUNDS):
        moe_patch.patch(model)
        started = threading.Event()

        def work(started=started):
            found = []
            for _ in range(4):
                found.append(logits(model, 0))
                started.set()
            return found

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            assert started.wait(60)
            moe_patch.unpatch(model)
            for actual in running.result():
                assert_close(actual, expected)
    assert not any(original.fused_within(type(module)) for module in model.modules())


# In the middle of a forward, by a hook: what a thread can do, at the worst time


class Unpatching:
    def __init__(self, model):
        self.model, self.times = model, 0

    def __call__(self, *_):
        self.times += 1
        moe_patch.unpatch(self.model)


PLACES = [
    ("qwen3_moe", "gate"), ("qwen3_moe", "experts"), ("llama4", "router"), ("llama4", "experts"),
    ("llama4", "shared_expert"),
]  # fmt: skip


@pytest.mark.parametrize("family, name", PLACES)
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("peft", [False, True])
def test_unpatched_within_a_forward(family, name, register, peft):
    model = adapted(family) if peft else tiny_model(family)
    expected = logits(model, 0)
    moe_patch.patch(model)
    (module, *_) = [m for n, m in model.named_modules() if n.endswith(f".{name}")]
    hook = Unpatching(model)
    getattr(module, register)(hook)
    assert_close(logits(model, 0), expected)
    assert hook.times
    assert not any(original.fused_within(type(each)) for each in model.modules())
    assert_close(logits(model, 0), expected)


@both_families
def test_experts_that_another_thread_calls_take_nobody_s_factors(family):
    """Factors are lent to a call of one thread: the same experts elsewhere run without."""
    model, base = adapted(family), tiny_block(family).experts
    moe_patch.patch(model)
    expected, seen = logits(model, 0), []
    experts = next(m for m in model.modules() if type(m).__name__ == type(base).__name__)

    def look(module, args):
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(decorated.low_rank_updates, experts).result())

    experts.register_forward_pre_hook(look)
    assert torch.equal(logits(model, 0), expected)
    assert seen == [{}] and not lent._lent.here.entries


def test_factors_that_nobody_takes_are_computed_by_peft(monkeypatch):
    plain, patched = adapted("qwen3_moe"), adapted("qwen3_moe")
    expected = logits(plain, 0)
    moe_patch.patch(patched)
    monkeypatch.setattr(decorated, "low_rank_updates", lambda _: {})
    assert_close(logits(patched, 0), expected)


def test_compiled_before_and_after_adapters_were_lent():
    """A compiled forward looks whether this thread has been lent any: no guard of it may fail."""
    block, model = tiny_block("qwen3_moe"), adapted("qwen3_moe")
    moe_patch.patch(block)
    moe_patch.patch(model)
    hidden = torch.randn(1, 3, 64)
    torch._dynamo.reset()
    compiled = [
        torch.compile(one, fullgraph=one is block, backend="aot_eager") for one in (block, model)
    ]
    with torch.no_grad():
        expected = block(hidden), model(ids(0)).logits
        logits(model, 0)
        for _ in range(2):
            assert_close(compiled[0](hidden), expected[0])
            assert_close(compiled[1](ids(0)).logits, expected[1])
    with ThreadPoolExecutor(1) as pool:
        assert_close(pool.submit(logits, compiled[1], 0).result(), expected[1])
    torch._dynamo.reset()


def mixtral():
    config = MixtralConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2
    )
    return hf_mixtral.MixtralSparseMoeBlock(config)


def test_threads_that_patch_models_of_one_family_get_one_class(monkeypatch):
    blocks = [mixtral() for _ in range(8)]
    monkeypatch.setattr(routers, "_asked", {})
    monkeypatch.delitem(SWAPS, hf_mixtral.MixtralTopKRouter, raising=False)
    reports = together(*(lambda block=block: moe_patch.patch(block) for block in blocks))
    assert all(report.fused == [""] for report in reports)
    assert len({type(block.gate) for block in blocks}) == 1
    together(*(lambda block=block: moe_patch.unpatch(block) for block in blocks))
    assert {type(block.gate) for block in blocks} == {hf_mixtral.MixtralTopKRouter}


def test_patching_one_model_from_many_threads():
    model = nn.ModuleList([tiny_block("qwen3_moe"), tiny_block("llama4"), mixtral()])
    plain = copy.deepcopy(model)
    reports = together(*[lambda: moe_patch.patch(model)] * 6)
    assert all(report == reports[0] and len(report.fused) == 3 for report in reports)
    together(*[lambda: moe_patch.unpatch(model)] * 6)
    for module, other in zip(model.modules(), plain.modules()):
        assert type(module) is type(other) and vars(module).keys() == vars(other).keys()


@pytest.mark.gpu
def test_a_second_stream_for_each_first_one():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    assert overlap._beside(first) == overlap._beside(first) != overlap._beside(second)
