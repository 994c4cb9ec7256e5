"""The answer of `python -m moe_patch` when the import before it fails or is stopped.

Python's own would be a traceback and exit code 1, which means that a row does not hold.
"""

from __future__ import annotations

import sys
from types import TracebackType


def guard() -> None:
    """Lets `answer` end the process, if it is that command; another program is left alone."""
    # so Python calls a module that it is still looking for
    if sys.argv[:1] == ["-m"] and "moe_patch" in sys.orig_argv:
        sys.excepthook = answer


def answer(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends the process with 130 after Ctrl-C, else with 2; our own refusals are one line."""
    if issubclass(kind, KeyboardInterrupt):
        print("moe_patch: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    if "moe_patch" in str(error):
        print(f"moe_patch: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    sys.exit(2)
