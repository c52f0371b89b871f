"""One accepted client: its session, its parts, and its end."""

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

    The parts for publishers and for subscribers are made at their first use: many clients do only one of both, and each
    part costs time at CONNECT and memory while the connection lasts.
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
        self.missed: int | None = 0  # messages removed before the client returned (`count_missed`); None for unknown
        self.has_ended = False  # the client sent DISCONNECT, so its will is not published
        self.has_left = False  # the client is detached from its session
        self.greeting: Connack | None = None  # the CONNACK until it is sent
        self.outgoing: Outgoing | None = None  # set once the client follows the log
        self._incoming: Incoming | None = None
        self._subscriptions: ClientSubscriptions | None = None
        self._sys = sys_topics

    @property
    def identity(self) -> Identity:
        """The client's identity."""
        return self.peer.identity

    def send(self, packet: Connack | Ack) -> None:
        self.context.counters.answers += 1
        self.peer.send(encode_packet(packet, self.connection.version))

    def greet(self, greeting: Connack) -> None:
        """Open the connection, and send *greeting*."""
        connect = self.connect
        self.greeting = None
        self.connection.open(connect.version, keep_alive_of(connect, self.context.config), trio.current_time())
        self.peer.introduce(connect.client_id, self._details(connect, greeting))
        self.peer.hold_until(self.session.until)
        self.send(greeting)
        self.context.counters.connections += 1

    def _details(self, connect: Connect, greeting: Connack) -> str:
        """Return the description of a new connection for the program's log."""
        kind = "bridge of MQTT" if connect.is_bridge else "MQTT"
        session = "its session goes on" if greeting.session_present else "new session"
        return f"{kind} {_VERSIONS[connect.version]}, keep alive {connect.keep_alive_s} s, {session}"

    def complain(self, what: str, why: str) -> None:
        complain(self.context, self.peer, self.connect, what, why)

    # parts, made at their first use

    @property
    def incoming(self) -> Incoming:
        """The part that stores the client's messages."""
        if self._incoming is None:
            self._incoming = Incoming(self.peer, self.connection, self.context, self.gate, self.session, self.connect)
        return self._incoming

    @property
    def subscriptions(self) -> ClientSubscriptions:
        """The client's subscriptions; making them sets ``outgoing``, too."""
        return self._subscriptions or self.follow(is_old=False)

    def follow(self, *, is_old: bool) -> ClientSubscriptions:
        """Follow the log, with *is_old* from the position of the client's session. Raises `Refused`."""
        peer, context, gate, session = self.peer, self.context, self.gate, self.session
        start = start_of(session) if is_old else None
        self.outgoing = Outgoing(peer, context, gate, session, self.connect, start)
        self._subscriptions = ClientSubscriptions(
            peer, self.connection, context, gate, session, self.incoming, self.outgoing, self._sys
        )
        return self._subscriptions

    # the end

    def lose(self, reason: str) -> None:
        """Disconnect the client: another connection takes its session over."""
        self.end(ReasonCode.SESSION_TAKEN_OVER, reason)
        self.leave()

    def lose_changes(self, reason: str) -> None:
        """Disconnect the client: a commit failed, and its session falls back to the stored state."""
        self.greeting = None  # a client without CONNACK is not accepted
        self.end(ReasonCode.QUOTA_EXCEEDED, reason)
        self.leave()

    def say_goodbye(self) -> None:
        """Disconnect the client because the broker stops, with the server reference of the configuration."""
        elsewhere = self.context.config.server_reference
        if elsewhere:
            properties = Properties({Property.SERVER_REFERENCE: elsewhere})
            self.end(ReasonCode.USE_ANOTHER_SERVER, "the broker stops", properties)
        else:
            self.end(ReasonCode.SERVER_SHUTTING_DOWN, "the broker stops")

    def kick(self) -> None:
        """Disconnect the client because an administrator asked for it."""
        self.end(ReasonCode.ADMINISTRATIVE_ACTION, "an administrator disconnected the client")

    def end(self, reason: ReasonCode, text: str, properties: Properties | None = None) -> None:
        """Disconnect the client, with *reason* and *text*."""
        if self.greeting is not None:
            self.greet(self.greeting)
        if self.connection.state is not State.ENDED:  # otherwise it got its last packet already
            self.peer.send(self.connection.refusal(reason, text, self.connection.state, properties))
            self.connection.end()
        self.peer.close(text)

    def leave(self) -> None:
        """Detach the client from its session, and drop its parts: the client is gone."""
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

    # for administrators

    @property
    def is_stored(self) -> bool:
        """Whether the session outlives the connection."""
        return self.session.is_stored

    @property
    def dropped(self) -> int:
        """The number of QoS 0 messages dropped because the client was too slow."""
        return self.outgoing.dropped if self.outgoing is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The topic filters of its session, with their options as `grant_of` takes them."""
        return self.session.filters

    def described(self) -> dict[str, object]:
        """Return the client's row in the list of clients."""
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
