"""The table that the arguments of a command name, opened for reading."""

import os
from typing import Any

from martlet.app.config import read_config
from martlet.config import fill, override, read_toml
from martlet.errors import ConfigError
from martlet_tiered.config import TieredConfig
from martlet_tiered.opened_table import OpenedTable, open_table

__all__ = ["OpenedTable", "data_directory", "open_place"]


def _tables(arguments: Any) -> dict[str, Any]:
    tables = read_toml(arguments.config) if arguments.config else {}
    for assignment in arguments.set:
        override(tables, assignment)
    return tables


def data_directory(arguments: Any) -> str:
    """Return the data directory that ``--data`` or the configuration file names; empty without both.

    Raises:
      ConfigError: a setting is wrong.
    """
    if arguments.data:
        return os.path.abspath(str(arguments.data))
    return os.path.abspath(str(read_config(_tables(arguments)).data)) if arguments.config else ""


def open_place(arguments: Any) -> OpenedTable:
    """Return the table that *arguments* name.

    Raises:
      ConfigError: they name no place, or a setting is wrong.
      TierError: the store cannot be read, or has no table there.
    """
    tables = _tables(arguments)
    section = tables.get("tiered", {})
    if not isinstance(section, dict):
        raise ConfigError("config key 'tiered' is no section; write [tiered]")
    config = fill(TieredConfig, section | ({"url": arguments.url} if arguments.url else {}), "tiered")
    if not config.url:
        raise ConfigError("no place is given; use --config FILE with tiered.url in it, or --url URL")
    return open_table(config)
