"""Faults that a kernel's IR or PTX shows."""

from __future__ import annotations

import re


def unread_barriers(ir):
    """Barriers that warpgroups of different work are given, and that none of them waits for. Their
    memory is given to something else meanwhile, over which they may be written."""
    before, found, after = ir.partition("ttg.warp_specialize(")
    if not found:
        return []
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", before)
    assert made, "a kernel with roles has barriers"
    # the arguments of the other warpgroups, and the first one's code, which has the same names
    used, _, _ = after.partition("partition0(")
    return [each for each in made if not re.search(each + r"\b", used)]


def forgets_steps(ir):
    """Whether a loop over tiles that waits for stages carries no step: each tile would begin at the
    first stage again. MLIR's SCCP does so in Triton 3.6 and 3.7, not in 3.9, if a tile's steps are
    counted in loops whose bounds all are carried steps (`for i in range(step, step + steps)`)."""
    loops = re.findall(r"^( *)scf\.for ([^\n]*)\{$(.*?)^\1\}", ir, re.DOTALL | re.MULTILINE)
    return any(
        "iter_args" not in head and "scf.for" in body and "ttng.wait_barrier" in body
        for _, head, body in loops
    )


def asks_late(name, ptx):
    """Whether a kernel that decodes loads no weights before its first barrier."""
    wide = re.compile(r"ld\.global[\w.:]*\.v[24]|cp\.async\.c[ag]")
    before, _, after = ptx.partition("bar.sync")
    return name.startswith("decode") and not wide.search(before) and bool(wide.search(after))
