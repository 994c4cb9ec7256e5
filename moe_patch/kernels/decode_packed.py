"""Decoding with weights in 4 bits: what unpacking adds to `decode`, and a second kernel of its own.

A thread keeps its part of a row of x for several rows of the weight, and unpacks the codes that it
loaded itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .packed import decoded, in_groups, load_groups
from .weights import Weight
from .widen import widen

_ROOT: tl.constexpr = tl.constexpr(2.0**63)
"""Root of 2 ** 126, the factor that values of mxfp4 lack: either half stays in float32's range."""
_TWO_FLOATS: tl.constexpr = tl.constexpr("ld.global.v2.f32 {$0, $1}, [$2];")
_TWO_BFLOATS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 both; ld.global.b32 both, [$2]; shl.b32 $0, both, 16; "
    "and.b32 $1, both, 0xFFFF0000; }"
)
_TWO_HALVES: tl.constexpr = tl.constexpr(
    "{ .reg .b16 a, b; ld.global.v2.b16 {a, b}, [$2]; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
)


@triton.jit
def load_rows(rows, inside, k0, END: tl.constexpr, PTX: tl.constexpr, BK: tl.constexpr):
    """[R, BK] of rows [R] from column k0 on, in float32; zero past column END, and anything where a
    row is not inside.

    Triton gives what it loads the layout that fits the load, and would move the weights to it
    through shared memory. In PTX a row comes in pairs, as codes do, to the threads with its
    weights.
    """
    R: tl.constexpr = rows.shape[0]
    k = k0 + tl.arange(0, BK)[None, :]
    if PTX:
        dtype: tl.constexpr = rows.dtype.element_ty
        wide: tl.constexpr = _TWO_FLOATS if dtype == tl.float32 else _TWO_HALVES
        ptx: tl.constexpr = _TWO_BFLOATS if dtype == tl.bfloat16 else wide
        pair = k0 + 2 * tl.arange(0, BK // 2)[None, :]
        if END % BK:
            pair = tl.minimum(pair, END - 2)
        low, high = tl.inline_asm_elementwise(
            ptx, "=f,=f,l", [rows[:, None] + pair],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        a = tl.join(low, high).reshape(R, BK)
        return tl.where(k < END, a, 0.0) if END % BK else a
    else:
        return widen(
            tl.load(rows[:, None] + k, mask=inside[:, None] & (k < END), other=0.0), tl.float32
        )


@triton.jit
def packed_products(loaded, weight, a, LAYOUT: tl.constexpr):
    """Sums [N, R, PARTS] over the groups that share a scale, of rows a [R, BK] times what was
    loaded of N * R rows of weights."""
    codes, scale, zero = loaded
    FORMAT: tl.constexpr = LAYOUT.format
    PTX: tl.constexpr = LAYOUT.ptx
    value = decoded(codes, weight.table, FORMAT, PTX)
    value, scale = in_groups(value, scale, zero, weight, FORMAT)
    R: tl.constexpr = a.shape[0]
    PARTS: tl.constexpr = value.shape[1]
    GROUP: tl.constexpr = value.shape[2]
    value = value.reshape(value.shape[0] // R, R, PARTS, GROUP)
    scale = scale.reshape(value.shape[0], R, PARTS)
    if FORMAT == "mxfp4":  # values are times 2 ** -126
        return tl.sum(value * (a * _ROOT).reshape(1, R, PARTS, GROUP), axis=3) * _ROOT * scale
    else:
        return tl.sum(value * a.reshape(1, R, PARTS, GROUP), axis=3) * scale


@triton.jit
def load_codes(
    weight, expert, rows, inside, k0, END: tl.constexpr, LAYOUT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Codes, scales and zeros that `packed_products` multiplies: rows [R] of the weight in 4 bits
    of one expert, or of experts [R, 1], from column k0 on, of END."""
    k = k0 // 2 + tl.arange(0, BK // 2)
    at = weight.data + expert * LAYOUT.stride_e + rows[:, None] * LAYOUT.stride_n + k[None, :]
    codes = tl.load(at, mask=inside[:, None] & (k[None, :] < END // 2), other=0)
    scale, zero = load_groups(
        weight, expert, rows, inside, k0, END, LAYOUT, LAYOUT.scale_n, LAYOUT.scale_k, BK
    )
    return codes, scale, zero


@triton.jit
def _for_each(values, BN: tl.constexpr):
    """values [R], BN times."""
    return tl.broadcast_to(values[None, :], (BN, values.shape[0])).reshape(BN * values.shape[0])


@triton.jit
def decode_down_packed_kernel(
    act, w, scales, zeros, table, bias, index, slot_weight, out,
    LAYOUT: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """decode_down_kernel with weights in 4 bits: all choices of a token at once."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    choice = tl.arange(0, KP)
    slot = token * TOP_K + choice
    expert = tl.load(index + slot, mask=choice < TOP_K, other=-1).to(tl.int64)
    live = (expert >= 0) & (expert < E)
    expert = tl.where(live, expert, 0)
    row = tl.broadcast_to(n[:, None], (BN, KP)).reshape(BN * KP)
    inside = _for_each(live, BN) & (row < H)
    weight = Weight(w, scales, zeros, table)
    experts = _for_each(expert, BN)[:, None]
    rows = act + tl.where(live, slot, 0) * I
    sums = tl.zeros([BN, KP, PARTS], dtype=tl.float32)
    for k0 in tl.range(0, I, BK, num_stages=STAGES):
        codes = load_codes(weight, experts, row, inside, k0, I, LAYOUT, BK)
        a = load_rows(rows, live, k0, I, LAYOUT.ptx, BK)
        sums += packed_products(codes, weight, a, LAYOUT)
    value = tl.sum(sums, axis=2)
    if BIAS:
        at = bias + expert[None, :] * H + n[:, None]
        value += tl.load(at, mask=live[None, :] & (n[:, None] < H), other=0.0).to(tl.float32)
    if WEIGHTED:
        scale = tl.load(slot_weight + slot, mask=live, other=0.0).to(tl.float32)
        value *= scale[None, :]
    value = tl.sum(tl.where(live[None, :], value, 0.0), axis=1)  # dropped rows may hold NaN
    tl.store(out + token.to(tl.int64) * H + n, value.to(out.dtype.element_ty), mask=n < H)
