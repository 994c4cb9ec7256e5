"""Threads on CUDA streams of their own, with the real kernels."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ops import moe
from tiny import assert_close, tiny_block
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_deepseek

import moe_patch
from moe_patch.ops.experts import fused_experts
from moe_patch.recognise import original, overlap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:moe_patch runs Hugging Face"),
]
THREADS, ROUNDS, HIDDEN = 2, 20, 256
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4},
    "llama4": {"intermediate_size": 128, "num_local_experts": 16, "num_experts_per_tok": 1},
}
FAMILIES = (*SIZES, "deepseek_v3")
TOKENS = (1, 40, 300)
"""Decode, a few (Llama4 and DeepSeek run their shared experts on a second stream), many."""

every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family, device, dtype=torch.bfloat16):
    if family in SIZES:
        block = tiny_block(family, device, hidden_size=HIDDEN, **SIZES[family])
    else:
        config = hf_deepseek.DeepseekV3Config(
            hidden_size=HIDDEN, moe_intermediate_size=128, n_routed_experts=32, n_group=4,
            topk_group=2, num_experts_per_tok=4,
        )  # fmt: skip
        torch.manual_seed(0)
        block = hf_deepseek.DeepseekV3MoE(config)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.1)
        block = block.to(device).eval()
    return block.to(dtype)


def draw(tokens, seed, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, HIDDEN, generator=generator).to(device, dtype)


def forward(block, hidden):
    with torch.no_grad():
        out = block(hidden)
    return [*out] if isinstance(out, tuple) else [out]


def step(block, hidden):
    """Outputs, and gradients of the input and of every parameter, without writing to .grad."""
    hidden = hidden.detach().requires_grad_()
    out = block(hidden)
    outs = [*out] if isinstance(out, tuple) else [out]
    loss = sum(one.float().square().sum() for one in outs)
    leaves = [hidden, *block.parameters()]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [one.detach() for one in outs] + [grad for grad in grads if grad is not None]


def together(work, threads=THREADS):
    """[work(thread)] of threads that start at once, each on a stream of its own."""
    barrier = threading.Barrier(threads)
    torch.cuda.synchronize()

    def start(thread):
        stream = torch.cuda.Stream()
        barrier.wait(60)
        with torch.cuda.stream(stream):
            result = work(thread)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(threads) as pool:
        found = [one.result() for one in [pool.submit(start, i) for i in range(threads)]]
    torch.cuda.synchronize()
    return found


@every_family
@pytest.mark.parametrize("run", [forward, step])
@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_are_those_of_one_thread(family, run, models, tokens, device):
    blocks = [make(family, device) for _ in range(models)]
    for block in blocks:
        assert moe_patch.patch(block).fused == [""]
    inputs = [draw(tokens, thread, device) for thread in range(THREADS)]
    expected = [run(blocks[0], hidden) for hidden in inputs]
    again = [run(blocks[0], hidden) for hidden in inputs]
    for one, other in zip(expected, again):  # else the rest says nothing
        assert all(map(torch.equal, one, other))

    def work(thread):
        return [run(blocks[thread % models], inputs[thread]) for _ in range(ROUNDS)]

    for results, want in zip(together(work), expected):
        for result in results:
            assert len(result) == len(want)
            for at, (ours, theirs) in enumerate(zip(result, want)):
                assert torch.equal(ours, theirs), f"tensor {at} differs from one thread's"


@every_family
@pytest.mark.parametrize("tokens", TOKENS)
def test_patch_and_unpatch_while_another_thread_runs(family, tokens, device):
    block = make(family, device, torch.float32)
    hidden = draw(tokens, 0, device, torch.float32)
    expected = forward(block, hidden)
    moe_patch.patch(block)
    forward(block, hidden)  # compiled before the clock runs
    torch.cuda.synchronize()
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            moe_patch.unpatch(block)
            moe_patch.patch(block)
            time.sleep(0.001)  # or the other waits for the interpreter's lock at every launch
        moe_patch.unpatch(block)

    def work(thread):
        if thread == 0:
            return switch()
        try:
            return [forward(block, hidden) for _ in range(10 * ROUNDS)]
        finally:
            stop.set()

    _, results = together(work)
    for result in results:
        for ours, theirs in zip(result, expected):
            assert_close(ours, theirs)
    assert not any(original.fused_within(type(module)) for module in block.modules())
    assert all(map(torch.equal, forward(block, hidden), expected))


@every_family
def test_a_graph_is_captured_while_another_thread_runs(family, device):
    """Neither its kernels nor its memory get into the other's graph."""
    captured, running = (make(family, device) for _ in range(2))
    for block in (captured, running):
        moe_patch.patch(block)
    inputs = [draw(8, thread, device) for thread in range(2)]
    expected = [forward(captured, hidden) for hidden in inputs]
    graph, ready, stop = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    result = []

    def work(thread):
        if thread == 1:
            results = []
            while not stop.is_set():
                results.append(forward(running, inputs[1]))
                del results[:-50]
                ready.set()
            return results
        try:
            assert ready.wait(60)
            forward(captured, inputs[0])
            torch.cuda.current_stream().synchronize()
            # the other thread may allocate meanwhile: only this one's calls are watched
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result.extend(forward(captured, inputs[0]))
        finally:
            stop.set()

    _, results = together(work)
    for _ in range(3):
        for tensor in result:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, result, expected[0]))
    for one in results:
        assert all(map(torch.equal, one, expected[1]))


def test_a_second_stream_is_nobody_else_s(device):
    """torch has 32 streams of a priority, and gives them out in turn."""
    others = [torch.cuda.Stream() for _ in range(64)]
    second = overlap._beside(others[0])
    assert second.cuda_stream not in {stream.cuda_stream for stream in others}


def test_a_kernel_may_be_the_first_thing_in_a_thread(device):
    """Loaded by another thread, at an address whose descriptor is not known yet."""
    given = moe(device, torch.bfloat16, 40, 128, 64, 8, 2, grad=False)
    expected = fused_experts(**given)
    again = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    room = [torch.empty_like(expected) for _ in range(4)]
    torch.cuda.synchronize()
    del room  # so that no call in the thread asks CUDA for memory
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(lambda: fused_experts(**again)).result(), expected)
