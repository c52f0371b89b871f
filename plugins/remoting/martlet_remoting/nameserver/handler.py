"""One connection to the name server: handles its requests in order; a long request delays only later ones."""

from collections.abc import Awaitable
from typing import final

from martlet.broker import Broker
from martlet.contracts import Buffer, Peer
from martlet.errors import MartletError, Refused
from martlet.runtime.steps import Steps, resume
from martlet_remoting.access.gates import ConnectionGates
from martlet_remoting.access.signers import Signers
from martlet_remoting.nameserver.permissions import check
from martlet_remoting.nameserver.requests import REQUESTS, SAVED, answer, answer_when_saved, refusal
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.signatures import is_signed

__all__ = ["NameServerHandler"]


@final
class NameServerHandler:
    """Handles one connection. Brokers that registered over it are removed when it closes."""

    __slots__ = ("_gates", "_peer", "_server", "_signers")

    def __init__(self, server: NameServer, broker: Broker, peer: Peer) -> None:
        self._server = server
        self._peer = peer
        self._gates = ConnectionGates(broker, peer)
        # None without authenticators: then signatures are not looked at.
        self._signers = Signers(broker, self._gates) if broker.authentication.authenticators else None

    def handle(self, event: Command) -> Awaitable[None] | None:
        """Answer a request; ignore answers, as the name server sends no requests."""
        if event.flag & FLAG_RESPONSE:
            return None
        if event.code in SAVED:
            return self._finish_saved(event)
        steps = self._answer(event)
        try:
            steps = resume(next(steps), steps)
        except StopIteration as done:
            self._send(event, done.value)
            return None
        return self._finish(event, steps)

    def _answer(self, command: Command) -> Steps[Frame]:
        try:
            yield from self._admit(command)
        except MartletError as error:
            return self._refuse(command, error)
        return (yield from answer(self._server, self._peer, command))

    def _admit(self, command: Command) -> Steps[None]:
        """Verify the signature of *command*, which takes slices if it is long, and ask for the permission to send it.

        Raises:
          Refused: the signature is wrong, or the permission is missing.
        """
        if self._signers is not None and is_signed(command):
            command.identity = yield from self._signers.authenticate_in_slices(command)
        if command.code in REQUESTS or command.code in SAVED:
            check(self._server, self._gates.gate(command), command)

    async def _finish(self, command: Command, steps: Steps[Frame]) -> None:
        self._send(command, await self._server.turns.finish(steps))

    async def _finish_saved(self, command: Command) -> None:
        try:
            await self._server.turns.finish(self._admit(command))
        except MartletError as error:
            self._send(command, self._refuse(command, error))
        else:
            self._send(command, await answer_when_saved(self._server, command))

    def _refuse(self, command: Command, error: MartletError) -> bytes:
        self._server.requests += 1
        return refusal(command, error)

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
