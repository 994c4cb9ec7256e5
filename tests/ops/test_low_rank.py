"""fused_experts() with low-rank updates against the same weights formed in float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from ops import DTYPES, assert_close, gradients, in_double, moe, sample

from moe_patch import reference
from moe_patch.ops import low_rank
from moe_patch.ops.experts import fused_experts

SIZES = [  # T, H, I, E, K, rank of gate_up, of down; 0: none
    (20, 64, 48, 4, 2, 4, 8),
    (37, 72, 40, 5, 3, 16, 3),
    (9, 48, 32, 4, 1, 5, 0),
    (7, 64, 32, 8, 2, 0, 16),
    (130, 97, 41, 3, 2, 20, 33),
    (0, 32, 16, 4, 2, 4, 4),
]
CASES = list(itertools.product(SIZES, DTYPES, (False, True), ("output", "input")))


def factors(arguments, ranks):
    """Adds gate_up_low_rank and down_low_rank to the arguments of `moe`; returns their tensors."""
    found = []
    for name, rank in zip(("gate_up", "down"), ranks):
        weight = arguments[f"{name}_proj"]
        (experts, n, k), kind = weight.shape, {"device": weight.device, "dtype": weight.dtype}
        if rank:
            a = torch.randn(experts, rank, k, **kind) * 0.2
            b = torch.randn(experts, n, rank, **kind) * 0.2
            arguments[f"{name}_low_rank"] = (a.requires_grad_(), b.requires_grad_())
            found += [a, b]
    return found


def compare(device, size, dtype, transposed, weight_on):
    *size, rank1, rank2 = size
    arguments = moe(device, dtype, *size, transposed=transposed, routing="sentinel")
    leaves = [t for t in arguments.values() if t.requires_grad]
    low = factors(arguments, (rank1, rank2))
    out = fused_experts(**arguments, weight_on=weight_on)
    exact = in_double({n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)})
    exact_leaves = [t for t in exact.values() if t.requires_grad]
    for name, pair in arguments.items():
        if isinstance(pair, tuple):
            exact[name] = tuple(in_double(dict(enumerate(pair))).values())
            exact_leaves += exact[name]
    expected = reference.fused_experts(**exact, weight_on=weight_on)
    assert_close(out, expected, dtype)
    with torch.no_grad():
        assert torch.equal(fused_experts(**arguments, weight_on=weight_on), out)
    d_out = torch.randn_like(out)
    ours = torch.autograd.grad(out, [*leaves, *low], d_out)
    others = torch.autograd.grad(expected, exact_leaves, d_out.double())
    for mine, other in zip(ours, others):
        assert_close(mine, other, dtype)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size,dtype,transposed,weight_on", sample(CASES, 24))
def test_forward_and_every_gradient(device, size, dtype, transposed, weight_on):
    compare(device, size, dtype, transposed, weight_on)


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("number", range(24))
def test_many_rows_an_expert(device, number):
    """Sizes of the kernels in hopper/, with ranks that they take, and some that they leave."""
    draw = random.Random(number)
    experts, top_k = draw.randint(1, 6), draw.choice((1, 1, 2))
    tokens = experts * draw.randint(60, 500) // top_k
    hidden, inner = 64 * draw.randint(4, 10), 64 * draw.randint(4, 10)
    ranks = [draw.choice((0, 4, 8, 16, 24, 64, 72, 128, 150)) for _ in range(2)]
    size = (tokens, hidden, inner, experts, min(top_k, experts), *ranks)
    dtype = draw.choice((torch.bfloat16, torch.float16))
    compare(device, size, dtype, draw.random() < 0.5, draw.choice(("output", "input")))


@pytest.mark.parametrize("wanted", ["a1", "b1", "a2", "b2"])
def test_only_what_is_asked_for(device, wanted):
    """Frozen experts; one factor alone trains."""
    arguments = moe(device, torch.float32, 20, 64, 48, 4, 2, grad=False)
    low = factors(arguments, (4, 8))
    everything = torch.autograd.grad(fused_experts(**arguments).sum(), low)
    names = ["a1", "b1", "a2", "b2"]
    for name, tensor in zip(names, low):
        tensor.requires_grad_(name == wanted)
    out = fused_experts(**arguments)
    at = names.index(wanted)
    (alone,) = torch.autograd.grad(out.sum(), low[at])
    assert_close(alone, everything[at].double(), torch.float32)


@pytest.mark.parametrize("ranks", ((4, 0), (0, 4)), ids=str)
def test_one_token_without_gradients_is_updated_too(device, ranks):
    """Decoding knows no updates."""
    arguments = moe(device, torch.float32, 1, 48, 32, 8, 2, grad=False)
    factors(arguments, ranks)
    expected = fused_experts(**arguments)
    with torch.no_grad():
        assert torch.equal(fused_experts(**arguments), expected)


def test_compile_full_graph(device):
    arguments = moe(device, torch.float32, 20, 64, 48, 4, 2)
    low = factors(arguments, (4, 8))
    leaves = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    compiled = torch.compile(fused_experts, fullgraph=True, backend="aot_eager")
    out, expected = compiled(**arguments), fused_experts(**arguments)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(out)
    for one, two in zip(
        gradients(out, d_out, *leaves, *low), gradients(expected, d_out, *leaves, *low)
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("scalings", [(1.0,), (0.5,), (2.0, 0.25, 1.0)])
def test_peft_s_packing(device, crossed, scalings):
    """Against the einsum in PEFT's ParamWrapper.get_delta_weight."""
    experts, wide, high = 3, 5, 4
    adapters, formed = [], 0
    for rank, scaling in zip((2, 3, 1), scalings):
        a = torch.randn(rank * experts, wide, device=device, requires_grad=True)
        b = torch.randn(high, rank * experts, device=device, requires_grad=True)
        adapters.append((a, b, scaling))
        a, b = a.view(experts, rank, wide), b.view(high, rank, experts)
        formed = formed + scaling * torch.einsum("ore,eri->eoi", b, a)
    formed = formed.transpose(1, 2) if crossed else formed  # [E, N, K]
    left, right = low_rank.factors(adapters, experts, torch.float32, crossed)
    assert left.is_contiguous() and right.is_contiguous()
    torch.testing.assert_close(right @ left, formed)
    leaves = [leaf for *pair, _ in adapters for leaf in pair]
    d_out = torch.randn_like(formed)
    expected = torch.autograd.grad(formed, leaves, d_out)
    torch.testing.assert_close(torch.autograd.grad(right @ left, leaves, d_out), expected)
    half = low_rank.factors(adapters, experts, torch.float16, crossed)
    assert all(factor.dtype == torch.float16 for factor in half)
    grads = torch.autograd.grad([f.float().sum() for f in half], leaves)
    assert [g.dtype for g in grads] == [torch.float32] * len(leaves)
