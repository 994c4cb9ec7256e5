"""Expert ids of any integer: training and inference drop those outside 0 .. E-1, and no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import assert_close, gradients, in_double, moe

from moe_patch import reference
from moe_patch.ops import fp8
from moe_patch.ops.experts import fused_experts
from moe_patch.ops.grouped import add_bias, expert_order, grouped_gemm

EXPERTS = 6
SMALL, LARGE = -(2**63), 2**63 - 1
ids = st.one_of(
    st.integers(0, EXPERTS - 1),
    st.integers(-1, EXPERTS),
    # whose low 32, 16 or 8 bits are an expert's
    st.builds(
        lambda low, high, bits: max(SMALL, min(LARGE, low + (high << bits))),
        st.integers(0, EXPERTS - 1), st.integers(-(2**31), 2**31 - 1), st.sampled_from((8, 16, 32)),
    ),
    st.integers(SMALL, LARGE),
    st.just(SMALL), st.just(LARGE),
)  # fmt: skip
tables = st.integers(1, 9).flatmap(
    lambda tokens: st.lists(st.lists(ids, min_size=2, max_size=2), min_size=tokens, max_size=tokens)
)


def known(index: torch.Tensor) -> torch.Tensor:
    """The same choice with -1 for what is to be dropped, in ids that fit any integer dtype."""
    return index.masked_fill((index < 0) | (index >= EXPERTS), -1)


@settings(max_examples=15)
@given(table=tables)
def test_training_and_inference_agree(device, table):
    index = torch.tensor(table, device=device)
    arguments = moe(device, torch.float32, len(table), 32, 16, EXPERTS, 2)
    arguments["top_k_index"] = index
    truth = in_double(arguments | {"top_k_index": known(index)})
    exact = reference.fused_experts(**truth)
    out = fused_experts(**arguments)
    with torch.no_grad():
        inferred = fused_experts(**arguments)
        one = [
            fused_experts(**arguments | {
                name: arguments[name][i : i + 1]
                for name in ("hidden_states", "top_k_index", "top_k_weights")
            })
            for i in range(len(table))
        ]  # fmt: skip
    for name, each in {"training": out, "inference": inferred, "decoding": torch.cat(one)}.items():
        assert torch.equal(each.any(1), exact.any(1)), name
        if exact.any():
            assert_close(each, exact, torch.float32, name)
    d_out = torch.randn_like(out)
    found = gradients(out, d_out, *arguments.values())
    for mine, expected in zip(found, gradients(exact, d_out.double(), *truth.values())):
        if expected.any():
            assert_close(mine, expected, torch.float32)
        else:
            assert not mine.any()


@settings(max_examples=20)
@given(table=tables)
def test_orders_products_and_biases_agree(device, table):
    index = torch.tensor(table, device=device)
    weight, bias = torch.randn(EXPERTS, 16, 32), torch.randn(EXPERTS, 16)
    x, weight, bias = torch.randn(len(table), 32).to(device), weight.to(device), bias.to(device)
    results = []
    for each in (index, known(index)):
        order = expert_order(each, EXPERTS, torch.float32)
        rows = grouped_gemm(x, weight, order, gather=True)
        kept = order.expert_offsets[-1]
        biased = add_bias(rows, bias, each, order)[:kept]
        results.append((*order.tensors()[:3], rows, biased))
        for ours, twin in zip(
            order.tensors()[:3], reference.sort_tokens(each, EXPERTS, order.block_m).tensors()
        ):
            assert torch.equal(ours, twin)
    for ours, same in zip(*results):
        assert torch.equal(ours, same)


@pytest.mark.gpu
def test_many_blocks_of_wide_ids():
    """Past what one program sorts."""
    index = torch.randint(SMALL, LARGE, (4000, 8), device="cuda") >> 32 << 32
    index += torch.randint(0, EXPERTS, index.shape, device="cuda")
    index[::3] &= 7
    ours = expert_order(index, EXPERTS, torch.bfloat16)
    twin = reference.sort_tokens(known(index), EXPERTS, ours.block_m)
    for mine, expected in zip(ours.tensors()[:3], twin.tensors()):
        assert torch.equal(mine, expected)


def test_fp8_layers_drop_them(device):
    if not fp8.kernels.fp8_gemm.runs(device):
        pytest.skip("no FP8 products here")
    index = torch.tensor([[2**32 + 1, 0], [SMALL, SMALL + 2], [3, -(2**32)]], device=device)
    gate_up, gate_up_scale = reference.quantize_weight(torch.randn(EXPERTS, 256, 128))
    down, down_scale = reference.quantize_weight(torch.randn(EXPERTS, 128, 128))
    tensors = [t.to(device) for t in (gate_up, down, gate_up_scale, down_scale)]
    x, weights = torch.randn(3, 128, device=device), torch.rand(3, 2, device=device)
    x, scales = x.to(torch.bfloat16), tensors[2:]
    found = [fp8.experts(x, *tensors[:2], each, weights, *scales) for each in (index, known(index))]
    assert torch.equal(*found) and not found[0][1].any()
