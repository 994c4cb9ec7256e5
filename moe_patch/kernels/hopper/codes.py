"""Codes of 4 bits as the left operand of wgmma, which may lie in registers.

A step is 128 of the reduction, 64 bytes of a row of codes. Four neighbouring threads share a row,
and each has 16 bytes of it, of one group: four words of eight codes. A thread's part of the
operand is not 32 columns that follow one another, so a step is summed in another order: its place

    64 r + 32 s + 8 p + 2 q + h    is column    32 q + 16 s + 8 r + 4 h + p

where q < 4 is the thread, s and r choose its word, h the half of the word and p < 4 the code there.
The right operand has to lie in that order, as `kernels/in_steps.py` writes it. Both values of a
pair, h = 0 and 1, are computed at once, in one register. Where a pair is looked up, it is a byte's:
the place above is column 32 q + 16 s + 8 r + 2 p + h then, p < 4 the byte of a word and h its half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import in_steps
from ..packed import PAIR_UNIT
from .lookup import pairs_of_word

STEP = gl.constexpr(in_steps.STEP)
ROWS = gl.constexpr(64)
"""Rows of a weight that a warpgroup unpacks at a time."""
LESS = gl.constexpr(in_steps.LESS)
"""Values of mxfp4 are 2 ** 30 times less than they should be, and so are their sums, until the end.
The difference of the exponents' biases, 126, and a scale are one factor then, in bfloat16's range
for scales below 2 ** 32. (Larger ones are infinite or NaN, and sums below 2 ** -96 lose digits.)"""


@gluon.constexpr_function
def words_of():
    """Layout of a warpgroup's words of a step, [64, q, 2 s + r]."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])


def _shifted(to: str, by: int) -> str:
    """PTX for the word $8, `by` bits to the left, or to the right where negative."""
    return f"{'shl' if by > 0 else 'shr'}.b32 {to}, $8, {abs(by)};"


def _pairs(parts: Callable[[int], Sequence[str]]) -> gl.constexpr:
    """PTX for the word $8: its values go to $0 to $7. `parts(4 * p)` computes a `pair` of them."""
    found = [".reg .b32 a, b, pair;", ".reg .f32 low, high;"]
    for p in range(4):
        found += [*parts(4 * p), f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, pair;"]
    return gl.constexpr("{ " + " ".join(found) + " }")


_OUTPUTS = ",".join(["=h"] * 8)
_TWO = gl.constexpr(_OUTPUTS + ",r,r")
_THREE = gl.constexpr(_OUTPUTS + ",r,r,r")
_FLOATS = gl.constexpr(_OUTPUTS + ",r,f,f")

_MXFP4 = _pairs(  # the sign to bit 15, the others to bits 8 to 6; the exponents' biases are 1, 127
    lambda at: (
        _shifted("a", -8) if at == 8 else "",
        f"and.b32 b, {'$8' if at < 8 else 'a'}, {0x000F000F << at % 8:#x};",
        f"mul.lo.u32 b, b, {0x1040 >> at % 8:#x}; and.b32 pair, b, 0x81C081C0;",
        "mul.rn.bf16x2 pair, pair, $9;",
    )
)  # fmt: skip
_INT4 = _pairs(  # 128 + code, less 128 + zero
    lambda at: (
        _shifted("a", -at), "lop3.b32 pair, a, 0x000F000F, 0x43004300, 0xEA;",
        "sub.rn.bf16x2 pair, pair, $10; mul.rn.bf16x2 pair, pair, $9;",
    )
)  # fmt: skip
_INT4_IN_FLOAT = _pairs(  # 2 ** 23 + code, less 2 ** 23 + zero
    lambda at: (
        _shifted("a", -at), "lop3.b32 a, a, 15, 0x4B000000, 0xEA; mov.b32 low, a;",
        _shifted("b", -at - 16), "lop3.b32 b, b, 15, 0x4B000000, 0xEA; mov.b32 high, b;",
        "sub.rn.f32 low, low, $10; mul.rn.f32 low, low, $9;",
        "sub.rn.f32 high, high, $10; mul.rn.f32 high, high, $9; cvt.rn.bf16x2.f32 pair, high, low;",
    )
)  # fmt: skip
_LOOKED_UP = _pairs(  # lane l of a warp has the value of code l % 16
    lambda at: (
        _shifted("a", -at), "shfl.sync.idx.b32 low, $10, a, 0x1f, 0xffffffff;",
        _shifted("b", -at - 16), "shfl.sync.idx.b32 high, $10, b, 0x1f, 0xffffffff;",
        "mul.rn.f32 low, low, $9; mul.rn.f32 high, high, $9; cvt.rn.bf16x2.f32 pair, high, low;",
    )
)  # fmt: skip
_IN_PAIRS = pairs_of_word("mul.rn.bf16x2 at, pair, $11; fma.rn.bf16x2 pair, pair, $10, at;")
_FOUR = gl.constexpr(_OUTPUTS + ",r,r,r,r")
_UNIT = gl.constexpr(PAIR_UNIT)
_OWN_VALUE = gl.constexpr(
    "{ .reg .u32 lane; .reg .u64 at; mov.u32 lane, %laneid; and.b32 lane, lane, 15; "
    "mad.wide.u32 at, lane, 4, $1; ld.global.nc.f32 $0, [at]; }"
)
_TWICE = gl.constexpr("mov.b32 $0, {$1, $1};")
_POWER = gl.constexpr(  # bfloat16's bits of 2 ** (e8m0 - 127 + 126 - LESS), twice; NaN from 160 on
    "{ .reg .b32 a; shl.b32 a, $1, 7; min.u32 a, a, 0x4FC0; add.u32 a, a, 0x3000; "
    "prmt.b32 $0, a, a, 0x1010; }"
)


@gluon.jit
def own_value(table):
    """Value that code l % 16 stands for, in lane l; anything where codes are computed."""
    if table is None:
        return gl.to_tensor(0.0)
    else:
        return gl.inline_asm_elementwise(_OWN_VALUE, "=f,l", [table], gl.float32, True, 1)


@gluon.jit
def halves(words):
    """r = 0 and r = 1 of words [64, q, 2 s + r]."""
    return words.reshape((ROWS, 4, 2, 2)).split()


@gluon.jit
def _twice(value):
    return gl.inline_asm_elementwise(_TWICE, "=r,h", [value], gl.int32, True, 1)


@gluon.jit
def _all(ptx: gl.constexpr, constraints: gl.constexpr, arguments, PURE: gl.constexpr = True):
    return gl.inline_asm_elementwise(
        ptx, constraints, arguments,
        (
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        PURE, 1,
    )  # fmt: skip


@gluon.jit
def fragment(
    words, group, own, SUMS: gl.constexpr, PLAN: gl.constexpr, IN_BYTES: gl.constexpr = False
):  # fmt: skip
    """Values of half a step's words [64, 4, 2] (mxfp4: 2 ** -LESS of them): [64, 64] in bfloat16,
    as a left operand of sums in the layout SUMS.

    `group` is the words' Groups: scales [64, 4] as they lie in memory and, if PLAN.zeros, codes for
    zero. `own` is `own_value`, or with IN_BYTES, which says that codes are looked up in pairs,
    `own_bank`. Rounded once, from float32 or what is exact; in pairs, once when the table was made
    and once when both parts of a scale, which are bfloat16, are added.
    """
    FORMAT: gl.constexpr = PLAN.format
    by: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    scale = gl.convert_layout(group.scale, by, assert_trivial=True)
    if PLAN.zeros:
        zero = gl.convert_layout(group.zero, by, assert_trivial=True)
        zero = gl.expand_dims(zero, 2).to(gl.int32)
    else:
        zero = gl.to_tensor(8)
    if FORMAT == "mxfp4":
        scale = gl.inline_asm_elementwise(_POWER, "=r,r", [scale.to(gl.int32)], gl.int32, True, 1)
        found = _all(_MXFP4, _TWO, [words, gl.expand_dims(scale, 2)])
    elif FORMAT == "int4":
        exact: gl.constexpr = scale.dtype == gl.bfloat16
        if exact:
            scale = gl.expand_dims(_twice(scale), 2)
            found = _all(_INT4, _THREE, [words, scale, zero * 0x10001 + 0x43004300])
        else:
            scale = gl.expand_dims(scale.to(gl.float32), 2)
            zero = zero.to(gl.float32) + 8388608.0  # exact
            found = _all(_INT4_IN_FLOAT, _FLOATS, [words, scale, zero])
    elif IN_BYTES:
        scale = scale.to(gl.float32) * _UNIT
        large = scale.to(gl.bfloat16)
        small = (scale - large.to(gl.float32)).to(gl.bfloat16)
        large, small = gl.expand_dims(_twice(large), 2), gl.expand_dims(_twice(small), 2)
        found = _all(_IN_PAIRS, _FOUR, [words, own, large, small])
    else:
        scale = gl.expand_dims(scale.to(gl.float32), 2)
        found = _all(_LOOKED_UP, _FLOATS, [words, scale, own], False)  # shuffles stay together
    first = gl.join(gl.join(found[0], found[1]), gl.join(found[2], found[3]))
    second = gl.join(gl.join(found[4], found[5]), gl.join(found[6], found[7]))
    both = gl.join(first, second)  # [64, q, s, h, p % 2, p // 2]
    both = both.permute((0, 2, 5, 4, 1, 3)).reshape((ROWS, 64))
    return gl.convert_layout(both, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
