"""Answers the runs of PUBLISH of all connections that were read in one round, whose messages are stored by one call."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.errors import MartletError
from martlet.store.append.items import AppendItem, AppendResult
from martlet_mqtt.wire.names import Name
from martlet_mqtt.wire.scanner import PublishRun

__all__ = ["Part", "RoundRuns"]


class Publisher(Protocol):
    """The client of a connection; implemented by `Incoming`."""

    def answer_run(self, run: PublishRun, names: Collection[Name], result: AppendResult, begin: int) -> None:
        """Answer *run*, whose first message is at *begin* of *result*; *names* are its different names."""

    def lose_run(self, error: MartletError) -> None:
        """End the connection, because *error* has kept its run from being stored."""


class Part(NamedTuple):
    """A *run* of QoS 0 or 1 of *publisher*, and its messages."""

    publisher: Publisher
    peer: Peer
    gate: Gate
    items: Sequence[AppendItem]
    run: PublishRun
    names: Collection[Name]


@final
class RoundRuns:
    """Answers the runs of a round (`RoundPublishes`)."""

    def answer(self, parts: Sequence[Part], result: AppendResult) -> None:
        begin, has_awaited = 0, bool(result.refused) or result.rolled
        for publisher, _, _, items, run, names in parts:
            publisher.answer_run(run, names, result, begin)
            begin += len(items)
            has_awaited = has_awaited or run.qos > 0
        if not has_awaited:
            first = parts[0]
            first.gate.note_unawaited(first.run.names[0].topic, begin, result.end)

    def refuse(self, parts: Sequence[Part], error: MartletError) -> None:
        for part in parts:
            part.publisher.lose_run(error)
