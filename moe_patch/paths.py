"""The ways through the experts, and which of them ran: for the certificate, and for nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

PATHS = {
    "decode": "a few tokens without gradients, no sort",
    "sorted": "slots sorted by expert, grouped GEMMs",
    "fp8": "the same in FP8",
    "by parts": "grouped GEMM, the class's own gate, grouped GEMM",
}
"""Every way, and when it is taken."""

_seen: ContextVar[set[str] | None] = ContextVar("moe_patch_paths", default=None)


def ran(path: str) -> None:
    """Says that this path runs now, in this thread."""
    seen = _seen.get()
    if seen is not None:
        seen.add(path)


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """Yields the set that `ran` fills inside, in this thread."""
    seen: set[str] = set()
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)
