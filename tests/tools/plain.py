"""Plain PyTorch in the place of the kernels, for tests of what stands around them.

Much faster than Triton's interpreter, right in bfloat16, and easy to break on purpose.
"""

from __future__ import annotations

from moe_patch import reference
from moe_patch.formats.packed import Packed


def honest(x, gate_up, down, index, weights, *, weight_on="output", activation="silu", **more):
    """float32 inside, one rounding at the end: what a fused kernel does."""
    tensors = (x.float(), _wide(gate_up), _wide(down), index, weights.float())
    for name, value in more.items():
        if value is not None:
            pair = isinstance(value, tuple)
            more[name] = tuple(z.float() for z in value) if pair else value.float()
    options = {"weight_on": weight_on, "activation": activation}
    return reference.fused_experts(*tensors, **options, **more).to(x.dtype)


def _wide(weight):
    return weight if isinstance(weight, Packed) else weight.float()


def choose(logits, top_k, **how):
    return reference.select_experts(logits, top_k, **how)


def second_best(logits, top_k, **how):
    """The next expert instead of the best."""
    index = logits.topk(top_k + 1).indices[:, 1:]
    how.pop("dtype", None)
    return index, reference.expert_weights(logits, index, **how).to(logits.dtype)
