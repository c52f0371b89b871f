"""``martlet check``: whether a configuration would be accepted, without starting anything."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.config import fill, override, read_toml
from martlet.contracts import Command
from martlet.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet check martlet.toml
  martlet check martlet.toml --set store.flush=async && systemctl reload martlet

Exit codes: 0 it would be accepted; 2 it would not, and stderr says why.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", metavar="FILE", type=Path, help="the TOML file")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="as for `martlet run`; may be given often",
    )
    parser.add_argument("--json", action="store_true", help="print an object for programs")


def run(arguments: argparse.Namespace) -> int:
    from martlet.plugins.loader import available, load
    from martlet.run import SECTIONS, read_config

    tables = read_toml(arguments.file)
    for assignment in arguments.set:
        override(tables, assignment)
    config = read_config(tables)
    # A section of a plugin that is not enabled is checked as well, for it will be one day.
    plugins = load(list(dict.fromkeys([*config.plugins.enabled, *config.plugin_tables])), config.plugin_tables)
    for text in plugins.failed.values():
        raise PluginError(text)
    for plugin in plugins:
        _check_address(plugin.name, available()[plugin.name], config.plugin_tables.get(plugin.name, {}))
    given = [name for name in tables if name in SECTIONS or name in config.plugin_tables]
    if arguments.json:
        print_json({"file": str(arguments.file), "sections": given, "plugins": config.plugins.enabled})
    else:
        enabled = ", ".join(config.plugins.enabled)
        print(f"{arguments.file}: fine; sections {', '.join(given) or 'none'}; plugins {enabled}")
    return Exit.OK


def _check_address(name: str, entry: "EntryPoint", table: object) -> None:
    """Refuse an address to listen on that cannot be one; plugins parse it only when they start."""
    from martlet.net.addresses import split_address
    from martlet.plugins.loader import load_class

    record = load_class(name, entry).config_class
    if record is not None and isinstance(table, dict):
        listen = getattr(fill(record, table, name), "listen", None)
        if isinstance(listen, str):
            split_address(listen)


COMMAND = Command("check", "check a configuration file without starting anything", configure, run)
