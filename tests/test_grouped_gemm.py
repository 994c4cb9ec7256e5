"""grouped_gemm(): one projection, each direction, each way of permuting, direct and autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops import DTYPES, assert_close, in_double, moe, sample

from moe_patch import reference
from moe_patch.experts import expert_order, grouped_gemm

GEMM_SIZES = [  # T, K (in), N (out), E, top_k
    (1, 16, 8, 4, 2),
    (2, 8, 24, 1, 1),
    (7, 40, 64, 7, 3),
    (63, 32, 48, 8, 2),
    (64, 72, 40, 4, 1),
    (65, 64, 32, 60, 2),
    (30, 97, 41, 5, 3),
    (128, 56, 72, 3, 1),
    (17, 24, 200, 128, 8),
    (40, 136, 16, 16, 4),
]
GEMM_CASES = [
    case
    for case in itertools.product(
        GEMM_SIZES,
        DTYPES,
        ("plain", "gather", "scatter"),
        ("forward", "dX", "dW"),
        ("direct", "autograd"),
        ("random", "sentinel", "one"),
    )
    if case[3] != "forward" or case[4] == "autograd" or case[5] == "random"
]


def gemm_case(device, size, dtype, variant, routing):
    tokens, k, n, experts, top_k = size
    arguments = moe(device, dtype, tokens, k, n, experts, top_k, routing=routing)
    order = expert_order(arguments["top_k_index"], experts, dtype)
    slots = tokens * top_k
    draw = torch.Generator().manual_seed(3)
    rows = tokens if variant == "gather" else slots
    x = torch.randn(rows, k, generator=draw).to(device, dtype).requires_grad_()
    weight = arguments["gate_up_proj"].detach()[:, :n].requires_grad_()
    d_out = torch.randn(slots, n, generator=draw).to(device, dtype)
    return x, weight, order, d_out, {"gather": variant == "gather", "scatter": variant == "scatter"}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size,dtype,variant,direction,mode,routing", sample(GEMM_CASES, 80))
def test_grouped_gemm(device, size, dtype, variant, direction, mode, routing):
    x, weight, order, d_out, how = gemm_case(device, size, dtype, variant, routing)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    truth = reference.grouped_gemm(x64, weight64, order, **how)
    exact_x, exact_w = torch.autograd.grad(truth, (x64, weight64), d_out.double())
    if direction == "forward":
        with torch.set_grad_enabled(mode == "autograd"):
            assert_close(grouped_gemm(x, weight, order, **how), truth, dtype)
    elif mode == "autograd":
        out = grouped_gemm(x, weight, order, **how)
        leaf, exact = (x, exact_x) if direction == "dX" else (weight, exact_w)
        assert_close(torch.autograd.grad(out, leaf, d_out)[0], exact, dtype)
    else:
        from moe_patch.grouped import _grouped_gemm_backward

        fields = [getattr(order, name) for name in list(vars(order))[:6]]
        gather = d_out.shape[0] // max(x.shape[0], 1) if how["gather"] else 0
        wanted = [direction == "dX", direction == "dW"]
        d_x, d_weight = _grouped_gemm_backward(
            d_out,
            x.detach(),
            weight.detach(),
            fields,
            order.block_m,
            gather,
            how["scatter"],
            wanted,
        )
        ours, exact = (d_x, exact_x) if direction == "dX" else (d_weight, exact_w)
        assert_close(ours, exact, dtype)


def test_gather_then_scatter_makes_the_block(device):
    """The unfused pipeline of a family with its own gate gives what fused_experts gives."""
    arguments = moe(device, torch.float32, 20, 32, 24, 6, 2)
    index, weights = arguments["top_k_index"], arguments["top_k_weights"]
    order = expert_order(index, 6, torch.float32)
    pre = grouped_gemm(arguments["hidden_states"], arguments["gate_up_proj"], order, gather=True)
    rows = grouped_gemm(reference.glu(pre), arguments["down_proj"], order, scatter=True)
    out = (rows.view(20, 2, 32) * weights[..., None]).sum(1)
    assert_close(out, reference.fused_experts(**in_double(arguments)), torch.float32)


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"gather": True, "scatter": True}, ValueError, "pass one"),
        ({"x": lambda x: x[:, :8]}, ValueError, r"x \[rows, K\]"),
        ({"weight": lambda w: w[0]}, ValueError, r"weight \[E, N, K\]"),
        ({"weight": lambda w: w[:3]}, ValueError, "of 4 experts and weight has 3"),
        ({"x": lambda x: x[:-1]}, ValueError, "x 9 rows, not rows"),
        ({"x": lambda x: x[:3], "gather": True}, ValueError, "tokens that divide them"),
        ({"x": lambda x: x.half()}, TypeError, "float16"),
        ({"x": lambda x: x.double(), "weight": lambda w: w.double()}, TypeError, "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_grouped_gemm_refusals(device, change, error, says):
    x, weight, order, _, how = gemm_case(device, (5, 16, 8, 4, 2), torch.float32, "plain", "random")
    arguments = {"x": x.detach(), "weight": weight.detach(), "order": order, **how}
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(error, match=says) as caught:
        grouped_gemm(**arguments)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("need", ([True, True], [True, False], [False, True]), ids=str)
def test_compiler_is_told_the_shapes_that_come(device, need):
    x, weight, order, d_out, _ = gemm_case(
        device, (5, 16, 8, 4, 2), torch.float32, "gather", "random"
    )
    fields = [getattr(order, name) for name in list(vars(order))[:6]]
    arguments = (d_out, x.detach(), weight.detach(), fields, order.block_m, 2, False, need)
    op = torch.ops.moe_patch.grouped_gemm_backward.default
    torch.library.opcheck(op, arguments, test_utils="test_faketensor")
