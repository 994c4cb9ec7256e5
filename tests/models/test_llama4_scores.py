"""Llama4's router scores: hooks on the tensor, and scores that somebody else writes."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_close, tiny_block

import moe_patch

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")


@pytest.fixture
def blocks(device):
    """(as Hugging Face runs it, patched)."""
    plain, patched = (tiny_block("llama4", device) for _ in range(2))
    moe_patch.patch(patched)
    return plain, patched


def step(block, device, touch):
    """(output, gradients of hidden and parameters, what `touch` returned of the scores)."""
    kept, hidden = [], torch.randn(1, 5, 64, generator=torch.manual_seed(5)).to(device)
    hidden.requires_grad_()
    handle = block.router.register_forward_hook(lambda module, args, out: kept.append(touch(out)))
    out, logits = block(hidden)
    handle.remove()
    out.square().sum().backward()
    return out.detach(), hidden.grad, {n: p.grad for n, p in block.named_parameters()}, kept[0]


def compare(blocks, device, touch):
    (out, hidden, grads, kept), (expected, others_hidden, others, others_kept) = (
        step(block, device, touch) for block in reversed(blocks)
    )
    assert_close(out, expected)
    assert_close(hidden, others_hidden)
    for name, grad in grads.items():
        if others[name].any():
            assert_close(grad, others[name])
        else:
            assert not grad.any(), name
    return grads, kept, others_kept


def test_tensor_hook_that_zeroes_the_gradient(blocks, device):
    def zero(out):
        out[0].register_hook(torch.zeros_like)

    grads, _, _ = compare(blocks, device, zero)
    assert not grads["router.weight"].any()


def test_tensor_hook_that_doubles_the_gradient(blocks, device):
    compare(blocks, device, lambda out: out[0].register_hook(lambda grad: grad * 2) and None)


def test_hook_put_on_the_scores_after_the_forward(blocks, device):
    for block in blocks:
        kept = []
        block.router.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out[0]))
        out = block(torch.ones(1, 3, 64, device=device))[0]
        kept[0].register_hook(torch.zeros_like)
        out.sum().backward()
        assert not block.router.weight.grad.any()


def test_retain_grad(blocks, device):
    def keep(out):
        out[0].retain_grad()
        return out[0]

    _, ours, theirs = compare(blocks, device, keep)
    chosen = theirs.detach() != 0
    assert_close(ours.grad[chosen], theirs.grad[chosen])
    assert not ours.grad[~chosen].any() and not theirs.grad[~chosen].any()


def replaced(function):
    return lambda module, args, out: (function(out[0]), out[1])


def in_place(function):
    def write(module, args, out):
        with torch.no_grad():
            out[0].copy_(function(out[0]))

    return write


FUNCTIONS = [
    lambda scores: -scores,
    lambda scores: scores + 0.25,  # every expert is chosen
    lambda scores: scores.flip(1),
    lambda scores: scores * torch.tensor([1.0, 0.0] * 4, device=scores.device),
]


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
@pytest.mark.parametrize("how", [replaced, in_place])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_of_a_hook(blocks, device, mode, how, function):
    plain, patched = blocks
    hidden = torch.randn(1, 5, 64, device=device)
    guard = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with guard.get(mode, torch.enable_grad)():
        before = patched(hidden)[0]
        for block in blocks:
            block.router.register_forward_hook(how(function))
        expected, actual = plain(hidden), patched(hidden)
        assert_close(actual[0], expected[0])
        assert not torch.allclose(actual[0], before, rtol=1e-3, atol=1e-4)
    if mode == "train" and how is replaced:  # Hugging Face's backward refuses what is in place
        for out, _ in (expected, actual):
            out.square().sum().backward()
        assert_close(patched.experts.down_proj.grad, plain.experts.down_proj.grad)
        if plain.router.weight.grad is not None:
            assert_close(patched.router.weight.grad, plain.router.weight.grad)


def test_a_full_backward_hook_costs_no_dense_pass(blocks, device):
    plain, patched = blocks
    for block in blocks:
        block.router.register_full_backward_hook(lambda *_: None)
        block.router.register_forward_hook(lambda *_: None)
    rows = []
    patched.experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    hidden = torch.randn(1, 5, 64, device=device, requires_grad=True)
    outs = [block(hidden)[0] for block in blocks]
    assert rows == [5]
    grads = [
        torch.autograd.grad(out.sum(), block.router.weight) for out, block in zip(outs, blocks)
    ]
    assert_close(outs[1], outs[0])
    assert_close(grads[1][0], grads[0][0])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients_the_choice_is_the_kernel_s(blocks, device, mode):
    plain, patched = blocks
    rows = []
    patched.experts.register_forward_pre_hook(lambda module, args: rows.append(args[1].shape))
    hidden = torch.randn(1, 5, 64, device=device)
    with getattr(torch, mode)():
        assert_close(patched(hidden)[0], plain(hidden)[0])
    assert rows == [(5, 2)]


def test_half_rounds_the_scores_as_hugging_face_does(blocks, device):
    plain, patched = (block.half() for block in blocks)
    weights = []
    patched.experts.register_forward_pre_hook(lambda module, args: weights.append(args[2]))
    hidden = torch.randn(1, 5, 64, device=device, dtype=torch.float16, requires_grad=True)
    with torch.no_grad():
        scores = plain.router(hidden.detach().view(5, 64))[0]
    patched(hidden)
    assert weights[0].dtype == torch.float16
    assert torch.equal(weights[0].sort().values, scores.topk(2).values.sort().values)
