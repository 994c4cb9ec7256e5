"""Versions of torch, Triton and transformers that the tests run with, and what others mean.

The kernels do not run with older ones; newer ones are used, and a sentence says that they are new.
docs/versions.md has the table.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

from .notices import warn_once

TESTED = {
    "torch": ((2, 11), (2, 15)),
    "triton": ((3, 6), (3, 9)),
    "transformers": ((5, 17), (5, 24)),
}
"""The oldest and the newest minor version of each."""


def installed(package: str) -> str | None:
    """The version of a package, without importing it; None when nobody can say."""
    found = getattr(sys.modules.get(package), "__version__", None)
    if found is None:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:  # nightly builds of Triton have other names
            return None
    return str(found)


def release(version: str) -> tuple[int, ...]:
    """(major, minor), as in 2.15.0a0+git -> (2, 15)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def tested(package: str) -> str:
    """The range of a package, as in "torch 2.11 to 2.15"."""
    oldest, newest = map(_text, TESTED[package])
    return f"{_name(package)} {oldest} to {newest}"


@functools.cache
def why_too_old() -> str | None:
    """None where torch and Triton are new enough for the kernels, else the reason."""
    for package in ("torch", "triton"):
        version, oldest = installed(package), TESTED[package][0]
        if version and release(version) < oldest:
            return (
                f"{_name(package)} {version} is too old for the fused kernels, which need "
                f"{_text(oldest)} or later (pip install --upgrade torch triton)"
            )
    return None


def why_untested() -> str | None:
    """None where no package is newer than in the tests, else a sentence that names it."""
    versions = {package: installed(package) for package in TESTED}
    new = [name for name, found in versions.items() if found and release(found) > TESTED[name][1]]
    if not new:
        return None
    found = ", ".join(f"{_name(package)} {versions[package]}" for package in new)
    return (
        f"moe_patch has not been tested with {found}, only with {', '.join(map(tested, new))}: "
        "`python -m moe_patch parity` shows whether results are right"
    )


def say_untested() -> None:
    """Warns once of packages that are newer than in the tests."""
    reason = why_untested()
    if reason:
        warn_once(f"{reason}.")


def _name(package: str) -> str:
    return "Triton" if package == "triton" else package


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
