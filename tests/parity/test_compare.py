"""The checker is checked: honest code passes, every kind of broken code fails, in every dtype.

The kernels are replaced by plain PyTorch with a fault, so bfloat16 can be tried without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from plain import choose, honest, second_best
from tiny import Spoil
from transformers import MixtralConfig, OlmoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from moe_patch import reference
from moe_patch.parity import compare, passes, shadow
from moe_patch.parity.compare import Comparison
from moe_patch.parity.router import routing
from moe_patch.shapes import SHAPES, build

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = ["tiny_qwen3", "tiny_llama4"]
GRADIENTS = {
    "d_hidden_states",
    "d_gate_up_proj",
    "d_down_proj",
    "d_router",
    "d_top_k_weights",
}
TENSORS = {"top_k_weights", "output", "output_no_grad"} | GRADIENTS
WHOLE = {"block output", "block output, no gradients", "block d_hidden_states"}


def compare_block(name, dtype=torch.float32, tokens=64, *, backward=True, seed=0):
    """{tensor: row}; the last expert gets no token."""
    block = build(name, dtype=dtype, seed=seed)
    router = block.gate if name == "tiny_qwen3" else block.router
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SHAPES[name].hidden_size, generator=generator)
    with torch.no_grad():
        x[:, 0] = 3
        router.weight[-1] = 0
        router.weight[-1, 0] = -4
    rows, _ = Comparison(block).rows(
        tokens, backward=backward, seed=seed, hidden_states=x.to(dtype)
    )
    return {row.tensor: row for row in rows}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_honest_code_passes(use, name, dtype, tokens):
    rows = compare_block(name, dtype, tokens)
    assert rows.keys() == TENSORS | {"routing", "repeat", "return value"}
    assert all(row.passed for row in rows.values()), rows
    if dtype != torch.float32:  # where one rounding beats many
        assert rows["d_gate_up_proj"].ratio < 0.9


def test_forward_only(use):
    rows = compare_block("tiny_qwen3", backward=False)
    assert rows.keys() == {"routing", "top_k_weights", "output", "repeat", "return value"}


# Faults: (x, gate_up, down, index, weights, weight_on) -> out, and the tensors that must show it.


def zeros(*args, **on):
    return honest(*args, **on) * 0


def scaled(*args, **on):
    return honest(*args, **on) * 0.99


def swapped_gate_and_up(x, gate_up, *rest, **on):
    gate, up = gate_up.chunk(2, dim=1)
    return honest(x, torch.cat([up, gate], 1), *rest, **on)


def dropped_slot(x, gate_up, down, index, weights, **on):
    index = index.clone()
    index[len(index) // 2, -1] = len(gate_up)
    return honest(x, gate_up, down, index, weights, **on)


def wrong_row(x, *rest, **on):
    token = torch.arange(len(x))
    token[5] = 6
    return honest(x[token], *rest, **on)


def lost_k_tail(x, *rest, **on):
    kept = torch.ones_like(x)
    kept[:, -8:] = 0
    return honest(x * kept, *rest, **on)


def swapped_weight(x, gate_up, down, index, weights, **on):
    weights = weights.clone()
    weights[[3, 4], 0] = weights[[4, 3], 0]
    return honest(x, gate_up, down, index, weights, **on)


def one_element_off(*args, **on):
    out = honest(*args, **on)
    bump = torch.zeros_like(out)
    bump[7, 9] = out.detach().float().square().mean().sqrt()
    return out + bump


def one_nan(*args, **on):
    out = honest(*args, **on)
    hole = torch.zeros_like(out)
    hole[7, 9] = torch.nan
    return out + hole


FORWARD = [
    zeros,
    scaled,
    swapped_gate_and_up,
    dropped_slot,
    wrong_row,
    lost_k_tail,
    swapped_weight,
    one_element_off,
    one_nan,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("fault", FORWARD)
def test_forward_fault_fails(use, name, dtype, fault):
    use(fault)
    row = compare_block(name, dtype, backward=False)["output"]
    assert not row.passed and row.note


@pytest.mark.parametrize("name", BLOCKS)
def test_inference_is_judged_beside_training(use, name):
    """Without gradients other kernels run, and another choice of experts would be another model."""
    use(lambda *args, **on: honest(*args, **on) * (1 if torch.is_grad_enabled() else 0.99))
    rows = compare_block(name)
    assert rows["output"].passed and not rows["output_no_grad"].passed

    def routing(logits, *args, **how):
        if not torch.is_grad_enabled():
            logits = logits.roll(1, dims=1)
        return choose(logits, *args, **how)

    use(routing=routing)
    row = compare_block(name)["routing"]
    assert not row.passed and "without gradients" in row.note


def spoiled(position, spoil):
    """Honest code whose gradient of one argument is spoilt."""

    def function(*args, **on):
        args = list(args)
        args[position] = Spoil.apply(args[position], spoil)
        return honest(*args, **on)

    return function


def gradient_zero(grad):
    return grad * 0


def gradient_scaled(grad):
    return grad * 0.98


def gradient_nan(grad):
    grad.view(-1)[grad.numel() // 2] = torch.nan
    return grad


def gradient_off_by_one_rms(grad):
    grad.view(-1)[grad.numel() // 2] += grad.float().square().mean().sqrt()
    return grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "spoil", [gradient_zero, gradient_scaled, gradient_nan, gradient_off_by_one_rms]
)
def test_gradient_fault_fails_in_its_own_row(use, name, dtype, spoil):
    positions = {0: "d_hidden_states", 1: "d_gate_up_proj", 2: "d_down_proj", 4: "d_top_k_weights"}
    for position, tensor in positions.items():
        use(spoiled(position, spoil))
        rows = compare_block(name, dtype)
        assert not rows[tensor].passed, tensor
        assert rows["output"].passed and rows["repeat"].passed or spoil is gradient_nan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_unused_expert_with_a_gradient_fails(use, name, dtype):
    def spoil(grad):
        grad[-1, 1, 2] = 1e-4
        return grad

    for position, tensor in ((1, "d_gate_up_proj"), (2, "d_down_proj")):
        use(spoiled(position, spoil))
        row = compare_block(name, dtype)[tensor]
        assert not row.passed and "has no token and a gradient" in row.note


@pytest.mark.parametrize("name", BLOCKS)
def test_spoilt_expert_is_named(use, name):
    def spoil(grad):
        grad[1] *= 0.9
        return grad

    use(spoiled(1, spoil))
    assert "expert 1 (" in compare_block(name, torch.bfloat16, tokens=512)["d_gate_up_proj"].note


@pytest.mark.parametrize("name", BLOCKS)
def test_router_gradient_is_judged(use, name):
    def spoil_logits(grad):
        return grad * 0.98

    def routing(logits, top_k, **how):
        return choose(Spoil.apply(logits, spoil_logits), top_k, **how)

    use(routing=routing)
    rows = compare_block(name)
    assert not rows["d_router"].passed and rows["d_gate_up_proj"].passed


def one_token_astray(logits, top_k, **how):
    index, weights = choose(logits, top_k, **how)
    index = index.clone()
    index[11, 0] = logits[11].argmin()
    return index, weights


def weights_off(logits, top_k, **how):
    index, weights = choose(logits, top_k, **how)
    return index, weights * 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_wrong_routing_fails(use, name, dtype):
    use(routing=second_best)
    assert not compare_block(name, dtype, backward=False)["routing"].passed
    use(routing=one_token_astray)
    assert "token 11" in compare_block(name, dtype, backward=False)["routing"].note
    use(routing=weights_off)
    assert not compare_block(name, dtype, backward=False)["top_k_weights"].passed


def test_near_ties_may_fall_either_way(use):
    """bfloat16 logits a rounding apart: another choice than float64's is no fault."""
    index = torch.tensor([[0], [1], [2]])
    exact = torch.tensor([[1.0, 1.001, 0], [1.0, 0.5, 0], [0.3, 0, 1.0]]).double()
    own = exact.clone()
    own[0, :2] = 1.0
    row = routing(index, own, exact, torch.bfloat16)
    assert not row.passed and "token 1" in row.note
    index[1] = 0
    assert routing(index, own, exact, torch.bfloat16).passed
    row = routing(index, exact, exact, torch.bfloat16)
    assert not row.passed and "its own logits" in row.note
    assert not routing(index, own, exact, torch.float32).passed


def test_expert_chosen_twice_fails():
    logits = torch.tensor([[3.0, 1.0, 1.0]]).double()
    row = routing(torch.tensor([[0, 0]]), logits, logits, torch.float32)
    assert not row.passed and "twice" in row.note


@pytest.mark.parametrize("name", BLOCKS)
def test_two_runs_that_differ_fail(use, name):
    calls = []

    def flaky(x, *rest, **on):
        calls.append(0)
        out = honest(x, *rest, **on)
        return out if len(calls) < 3 else out * (1 + 2e-7)  # from the second run on

    use(flaky)
    row = compare_block(name)["repeat"]
    assert not row.passed and "output" in row.note


def test_what_is_not_the_same_bits():
    a = torch.tensor([0.0, torch.nan])
    assert compare._same_bits(a, a.clone())
    for other in (torch.tensor([-0.0, torch.nan]), a[:1], a[None], a.double(), a.view(torch.int32)):
        assert not compare._same_bits(a, other)


def test_what_a_module_returns_is_described():
    a = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    text = "float16 [2, 3], requires grad"
    assert passes.describe({"out": a, "more": [None, {"n": 1}]}) == (
        f"{{out: {text}; more: (NoneType; {{n: int}})}}"
    )
    assert passes.describe((a, a.detach())) == f"({text}; float16 [2, 3])"


def test_overflow_must_be_hugging_faces(use):
    """float16 inputs that overflow in the up projection give Hugging Face an inf or a NaN."""
    block = build("tiny_qwen3", dtype=torch.float16)
    with torch.no_grad():
        block.experts.gate_up_proj *= 4
        block.experts.down_proj *= 1e-4  # brings float32's products back below 65504
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 3e3

    def rows():
        found, _ = Comparison(block).rows(64, backward=False, seed=0, hidden_states=x.half())
        return {row.tensor: row for row in found}

    assert "inf or NaN" in rows()["output"].note  # float32 inside: finite where HF is not

    def like_hugging_face(x, gate_up, down, index, weights, **on):
        return reference.fused_experts(x, gate_up, down, index, weights, **on)

    use(like_hugging_face)
    assert "inf or NaN" not in rows()["output"].note


@pytest.mark.parametrize("tokens", [1, 7])
def test_few_tokens_are_pooled(use, tokens):
    for name in BLOCKS:
        rows, remark = Comparison(build(name)).rows(tokens, backward=True, seed=3)
        slots = tokens * SHAPES[name].top_k
        assert remark == f"pooled over {-(-compare.MIN_SLOTS // slots)} draws"
        assert all(row.passed for row in rows), rows


def test_small_weights_get_a_larger_input(use):
    block = build("tiny_qwen3")
    with torch.no_grad():
        for parameter in block.experts.parameters():
            parameter.mul_(0.1)
    rows, remark = Comparison(block).rows(64, backward=False, seed=0)
    assert all(row.passed for row in rows) and "* randn" in remark


def test_block_of_zeros_fails(use):
    block = build("tiny_qwen3")
    with torch.no_grad():
        block.experts.down_proj.zero_()
    rows, _ = Comparison(block).rows(64, backward=False, seed=0)
    assert "dead output" in {row.tensor: row for row in rows}["output"].note


@pytest.mark.parametrize("top_k, renormalize", [(1, False), (1, True), (8, True), (3, False)])
def test_other_top_k(use, top_k, renormalize):
    block = build("tiny_qwen3")
    block.gate.top_k, block.gate.norm_topk_prob = top_k, renormalize
    rows, _ = Comparison(block).rows(64, backward=True, seed=0)
    assert all(row.passed for row in rows), rows
    assert ("d_router" in {row.tensor for row in rows}) is not (top_k == 1 and renormalize)


@pytest.mark.parametrize(
    "block_class, config_class, names",
    [
        (MixtralSparseMoeBlock, MixtralConfig, {"num_local_experts": 4}),
        (OlmoeSparseMoeBlock, OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_families_have_their_experts_compared(use, block_class, config_class, names, dtype):
    block = block_class(config_class(hidden_size=64, intermediate_size=32, **names)).to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.15)
    rows, _ = Comparison(block).rows(64, backward=True, seed=0)
    rows = {row.tensor: row for row in rows}
    assert rows.keys() == TENSORS | WHOLE | {
        "d_router_inputs", "routing", "repeat", "return value",
    }  # fmt: skip
    assert all(row.passed for row in rows.values()), rows
    use(swapped_gate_and_up)
    rows, _ = Comparison(block).rows(64, backward=True, seed=0)
    assert not next(row for row in rows if row.tensor == "output").passed


def test_tie_that_falls_the_other_way_is_no_fault(use):
    block = build("tiny_qwen3")
    with torch.no_grad():
        block.gate.weight[1:] = block.gate.weight[:1]

    def last_of_equals(logits, top_k, **how):
        index, weights = choose(logits.flip(1), top_k, **how)
        return logits.shape[1] - 1 - index, weights

    for choice in (choose, last_of_equals):
        use(routing=choice)
        rows, _ = Comparison(block).rows(64, backward=True, seed=0)
        assert all(row.passed for row in rows), rows


def test_forced_routing_changes_hugging_faces_choice(use):
    """Without it a flipped near-tie would count as an error of ours."""
    index = torch.tensor([[5, 1]] * 4)
    block = build("tiny_qwen3")
    seen = []
    block.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    with passes.Force(index):
        block(torch.randn(1, 4, 64))
    assert torch.equal(seen[0][1], index)
    assert seen[0][2].sum(-1).detach() == pytest.approx(1)


def test_arithmetic_settings_are_put_back():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError), shadow.plain_arithmetic():
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_inputs_are_not_the_numbers_that_weights_of_the_same_seed_begin_with(monkeypatch):
    comparison, seen = Comparison(build(BLOCKS[0])), []
    monkeypatch.setattr(Comparison, "_run_ours", lambda self, given, _: seen.append(given) or {})
    with pytest.raises(KeyError):
        comparison.rows(64, backward=False, seed=5)
    drawn = torch.randn(64, comparison.hidden_size, generator=torch.Generator().manual_seed(5))
    assert not torch.allclose(seen[0].x / seen[0].x[0, 0], drawn / drawn[0, 0])


@pytest.mark.parametrize(
    "reached, counts",
    [
        ({1: "a", 7: "a", 50: "a", 200: "a", 1000: "b", 3200: "bc", 8192: "d"}, [1, 7, 3200, 8192]),
        ({1: "a", 7: "ab", 50: "b", 200: "ab", 1000: "a", 3200: "b", 8192: "a"}, [1, 7]),
        ({1: "a", 7: "b", 50: "c", 200: "d", 1000: "cd", 3200: "d", 8192: "d"}, [1, 7, 1000]),
    ],
)
def test_fewest_numbers_of_tokens_that_reach_every_path(monkeypatch, reached, counts):
    comparison = Comparison(build("tiny_qwen3"))
    comparison.device = torch.device("cuda")  # where more are tried
    monkeypatch.setattr(compare.kernels.ways, "ways", lambda tokens, *_: tuple(reached[tokens]))
    assert comparison.token_counts() == counts
