"""select_experts() against its twin and against Hugging Face's own routers."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops import DTYPES, assert_close, sample

from moe_patch import reference
from moe_patch.ops.routing import select_experts, sigmoid_scores

SIZES = [
    (1, 8, 2),
    (1, 16, 1),
    (1, 1, 1),
    (5, 7, 3),
    (33, 128, 8),
    (64, 60, 1),
    (9, 16, 16),
    (2, 1, 1),
    (40, 512, 8),
]
CASES = list(itertools.product(SIZES, DTYPES, ("softmax", "sigmoid"), (False, True)))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size,dtype,score,renormalize", sample(CASES, 24))
def test_choice_weights_and_gradient(device, size, dtype, score, renormalize):
    tokens, experts, top_k = size
    logits = torch.randn(tokens, experts).to(device, dtype).requires_grad_()
    how = {"score": score, "renormalize": renormalize}
    index, weights = select_experts(logits, top_k, **how)
    exact = logits.detach().double().requires_grad_()
    chosen, truth = reference.select_experts(exact, top_k, dtype=torch.float64, **how)
    assert index.dtype == torch.int64
    assert weights.dtype == dtype
    assert torch.equal(index, chosen)
    assert_close(weights, truth, dtype)
    d_weights = torch.randn(tokens, top_k).to(device, dtype)
    (ours,) = torch.autograd.grad(weights, logits, d_weights)
    (other,) = torch.autograd.grad(truth, exact, d_weights.double())
    assert ours.dtype == dtype
    if other.abs().max() < 1e-12:  # one expert, or all of them renormalised to one
        assert ours.abs().max() < 1e-6
    else:
        assert_close(ours, other, dtype)


LIMITED = [  # T, E, K, groups, of which kept
    (5, 16, 3, 4, 2),
    (7, 24, 4, 3, 1),
    (33, 60, 6, 5, 2),
    (1, 256, 8, 8, 4),
    (9, 160, 6, 8, 3),
    (4, 384, 8, 1, 1),
    (3, 512, 8, 16, 9),
    (6, 12, 4, 6, 2),
    (2, 7, 2, 1, 1),
]
HOW = {  # of the routers of DeepSeek-V3, A.X K2, DeepSeek-V2, Mistral 4, MiniMax-M3
    "v3": {"score": "sigmoid", "renormalize": True, "scale": 2.5, "eps": 1e-20},
    "v3 as it is": {"score": "sigmoid", "scale": 1.5},
    "k2": {"score": "sigmoid", "renormalize": True, "eps": 1e-20, "group_fill": 0.0},
    "v2": {"scale": 16.0, "group_best": 1},
    "mistral": {"renormalize": True, "scale": 1.25, "group_fill": 0.0},
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "size,dtype,how,biased",
    sample([*itertools.product(LIMITED, DTYPES, HOW, (False, True))], 40),
)
def test_bias_and_groups(device, size, dtype, how, biased):
    tokens, experts, top_k, groups, kept = size
    logits = torch.randn(tokens, experts).to(device, dtype).requires_grad_()
    bias = torch.randn(experts, device=device) - 0.5 if biased else None
    how = HOW[how] | {"num_groups": groups, "top_groups": kept}
    index, weights = select_experts(logits, top_k, bias=bias, dtype=torch.float32, **how)
    chosen, _ = reference.select_experts(logits.detach(), top_k, bias=bias, **how)
    assert torch.equal(index, chosen)
    how = {k: v for k, v in how.items() if k in ("score", "renormalize", "scale", "eps")}
    exact = logits.detach().double().requires_grad_()
    truth = reference.expert_weights(exact, index, **how)
    assert weights.dtype == torch.float32
    assert_close(weights, truth, torch.float32)
    d_weights = torch.randn(tokens, top_k, device=device)
    (ours,) = torch.autograd.grad(weights, logits, d_weights)
    (other,) = torch.autograd.grad(truth, exact, d_weights.double())
    assert_close(ours, other, dtype)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "size,dtype,how,biased",
    sample([*itertools.product(LIMITED, DTYPES, HOW, (False, True))], 16),
)
def test_a_given_choice(device, size, dtype, how, biased):
    """Scores and gradients as ever; rows that begin with -1 choose; the own choice is the same bits
    again."""
    tokens, experts, top_k, groups, kept = size
    options = HOW[how] | {"num_groups": groups, "top_groups": kept}
    options["bias"] = torch.randn(experts, device=device) / 4 if biased else None
    logits = torch.randn(tokens, experts).to(device, dtype).requires_grad_()
    given = torch.rand(tokens, experts, device=device).topk(top_k).indices
    given[::3] = -1
    index, weights = select_experts(logits, top_k, given=given, **options)
    exact = logits.detach().double().requires_grad_()
    chosen, truth = reference.select_experts(
        exact, top_k, dtype=torch.float64, given=given, **options
    )
    assert torch.equal(index[1::3], given[1::3]) and torch.equal(index, chosen)
    assert_close(weights, truth, dtype)
    d_weights = torch.randn(tokens, top_k).to(device, dtype)
    (ours,) = torch.autograd.grad(weights, logits, d_weights)
    (other,) = torch.autograd.grad(truth, exact, d_weights.double())
    if other.abs().max() > 1e-12:
        assert_close(ours, other, dtype)
    own, own_weights = select_experts(logits, top_k, **options)
    again, its_weights = select_experts(logits, top_k, given=own, **options)
    assert torch.equal(own, again) and torch.equal(own_weights, its_weights)


@pytest.mark.parametrize(
    "given, error, says",
    [
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"given must be \[2, 2\], found"),
        (torch.zeros(2, 2, dtype=torch.int32), TypeError, "given is torch.int32, pass torch.int64"),
    ],
    ids=("another K", "int32"),
)
def test_a_given_choice_that_does_not_fit(given, error, says):
    with pytest.raises(error, match=says):
        select_experts(torch.randn(2, 4), 2, given=given)


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
@pytest.mark.parametrize("groups, kept, best", [(4, 2, 2), (4, 2, 1), (3, 1, 2), (1, 1, 2)])
def test_equals_among_experts_and_among_groups(device, groups, kept, best, fill):
    """Few values, so that experts and groups tie, and scores below zero, so that the fill wins."""
    logits = torch.randint(-1, 2, (40, 12), device=device).float()
    bias = torch.tensor([-0.5, 0, 0.5, -1, -1, 0, -0.5, 0, 0.5, -1, -1, 0], device=device)
    how = {"score": "sigmoid", "num_groups": groups, "top_groups": kept}
    how |= {"group_best": best, "group_fill": fill, "bias": bias}
    index, weights = select_experts(logits, 4, **how)
    chosen, truth = reference.select_experts(logits, 4, **how)
    assert torch.equal(index, chosen)
    assert_close(weights, truth, torch.float32)


def test_what_is_outside_the_best_groups_wins_only_with_a_fill_of_zero(device):
    logits = torch.tensor([[3.0, 2.0, -3.0, -3.0]], device=device)
    bias = torch.tensor([0.0, -2.0, -2.0, -2.0], device=device)  # group 0 is kept: 0.95, -1.12
    how = {"score": "sigmoid", "bias": bias, "num_groups": 2, "top_groups": 1}
    assert select_experts(logits, 2, **how)[0].tolist() == [[0, 1]]
    index, weights = select_experts(logits, 2, group_fill=0.0, **how)
    assert index.tolist() == [[0, 2]]
    assert_close(weights, logits.sigmoid()[:, [0, 2]], torch.float32)  # without bias


def test_eps_keeps_vanished_sigmoids_finite(device):
    logits = torch.full((2, 8), -200.0, device=device)
    logits[1] = -45
    how = {"score": "sigmoid", "renormalize": True, "bias": torch.zeros(8, device=device)}
    assert select_experts(logits, 2, **how)[1][0].isnan().all()
    _, weights = select_experts(logits, 2, eps=1e-20, **how)
    assert weights[0].tolist() == [0, 0]
    truth = logits[1, :2].double().sigmoid()
    assert_close(weights[1], truth / (truth.sum() + 1e-20), torch.float32)


def test_nan_bias_and_logits_stay_inside(device):
    """Whatever is chosen is an expert: its id is an address later on."""
    logits = torch.randn(6, 12, device=device)
    logits[0], logits[1, 3], logits[2], logits[3, :4] = float("nan"), float("nan"), -1e30, 1e30
    bias = torch.randn(12, device=device)
    bias[7], bias[8] = float("nan"), float("-inf")
    how = {"score": "sigmoid", "bias": bias, "num_groups": 3, "top_groups": 2}
    index, _ = select_experts(logits, 4, **how)
    assert ((index >= 0) & (index < 12)).all()
    assert all(len(set(row)) == 4 for row in index.tolist())


def test_bias_of_any_dtype_and_stride(device):
    logits = torch.randn(9, 16, device=device)
    bias = torch.randn(32, device=device, dtype=torch.float16)[::2]
    index, _ = select_experts(logits, 3, score="sigmoid", bias=bias)
    assert torch.equal(index, reference.select_experts(logits, 3, score="sigmoid", bias=bias)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 16, 1), (5, 7, 3), (40, 60, 2), (3, 1, 1)], ids=str)
def test_sigmoid_scores(device, size, dtype):
    tokens, experts, top_k = size
    logits = torch.randn(tokens, experts).to(device, dtype).requires_grad_()
    logits.data[0] = 1  # ties: exactly top_k scores all the same
    scores, index, weights = sigmoid_scores(logits, top_k)
    dense, chosen, truth = reference.sigmoid_scores(logits, top_k)
    assert torch.equal(index, chosen) and not scores.requires_grad
    assert scores.dtype == dtype and weights.dtype == torch.float32
    assert ((scores != 0).sum(1) == top_k).all()
    assert_close(scores, dense, dtype)
    assert_close(weights, truth, torch.float32)


def test_ties_go_to_the_lowest_id(device):
    logits = torch.zeros(3, 10, device=device)
    logits[1, 7] = 1
    logits[2] = -float("inf")
    index, _ = select_experts(logits, 4)
    assert index.tolist() == [[0, 1, 2, 3], [7, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_signs_infinities_and_nan(device, dtype):
    """The order of floats: NaN first, as torch.topk has it, then inf ... -0.0 and 0.0 ... -inf."""
    row = [-1.0, float("-inf"), 3.0, float("nan"), -2.0, float("inf"), 1e-7, -6e4]
    row = torch.tensor([row], dtype=dtype)
    index, _ = select_experts(row.to(device), 8)
    assert index[0].tolist() == row.sort(descending=True, stable=True).indices[0].tolist()


def test_weights_in_another_dtype_and_strided_logits(device):
    wide = torch.randn(6, 32, device=device, dtype=torch.float16)
    index, weights = select_experts(wide[:, ::2], 3, dtype=torch.float32)
    expected = reference.select_experts(wide[:, ::2], 3, dtype=torch.float32)
    assert weights.dtype == torch.float32
    assert torch.equal(index, expected[0])
    assert_close(weights, expected[1], torch.float32)


def test_no_tokens(device):
    logits = torch.empty(0, 8, device=device, requires_grad=True)
    index, weights = select_experts(logits, 2)
    assert index.shape == weights.shape == (0, 2)
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == (0, 8)


def test_the_chosen_index_carries_no_gradient(device):
    index, weights = select_experts(torch.randn(3, 4, device=device, requires_grad=True), 2)
    assert weights.requires_grad
    assert not index.requires_grad


def test_a_bias_gets_no_gradient(device):
    """It is for the choice alone: with frozen logits there is nothing to differentiate."""
    bias = torch.randn(4, device=device, requires_grad=True)
    for trained in (True, False):
        logits = torch.randn(3, 4, device=device, requires_grad=trained)
        _, weights = select_experts(logits, 2, score="sigmoid", bias=bias)
        assert weights.requires_grad == trained
        if trained:
            weights.sum().backward()
    assert bias.grad is None


@pytest.mark.parametrize("limited", [False, True])
def test_compile_full_graph(device, limited):
    logits = torch.randn(9, 16, device=device, requires_grad=True)

    bias = torch.randn(16, device=device)
    how = {"score": "sigmoid", "bias": bias, "num_groups": 4, "top_groups": 2, "scale": 2.5}

    def route(x):
        return select_experts(x * 2, 4, renormalize=True, **(how if limited else {}))

    index, weights = route(logits)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(index, compiled[0])
    assert torch.equal(weights, compiled[1])
    d_weights = torch.randn_like(weights)
    one, two = (torch.autograd.grad(w, logits, d_weights)[0] for w in (weights, compiled[1]))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    "logits, options, error, says",
    [
        (torch.zeros(2, 3, 4), {"top_k": 2}, ValueError, r"\[tokens, experts\]"),
        (torch.zeros(2, 4), {"top_k": 5}, ValueError, "top_k is 5 and there are 4 experts"),
        (torch.zeros(2, 4), {"top_k": 0}, ValueError, "top_k must be 1 to 4"),
        (torch.zeros(2, 4), {"top_k": 2, "score": "relu"}, ValueError, "'softmax', 'sigmoid'"),
        (torch.zeros(2, 4).double(), {"top_k": 2}, TypeError, "float64"),
        (
            torch.zeros(2, 4),
            {"top_k": 2, "bias": torch.zeros(3)},
            ValueError,
            r"bias must be \[4\]",
        ),
        (torch.zeros(2, 4), {"top_k": 2, "num_groups": 3}, ValueError, "an equal share"),
        (torch.zeros(2, 4), {"top_k": 2, "top_groups": 2}, ValueError, "top_groups 2"),
        (torch.zeros(2, 4), {"top_k": 2, "num_groups": 4}, ValueError, "a group has 1 experts"),
        (
            torch.zeros(2, 4),
            {"top_k": 2, "num_groups": 2, "group_best": 3},
            ValueError,
            "group_best is 3",
        ),
        (torch.zeros(2, 4), {"top_k": 2, "eps": 1e-20}, ValueError, "only sigmoids"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(logits, options, error, says):
    with pytest.raises(error, match=says):
        select_experts(logits, **options)
