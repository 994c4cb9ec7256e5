"""generate() of patched models: compiled with a static cache, in CUDA graphs, and eager."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from moe_patch import patch, unpatch
from moe_patch.kernels import decode
from moe_patch.shapes import SHAPES, build, build_model

pytestmark = pytest.mark.gpu
BLOCKS = ["tiny_qwen3", "tiny_llama4"]


@pytest.fixture
def decoded(monkeypatch):
    """Counts the calls of the decode kernels' launcher."""
    calls = []
    original = decode.decode

    def counting(*args, **options):
        calls.append(args[0].shape[0])
        return original(*args, **options)

    monkeypatch.setattr(decode, "decode", counting)
    return calls


@pytest.mark.parametrize("name", BLOCKS)
def test_static_cache_in_cuda_graphs(name, device, decoded):
    """torch.compile(mode="reduce-overhead") of a decoding step: the same logits as eager."""
    torch.compiler.reset()
    model = build_model(name, device=device, dtype=torch.bfloat16).eval()
    model.patch()
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def run(forward):
        cache = StaticCache(config=model.config, max_cache_len=32)
        token = torch.full((1, 1), 3, device=device)
        found = []
        for at in range(8):
            position = torch.tensor([[at]], device=device)
            out = forward(input_ids=token, position_ids=position, past_key_values=cache)
            found.append(out.logits[:, -1].float().clone())
            token = found[-1].argmax(-1, keepdim=True)
        return torch.cat(found)

    with torch.no_grad():
        eager = run(model)
        decoded.clear()
        compiled = run(step)
        assert decoded and set(decoded) == {1}
        decoded.clear()
        again = run(step)
    assert torch.equal(compiled, again) and not decoded  # replayed, not launched
    error = (compiled - eager).square().mean().sqrt() / eager.square().mean().sqrt()
    assert error < 0.05


@pytest.mark.parametrize("name", BLOCKS)
def test_generate_with_a_static_cache(name, device):
    """HF compiles it by itself; patched and unpatched write the same tokens in float32."""
    torch.compiler.reset()
    model = build_model(name, device=device).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, 9), device=device)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    model.patch()
    eager = model.generate(ids, **options)
    static = model.generate(ids, cache_implementation="static", **options)
    unpatch(model)
    torch.compiler.reset()
    assert torch.equal(eager, static)
    assert torch.equal(eager, model.generate(ids, **options))


@pytest.mark.parametrize("name", BLOCKS)
def test_one_graph_of_a_whole_block(name, device):
    """Capture goes through Llama4's second stream; replays follow new inputs."""
    block = build(name, device=device, dtype=torch.bfloat16)
    patch(block)
    for tokens in (1, 40):
        x = torch.randn(1, tokens, SHAPES[name].hidden_size, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            block(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = block(x)
            for _ in range(3):
                x.normal_()
                graph.replay()
                again = block(x)
                for one, two in zip(out, again) if isinstance(out, tuple) else [(out, again)]:
                    assert torch.equal(one, two)
