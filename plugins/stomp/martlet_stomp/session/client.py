"""One accepted client: its session, its parts, and its end."""

from collections.abc import Callable, Iterator
from typing import final

import trio

from martlet.contracts import Peer
from martlet_stomp.inbound.acknowledgements import ClientAcknowledgements
from martlet_stomp.inbound.incoming import Incoming
from martlet_stomp.inbound.subscriptions import ClientSubscriptions
from martlet_stomp.inbound.transactions import ClientTransactions
from martlet_stomp.shared.context import Context
from martlet_stomp.shared.heartbeats import Beat
from martlet_stomp.wire.codec import encode_connected
from martlet_stomp.wire.connection import StompConnection, agreed_beats
from martlet_stomp.wire.packets import Connect

__all__ = ["Client"]


@final
class Client:
    """An accepted client: its session, and the parts that serve it; *end* closes the connection, with a reason.

    Raises:
      Refused: the client's quotas allow no more connections.
    """

    __slots__ = (
        "_connect",
        "_connection",
        "_context",
        "_end",
        "_peer",
        "acknowledgements",
        "beat",
        "gate",
        "incoming",
        "session",
        "subscriptions",
        "transactions",
    )

    def __init__(
        self, peer: Peer, connection: StompConnection, context: Context, connect: Connect, end: Callable[[str], None]
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._context = context
        self._connect = connect
        self._end = end
        gate = self.gate = context.broker.gate(peer.identity, peer.login_origin(), peer)
        session = self.session = context.broker.ids.unique()
        context.temporary.begin(session, gate.identity.name)
        self.subscriptions = ClientSubscriptions(peer, context, gate, connect, session, end)
        self.incoming = Incoming(peer, connection, context, gate, session, self.subscriptions.reply_to)
        self.acknowledgements = ClientAcknowledgements(peer, context, self.subscriptions)
        self.transactions = ClientTransactions(peer, context, gate, self.incoming, self.acknowledgements, end)
        self.beat: Beat | None = None

    def greet(self) -> None:
        """Open the connection, and send CONNECTED."""
        peer, context, connect = self._peer, self._context, self._connect
        peer.introduce(connect.client_id or self.session, f"STOMP {connect.version.text}")
        beats = agreed_beats(connect, context.config.heartbeat_min_ms)
        self._connection.open(beats[1], trio.current_time())
        if beats[0]:
            self.beat = context.heartbeats.begin(peer, beats[0])
        context.clients[self] = None
        context.counters.connections += 1
        peer.send(encode_connected(connect.version, self.session, context.server, beats))

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops."""
        self._end("the broker stops; connect again later")

    def described(self) -> dict[str, object]:
        """Return the client's row in the list of connections."""
        return {
            "session": self.session,
            "user": self._peer.identity.name,
            "address": self._peer.address,
            "version": self._connection.version.text,
            "client_id": self._connect.client_id,
            "heart_beat_s": self.beat.interval_s if self.beat is not None else None,
            "subscriptions": len(self.subscriptions),
            "transactions": len(self.transactions),
        }

    def described_subscriptions(self) -> Iterator[dict[str, object]]:
        """Yield a row of the list of subscriptions for each subscription."""
        return self.subscriptions.described()

    def leave(self) -> None:
        """Drop the parts: the client is gone."""
        if self.beat is not None:
            self._context.heartbeats.end(self.beat)
        self.transactions.close()
        self.subscriptions.close()
        self._context.temporary.end(self.session)
        self._context.clients.pop(self, None)
