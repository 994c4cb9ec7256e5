"""Does a patched model compute what Hugging Face's does? `check_parity` says (docs/parity.md)."""

from .check import check_parity
from .law import Row, judge
from .report import HEADER, ParityReport, Section, cells, environment, title, versions

__all__ = [
    "HEADER",
    "ParityReport",
    "Row",
    "Section",
    "cells",
    "check_parity",
    "environment",
    "judge",
    "title",
    "versions",
]
