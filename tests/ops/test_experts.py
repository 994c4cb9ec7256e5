"""fused_experts() against its float64 twin: values, gradients, edges, compile, graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops import DTYPES, assert_close, gradients, in_double, in_fp8, moe, sample

from moe_patch import kernels, paths, reference
from moe_patch.ops.experts import fused_experts

GRADS = ("d_hidden_states", "d_gate_up_proj", "d_down_proj", "d_top_k_weights")
SIZES = [  # T, H, I, E, K
    (1, 32, 16, 8, 2),
    (2, 16, 8, 1, 1),
    (7, 64, 40, 7, 3),
    (63, 48, 24, 8, 8),
    (64, 40, 72, 4, 1),
    (65, 24, 56, 60, 2),
    (33, 97, 41, 5, 2),
    (16, 40, 24, 128, 8),
]
BIG = [(1000, 256, 128, 8, 2), (1000, 504, 200, 60, 4), (300, 2048, 768, 128, 8)]
BIG += [(65, 256, 64, 512, 8), (1000, 128, 64, 7, 7), (5000, 136, 328, 8, 2)]


def run(arguments, weight_on="output", function=fused_experts):
    """Output and gradients, all inputs' that require one, for a fixed incoming gradient."""
    out = function(**arguments, weight_on=weight_on)
    seed = torch.Generator().manual_seed(5)
    d_out = torch.randn(out.shape, generator=seed).to(arguments["hidden_states"].dtype)
    return out, *gradients(out, d_out.to(out.device), *arguments.values())


def compare(arguments, weight_on="output"):
    dtype = arguments["hidden_states"].dtype
    ours = run(arguments, weight_on)
    truth = run(in_double(arguments), weight_on, reference.fused_experts)
    for name, mine, exact in zip(("output", *GRADS), ours, truth):
        assert mine.dtype == dtype
        assert_close(mine, exact, dtype, name)
    return ours


CASES = list(
    itertools.product(SIZES, DTYPES, ("output", "input"), (False, True), ("random", "sentinel"))
)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size,dtype,weight_on,transposed,routing", sample(CASES, 40))
def test_output_and_every_gradient(device, size, dtype, weight_on, transposed, routing):
    compare(moe(device, dtype, *size, transposed=transposed, routing=routing), weight_on)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", BIG, ids=str)
def test_larger_sizes(device, size, dtype, weight_on):
    compare(moe(device, dtype, *size, transposed=weight_on == "input"), weight_on)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("routing", ("random", "sentinel", "repeat"))
@pytest.mark.parametrize(
    "size",
    [
        (1, 64, 32, 8, 2),
        (1, 97, 41, 5, 3),
        (2, 48, 72, 64, 8),
        pytest.param((1, 2056, 2056, 8, 2), marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_decoding_without_a_sort(device, size, routing, weight_on):
    """Few slots and no gradient wanted: the vector kernels, checked against the same truth."""
    from moe_patch.kernels.decode import decodes

    arguments = moe(device, torch.float16, *size, routing=routing, grad=False)
    matrices = (arguments[n] for n in ("top_k_index", "gate_up_proj", "down_proj"))
    assert decodes(*matrices)
    truth = reference.fused_experts(**in_double(arguments), weight_on=weight_on)
    assert_close(fused_experts(**arguments, weight_on=weight_on), truth, torch.float16)


@pytest.mark.usefixtures("poison")
def test_decoding_with_biases_and_negative_ids(device):
    """A bias is added once, however many blocks the reduction has."""
    arguments = moe(device, torch.float16, 1, 200, 136, 16, 4, grad=False)
    arguments["top_k_index"][0, 1:3] = torch.tensor([-1, -7], device=device)
    for name, width in (("gate_up_bias", 272), ("down_bias", 200)):
        arguments[name] = torch.randn(16, width, device=device).half()
    truth = reference.fused_experts(**in_double(arguments))
    assert_close(fused_experts(**arguments), truth, torch.float16)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("routing", ("one", "repeat"))
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_skewed_routing(device, routing, weight_on):
    arguments = moe(device, torch.float32, 20, 32, 24, 6, 3, routing=routing)
    _, _, d_gate_up, d_down, _ = compare(arguments, weight_on)
    used = arguments["top_k_index"].unique()
    unused = [e for e in range(6) if e not in used]
    assert unused or routing == "repeat"
    assert not d_gate_up[unused].any()
    assert not d_down[unused].any()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("ids", ([], [0], [5], [0, 1, 2, 4, 5]), ids=str)
def test_empty_experts_and_dropped_ids(device, ids):
    """First, last, all or all but one expert empty; ids out of range either way are dropped."""
    arguments = moe(device, torch.float32, 24, 32, 16, 6, 2)
    index = arguments["top_k_index"]
    absent = torch.isin(index, torch.tensor(ids, device=device))
    arguments["top_k_index"] = torch.where(absent, -1, index)
    out, d_hidden, d_gate_up, _, d_weights = compare(arguments)
    dropped = arguments["top_k_index"] < 0
    assert not d_weights[dropped].any()
    assert not out[dropped.all(1)].any()
    assert not d_hidden[dropped.all(1)].any()
    assert not d_gate_up[ids].any()


def test_results_of_collectives_under_way_are_waited_for(device):
    """As transformers hands them to experts that are spread over ranks."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    arguments = moe(device, torch.float32, 9, 32, 16, 4, 2)
    expected = run(arguments)
    under_way = dict(arguments)
    leaves = {n: arguments[n] for n in ("hidden_states", "top_k_weights")}
    for name, leaf in leaves.items():
        under_way[name] = _Waiting.apply(leaf)
        assert type(under_way[name]) is AsyncCollectiveTensor
    under_way["top_k_index"] = AsyncCollectiveTensor(arguments["top_k_index"])
    out = fused_experts(**under_way)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device)
    grads = torch.autograd.grad(out, [*leaves.values()], d_out)
    assert torch.equal(out, expected[0])
    assert torch.equal(grads[0], expected[1]) and torch.equal(grads[1], expected[4])
    with torch.no_grad():
        assert torch.equal(fused_experts(**under_way), expected[0])


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.usefixtures("poison")
def test_every_slot_dropped(device):
    arguments = moe(device, torch.float32, 9, 32, 16, 4, 2)
    arguments["top_k_index"] = torch.full_like(arguments["top_k_index"], 4)
    for tensor in run(arguments):
        assert not tensor.any()


@pytest.mark.usefixtures("poison")
def test_no_tokens(device):
    out, d_hidden, d_gate_up, d_down, d_weights = run(moe(device, torch.float32, 0, 32, 16, 4, 2))
    assert out.shape == d_hidden.shape == (0, 32)
    assert d_weights.shape == (0, 2)
    assert not d_gate_up.any()
    assert not d_down.any()


def test_strided_expanded_and_other_index_dtypes(device):
    arguments = moe(device, torch.float32, 12, 32, 16, 4, 2)
    expected = run(arguments)
    wide = torch.randn(12, 80, device=device)
    wide[:, 8:40] = arguments["hidden_states"].detach()
    strided = {**arguments, "hidden_states": wide[:, 8:40].requires_grad_()}
    strided["top_k_index"] = arguments["top_k_index"].int().T.contiguous().T
    for ours, other in zip(run(strided), expected):
        assert torch.equal(ours, other)
    row = torch.randn(1, 32, device=device).expand(12, 32)
    compare({**arguments, "hidden_states": row.requires_grad_()})


@pytest.mark.parametrize("name", ("gate_up_bias", "down_bias"))
def test_one_bias_alone_of_any_stride(device, name):
    arguments = moe(device, torch.float32, 12, 32, 16, 4, 2)
    arguments[name] = torch.randn(32, 4, device=device).T.requires_grad_()
    ours, truth = run(arguments), run(in_double(arguments), function=reference.fused_experts)
    for mine, exact in zip(ours, truth, strict=True):
        assert_close(mine, exact, torch.float32)


@pytest.mark.parametrize(
    "tokens, quantised, path",
    [(1, False, "decode"), (20, False, "sorted"), (1, True, "decode"), (20, True, "fp8")],
)
def test_the_path_that_runs_is_said(device, tokens, quantised, path):
    """The certificate lists them."""
    if path == "fp8" and not kernels.fp8_gemm.runs(device):
        pytest.skip("needs FP8 products")
    arguments = moe(device, torch.float32, tokens, 128, 128, 2, 1, grad=False)
    with paths.recorded() as seen:
        fused_experts(**in_fp8(arguments) if quantised else arguments)
    assert seen == {path}


@pytest.mark.parametrize("same", (True, False))
def test_slots_are_sorted_again_only_for_tiles_of_another_height(device, monkeypatch, same):
    """FP8 products may have other tiles than the backward."""
    if not kernels.fp8_gemm.runs(device):
        pytest.skip("needs FP8 products")
    arguments = in_fp8(moe(device, torch.float32, 20, 128, 128, 2, 2))
    heights = kernels.tiles.block_m(40, 2, torch.float32), 16
    assert heights[0] != heights[1]
    monkeypatch.setattr(kernels.fp8_gemm, "height", lambda *_: heights[not same])
    sorts, original = [], kernels.sort_tokens.sort_tokens
    monkeypatch.setattr(
        kernels.sort_tokens, "sort_tokens", lambda *given: sorts.append(given) or original(*given)
    )
    fused_experts(**arguments)
    assert [height for *_, height, _ in sorts] == ([64] if same else [16, 64])


def test_incoming_gradient_of_a_sum(device):
    """.sum().backward() hands over an expanded scalar."""
    arguments = moe(device, torch.float32, 12, 32, 16, 4, 2)
    fused_experts(**arguments).sum().backward()
    truth = in_double(arguments)
    reference.fused_experts(**truth).sum().backward()
    for name, value in arguments.items():
        if value.requires_grad:
            assert_close(value.grad, truth[name].grad, torch.float32, name)


@pytest.mark.parametrize(
    "wanted", [c for n in (1, 2, 3) for c in itertools.combinations((0, 1, 2, 4), n)], ids=str
)
def test_only_the_asked_gradients(device, wanted):
    """Frozen experts, frozen router, only the input: the others' gradients do not change a bit."""
    arguments = moe(device, torch.float32, 9, 32, 16, 4, 2)
    everything = dict(zip((0, 1, 2, 4), run(arguments)[1:]))
    for position, value in enumerate(arguments.values()):
        if value.is_floating_point():
            value.requires_grad_(position in wanted)
    for position, gradient in zip(wanted, run(arguments)[1:]):
        assert torch.equal(gradient, everything[position])


def test_same_bits_twice_and_without_grad(device):
    arguments = moe(device, torch.float16, 40, 64, 48, 8, 2)
    first, second = run(arguments), run(arguments)
    for one, two in zip(first, second):
        assert torch.equal(one, two)
    with torch.no_grad():
        assert torch.equal(fused_experts(**arguments), first[0])
    with torch.inference_mode():
        assert torch.equal(fused_experts(**arguments), first[0])


def test_a_fresh_output_and_untouched_inputs(device):
    arguments = moe(device, torch.float32, 9, 32, 16, 4, 2)
    before = {name: value.detach().clone() for name, value in arguments.items()}
    out, *_ = run(arguments)
    with torch.no_grad():
        out.fill_(7)
    for name, value in arguments.items():
        assert torch.equal(value, before[name]), name


def test_backward_twice(device):
    arguments = moe(device, torch.float32, 9, 32, 16, 4, 2)
    out = fused_experts(**arguments)
    d_out = torch.ones_like(out)
    first = torch.autograd.grad(out, arguments["hidden_states"], d_out, retain_graph=True)[0]
    second = torch.autograd.grad(out, arguments["hidden_states"], d_out)[0]
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, arguments["hidden_states"], d_out)


def test_weight_changed_in_place_is_noticed(device):
    arguments = moe(device, torch.float32, 5, 32, 16, 4, 2)
    out = fused_experts(**arguments)
    with torch.no_grad():
        arguments["down_proj"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nothing_gathered_is_kept(device):
    """hidden_states itself, the pre-activation, integers and weights: no copy, no activation."""
    arguments = moe(device, torch.float32, 64, 32, 16, 4, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_experts(**arguments)
    own = {value.data_ptr() for value in arguments.values()}
    new = [t for t in kept if t.data_ptr() not in own]
    assert sorted(t.dtype == torch.int32 for t in new) == [False, True]
    assert {t.shape for t in new if t.dtype != torch.int32} == {torch.Size([128, 32])}
    assert arguments["hidden_states"].data_ptr() in {t.data_ptr() for t in kept}


@pytest.mark.parametrize("inputs", (torch.float32, torch.float16), ids=str)
def test_autocast_and_mixed_hidden_dtype(device, inputs):
    """float32 weights under autocast, and float32 activations on half weights: cast, cast back."""
    arguments = moe(device, torch.float32, 12, 32, 16, 4, 2)
    with torch.no_grad():
        arguments["hidden_states"] = arguments["hidden_states"].to(inputs).requires_grad_()
    with torch.autocast(device.type, torch.float16):
        out = fused_experts(**arguments)
    assert out.dtype == inputs
    out.sum().backward()
    truth = in_double(arguments)
    reference.fused_experts(**truth).sum().backward()
    for name, value in arguments.items():
        if value.requires_grad:
            assert value.grad.dtype == value.dtype
            error = (value.grad.double() - truth[name].grad).norm() / truth[name].grad.norm()
            assert error < 2e-3, name


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_gradient_checkpointing(device, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    arguments = moe(device, torch.float32, 12, 32, 16, 4, 2)
    expected = run(arguments)

    def again(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, weight_on):
        positional = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
        return checkpoint(fused_experts, *positional, use_reentrant=use_reentrant)

    # the reentrant mode has no torch.autograd.grad
    out = again(**arguments, weight_on="output")
    seed = torch.Generator().manual_seed(5)
    out.backward(torch.randn(out.shape, generator=seed).to(device))
    ours = (out, *(v.grad for v in arguments.values() if v.requires_grad))
    for mine, other in zip(ours, expected):
        assert torch.equal(mine, other)


def test_overflow_and_nan_pass_through_as_in_the_twin(device):
    """An inf stays in its own token and its own weight rows, as in half-precision PyTorch.

    Gradients may keep finite what overflows between the twin's half-precision steps.
    """
    arguments = moe(device, torch.float16, 12, 32, 16, 4, 2)
    with torch.no_grad():
        arguments["hidden_states"][3] = 60000
        arguments["hidden_states"][7, 0] = float("nan")
    ours = run(arguments)
    twin = run(arguments, function=reference.fused_experts)
    assert torch.equal(ours[0].isfinite(), twin[0].isfinite())
    for name, mine, other in zip(GRADS, ours[1:], twin[1:]):
        assert not (other.isfinite() & ~mine.isfinite()).any(), name
        assert bool((~mine.isfinite()).any()), name
    assert bool(torch.isfinite(ours[0][[0, 1, 2, 4, 5, 6, 8]]).all())


def test_compile_full_graph_and_dynamic_tokens(device):
    def block(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights):
        return fused_experts(
            hidden_states * 2, gate_up_proj, down_proj, top_k_index, top_k_weights
        ).relu()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 9):
        arguments = moe(device, torch.float32, tokens, 32, 16, 4, 2)
        expected = block(**arguments)
        out = compiled(**arguments)
        assert torch.equal(out, expected)
        d_out = torch.randn_like(out)
        for one, two in zip(
            gradients(out, d_out, *arguments.values()),
            gradients(expected, d_out, *arguments.values()),
        ):
            assert torch.equal(one, two)


@pytest.mark.parametrize(
    "wanted", ((), ("hidden_states",), ("top_k_weights", "gate_up", "down")), ids=str
)
def test_compiler_is_told_the_shapes_and_dtypes_that_come(device, wanted):
    from moe_patch.ops.experts import _experts_forward
    from moe_patch.ops.operands import Inputs, Projection

    arguments = moe(device, torch.float16, 5, 32, 16, 4, 2, grad=False)
    x, gate_up, down, index, weights = arguments.values()
    inputs = Inputs(x, weights.float(), Projection(gate_up), Projection(down)).flat()
    given = *inputs, index, False, "silu", ""
    _, *made = _experts_forward(*given)
    flags = [name in wanted for name in Inputs._fields]
    need = Inputs(*flags[:2], Projection(flags[2]), Projection(flags[3])).flat()
    need = [bool(each) for each in need]
    calls = {"forward": given, "backward": (*given, *made, torch.randn_like(x), need)}
    for name, call in calls.items():
        op = getattr(torch.ops.moe_patch, f"experts_{name}").default
        found = torch.library.opcheck(op, call, test_utils="test_faketensor")
        assert found == {"test_faketensor": "SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (63, 513))
@pytest.mark.parametrize("inner", (100, 104, 71))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_halves_that_no_box_can_begin_at(device, dtype, inner, tokens):
    compare(moe(device, dtype, tokens, 1000, inner, 8, 2, transposed=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compile_with_inductor(device, mode):
    arguments = moe(device, torch.bfloat16, 33, 64, 48, 8, 2)
    expected = run(arguments)
    compiled = torch.compile(fused_experts, fullgraph=True, mode=mode)
    for _ in range(3):
        ours = run(arguments, function=compiled)
        for mine, other in zip(ours, expected):
            assert torch.equal(mine, other)


@pytest.mark.gpu
def test_cuda_graph_forward_and_backward(device):
    """One captured graph serves every routing: nothing in it depends on the ids."""
    arguments = moe(device, torch.bfloat16, 50, 64, 48, 8, 2)
    d_out = torch.randn(50, 64, device=device, dtype=torch.bfloat16)

    def step():
        out = fused_experts(**arguments)
        return out, *gradients(out, d_out, *arguments.values())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        draw = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            arguments["hidden_states"].normal_(generator=draw)
            arguments["top_k_index"].random_(0, 9, generator=draw)  # 8: dropped
        graph.replay()
        for mine, other in zip(captured, step()):
            assert torch.equal(mine, other)


@pytest.mark.gpu
def test_no_host_synchronisation(device):
    arguments = moe(device, torch.bfloat16, 50, 64, 48, 8, 2)
    run(arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = fused_experts(**arguments)
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.any() and all(x.grad.any() for x in arguments.values() if x.requires_grad)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_weights_past_two_to_the_31_elements(device):
    """E * 2I * H > 2^31: the last expert's rows are read and its gradient written in 64 bits."""
    experts, inner, hidden = 140, 4096, 2048
    draw = torch.Generator(device).manual_seed(0)
    gate_up = torch.empty(experts, 2 * inner, hidden, device=device, dtype=torch.bfloat16)
    gate_up.normal_(std=0.02, generator=draw).requires_grad_()
    down = torch.empty(experts, hidden, inner, device=device, dtype=torch.bfloat16)
    down.normal_(std=0.02, generator=draw).requires_grad_()
    assert gate_up.numel() > 2**31
    x = torch.randn(64, hidden, device=device, dtype=torch.bfloat16)
    index = torch.randint(experts - 2, experts, (64, 1), device=device)
    weights = torch.rand(64, 1, device=device, dtype=torch.bfloat16)
    out = fused_experts(x, gate_up, down, index, weights)
    last = in_double(
        {
            "hidden_states": x,
            "gate_up_proj": gate_up[-2:].detach().requires_grad_(),
            "down_proj": down[-2:].detach().requires_grad_(),
            "top_k_index": index - (experts - 2),
            "top_k_weights": weights,
        }
    )
    truth = reference.fused_experts(**last)
    assert_close(out, truth, torch.bfloat16)
    d_out = torch.randn_like(out)
    ours = torch.autograd.grad(out, (gate_up, down), d_out)
    exact = torch.autograd.grad(truth, (last["gate_up_proj"], last["down_proj"]), d_out.double())
    for mine, other in zip(ours, exact):
        assert not mine[:-2].any()
        assert_close(mine[-2:], other, torch.bfloat16)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements(device):
    """S * H > 2^31, forward and d_hidden: rows are addressed in 64 bits."""
    tokens, top_k, hidden, inner, experts = 140_000, 8, 2048, 64, 8
    arguments = moe(device, torch.bfloat16, 4, hidden, inner, experts, top_k)
    arguments |= {
        "hidden_states": torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16),
        "top_k_index": torch.rand(tokens, experts, device=device).argsort(1)[:, :top_k],
        "top_k_weights": torch.rand(tokens, top_k, device=device, dtype=torch.bfloat16),
    }
    hidden_states = arguments["hidden_states"].requires_grad_()
    out = fused_experts(**arguments)
    d_out = torch.randn_like(out)
    (d_hidden,) = torch.autograd.grad(out, hidden_states, d_out)
    rows = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device=device)
    part = in_double(
        {n: v[rows].detach() if v.shape[0] == tokens else v for n, v in arguments.items()}
    )
    part["hidden_states"].requires_grad_()
    truth = reference.fused_experts(**part)
    assert_close(out[rows], truth, torch.bfloat16)
    (exact,) = torch.autograd.grad(truth, part["hidden_states"], d_out[rows].double())
    assert_close(d_hidden[rows], exact, torch.bfloat16)


@pytest.mark.multigpu
def test_the_tensors_device_not_the_current_one():
    arguments = moe(torch.device("cuda:1"), torch.bfloat16, 12, 32, 16, 4, 2)
    assert torch.cuda.current_device() == 0
    compare(arguments)
