"""``martlet nameserver``: a name server without a broker."""

import argparse
from typing import Final

from msgspec.structs import replace

from martlet.app.config import PluginsConfig
from martlet.cli import run
from martlet.contracts import Subcommand
from martlet.settings import BrokerConfig

__all__ = ["COMMAND", "enabled_plugins"]

EPILOG = """\
examples:
  martlet nameserver                                                   on 127.0.0.1:9876
  martlet nameserver --set nameserver.listen=0.0.0.0:9876 --data /var/lib/martlet-names
  martlet run --set remoting.nameservers='["names:9876"]'              a broker on another host that registers with it

Use it when several brokers share a name server; `martlet run` includes one. It stores key-value configuration in its
data directory. Routes come from the brokers, which register every 30 seconds. Of plugins.enabled it loads only itself
and plugins that authenticate or authorize clients.
"""

DATA: Final = "martlet-nameserver"
NAME: Final = "nameserver"
# Martlet's plugins that serve a broker; the import of all of them takes longer than everything else.
OF_BROKERS: Final = frozenset({"remoting", "filter_sql92", "tx", "timer", "mqtt", "stomp"})


def configure(parser: argparse.ArgumentParser) -> None:
    run.configure(parser)
    parser.epilog = EPILOG


def start(arguments: argparse.Namespace) -> int:
    config = run.read(arguments)
    if config.broker.data == BrokerConfig().data:
        config = replace(config, broker=replace(config.broker, data=DATA))
    return run.serve(replace(config, plugins=enabled_plugins(config.plugins)))


def enabled_plugins(configured: PluginsConfig) -> PluginsConfig:
    """Return the name server and the plugins that guard access, in the configured order.

    A plugin that is not installed is kept, so that the start fails: it may be one that guards access.
    """
    from martlet.plugins.loader import available, guards_access

    installed = available()

    def is_needed(name: str) -> bool:
        return name == NAME or (
            name not in OF_BROKERS and (name not in installed or guards_access(name, installed[name]))
        )

    enabled = [name for name in configured.enabled if is_needed(name)]
    required = [name for name in configured.required if name in enabled]
    return PluginsConfig(enabled=enabled if NAME in enabled else [NAME, *enabled], required=required)


COMMAND = Subcommand("nameserver", "run a name server alone", configure, start)
