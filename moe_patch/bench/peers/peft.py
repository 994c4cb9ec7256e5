"""PEFT: a block with adapters on frozen experts, which is a row of `bench lora`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import lora
from .. import routing as routed
from ..timing import OURS
from .compare import Case, Compared, Peer, PeerTiming, alive, why


def compared(case: Case, _: float) -> Iterator[Compared]:
    """Yields the one row, or a note where `bench lora` has none."""
    if case.routing != routed.UNIFORM:
        yield Compared(notes=[f"{case.label}: PEFT's row has uniform routing"])
        return
    try:
        lora.supported(case.shape)
    except ValueError as error:
        yield Compared(notes=[f"{case.label}: PEFT left out, {error}"])
        return
    try:
        result = lora.bench_lora(case.shape, case.tokens)
    except Exception as error:  # whatever PEFT raises
        alive(error)
        yield Compared(notes=[f"{case.label}: the row of PEFT is left out, {why(error)}"])
        return
    if result.report and not result.report.passed:
        yield Compared(report=result.report)
        return
    yield Compared(_timings(case, result), None, result.notes)


def _timings(case: Case, result: lora.Result) -> list[PeerTiming]:
    """Ours and PEFT's; the errors are those of the row's own parity."""
    rows = result.report.rows if result.report else []
    errors = {
        OURS: max((row.our_rms for row in rows if row.our_rms is not None), default=None),
        lora.PEFT: max((row.hf_rms for row in rows if row.hf_rms is not None), default=None),
    }
    names = {OURS: OURS, lora.PEFT: PEER.name}
    return [
        PeerTiming(
            case.label, f"block, {lora.MODE}, rank {lora.RANK}", names[t.implementation], "",
            t.ms, t.p10, t.p90, t.tflops, errors[t.implementation], t.speedup,
        )
        for t in result.timings
        if t.implementation in names
    ]  # fmt: skip


PEER = Peer("PEFT", "peft", "pip install 'moe_patch[lora]'", compared)
