"""One peer of the name server: its requests, in order, each answered at once."""

from typing import final

from martlet.contracts import Peer
from martlet_remoting.codes import FLAG_ONEWAY, FLAG_RESPONSE
from martlet_remoting.packets import Command

from .requests import answer
from .server import NameServer

__all__ = ["NameServerHandler"]


@final
class NameServerHandler:
    """The peer is the key of the brokers that registered over it: they go when it goes."""

    __slots__ = ("_peer", "_server")

    def __init__(self, server: NameServer, peer: Peer) -> None:
        self._server = server
        self._peer = peer

    def handle(self, event: Command) -> None:
        """Answer a request; what is an answer itself is nothing that we asked for."""
        if event.flag & FLAG_RESPONSE:
            return
        frame = answer(self._server, self._peer, event)
        if not event.flag & FLAG_ONEWAY:
            self._peer.send(frame)

    def collect(self, budget_bytes: int) -> None:
        """Nothing ever waits here."""

    def closed(self, reason: str) -> None:
        """The connection is gone, and with it the brokers that came by it."""
        self._server.table.drop_connection(self._peer)
        self._server.clients.discard(self._peer)
