"""Answers the runs of SEND of all connections that were read in one round, whose messages are stored by one call."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.errors import MartletError
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult
from martlet_stomp.wire.packets import SendRun

__all__ = ["Part", "RoundRuns"]


class Publisher(Protocol):
    """The client of a connection; implemented by `Incoming`."""

    def answer_run(self, run: SendRun, result: AppendResult, begin: int) -> None:
        """Answer *run*, whose first message is at *begin* of *result*."""

    def lose_run(self, error: MartletError) -> None:
        """End the connection, because *error* has kept its run from being stored."""


class Part(NamedTuple):
    """A *run* of *publisher* outside of transactions, and its messages."""

    publisher: Publisher
    peer: Peer
    gate: Gate
    items: Sequence[AppendItem | Message]
    run: SendRun


@final
class RoundRuns:
    """Answers the runs of a round (`RoundPublishes`)."""

    def answer(self, parts: Sequence[Part], result: AppendResult) -> None:
        begin = 0
        for part in parts:
            part.publisher.answer_run(part.run, result, begin)
            begin += len(part.items)

    def refuse(self, parts: Sequence[Part], error: MartletError) -> None:
        for part in parts:
            part.publisher.lose_run(error)
