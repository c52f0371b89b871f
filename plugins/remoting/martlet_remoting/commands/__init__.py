"""Subcommands of ``martlet`` that talk to brokers, Martlet's or RocketMQ's, over the client of this package."""

from martlet.contracts import Command

from . import bench, groups, messages, nameserver, stats, topics

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (
    nameserver.COMMAND,
    topics.COMMAND,
    groups.COMMAND,
    messages.SEND,
    messages.TAIL,
    messages.SHOW,
    stats.COMMAND,
    bench.COMMAND,
)
