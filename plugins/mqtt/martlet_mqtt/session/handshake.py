"""The handshake with one client: CONNECT, enhanced authentication, and CONNACK once its session is open.

`logins.py` finds out who a client is, `agreement.py` negotiates the values of CONNECT and CONNACK; both are used here.
"""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import final

from msgspec.structs import replace

from martlet.contracts import Identity, Password
from martlet.errors import Refused
from martlet.runtime.steps import Steps, finish_now
from martlet.sessions.session import Session
from martlet_mqtt.outbound.selectors import check_stored
from martlet_mqtt.session.agreement import connack_properties, expiry_of, keep_alive_of
from martlet_mqtt.session.client import Client
from martlet_mqtt.session.logins import EnhancedLogin, login_reason, needs_password_check
from martlet_mqtt.session.missed import count_missed
from martlet_mqtt.session.wills import check_will
from martlet_mqtt.shared.context import PROTOCOL
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.connection import ANY_BYTES, State
from martlet_mqtt.wire.errors import MqttError, NotAccepted, reason_of
from martlet_mqtt.wire.names import AUTOMATIC, check_client_id
from martlet_mqtt.wire.packets import Auth, Connack, Connect
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

__all__ = ["Handshake"]


@final
class Handshake:
    """Accepts *client*, or turns it away; later it proves again who the client is, if the client asks for that."""

    __slots__ = ("_client", "_login")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._login: EnhancedLogin | None = None

    # who the client is

    def accept(self, connect: Connect) -> Awaitable[None] | None:
        """Accept the client at once if nothing has to be asked for that: a task for each costs as much as the rest."""
        client = self._client
        broker, config = client.context.broker, client.context.config
        client.connect = connect
        rest: Awaitable[None] | None = None
        with self._turning_away(connect):
            check_client_id(connect.client_id)
            if len(connect.client_id.encode()) > config.client_id_bytes_max:
                text = f"the client identifier is too long; mqtt.client_id_bytes_max is {config.client_id_bytes_max}"
                raise MqttError(text, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
            method = connect.properties.text(Property.AUTHENTICATION_METHOD)
            if method is not None:
                self._login = EnhancedLogin(broker.authentication, connect, method)
                return self._prove_in_turn(connect, self._login, connect.properties)
            if needs_password_check(broker.authentication, connect, client.peer.identity):
                return self._check_password(connect)
            if not broker.sessions.is_settled(PROTOCOL, connect.client_id):
                return self._open_when_settled(connect)
            rest = self._open(connect)
        return rest

    async def _check_password(self, connect: Connect) -> None:
        client = self._client
        with self._turning_away(connect):
            credentials = Password(connect.user_name or "", connect.password or b"")
            client.peer.identity = await client.context.broker.authentication.authenticate_password(credentials)
        await self._open_when_settled(connect)

    def authenticate_more(self, packet: Auth) -> Awaitable[None] | None:
        """Go on with enhanced authentication, or do it again. Raises `Refused` and `MqttError`."""
        client = self._client
        connect, login = client.connect, self._login
        if connect is None or login is None:
            raise MqttError("AUTH came, but CONNECT had no authentication method", ReasonCode.PROTOCOL_ERROR)
        is_open = client.session is not None
        login.take(packet, is_open=is_open)
        if not is_open:
            return self._prove_in_turn(connect, login, packet.properties)
        client.peer.start(self._prove_again, login, packet.properties)  # other packets need not wait
        return None

    async def _prove_in_turn(self, connect: Connect, login: EnhancedLogin, properties: Properties) -> None:
        with self._turning_away(connect):
            await self._prove(connect, login, properties)

    async def _prove(self, connect: Connect, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication before the client is accepted. Raises `Refused` and `MqttError`."""
        client, answer = self._client, await login.answer(properties)
        if isinstance(answer, Identity):
            client.peer.identity = answer
            await self._open_when_settled(connect)
        elif client.connection.state is State.ACCEPTING:
            client.send(answer)

    async def _prove_again(self, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication in an open connection (MQTT 5 section 4.12.1)."""
        client = self._client
        try:
            answer = await login.answer(properties)
            if client.connection.state is not State.OPEN:
                return  # it ended meanwhile
            if isinstance(answer, Identity) and answer != client.peer.identity:
                text = f"user {client.peer.identity.name!r} proves to be {answer.name!r} now; connect again"
                raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
            client.send(answer if isinstance(answer, Auth) else login.success())
        except Refused as refused:
            self._fail(login_reason(refused, is_enhanced=True) or reason_of(refused), str(refused))
        except MqttError as error:
            self._fail(error.reason, str(error))

    def _fail(self, reason: ReasonCode, text: str) -> None:
        """End an open connection: the client could not prove who it is."""
        client = self._client
        if client.session is not None and client.connect is not None:
            client.complain("disconnected", client.connect, text)
            client.end(reason, text)

    @contextmanager
    def _turning_away(self, connect: Connect) -> Iterator[None]:
        """Refuse the client if it cannot be accepted."""
        try:
            yield
        except Refused as refused:
            reason = login_reason(refused, is_enhanced=self._login is not None) or reason_of(refused)
            self._turn_away(connect, reason, str(refused))
        except MqttError as error:
            # MQTT 3 has no reason for a will that the broker does not accept, but the client must learn of it.
            is_will = isinstance(error, NotAccepted) and error.reason == ReasonCode.TOPIC_NAME_INVALID
            is_told = is_will and connect.version != V5
            self._turn_away(connect, ReasonCode.NOT_AUTHORIZED if is_told else error.reason, str(error))

    def _turn_away(self, connect: Connect, reason: ReasonCode, text: str) -> None:
        client = self._client
        client.complain("refused", connect, text)
        client.has_ended = client.greeting is not None
        client.peer.send(client.connection.refusal(reason, text, State.ACCEPTING))
        client.leave()
        client.peer.close(text)

    # its session

    async def _open_when_settled(self, connect: Connect) -> None:
        """Accept the client when it is known what failed commits left of its session, which usually is so at once."""
        await self._client.context.broker.sessions.wait_settled(PROTOCOL, connect.client_id)
        with self._turning_away(connect):
            rest = self._open(connect)
            if rest is not None:
                await rest

    def _open(self, connect: Connect) -> Awaitable[None] | None:
        """Attach to the session, and begin. Raises `Refused` and `MqttError`."""
        client, context = self._client, self._client.context
        if client.connection.state is not State.ACCEPTING:
            return None  # the time to connect was over while a thread checked who it is
        gate = client.gate = context.broker.gate(client.peer.identity)
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
        properties = connack_properties(connect, context, keep_alive_s, expiry_s, final, is_assigned)
        self._check_fits(Connack(False, ReasonCode.SUCCESS, properties))
        stored, _ = context.broker.sessions.find(PROTOCOL, client_id)
        if will:
            context.broker.sessions.quota.check_data(will, stored)
        if not connect.clean_start:
            check_stored(context.broker, stored.filters if stored is not None else {})
        client.connect = connect
        context.ensure_topics()
        self._take_over(client_id)
        session, is_old = self._open_session(connect, expiry_s, is_known=stored is not None)
        try:
            self._begin(session, will, is_old=is_old)
        except (Refused, MqttError):
            if not is_old:
                session.end()
            raise
        context.clients[client_id] = client
        client.greeting = Connack(is_old, ReasonCode.SUCCESS, properties)
        if is_old:
            return self._resume(connect, session)
        client.greet(client.greeting)
        return None

    def _check_fits(self, answer: Connack) -> None:
        """Raise `MqttError` unless the client accepts *answer*, which says what it must know."""
        connection = self._client.connection
        limit = connection.accepted_bytes_max
        if limit < ANY_BYTES and (size := len(encode_packet(answer, connection.version))) > limit:
            text = f"CONNACK has {size} bytes, but the client accepts at most {limit}; raise its maximum packet size"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)

    def _take_over(self, client_id: str) -> None:
        """Disconnect another client of this identifier [MQTT-3.1.4-3]."""
        other = self._client.context.clients.get(client_id)
        if other is None:
            return
        if other.identity != self._client.peer.identity:
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
            self._client.wills.end(session)
            if is_stored:
                return self._attach(connect.client_id, expiry_s)
        return self._attach("", 0)

    def _attach(self, name: str, expiry_s: int | None) -> tuple[Session, bool]:
        client = self._client
        position, lost = client.context.feed.tail_position(), client.lose_changes
        client.session, is_old = client.the_gate.open_session(PROTOCOL, name, position, lost, expiry_s=expiry_s)
        return client.session, is_old

    def _begin(self, session: Session, will: bytes, *, is_old: bool) -> None:
        """Go on with *session*, which keeps *will* from now on. Raises `Refused` and `MqttError`."""
        client = self._client
        if is_old:
            client.follow(is_old=True)
        else:
            session.where = client.context.feed.tail_position  # it needs nothing earlier
        client.wills.of_returned(session)
        session.keep(will)  # last, because nothing of a client that is refused is published

    def _resume(self, connect: Connect, session: Session) -> Awaitable[None] | None:
        """Go on with the subscriptions of *session*, and answer then: in slices if there are many."""
        subscriptions = self._client.the_subscriptions
        if subscriptions.takes_slices():
            return self._resume_in_slices(connect, session, subscriptions.resume())
        finish_now(subscriptions.resume())
        return self._begin_delivery()

    async def _resume_in_slices(self, connect: Connect, session: Session, steps: Steps[None]) -> None:
        """Go on with the subscriptions of the client, which counts as accepted: others may take its session over."""
        client, broker = self._client, self._client.context.broker
        with self._turning_away(connect):
            await broker.turns.finish(steps)
            if broker.sessions.live.has(session) and client.greeting is not None:
                rest = self._begin_delivery()
                if rest is not None:
                    await rest

    def _begin_delivery(self) -> Awaitable[None] | None:
        """Tell the client that it is accepted, send it what there is, and count what it missed."""
        client, outgoing = self._client, self._client.the_outgoing
        assert client.greeting is not None
        client.greet(client.greeting)
        rest = count_missed(client) if outgoing.has_missed else None
        outgoing.resend()
        return rest
