"""The ``martlet`` command: finds the requested subcommand and imports only that one.

The table `CORE` lists the core's commands, each a module of `martlet.cli`. Commands that
talk to a broker need a protocol, so plugins provide them (hook ``martlet_commands``).
Plugins are loaded only when the core has no command of the given name.
"""

import argparse
import gc
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from martlet.contracts import Subcommand

__all__ = ["CORE", "commands", "main", "make_parser"]

# name -> summary; the module of that name in martlet.cli defines COMMAND
CORE: Final = {
    "run": "run a broker",
    "check": "validate a configuration file without starting a broker",
    "config": "print every configuration key with its default and purpose",
    "plugins": "list the installed plugins and their hooks, or write a new one",
    "store": "inspect, verify, repair or back up a data directory",
}

# New containers before a garbage collection; CPython's default is 700. Imported modules stay alive, and so do the
# 80,000 objects that a broker creates during startup: collecting them would take 8 % of the startup time.
STARTUP_OBJECTS: Final = 200_000

EPILOG: Final = """\
Start a broker:                  martlet run
Show the options of a command:   martlet COMMAND --help

Exit codes: 0 success; 1 failure (refused, not found, not healthy); 2 invalid command line or configuration;
3 server unreachable, or data directory unusable; 130 interrupted by Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* (`sys.argv`) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    thresholds = gc.get_threshold()
    gc.set_threshold(STARTUP_OBJECTS)
    try:
        from martlet.cli.outcome import guarded

        code = guarded(_run, words)
        if arguments is None:  # this process ends now
            from martlet.runtime.live_calls import end_process

            end_process(code)
        return code
    finally:
        gc.set_threshold(*thresholds)


def _run(words: list[str]) -> int:
    from martlet.cli.outcome import Exit, complain

    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(commands()), end="")
        return Exit.OK if words else Exit.USAGE
    if words[0] in ("-V", "--version"):
        from martlet.runtime.installed import installed_version
        from martlet.runtime.native import kernel_name

        print(f"martlet {installed_version()} (kernel: {kernel_name()})")
        return Exit.OK
    command = find(words[0])
    if command is None:
        complain(_unknown(words[0]))
        return Exit.USAGE
    return command.run(parse(make_parser(command), words[1:]))


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments *words*; an optional argument, such as a body, may follow options."""
    if _actions_of(parser) is not None:
        found, rest = parser.parse_known_args(words)
    else:
        found, rest = parser.parse_known_intermixed_args(words)
    if rest:
        _refuse(parser, words, rest)
    return found


def _actions_of(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[argparse.ArgumentParser] | None":
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _refuse(parser: argparse.ArgumentParser, words: Sequence[str], rest: Sequence[str]) -> NoReturn:
    """Raise a `UsageError` about *rest*, the part of the command line *words* that its subcommand does not accept."""
    import difflib

    from martlet.cli.outcome import UsageError

    for word in words:
        actions = _actions_of(parser)
        if actions is not None and word in actions.choices:
            parser = actions.choices[word]
    options = [name for action in parser._actions for name in action.option_strings]
    option = rest[0].partition("=")[0]
    near = difflib.get_close_matches(option, options, 1) if option.startswith("--") else []
    if near:
        raise UsageError(f"option {option!r} is unknown; did you mean {near[0]!r}?")
    parser.error(f"unrecognized arguments: {' '.join(rest)}")


def find(name: str) -> "Subcommand | None":
    """Return the command *name* of the core or of a plugin; None if there is none."""
    if name in CORE:
        return _core(name)
    return next((command for command in _of_plugins() if command.name == name), None)


def commands(plugins: Iterable[str] | None = None) -> "list[Subcommand]":
    """Return the core's commands, then those of *plugins* (default: of all installed plugins)."""
    return [*map(_core, CORE), *_of_plugins(plugins)]


def _core(name: str) -> "Subcommand":
    command: Subcommand = import_module(f"martlet.cli.{name}").COMMAND
    return command


def _of_plugins(names: Iterable[str] | None = None) -> "list[Subcommand]":
    """Return the commands of the plugins *names*; complain about a plugin that fails, and skip it."""
    import trio

    from martlet.cli.outcome import complain
    from martlet.errors import MartletError
    from martlet.plugins.loader import available, has_commands, load

    async def ask() -> "list[Subcommand]":
        commands: list[Subcommand] = []
        installed = available()
        chosen = [name for name, entry in installed.items() if has_commands(name, entry)] if names is None else names
        for name in sorted(chosen):
            try:
                answers = await load([name], {}, installed=installed).call("martlet_commands")
            except MartletError as error:
                complain(error)
            else:
                commands += [command for _, some in answers for command in some]
        return commands

    return trio.run(ask)


class _Parser(argparse.ArgumentParser):
    """Raises a `UsageError` of one line instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        from martlet.cli.outcome import UsageError

        raise UsageError(f"{message}; see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice of *action* that *value* resembles, instead of listing all of them."""
        if action.choices is not None and value not in action.choices:
            import difflib

            from martlet.cli.outcome import UsageError

            near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices], 1)
            if near:
                name = "/".join(action.option_strings) or action.metavar or action.dest
                raise UsageError(f"argument {name}: {value!r} is unknown; did you mean {near[0]!r}?")
        super()._check_value(action, value)


def make_parser(command: "Subcommand") -> argparse.ArgumentParser:
    """Return an argument parser for *command*."""
    parser = _Parser(
        prog=f"martlet {command.name}",
        description=f"{command.help[:1].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    return parser


def _overview(found: "Sequence[Subcommand]") -> str:
    width = max(len(command.name) for command in found)
    lines = [f"  {command.name:{width}}  {command.help}" for command in found]
    return "\n".join(
        ["usage: martlet COMMAND ...", "", "A durable log that speaks many protocols.", "", *lines, "", EPILOG]
    )


def _unknown(name: str) -> str:
    import difflib

    names = [command.name for command in commands()]
    near = difflib.get_close_matches(name, names, 1)
    mend = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(names)}"
    return f"command {name!r} is unknown; {mend}"
