"""Warnings that are given once, under torch.compile too."""

from __future__ import annotations

import functools
import warnings

import torch


def say_unfused(reason: str) -> None:
    """Says once why Hugging Face's own forward runs."""
    warn_once(f"moe_patch runs Hugging Face's own forward: {reason}.")


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """A UserWarning, the first time only; torch.compile calls it while it traces."""
    _warn_uncompiled(message)


@functools.cache
def _warn_uncompiled(message: str) -> None:
    warnings.warn(message, stacklevel=2)
