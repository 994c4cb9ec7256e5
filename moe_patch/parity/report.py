"""What `check_parity` found: sections of rows, printed as tables, and where it was found."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

from ..paths import PATHS
from ..version import __version__
from .law import Row
from .loss import Loss


@dataclass(frozen=True)
class Section:
    """The rows of one block in one dtype at one number of tokens."""

    block: str
    dtype: str
    tokens: int
    rows: list[Row]
    remark: str = ""


@dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found. `str()` is a plain-text table."""

    sections: list[Section]
    environment: str
    skipped: list[str] = field(default_factory=list)
    """Lines about what was not checked, with the reason."""
    paths: list[str] = field(default_factory=list)
    """The ways through the experts that ran, of `moe_patch.paths.PATHS`."""
    losses: list[Loss] = field(default_factory=list)
    """What quantising the experts lost, where the original was given; not part of the verdict."""

    @property
    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section.rows]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.rows:
            return "parity FAILED: there was nothing to check"
        good = sum(row.passed for row in self.rows)
        word = "passed" if self.passed else "FAILED"
        return f"parity {word}: {good} of {len(self.rows)} rows hold"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for json."""
        return {"passed": self.passed, **asdict(self)}

    def __add__(self, other: ParityReport) -> ParityReport:
        skipped = [*self.skipped, *(line for line in other.skipped if line not in self.skipped)]
        paths = [path for path in PATHS if path in {*self.paths, *other.paths}]
        sections, losses = [*self.sections, *other.sections], [*self.losses, *other.losses]
        return ParityReport(sections, self.environment, skipped, paths, losses)

    def __str__(self) -> str:
        lines = [f"moe_patch parity on {self.environment}"]
        for section in self.sections:
            lines += ["", title(section)]
            lines += [f"  {line}" for line in _columns([HEADER, *map(cells, section.rows)])]
        lines += ["", "lost by quantisation:"] if self.losses else []
        lines += [f"  {loss}" for loss in self.losses]
        lines += [""] if self.skipped else []
        lines += [f"not checked: {line}" for line in self.skipped]
        return "\n".join([*lines, "", *self.ways, self.verdict])

    @property
    def ways(self) -> list[str]:
        """Lines about the paths that ran and those that did not."""
        if not self.paths:
            return []
        idle = [f"{name} ({when})" for name, when in PATHS.items() if name not in self.paths]
        return [f"ran: {', '.join(self.paths)}", f"did not run: {', '.join(idle) or 'none'}"]


HEADER = ("tensor", "our error", "HF's", "ratio", "our max", "HF's max", "pass", "")


def title(section: Section) -> str:
    """The line above a section's table."""
    remark = f"; {section.remark}" if section.remark else ""
    return f"{section.block}, {section.dtype}, {section.tokens} tokens{remark}"


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of HEADER."""
    errors = (row.our_rms, row.hf_rms, row.ratio, row.our_max, row.hf_max)
    shown = ["" if e is None else f"{e:.2f}" if e is row.ratio else f"{e:.2e}" for e in errors]
    return (row.tensor, *shown, "yes" if row.passed else "NO", row.note)


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table)]
    padded = [[text.ljust(width) for text, width in zip(row, widths)] for row in table]
    return ["  ".join(row).rstrip() for row in padded]


def environment(device: torch.device | str = "cpu") -> str:
    """Card and versions in one line."""
    device = torch.device(device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}"
    if device.type == "cpu":
        card += f" ({platform.machine()}, Triton's interpreter)"
    return ", ".join([card, *(f"{name} {found}" for name, found in versions().items() if found)])


def versions() -> dict[str, str | None]:
    """Installed versions; None for what is absent."""
    found: dict[str, str | None] = {"moe_patch": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
