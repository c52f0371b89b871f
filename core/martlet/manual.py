"""The pages ``docs/cli.md`` and ``docs/config.md``, from the real parsers and records.

    python -m martlet.manual cli > docs/cli.md
    python -m martlet.manual config > docs/config.md

Tests compare these files with what this module makes, so they cannot grow old.
"""

import argparse
import sys
from collections.abc import Iterator

from martlet.cli import EPILOG, commands, make_parser
from martlet.commands.config import as_markdown, sections
from martlet.plugins import available

__all__ = ["cli_page", "config_page"]

CLI_HEAD = """\
# The command line

Made from the parsers by `python -m martlet.manual cli`. `martlet COMMAND --help` says the same.

`run`, `check`, `config`, `plugins` and `store` are the core's. All others come with plugins, through the hook
`martlet_commands`: an installed plugin's commands are there without further ado.

"""

CONNECTION = "connection options"
CONNECTION_HEAD = f"""
## {CONNECTION.capitalize()}

Every command that talks to a broker asks a name server where the brokers are. All have these options. What no option
says is taken from the environment, then from the section [`[client]`](config.md) of the configuration file, whose keys
are named as the options: `MARTLET_CONFIG=/etc/martlet.toml` alone can hold everything.

"""

CONFIG_HEAD = """\
# Configuration

Made from the records that the broker reads, by `python -m martlet.manual config`.

A configuration is a TOML file (`martlet run --config FILE`); every key has a default, so no file is needed. Each key
can also be set on the command line, over the file: `--set store.flush=async`. `martlet config` prints a file with
every key at its default, and `martlet check FILE` says whether a file would be accepted, without starting anything; an
unknown key is an error that names the nearest known one.

"""


def own_plugins() -> list[str]:
    """The plugins that come with Martlet; what else is installed here is not in its pages."""
    return [name for name, entry in available().items() if entry.dist and entry.dist.name == "martlet"]


def config_page() -> str:
    """Return ``docs/config.md``."""
    return CONFIG_HEAD + as_markdown(list(sections(own_plugins())))


def cli_page() -> str:
    """Return ``docs/cli.md``."""
    blocks = [CLI_HEAD, "```\n", EPILOG, "```\n"]
    found = [(command.name, make_parser(command)) for command in commands(own_plugins())]
    shared = next(options for _, parser in found if (options := _connection_options(parser)))
    rows = [row for action in shared for row in _row(action)]
    blocks += [CONNECTION_HEAD, "\n".join(["| option | |", "|---|---|", *rows]) + "\n"]
    for name, parser in found:
        blocks += _chapter(f"martlet {name}", parser, "##")
    return "".join(blocks)


def _chapter(title: str, parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    yield f"\n{level} `{title}`\n\n{parser.description or ''}\n"
    connection = _connection_options(parser)
    rows = [row for action in parser._actions if action not in connection for row in _row(action)]
    if connection:
        rows.append(f"| [{CONNECTION}](#{CONNECTION.replace(' ', '-')}) | which brokers, and TLS |")
    if rows:
        yield "\n" + "\n".join(["| argument | |", "|---|---|", *rows]) + "\n"
    if parser.epilog and level == "##":  # those of a subcommand are among them
        yield f"\n```\n{parser.epilog.strip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _chapter(f"{title} {name}", inner, level + "#")


def _connection_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options that every command which talks to a broker has; the page has them once."""
    return [action for group in parser._action_groups if group.title == CONNECTION for action in group._group_actions]


def _row(action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return
    if isinstance(action.metavar, str):
        value = action.metavar
    elif action.choices:
        value = "|".join(map(str, action.choices))
    else:
        value = action.dest.upper() if action.option_strings else action.dest
    if action.option_strings:
        shown = ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    else:
        shown = value if action.nargs not in ("?", "*") else f"[{value}]"
    text = (action.help or "") % {"default": action.default}
    yield f"| `{shown}` | {text} |".replace("`" + shown + "`", "`" + shown.replace("|", "\\|") + "`")


def main(pages: list[str]) -> None:
    for page in pages:
        print({"cli": cli_page, "config": config_page}[page](), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
