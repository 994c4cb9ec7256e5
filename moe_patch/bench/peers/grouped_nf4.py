"""grouped-nf4-gemm, the kernels of experts4bit-qlora: NF4 products and experts beside ours."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import kernels, reference
from ...formats.nf4 import NF4
from ...formats.packed import Packed, dequantize, quantize
from ...ops.experts import fused_experts
from ...ops.grouped import input_gradient, sort
from ...order import ExpertOrder
from .compare import Case, Compared, Comparison, Contender, Outputs, Part, Peer, compare
from .experts import Experts, drawn


@dataclass(frozen=True)
class Step:
    """A block's experts in NF4, and rows in expert order: S = T * K of them."""

    of: Experts
    gate_up: Packed  # [E, 2I, H]
    down: Packed  # [E, H, I]
    order: ExpertOrder
    x: Tensor  # [S, H]
    act: Tensor  # [S, I]
    d_pre: Tensor  # [S, 2I]
    d_rows: Tensor  # [S, H]

    @property
    def ends(self) -> list[int]:
        """Return the first row of every expert, and the number of rows."""
        return self.order.expert_offsets.tolist()


def step(of: Experts) -> Step:
    """Quantises both stacks and draws the rows of every product."""
    order, _ = sort(of.index, len(of.down), of.x.dtype)
    token = order.row_to_slot.long() // of.index.shape[1]  # [S]
    draw = torch.Generator(of.x.device).manual_seed(1)

    def normal(columns: int) -> Tensor:
        made = torch.empty(len(token), columns, dtype=of.x.dtype, device=of.x.device)
        return made.normal_(generator=draw)

    inner = of.down.shape[2]
    return Step(
        of, quantize(of.gate_up, "nf4"), quantize(of.down, "nf4"), order,
        of.x[token], normal(inner), normal(2 * inner), of.d_out[token],
    )  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One product of rows and a stack of weights, or of its transposes."""

    name: str
    rows: Callable[[Step], Tensor]  # [S, K], or [S, N] where it is of transposes
    weight: Callable[[Step], Packed]  # [E, N, K]
    size: int
    """Products of all rows with [H, I] that it amounts to."""
    gradient: bool = False
    """Whether it is of the transposes."""

    def weights(self, step: Step, dtype: torch.dtype) -> Tensor:
        """Return all weights [E, N, K], or their transposes, in `dtype`."""
        found = dequantize(self.weight(step), dtype)
        return found.mT if self.gradient else found

    def parts(self, step: Step) -> Iterator[Part]:
        """Yields each expert's rows of the result."""
        rows = self.rows(step)
        both = [self.weights(step, dtype) for dtype in (rows.dtype, torch.float64)]
        for expert, (begin, end) in enumerate(zip(step.ends, step.ends[1:])):
            found = [rows[begin:end].to(each.dtype) @ each[expert].T for each in both]
            yield Part("rows", slice(begin, end), *found)


PRODUCTS = (
    Product("nf4, gate_up product", lambda of: of.x, lambda of: of.gate_up, 2),
    Product("nf4, down product", lambda of: of.act, lambda of: of.down, 1),
    Product("nf4, d_act rows", lambda of: of.d_rows, lambda of: of.down, 1, gradient=True),
    Product("nf4, d_hidden rows", lambda of: of.d_pre, lambda of: of.gate_up, 2, gradient=True),
)


def _ours(product: Product, step: Step) -> Contender:
    rows, weight = product.rows(step), product.weight(step)
    columns = weight.shape[2] if product.gradient else weight.shape[1]
    out = torch.empty(len(rows), columns, dtype=rows.dtype, device=rows.device)

    def forward() -> None:
        for part in kernels.dequantize.few_at_a_time(
            weight, None, step.order, rows.dtype, None, backward=False
        ):
            kernels.grouped_gemm.grouped_gemm(rows, part.weight, part.order, out=out)

    def backward() -> None:
        input_gradient(rows, weight, None, step.order, out=out)

    call = backward if product.gradient else forward
    return Contender({"": call}, lambda _: {"rows": out})


class Theirs:
    """The package's functions with the arguments that they share.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self, step: Step) -> None:
        package: Any = importlib.import_module("nf4_grouped")
        self.forward, self.backward = package.gemm_4bit_grouped, package.dgrad_4bit_grouped
        sizes = [end - begin for begin, end in zip(step.ends, step.ends[1:])]
        used = [expert for expert, size in enumerate(sizes) if size]
        ids = torch.tensor(used, dtype=torch.int32, device=step.x.device)
        self.groups = [sizes[expert] for expert in used], ids

    @staticmethod
    def stored(weight: Packed) -> tuple[Tensor, Tensor]:
        """(codes, scales) as bitsandbytes has them: the first of two codes in the high half."""
        codes = weight.codes
        return (codes << 4 | codes >> 4).contiguous(), weight.scales


def _theirs(product: Product, step: Step) -> Contender:
    theirs = Theirs(step)
    run = theirs.backward if product.gradient else theirs.forward
    call = functools.partial(
        run, product.rows(step), *Theirs.stored(product.weight(step)), *theirs.groups
    )
    return Contender({"": call}, lambda made: {"rows": made})


def _their_experts(step: Step) -> Contender:
    """A forward of the experts: their products, PyTorch between and after them."""
    theirs, of = Theirs(step), step.of
    gate_up, down = Theirs.stored(step.gate_up), Theirs.stored(step.down)
    slot = step.order.row_to_slot.long()  # [S]
    token = slot // of.index.shape[1]
    weights = of.weights.flatten()[slot, None].to(of.x.dtype)  # [S, 1]

    def call() -> Tensor:
        gate, up = theirs.forward(of.x[token], *gate_up, *theirs.groups).chunk(2, dim=1)
        rows = theirs.forward(F.silu(gate) * up, *down, *theirs.groups) * weights  # [S, H]
        return torch.zeros_like(of.x).index_add_(0, token, rows)

    return Contender({"": call}, lambda made: {"output": made})


def _experts(case: str, step: Step) -> Comparison:
    of = step.of
    weights = of.weights.to(of.x.dtype)

    def call() -> Tensor:
        with torch.no_grad():
            return fused_experts(of.x, step.gate_up, step.down, of.index, weights)

    def read(made: Tensor) -> Outputs:
        return {"output": made}

    def parts() -> Iterator[Part]:
        found = []
        for dtype in (of.x.dtype, torch.float64):
            stacks = [dequantize(each, dtype) for each in (step.gate_up, step.down)]
            x, scale = of.x.to(dtype), weights.to(dtype)
            found.append(reference.fused_experts(x, *stacks, of.index, scale))
        yield Part("output", ..., *found)

    return Comparison(
        case, "nf4, experts, forward", 3 * of.products, Contender({"": call}, read),
        functools.partial(_their_experts, step), parts, of.x.dtype,
    )  # fmt: skip


def comparisons(case: str, of: Experts) -> Iterable[Comparison]:
    """The four products of a step with frozen experts, and a whole forward."""
    made = step(of)
    for product in PRODUCTS:
        yield Comparison(
            case, product.name, product.size * of.products, _ours(product, made),
            functools.partial(_theirs, product, made), functools.partial(product.parts, made),
            of.x.dtype,
        )  # fmt: skip
    yield _experts(case, made)


def compared(case: Case, seconds: float) -> Iterator[Compared]:
    """Yields what each row gave."""
    size = case.size
    if size.hidden_size % NF4.group or size.intermediate_size % NF4.group:
        why = f"its groups of {NF4.group} do not divide {size.hidden_size} and "
        why += f"{size.intermediate_size}"
        yield Compared(notes=[f"{case.label}: {PEER.name} left out, {why}"])
        return
    for row in comparisons(case.label, drawn(case)):
        yield compare(row, PEER.name, seconds=seconds)


PEER = Peer(
    "grouped-nf4-gemm", "nf4_grouped", "pip install --no-deps grouped-nf4-gemm==0.51.0", compared
)
