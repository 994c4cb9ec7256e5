"""bench scaling: what expert parallelism would take on more GPUs than were run.

A model of one MoE layer. Its rates are those that `bench distributed` measured, but for the
network between hosts, which is assumed. docs/distributed.md derives the volumes.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from .. import output
from ..shapes import Shape, find
from .kind import Flags, FromFiles

RANKS = (2, 4, 8, 64, 512)
HOST = 8  # GPUs
NETWORK_GB_S = 50.0  # of one GPU: 400 Gbit/s
BYTES = 2  # of a number in bfloat16


@dataclass(frozen=True)
class Rates:
    """Of one GPU and inside one host; from a CSV file."""

    shape: str
    ranks: int
    tokens: int  # of each rank
    block_ms: float  # a forward under expert parallelism, its all-reduce included
    flops_ms: float  # of the experts' products, each millisecond
    all_reduce_gb_s: float
    all_to_all_gb_s: float


@dataclass(frozen=True)
class Layer:
    """The forward of a layer's experts on one of `ranks` GPUs. A backward computes twice that and
    moves as much."""

    way: str  # "all-reduce" (ranks share their tokens) or "all-to-all" (each has its own)
    ranks: int
    group: int  # of them share the experts; more than experts cannot
    compute_ms: float
    moved_mb: float  # by one rank
    network_mb: float  # of that, to other hosts
    comm_ms: float
    tokens_s: float  # of all ranks, nothing hidden

    @property
    def share(self) -> float:
        """Of the time, what is communication. Above a half, computing cannot hide it."""
        return self.comm_ms / (self.comm_ms + self.compute_ms)


def read(file: Path) -> Rates:
    """What the model needs of a CSV file of `bench --distributed`.

    Raises:
        ValueError: it is no such file, or the run that wrote it was cut short.
    """
    try:
        with file.open(newline="") as lines:
            rows = {row["task"]: row for row in csv.DictReader(lines)}
        block, reduce, exchange = (
            rows[task] for task in ("ep block forward", "all_reduce", "all_to_all")
        )
        shape, ranks, tokens = block["shape"], int(block["ranks"]), int(block["tokens"])
        spent = float(block["ms"]) - float(reduce["ms"])
        flops = find(shape).flops(tokens) / ranks
        bandwidths = float(reduce["gb_s"]), float(exchange["gb_s"])
        if spent <= 0:
            raise ValueError("its all-reduce takes longer than the block")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        known = isinstance(error, KeyError)
        found = f"has no {error.args[0]!r}" if known else f"is broken ({error})"
        raise ValueError(
            f"{file} {found}: the CSV file of a whole bench --distributed is read"
        ) from error
    return Rates(shape, ranks, tokens, float(block["ms"]), flops / spent, *bandwidths)


def layers(
    rates: Rates, ranks: Sequence[int] = RANKS, *, host: int = HOST,
    network_gb_s: float = NETWORK_GB_S,
) -> list[Layer]:  # fmt: skip
    """The model at these numbers of GPUs, with the tokens of each rank as in the measurement."""
    shape, found = find(rates.shape), []
    for way in (_all_reduce, _all_to_all):
        for count in ranks:
            group = math.gcd(count, shape.num_experts)
            layer = way(rates, shape, group, min(host, group), network_gb_s)
            copies = count // group
            found.append(replace(layer, ranks=count, tokens_s=copies * layer.tokens_s))
    return found


def _all_reduce(rates: Rates, shape: Shape, ranks: int, host: int, network: float) -> Layer:
    """Reduce-scatter inside hosts, all-reduce of the parts between them, all-gather inside."""
    compute = shape.flops(rates.tokens) / ranks / rates.flops_ms
    hosts, mb = ranks // host, rates.tokens * shape.hidden_size * BYTES / 1e6
    inside, outside = 2 * mb * (host - 1) / host, 2 * mb / host * (hosts - 1) / hosts
    comm = inside / rates.all_reduce_gb_s + outside / network
    tokens_s = 1e3 * rates.tokens / (compute + comm)
    return Layer("all-reduce", ranks, ranks, compute, inside + outside, outside, comm, tokens_s)


def _all_to_all(rates: Rates, shape: Shape, ranks: int, host: int, network: float) -> Layer:
    """Every slot to its expert's rank and back, experts equally busy."""
    compute = shape.flops(rates.tokens) / rates.flops_ms
    slots = 2 * rates.tokens * shape.top_k * shape.hidden_size * BYTES / 1e6
    inside, outside = slots * (host - 1) / ranks, slots * (ranks - host) / ranks
    comm = inside / rates.all_to_all_gb_s + outside / network
    tokens_s = 1e3 * rates.tokens * ranks / (compute + comm)
    return Layer("all-to-all", ranks, ranks, compute, inside + outside, outside, comm, tokens_s)


def checked(rates: Rates, others: Sequence[Rates]) -> list[tuple[int, float, float]]:
    """(ranks, the model's ms of a block's forward, measured) of runs on other numbers of GPUs."""
    found = []
    for other in others:
        if (other.shape, other.tokens) == (rates.shape, rates.tokens):
            layer = _all_reduce(rates, find(rates.shape), other.ranks, other.ranks, NETWORK_GB_S)
            found.append((other.ranks, layer.compute_ms + layer.comm_ms, other.block_ms))
    return found


def scaling_table(rates: Rates, network_gb_s: float) -> Table:
    """A layer's forward on more GPUs, from measured rates."""
    header = ("", "GPUs", "share experts", "compute ms", "moved MB", "of it to hosts", "comm ms")
    title = (
        f"{rates.shape}, a layer's forward, {rates.tokens} tokens a GPU; rates of {rates.ranks} "
        f"GPUs, {HOST} a host, {network_gb_s:g} GB/s between hosts (assumed)"
    )
    table = Table(*header, "share", "tokens/s", title=title, title_justify="left")
    for layer in layers(rates, network_gb_s=network_gb_s):
        cells = [layer.way, f"{layer.ranks}", f"{layer.group}", f"{layer.compute_ms:.3f}"]
        cells += [f"{layer.moved_mb:.1f}", f"{layer.network_mb:.1f}", f"{layer.comm_ms:.3f}"]
        table.add_row(*cells, f"{layer.share:.0%}", f"{layer.tokens_s:.3g}")
    return table


class Scaling(FromFiles):
    """`bench scaling`."""

    name = "scaling"
    help = "more GPUs, from CSV files of `distributed`; measures nothing"
    about = "The first file has the rates. The others are compared with what they predict."
    switch, does = "--scaling", "measures nothing"

    def arguments(self, flag: Flags, old: bool) -> None:
        files = "--scaling" if old else "files"
        more = {"dest": "files"} if old else {}
        flag(files, metavar="FILE", nargs="+", type=Path, help="of `bench distributed`", **more)
        text = f"of a GPU to other hosts; default: {NETWORK_GB_S:g}"
        flag("--network", metavar="GB/S", type=float, help=text)

    def chosen(self, options: argparse.Namespace) -> bool:
        return bool(options.files) or options.network is not None

    def takes_no(self, flag: str) -> str:
        return f"{self.switch} {self.does} and takes no {flag}: leave it out"

    def refuse(self, options: argparse.Namespace) -> None:
        if not options.files:
            raise ValueError("--network is for --scaling: name its CSV files")
        if options.network is not None and not 0 < options.network < math.inf:
            raise ValueError(f"--network {options.network}: a rate above 0 is needed, in GB/s")

    def answer(self, options: argparse.Namespace) -> None:
        network = NETWORK_GB_S if options.network is None else options.network
        rates, *others = map(read, options.files)
        output.show(scaling_table(rates, network), output.console(sys.stdout))
        for ranks, model, measured in checked(rates, others):
            print(f"{ranks} GPUs: model {model:.3f} ms, measured {measured:.3f} ms")


KIND = Scaling()
