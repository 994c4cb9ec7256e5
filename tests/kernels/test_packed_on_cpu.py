"""Products with weights in 4 bits, `hopper/packed.py`, on a CPU: what `gluon_on_cpu` says of it."""

from __future__ import annotations

import random
from dataclasses import replace

import ptx_on_cpu
import pytest
import torch
from gluon_on_cpu import on_cpu

from moe_patch import reference
from moe_patch.formats.packed import dequantize, quantize
from moe_patch.kernels import chips, gate_up, grouped_gemm, packed_products, pairs, tiles
from moe_patch.kernels.in_steps import in_steps
from moe_patch.kernels.low_rank import LowRank
from moe_patch.ops.experts import fused_experts
from moe_patch.ops.grouped import sort

pytestmark = pytest.mark.skipif(not tiles.INTERPRET, reason="is for machines without a GPU")
HOWS = (
    ("nf4", {}),
    ("nf4", {"group": 128, "scale_dtype": torch.bfloat16}),
    ("nf4", {"group": 32}),
    ("mxfp4", {}),
    ("int4", {}),
    ("int4", {"group": 32, "zeros": True}),
    ("int4", {"group": 64, "scale_dtype": torch.float16, "zeros": True}),
    ("int4", {"scale_dtype": torch.float32}),
)
ACTIVATIONS = "silu", "silu 7.0 1.702 1.0 interleaved"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    ptx_on_cpu.known()
    monkeypatch.setattr(packed_products, "_runs_on", lambda device: True)
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 3)


def drawn(seed, heights=(16, 32, 64, 128)):
    """(draw, order, x [T, K], weights [E, N, K] dense and packed, slots' rows and experts)."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    format, options = HOWS[seed % len(HOWS)]
    experts, top_k, tokens = draw.randint(1, 3), draw.choice((1, 2)), draw.choice((1, 20, 90))
    index = (torch.rand(tokens, top_k) ** draw.choice((1, 3)) * experts).long()
    if draw.random() < 0.3:  # most experts have no rows
        index, experts = torch.tensor(draw.sample(range(9), experts))[index], 9
    if draw.random() < 0.4:
        index[torch.rand(tokens, top_k) < 0.2] = experts  # dropped
    order, _ = sort(index, experts, torch.bfloat16, draw.choice(heights))
    used = int(order.expert_offsets[-1])
    slot = order.row_to_slot[:used].long()
    group = options.get("group", {"nf4": 64, "mxfp4": 32, "int4": 128}[format])
    k = draw.choice((256, 384, group * (2 * 128 // group + 1), 128 * 4 + group))
    n = 2 * draw.choice((64, 128, 80) if order.block_m >= 64 else (64, 128, 5, 75))
    weight = quantize(torch.randn(experts, n, k).bfloat16() * 0.1, format, **options)
    x = torch.randn(tokens, k).bfloat16()
    return draw, order, x, weight, slot, index.flatten()[slot]


def product(x, weight, expert):
    wide = dequantize(weight, torch.float64)
    rows = torch.empty(len(x), wide.shape[1], dtype=torch.float64)
    for e in range(len(wide)):
        rows[expert == e] = x[expert == e].double() @ wide[e].T
    return rows


def close(found, truth):
    """Errors of a few roundings to bfloat16."""
    error = found.double() - truth
    return not found.numel() or bool(error.norm() <= 8e-3 * truth.norm())


@pytest.mark.parametrize("seed", range(16))
def test_gemm(seed):
    draw, order, x, weight, slot, expert = drawn(seed)
    rows = torch.randn(len(order.row_to_slot), x.shape[1]).bfloat16()
    out = torch.full((len(rows), weight.shape[1]), 7.0, dtype=torch.bfloat16)
    bias = torch.randn(len(weight), weight.shape[1]).bfloat16() if draw.random() < 0.5 else None
    assert packed_products.supported(weight, order, torch.bfloat16)
    with on_cpu(seed) as names:
        grouped_gemm.grouped_gemm(rows, weight, order, out=out, bias=bias)
    assert len(names) == 1 and names[0].startswith("gemm_")
    truth = product(rows[: len(slot)], weight, expert)
    if bias is not None:
        truth += bias.double()[expert]
    assert close(out[: len(slot)], truth) and bool((out[len(slot) :] == 7).all())


@pytest.mark.parametrize("seed", range(16))
def test_gate_up(seed):
    draw, order, x, weight, slot, expert = drawn(100 + seed)
    tokens, top_k = len(x), len(order.row_to_slot) // len(x)
    bias = draw.choice((None, torch.randn(len(weight), weight.shape[1]).bfloat16()))
    activation = draw.choice(ACTIVATIONS)
    by, on_input = torch.rand(tokens, top_k).bfloat16(), draw.random() < 0.3
    how = {"weight_on_input": on_input, "bias": bias, "activation": activation}
    with on_cpu(seed) as names:
        act, pre = gate_up.gate_up(x, weight, order, by, save_pre=True, **how)
        stepped, _ = gate_up.gate_up(x, weight, order, by, save_pre=False, act_in_steps=True, **how)
        both, kept = gate_up.gate_up(x, weight, order, by, save_pre=True, act_in_steps=True, **how)
    assert len(names) == 3 and all(name.startswith("gate_up_") for name in names)
    steps = packed_products.steps_of(weight, order, activation)
    assert torch.equal(stepped[: len(slot)], in_steps(act, steps)[: len(slot)])
    assert torch.equal(both[: len(slot)], stepped[: len(slot)])
    assert torch.equal(kept[: len(slot)], pre[: len(slot)])
    truth = product(x[slot // top_k], weight, expert)
    if bias is not None:
        truth += bias.double()[expert]
    assert close(pre[: len(slot)], truth)
    if on_input:
        truth *= by.flatten()[slot, None].double()
    assert close(act[: len(slot)], reference.glu(truth, activation))


@pytest.mark.parametrize("seed", range(6))
def test_short_tiles_of_one_program(monkeypatch, seed):
    """A box that is on its way to memory is not written to, though each tile has one alone; past
    the last column an activation in steps is zero, whatever it makes of zeros."""
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 1)
    torch.manual_seed(seed)
    order, _ = sort(torch.arange(4).repeat(20)[:, None], 4, torch.bfloat16, 64)
    weight = quantize(torch.randn(4, 2 * 304, 256).bfloat16() * 0.1, *HOWS[seed][:1])
    x, by = torch.randn(80, 256).bfloat16(), torch.rand(80, 1).bfloat16()
    how = {"weight_on_input": False, "activation": "silu 7.0 1.702 1.0 concatenated"}
    with on_cpu(seed) as names:
        act, _ = gate_up.gate_up(x, weight, order, by, save_pre=False, **how)
        stepped, _ = gate_up.gate_up(x, weight, order, by, save_pre=False, act_in_steps=True, **how)
    assert names == ["gate_up_packed_roles_kernel"] * 2
    slot, expert = order.row_to_slot.long(), torch.arange(4).repeat_interleave(20)
    assert close(act, reference.glu(product(x[slot], weight, expert), how["activation"]))
    assert torch.equal(stepped, in_steps(act, packed_products.steps_of(weight, order)))


@pytest.mark.parametrize("seed", range(12))
def test_updates(monkeypatch, seed):
    """Tiles follow one another in one program. The small product, which is another kernel's, has
    been computed before; what it would be given is looked at."""
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 1)
    draw, order, x, weight, slot, expert = drawn(200 + seed, (64, 128))
    small = []
    monkeypatch.setattr(gate_up, "multiply_a", lambda *_: None)
    monkeypatch.setattr(grouped_gemm, "multiply_a", lambda x, by, _: small.append((x, by.a)))
    (experts, n, k), rank = weight.shape, (8, 136, 64, 72, 16)[seed % 5]
    slots, top_k = len(order.row_to_slot), len(order.row_to_slot) // len(x)
    side, begin = torch.randn(slots, rank).bfloat16(), draw.choice((0, 0, 1))
    b = (torch.randn(experts * n * rank + 1).bfloat16() * 0.1)[begin:][: experts * n * rank]
    b = b.view(experts, n, rank)  # perhaps between 16 bytes
    update = LowRank(torch.randn(experts, rank, k).bfloat16(), b, side)
    bias = draw.choice((None, torch.randn(experts, n).bfloat16()))
    rows = torch.randn(slots, k).bfloat16()
    out = torch.full((slots, n), 7.0, dtype=torch.bfloat16)
    by, activation = torch.rand(len(x), top_k).bfloat16(), draw.choice(ACTIVATIONS)
    how = {"weight_on_input": False, "bias": bias, "activation": activation, "low_rank": update}
    steps = packed_products.steps_of(weight, order, activation)
    stepped, again = in_steps(rows, steps), torch.full_like(out, 7.0)
    with on_cpu(seed) as names:
        grouped_gemm.grouped_gemm(rows, weight, order, out=out, bias=bias, low_rank=update)
        grouped_gemm.grouped_gemm(
            stepped, weight, order, out=again, bias=bias, in_steps=True, low_rank=update
        )
        act, pre = gate_up.gate_up(x, weight, order, by, save_pre=True, **how)
        both, kept = gate_up.gate_up(x, weight, order, by, save_pre=True, act_in_steps=True, **how)
    assert [name.partition("_packed")[2] for name in names] == ["_roles_kernel"] * 4
    assert torch.equal(again, out)
    truth = rows.double() @ update.a.double().mT  # [E, S, R]
    assert len(small) == 2
    for x_given, a in small:
        assert torch.allclose(x_given.double() @ a.double().mT, truth)
    used = slice(len(slot))
    added = torch.zeros(len(slot), n, dtype=torch.float64)
    for e in range(experts):
        added[expert == e] = side[used][expert == e].double() @ b[e].double().T
    if bias is not None:
        added += bias.double()[expert]
    assert close(out[used], product(rows[used], weight, expert) + added)
    truth = product(x[slot // top_k], weight, expert) + added
    assert close(pre[used], truth) and torch.equal(kept[used], pre[used])
    assert close(act[used], reference.glu(truth, activation))
    assert torch.equal(both[used], in_steps(act, steps)[used])


@pytest.mark.parametrize("tokens", [50, 300])
@pytest.mark.parametrize("how", range(len(HOWS)))
def test_experts(monkeypatch, how, tokens):
    """Both products of a forward: the first hands act to the second in the order that it reads."""
    monkeypatch.setattr(
        tiles, "block_m", lambda slots, *_: 16 if slots < 50 else 32 if slots < 200 else 128
    )
    torch.manual_seed(how)
    format, options = HOWS[how]
    stacks = [
        quantize(torch.randn(3, *size).bfloat16() * 0.1, format, **options)
        for size in ((512, 384), (384, 256))
    ]
    x, index = torch.randn(tokens, 384).bfloat16(), torch.rand(tokens, 3).argsort(1)[:, :2]
    weights = torch.rand(tokens, 2).bfloat16()
    with on_cpu(how) as names, torch.no_grad():
        out = fused_experts(x, *stacks, index, weights)
    assert [name.partition("_packed")[0].partition("_pairs")[0] for name in names] == [
        "gate_up", "gemm",
    ]  # fmt: skip
    truth = reference.fused_experts(
        x.double(), *(dequantize(each, torch.float64) for each in stacks), index, weights.double()
    )
    assert close(out, truth)


def test_scales_that_are_no_words():
    """Four exponents are read at once, if they lie as a word does."""
    order, _ = sort(torch.zeros(4, 1, dtype=torch.long), 1, torch.bfloat16, 16)
    weight = quantize(torch.randn(1, 64, 256).bfloat16(), "mxfp4")
    assert pairs.supported(weight, order)
    memory = torch.zeros(weight.scales.numel() + 1, dtype=torch.uint8)
    between = memory[1:].view(torch.float8_e8m0fnu).view(weight.scales.shape)
    assert not pairs.supported(replace(weight, scales=between), order)
