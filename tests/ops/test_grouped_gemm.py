"""grouped_gemm(): one projection, each direction, each way of permuting, direct and autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops import DTYPES, assert_close, in_double, moe, sample

from moe_patch import kernels, reference
from moe_patch.kernels.groups import group_tiles
from moe_patch.ops import expert_order, grouped_gemm
from moe_patch.ops.grouped import add_bias, rows_contiguous
from moe_patch.order import ExpertOrder

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
        from moe_patch.ops.grouped import _grouped_gemm_backward

        fields = order.tensors()
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


@pytest.mark.parametrize("frozen", (0, 1), ids=("x", "weight"))
@pytest.mark.parametrize("variant", ("plain", "gather", "scatter"))
def test_a_frozen_operand_changes_no_bit_of_the_other_s_gradient(device, variant, frozen):
    case = gemm_case(device, (5, 16, 8, 4, 2), torch.float32, variant, "random")
    *operands, order, d_out, how = case
    both = torch.autograd.grad(grouped_gemm(*operands, order, **how), operands, d_out)
    operands[frozen] = operands[frozen].detach()
    out = grouped_gemm(*operands, order, **how)
    (alone,) = torch.autograd.grad(out, operands[1 - frozen], d_out)
    assert torch.equal(alone, both[1 - frozen])


@pytest.mark.parametrize("kind", ("slice", "columns", "turned", "expanded", "sliding"))
def test_kernels_are_given_rows_that_lie_side_by_side(device, kind):
    """And no copy where they do already."""
    wide = torch.randn(12, 80, device=device)
    x = {
        "slice": wide[:, 8:40],
        "columns": wide[:, ::2],
        "turned": wide.T[8:40],
        "expanded": wide[:1].expand(9, 80),
        "sliding": wide[0].unfold(0, 32, 8),
    }[kind]
    found = rows_contiguous(x)
    assert torch.equal(found, x) and (found is x) == (kind == "slice")
    assert found.stride(1) == 1 and found.stride(0) >= found.shape[1]


@pytest.mark.parametrize("biased", (False, True))
def test_gather_then_scatter_makes_the_block(device, biased):
    """The unfused pipeline of a family with its own gate gives what fused_experts gives."""
    arguments = moe(device, torch.float32, 20, 32, 24, 6, 2, biased=biased)
    index, weights = arguments["top_k_index"], arguments["top_k_weights"]
    order = expert_order(index, 6, torch.float32)
    pre = grouped_gemm(arguments["hidden_states"], arguments["gate_up_proj"], order, gather=True)
    if biased:
        pre = add_bias(pre, arguments["gate_up_bias"], index, order)
    rows = grouped_gemm(reference.glu(pre), arguments["down_proj"], order, scatter=True)
    if biased:
        rows = add_bias(rows, arguments["down_bias"], index, order, scattered=True)
    out = (rows.view(20, 2, 32) * weights[..., None]).sum(1)
    assert_close(out, reference.fused_experts(**in_double(arguments)), torch.float32)


GROUPS = [  # sizes, rows of x, K, N
    ([3, 0, 17, 5], 25, 40, 24),
    ([0, 0, 9], 12, 16, 8),  # rows of no group
    ([30], 30, 24, 72),
    ([0, 0], 6, 8, 8),
]
DEEPSEEK = [  # G, rows in all, K, N
    (1, 4096, 7168, 4096),
    (4, 8192, 7168, 4096),
    (4, 8192, 2048, 7168),
    (8, 4096, 7168, 4096),
    (8, 4096, 2048, 7168),
]


def group_case(device, dtype, sizes, rows, k, n):
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=draw).to(device, dtype).requires_grad_()
    weight = torch.randn(len(sizes), n, k, generator=draw).mul_(k**-0.5)
    d_out = torch.randn(rows, n, generator=draw).to(device, dtype)
    return x, weight.to(device, dtype).requires_grad_(), d_out


def judge_groups(x, weight, d_out, by, say):
    """`by` is m_sizes or offsets, as a dictionary."""
    out = grouped_gemm(x, weight, **by)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = reference.grouped_gemm(*exact, **by)
    ours = (out, *torch.autograd.grad(out, (x, weight), d_out))
    true = (truth, *torch.autograd.grad(truth, exact, d_out.double()))
    for name, mine, other in zip(("out", "grad_x", "grad_w"), ours, true):
        assert_close(mine, other, x.dtype, f"{say}: {name}")
    with torch.no_grad():
        assert torch.equal(grouped_gemm(x, weight, **by), out)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu))
)
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_groups_by_size_and_by_offset(device, case, dtype):
    sizes, rows, k, n = case
    x, weight, d_out = group_case(device, dtype, sizes, rows, k, n)
    m_sizes = torch.tensor(sizes, device=device)
    judge_groups(x, weight, d_out, {"m_sizes": m_sizes.int()}, "m_sizes")
    offsets = torch.nn.functional.pad(m_sizes.cumsum(0), (1, 0))
    by_offset = grouped_gemm(x, weight, offsets=offsets)
    assert torch.equal(by_offset, grouped_gemm(x, weight, m_sizes=m_sizes))
    assert not by_offset[sum(sizes) :].any(), "rows of no group are zero"


@pytest.mark.parametrize(
    "by, as_if",
    [
        ({"m_sizes": [5, 90, 2]}, [0, 5, 12, 12]),
        ({"m_sizes": [-3, 4, 2**40]}, [0, 0, 4, 12]),
        ({"offsets": [2, 5, 3, 900]}, [2, 5, 5, 12]),
        ({"offsets": [-7, 5, 9, 10]}, [0, 5, 9, 10]),
    ],
    ids=str,
)
def test_wrong_sizes_are_clamped(device, by, as_if):
    """Nothing is read or written out of bounds, and the host is not asked."""
    x, weight, _ = group_case(device, torch.float32, [0] * 3, 12, 16, 8)
    by = {name: torch.tensor(value, device=device) for name, value in by.items()}
    exact = reference.grouped_gemm(x, weight, offsets=torch.tensor(as_if, device=device))
    assert_close(grouped_gemm(x, weight, **by), exact, torch.float32)
    found = reference.grouped_gemm(x, weight, **by)
    assert_close(found, exact, torch.float32, "the twin")


def test_calls_on_several_streams_count_their_turns_apart(device, monkeypatch):
    """An order's count of turns is for one kernel at a time."""
    counts = []

    def counted(original):
        def call(first, second, order, *rest, **options):
            counts.append(order.taken)
            return original(first, second, order, *rest, **options)

        return call

    monkeypatch.setattr(kernels.dw, "dw", counted(kernels.dw.dw))
    product = counted(kernels.grouped_gemm.grouped_gemm)
    monkeypatch.setattr(kernels.grouped_gemm, "grouped_gemm", product)
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(3, 8, 16, device=device, requires_grad=True)
    order = expert_order(torch.tensor([[0, 2]] * 5, device=device), 3, torch.float32)
    grouped_gemm(x, weight, order=order, gather=True).sum().backward()
    forward, *backward = (count.data_ptr() for count in counts)
    assert len(backward) == 2 and order.taken.data_ptr() not in (forward, *backward)
    assert forward not in backward and not any(int(count) for count in counts)


@pytest.mark.parametrize("block_m", (2, 16))
def test_tiles_of_groups_are_those_of_the_sort(device, block_m):
    sizes = torch.tensor([3, 0, 17, 1, 0], device=device)
    index = torch.arange(5, device=device).repeat_interleave(sizes)[:, None]
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    buffer = torch.empty(ExpertOrder.numel(21, 5, block_m), dtype=torch.int32, device=device)
    ours = group_tiles(offsets, 21, block_m, buffer)
    assert_tiles(ours, reference.group_tiles(offsets, 21, block_m))
    assert_tiles(ours, reference.sort_tokens(index, 5, block_m))


@pytest.mark.parametrize(
    "offsets", [[2, 4, 4, 6], [0, 4, 2, 99], [3, 3, 7, 20], [-5, 0, 0, 0]], ids=str
)
def test_tiles_of_any_offsets_are_their_twins(device, offsets):
    buffer = torch.empty(ExpertOrder.numel(21, 3, 4), dtype=torch.int32, device=device)
    offsets = torch.tensor(offsets, device=device)
    assert_tiles(group_tiles(offsets, 21, 4, buffer), reference.group_tiles(offsets, 21, 4))


def assert_tiles(ours, other):
    used = int(other.num_tiles)
    for name in vars(other):
        mine, its = getattr(ours, name), getattr(other, name)
        if name.startswith("tile"):
            assert mine.shape == its.shape, name
            mine, its = mine[:used], its[:used]
        assert mine == its if name == "block_m" else torch.equal(mine, its), name
        assert name == "block_m" or mine.dtype == its.dtype, name


@pytest.mark.gpu
@pytest.mark.parametrize("even", (True, False))
@pytest.mark.parametrize("case", DEEPSEEK, ids=str)
def test_deepseek_shapes(device, case, even):
    groups, rows, k, n = case
    sizes = torch.full((groups,), rows // groups)
    if not even:
        sizes = torch.rand(groups, generator=torch.manual_seed(0)).softmax(0).mul(rows).long()
    x, weight, d_out = group_case(device, torch.bfloat16, sizes, rows, k, n)
    judge_groups(x, weight, d_out, {"m_sizes": sizes.to(device)}, str(case))


@pytest.mark.gpu
def test_groups_wait_for_nothing(device):
    x, weight, d_out = group_case(device, torch.bfloat16, [0] * 4, 256, 64, 128)
    sizes = torch.tensor([100, 0, 56, 100], device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_gemm(x, weight, m_sizes=sizes).backward(d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.any() and weight.grad[0].any() and not weight.grad[1].any()


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"m_sizes": None}, ValueError, "pass one of order, m_sizes and offsets"),
        ({"offsets": torch.tensor([0, 1, 2, 3])}, ValueError, "pass one of order"),
        ({"m_sizes": torch.tensor([1.0, 2, 3])}, TypeError, "m_sizes is torch.float32"),
        ({"m_sizes": torch.tensor([1, 2])}, ValueError, r"m_sizes must be \[3\] for a weight of 3"),
        ({"gather": True}, ValueError, "permute by an order"),
        ({"scatter": True}, ValueError, "permute by an order"),
    ],
    ids=str,
)
def test_group_refusals(device, change, error, says):
    x, weight, _ = group_case(device, torch.float32, [0] * 3, 12, 16, 8)
    options = {"m_sizes": torch.tensor([4, 4, 4], device=device)} | change
    options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    with pytest.raises(error, match=says) as caught:
        grouped_gemm(x.detach(), weight.detach(), **options)
    assert str(caught.value).count("\n") == 0


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
        ({"weight": lambda w: w.to(torch.float8_e4m3fn)}, ValueError, "pass weight_scale_inv"),
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
    fields = order.tensors()
    given, options = (x.detach(), weight.detach(), fields), (order.block_m, 2, False)
    calls = {
        "grouped_gemm": (*given, *options),
        "grouped_gemm_backward": (d_out, *given, *options, need),
        "bias_gradient": (d_out, fields, len(weight), order.block_m, False),
    }
    for name, arguments in calls.items():
        op = getattr(torch.ops.moe_patch, name).default
        passed = torch.library.opcheck(op, arguments, test_utils="test_faketensor")
        assert passed == {"test_faketensor": "SUCCESS"}, name
