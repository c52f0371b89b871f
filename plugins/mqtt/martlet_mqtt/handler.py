"""Acts on the packets of one client (martlet.contracts.Handler)."""

from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, final

import trio

from martlet.access import Gate
from martlet.contracts import Buffer, Identity, Password, Peer
from martlet.delivery.session import Session
from martlet.errors import Refused
from martlet.steps import Steps, finish_now

from .codec import encode_packet
from .codes import V5, PacketType, ReasonCode
from .connection import ANY_BYTES, Event, LongPacket, MqttConnection, State
from .context import PROTOCOL, Context
from .control import PREFIX, answer_request
from .errors import MqttError, reason_of
from .incoming import Incoming, replaced
from .logins import EnhancedLogin, login_reason, needs_password_check
from .names import AUTOMATIC, check_client_id
from .opening import connack_properties, expiry_of, keep_alive_of
from .outgoing import Outgoing
from .packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    Unsubscribe,
)
from .properties import NO_PROPERTIES, Properties, Property
from .scanner import AckRun, PublishRun
from .selecting import check_stored
from .subscriptions import Subscriptions
from .sys_topics import SysTopics
from .wills import Wills, check_will

__all__ = ["MqttHandler"]

_VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5"}
_SHOWN: Final = 80
# User properties of a packet after which others have their turn: 1,000 take 10 ms.
PROPERTIES_A_TURN: Final = 100
FILTERS_A_TURN: Final = 8
_PINGRESP: Final = b"\xd0\x00"
_CONNACK: Final = 0x20


@final
class MqttHandler:
    """One client.

    What only publishers need, and what only subscribers need, is made when the client uses it: many clients do one of
    both, and each part costs time at CONNECT and memory as long as the connection lasts.
    """

    __slots__ = (
        "_connect",
        "_connection",
        "_context",
        "_gate",
        "_greeting",
        "_has_ended",
        "_incoming",
        "_login",
        "_outgoing",
        "_peer",
        "_session",
        "_subscriptions",
        "_sys",
        "_wills",
    )

    def __init__(
        self, peer: Peer, connection: MqttConnection, context: Context, wills: Wills, sys_topics: SysTopics
    ) -> None:
        self._sys = sys_topics
        self._wills = wills
        self._has_ended = False  # the client said that it goes, so that its will is not published
        self._peer = peer
        self._connection = connection
        self._context = context
        self._gate: Gate | None = None
        self._connect: Connect | None = None
        self._login: EnhancedLogin | None = None
        self._greeting: Connack | None = None  # for a client that is accepted, before it is sent
        self._session: Session | None = None
        self._incoming: Incoming | None = None
        self._outgoing: Outgoing | None = None
        self._subscriptions: Subscriptions | None = None

    @property
    def identity(self) -> Identity:
        """Who the client is."""
        return self._peer.identity

    # events

    def handle(self, event: Event) -> Awaitable[None] | None:
        self._context.counters.packets_received += _packets_in(event)
        try:
            rest = self._act(event)
        except Refused as refused:
            raise MqttError(str(refused), reason_of(refused)) from refused
        if rest is not None:
            return self._finish(rest)
        return _pause() if self._connection.is_turn_over or _takes_long(event) else None

    def _act(self, event: Event) -> Awaitable[None] | None:
        if isinstance(event, Connect):
            return self._accept(event)
        if isinstance(event, Auth):
            return self._authenticate_more(event)
        if self._session is None:
            # The client goes before it is accepted, or its session was taken over in the middle of a read.
            if isinstance(event, Disconnect):
                self._peer.close("")
            return None
        match event:
            case PublishRun():
                self._the_incoming.publish_run(event)
            case AckRun(kind, ids):
                self._acknowledge(kind, ids, ReasonCode.SUCCESS)
            case Publish(topic) if topic.startswith(PREFIX):
                return self._answer_request(event)
            case Publish():
                self._the_incoming.publish(event)
            case Ack(kind, packet_id, reason):
                self._acknowledge(kind, (packet_id,), reason)
            case Pingreq():
                self._context.counters.answers += 1
                self._peer.send(_PINGRESP)
            case Subscribe():
                return self._the_subscriptions.subscribe(event)
            case Unsubscribe():
                return self._the_subscriptions.unsubscribe(event)
            case LongPacket(steps):
                return self._decode(steps)
            case Disconnect():
                self._disconnect(event)
            case _:
                raise MqttError(f"{type(event).__name__} is a packet of brokers, not of clients")
        return None

    async def _finish(self, rest: Awaitable[None]) -> None:
        """Wait for *rest*. Raises `MqttError`."""
        try:
            await rest
        except Refused as refused:
            raise MqttError(str(refused), reason_of(refused)) from refused

    async def _decode(self, steps: Steps[Subscribe | Unsubscribe]) -> None:
        """Decode a long packet, and act on it. Raises `Refused` and `MqttError`."""
        rest = self._act(await self._context.broker.turns.finish(steps))
        if rest is not None:
            await rest

    def _answer_request(self, packet: Publish) -> Awaitable[None] | None:
        """Acknowledge a request of an administrator, and answer it in slices."""
        if not self._the_incoming.acknowledge(packet):
            return None
        context = self._context
        return context.broker.turns.finish(
            answer_request(context, self._the_gate, self._peer, packet, self._connection)
        )

    def _acknowledge(self, kind: PacketType, ids: tuple[int, ...], reason: int) -> None:
        if kind is PacketType.PUBREL:
            self._the_incoming.released(ids)
        elif kind is PacketType.PUBREC:
            for packet_id in self._the_outgoing.flight.received(ids, reason):
                reason = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if self._connection.version == V5 else 0
                self._send(Ack(PacketType.PUBREL, packet_id, reason))
        else:
            self._the_outgoing.flight.acknowledged(kind, ids)  # those of an earlier session say nothing

    def _send(self, packet: Auth | Connack | Ack) -> None:
        self._context.counters.answers += 1
        self._peer.send(encode_packet(packet, self._connection.version))

    # CONNECT

    def _accept(self, connect: Connect) -> Awaitable[None] | None:
        """Accept the client at once if nothing has to be asked for that: a task for each costs as much as the rest."""
        self._connect = connect
        rest: Awaitable[None] | None = None
        with self._turning_away(connect):
            check_client_id(connect.client_id)
            if len(connect.client_id.encode()) > self._context.config.client_id_bytes_max:
                limit = self._context.config.client_id_bytes_max
                text = f"the client identifier is too long; mqtt.client_id_bytes_max is {limit}"
                raise MqttError(text, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
            authentication = self._context.broker.authentication
            method = connect.properties.text(Property.AUTHENTICATION_METHOD)
            if method is not None:
                self._login = EnhancedLogin(authentication, connect, method)
                return self._prove_in_turn(connect, self._login, connect.properties)
            if needs_password_check(authentication, connect, self._peer.identity):
                return self._check_password(connect)
            if not self._context.broker.sessions.is_settled(PROTOCOL, connect.client_id):
                return self._open_when_settled(connect)
            rest = self._open(connect)
        return rest

    async def _check_password(self, connect: Connect) -> None:
        with self._turning_away(connect):
            credentials = Password(connect.user_name or "", connect.password or b"")
            self._peer.identity = await self._context.broker.authentication.authenticate_password(credentials)
        await self._open_when_settled(connect)

    async def _open_when_settled(self, connect: Connect) -> None:
        """Accept the client when it is known what failed commits left of its session, which usually is so at once."""
        await self._context.broker.sessions.wait_settled(PROTOCOL, connect.client_id)
        with self._turning_away(connect):
            rest = self._open(connect)
            if rest is not None:
                await rest

    def _authenticate_more(self, packet: Auth) -> Awaitable[None] | None:
        """Go on with enhanced authentication, or do it again. Raises `Refused` and `MqttError`."""
        connect, login = self._connect, self._login
        if connect is None or login is None:
            raise MqttError("AUTH came, but CONNECT had no authentication method", ReasonCode.PROTOCOL_ERROR)
        is_open = self._session is not None
        login.take(packet, is_open=is_open)
        if not is_open:
            return self._prove_in_turn(connect, login, packet.properties)
        self._peer.start(self._prove_again, login, packet.properties)  # other packets need not wait
        return None

    async def _prove_in_turn(self, connect: Connect, login: EnhancedLogin, properties: Properties) -> None:
        with self._turning_away(connect):
            await self._prove(connect, login, properties)

    async def _prove(self, connect: Connect, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication before the client is accepted. Raises `Refused` and `MqttError`."""
        answer = await login.answer(properties)
        if isinstance(answer, Identity):
            self._peer.identity = answer
            await self._open_when_settled(connect)
        elif self._connection.state is State.ACCEPTING:
            self._send(answer)

    async def _prove_again(self, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication in an open connection (MQTT 5 section 4.12.1)."""
        try:
            answer = await login.answer(properties)
            if self._connection.state is not State.OPEN:
                return  # it ended meanwhile
            if isinstance(answer, Identity) and answer != self._peer.identity:
                text = f"user {self._peer.identity.name!r} proves to be {answer.name!r} now; connect again"
                raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
            self._send(answer if isinstance(answer, Auth) else login.success())
        except Refused as refused:
            self._fail(login_reason(refused, is_enhanced=True) or reason_of(refused), str(refused))
        except MqttError as error:
            self._fail(error.reason, str(error))

    def _fail(self, reason: ReasonCode, text: str) -> None:
        """End an open connection: the client could not prove who it is."""
        connect = self._connect
        if self._session is not None and connect is not None:
            self._complain("disconnected", connect, text)
            self._end(reason, text)

    @contextmanager
    def _turning_away(self, connect: Connect) -> Iterator[None]:
        """Refuse the client if it cannot be accepted."""
        try:
            yield
        except Refused as refused:
            reason = login_reason(refused, is_enhanced=self._login is not None) or reason_of(refused)
            self._turn_away(connect, reason, str(refused))
        except MqttError as error:
            self._turn_away(connect, error.reason, str(error))

    def _turn_away(self, connect: Connect, reason: ReasonCode, text: str) -> None:
        self._complain("refused", connect, text)
        self._has_ended = self._greeting is not None
        self._peer.send(self._connection.refusal(reason, text, State.ACCEPTING))
        self._leave()
        self._peer.close(text)

    def _complain(self, what: str, connect: Connect, why: str) -> None:
        user = self._peer.identity.name or connect.user_name or ""
        values = what, connect.client_id[:_SHOWN], user[:_SHOWN], self._peer.address, why
        self._context.complaints.warn("%s client %r of user %r at %s; %s", *values)

    def _open(self, connect: Connect) -> Awaitable[None] | None:
        """Attach to the session, and begin. Raises `Refused` and `MqttError`."""
        if self._connection.state is not State.ACCEPTING:
            return None  # the time to connect was over while a thread checked who it is
        context = self._context
        gate = self._gate = context.broker.gate(self._peer.identity)
        client_id, is_assigned = connect.client_id, not connect.client_id
        if is_assigned:
            if connect.version != V5 and not connect.clean_start:
                text = "a session needs a client identifier; send one, or connect with a clean session"
                raise MqttError(text, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)  # [MQTT-3.1.3-8]
            client_id = f"{AUTOMATIC}{context.broker.ids.unique()}"
            connect = replace(connect, client_id=client_id)
        will = check_will(context, gate, connect.will) if connect.will is not None else b""
        expiry_s, keep_alive_s = expiry_of(connect, context.config), keep_alive_of(connect, context.config)
        final = self._login.final if self._login is not None else NO_PROPERTIES
        properties = connack_properties(connect, context.config, keep_alive_s, expiry_s, final, is_assigned)
        self._check_fits(Connack(False, ReasonCode.SUCCESS, properties))
        stored, _ = context.broker.sessions.find(PROTOCOL, client_id)
        if will:
            context.broker.sessions.quota.check_data(will, stored)
        if not connect.clean_start:
            check_stored(context.broker, stored.filters if stored is not None else {})
        self._connect = connect
        context.ensure_topics()
        self._take_over(client_id)
        session, is_old = self._open_session(connect, expiry_s, is_known=stored is not None)
        try:
            self._begin(session, will, is_old=is_old)
        except (Refused, MqttError):
            if not is_old:
                session.end()
            raise
        context.clients[client_id] = self
        self._greeting = Connack(is_old, ReasonCode.SUCCESS, properties)
        if is_old:
            return self._resume(connect, session)
        self._greet(self._greeting)
        return None

    def _resume(self, connect: Connect, session: Session) -> Awaitable[None] | None:
        """Go on with the subscriptions of *session*, and answer then: in slices if there are many."""
        subscriptions = self._the_subscriptions
        if subscriptions.takes_slices():
            return self._resume_in_slices(connect, session, subscriptions.resume())
        finish_now(subscriptions.resume())
        self._begin_delivery(session)
        return None

    async def _resume_in_slices(self, connect: Connect, session: Session, steps: Steps[None]) -> None:
        """Go on with the subscriptions of the client, which counts as accepted: others may take its session over."""
        broker = self._context.broker
        with self._turning_away(connect):
            await broker.turns.finish(steps)
            if broker.sessions.live.has(session) and self._greeting is not None:
                self._begin_delivery(session)

    def _begin_delivery(self, session: Session) -> None:
        assert self._greeting is not None
        self._greet(self._greeting)
        self._the_outgoing.resend()
        self._context.counters.missed += self._the_outgoing.has_missed

    def _greet(self, greeting: Connack) -> None:
        """Tell the client that it is accepted."""
        session, connect = self._accepted
        self._greeting = None
        self._connection.open(connect.version, keep_alive_of(connect, self._context.config), trio.current_time())
        self._peer.hold_until(session.until)
        self._send(greeting)
        self._context.counters.connections += 1

    def _begin(self, session: Session, will: bytes, *, is_old: bool) -> None:
        """Go on with *session*, which keeps *will* from now on. Raises `Refused` and `MqttError`."""
        if is_old:
            self._follow(is_old=True)
        else:
            session.where = self._context.feed.tail_position  # it needs nothing earlier
        self._wills.of_returned(session)
        session.keep(will)  # last, because nothing of a client that is refused is published

    def _check_fits(self, answer: Connack) -> None:
        """Raise `MqttError` unless the client accepts *answer*, which says what it must know."""
        limit = self._connection.accepted_bytes_max
        if limit < ANY_BYTES and (size := len(encode_packet(answer, self._connection.version))) > limit:
            text = f"CONNACK has {size} bytes, but the client accepts at most {limit}; raise its maximum packet size"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)

    def _take_over(self, client_id: str) -> None:
        """Disconnect another client of this identifier [MQTT-3.1.4-3]."""
        other = self._context.clients.get(client_id)
        if other is None:
            return
        if other.identity != self._peer.identity:
            text = f"client identifier {client_id[:80]!r} belongs to somebody else; choose another one"
            raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
        other.lose("another connection uses the client identifier")

    def _open_session(self, connect: Connect, expiry_s: int | None, *, is_known: bool) -> tuple[Session, bool]:
        """Return the session, and whether it existed before. Raises `Refused`."""
        is_stored = expiry_s != 0 or connect.will is not None
        if is_known or is_stored:
            session, is_old = self._attach(connect.client_id, expiry_s)
            if not is_old or not connect.clean_start:
                return session, is_old
            self._wills.end(session)
            if is_stored:
                return self._attach(connect.client_id, expiry_s)
        return self._attach("", 0)

    def _attach(self, name: str, expiry_s: int | None) -> tuple[Session, bool]:
        position, lost = self._context.feed.tail_position(), self._lose_changes
        self._session, is_old = self._the_gate.open_session(PROTOCOL, name, position, lost, expiry_s=expiry_s)
        return self._session, is_old

    @property
    def _the_gate(self) -> Gate:
        assert self._gate is not None
        return self._gate

    # parts, which are made when they are used

    @property
    def _the_incoming(self) -> Incoming:
        if self._incoming is None:
            session, connect = self._accepted
            self._incoming = Incoming(self._peer, self._connection, self._context, self._the_gate, session, connect)
        return self._incoming

    @property
    def _the_outgoing(self) -> Outgoing:
        if self._outgoing is None:
            self._follow(is_old=False)
        assert self._outgoing is not None
        return self._outgoing

    @property
    def _the_subscriptions(self) -> Subscriptions:
        if self._subscriptions is None:
            self._follow(is_old=False)
        assert self._subscriptions is not None
        return self._subscriptions

    def _follow(self, *, is_old: bool) -> None:
        """Follow the log for the client, from where an old session is. Raises `Refused`."""
        session, connect = self._accepted
        peer, context, gate = self._peer, self._context, self._the_gate
        outgoing = Outgoing(peer, context, gate, session, connect)
        subscriptions = Subscriptions(
            peer, self._connection, context, gate, session, self._the_incoming, outgoing, self._sys
        )
        subscriptions.begin(is_old=is_old)
        self._outgoing, self._subscriptions = outgoing, subscriptions

    @property
    def _accepted(self) -> tuple[Session, Connect]:
        """The session and CONNECT of the client, which was accepted."""
        assert self._session is not None
        assert self._connect is not None
        return self._session, self._connect

    # the end

    def _disconnect(self, packet: Disconnect) -> None:
        session, connect = self._session, self._connect
        assert session is not None
        assert connect is not None
        expiry_s = packet.properties.number(Property.SESSION_EXPIRY, -1)
        if expiry_s > 0 and not connect.properties.number(Property.SESSION_EXPIRY, 0):
            text = "the session expiry interval was 0 in CONNECT, and stays that [MQTT-3.1.2-11.2]"
            raise MqttError(text, ReasonCode.PROTOCOL_ERROR)
        self._has_ended = packet.reason == ReasonCode.SUCCESS
        if expiry_s >= 0:
            try:
                session.expire_after(min(expiry_s, self._context.config.session_expiry_max_s))
            except Refused as refused:
                self._complain("did not change the session expiry of", connect, str(refused))
        self._peer.close("")

    def lose(self, reason: str) -> None:
        """Disconnect: another connection has the session."""
        self._end(ReasonCode.SESSION_TAKEN_OVER, reason)
        self._leave()

    def _lose_changes(self, reason: str) -> None:
        """Disconnect: a commit failed, so the session is again as it was stored before."""
        self._greeting = None  # a client that was not told yet is not accepted
        self._end(ReasonCode.QUOTA_EXCEEDED, reason)
        self._leave()

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops, and where else to connect."""
        elsewhere = self._context.config.server_reference
        if elsewhere:
            properties = Properties({Property.SERVER_REFERENCE: elsewhere})
            self._end(ReasonCode.USE_ANOTHER_SERVER, "the broker stops", properties)
        else:
            self._end(ReasonCode.SERVER_SHUTTING_DOWN, "the broker stops")

    def kick(self) -> None:
        """Disconnect the client, because an administrator wants it."""
        self._end(ReasonCode.ADMINISTRATIVE_ACTION, "an administrator disconnected the client")

    def _end(self, reason: ReasonCode, text: str, properties: Properties | None = None) -> None:
        if self._greeting is not None:
            self._greet(self._greeting)
        if self._connection.state is not State.ENDED:  # else it knows already why
            self._peer.send(self._connection.refusal(reason, text, self._connection.state, properties))
            self._connection.end()
        self._peer.close(text)

    # what administrators see

    @property
    def is_stored(self) -> bool:
        """Whether its session outlives the connection."""
        return self._session is not None and self._session.is_stored

    @property
    def dropped(self) -> int:
        """How many messages of QoS 0 it did not get because it was too slow."""
        return self._outgoing.dropped if self._outgoing is not None else 0

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The filters of its session, as `grant_of` takes them."""
        return self._session.filters if self._session is not None else {}

    def described(self) -> dict[str, object]:
        """Return what a list of clients says about it."""
        connect, session = self._connect, self._session
        return {
            "user": self._peer.identity.name,
            "address": self._peer.address,
            "version": _VERSIONS.get(self._connection.version),
            "keep_alive_s": connect.keep_alive_s if connect is not None else None,
            "expiry_s": session.expiry_s if session is not None else None,
            "subscriptions": len(self.filters),
            "in_flight": len(session.flight) if session is not None else 0,
            "will": connect.will.topic if connect is not None and connect.will is not None else None,
        }

    def closed(self, reason: str) -> None:
        self._leave()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._wills.of_gone(session, is_wanted=not self._has_ended)
            session.leave()
        if self._outgoing is not None:
            self._sys.forget(self._outgoing)
            self._outgoing.close()
        self._connection.end()
        self._incoming = self._outgoing = self._subscriptions = self._greeting = None
        connect, clients = self._connect, self._context.clients
        if connect is not None and clients.get(connect.client_id) is self:
            del clients[connect.client_id]

    # the server's calls

    def refuse(self, answer: Buffer, refused: Refused) -> bytes | None:
        if answer[0] == _CONNACK:
            self._connection.state = State.ACCEPTING  # so that the last packet is a CONNACK again
            self._has_ended = False  # DISCONNECT after it means nothing
        return replaced(answer, refused, self._connection.version)

    def collect(self, budget_bytes: int) -> None:
        if self._outgoing is None or self._greeting is not None:
            return
        try:
            self._outgoing.collect(budget_bytes)
        except Refused as refused:
            self._end(reason_of(refused), str(refused))


async def _pause() -> None:
    await trio.lowlevel.checkpoint()


def _takes_long(event: Event) -> bool:
    """Return whether others must have their turn before the next packet of this client."""
    if isinstance(event, PublishRun | AckRun | Pingreq | Pingresp | LongPacket):
        return False
    count = len(event.subscriptions) if isinstance(event, Subscribe) else 0
    count = len(event.filters) if isinstance(event, Unsubscribe) else count
    return count > FILTERS_A_TURN or len(event.properties.user) > PROPERTIES_A_TURN


def _packets_in(event: Event) -> int:
    if isinstance(event, PublishRun):
        return len(event.ends)
    return len(event.ids) if isinstance(event, AckRun) else 1
