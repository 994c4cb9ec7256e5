"""TF32: whether float32 products may run in it, and a region in which they do not.

torch has two APIs for that, and asking the older one (`allow_tf32`, `get_float32_matmul_precision`)
raises where the newer one (`fp32_precision`) has said something else since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .compat import INHERITS_PRECISION, get_precision, set_precision

_Place = tuple[str, str]
_CUDA: tuple[_Place, ...] = (("cuda", "matmul"), ("cuda", "all"), ("generic", "all"))
_CPU: tuple[_Place, ...] = (("mkldnn", "matmul"), ("mkldnn", "all"), ("generic", "all"))


def allows_tf32() -> bool:
    """Whether float32 products on a GPU may be TF32: what torch.matmul asks. Never raises."""
    return get_precision("cuda", "matmul") == "tf32"


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """float32 products are IEEE inside, by both of torch's APIs; all is as before afterwards."""
    before = [(*places[0], _own(places)) for places in (_CUDA, _CPU)]
    for backend, operator, _ in before:  # the two APIs agree from here on
        set_precision(backend, operator, "ieee")
    legacy = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(legacy)
        for place in before:
            set_precision(*place)


def _own(places: tuple[_Place, ...]) -> str:
    """What the first place says itself; "none" where it follows the others."""
    first, *rest = places
    # what it says itself or, where that is "none", what the next place says
    said = get_precision(*first)
    if said == "none" or not rest or not INHERITS_PRECISION:
        return said
    kept, other = _own(tuple(rest)), "tf32" if said == "ieee" else "ieee"
    set_precision(*rest[0], other)
    try:
        return "none" if get_precision(*first) == other else said
    finally:
        set_precision(*rest[0], kept)
