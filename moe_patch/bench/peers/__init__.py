"""bench peers: other libraries' kernels beside ours, in one process, with errors beside times.

A file a peer. Nothing of a peer is imported before its rows are asked for, and a peer that is not
installed or fails is a note.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Sequence

import torch
from rich.table import Table

from ... import shapes
from ...parity import ParityReport
from ...usage import add_shape, add_tokens, positive
from .. import routing as routed
from ..kind import Flags, Run, Timed, add_files
from ..timing import OURS, free, short_of
from . import deep_gemm, grouped_nf4, liger, peft, quack
from .compare import Case, Compared, LostDevice, Peer, PeerTiming, why

PEERS = {
    peer.name: peer
    for peer in (quack.PEER, liger.PEER, deep_gemm.PEER, peft.PEER, grouped_nf4.PEER)
}
SHAPE, TOKENS = "qwen3_30b", 16384
SECONDS = 40


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases asked for, with each token's choice of experts."""
    asked = itertools.product(
        options.shape or [SHAPE], options.tokens or [TOKENS], options.routing or [routed.UNIFORM]
    )
    found = []
    for shape, tokens, how in asked:
        size = shapes.find(shape)
        found.append(Case(shape, size, tokens, how, routed.choices(how, size, tokens)))
    return found


def missing(peer: Peer) -> str | None:
    """Why the peer cannot be used, and how to install it; None if it can."""
    how = f"To install it: {peer.install}"
    if importlib.util.find_spec(peer.package) is None:
        return f"{peer.name} is not installed. {how}"
    try:
        importlib.import_module(peer.package)
    except Exception as error:  # whatever a package raises
        return f"{peer.name} cannot be imported, {why(error)}. {how}"
    return None


def peer_tables(timings: Sequence[PeerTiming]) -> Iterable[Table]:
    """One for each case of rows that stand together; a line a row and implementation."""
    header = ["", "", "ms", "p10 to p90", "TFLOP/s", "error", f"{OURS} is"]
    for case, group in itertools.groupby(timings, lambda t: t.case):
        table = Table(*header, title=case, title_justify="left")
        for t in group:
            name = t.implementation + (f" ({t.configuration})" if t.configuration else "")
            cells = [f"{t.ms:.3f}", f"{t.p10:.3f} to {t.p90:.3f}", f"{t.tflops:.0f}"]
            cells.append("not finite" if t.error is None else f"{t.error:.2e}")
            cells.append("" if t.implementation == OURS else f"{t.speedup:.2f} x as fast")
            table.add_row(t.row, name, *cells)
        yield table


class Peers(Timed):
    """`bench peers`."""

    name = "peers"
    help = "beside QuACK, Liger and others, where installed"
    about = (
        "Times and errors in one process. DeepGEMM's rows have fixed sizes. A peer that is not "
        "installed, or fails, is a note."
    )
    switch, does = "--peers", "times other libraries"

    def arguments(self, flag: Flags, old: bool) -> None:
        if old:
            flag("--peers", action="store_true")
        text = f"of {', '.join(PEERS)}; default: all"
        flag("--only", nargs="+", choices=PEERS, metavar="PEER", help=text)
        add_shape(flag, SHAPE)
        add_tokens(flag, [TOKENS])
        text = f"of {', '.join(routed.NAMES)}, or a file as `bench block` takes it"
        flag("--routing", nargs="+", metavar="NAME", help=f"{text}; default: uniform")
        text = f"a row tries configurations of QuACK that long; default: {SECONDS}"
        flag("--seconds", type=positive, metavar="N", help=text)
        add_files(flag)

    def chosen(self, options: argparse.Namespace) -> bool:
        return options.peers

    def refuse(self, options: argparse.Namespace) -> None:
        for name, how in itertools.product(options.shape or [SHAPE], options.routing or [""]):
            size = shapes.find(name)
            if how:
                routed.check(how)
                routed.choices(how, size, 1)

    def measure(self, run: Run) -> ParityReport | None:
        every = cases(run.options)
        for case in every:
            if case.routing != routed.UNIFORM:
                busiest = routed.load(case.index, case.size.num_experts)
                run.notes.append(f"{case.label}: the busiest expert has {busiest:.1f} x the mean")
        todo = [
            (peer, case)
            for peer in (PEERS[name] for name in run.options.only or PEERS)
            for case in (every[:1] if peer.fixed else every)
        ]
        try:
            for peer, case in run.each(todo, lambda pair: f"{pair[0].name} {pair[1].label}"):
                with contextlib.redirect_stdout(sys.stderr):  # stdout may be --json
                    report = _measure(run, peer, case)
                if report:
                    return report
        except LostDevice as error:
            run.notes.append(f"{error}: the rows after it were not measured, --only picks others")
        return None

    tables = staticmethod(peer_tables)


def _measure(run: Run, peer: Peer, case: Case) -> ParityReport | None:
    """Adds a peer's rows of one case; the report of the first row whose parity fails."""
    reason = missing(peer)
    if reason:
        if reason not in run.notes:
            run.notes.append(reason)
        return None
    seconds = run.options.seconds or SECONDS
    try:
        for found in peer.compared(case, seconds):
            _take(run, peer, found)
            if found.report:
                return found.report
            free()
    except torch.OutOfMemoryError as error:
        run.notes.append(f"{case.label}: {peer.name} skipped, {short_of(error)}")
    return None


def _take(run: Run, peer: Peer, found: Compared) -> None:
    run.rows += found.timings
    run.notes += found.notes
    how = f"To install {peer.name}: {peer.install}"
    if any("left out" in note for note in found.notes) and how not in run.notes:
        run.notes.append(how)
    run.keep()


KIND = Peers()
