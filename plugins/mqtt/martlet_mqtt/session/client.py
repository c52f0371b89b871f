"""One accepted client: its session, the parts that work for it, and its end."""

from collections.abc import Mapping
from typing import Final, final

import trio

from martlet.access import Gate
from martlet.contracts import Identity, Peer
from martlet.sessions.session import Session
from martlet_mqtt.admin.sys_topics import SysTopics
from martlet_mqtt.inbound.incoming import Incoming
from martlet_mqtt.inbound.subscriptions import ClientSubscriptions, start_of
from martlet_mqtt.outbound.outgoing import Outgoing
from martlet_mqtt.session.agreement import keep_alive_of
from martlet_mqtt.session.wills import Wills
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.connection import MqttConnection, State
from martlet_mqtt.wire.packets import Ack, Connack, Connect
from martlet_mqtt.wire.properties import Properties, Property

__all__ = ["Client", "complain"]

_VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5"}
_SHOWN: Final = 80


def complain(context: Context, peer: Peer, connect: Connect, what: str, why: str) -> None:
    """Log *what* the broker does with the client of *connect*, and *why*."""
    user = peer.identity.name or connect.user_name or ""
    values = what, connect.client_id[:_SHOWN], user[:_SHOWN], peer.address, why
    context.complaints.warn("%s client %r of user %r at %s; %s", *values)


@final
class Client:
    """An accepted client: its connection, its session, and the parts that serve it; made by `Handshake`.

    What only publishers need, and what only subscribers need, is made when the client uses it: many clients do one of
    both, and each part costs time at CONNECT and memory as long as the connection lasts.
    """

    __slots__ = (
        "_incoming",
        "_subscriptions",
        "_sys",
        "connect",
        "connection",
        "context",
        "gate",
        "greeting",
        "has_ended",
        "has_left",
        "missed",
        "outgoing",
        "peer",
        "session",
        "wills",
    )

    def __init__(
        self,
        peer: Peer,
        connection: MqttConnection,
        context: Context,
        gate: Gate,
        session: Session,
        connect: Connect,
        wills: Wills,
        sys_topics: SysTopics,
    ) -> None:
        self.peer = peer
        self.connection = connection
        self.context = context
        self.gate = gate
        self.session = session
        self.connect = connect
        self.wills = wills
        self.missed: int | None = 0  # messages removed before it returned (`count_missed`); None if not known
        self.has_ended = False  # the client said that it goes, so that its will is not published
        self.has_left = False  # it is detached from its session
        self.greeting: Connack | None = None  # before it is sent
        self.outgoing: Outgoing | None = None  # once it follows the log
        self._incoming: Incoming | None = None
        self._subscriptions: ClientSubscriptions | None = None
        self._sys = sys_topics

    @property
    def identity(self) -> Identity:
        """Who the client is."""
        return self.peer.identity

    def send(self, packet: Connack | Ack) -> None:
        self.context.counters.answers += 1
        self.peer.send(encode_packet(packet, self.connection.version))

    def greet(self, greeting: Connack) -> None:
        """Tell the client that it is accepted."""
        connect = self.connect
        self.greeting = None
        self.connection.open(connect.version, keep_alive_of(connect, self.context.config), trio.current_time())
        self.peer.introduce(connect.client_id, self._details(connect, greeting))
        self.peer.hold_until(self.session.until)
        self.send(greeting)
        self.context.counters.connections += 1

    def _details(self, connect: Connect, greeting: Connack) -> str:
        """Return what the log says of a client that has connected."""
        kind = "bridge of MQTT" if connect.is_bridge else "MQTT"
        session = "its session goes on" if greeting.session_present else "new session"
        return f"{kind} {_VERSIONS[connect.version]}, keep alive {connect.keep_alive_s} s, {session}"

    def complain(self, what: str, why: str) -> None:
        complain(self.context, self.peer, self.connect, what, why)

    # parts, which are made when they are used

    @property
    def incoming(self) -> Incoming:
        """The part that stores the messages of the client."""
        if self._incoming is None:
            self._incoming = Incoming(self.peer, self.connection, self.context, self.gate, self.session, self.connect)
        return self._incoming

    @property
    def subscriptions(self) -> ClientSubscriptions:
        """Its subscriptions, and with them ``outgoing``."""
        return self._subscriptions or self.follow(is_old=False)

    def follow(self, *, is_old: bool) -> ClientSubscriptions:
        """Follow the log for the client, from where an old session is. Raises `Refused`."""
        peer, context, gate, session = self.peer, self.context, self.gate, self.session
        start = start_of(session) if is_old else None
        self.outgoing = Outgoing(peer, context, gate, session, self.connect, start)
        self._subscriptions = ClientSubscriptions(
            peer, self.connection, context, gate, session, self.incoming, self.outgoing, self._sys
        )
        return self._subscriptions

    # the end

    def lose(self, reason: str) -> None:
        """Disconnect: another connection has the session."""
        self.end(ReasonCode.SESSION_TAKEN_OVER, reason)
        self.leave()

    def lose_changes(self, reason: str) -> None:
        """Disconnect: a commit failed, so the session is again as it was stored before."""
        self.greeting = None  # a client that was not told yet is not accepted
        self.end(ReasonCode.QUOTA_EXCEEDED, reason)
        self.leave()

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops, and where else to connect."""
        elsewhere = self.context.config.server_reference
        if elsewhere:
            properties = Properties({Property.SERVER_REFERENCE: elsewhere})
            self.end(ReasonCode.USE_ANOTHER_SERVER, "the broker stops", properties)
        else:
            self.end(ReasonCode.SERVER_SHUTTING_DOWN, "the broker stops")

    def kick(self) -> None:
        """Disconnect the client, because an administrator wants it."""
        self.end(ReasonCode.ADMINISTRATIVE_ACTION, "an administrator disconnected the client")

    def end(self, reason: ReasonCode, text: str, properties: Properties | None = None) -> None:
        """Disconnect the client, and tell it why."""
        if self.greeting is not None:
            self.greet(self.greeting)
        if self.connection.state is not State.ENDED:  # else it knows already why
            self.peer.send(self.connection.refusal(reason, text, self.connection.state, properties))
            self.connection.end()
        self.peer.close(text)

    def leave(self) -> None:
        """Detach from the session, and drop the parts: the client is gone."""
        if self.has_left:
            return
        self.has_left = True
        self.wills.of_gone(self.session, is_wanted=not self.has_ended)
        self.session.leave()
        if self.outgoing is not None:
            self._sys.forget(self.outgoing)
            self.outgoing.close()
        self.connection.end()
        self._incoming = self.outgoing = self._subscriptions = self.greeting = None
        clients = self.context.clients
        if clients.get(self.connect.client_id) is self:
            del clients[self.connect.client_id]

    # what administrators see

    @property
    def is_stored(self) -> bool:
        """Whether the session outlives the connection."""
        return self.session.is_stored

    @property
    def dropped(self) -> int:
        """How many messages of QoS 0 it did not get because it was too slow."""
        return self.outgoing.dropped if self.outgoing is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The filters of its session, as `grant_of` takes them."""
        return self.session.filters

    def described(self) -> dict[str, object]:
        """Return what a list of clients says about it."""
        connect, session = self.connect, self.session
        return {
            "user": self.peer.identity.name,
            "address": self.peer.address,
            "version": _VERSIONS.get(self.connection.version),
            "keep_alive_s": connect.keep_alive_s,
            "expiry_s": session.expiry_s,
            "subscriptions": len(self.filters),
            "in_flight": len(session.flight),
            "missed": self.missed,
            "will": connect.will.topic if connect.will is not None else None,
        }
