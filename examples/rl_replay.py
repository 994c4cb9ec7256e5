"""A policy gradient on a small MoE, with and without replaying the rollout's routing.

    python examples/rl_replay.py --png rl_replay.png

Rollouts are generated in one dtype and trained in another. The two choose different experts for
some tokens, so that the trainer's log-probabilities of the sampled tokens are not the rollout's.
The script prints, for each step, the KL divergence between both, estimated from the sampled tokens
as mean(exp(d) - 1 - d) with d = trainer - rollout (http://joschu.net/blog/kl-approx.html), once
without and once with `moe_patch.replay_routing`; and it trains with replay.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_patch

PROMPT, NEW = 8, 24
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=256, moe_intermediate_size=64, num_experts=32,
        num_experts_per_tok=4, norm_topk_prob=True, initializer_range=0.1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the sampled tokens, [B, NEW], by one forward of whole sequences."""
    logits = model(tokens, use_cache=False).logits[:, PROMPT - 1 : -1].float()
    chosen = tokens[:, PROMPT:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[..., 0]


@torch.no_grad()
def rollout(
    policy: nn.Module, prompts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, moe_patch.Routing]:
    """(tokens [B, PROMPT + NEW], their log-probabilities [B, NEW], the routing as one batch)."""
    engine = build(policy.config.num_hidden_layers).to(policy.device)
    engine.load_state_dict(policy.state_dict())
    engine = engine.to(dtype).eval()
    moe_patch.patch(engine)
    with moe_patch.record_routing(engine) as routing:
        out = engine.generate(
            prompts, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
    logits = torch.stack(out.logits, 1).float()  # [B, NEW, V]
    tokens = out.sequences
    taken = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]
    return tokens, taken, routing.as_batch(tokens.shape[1])


def divergence(trainer: Tensor, engine: Tensor) -> float:
    d = (trainer - engine).double()
    return float((d.exp() - 1 - d).mean())


def reward(tokens: Tensor) -> Tensor:
    """The share of even tokens, [B]."""
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rollout-dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw both divergences")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = build(options.layers).to(device)
    moe_patch.patch(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    free, replayed = [], []
    for step in range(options.steps):
        torch.manual_seed(step)
        prompts = torch.randint(1, 256, (options.batch, PROMPT), device=device)
        tokens, taken, routing = rollout(policy, prompts, DTYPES[options.rollout_dtype])
        for found, context in (
            (free, contextlib.nullcontext()),
            (replayed, moe_patch.replay_routing(policy, routing)),
        ):
            with context:
                ours = log_probs(policy, tokens)
            found.append(divergence(ours.detach(), taken))
        gained = reward(tokens)
        advantage = (gained - gained.mean()) / (gained.std() + 1e-4)
        loss = -((ours - taken).exp() * advantage[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"step {step}: reward {gained.mean():.3f}, KL without replay {free[-1]:.2e}, "
            f"with {replayed[-1]:.2e}"
        )
    ratio = sum(free) / max(sum(replayed), 1e-30)
    print(f"mean KL without replay is {ratio:.1f} times the one with it")
    if options.png:
        draw(options.png, free, replayed)
    return 0


def draw(path: Path, free: list[float], replayed: list[float]) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 3.5), layout="constrained")
    panel = drawing.subplots()
    panel.plot(free, marker="o", ms=3, label="without replay")
    panel.plot(replayed, marker="o", ms=3, label="with replay")
    panel.set(xlabel="step", ylabel="KL of rollout and trainer", yscale="log")
    panel.grid(alpha=0.3)
    panel.legend()
    drawing.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
