"""DeepGEMM: grouped products in FP8, at the sizes of `bench fp8`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..fp8 import (
    CONTIGUOUS,
    MASKED,
    MASKED_ROWS,
    Product,
    contiguous_product,
    masked_product,
)
from .compare import Call, Case, Compared, Comparison, Contender, Outputs, Part, Peer, compare

INSTALL = (
    "git clone --recursive https://github.com/deepseek-ai/DeepGEMM && cd DeepGEMM && ./install.sh "
    "(needs nvcc)"
)


def _contender(product: Product, call: Call) -> Contender:
    def read(made: Tensor) -> Outputs:
        return {"out": made[product.judged]}

    return Contender({"": call}, read)


def _theirs(product: Product) -> Contender:
    """DeepGEMM's side. Raises whatever the package does where it does not fit."""
    package: Any = importlib.import_module("deep_gemm")
    lhs, lhs_scale, rhs, rhs_scale = product.operands
    # as its kernels read them, so that no call copies them
    a = lhs, package.get_mn_major_tma_aligned_tensor(lhs_scale)
    b = rhs, rhs_scale
    out = torch.empty(*lhs.shape[:-1], rhs.shape[1], dtype=torch.bfloat16, device=lhs.device)
    if product.masked:
        mean = int(product.groups.float().mean())

        def call() -> Tensor:
            package.m_grouped_fp8_gemm_nt_masked(a, b, out, product.groups, mean)
            return out
    else:
        sizes = product.groups.diff()  # [G]
        groups = torch.arange(len(rhs), dtype=torch.int32, device=lhs.device)
        of_row = groups.repeat_interleave(sizes)  # [G * M]

        def call() -> Tensor:
            package.m_grouped_fp8_gemm_nt_contiguous(a, b, out, of_row)
            return out

    return _contender(product, call)


def _parts(product: Product) -> Iterator[Part]:
    yield Part("out", ..., *product.expected())


def comparison(product: Product) -> Comparison:
    """One row."""
    return Comparison(
        "FP8, scales 1x128 and 128x128", product.name, product.flops,
        _contender(product, product.run), functools.partial(_theirs, product),
        functools.partial(_parts, product), torch.bfloat16, graph=product.masked,
    )  # fmt: skip


def comparisons() -> Iterable[Comparison]:
    """The contiguous rows, then the masked ones."""
    for sizes in CONTIGUOUS:
        yield comparison(contiguous_product(*sizes))
    for sizes in MASKED:
        for count in MASKED_ROWS:
            yield comparison(masked_product(*sizes, count))


def compared(_: Case, seconds: float) -> Iterator[Compared]:
    """Yields what each row gave."""
    for row in comparisons():
        yield compare(row, PEER.name, seconds=seconds)


PEER = Peer("DeepGEMM", "deep_gemm", INSTALL, compared, fixed=True)
