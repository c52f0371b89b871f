"""``martlet check``: validates a configuration file without starting a broker."""

import argparse
from pathlib import Path

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.config import override, read_toml
from martlet.contracts import Subcommand

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet check martlet.toml
  martlet check martlet.toml --set store.flush=async && systemctl reload martlet

It checks the settings of plugins, their order, and that no two of them have the same `listen` or dispatch the same
topic, but it starts no plugin. Only `martlet run` reports two projections with one name, or a port in use.
Exit codes: 0 valid; 2 invalid, with the reason on stderr.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", metavar="FILE", type=Path, help="the TOML file")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set one key, overriding the file; can be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    import trio

    from martlet.app.config import SECTIONS, read_config
    from martlet.app.startup import dispatchers_of
    from martlet.plugins.loader import load

    tables = read_toml(arguments.file)
    for assignment in arguments.set:
        override(tables, assignment)
    config = read_config(tables)
    plugins = load(config.plugins.enabled, config.plugin_tables, config.plugins.required)
    trio.run(dispatchers_of, plugins)
    # Also check the sections of plugins that are not enabled: they may be enabled later.
    for name in config.plugin_tables:
        if name not in config.plugins.enabled:
            load([name], config.plugin_tables)
    given = [name for name in tables if name in SECTIONS or name in config.plugin_tables]
    if arguments.json:
        print_json({"file": str(arguments.file), "sections": given, "plugins": config.plugins.enabled})
    else:
        enabled = ", ".join(config.plugins.enabled)
        print(f"{arguments.file}: valid; sections {', '.join(given) or 'none'}; plugins {enabled}")
    return Exit.OK


COMMAND = Subcommand("check", "validate a configuration file without starting a broker", configure, run)
