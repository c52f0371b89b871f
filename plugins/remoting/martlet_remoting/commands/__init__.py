"""Subcommands of ``martlet`` that talk to brokers of Martlet or RocketMQ through this package's client."""

from martlet.contracts import Subcommand
from martlet_remoting.commands import (
    bench,
    dead_letters,
    groups,
    messages,
    nameserver,
    ping,
    send,
    stats,
    timers,
    topics,
    transactions,
)

__all__ = ["COMMANDS"]

COMMANDS: tuple[Subcommand, ...] = (
    nameserver.COMMAND,
    ping.COMMAND,
    topics.COMMAND,
    groups.COMMAND,
    send.COMMAND,
    messages.TAIL,
    messages.SHOW,
    dead_letters.COMMAND,
    timers.COMMAND,
    transactions.COMMAND,
    stats.COMMAND,
    bench.COMMAND,
)
