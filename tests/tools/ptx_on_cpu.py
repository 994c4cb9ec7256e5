"""Assembly of `hopper/` in Python, for `gluon_on_cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from drawn_order import here
from gluon_on_cpu import PTX, Ended, P
from torch import Tensor

from moe_patch.formats.packed import FORMATS
from moe_patch.kernels import activate
from moe_patch.kernels.hopper import codes, fp8, fp8_sums, lookup

MXFP4 = torch.tensor(FORMATS["mxfp4"].values)


def _nibble(words: Tensor, place: int | Tensor) -> Tensor:
    return (words >> 4 * place & 15).long()


def _all(places: list[tuple[int, int]], value: Callable[..., Tensor]) -> Callable[..., tuple]:
    """(words, ...) -> what the codes at these places stand for, in bfloat16, pair by pair."""

    def compute(words: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            value(_nibble(words, place), *rest).to(torch.bfloat16)
            for pair in places
            for place in pair
        )

    return compute


HALVES = [(place, place + 4) for place in range(4)]
"""Of the codes of a word those that become one pair."""


def _power(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.float() - 127 - codes.LESS.value)


def _values(table: P) -> Tensor:
    return table.memory


BYTES = [(2 * byte, 2 * byte + 1) for byte in range(4)]


def _fill(words: P) -> Tensor:
    """The table is the world's from now on."""
    here().world.table = words.memory
    return torch.tensor(0)


def _pair(code: Tensor) -> Tensor:
    """By the table, whose entry of byte 16 c has code 0 below."""
    bits = here().world.table[code] & 0xFFFF
    return (bits << 16).view(torch.float32)


def _pairs_of(twice: Tensor, bank: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of words that are given twice, once for each half of their pairs."""
    assert torch.equal(twice[..., 0], twice[..., 1])
    half = torch.arange(2)
    by = 1 if scale is None else (scale << 16).view(torch.float32)
    return tuple(
        (_pair(_nibble(twice, 2 * byte + half)) * by).to(torch.bfloat16) for byte in range(4)
    )


def _scaled(code: Tensor, bank: Tensor, large: Tensor, small: Tensor) -> Tensor:
    value = _pair(code)
    return value * large.float() + (value * small.float()).to(torch.bfloat16).float()


def _arrived(both: Any, barrier: Any) -> tuple[Any, Callable[[], bool]]:
    """A warpgroup arrives at a barrier of its program for 256 threads, if `both` do; and whether
    the others have, too."""
    task = here()
    known = task.world.named.setdefault((task.program, int(barrier)), [0, 0])
    if not int(both):
        return both, lambda: True
    phase = known[1]
    known[0] += 32 * task.warps
    assert known[0] <= 256, "more arrivals than the barrier counts"
    if known[0] == 256:
        known[:] = 0, phase + 1
    return both, lambda: known[1] > phase


def _enter(both: Any, barrier: Any) -> Any:
    both, others = _arrived(both, barrier)
    here().let_others(others, "waits for its turn to multiply")
    return both


def _end(anything: Any) -> Any:
    for copy in sum(here().groups, []):
        copy()
    raise Ended


def _prefetch(at: P) -> Tensor:
    """256 bytes from each address on are the tensor's."""
    last = 256 // at.memory.dtype.itemsize - 1
    assert isinstance(at, P) and at.places(None) and (at + last).places(None)
    return torch.tensor(0)


IN_PYTHON = {
    fp8._PREFETCH.value: _prefetch,
    fp8._EXIT.value: _end,
    activate._SIGMOID.value: torch.sigmoid,
    fp8_sums._FMA.value: lambda a, b, c: a * b + c,
    fp8_sums._ENTER.value: _enter,
    fp8_sums._LEAVE.value: lambda both, barrier: _arrived(both, barrier)[0],
    lookup._FILLED.value: _fill,
    lookup._TWO_WORDS.value: _pairs_of,
    lookup._SCALED.value: _pairs_of,
    lookup._BANK.value: lambda anything: anything,
    codes._IN_PAIRS.value: _all(BYTES, _scaled),
    codes._OWN_VALUE.value: lambda table: table,
    codes._TWICE.value: lambda value: value,
    codes._POWER.value: _power,
    codes._LOOKED_UP.value: _all(HALVES, lambda code, scale, table: _values(table)[code] * scale),
    codes._MXFP4.value: _all(HALVES, lambda code, scale: MXFP4[code] * scale),
    codes._INT4.value: _all(
        HALVES, lambda code, scale, zero: (code - ((zero & 0xFFFF) - 0x4300)) * scale
    ),
    codes._INT4_IN_FLOAT.value: _all(
        HALVES, lambda code, scale, zero: (code - (zero - 8388608.0)) * scale
    ),
}


def known() -> None:
    """From now on `gluon_on_cpu` computes them."""
    PTX.update(IN_PYTHON)
