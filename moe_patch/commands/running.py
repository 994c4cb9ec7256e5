"""What the commands share: how they end, where they run, what they show while they run."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .. import output
from ..usage import UsageError

PROG = "python -m moe_patch"
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class Command:
    """What `python -m moe_patch NAME` does."""

    name: str
    help: str  # a line of `python -m moe_patch --help`
    parse: Callable[[Sequence[str]], argparse.Namespace]  # what comes after the name
    run: Callable[[argparse.Namespace], int]
    interpreted: bool = False  # runs on the CPU too, where Triton has to interpret


def exit_code(run: Callable[[], int]) -> int:
    """Runs a command; what stops it is a sentence on stderr.

    Returns:
        its own code; 2 when there is no answer (a usage error, a file that cannot be read or
        written, too little memory), 130 after Ctrl-C.
    """
    code = 2
    try:
        code = run()
        # a full disk or a closed pipe shows now, and not after the exit code is chosen
        sys.stdout.flush()
        return code
    except UsageError as error:
        message = str(error)
    except KeyboardInterrupt:
        message, code = "stopped by Ctrl-C", 130
    except OSError as error:
        message, code = f"{type(error).__name__}: {error}", 2
        if error.errno in _OUTPUT_ERRORS:
            message = f"the output cannot be written: {error.strerror}"
            _forget_output()
    except Exception as error:
        message, code = _unforeseen(error), 2
    print("moe_patch:", *(line.strip() for line in message.splitlines()), file=sys.stderr)
    return code


def _forget_output() -> None:
    """Sends what is still buffered for stdout nowhere: Python's exit would fail on it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(error: Exception) -> str:
    """Returns a sentence, after a traceback where the error is nobody's input."""
    first = str(error).partition("\n")[0][:200]
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in first
    if short:
        return f"too little memory, use fewer --tokens: {first or 'on the host'}"
    traceback.print_exception(error)
    return f"{type(error).__name__} was not foreseen: please report the lines above"


def device() -> str:
    """Where kernels run: "cuda", or "cpu" without a GPU or under Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "cuda" if torch.cuda.is_available() and not interpreted else "cpu"


def interpret() -> None:
    """Without a GPU, starts this process again with Triton's interpreter.

    Triton reads the variable when it is imported, and by now transformers has imported it.
    """
    if device() == "cuda":
        return
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def switch_off() -> str:
    """The environment variable that switches patched blocks off, as it is set."""
    return f"MOE_PATCH={os.environ.get('MOE_PATCH') or 0}"


def bar(*more: ProgressColumn) -> Progress:
    """How far it is, what is under way and for how long, on stderr; gone in the end.

    `more` columns stand instead of the time that has passed.
    """
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return output.progress(*columns, *(more or [TimeElapsedColumn()]))


def spinner() -> Progress:
    """What is under way and for how long, on stderr; gone in the end."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return output.progress(*columns)
