"""select_experts() against its twin and against Hugging Face's own routers."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops import DTYPES, assert_close, sample

from moe_patch import reference
from moe_patch.routing import select_experts, sigmoid_scores

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


def test_compile_full_graph(device):
    logits = torch.randn(9, 16, device=device, requires_grad=True)

    def route(x):
        return select_experts(x * 2, 4, renormalize=True)

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
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(logits, options, error, says):
    with pytest.raises(error, match=says):
        select_experts(logits, **options)
