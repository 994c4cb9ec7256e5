"""Layouts of checkpoints: each is written bit by bit here, and read back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layouts import awq, compressed, gptq
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_patch.formats.checkpoints import (
    concat,
    drop_zeros,
    from_awq,
    from_compressed_tensors,
    from_gpt_oss,
    from_gptq,
    to_gpt_oss,
)
from moe_patch.formats.packed import check_packed, dequantize, quantize, unpack

N, K = 24, 256
groups = pytest.mark.parametrize("group", [32, 64, 128])


def some(group, n=N, dtype=torch.float16):
    """(codes [n][K], zeros [n][K / group], scales [n, K / group])."""
    codes = torch.randint(0, 16, (n, K)).tolist()
    zeros = torch.randint(1, 16, (n, K // group)).tolist()
    return codes, zeros, torch.rand(n, K // group).to(dtype)


def same(packed, codes, zeros, scales):
    """Codes and scales are those, bit by bit, and weights are (code - zero) * scale."""
    n = len(codes)
    check_packed("w", packed)
    assert packed.format == "int4" and packed.shape == (1, n, K)
    assert unpack(packed.codes)[0].tolist() == codes
    assert torch.equal(packed.scales[0], scales)
    assert (packed.zeros is None) is (zeros is None)
    assert zeros is None or packed.zeros[0].tolist() == zeros
    assert packed.codes.is_contiguous() and packed.scales.is_contiguous()
    group = K // scales.shape[1]
    zero = [[8] * scales.shape[1]] * n if zeros is None else zeros
    truth = [
        [(codes[i][k] - zero[i][k // group]) * float(scales[i][k // group]) for k in range(K)]
        for i in range(n)
    ]
    assert torch.equal(dequantize(packed, torch.float64)[0], torch.tensor(truth).double())


def random_gpt_oss(low=0, high=256):
    blocks = torch.randint(0, 256, (3, N, K // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, (3, N, K // 32), dtype=torch.uint8)


def test_gpt_oss_there_and_back_has_the_same_bits():
    blocks, scales = random_gpt_oss()
    packed = from_gpt_oss("gate_up_proj", blocks, scales)
    assert packed.shape == (3, N, K) and packed.codes.data_ptr() == blocks.data_ptr()
    for after, before in zip(to_gpt_oss(packed), (blocks, scales)):
        assert after.dtype == before.dtype and torch.equal(after, before)
    low = blocks[1, 2, 3, 4].item() & 15
    assert unpack(packed.codes)[1, 2, 3 * 32 + 2 * 4].item() == low


def test_gpt_oss_is_what_transformers_unpacks():
    blocks, scales = random_gpt_oss(low=3, high=252)  # it is exact where bfloat16 is normal
    theirs = convert_moe_packed_tensors(blocks, scales).mT
    ours = dequantize(from_gpt_oss("gate_up_proj", blocks, scales), torch.bfloat16)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit())


@groups
@pytest.mark.parametrize("checkpoint_format, less", [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(group, checkpoint_format, less):
    codes, zeros, scales = some(group)
    tensors = gptq(codes, zeros, scales, less)
    same(from_gptq("w", tensors, checkpoint_format), codes, zeros, scales)
    del tensors["g_idx"]
    same(from_gptq("w", tensors, checkpoint_format), codes, zeros, scales)


def test_a_zero_point_of_zero_borrows_in_gptq_and_not_in_gptq_v2():
    codes, zeros, scales = some(64)
    zeros = [[(i + g) % 16 for g in range(K // 64)] for i in range(N)]
    tensors = gptq(codes, zeros, scales, less=0)
    same(from_gptq("w", tensors, "gptq_v2"), codes, zeros, scales)
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111  # as GPTQModel writes "gptq"
    same(from_gptq("w", tensors, "gptq"), codes, zeros, scales)


@groups
def test_awq(group):
    codes, zeros, scales = some(group)
    same(from_awq("w", awq(codes, zeros, scales)), codes, zeros, scales)


@groups
@pytest.mark.parametrize("n", [24, 27])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(group, n, symmetric):
    codes, zeros, scales = some(group, n, torch.bfloat16)
    zeros = None if symmetric else zeros
    tensors = compressed(codes, zeros, scales)
    same(from_compressed_tensors("w", tensors), codes, zeros, scales)
    index = torch.arange(K, dtype=torch.int32) // group
    same(from_compressed_tensors("w", tensors | {"weight_g_idx": index}), codes, zeros, scales)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_own_compressor(symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, symmetric=symmetric, group_size=64, strategy="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(27, K)
    parts = weight.unflatten(-1, (-1, 64))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    saved = PackedQuantizationCompressor.compress(state, scheme)
    packed = from_compressed_tensors("w", saved)
    theirs = PackedQuantizationCompressor.decompress(saved, scheme)["weight"]
    assert torch.equal(dequantize(packed)[0], theirs)
    ours = quantize(weight[None], "int4", 64, scale_dtype=torch.float32, zeros=not symmetric)
    assert torch.equal(packed.codes, ours.codes) and torch.equal(packed.scales, ours.scales)


def test_larger_groups_repeat_their_scales():
    codes, zeros, scales = some(K)
    for packed in (
        from_gptq("w", gptq(codes, zeros, scales)),
        from_awq("w", awq(codes, zeros, scales)),
        from_compressed_tensors("w", compressed(codes, zeros, scales)),
    ):
        assert packed.group == 128
        repeated = [[zero for zero in row for _ in range(2)] for row in zeros]
        same(packed, codes, repeated, scales.repeat_interleave(2, -1))


def test_experts_and_rows_are_joined():
    weight = torch.randn(3, 8, K)
    for name in ("nf4", "mxfp4", "int4"):
        whole = quantize(weight, name)
        experts = concat([quantize(one[None], name) for one in weight])
        rows = concat([quantize(weight[:, :3], name), quantize(weight[:, 3:], name)], dim=1)
        for packed in (experts, rows):
            assert torch.equal(packed.codes, whole.codes) and packed.zeros is None
            assert torch.equal(dequantize(packed), dequantize(whole))


def test_zero_points_are_joined_with_none_and_dropped_where_all_are_eight():
    weight = torch.randn(2, 8, K)
    with_zeros, without = quantize(weight, "int4", zeros=True), quantize(weight, "int4")
    joined = concat([with_zeros, without])
    assert torch.equal(joined.zeros[:2], with_zeros.zeros) and (joined.zeros[2:] == 8).all()
    assert torch.equal(dequantize(joined)[2:], dequantize(without))
    assert drop_zeros(joined) is joined and drop_zeros(without) is without
    eights = dataclasses.replace(without, zeros=torch.full_like(with_zeros.zeros, 8))
    assert drop_zeros(eights).zeros is None
    assert torch.equal(dequantize(drop_zeros(eights)), dequantize(eights))


def change(function, **changes):
    codes, zeros, scales = some(64)
    tensors = {from_gptq: gptq, from_awq: awq, from_compressed_tensors: compressed}[function](
        codes, zeros, scales
    )
    tensors = {which: tensor for which, tensor in (tensors | changes).items() if tensor is not None}
    return lambda: function("w1", tensors)


BLOCKS, SCALES = torch.zeros(2, 4, 2, 16, dtype=torch.uint8), torch.zeros(2, 4, 2).byte()
ONE = torch.ones(1)
MIXED = [quantize(torch.ones(1, 2, 128), name) for name in ("nf4", "int4")]


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: from_gpt_oss("w1", BLOCKS.int(), SCALES), TypeError, "^w1_blocks is torch.int32"),
        (lambda: from_gpt_oss("w1", BLOCKS, None), ValueError, "^w1 has no w1_scales: load them"),
        (lambda: from_gpt_oss("w1", BLOCKS, SCALES.float()), TypeError, "^w1_scales is torch.flo"),
        (
            lambda: from_gpt_oss("w1", BLOCKS[..., :8], SCALES), ValueError,
            r"^w1_blocks must be \[E, N, K / 32, 16\], found \[2, 4, 2, 8\]",
        ),
        (lambda: from_gpt_oss("w1", BLOCKS, SCALES[:1]), ValueError, r"must be \[2, 4, 2\] for"),
        (lambda: to_gpt_oss(MIXED[0]), ValueError, "^the format is nf4: gpt-oss stores mxfp4"),
        (
            lambda: from_gptq("w1", {}, "marlin"), ValueError,
            "^w1 has the checkpoint_format 'marlin': save it as gptq or gptq_v2",
        ),
        (change(from_gptq, scales=None), ValueError, "^w1 has no scales, found qweight, qzeros, g"),
        (change(from_gptq, qzeros=None), ValueError, "^w1 has no qzeros, found"),
        (change(from_gptq, qweight=torch.ones(32, N)), TypeError, "^w1.qweight is torch.float32"),
        (
            change(from_gptq, g_idx=torch.randperm(K)), ValueError,
            r"^the g_idx of w1 is not k // 64 for K = 256: quantise without act-order",
        ),
        (
            change(from_gptq, qzeros=torch.zeros(4, N // 4, dtype=torch.int32)), ValueError,
            r"^the zero points of w1 unpack to \[48, 4\] and its scales are \[24, 4\]: only 4-bit",
        ),
        (change(from_gptq, scales=torch.ones(4, N).double()), TypeError, "w1 are torch.float64"),
        (change(from_gptq, scales=torch.ones(4)), ValueError, "^w1 must have .* of 2 dims, found"),
        (change(from_gptq, weight_global_scale=ONE), ValueError, "so it is NVFP4"),
        (change(from_awq, scales=None), ValueError, "^w1 has no scales, found qweight, qzeros:"),
        (change(from_awq, qzeros=torch.ones(4, 3)), TypeError, "^w1.qzeros is torch.float32"),
        (change(from_awq, weight_global_scale=ONE), ValueError, "so it is NVFP4"),
        (
            change(from_awq, qweight=torch.zeros(K, N // 4, dtype=torch.int32)), ValueError,
            r"^the scales of w1 must be .* for weights \[1, 48, 256\]",
        ),
        (
            change(from_compressed_tensors, weight_global_scale=ONE), ValueError,
            "^w1 has a weight_global_scale, so it is NVFP4, which is not supported: load a",
        ),
        (
            change(from_compressed_tensors, weight_scale=None), ValueError,
            "^w1 has no weight_scale, found weight_packed, weight_shape, weight_zero_point",
        ),
        (
            change(from_compressed_tensors, weight_shape=torch.tensor([N, K // 2])), ValueError,
            r"^w1.weight_packed of weights \[24, 128\] must be \[24, 16\] .* found \[24, 32\]",
        ),
        (
            change(from_compressed_tensors, weight_zero_point=torch.ones(3, 4)), TypeError,
            "^w1.weight_zero_point is torch.float32: torch.int32 is needed",
        ),
        (
            change(from_compressed_tensors, weight_g_idx=torch.randperm(K)), ValueError,
            "quantise without act-order",
        ),
        (lambda: concat(MIXED), ValueError, "found int4 by 128 .* and nf4 by 64 .*: convert them"),
        (lambda: concat([]), ValueError, "^one stack has one format, found nothing"),
        (lambda: concat([MIXED[0].mT]), ValueError, "^stack 0 is turned: pass weights"),
        (
            lambda: to_gpt_oss(quantize(torch.ones(1, 4, 32), "mxfp4").mT), ValueError,
            "^the stack is turned: pass weights",
        ),
        (lambda: concat(MIXED[:1], dim=2), ValueError, "^dim is 2: pass 0 to join experts or 1"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_refusals(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
