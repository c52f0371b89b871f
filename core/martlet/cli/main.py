"""The ``martlet`` command: finds what is asked for, and imports no more than that.

The core's own commands are named in a table here and live in `martlet.cli`;
everything that talks to a broker speaks some protocol, so it comes from the plugins
(hook ``martlet_commands``), which are loaded only when the core has no such command.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from martlet.contracts import Command

__all__ = ["CORE", "commands", "main", "make_parser"]

# name -> what it is for; the module of that name in martlet.cli holds its COMMAND
CORE: Final = {
    "run": "run a broker",
    "check": "check a configuration file without starting anything",
    "config": "print every configuration key with its default and its reason",
    "plugins": "list the plugins that are installed, and what they add",
    "store": "look into a data directory while no broker runs on it",
}

EPILOG: Final = """\
Start a broker here and now:       martlet run
Ask what one command can do:       martlet COMMAND --help

Exit codes: 0 done; 1 the answer is no (refused, not found, not healthy); 2 wrong command line or configuration;
3 nobody answers at the address, or the data directory cannot be used; 130 interrupted by Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* (`sys.argv`) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    from martlet.cli.outcome import guarded

    return guarded(_run, words)


def _run(words: list[str]) -> int:
    from martlet.cli.outcome import Exit, complain

    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(commands()), end="")
        return Exit.OK if words else Exit.USAGE
    if words[0] in ("-V", "--version"):
        from martlet.cli.version import installed_version

        print(f"martlet {installed_version()}")
        return Exit.OK
    command = find(words[0])
    if command is None:
        complain(_unknown(words[0]))
        return Exit.USAGE
    return command.run(make_parser(command).parse_args(words[1:]))


def find(name: str) -> "Command | None":
    """Return the command *name*: the core's, or a plugin's."""
    if name in CORE:
        return _core(name)
    return next((command for command in _of_plugins() if command.name == name), None)


def commands(plugins: Iterable[str] | None = None) -> "list[Command]":
    """Return every command, the core's first; of *plugins*, or of all that are installed."""
    return [*map(_core, CORE), *_of_plugins(plugins)]


def _core(name: str) -> "Command":
    command: Command = import_module(f"martlet.cli.{name}").COMMAND
    return command


def _of_plugins(names: Iterable[str] | None = None) -> "list[Command]":
    """What installed plugins bring; one that fails is named and left out."""
    import trio

    from martlet.cli.outcome import complain
    from martlet.errors import MartletError
    from martlet.plugins.loader import available, load

    async def ask() -> "list[Command]":
        commands: list[Command] = []
        for name in sorted(available() if names is None else names):
            try:
                answers = await load([name], {}).call("martlet_commands")
            except MartletError as error:
                complain(error)
            else:
                commands += [command for _, some in answers for command in some]
        return commands

    return trio.run(ask)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        from martlet.cli.outcome import UsageError

        raise UsageError(f"{message}; `{self.prog} --help` shows how")


def make_parser(command: "Command") -> argparse.ArgumentParser:
    """Return the parser of *command*'s arguments."""
    parser = _Parser(
        prog=f"martlet {command.name}",
        description=f"{command.help[:1].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    return parser


def _overview(found: "Sequence[Command]") -> str:
    width = max(len(command.name) for command in found)
    lines = [f"  {command.name:{width}}  {command.help}" for command in found]
    return "\n".join(
        ["usage: martlet COMMAND ...", "", "A durable log that speaks many protocols.", "", *lines, "", EPILOG]
    )


def _unknown(name: str) -> str:
    names = [command.name for command in commands()]
    near = difflib.get_close_matches(name, names, 1, 0.5)
    mend = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(names)}"
    return f"command {name!r} is unknown; {mend}"
