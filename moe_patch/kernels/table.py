"""Measured tiles on file: the table that is shipped, tuned.json, and the user's own.

`python -m moe_patch tune` writes the user's: tiles.json in $MOE_PATCH_CACHE, else in
$XDG_CACHE_HOME/moe_patch, else in ~/.cache/moe_patch. Both files are a list with a table a card:

    [{"format": 1, "card": "NVIDIA H200", "arch": "sm_90", "triton": "3.6.0",
      "tiles": {"gate_up bfloat16 n768 k2048 m128 r1024": [bm, bn, bk, warps, stages, group_m]}}]

A user's table holds for its card and its Triton; a shipped one for every card of its architecture.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

FORMAT = 1
SHIPPED = Path(__file__).with_name("tuned.json")
KEY = re.compile(
    r"((?:gate_up|gemm|dgate)(?:_w8)?|dw|dw_gathered) (bfloat16|float16|float32)"
    r" n\d+ k\d+ m(\d+) r\d+"
)


def user_file() -> Path:
    """Where `tune` writes and the library reads; it need not exist."""
    folder = os.environ.get("MOE_PATCH_CACHE")
    if not folder:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(caches, "moe_patch")
    return Path(folder) / "tiles.json"


def key(kernel: str, dtype: str, n: int, k: int, m: int, rows: int) -> str:
    """Of an entry; `rows` an expert count as the next power of two, 1 to 4096."""
    bucket = 1 << (min(max(rows, 1), 4096) - 1).bit_length()
    return f"{kernel} {dtype} n{n} k{k} m{m} r{bucket}"


def read(path: Path) -> list[dict[str, Any]]:
    """The tables of a file. OSError when it cannot be read, ValueError saying what is wrong."""
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no whole JSON file") from error
    if not isinstance(tables, list):
        raise ValueError("it is no list of tables")
    for table in tables:
        _check(table)
    return tables


def _check(table: Any) -> None:
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else table
        raise ValueError(f"its format is {str(found)[:40]!r} and {FORMAT} is known")
    for name in ("card", "arch", "triton"):
        if not isinstance(table.get(name), str):
            raise ValueError(f"a table has no {name}")
    if not isinstance(table.get("tiles"), dict):
        raise ValueError("a table has no tiles")
    for name, tile in table["tiles"].items():
        if not _valid(name, tile):
            raise ValueError(f"the entry {name[:60]!r} is {str(tile)[:60]}")


def _valid(name: str, tile: Any) -> bool:
    """[bm, bn, bk, warps, stages, group_m]; bm is the key's but for dw, which has its own, and bk
    divides a block of 128 where weights are FP8."""
    found = KEY.fullmatch(name)
    if not found or not isinstance(tile, list) or [type(x) for x in tile] != [int] * 6:
        return False
    bm, bn, bk, warps, stages, group_m = tile
    blocks = all(size in (16, 32, 64, 128, 256) for size in (bm, bn, bk))
    blocks &= bk <= 128 or not found[1].endswith("_w8")
    depth = warps in (1, 2, 4, 8, 12, 16) and 1 <= stages <= 8 and 1 <= group_m <= 64
    return blocks and depth and (found[1].startswith("dw") or bm == int(found[3]))


def same_triton(one: str, other: str) -> bool:
    """Whether the versions agree in major and minor."""
    return one.split(".")[:2] == other.split(".")[:2]


@functools.cache
def shipped(card: str, arch: str) -> dict[str, list[int]]:
    """Entries for an architecture, those measured on this very card first."""
    found: dict[str, list[int]] = {}
    for table in sorted(read(SHIPPED), key=lambda table: table["card"] == card):
        if table["arch"] == arch:
            found |= table["tiles"]
    return found


@functools.cache
def user(card: str, triton: str) -> dict[str, list[int]]:
    """The user's entries for this card and Triton; warns once when there is a file to ignore."""
    path = user_file()
    try:
        tables = read(path)
        mine = [table for table in tables if table["card"] == card]
        if not mine:
            cards = ", ".join(table["card"] for table in tables)
            raise ValueError(f"it is of {cards or 'no card'} and this is {card}")
        if not same_triton(mine[0]["triton"], triton):
            raise ValueError(f"it is of Triton {mine[0]['triton']} and this is {triton}")
        return mine[0]["tiles"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the measured tiles in {path} are ignored, because {error}: "
            "`python -m moe_patch tune` measures them anew.",
            stacklevel=2,
        )
        return {}


def entries(path: Path, card: str, triton: str) -> dict[str, list[int]]:
    """The tiles in a file for this card and Triton; none in one that is missing or broken."""
    try:
        tables = read(path)
    except (FileNotFoundError, ValueError):
        return {}
    mine = (t for t in tables if t["card"] == card and same_triton(t["triton"], triton))
    return next(mine, {"tiles": {}})["tiles"]


def add(path: Path, card: str, arch: str, triton: str, tiles: dict[str, list[int]]) -> None:
    """Puts tiles into a card's table of the file, whole or not at all; a broken file starts anew.

    Raises OSError when the file cannot be written.
    """
    try:
        tables = read(path)
    except (FileNotFoundError, ValueError):
        tables = []
    tiles = dict(sorted((entries(path, card, triton) | tiles).items()))
    table = {"format": FORMAT, "card": card, "arch": arch, "triton": triton, "tiles": tiles}
    tables = [t for t in tables if t["card"] != card] + [table]
    text = json.dumps(tables, indent=1)
    text = re.sub(r"\[\s+(\d[\d,\s]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name that nobody can foresee: a link planted there would be written through
    descriptor, whole = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(whole, 0o666 & ~_umask())
        os.replace(whole, path)
    finally:
        Path(whole).unlink(missing_ok=True)


def _umask() -> int:
    """The process's mask of file modes, which only setting it tells."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
