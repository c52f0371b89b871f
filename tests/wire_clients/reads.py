"""Connections of which a test lets several be read in one round, as the event pump does with sockets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from msgspec import field

from martlet.broker import Broker
from martlet.contracts import Connection, Handler, Protocol
from martlet.testing.peers import RecordingPeer

__all__ = ["Read", "Reads"]


class ReadPeer(RecordingPeer):
    """Puts off work to the end of the round."""

    works: list[Callable[[], None]] = field(default_factory=list)

    def before_commit(self, work: Callable[[], None]) -> None:
        self.works.append(work)


@final
class Read:
    """One connection."""

    def __init__(self, protocol: Protocol, works: list[Callable[[], None]]) -> None:
        self.peer = ReadPeer(works=works)
        self.connection: Connection = protocol.connect(0.0)
        self.handler: Handler = protocol.handle(self.peer, self.connection)

    async def receive(self, data: bytes) -> None:
        """Handle *data*, as one read."""
        self.connection.receive_data(data, 0.0)
        for event in self.connection.events():
            rest = self.handler.handle(event)
            if rest is not None:
                await rest
            if self.peer.reason is not None:
                break

    def sent(self) -> bytes:
        """Return the bytes sent since the last call."""
        return self.peer.take_sent()


@final
class Reads:
    """The connections to one broker; `round` has the reads of a round."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._works: list[Callable[[], None]] = []

    def connect(self, protocol: Protocol) -> Read:
        return Read(protocol, self._works)

    @contextmanager
    def round(self) -> Iterator[None]:
        yield
        self.finish()
        self._broker.store.committer.commit()

    def finish(self) -> None:
        """Do what was put off."""
        while self._works:
            self._works.pop(0)()
