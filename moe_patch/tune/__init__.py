"""Measures tiles on this card and writes them where the library finds them.

The file is kernels.table.user_file(): tiles.json in $MOE_PATCH_CACHE, else in
$XDG_CACHE_HOME/moe_patch, else in ~/.cache/moe_patch. It is whole after every entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import measure as measuring
from .measure import Measured
from .plan import Entry, Limit, TimeUp, fitting, room

LITTLE_MEMORY = "skipped: too little memory on this card"


@dataclass(frozen=True)
class Result:
    """An entry with its times, or with the reason why it has none.

    `experts` says how many of the block's experts were measured.
    """

    entry: Entry
    measured: Measured | None = None
    experts: int = 0
    note: str = ""


def open_file(output: Path | None, device: torch.device) -> tuple[Path, set[str]]:
    """Return the file that tiles are written to, and the keys that it has for this card and Triton.

    The file is the user's, or `output`.

    Raises:
        ValueError: `output` is something else than a file of tiles.
        OSError: the file cannot be written.
    """
    from triton import __version__

    from ..kernels import chips, table

    if output is not None and output.exists():
        try:
            table.read(output)
        except ValueError as error:
            raise ValueError(f"{output} is not overwritten, because {error}") from error
    path = output or table.user_file()
    _save(path, device, {})
    return path, set(table.entries(path, chips.name(device), __version__))


def _save(path: Path, device: torch.device, entries: dict[str, list[int]]) -> None:
    from triton import __version__

    from ..kernels import chips, table, tiles

    table.add(path, chips.name(device), chips.chip(device).arch, __version__, entries)
    tiles.forget()


def tune(
    entries: Sequence[Entry],
    dtype: torch.dtype,
    path: Path,
    device: torch.device,
    *,
    limit: Limit,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Measure entries in turn until the limit; yield each once it is in the file.

    `say` hears what is under way. Raises OSError when the file cannot be written.
    """
    for _, group in itertools.groupby(entries, lambda e: (e.block, e.tokens, e.backward)):
        todo = list(group)
        try:
            for result in _group(todo, dtype, path, device, limit, say):
                todo.remove(result.entry)
                yield result
        except TimeUp:
            return
        except torch.OutOfMemoryError:  # another program has taken memory since `fitting` looked
            pass
        yield from (Result(entry, note=LITTLE_MEMORY) for entry in todo)


def _group(
    todo: Sequence[Entry],
    dtype: torch.dtype,
    path: Path,
    device: torch.device,
    limit: Limit,
    say: Callable[[str], None],
) -> Iterator[Result]:
    """Measure the entries of one forward or one backward, with the same operands."""
    first = todo[0]
    label = f"{first.block.name}, {first.rows} rows an expert"
    limit.check()
    say(f"{label}: random weights")
    size = fitting(first.block, first.tokens, dtype, first.backward, _free(device))
    if size is None:
        return
    full, small = measuring.operands(*size, dtype, device, first.backward)
    for entry in list(todo):
        say(f"{label}: {entry.kernel} {entry.n} x {entry.k}")
        try:
            found = measuring.measure(entry, full, small, dtype, limit)
        except measuring.NoTile as error:
            yield Result(entry, note=f"skipped: no tile starts on this card ({error})")
            continue
        _save(path, device, {entry.key: [*vars(found.after).values()]})
        yield Result(entry, found, size[0].experts)


def _free(device: torch.device) -> int:
    """Return the bytes that operands may take, once those of the last group are given back."""
    if device.type != "cuda":
        return 1 << 62
    torch.cuda.empty_cache()
    return room(*torch.cuda.mem_get_info(device))
