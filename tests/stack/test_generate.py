"""transformers' ways to generate, on patched models: the same tokens, by the fused code."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    both_families,
    tiny_model,
    tokenizer,
    tokens,
)
from transformers import ContinuousBatchingConfig, pipeline

import moe_patch

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")
OPTIONS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def small(family, device, **changes):
    """Its weights are large, so that the tokens follow from what the experts add."""
    return tiny_model(family, device, num_hidden_layers=1, **{"initializer_range": 0.6} | changes)


@both_families
@pytest.mark.parametrize("how", ["a smaller model", "the prompt"])
def test_assisted(family, how, device, fused_calls):
    """A whole guess is one forward, and what is wrong of it is cut from the cache again."""
    model = small(family, device)
    ids = tokens(device, 1, 4).repeat(1, 2)  # something to look up
    expected = model.generate(ids, **OPTIONS)
    moe_patch.patch(model)
    if how == "the prompt":
        more = {"prompt_lookup_num_tokens": 3}
    else:
        more = {
            "assistant_model": tiny_model(
                family, device, num_hidden_layers=1, initializer_range=0.2
            )
        }
        moe_patch.patch(more["assistant_model"])
    assert torch.equal(model.generate(ids, **more, **OPTIONS), expected)
    assert fused_calls


@both_families
def test_pipeline(family, device, fused_calls):
    """Which moves the model, and looks up by the class's name whether it knows the task."""
    model = small(family, device)
    run = pipeline("text-generation", model=model, tokenizer=tokenizer(), device=device)
    prompts = ["w5 w6 w7", "w9 w8"]
    options = {**OPTIONS, "batch_size": 2}
    expected = run(prompts, **options)
    moe_patch.patch(model)
    run = pipeline("text-generation", model=model, tokenizer=tokenizer(), device=device)
    assert run(prompts, **options) == expected
    assert fused_calls


def test_continuous_batching(device, fused_calls):
    """Requests of several lengths in one batch of one row, their keys in pages.

    Not Llama4: transformers has no pages for its chunked attention.
    """
    model = small("qwen3_moe", device)
    prompts = [tokens(device, 1, length)[0].tolist() for length in (3, 7)]
    options = model.generation_config
    options.update(**OPTIONS, eos_token_id=1)

    def generate():
        config = ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=32)
        results = model.generate_batch(
            prompts,
            generation_config=options,
            continuous_batching_config=config,
            progress_bar=False,
        )
        return [result.generated_tokens for result in results.values()]

    expected = generate()
    assert [len(one) for one in expected] == [3, 3]
    moe_patch.patch(model)
    assert generate() == expected
    assert fused_calls


@both_families
def test_switching_implementations_does_not_reach_a_patched_block(family, device, fused_calls):
    """On a GPU generate() switches grouped_mm to batched_mm for the steps, and back."""
    model = small(family, device)
    expected = model.generate(tokens(device), **OPTIONS)
    moe_patch.patch(model)
    model.set_experts_implementation("batched_mm" if family == "qwen3_moe" else "eager")
    assert torch.equal(model.generate(tokens(device), **OPTIONS), expected)
    assert fused_calls
    moe_patch.unpatch(model)
    fused_calls.clear()
    assert torch.equal(model.generate(tokens(device), **OPTIONS), expected)
    assert not fused_calls


def test_static_cache_compiled(device, fused_calls):
    """As generate() does it on a GPU: the decoding step whole, one graph for every position."""
    if device.type == "cuda":
        pytest.skip("there generate() compiles by itself: test_generate")
    model = small("qwen3_moe", device)
    options = {**OPTIONS, "cache_implementation": "static"}
    expected = model.generate(tokens(device), **options)
    moe_patch.patch(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(tokens(device), **options), expected)
    torch._dynamo.reset()
    assert fused_calls
