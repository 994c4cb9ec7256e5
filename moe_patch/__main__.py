"""python -m moe_patch env | parity | bench | tune | load"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .commands import bench, env, load, parity, tune
from .commands.running import PROG, exit_code, interpret
from .usage import Parser, refuse_empty
from .version import __version__

COMMANDS = {one.COMMAND.name: one.COMMAND for one in (env, parity, bench, tune, load)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when it holds, 1 when parity fails, 2 when there is no answer (a usage error, a file that
        cannot be read or written, too little memory), 130 after Ctrl-C.
    """
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    refuse_empty(given)
    name = given[0] if given and given[0] in COMMANDS else _name(given)
    command = COMMANDS[name]
    options = command.parse(given[given.index(name) + 1 :])
    if command.interpreted and arguments is None:  # called from Python, the process is not ours
        interpret()
    return command.run(options)


def _name(arguments: Sequence[str]) -> str:
    """The command; answers --help and --version, and refuses what is neither."""
    parser = Parser(PROG, description=__doc__)
    parser.add_argument("--version", action="version", version=f"moe_patch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        commands.add_parser(command.name, help=command.help)
    return parser.parse_args(arguments).command


if __name__ == "__main__":
    sys.exit(main())
