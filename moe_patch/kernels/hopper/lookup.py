"""Table of the 256 bytes of two 4-bit codes in shared memory: pairs of bfloat16, their values.

It lies there once for each of the 32 banks, 32 KB in all: each thread of a warp reads a copy
of its own, and none waits for another. It is declared in PTX, beside the shared memory that the
compiler knows of.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def at_pair(byte: int, word: str, bank: str) -> str:
    """PTX that makes `at` the place of a thread's own copy of what a byte of a word stands for."""
    shift = 7 - 8 * byte
    return (
        f"{'shl' if shift > 0 else 'shr'}.b32 at, {word}, {abs(shift)};"
        f"lop3.b32 at, at, 0x7F80, {bank}, 0xEA; add.u32 at, at, table;"
    )


def pairs_of_word(then: str) -> gl.constexpr:
    """PTX for a word, $8: what its bytes stand for goes to $0 to $7, by twos. $9 is `own_bank`.
    `then` changes a `pair`, and may use `at`."""
    found = [".reg .b32 at, table, pair; mov.u32 table, code_pairs;"]
    for byte in range(4):
        found += [
            at_pair(byte, "$8", "$9"),
            "ld.shared.b32 pair, [at];",
            f"{then} mov.b32 {{${2 * byte}, ${2 * byte + 1}}}, pair;",
        ]
    return gl.constexpr("{ " + " ".join(found) + " }")


def _of_two_words(then: str = "") -> gl.constexpr:
    """PTX for a word, $4 and again $5: the pairs of its bytes go to $0 to $3. $6 is `own_bank`.
    `then` changes `{pair}`."""
    found = [".reg .b32 at, table; mov.u32 table, code_pairs;"]
    for byte in range(4):
        pair = f"${byte}"
        found += [at_pair(byte, "$4", "$6"), f"ld.shared.b32 {pair}, [at];", then.format(pair=pair)]
    return gl.constexpr("{ " + " ".join(found) + " }")


def _filled() -> gl.constexpr:
    """PTX for 128 threads, each of which writes two words, 32 times each."""
    found = [
        ".shared .align 128 .b32 code_pairs[8192];"
        "{ .reg .b32 thread, bank, at, first, second; .reg .b64 from;"
        "mov.u32 thread, %tid.x; mov.u32 bank, %laneid; shl.b32 bank, bank, 2;"
        "mad.wide.u32 from, thread, 4, $1;"
        "ld.global.nc.b32 first, [from]; ld.global.nc.b32 second, [from + 512];"
        "mov.u32 at, code_pairs; mad.lo.u32 thread, thread, 128, at;"
    ]
    for turn in range(32):  # all threads of a warp write to banks of their own
        found.append(
            f"add.u32 at, bank, {4 * turn}; and.b32 at, at, 127; add.u32 at, at, thread;"
            "st.shared.b32 [at], first; st.shared.b32 [at + 16384], second;"
        )
    return gl.constexpr(" ".join(found) + " mov.u32 $0, bank; }")


_FILLED = _filled()
_BANK = gl.constexpr("mov.u32 $0, %laneid; shl.b32 $0, $0, 2;")
_TWO_WORDS, _SCALED = _of_two_words(), _of_two_words("mul.rn.bf16x2 {pair}, {pair}, $8;")
_FOUR, _SIX = gl.constexpr("=r,=r,=r,=r,r,r,r,r"), gl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r")


@gluon.jit
def fill_table(words):
    """Writes int32 [256], each what both codes of a byte stand for. Once in a kernel, by the four
    warps at its head, which have to wait for each other before they read the table."""
    gl.inline_asm_elementwise(_FILLED, "=r,l", [words], gl.int32, False, 1)


@gluon.jit
def own_bank(anything):
    """Place of a thread's own copies, in bytes: four times its lane. Reads no value of `anything`,
    int32."""
    return gl.inline_asm_elementwise(_BANK, "=r,r", [anything], gl.int32, True, 1)


@gluon.jit
def look_up(twice, bank, scale):
    """Values of the four bytes of words: four tensors [..., 2] of words [..., 2], where each is
    given twice, in registers side by side: once for each half of a pair. So a pair stays in the
    register that it was read into. `scale` is a bfloat16, twice in 32 bits, or None."""
    if scale is None:
        return gl.inline_asm_elementwise(
            _TWO_WORDS, _FOUR, [twice, bank],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), True, 2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _SCALED, _SIX, [twice, bank, scale],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), True, 2,
        )  # fmt: skip
