"""The rules by themselves, on tensors whose errors are known."""

from __future__ import annotations

import math

import pytest
import torch

from moe_patch.parity import law
from moe_patch.parity.law import judge, measure, measure_unused

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = [40, 0, 3, 21]


def rounded(truth, dtype, *, rounds):
    """The truth after `rounds` roundings to dtype, as a chain of kernels would leave it."""
    z = truth
    for i in range(rounds):
        z = (z * (1 + 0.1 * i)).to(dtype).double() / (1 + 0.1 * i)
    return z.to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def case(request):
    """(ours, Hugging Face's, truth, dtype): one rounding against three."""
    truth = torch.randn(4, 32, 48, dtype=torch.float64)
    dtype = request.param
    return rounded(truth, dtype, rounds=1), rounded(truth, dtype, rounds=3), truth, dtype


def test_honest_result_passes(case):
    ours, hf, truth, _ = case
    row = judge("output", ours, [hf, hf], truth, x_rms=1.0)
    assert row.passed, row
    assert 0 < row.ratio < 1 and row.our_rms < row.hf_rms


def test_result_as_good_as_hugging_faces_passes(case):
    _, hf, truth, _ = case
    assert judge("output", hf, [hf], truth, x_rms=1.0).passed


def test_the_worse_baseline_counts(case):
    better, worse, truth, dtype = case
    row = judge("output", worse, [better, worse], truth)
    assert row.passed and row.ratio == 1
    assert judge("output", worse, [better], truth, dtype=torch.float32).ratio > 1.4
    if dtype != torch.float32:
        assert not judge("output", worse, [better], truth).passed


def zeros(z):
    return torch.zeros_like(z)


def scaled(z):
    return (z.double() * 0.99).to(z.dtype)


def dropped_row(z):
    z = z.clone()
    z[1, 5] = 0
    return z


def wrong_row(z):
    z = z.clone()
    z[2, 7] = z[2, 8]
    return z


def off_by_one_rms(z):
    z = z.clone()
    z[3, 4, 5] += z.double().square().mean().sqrt().to(z.dtype)
    return z


def one_nan(z):
    z = z.clone()
    z[0, 1, 2] = math.nan
    return z


def one_inf(z):
    z = z.clone()
    z[0, 1, 2] = math.inf
    return z


@pytest.mark.parametrize(
    "mutant", [zeros, scaled, dropped_row, wrong_row, off_by_one_rms, one_nan, one_inf]
)
def test_mutant_fails(case, mutant):
    ours, hf, truth, _ = case
    row = judge("output", mutant(ours), [hf, hf], truth, x_rms=1.0)
    assert not row.passed and row.note


def test_mutant_of_one_element_is_named(case):
    ours, hf, truth, _ = case
    for mutant, where in ((off_by_one_rms, "[3, 4, 5]"), (one_nan, "[0, 1, 2]")):
        assert where in judge("output", mutant(ours), [hf], truth).note


def test_same_infinities_pass_and_others_do_not():
    truth = torch.randn(64, dtype=torch.float64)
    truth[3] = 1e6  # beyond float16
    ours, hf = rounded(truth, torch.float16, rounds=1), rounded(truth, torch.float16, rounds=3)
    assert hf[3] == math.inf
    assert judge("output", ours, [hf], truth).passed
    for other in (6e4, -math.inf, math.nan):
        ours[3] = other
        row = judge("output", ours, [hf], truth)
        assert not row.passed and "[3]" in row.note
        assert judge("output", ours, [hf, ours], truth).passed, "one of HF's ways has it too"


def test_insane_baseline_is_no_excuse(case):
    ours, hf, truth, dtype = case
    far = 2000 if dtype == torch.float32 else 20  # float32 gradients that cancel lose digits
    off = (hf.double() * (1 + far * torch.finfo(dtype).eps)).to(dtype)
    row = judge("output", ours, [off], truth)
    assert not row.passed
    assert f"HF's own error is {row.hf_rms:.1e}: nothing to judge by" in row.note


def test_dead_output_fails(case):
    ours, hf, truth, _ = case
    row = judge("output", ours, [hf], truth, x_rms=200.0)
    assert not row.passed and "dead output" in row.note
    nothing = torch.zeros_like(truth)
    assert not judge("output", zeros(ours), [zeros(hf)], nothing, x_rms=1.0).passed


def test_experts_are_judged_apart(case):
    _, hf, truth, dtype = case
    ours, hf, truth = hf.clone(), hf.clone(), truth.clone()
    truth[1], ours[1], hf[1] = 0, 0, 0
    assert judge("dw", ours, [hf], truth, counts=COUNTS).passed
    small = truth.clone()
    small[3] *= 1e-3  # drowns in the whole tensor, not in its expert
    ours, hf = (z.clone() for z in (ours, hf))
    ours[3], hf[3] = ours[3] * 1e-3, hf[3] * 1e-3
    ours[3] *= 1 - 10 * torch.finfo(dtype).eps
    row = judge("dw", ours, [hf], small, counts=COUNTS)
    assert not row.passed and "expert 3 (21 tokens)" in row.note
    assert judge("dw", ours, [hf], small).passed


def test_expert_with_few_tokens_is_not_judged_apart(case):
    ours, hf, truth, dtype = case
    ours, hf, truth = (z.clone() for z in (ours, hf, truth))
    for z in (ours, hf, truth):
        z[1] = 0
        z[2] *= 1e-3
    ours[2] *= 1 - 10 * torch.finfo(dtype).eps
    assert judge("dw", ours, [hf], truth, counts=COUNTS).passed


@pytest.mark.parametrize("value", [1e-30, math.nan])
def test_unused_expert_has_a_gradient_of_exactly_zero(case, value):
    ours, hf, truth, dtype = case
    ours, hf, truth = (z.clone() for z in (ours, hf, truth))
    truth[1], ours[1], hf[1] = 0, 0, math.nan  # what HF leaves there is not looked at
    assert judge("dw", ours, [hf], truth, counts=COUNTS).passed
    ours[1, 2, 3] = max(value, torch.finfo(dtype).tiny) if value == value else value
    row = judge("dw", ours, [hf], truth, counts=COUNTS)
    assert not row.passed and "expert 1 has no token" in row.note and "[1, 2, 3]" in row.note


def test_float32_gets_a_factor_of_two():
    truth = torch.randn(4096, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    noise = eps * torch.randn(4096, dtype=torch.float64)
    hf = truth + noise
    for factor, passed in ((1.9, True), (2.3, False)):
        ours = truth + factor * noise
        assert judge("output", ours, [hf], truth, dtype=torch.float32).passed is passed
    eps = torch.finfo(torch.bfloat16).eps
    hf, ours = truth + noise / 1e-7 * eps, truth + 1.9 * noise / 1e-7 * eps
    assert not judge("output", ours, [hf], truth, dtype=torch.bfloat16).passed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_allowed_where_hugging_face_is_exact(dtype):
    """An eighth of an eps of the truth's rms, which is 2 here, and an eps of its largest."""
    truth = 2 * torch.ones(512, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    exact = judge("output", truth, [truth], truth, dtype=dtype)
    assert exact.passed and exact.ratio == 1 and exact.our_rms == exact.our_max == 0
    for share, passed in ((0.12, True), (0.13, False)):
        row = judge("output", truth * (1 + share * eps), [truth], truth, dtype=dtype)
        assert row.passed is passed and ("rms error inf x HF's" in row.note) is not passed
        assert row.our_rms == pytest.approx(share * eps) == row.our_max
        assert row.hf_rms == row.hf_max == 0 and row.ratio is None
    for share, passed in ((0.99, True), (1.01, False)):
        ours = truth.clone()
        ours[7] *= 1 + share * eps
        row = judge("output", ours, [truth], truth, dtype=dtype)
        assert row.passed is passed and ("largest error inf x HF's" in row.note) is not passed


@pytest.mark.parametrize("numbers", [16, 127, 128, 129])
def test_fewer_numbers_widen_both_factors(numbers):
    truth = torch.ones(numbers, dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    error, wider = 7 * eps, (128 / min(numbers, 128)) ** 0.75

    def judged(ours):
        return judge("output", truth + ours, [truth + error], truth, dtype=torch.bfloat16)

    limit = wider + 1 / (8 * 7)
    assert judged(truth * error * limit * 0.999).passed
    assert "rms error" in judged(truth * error * limit * 1.001).note
    one = torch.zeros_like(truth)
    one[-1] = error * (1.5 * wider + 1 / 7)
    assert judged(one * 0.999).passed
    row = judged(one * 1.001)
    assert not row.passed and row.note.startswith("largest error")
    assert row.note.endswith(f"at [{numbers - 1}]")


def test_parts_add_up_to_the_whole(case):
    ours, hf, truth, dtype = case
    whole = measure(ours, [hf], truth)
    parts = [measure(ours[i], [hf[i]], truth[i], at=(i,)) for i in range(4)]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert total.count == whole.count and total.largest == whole.largest
    assert total.largest_at == whole.largest_at
    assert total.square == pytest.approx(whole.square)
    with_unused = total + measure_unused(torch.zeros(3), 1)
    assert with_unused.count == whole.count and with_unused.stray is None
    assert (measure_unused(torch.ones(3), 1) + total).stray == (1, 0)


def test_wrong_shape_fails(case):
    ours, hf, truth, _ = case
    row = judge("output", ours[:3], [hf], truth)
    assert not row.passed and "[3, 32, 48]" in row.note


def test_first_names_the_first():
    mask = torch.zeros(3, 4, dtype=torch.bool)
    assert law.first(mask) is None
    mask[1, 2] = mask[2, 0] = True
    assert law.first(mask, (7,)) == (7, 1, 2)


def test_effective_numbers():
    assert law.effective(torch.ones(50)) == pytest.approx(50)
    assert law.effective(torch.tensor([1.0, 0.0, -1.0])) == pytest.approx(2)
    assert law.effective(torch.zeros(3)) == math.inf
    gaussian = torch.randn(30000, generator=torch.Generator().manual_seed(0))
    assert law.effective(gaussian) == pytest.approx(10000, rel=0.1)
