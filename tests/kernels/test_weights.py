"""FP8 weights in the grouped kernels, with activations as they are (W8A16), against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from ops import DTYPES, assert_close, gradients, in_double, in_fp8, moe, rehearses

from moe_patch import reference
from moe_patch.activation import Activation
from moe_patch.kernels import chips, dequantize
from moe_patch.kernels.decode import decodes
from moe_patch.kernels.widen import widen, widen_scale
from moe_patch.ops import fp8
from moe_patch.ops.experts import fused_experts

E8M0 = torch.float8_e8m0fnu
SIZES = [  # T, H, I, E, K: seams of gate and up inside a block and inside a tile, ragged blocks
    (9, 160, 96, 2, 2),
    (5, 136, 72, 2, 1),
    (20, 256, 128, 2, 2),
    (18, 97, 41, 1, 1),
    (12, 40, 200, 3, 1),
]
CASES = list(itertools.product(SIZES, DTYPES, (torch.float32, E8M0), ("random", "sentinel")))
ON_CPU = [
    (SIZES[0], torch.float32, torch.float32, "sentinel"),
    (SIZES[1], torch.float16, E8M0, "random"),
]
FORMS = (Activation(form="interleaved"), Activation("gelu", form="ungated"), Activation(limit=0.5))


@pytest.fixture(autouse=True)
def as_they_are(monkeypatch):
    """What ops/test_fp8.py tests is left out."""
    monkeypatch.setattr(fp8, "multiplies", lambda *_: False)


@triton.jit
def _widen_all(bits, weights, scales):
    i = tl.arange(0, 256)
    tl.store(weights + i, widen(tl.load(bits + i), weights.dtype.element_ty))
    tl.store(scales + i, widen_scale(tl.load(bits + i)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_every_byte_is_widened_exactly(device, dtype):
    """Denormals, both zeros and NaN too: all that e4m3 and e8m0 can say."""
    bits = torch.arange(256, dtype=torch.uint8)
    weights = torch.empty(256, dtype=dtype, device=device)
    scales = torch.empty(256, device=device)
    _widen_all[(1,)](bits.to(device), weights, scales)
    expected = bits.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(weights.cpu().isnan(), expected.isnan())
    assert torch.equal(weights.cpu().nan_to_num(), expected.nan_to_num())
    finite = ~expected.isnan()
    assert torch.equal(weights.cpu()[finite].signbit(), expected[finite].signbit())
    expected = bits.view(E8M0).float()
    assert torch.equal(scales.cpu().nan_to_num(), expected.nan_to_num())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "size,dtype,scale_dtype,routing",
    [*ON_CPU, *(pytest.param(*case, marks=pytest.mark.gpu) for case in CASES)],
)
def test_forward_and_input_gradients(device, size, dtype, scale_dtype, routing):
    arguments = in_fp8(moe(device, dtype, *size, routing=routing), scale_dtype)
    exact = in_double(arguments)
    out, truth = fused_experts(**arguments), reference.fused_experts(**exact)
    assert_close(out, truth, dtype, "output")
    d_out = torch.randn(out.shape, generator=torch.manual_seed(1)).to(device, dtype)
    ours = gradients(out, d_out, *arguments.values())
    true = gradients(truth, d_out, *exact.values())
    assert len(ours) == 2, "of hidden_states and top_k_weights, of nothing else"
    for name, mine, other in zip(("d_hidden_states", "d_top_k_weights"), ours, true):
        assert_close(mine, other, dtype, name)
    with torch.no_grad():
        assert_close(fused_experts(**arguments), truth, dtype, "output without gradients")


@pytest.mark.parametrize(
    "act,tokens",
    [
        (FORMS[0], 8),
        (FORMS[2], 1),
        pytest.param(FORMS[0], 1, marks=pytest.mark.gpu),
        pytest.param(FORMS[1], 1, marks=pytest.mark.gpu),
        pytest.param(FORMS[1], 8, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_other_gates_with_biases(device, act, tokens):
    """One token is decoded; eight are sorted."""
    arguments = moe(device, torch.float32, tokens, 136, 72, 4, 1, act=act, biased=True, grad=False)
    arguments = in_fp8(arguments)
    few = decodes(*map(arguments.get, ("top_k_index", "gate_up_proj", "down_proj")))
    assert few == (tokens == 1)
    truth = reference.fused_experts(**in_double(arguments), activation=act)
    assert_close(fused_experts(**arguments, activation=act), truth, torch.float32)


@pytest.mark.parametrize(
    "size,scale_dtype",
    [
        ((1, 160, 96, 2, 2), torch.float32),
        ((1, 40, 200, 2, 1), E8M0),
        pytest.param((1, 2048, 768, 16, 8), torch.float32, marks=pytest.mark.gpu),
        pytest.param((2, 1000, 200, 64, 4), E8M0, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_decoding(device, size, scale_dtype):
    arguments = in_fp8(moe(device, torch.float16, *size, grad=False), scale_dtype)
    truth = reference.fused_experts(**in_double(arguments))
    assert_close(fused_experts(**arguments), truth, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 160, 96, 2, 2), (40, 256, 72, 4, 2)], ids=str)
def test_weights_stored_the_other_way(device, size):
    """Boxes of N-major weights: gate and up are two products, with a seam between them."""
    arguments = in_fp8(moe(device, torch.bfloat16, *size, transposed=True))
    assert arguments["gate_up_proj"].stride(1) == 1
    exact = in_double(arguments)
    out, truth = fused_experts(**arguments), reference.fused_experts(**exact)
    assert_close(out, truth, torch.bfloat16)
    d_out = torch.randn_like(out)
    true = gradients(truth, d_out, *exact.values())
    for mine, other in zip(gradients(out, d_out, *arguments.values()), true):
        assert_close(mine, other, torch.bfloat16)
    with torch.no_grad():
        assert_close(fused_experts(**arguments), truth, torch.bfloat16)


@pytest.mark.gpu
def test_e4m3_and_its_bits_are_the_same(device, monkeypatch):
    """Chips that convert e4m3 and those that cannot get the same result."""
    older = chips.chip(torch.device(device))._replace(fp8=False)
    for tokens in (1, 40):
        arguments = in_fp8(moe(device, torch.bfloat16, tokens, 256, 128, 4, 2, grad=False))
        native = fused_experts(**arguments)
        with monkeypatch.context() as patched:
            patched.setattr(chips, "chip", lambda _: older)
            assert torch.equal(native, fused_experts(**arguments))


def test_low_rank_updates_join_fp8_weights(device):
    """LoRA on frozen FP8 experts: gradients of the factors and of the input."""
    arguments = in_fp8(moe(device, torch.float32, 6, 40, 24, 2, 1))
    sizes = ((2, 4, 40), (2, 48, 4)), ((2, 4, 24), (2, 40, 4))
    factors = [(torch.randn(size) * 0.1).to(device).requires_grad_() for p in sizes for size in p]
    exact = [factor.detach().double().requires_grad_() for factor in factors]
    out, truth = (
        function(**given, gate_up_low_rank=tuple(of[:2]), down_low_rank=tuple(of[2:]))
        for function, given, of in (
            (fused_experts, arguments, factors),
            (reference.fused_experts, in_double(arguments), exact),
        )
    )
    assert_close(out, truth, torch.float32)
    d_out = torch.randn(out.shape).to(device)
    for mine, other in zip(gradients(out, d_out, *factors), gradients(truth, d_out, *exact)):
        assert_close(mine, other, torch.float32)


@pytest.mark.parametrize(
    "which,tokens", [("gate_up_scale_inv", 12), ("down_scale_inv", 2)], ids=("sorted", "decode")
)
def test_nan_in_a_scale_stays_with_its_expert(device, which, tokens):
    arguments = in_fp8(moe(device, torch.float32, tokens, 40, 24, 16, 1, grad=False))
    arguments["top_k_index"] = torch.arange(tokens, device=device)[:, None] % 4
    arguments[which][1] = float("nan")
    assert decodes(arguments["top_k_index"], *[arguments["down_proj"]] * 2) == (tokens == 2)
    hit = arguments["top_k_index"][:, 0] == 1
    assert torch.equal(fused_experts(**arguments).isnan().all(1), hit)
    assert torch.equal(fused_experts(**arguments).isnan().any(1), hit)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "size,dtype,scale_dtype",
    [
        ((21, 160, 96, 4, 2), torch.float32, torch.float32),
        ((21, 136, 72, 3, 1), torch.float16, E8M0),
        pytest.param((700, 256, 128, 8, 2), torch.bfloat16, torch.float32, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_backward_of_a_few_experts_at_a_time(device, size, dtype, scale_dtype, monkeypatch):
    """As where each has hundreds of rows."""
    _, hidden, inner, experts, _ = size
    monkeypatch.setattr(dequantize, "ROWS", 1)
    monkeypatch.setattr(dequantize, "ROWS_ON_HOPPER", 1)
    monkeypatch.setattr(dequantize, "BYTES", 2 * hidden * inner * dtype.itemsize)
    widened, original = [], dequantize.dequantize

    def recording(weight, scale, out):
        if not rehearses():
            widened.append(len(weight))
        return original(weight, scale, out)

    monkeypatch.setattr(dequantize, "dequantize", recording)
    arguments = in_fp8(moe(device, dtype, *size, routing="sentinel"), scale_dtype)
    exact = in_double(arguments)
    out, truth = fused_experts(**arguments), reference.fused_experts(**exact)
    d_out = torch.randn(out.shape, generator=torch.manual_seed(1)).to(device, dtype)
    ours = gradients(out, d_out, *arguments.values())
    for mine, other in zip(ours, gradients(truth, d_out, *exact.values()), strict=True):
        assert_close(mine, other, dtype)
    assert sum(widened) == 2 * experts and len(widened) > experts + 1


@pytest.mark.gpu
def test_nothing_of_the_weights_size_is_made(device):
    """Backward included: the peak stays far below one dequantised expert stack."""
    arguments = in_fp8(moe(device, torch.bfloat16, 64, 512, 256, 64, 1))
    fused_experts(**arguments).sum().backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_experts(**arguments).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < arguments["down_proj"].numel() / 8


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"gate_up_scale_inv": None}, ValueError, "no scales: pass gate_up_scale_inv"),
        ({"down_scale_inv": None}, ValueError, "no scales: pass down_scale_inv"),
        ({"gate_up_scale_inv": lambda s: s[:, :1]}, ValueError, r"must be \[2, 2, 2\], one scale"),
        ({"down_scale_inv": lambda s: s.mT[:, None]}, ValueError, r"must be \[2, 2, 1\]"),
        ({"down_scale_inv": lambda s: s.half()}, TypeError, "is torch.float16: float32 or"),
        ({"down_proj": lambda w: w.float()}, TypeError, "with down_scale_inv it must be"),
        ({"down_proj": lambda w: w.view(torch.uint8)}, TypeError, "is torch.uint8: with down"),
        ({"gate_up_proj": lambda w: w.requires_grad_()}, ValueError, "FP8 weights are frozen"),
        ({"down_scale_inv": lambda s: s.requires_grad_()}, ValueError, "pass down_scale_inv.det"),
        ({"hidden_states": lambda x: x.to(torch.float8_e4m3fn)}, TypeError, "must be bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(device, change, error, says):
    arguments = in_fp8(moe(device, torch.float32, 3, 136, 80, 2, 1))
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(error, match=says) as caught:
        fused_experts(**arguments)
    assert str(caught.value).count("\n") == 0


def test_compiler_is_told_the_shapes_that_come(device):
    from moe_patch.ops.experts import _experts_inference
    from moe_patch.ops.operands import Inputs, Projection

    arguments = in_fp8(moe(device, torch.float32, 3, 40, 24, 2, 1, grad=False))
    x, gate_up, down, index, weights = (arguments[name] for name in list(arguments)[:5])
    gate_up = Projection(gate_up, scale=arguments["gate_up_scale_inv"])
    down = Projection(down, scale=arguments["down_scale_inv"])
    options = (*Inputs(x, weights, gate_up, down).flat(), index, False, "silu")
    assert _experts_inference(*options).shape == (3, 40)
    op = torch.ops.moe_patch.experts_inference.default
    torch.library.opcheck(op, options, test_utils="test_faketensor")
