"""Whether all ranks that hold shards of a model patch it, and with the same software."""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import transformers
from torch import Tensor, distributed

from .compat import default_store
from .recognise.wrapped import is_dtensor
from .version import __version__

WARN_AFTER = timedelta(seconds=15)
FAIL_AFTER = timedelta(minutes=5)
"""Ranks load at different speeds; a rank that never patches would have others wait for ever."""

_turns: Counter[tuple[int, ...]] = Counter()


def agree(parameters: Iterable[Tensor], **about: object) -> None:
    """Returns once the other ranks that hold shards of these parameters (DTensors) were here too.

    A ring: each rank looks at the next one, through the store behind torch.distributed, so nothing
    is left waiting in a collective. Without shards, or on one rank, it does nothing.

    Args:
        parameters: of the model.
        about: what must be the same on all ranks, besides the versions of packages.

    Raises:
        RuntimeError: the next rank patched something else or with other versions, or did not patch
            for FAIL_AFTER.
    """
    ranks = _sharing(parameters)
    if len(ranks) < 2 or distributed.get_backend() == "fake":
        return
    store = default_store()
    if store is None:
        return
    me = distributed.get_rank()
    following = ranks[(ranks.index(me) + 1) % len(ranks)]
    _turns[ranks] += 1
    group = f"{len(ranks)}.{zlib.crc32(repr(ranks).encode()):08x}.{_turns[ranks]}"
    mine = _versions() | about
    store.set(f"moe_patch/{group}/{me}", json.dumps(mine))
    theirs = json.loads(_wait(store, f"moe_patch/{group}/{following}", me, following))
    differ = [f"{name} {theirs.get(name)} and not {mine[name]}" for name in mine if
              theirs.get(name) != mine[name]]  # fmt: skip
    if differ:
        raise RuntimeError(
            f"rank {following} patched its shards of this model with {', '.join(differ)} as rank "
            f"{me}: install and set the same on every rank."
        )


def _wait(store: distributed.Store, key: str, me: int, other: int) -> bytes:
    lacks = f"rank {me} has patched its shards of this model and rank {other} has not"
    try:
        store.wait([key], WARN_AFTER)
    except RuntimeError:
        warnings.warn(f"{lacks}, which rank {me} waits for: patch on every rank.", stacklevel=4)
        try:
            store.wait([key], FAIL_AFTER)
        except RuntimeError as error:
            raise RuntimeError(f"{lacks}: patch on every rank, or on none.") from error
    return store.get(key)


def _sharing(parameters: Iterable[Any]) -> tuple[int, ...]:
    """The ranks of the largest mesh that a parameter is spread over; none without."""
    meshes = {parameter.device_mesh for parameter in parameters if is_dtensor(parameter)}
    return max((tuple(sorted(m.mesh.flatten().tolist())) for m in meshes), key=len, default=())


def _versions() -> dict[str, object]:
    triton = sys.modules.get("triton")
    return {
        "moe_patch": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": getattr(triton, "__version__", None),
    }
