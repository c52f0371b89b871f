"""The table that the arguments of a command name, opened for reading."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from martlet.app.config import read_config
from martlet.config import fill, override, read_toml
from martlet.errors import ConfigError
from martlet.offline.owner import owner_kept
from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import TableLog
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.location import LOCAL, TierLocation
from martlet_tiered.objects import Objects
from martlet_tiered.opened_table import OpenedTable, open_table
from martlet_tiered.opening import open_objects
from martlet_tiered.table import ColdTable

__all__ = ["OpenedTable", "data_directory", "open_for_writing", "open_place", "read_tables", "tier_owner_kept"]


def read_tables(arguments: Any) -> dict[str, Any]:
    """Return the configuration that *arguments* name, as sections. Raises `ConfigError`."""
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
    return os.path.abspath(str(read_config(read_tables(arguments)).data)) if arguments.config else ""


def _config_of(arguments: Any) -> TieredConfig:
    tables = read_tables(arguments)
    section = tables.get("tiered", {})
    if not isinstance(section, dict):
        raise ConfigError("config key 'tiered' is no section; write [tiered]")
    config = fill(TieredConfig, section | ({"url": arguments.url} if arguments.url else {}), "tiered")
    if not config.url:
        raise ConfigError("no place is given; use --config FILE with tiered.url in it, or --url URL")
    return config


def open_for_writing(arguments: Any, unique: str, now_ms: int) -> tuple[Objects, ColdTable, str]:
    """Return the objects and the table that *arguments* name, and the broker's name; *unique* differs in each call.

    Raises as `open_place`.
    """
    config = _config_of(arguments)
    broker, location = open_table(config).broker, TierLocation.of(config, os.environ)
    objects = open_objects(location, config, unique, now_ms)
    table = ColdTable(objects, TableLog(objects, location, config), broker)
    table.open(TABLE_SCHEMA)
    return objects, table, broker


def tier_owner_kept(arguments: Any) -> AbstractContextManager[None]:
    """Do work on the tier of *arguments*; if it is a directory, its owner gets the files that root makes there."""
    location = TierLocation.of(_config_of(arguments), os.environ)
    return owner_kept(location.prefix) if location.scheme == LOCAL else nullcontext()


def open_place(arguments: Any) -> OpenedTable:
    """Return the table that *arguments* name.

    Raises:
      ConfigError: they name no place, or a setting is wrong.
      TierError: the store cannot be read, or has no table there.
    """
    return open_table(_config_of(arguments))
