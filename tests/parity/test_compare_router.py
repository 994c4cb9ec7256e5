"""Routers by themselves: honest code passes, every kind of broken code fails, in every dtype."""

from __future__ import annotations

import pytest
import torch
from ops import DTYPES
from plain import choose, second_best
from small import BLOCKS
from small import block as build
from tiny import Spoil

from moe_patch.parity.compare import Comparison
from moe_patch.parity.router import routing


def compare(block, tokens=64, backward=True, seed=0):
    found, _ = Comparison(block).rows(tokens, backward=backward, seed=seed)
    return {row.tensor: row for row in found}


ROWS = {"routing", "top_k_weights", "d_router", "d_router_inputs"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", BLOCKS)
def test_honest_routers_pass(use, family, dtype):
    rows = compare(build(family, dtype))
    assert rows.keys() >= ROWS | {
        "output",
        "d_gate_up_proj" if family != "nemotron_h" else "d_up_proj",
    }
    assert all(row.passed for row in rows.values()), rows
    assert compare(build(family, dtype), backward=False).keys() == {
        "routing", "top_k_weights", "output", "repeat", "return value",
        "block output, no gradients",
    }  # fmt: skip


def off_by_one_percent(logits, top_k, **how):
    index, weights = choose(logits, top_k, **how)
    return index, weights * 1.01


def without_scale(logits, top_k, *, scale=1.0, **how):
    return choose(logits, top_k, **how)


def leaking_bias(logits, top_k, *, bias=None, scale=1.0, eps=0.0, dtype=None, **how):
    index, weights = choose(logits, top_k, bias=bias, **how)
    leak = (logits.float().sigmoid() + bias).gather(1, index)
    return index, (leak / leak.sum(-1, keepdim=True) * scale).to(dtype or weights.dtype)


def without_groups(logits, top_k, *, num_groups=1, top_groups=1, **how):
    return choose(logits, top_k, **how)


def without_bias(logits, top_k, *, bias=None, **how):
    return choose(logits, top_k, **how)


def spoilt_gradient(logits, top_k, **how):
    return choose(Spoil.apply(logits, lambda grad: grad * 0.98), top_k, **how)


FAULTS = [
    *((family, off_by_one_percent, "top_k_weights") for family in BLOCKS),
    ("deepseek_v3", without_scale, "top_k_weights"),
    ("deepseek_v2", without_scale, "top_k_weights"),
    ("deepseek_v3", leaking_bias, "top_k_weights"),
    ("minimax_m2", leaking_bias, "top_k_weights"),
    ("deepseek_v3", without_groups, "routing"),
    ("deepseek_v2", without_groups, "routing"),
    ("deepseek_v3", without_bias, "routing"),
    ("minimax_m2", without_bias, "routing"),
    *((family, spoilt_gradient, "d_router") for family in BLOCKS),
    *((family, spoilt_gradient, "d_router_inputs") for family in BLOCKS),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family, fault, row", FAULTS)
def test_broken_routers_fail(use, family, fault, row, dtype):
    use(routing=fault)
    rows = compare(build(family, dtype), backward=row.startswith("d_"))
    assert not rows[row].passed and rows[row].note, rows
    assert rows["output"].passed and rows["repeat"].passed


def test_router_that_knows_nothing_passes(use):
    """Logits of zero have no error and no size; DeepSeek's bias alone chooses."""
    block = build("deepseek_v3")
    with torch.no_grad():
        block.gate.weight.zero_()
    rows = compare(block)
    assert all(row.passed for row in rows.values()), rows


def test_near_tie_is_one_of_the_last_that_is_chosen():
    """The first of three is far ahead; the second and the third are a rounding apart, or not."""
    own = torch.tensor([[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 0.0]]).double()
    for gap, passed in ((0.001, True), (0.5, False)):
        exact = own - torch.tensor([0.0, 0.0, gap, 0.0])
        row = routing(torch.tensor([[0, 1], [0, 2]]), own, exact, torch.bfloat16)
        assert row.passed is passed
        assert passed or row.note == "token 1 went to experts [0, 2]"
    near = torch.tensor([[2.0, 2.0, 1.0, 0.0]]).double()  # the first two are: both are chosen
    row = routing(torch.tensor([[0, 2]]), near, near, torch.bfloat16)
    assert not row.passed and row.note == "token 0 went to experts [0, 2]"


def test_second_best_experts_fail(use):
    use(routing=second_best)
    assert not compare(build("mixtral"), backward=False)["routing"].passed
