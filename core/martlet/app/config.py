"""The whole configuration of a broker: the sections of the core and of plugins, and checks across sections."""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from martlet.app.logs import LogConfig
from martlet.config import Settings, fill, setting, unknown_key
from martlet.errors import ConfigError
from martlet.plugins.loader import (
    available,
)
from martlet.settings import BrokerConfig, ClientConfig, DeliveryConfig, ServerConfig
from martlet.store import StoreConfig

__all__ = ["HOST_NAME", "INCOMPLETE_SPARE_BYTES", "ROUTE_NAME", "SECTIONS", "Config", "PluginsConfig", "read_config"]

# Size of a request beside the body of its message: properties, a topic name, and fields of the protocol.
INCOMPLETE_SPARE_BYTES: Final = 1 << 20
# RFC 1123, and the underscore that container networks allow.
HOST_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?"
)
# As topics may be called, with room for CLUSTER_REPLY_TOPIC; and the dots of host names, RocketMQ's default names.
ROUTE_NAME: Final = re.compile(r"[%|.a-zA-Z0-9_-]{1,115}")


class PluginsConfig(Settings):
    """``[plugins]``: the plugins of this broker."""

    enabled: list[str] = setting(
        ["remoting", "nameserver", "filter_sql92", "tx", "timer", "mqtt", "stomp"],
        "plugins to load; their hooks are called in this order",
    )
    required: list[str] = setting(
        [], "if a projection of one of these plugins fails, the broker stops; it continues without any other plugin"
    )


class Config(Struct, frozen=True):
    """A complete configuration; ``plugin_tables`` are the sections of plugins."""

    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    delivery: DeliveryConfig = field(default_factory=DeliveryConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    plugin_tables: dict[str, object] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The data directory."""
        return Path(self.broker.data)


SECTIONS: Final[dict[str, type]] = {
    "log": LogConfig,
    "broker": BrokerConfig,
    "server": ServerConfig,
    "store": StoreConfig,
    "delivery": DeliveryConfig,
    "plugins": PluginsConfig,
    "client": ClientConfig,
}


def read_config(tables: dict[str, object]) -> Config:
    """Return the configuration in *tables*, the content of a TOML file.

    Raises:
      ConfigError: a section or key is unknown, or a value is invalid.
    """
    known: dict[str, Any] = {}
    rest: dict[str, object] = {}
    for name, table in tables.items():
        if name in SECTIONS:
            if not isinstance(table, dict):
                raise ConfigError(f"config key {name!r} is a value; it must be a section")
            known[name] = fill(SECTIONS[name], table, name)
        else:
            rest[name] = table
    config = Config(plugin_tables=rest, **known)
    if config.broker.message_bytes_max > config.store.message_bytes_max:
        raise ConfigError(
            f"config key 'broker.message_bytes_max' is {config.broker.message_bytes_max}, "
            f"more than 'store.message_bytes_max', which is {config.store.message_bytes_max}; raise that one as well"
        )
    _check_incomplete(config)
    _check_broker(config.broker)
    installed = available() if rest else {}  # a scan of all installed distributions
    for name in rest:
        if name not in installed:
            raise ConfigError(unknown_key(name, [*SECTIONS, *installed]))
    return config


def _check_incomplete(config: Config) -> None:
    """Raise `ConfigError` unless the longest message may be received: until it is complete, it counts as incomplete."""
    need = config.broker.message_bytes_max + INCOMPLETE_SPARE_BYTES
    for key in "incomplete_address_bytes_max", "incomplete_total_bytes_max":
        limit = getattr(config.server, key)
        if need > limit and config.broker.message_bytes_max > BrokerConfig().message_bytes_max:
            raise ConfigError(
                f"config key 'server.{key}' is {limit}, too little to receive a message of "
                f"'broker.message_bytes_max', {config.broker.message_bytes_max}; raise it to {need} or more"
            )


def _check_broker(broker: BrokerConfig) -> None:
    """Raise `ConfigError` unless the data directory, both names and the advertised host are valid."""
    if not broker.data:
        raise ConfigError("config key 'broker.data' is ''; name a directory, or '.' for the current one")
    for key, name in ("name", broker.name), ("cluster", broker.cluster):
        if not ROUTE_NAME.fullmatch(name):
            text = "it must be 1 to 115 letters, digits and characters of %|-_."
            raise ConfigError(f"config key 'broker.{key}' is {name!r}; {text}")
    _check_advertise(broker.advertise)


def _check_advertise(host: str) -> None:
    """Raise `ConfigError` unless *host* is a host name or an address, without a port."""
    if host and not HOST_NAME.fullmatch(host) and not _is_address(host):
        text = "it must be a host name or an address, without scheme and port"
        raise ConfigError(f"config key 'broker.advertise' is {host!r}; {text}")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
