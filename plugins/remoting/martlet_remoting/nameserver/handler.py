"""One connection to the name server: handles its requests in order; a long request delays only later ones."""

from collections.abc import Awaitable
from typing import final

from martlet.contracts import Buffer, Peer
from martlet.errors import Refused
from martlet.runtime.steps import Steps, resume
from martlet_remoting.nameserver.requests import SAVED, answer, answer_when_saved
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE
from martlet_remoting.wire.packets import Command, Frame

__all__ = ["NameServerHandler"]


@final
class NameServerHandler:
    """Handles one connection. Brokers that registered over it are removed when it closes."""

    __slots__ = ("_peer", "_server")

    def __init__(self, server: NameServer, peer: Peer) -> None:
        self._server = server
        self._peer = peer

    def handle(self, event: Command) -> Awaitable[None] | None:
        """Answer a request; ignore answers, as the name server sends no requests."""
        if event.flag & FLAG_RESPONSE:
            return None
        if event.code in SAVED:
            return self._finish_saved(event)
        steps = answer(self._server, self._peer, event)
        try:
            steps = resume(next(steps), steps)
        except StopIteration as done:
            self._send(event, done.value)
            return None
        return self._finish(event, steps)

    async def _finish(self, command: Command, steps: Steps[Frame]) -> None:
        self._send(command, await self._server.turns.finish(steps))

    async def _finish_saved(self, command: Command) -> None:
        self._send(command, await answer_when_saved(self._server, command))

    def _send(self, command: Command, frame: Frame) -> None:
        if not command.flag & FLAG_ONEWAY:
            self._peer.send(*([frame] if isinstance(frame, bytes) else frame))

    def refuse(self, answer: Buffer, refused: Refused) -> None:
        """Do nothing: a name server stores no messages."""

    def collect(self, budget_bytes: int) -> None:
        """Do nothing: a name server pushes no messages."""

    def closed(self, reason: str) -> None:
        """Remove the brokers that registered over this connection."""
        self._server.forget(self._peer)
