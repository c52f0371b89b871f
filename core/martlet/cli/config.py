"""``martlet config``: prints every key with its default and an explanation, read from the configuration classes."""

import argparse
import json
from collections.abc import Iterable, Iterator
from inspect import getdoc

from msgspec import Struct

from martlet.cli.outcome import Exit, complain
from martlet.config import Setting, describe
from martlet.contracts import Subcommand
from martlet.errors import PluginError

__all__ = ["COMMAND", "Section", "as_markdown", "as_toml", "sections"]

EPILOG = """\
examples:
  martlet config > martlet.toml        a configuration file with every key at its default
  martlet config store remoting        only these sections
  martlet run --config martlet.toml    a broker that uses it
"""

HEAD = "# Martlet's configuration: every key with its default. Delete the keys that you do not change.\n"


class Section(Struct, frozen=True):
    """One table of the configuration file; *plugin* is empty for a table of the core."""

    name: str
    plugin: str
    purpose: str
    settings: list[Setting]


def sections(plugins: Iterable[str] | None = None) -> Iterator[Section]:
    """Yield the core's sections, then those of *plugins* (default: of all installed plugins)."""
    from martlet.app.config import SECTIONS
    from martlet.plugins.loader import available, load_class

    for name, record in SECTIONS.items():
        yield _section(name, "", record)
    installed = available()
    for name in sorted(installed if plugins is None else plugins):
        try:
            plugin = load_class(name, installed[name])
        except PluginError as error:
            complain(error)  # and still show the other plugins
            continue
        if plugin.config_class is not None:
            yield _section(name, name, plugin.config_class)


def _section(name: str, plugin: str, record: type) -> Section:
    purpose = " ".join((getdoc(record) or "").split("\n\n")[0].split())
    purpose = purpose.removeprefix(f"``[{name}]``: ")
    return Section(name, plugin, purpose[:1].upper() + purpose[1:], describe(record, name))


def as_toml(found: list[Section]) -> str:
    """Return a configuration file in which every key has its default."""
    blocks = [HEAD]
    for section in found:
        lines = [f"# {section.purpose}", f"[{section.name}]"]
        for setting in section.settings:
            lines += ["", f"# {setting.reason}", f"# {_kind(setting)}"]
            lines.append(f"{setting.key.partition('.')[2]} = {_value(setting.default)}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _kind(setting: Setting) -> str:
    return f"{setting.type}, in {setting.unit}" if setting.unit else setting.type


def _value(value: object) -> str:
    # Strings, numbers, booleans and lists of strings are written the same in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)


def as_markdown(found: list[Section]) -> str:
    """Return the tables of ``docs/config.md``."""
    blocks = []
    for section in found:
        origin = f" (plugin `{section.plugin}`)" if section.plugin else ""
        lines = [
            f"## `[{section.name}]`{origin}",
            "",
            section.purpose,
            "",
            "| key | default | kind | why |",
            "|---|---|---|---|",
        ]
        for setting in section.settings:
            cells = (f"`{setting.key}`", f"`{_value(setting.default)}`", _kind(setting), setting.reason)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("section", nargs="*", help="sections to print; default: all")
    parser.add_argument(
        "--format",
        choices=("toml", "markdown"),
        default="toml",
        help="a configuration file, or tables for documentation; default toml",
    )


def run(arguments: argparse.Namespace) -> int:
    found = list(sections())
    wanted = arguments.section or [section.name for section in found]
    names = {section.name: section for section in found}
    for name in wanted:
        if name not in names:
            complain(f"section {name!r} is unknown; sections: {', '.join(names)}")
            return Exit.USAGE
    show = as_toml if arguments.format == "toml" else as_markdown
    print(show([names[name] for name in wanted]), end="")
    return Exit.OK


COMMAND = Subcommand("config", "print every configuration key with its default and purpose", configure, run)
