"""generate() of patched models: compiled with a static cache, in CUDA graphs, and eager."""

from __future__ import annotations

import pytest
import torch

from moe_patch import patch
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


def test_generate_with_a_static_cache(device, decoded):
    """HF compiles the step with reduce-overhead; patched and unpatched write the same tokens.

    Not Llama4: its own static cache fails in transformers 5.17 (create_chunked_causal_mask).
    """
    torch.compiler.reset()
    model = build_model("tiny_qwen3", device=device).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, 9), device=device)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    unpatched = model.generate(ids, **options)
    patch(model)
    assert torch.equal(model.generate(ids, **options), unpatched)
    decoded.clear()
    for _ in range(2):
        static = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(static, unpatched)
    assert set(decoded) == {1}


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
