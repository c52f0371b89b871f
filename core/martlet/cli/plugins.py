"""``martlet plugins``: lists the installed plugins, whether each is enabled, and its hooks; writes a new one."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from martlet.cli import new_plugin
from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json, table
from martlet.config import read_toml
from martlet.contracts import Subcommand
from martlet.errors import PluginError

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet plugins                          the plugins that the default configuration enables
  martlet plugins --config martlet.toml    the plugins that this configuration enables
  martlet plugins new audit                write a small plugin to begin with, in martlet-audit/
A plugin is a Python package with an entry point in the group martlet.plugins; `[plugins] enabled` lists those to run.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=os.environ.get("MARTLET_CONFIG") or None,
        help="configuration file that enables plugins; default: $MARTLET_CONFIG, else none",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    text = "write a small plugin to begin with: a package with a setting and a test"
    new_plugin.configure(
        parser.add_subparsers(metavar="ACTION").add_parser(
            "new",
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )


def run(arguments: argparse.Namespace) -> int:
    work: Callable[[argparse.Namespace], int] = getattr(arguments, "work", show)
    return work(arguments)


def show(arguments: argparse.Namespace) -> int:
    from martlet.app.config import read_config
    from martlet.plugins.loader import available, load

    config = read_config(read_toml(arguments.config) if arguments.config else {})
    installed = available()
    hooks: dict[str, tuple[str, ...]] = {}
    failed: dict[str, str] = {}
    for name in config.plugins.enabled:
        try:
            hooks |= {plugin.name: plugin.hooks for plugin in load([name], config.plugin_tables)}
        except PluginError as error:
            failed[name] = str(error) if name in installed else "not installed"
    rows = []
    for name in sorted({*installed, *config.plugins.enabled}):
        entry = installed.get(name)
        rows.append(
            {
                "name": name,
                "enabled": name in config.plugins.enabled,
                "distribution": f"{entry.distribution} {entry.version}" if entry and entry.distribution else None,
                "hooks": [hook.removeprefix("martlet_") for hook in hooks.get(name, ())],
                "error": failed.get(name),
            }
        )
    if arguments.json:
        print_json(rows)
    else:
        heads = ("plugin", "enabled", "distribution", "hooks")
        print(table(heads, [(r["name"], r["enabled"], r["distribution"], _hooks(r)) for r in rows]))
    return Exit.FAILED if any(row["error"] for row in rows) else Exit.OK


def _hooks(row: dict[str, object]) -> str:
    if row["error"]:
        return str(row["error"])
    hooks = row["hooks"]
    return ", ".join(hooks) if isinstance(hooks, list) else ""


COMMAND = Subcommand("plugins", "list the installed plugins and their hooks, or write a new one", configure, run)
