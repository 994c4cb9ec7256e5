"""Tables that fit the terminal, displays of progress, and files that are known to be writable."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
_FIRST = 8
"""Least width of the first column, which names the row: beneath it, only numbers count."""


def console(file: TextIO) -> Console:
    """The console of that stream: as wide as the terminal, or WIDTH."""
    return Console(file=file, width=None if file.isatty() else WIDTH)


def progress(*columns: ProgressColumn) -> Progress:
    """A display on stderr that is gone in the end, and never there where it is not a terminal."""
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


def show(table: Table, to: Console) -> None:
    """Prints a table whose cells are plain text, with every number whole at any width."""
    for part in fitted(table, to.width):
        to.print(part)


def fitted(table: Table, width: int) -> Iterator[Table]:
    """Yields the table at that width; where its numbers would be cut, several, one below the other.

    Text wraps between words. Columns that do not fit beside the others go to the next table, which
    has the first column too.
    """
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    least = [max([1, *(cell_len(w) for cell in col for w in cell.split())]) for col in columns]
    most = [max([1, *map(cell_len, col)]) for col in columns]
    title = table.title
    for group in _groups(least, width):
        part = Table(title=title, title_justify=table.title_justify)
        sizes = _sizes([least[i] for i in group], [most[i] for i in group], width)
        for i, size in zip(group, sizes):
            part.add_column(Text(columns[i][0]), width=size, overflow="fold")
        for n, row in enumerate(table.rows, start=1):
            part.add_row(*(Text(columns[i][n]) for i in group), style=row.style)
        yield part
        title = None


def _around(columns: int) -> int:
    """Characters of a row that its frame and padding take."""
    return 3 * columns + 1


def _groups(least: Sequence[int], width: int) -> Iterator[list[int]]:
    """The columns of each table; the first is in all of them."""
    group = [0]
    for i in range(1, len(least)):
        if len(group) > 1 and sum(least[j] for j in (*group, i)) + _around(len(group) + 1) > width:
            yield group
            group = [0]
        group.append(i)
    yield group


def _sizes(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Width of each column: what its words need, and a share of what is left."""
    left = width - _around(len(least)) - sum(least)
    if left < 0:
        first = max(_FIRST, least[0] + left)
        rest = max(1, width - _around(len(least)) - first)
        return [first, *(min(size, rest) for size in least[1:])]
    sizes = list(least)
    wanting = sorted(range(len(least)), key=lambda i: most[i] - least[i])
    for place, i in enumerate(wanting):
        more = min(most[i] - least[i], left // (len(wanting) - place))
        sizes[i] += more
        left -= more
    return sizes


def check_writable(flag: str, file: str | Path) -> None:
    """Raises ValueError when a file could not be written later; changes and leaves nothing."""
    path = Path(file)
    try:
        if not path.exists():
            # a link to a file that is not there yet; of a pipe, as /dev/stdout, there is no path
            path = Path(os.path.realpath(file))
        if path.is_dir():
            raise ValueError(f"{flag} {str(file)!r} is a folder: name a file")
        if not path.parent.is_dir():
            raise ValueError(f"{flag}: there is no folder for {str(file)!r}, make it first")
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            path.unlink()
        elif path.is_file():
            path.open("r+b").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as error:
        raise ValueError(
            f"{flag} {str(file)!r} cannot be written: {error.strerror}; name another file"
        ) from error
