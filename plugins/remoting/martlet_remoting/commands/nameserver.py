"""``martlet nameserver``: the name server alone, for brokers that run elsewhere."""

import argparse
from dataclasses import replace

from martlet.cli import run
from martlet.contracts import Command
from martlet.run import PluginsConfig
from martlet.settings import BrokerConfig

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet nameserver                                                   on 127.0.0.1:9876
  martlet nameserver --set nameserver.listen=0.0.0.0:9876 --data /var/lib/martlet-names
  martlet run --set remoting.nameservers='["names:9876"]'              a broker elsewhere that registers with it

It keeps its key-value texts in its data directory; routes come from the brokers, which tell them every 30 seconds.
A broker of `martlet run` has a name server of its own; this is for several brokers that share one.
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


COMMAND = Command("nameserver", "run a name server alone", configure, start)
