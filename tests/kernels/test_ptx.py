"""Assembly in kernels, run for a thread at a time: what it computes is what its twins say."""

from __future__ import annotations

import math
import random

import ptx_on_cpu
import pytest
import torch
from ptx import MASK, Thread, as_bits, as_float, bfloat, bfloat_bits

from moe_patch.formats.packed import FORMATS, Packed, dequantize, quantize, unpack
from moe_patch.kernels import activate, decode_packed, packed
from moe_patch.kernels.hopper import codes, lookup

NF4 = FORMATS["nf4"].values
WORDS = [0x76543210, 0xFEDCBA98, 0x01234567, 0x89ABCDEF, 0, MASK]
WORDS += [random.Random(0).randrange(1 << 32) for _ in range(20)]
NIBBLES = [[word >> 4 * place & 15 for place in range(8)] for word in WORDS]
TABLE = {1 << 20 | 4 * code: as_bits(value) for code, value in enumerate(NF4)}


def signed(word):
    return torch.tensor(word - (1 << 32) if word >> 31 else word, dtype=torch.int32)


def twin(text, word, *rest):
    """bfloat16 values of a word, by the function that tests of whole kernels use."""
    return [float(each) for each in ptx_on_cpu.IN_PYTHON[text](signed(word), *rest)]


@pytest.mark.parametrize(
    "name, values", [("_E2M1", "mxfp4"), ("_INT4", "int4"), ("_LOOK_UP", "nf4")]
)
def test_of_four_bytes(name, values):
    """What low halves stand for, then what high ones do; mxfp4's are times 2 ** -126."""
    text = getattr(packed, name).value
    known = range(16) if values == "int4" else FORMATS[values].values
    known = [value * (2.0**-126 if values == "mxfp4" else 1.0) for value in known]
    for word, nibbles in zip(WORDS, NIBBLES):
        thread = Thread(of_lane=lambda lane: as_bits(NF4[lane % 16]))
        found = [as_float(bits) for bits in thread.run(text, word, 0)]
        wanted = [known[code] for code in nibbles[::2] + nibbles[1::2]]
        assert torch.equal(torch.tensor(found), torch.tensor(wanted)), hex(word)


@pytest.mark.parametrize("exponent", [31, 100, 127, 150, 158])
def test_mxfp4(exponent):
    (factor,) = Thread().run(codes._POWER.value, exponent, outputs=1)
    power = torch.exp2(torch.tensor(exponent).float() - 127 - codes.LESS.value)
    assert factor >> 16 == factor & 0xFFFF
    for word in WORDS:
        found = [bfloat(bits) for bits in Thread().run(codes._MXFP4.value, word, factor)]
        assert found == twin(codes._MXFP4.value, word, power), hex(word)


def test_scales_of_mxfp4_that_are_too_large():
    for exponent in (159, 200, 255):
        (factor,) = Thread().run(codes._POWER.value, exponent, outputs=1)
        found = Thread().run(codes._MXFP4.value, 0x77777777, factor)
        assert not any(math.isfinite(bfloat(bits)) for bits in found)


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_int4(zero):
    for scale in (1.0, 0.00537109375, -3.0):
        (twice,) = Thread().run(codes._TWICE.value, bfloat_bits(scale), outputs=1)
        for word in WORDS:
            point = zero * 0x10001 + 0x43004300
            found = [bfloat(b) for b in Thread().run(codes._INT4.value, word, twice, point)]
            wanted = twin(codes._INT4.value, word, torch.tensor(scale), torch.tensor(point))
            assert found == wanted, hex(word)
            wide = scale * 1.0003
            bits = as_bits(wide), as_bits(zero + 8388608.0)
            found = [bfloat(b) for b in Thread().run(codes._INT4_IN_FLOAT.value, word, *bits)]
            given = torch.tensor(as_float(bits[0])), torch.tensor(zero + 8388608.0)
            assert found == twin(codes._INT4_IN_FLOAT.value, word, *given), hex(word)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_of_a_row(dtype):
    both = torch.tensor([-1.5, 3.25]).to(dtype)
    whole = both.view(torch.int32 if dtype == torch.float32 else torch.int16).tolist()
    size = dtype.itemsize
    memory = {64 + size * i: bits & (1 << 8 * size) - 1 for i, bits in enumerate(whole)}
    name = {torch.float32: "_TWO_FLOATS", torch.bfloat16: "_TWO_BFLOATS"}.get(dtype, "_TWO_HALVES")
    if dtype == torch.bfloat16:  # they come as one word
        memory = {64: memory[64] | memory[66] << 16}
    found = Thread(memory=memory).run(getattr(decode_packed, name).value, 64, outputs=2)
    assert [as_float(bits) for bits in found] == [-1.5, 3.25]


def test_nf4_from_lanes():
    for lane in (0, 5, 31):
        (own,) = Thread(lane=lane, memory=TABLE).run(codes._OWN_VALUE.value, 1 << 20, outputs=1)
        assert as_float(own) == torch.tensor(NF4[lane % 16]).float()
    scale = torch.tensor(0.0123)
    for word in WORDS:
        thread = Thread(of_lane=lambda lane: as_bits(NF4[lane % 16]))
        found = [bfloat(b) for b in thread.run(codes._LOOKED_UP.value, word, as_bits(0.0123), 0)]
        table = type("Table", (), {"memory": torch.tensor(NF4)})
        assert found == twin(codes._LOOKED_UP.value, word, scale, table), hex(word)


def nf4_pairs():
    stack = Packed(torch.zeros(1, 1, 32, dtype=torch.uint8), torch.ones(1, 1, 1), None, "nf4")
    return packed.pairs_of_codes(stack)


def test_pairs_are_nf4_values():
    """bfloat16's rounding away from them, the low half of a byte first; all in all little more than
    half of what one rounding of weights makes."""
    found = nf4_pairs().view(torch.bfloat16).view(256, 2).double() * packed.PAIR_UNIT
    wanted = torch.tensor([(NF4[byte & 15], NF4[byte >> 4]) for byte in range(256)]).double()
    assert torch.allclose(found, wanted, rtol=2**-8, atol=0)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("group", (32, 64, 128))
def test_errors_of_pairs_do_not_add_up(group):
    """Products with positive numbers, squared activations, have smaller errors than those of
    weights that are rounded once."""
    torch.manual_seed(0)
    rows, inner = 16, 16384
    weight = quantize(torch.randn(1, rows, inner), "nf4", group=group)
    codes, scales = unpack(weight.codes).long(), weight.scales.double()
    values = nf4_pairs().view(torch.bfloat16)[::34].double() * packed.PAIR_UNIT  # a code twice
    exact = dequantize(weight, torch.float64)
    looked_up = values[codes] * scales.repeat_interleave(group, -1)
    x = torch.randn(64, inner).relu().square().double()

    def error(other):
        return float(((other - exact) @ x.T).square().mean().sqrt())

    rounded = exact.bfloat16().double()
    assert error(looked_up) < error(rounded)
    assert abs(float((looked_up - exact).mean())) < 5e-5 * float(exact.abs().mean())


def test_nf4_from_pairs():
    """Every thread finds its own copy; no two of a warp are in the same bank."""
    pairs = nf4_pairs()
    memory = {4 * i: int(pair) & MASK for i, pair in enumerate(pairs)}
    shared: dict[int, int] = {}
    for thread in range(128):
        Thread(lane=thread % 32, thread=thread, shared=shared, memory=memory).run(
            lookup._FILLED.value, 0, outputs=1
        )
    assert sorted(shared) == list(range(1024, 1024 + 32768, 4))
    assert all(shared[1024 + 128 * byte] == memory[4 * byte] for byte in range(256))
    large, small = bfloat_bits(0.0123), bfloat_bits(0.0123 - bfloat(bfloat_bits(0.0123)))
    wanted = torch.tensor(NF4) * 0.0123 / packed.PAIR_UNIT
    for lane in (0, 7, 31):
        (bank,) = Thread(lane=lane).run(lookup._BANK.value, 0, outputs=1)
        read = Read(shared)
        for word, nibbles in zip(WORDS, NIBBLES):
            thread = Thread(lane=lane, shared=read)
            both = large * 0x10001, small * 0x10001
            found = [bfloat(b) for b in thread.run(codes._IN_PAIRS.value, word, bank, *both)]
            close = wanted[nibbles]
            assert torch.allclose(torch.tensor(found), close, rtol=2**-7.5, atol=0), hex(word)
            as_it_is = Thread(lane=lane, shared=read).run(
                lookup._TWO_WORDS.value, word, word, bank, bank, outputs=4
            )
            assert list(as_it_is) == [memory[4 * (word >> 8 * byte & 255)] for byte in range(4)]
            scale = bfloat_bits(-0.25)
            scaled = Thread(lane=lane, shared=read).run(
                lookup._SCALED.value, word, word, bank, bank, scale * 0x10001, 0, outputs=4
            )
            halves = [
                (bits >> 16 * h, pair >> 16 * h)
                for bits, pair in zip(scaled, as_it_is)
                for h in (0, 1)
            ]
            assert all(bfloat(bits) == -0.25 * bfloat(pair) for bits, pair in halves)
        assert {at // 4 % 32 for at in read.asked} == {lane}


def test_sigmoid():
    for x in (-200.0, -88.0, -20.0, -1.5, -1e-30, 0.0, 0.3, 7.0, 90.0, 200.0):
        (found,) = Thread().run(activate._SIGMOID.value, as_bits(x), outputs=1)
        wanted = float(torch.tensor(x, dtype=torch.float64).sigmoid())
        assert math.isclose(as_float(found), wanted, rel_tol=2e-5, abs_tol=2e-38), x


class Read(dict):
    """Shared memory that knows which of it was read."""

    def __init__(self, memory):
        super().__init__(memory)
        self.asked = set()

    def __getitem__(self, at):
        self.asked.add(at)
        return super().__getitem__(at)
