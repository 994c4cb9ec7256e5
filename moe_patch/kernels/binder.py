"""Writes out, for one binary, the Python function that starts it, as Triton writes its binders.

A loop over the arguments, which looks at what each one is, takes 1.4 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from .. import compat
from .ahead import THREAD

Start = Callable[[tuple[int, ...], tuple[Any, ...]], bool]
"""(grid, args) -> whether the binary was started: it was not made for other arguments."""


def written_out(binary: compat.Binary, device: int, args: tuple[Any, ...]) -> Start:
    """Starts `binary` on that device for arguments of the kinds that `args` are of.

    Those are the dtypes of tensors, whose addresses are multiples of 16 bytes, what descriptors
    were made for (`boxes`), and which are None. Not where a profiler listens to launches, whose
    hooks Triton's launcher calls.
    """
    given: dict[str, Any] = {
        "thread": THREAD, "hooks": triton.knobs.runtime,
        "device": compat.cuda_device, "stream": compat.cuda_stream, "start": binary.start,
        "encode": compat.encode,
    }  # fmt: skip
    boxes = {at: wanted for at, *wanted in binary.boxes}
    same = [
        "thread.ready",
        f"device() == {device}",
        "not hooks.launch_enter_hook.calls",
        "not hooks.launch_exit_hook.calls",
    ]
    bits, values = ["0"], []
    for i, arg in enumerate(args):
        if arg is None:
            same.append(f"a{i} is None")
            values.append("None")
        elif isinstance(arg, Tensor):
            given[f"t{i}"] = arg.dtype
            same.append(f"a{i}.dtype is t{i}")
            bits.append(f"(p{i} := a{i}.data_ptr())")
            values.append(f"p{i}")
        elif isinstance(arg, int):
            bits.append(f"(a{i} >= {2**31})")  # i64
            values.append(f"a{i}")
        else:
            name, given[f"m{i}"] = boxes[i]
            given[f"t{i}"] = arg.kind
            same.append(f"a{i}.kind is t{i}")
            same.append(f"(p{i} := a{i}.encoded.get({name!r}) or encode(a{i}, {name!r}, m{i}))")
            values.append(f"*p{i}")
    given |= {f"s{i}": setting for i, setting in enumerate(binary.settings)}
    settings = "".join(f"s{i}, " for i in range(len(binary.settings)))
    behind = ", ".join([*values, *map(str, binary.unread)])
    names = ", ".join(f"a{i}" for i in range(len(args)))
    text = f"""
def write({", ".join(given)}):
    def launch(grid, args):
        {names}, = args
        try:
            if not ({" and ".join(same)}) or ({" | ".join(bits)}) & 15:
                return False
        except AttributeError:  # None instead of a tensor
            return False
        x, y, z = (*grid, 1, 1)[:3]
        start(
            x, y, z, stream({device}), {binary.function}, {settings}
            {f"({behind},)" if binary.packed else behind},
        )
        return True
    return launch
"""
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["write"](**given)
