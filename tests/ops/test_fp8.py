"""FP8 with block scales: quantisation, both layouts and the layer, against plain PyTorch."""

import pytest
import torch
from ops import assert_close, quantised

from moe_patch import fp8, kernels, reference
from moe_patch.activation import Activation
from moe_patch.ops import fused_experts, grouped_gemm

# e4m3 rounds at 2**-4; honest float32 sums rounded to bfloat16 stay under 0.7 * 2**-7
BOUND, ROUNDED = 0.7 * 2**-7, 2**-5


def draw(device, *shape, seed=0, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(device)


def weights(device, groups, n, k, seed=1):
    """e4m3 [G, N, K] and scales, blocks of different magnitudes."""
    return quantised(draw(device, groups, n, k, seed=seed, std=k**-0.5))


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


def far(found, truth):
    """rms error over the truth's rms."""
    assert found.shape == truth.shape and bool(torch.isfinite(found.float()).all())
    return rms(found.double() - truth.double()) / rms(truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_is_its_twin(device, dtype, ue8m0):
    x = draw(device, 9, 300).to(dtype) * torch.logspace(-2, 3, 9, device=device)[:, None].to(dtype)
    x[3, 128:256] = 0
    q, scale = fp8.quantize(x, ue8m0=ue8m0)
    expected, expected_scale = reference.quantize(x, ue8m0=ue8m0)
    assert torch.equal(scale, expected_scale) and scale.shape == (9, 3)
    assert (q.float() != expected.float()).float().mean() < 1e-3  # a quotient at a tie
    assert torch.equal(scale, 2.0 ** scale.log2().round()) or not ue8m0
    assert far(reference.dequantize(q, scale), x) < ROUNDED


@pytest.mark.gpu  # the interpreter reads e4m3 NaN as 480
def test_nan_and_inf_reach_the_product(device):
    x = draw(device, 3, 256)
    x[0, 5], x[1, 130] = torch.nan, torch.inf
    q, scale = fp8.quantize(x)
    rhs, rhs_scale = weights(device, 1, 128, 256)
    found = fp8.grouped_gemm(q, scale, rhs, rhs_scale, torch.tensor([0, 3]).to(device))
    assert found.isnan().all(1).tolist() == [True, True, False]
    assert not bool(reference.dequantize(q, scale)[0, 128:].isnan().any())


SIZES = [  # rows a group, N, K
    ([5, 0, 20, 1], 256, 256),
    ([70, 3], 200, 144),
    ([2] * 9, 128, 384),
]
LARGE = [
    ([200, 0, 1, 129], 512, 1024),
    ([130, 77], 4096, 7168),
    ([300] * 40, 512, 208),
]
SIZES += [pytest.param(*size, marks=pytest.mark.gpu) for size in LARGE]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("counts, n, k", SIZES)
def test_contiguous_groups(device, counts, n, k):
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device)
    rows = int(offsets[-1])
    lhs, lhs_scale = fp8.quantize(draw(device, rows + 3, k))
    rhs, rhs_scale = weights(device, len(counts), n, k)
    found = fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, offsets)
    truth = reference.fp8_grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, offsets, dtype=torch.float64)
    assert found.dtype == torch.bfloat16 and far(found, truth) < BOUND
    assert not bool(found[rows:].any())
    assert torch.equal(found, fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, offsets))
    other = fp8.grouped_gemm(lhs, lhs_scale.contiguous(), rhs, rhs_scale, offsets)
    assert torch.equal(found, other)  # any strides


GROUPS = [  # rows a group, rows, N, K
    ([9, 0, 14], 25, 256, 200),
    pytest.param([700, 0, 300, 24], 1100, 4096, 7168, marks=pytest.mark.gpu),
    pytest.param([512] * 8, 4096, 7168, 2048, marks=pytest.mark.gpu),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("sizes, rows, n, k", GROUPS)
def test_groups_of_frozen_weights_and_their_input_gradient(device, sizes, rows, n, k):
    weight, scale = weights(device, len(sizes), n, k)
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    x = draw(device, rows, k).to(dtype).requires_grad_()
    by = {"m_sizes": torch.tensor(sizes, device=device), "weight_scale_inv": scale}
    out = grouped_gemm(x, weight, **by)
    exact = x.detach().double().requires_grad_()
    truth = reference.grouped_gemm(exact, weight, **by)
    rounded = reference.dequantize(*reference.quantize(x.detach()), torch.float64)
    twin = reference.grouped_gemm(rounded, weight, **by)
    assert out.dtype == dtype and far(out, twin) < BOUND < far(out, truth.detach())
    assert not bool(out[sum(sizes) :].any())
    d_out = draw(device, rows, n, seed=7).to(dtype)
    found = torch.autograd.grad(out, x, d_out)[0]
    expected = torch.autograd.grad(truth, exact, d_out.double())[0]
    assert far(found, expected) < BOUND  # with the weights as they are stored, and dO as it is
    with pytest.raises(ValueError, match="has no scales"):
        grouped_gemm(x, weight, m_sizes=by["m_sizes"])
    with pytest.raises(ValueError, match="FP8 weights are frozen"):
        grouped_gemm(x, weight.requires_grad_(), **by)


def test_offsets_past_the_rows_are_cut_off(device):
    lhs, lhs_scale = fp8.quantize(draw(device, 6, 128))
    rhs, rhs_scale = weights(device, 2, 128, 128)
    found = fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, torch.tensor([0, 4, 99]).to(device))
    same = fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, torch.tensor([0, 4, 6]).to(device))
    assert torch.equal(found, same)


def test_scales_of_powers_of_two(device):
    lhs, lhs_scale = fp8.quantize(draw(device, 6, 128))
    rhs, rhs_scale = weights(device, 2, 128, 128)
    rhs_scale = 2.0 ** rhs_scale.log2().round()
    offsets = torch.tensor([0, 4, 6]).to(device)
    found = fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale.to(torch.float8_e8m0fnu), offsets)
    assert torch.equal(found, fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, offsets))


MASKED = [
    (8, 256, 256),
    pytest.param(64, 4096, 7168, marks=pytest.mark.gpu),
    pytest.param(256, 4096, 7168, marks=pytest.mark.gpu),
    pytest.param(256, 7168, 2048, marks=pytest.mark.gpu),
    pytest.param(200, 384, 1008, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("m_max, n, k", MASKED)
def test_masked_groups(device, m_max, n, k):
    counts = [m_max // 4, m_max + 3, 0, m_max]  # the second is clamped: the third stays untouched
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    lhs, lhs_scale = fp8.quantize(draw(device, 4 * m_max, k))
    lhs, lhs_scale = lhs.view(4, m_max, k), lhs_scale.reshape(4, m_max, -1)
    given = lhs, lhs_scale, *weights(device, 4, n, k), masked_m
    out, twin = (
        torch.full((4, m_max, n), 7.0, dtype=dtype, device=device)
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert fp8.masked_grouped_gemm(*given, expected_m=m_max // 2, out=out) is out
    reference.fp8_masked_grouped_gemm(*given, out=twin, dtype=torch.float64)
    for g, count in enumerate(counts):
        if count:
            assert far(out[g, :count], twin[g, :count]) < BOUND
        assert bool((out[g, count:] == 7).all())  # not touched
    for hint in (None, 0):
        assert torch.equal(fp8.masked_grouped_gemm(*given, expected_m=hint)[3], out[3])


@pytest.mark.gpu
def test_masked_groups_in_a_cuda_graph(device):
    lhs, lhs_scale = fp8.quantize(draw(device, 4 * 64, 512))
    lhs, lhs_scale = lhs.view(4, 64, 512), lhs_scale.reshape(4, 64, -1)
    rhs, rhs_scale = weights(device, 4, 256, 512)
    masked_m = torch.full((4,), 64, dtype=torch.int32, device=device)
    out = torch.zeros(4, 64, 256, dtype=torch.bfloat16, device=device)
    everything = fp8.masked_grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, masked_m)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8.masked_grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, masked_m, out=out)
    masked_m.copy_(torch.tensor([0, 1, 64, 33]))
    out.zero_()
    graph.replay()
    for g, count in enumerate([0, 1, 64, 33]):
        assert torch.equal(out[g, :count], everything[g, :count])
        assert not bool(out[g, count:].any())


def layer(device, tokens, experts, local, hidden, inner, quantised=True):
    """Arguments of fp8.moe."""
    x = draw(device, tokens, hidden).bfloat16()
    x, scale = fp8.quantize(x.float()) if quantised else (x, None)
    return (
        x, scale, draw(device, tokens, experts, seed=3),
        *weights(device, local, 2 * inner, hidden), *weights(device, local, hidden, inner, seed=5),
    )  # fmt: skip


LAYERS = [  # tokens, experts, local, hidden, intermediate, first local
    (9, 16, 8, 128, 128, 4),
    (3, 16, 16, 200, 128, 0),
    (1, 16, 16, 256, 128, 0),
    pytest.param(1, 256, 256, 1024, 256, 0, marks=pytest.mark.gpu),
    pytest.param(64, 256, 32, 7168, 2048, 0, marks=pytest.mark.gpu),
    pytest.param(1024, 256, 32, 7168, 2048, 224, marks=pytest.mark.gpu),
]


def test_one_token_with_strided_scales(device):
    arguments = [*layer(device, 1, 16, 16, 256, 128)]
    options = {"num_groups": 4, "top_groups": 3, "top_k": 4}
    expected = fp8.moe(*arguments, **options)
    assert expected.any() and arguments[1].shape == (1, 2)
    arguments[1] = torch.stack([arguments[1], -arguments[1]], dim=2).flatten(1)[:, ::2]
    assert torch.equal(fp8.moe(*arguments, **options), expected)


@pytest.mark.parametrize("tokens, experts, local, hidden, inner, first", LAYERS)
@pytest.mark.parametrize("quantised", [True, False])
def test_the_layer(device, tokens, experts, local, hidden, inner, first, quantised):
    if not quantised and str(device) == "cpu":
        pytest.skip("the interpreter cannot round to bfloat16")
    arguments = layer(device, tokens, experts, local, hidden, inner, quantised)
    options = {
        "correction_bias": draw(device, experts, seed=4, std=0.1), "local_expert_offset": first,
        "num_groups": 4, "top_groups": 3, "top_k": 4,
    }  # fmt: skip
    found = fp8.moe(*arguments, **options)
    assert found.dtype == torch.bfloat16 and found.shape == (tokens, hidden)
    once = tokens == 1  # decoded: the second product's rows are not quantised
    twin = reference.fp8_moe(*arguments, **options, dtype=torch.float64, requantize=not once)
    exact = reference.fp8_moe(*arguments, **options, dtype=torch.float64, requantize=False)
    assert rms(exact) > 0
    assert rms(found - exact) <= 1.1 * rms(twin - exact) + BOUND * rms(exact)
    assert far(found, twin) < (BOUND if once else 1.5 * ROUNDED)
    assert bool((found[(twin == 0).all(1)] == 0).all())  # tokens without a local expert


EXPERTS = [  # tokens, experts, hidden, intermediate
    (21, 2, 272, 128, torch.float32),
    pytest.param(300, 8, 2048, 768, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(300, 8, 2048, 768, torch.float16, marks=pytest.mark.gpu),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens, experts, hidden, inner, dtype", EXPERTS)
def test_fused_experts_multiply_in_fp8(device, tokens, experts, hidden, inner, dtype, monkeypatch):
    """With gradients and without; those go straight through what was quantised."""
    if str(device) == "cpu":  # as on Hopper: not the height of the backward's tiles
        monkeypatch.setattr(kernels.fp8_gemm, "height", lambda *_: 16)
    x = draw(device, tokens, hidden).to(dtype)
    up, up_scale = weights(device, experts, 2 * inner, hidden)
    down, down_scale = weights(device, experts, hidden, inner, seed=5)
    weight, index = draw(device, tokens, experts, seed=3).softmax(-1).topk(2)
    index[0, 0] = experts  # dropped
    x, weight = x.requires_grad_(), weight.to(dtype).requires_grad_()
    frozen = up, down, index
    scales = {"gate_up_scale_inv": up_scale, "down_scale_inv": down_scale}
    kept = fused_experts(x, *frozen, weight, **scales)
    with torch.no_grad():
        found = fused_experts(x, *frozen, weight, **scales)
        exact = reference.fused_experts(x.double(), *frozen, weight, **scales)
        twin = reference.fp8_experts(x, *frozen, weight, *scales.values(), dtype=torch.float64)
    assert found.dtype == dtype and torch.equal(found, kept)
    assert rms(found - exact) <= 1.05 * rms(twin - exact)
    d_out = draw(device, tokens, hidden, seed=6).to(dtype)
    ours = torch.autograd.grad(kept, (x, weight), d_out)
    rounded = reference.dequantize(*fp8.quantize(x.detach()), torch.float64).requires_grad_()
    wide = weight.detach().double().requires_grad_()
    truth = reference.fused_experts(rounded, *frozen, wide, **scales)
    # Hopper adds e4m3 products in about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)
    coarse = dtype == torch.float32 and str(device) != "cpu"
    for mine, other in zip(ours, torch.autograd.grad(truth, (rounded, wide), d_out.double())):
        assert_close(mine, other, torch.float16 if coarse else dtype)


@pytest.mark.parametrize("what", ["ragged", "interleaved", "strided"])
def test_what_fp8_products_do_not_take_runs_with_activations_as_they_are(device, what):
    inner = 96 if what == "ragged" else 128
    up, up_scale = weights(device, 2, 2 * inner, 128)
    down, down_scale = weights(device, 2, 128, inner, seed=5)
    if what == "strided":
        up = up.transpose(1, 2).contiguous().transpose(1, 2)
    act = Activation(form="interleaved" if what == "interleaved" else "concatenated")
    x, index = draw(device, 9, 128), draw(device, 9, 2, seed=3).topk(2).indices
    arguments = x, up, down, index, torch.full((9, 2), 0.5, device=device)
    options = {"gate_up_scale_inv": up_scale, "down_scale_inv": down_scale, "activation": act}
    found = fused_experts(*arguments, **options)
    assert far(found, reference.fused_experts(x.double(), *arguments[1:], **options)) < 1e-5


def test_bad_input_is_named(device):
    lhs, lhs_scale = fp8.quantize(draw(device, 4, 256))
    rhs, rhs_scale = weights(device, 2, 128, 256)
    offsets = torch.tensor([0, 2, 4]).to(device)

    def refused(match, *arguments, error=(ValueError, TypeError)):
        with pytest.raises(error, match=match):
            fp8.grouped_gemm(*arguments)

    refused(
        "lhs must be 2-dimensional float8_e4m3fn", lhs.float(), lhs_scale, rhs, rhs_scale, offsets
    )
    refused("needs a scale", lhs, lhs_scale[:, :1], rhs, rhs_scale, offsets)
    refused("must be .2, 1, 2.", lhs, lhs_scale, rhs, rhs_scale[:, :, :1], offsets)
    refused("scale is torch.float16", lhs, lhs_scale.half(), rhs, rhs_scale, offsets)
    refused("strides", lhs.t().contiguous().t(), lhs_scale, rhs, rhs_scale, offsets)
    refused("offsets must be", lhs, lhs_scale, rhs, rhs_scale, offsets[:2])
    refused(
        "does not fit rhs", lhs[:, :128].contiguous(), lhs_scale[:, :1], rhs, rhs_scale, offsets
    )
    lhs, lhs_scale = lhs.view(2, 2, 256), lhs_scale.reshape(2, 2, 2)
    masked_m = torch.tensor([1, 2], dtype=torch.int32, device=device)
    masked = lhs, lhs_scale, rhs, rhs_scale
    with pytest.raises(TypeError, match="masked_m must be int32"):
        fp8.masked_grouped_gemm(*masked, masked_m.long())
    for hint in (3, -1):
        with pytest.raises(ValueError, match=f"expected_m is {hint}: it must be 0 to"):
            fp8.masked_grouped_gemm(*masked, masked_m, expected_m=hint)
    with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
        fp8.masked_grouped_gemm(*masked, masked_m, out=torch.zeros(2, 2, 128, device=device))
    for rows in (masked_m.float(), torch.zeros(2, 128, dtype=torch.float64, device=device), rhs[0]):
        with pytest.raises(TypeError, match="quantize takes"):
            fp8.quantize(rows)
    arguments = layer(device, 4, 16, 4, 128, 128)
    with pytest.raises(ValueError, match="need hidden_states"):
        fp8.moe(arguments[0], arguments[1], arguments[2][:3], *arguments[3:])
    with pytest.raises(TypeError, match="without a scale"):
        fp8.moe(arguments[0], None, *arguments[2:])
    with pytest.raises(ValueError, match="only concatenated"):
        fp8.moe(*arguments, activation=Activation(form="interleaved"))


def test_a_card_without_fp8_products_is_named(device, monkeypatch):
    x, offsets = draw(device, 4, 128), torch.tensor([0, 4]).to(device)
    calls = (
        (fp8.quantize, (x,)),
        (fp8.grouped_gemm, (*fp8.quantize(x), *weights(device, 1, 128, 128), offsets)),
        (fp8.moe, layer(device, 4, 16, 16, 128, 128)),
    )
    monkeypatch.setattr(kernels.fp8_gemm, "runs", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    for function, given in calls:
        with pytest.raises(RuntimeError, match="^NVIDIA A100 has no FP8 products"):
            function(*given)


def test_tensors_elsewhere_are_named(device):
    """Kernels are started by bare pointers: another device's would be read all the same."""
    lhs, lhs_scale = fp8.quantize(draw(device, 4, 256))
    rhs, rhs_scale = weights(device, 2, 128, 256)
    given = [lhs, lhs_scale, rhs, rhs_scale, torch.tensor([0, 2, 4]).to(device)]
    for i, name in enumerate(
        ["lhs's scale", "lhs's scale", "rhs is on meta", "rhs_scale on meta", "offsets is on"]
    ):
        with pytest.raises(ValueError, match=name):
            fp8.grouped_gemm(*given[:i], given[i].to("meta"), *given[i + 1 :])
    given[0], given[1] = lhs.view(2, 2, 256), lhs_scale.reshape(2, 2, 2)
    given[4] = torch.ones(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="masked_m is on meta"):
        fp8.masked_grouped_gemm(*given)
    given[4] = given[4].new_ones(2, device=device)
    out = torch.empty(2, 2, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="out is on meta"):
        fp8.masked_grouped_gemm(*given, out=out)
    given = layer(device, 4, 16, 16, 128, 128)
    with pytest.raises(ValueError, match="router_logits is on meta"):
        fp8.moe(*given[:2], given[2].to("meta"), *given[3:])


def test_row_scales_of_powers_of_two(device):
    """As float32 or e8m0, in every layout."""
    x, scale, *rest = layer(device, 4, 16, 16, 128, 128)
    scale = 2.0 ** scale.log2().round()
    narrow = scale.to(torch.float8_e8m0fnu)
    found = (fp8.moe(x, which, *rest, num_groups=4, top_k=2) for which in (scale, narrow))
    assert torch.equal(*found)


def test_a_nan_scale_stays_in_its_block(device):
    lhs, lhs_scale = fp8.quantize(draw(device, 4, 256))
    rhs, rhs_scale = weights(device, 2, 256, 256)
    rhs_scale[1, 0, 1] = torch.nan
    found = fp8.grouped_gemm(lhs, lhs_scale, rhs, rhs_scale, torch.tensor([0, 2, 4]).to(device))
    assert not bool(found[:2].isnan().any())
    assert bool(found[2:, :128].isnan().all()) and not bool(found[2:, 128:].isnan().any())
