"""``martlet nameserver``: a name server without a broker."""

import argparse

from msgspec.structs import replace

from martlet.app.config import PluginsConfig
from martlet.cli import run
from martlet.contracts import Subcommand
from martlet.settings import BrokerConfig

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet nameserver                                                   on 127.0.0.1:9876
  martlet nameserver --set nameserver.listen=0.0.0.0:9876 --data /var/lib/martlet-names
  martlet run --set remoting.nameservers='["names:9876"]'              a broker on another host that registers with it

Use it when several brokers share a name server; `martlet run` includes one. It stores key-value configuration in its
data directory. Routes come from the brokers, which register every 30 seconds.
"""

DATA = "martlet-nameserver"


def configure(parser: argparse.ArgumentParser) -> None:
    run.configure(parser)
    parser.epilog = EPILOG


def start(arguments: argparse.Namespace) -> int:
    config = run.read(arguments)
    if config.broker.data == BrokerConfig().data:
        config = replace(config, broker=replace(config.broker, data=DATA))
    return run.serve(replace(config, plugins=PluginsConfig(enabled=["nameserver"])))


COMMAND = Subcommand("nameserver", "run a name server alone", configure, start)
