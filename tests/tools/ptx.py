"""Runs the assembly in kernels, PTX, for one thread: integers, and floats as their bits."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import torch

MASK = 0xFFFFFFFF


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & MASK))[0]


def as_bits(value: float) -> int:
    """Of the float32 that is nearest."""
    return int(torch.tensor(value, dtype=torch.float64).float().view(torch.int32)) & MASK


def bfloat(bits: int) -> float:
    return as_float((bits & 0xFFFF) << 16)


def bfloat_bits(value: float) -> int:
    """Of the bfloat16 that is nearest to a float32, or to a sum that float64 holds exactly."""
    wide = torch.tensor(value, dtype=torch.float64)
    near = wide.float()
    if near.double() != wide:  # round once: to odd first
        away = torch.nextafter(near, torch.tensor(float("inf") if wide > near else -float("inf")))
        both = sorted((near, away), key=lambda each: abs(float(each)))
        near = both[0] if int(both[0].view(torch.int32)) & 1 else both[1]
    return int(near.to(torch.bfloat16).view(torch.int16)) & 0xFFFF


def _in_twos(compute: Callable[..., float]) -> Callable[..., int]:
    def call(*words: int) -> int:
        low = bfloat_bits(compute(*map(bfloat, words)))
        return low | bfloat_bits(compute(*(bfloat(word >> 16) for word in words))) << 16

    return call


def _prmt(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    found = bytes(source[selector >> 4 * i & 7] for i in range(4))
    assert not selector & 0x8888
    return int.from_bytes(found, "little")


def _in_floats(compute: Callable[..., float]) -> Callable[..., int]:
    return lambda *words: as_bits(compute(*map(as_float, words)))


OPERATIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.b32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "min.u32": min,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else 1 // 0,
    "prmt.b32": _prmt,
    "mul.rn.f32": _in_floats(lambda a, b: a * b),
    "add.rn.f32": _in_floats(lambda a, b: a + b),
    "ex2.approx.ftz.f32": _in_floats(lambda a: 2.0**a),
    "rcp.approx.ftz.f32": _in_floats(lambda a: 1 / a),
    "sub.rn.f32": _in_floats(lambda a, b: a - b),
    "fma.rn.f32": _in_floats(lambda a, b, c: a * b + c),
    "mul.rn.bf16x2": _in_twos(lambda a, b: a * b),
    "sub.rn.bf16x2": _in_twos(lambda a, b: a - b),
    "fma.rn.bf16x2": _in_twos(lambda a, b, c: a * b + c),
    "cvt.f32.f16": lambda a: as_bits(float(torch.tensor(a).short().view(torch.float16))),
    "cvt.rn.bf16x2.f32": lambda high, low: (
        bfloat_bits(as_float(high)) << 16 | bfloat_bits(as_float(low))
    ),
}


class Thread:
    """A thread's registers, and the memory that it may ask; `of_lane` answers shuffles."""

    def __init__(
        self, *, lane: int = 0, thread: int = 0, shared: dict[int, int] | None = None,
        memory: dict[int, int] | None = None, of_lane: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self.registers = {"%laneid": lane, "%tid.x": thread, "code_pairs": 1024}
        self.shared = {} if shared is None else shared
        self.memory, self.of_lane = memory or {}, of_lane

    def value(self, operand: str) -> int:
        operand = operand.strip()
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return int(operand, 0)

    def at(self, operand: str) -> int:
        inside = operand.strip().removeprefix("[").removesuffix("]")
        return sum(map(self.value, inside.split("+")))

    def run(self, text: str, *inputs: int, outputs: int = 8) -> list[int]:
        """Return what $0 ... became, where the inputs come behind them."""
        for i, word in enumerate(inputs):
            self.registers[f"${outputs + i}"] = word
        for line in re.sub(r"^\s*\{|\}\s*$", "", text.strip()).split(";"):
            line = re.sub(r"^\s*\{\s*(?=\.reg)", "", line.strip())
            if line and not line.startswith((".reg", ".shared")):
                self._step(*line.split(None, 1))
        return [self.registers[f"${i}"] for i in range(outputs)]

    def _step(self, operation: str, rest: str) -> None:
        if operation.startswith("ld.global.v2"):
            both, at = rest.split("}")
            size = 2 if operation.endswith("b16") else 4
            for i, to in enumerate(both.strip(" {").split(",")):
                self.registers[to.strip()] = self.memory[self.at(at.strip(" ,")) + size * i]
            return
        if operation in ("mov.b32", "mov.u32") and "{" in rest:
            self._halves(rest)
            return
        to, *operands = rest.split(",")
        if operation.startswith("st.shared"):
            self.shared[self.at(to)] = self.value(operands[0])
            return
        if operation.startswith("ld.shared"):
            found = self.shared[self.at(operands[0])]
        elif operation.startswith("ld.global"):
            found = self.memory[self.at(operands[0])]
        elif operation.startswith("shfl.sync.idx"):
            found = self.of_lane(self.value(operands[1]) & 31)
        elif operation in ("mov.b32", "mov.u32"):
            found = self.value(operands[0])
        else:
            found = OPERATIONS[operation](*map(self.value, operands))
        self.registers[to.strip()] = found if operation == "mad.wide.u32" else found & MASK

    def _halves(self, rest: str) -> None:
        if rest.lstrip().startswith("{"):
            both, word = rest.split("}")
            low, high = both.strip(" {").split(",")
            value = self.value(word.strip(" ,"))
            self.registers[low.strip()] = value & 0xFFFF
            self.registers[high.strip()] = value >> 16
        else:
            to, both = rest.split(",", 1)
            low, high = (self.value(each) for each in both.strip(" {}").split(","))
            self.registers[to.strip()] = low & 0xFFFF | high << 16
