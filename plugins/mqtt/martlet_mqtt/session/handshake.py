"""The handshake with one client: CONNECT, enhanced authentication, and CONNACK once its session is open.

It uses `logins.py` to authenticate the client, and `agreement.py` to negotiate the values of CONNECT and CONNACK.
"""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Protocol, final

from msgspec.structs import replace

from martlet.access import Gate
from martlet.contracts import Identity, Password, Peer
from martlet.errors import Refused
from martlet.runtime.steps import Steps, finish_now
from martlet_mqtt.admin.sys_topics import SysTopics
from martlet_mqtt.outbound.selectors import check_stored
from martlet_mqtt.session.agreement import connack_properties, expiry_of, keep_alive_of
from martlet_mqtt.session.client import Client, complain
from martlet_mqtt.session.logins import EnhancedLogin, login_reason, needs_password_check
from martlet_mqtt.session.missed import count_missed
from martlet_mqtt.session.wills import Wills, check_will
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.connection import ANY_BYTES, MqttConnection, State
from martlet_mqtt.wire.errors import MqttError, NotAccepted, reason_of
from martlet_mqtt.wire.names import AUTOMATIC, check_client_id
from martlet_mqtt.wire.packets import Auth, Connack, Connect
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

__all__ = ["ClientHolder", "Handshake"]


class ClientHolder(Protocol):
    """The owner of a connection's client; `MqttHandler` is one.

    ``client`` is None until the session is open; the client can be refused even after that.
    """

    client: Client | None


@final
class Handshake:
    """Accepts the client of *connect* for *holder*, or refuses it; the client may authenticate again later."""

    __slots__ = ("_connect", "_connection", "_context", "_holder", "_login", "_peer", "_sys", "_wills")

    def __init__(
        self,
        holder: ClientHolder,
        peer: Peer,
        connection: MqttConnection,
        context: Context,
        connect: Connect,
        wills: Wills,
        sys_topics: SysTopics,
    ) -> None:
        self._holder = holder
        self._peer = peer
        self._connection = connection
        self._context = context
        self._connect = connect
        self._wills = wills
        self._sys = sys_topics
        self._login: EnhancedLogin | None = None

    # authentication

    def accept(self) -> Awaitable[None] | None:
        """Accept the client; at once if nothing must be awaited: a task costs as much as the rest of the handshake."""
        broker, config, connect = self._context.broker, self._context.config, self._connect
        rest: Awaitable[None] | None = None
        with self._turning_away():
            check_client_id(connect.client_id)
            if len(connect.client_id.encode()) > config.client_id_bytes_max:
                text = f"the client identifier is too long; mqtt.client_id_bytes_max is {config.client_id_bytes_max}"
                raise MqttError(text, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
            method = connect.properties.text(Property.AUTHENTICATION_METHOD)
            if method is not None:
                origin = self._peer.login_origin(connect.client_id)
                self._login = EnhancedLogin(broker.authentication, connect, method, origin)
                return self._prove_in_turn(self._login, connect.properties)
            if needs_password_check(broker.authentication, connect, self._peer.identity):
                return self._check_password()
            self._peer.identity = broker.authentication.identify(self._peer, connect.client_id)
            if not broker.sessions.is_settled(PROTOCOL, connect.client_id):
                return self._open_when_settled()
            rest = self._open()
        return rest

    async def _check_password(self) -> None:
        connect = self._connect
        with self._turning_away():
            credentials = Password(connect.user_name or "", connect.password or b"")
            authentication, origin = self._context.broker.authentication, self._peer.login_origin(connect.client_id)
            self._peer.identity = await authentication.authenticate_password(credentials, origin)
        await self._open_when_settled()

    def authenticate_more(self, packet: Auth) -> Awaitable[None] | None:
        """Continue enhanced authentication, or start it again in an open connection. Raises `Refused`, `MqttError`."""
        login, client = self._login, self._holder.client
        if login is None:
            raise MqttError("AUTH came, but CONNECT had no authentication method", ReasonCode.PROTOCOL_ERROR)
        is_open = client is not None and not client.has_left
        login.take(packet, is_open=is_open)
        if not is_open:
            return self._prove_in_turn(login, packet.properties)
        self._peer.start(self._prove_again, login, packet.properties)  # a task, so that other packets need not wait
        return None

    async def _prove_in_turn(self, login: EnhancedLogin, properties: Properties) -> None:
        with self._turning_away():
            await self._prove(login, properties)

    async def _prove(self, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication before the client is accepted. Raises `Refused` and `MqttError`."""
        answer = await login.answer(properties)
        if isinstance(answer, Identity):
            self._peer.identity = answer
            await self._open_when_settled()
        elif self._connection.state is State.ACCEPTING:
            self._send(answer)

    async def _prove_again(self, login: EnhancedLogin, properties: Properties) -> None:
        """Do one step of enhanced authentication in an open connection (MQTT 5 section 4.12.1)."""
        try:
            answer = await login.answer(properties)
            if self._connection.state is not State.OPEN:
                return  # the connection ended meanwhile
            if isinstance(answer, Identity):
                self._renew(answer)
            self._send(answer if isinstance(answer, Auth) else login.success())
        except Refused as refused:
            self._fail(login_reason(refused, is_enhanced=True) or reason_of(refused), str(refused))
        except MqttError as error:
            self._fail(error.reason, str(error))

    def _renew(self, proved: Identity) -> None:
        """Note until when the login lasts now. Raises `MqttError` if the client is not who it was."""
        current = self._peer.identity
        if (proved.name, proved.groups) != (current.name, current.groups):
            what = f"to be {proved.name!r}" if proved.name != current.name else "to be in other groups"
            text = f"user {current.name!r} proves {what} now; connect again"
            raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
        self._peer.identity = proved

    def _send(self, packet: Auth) -> None:
        self._context.counters.answers += 1
        self._peer.send(encode_packet(packet, self._connection.version))

    def _fail(self, reason: ReasonCode, text: str) -> None:
        """End an open connection, because the client failed to authenticate again."""
        client = self._holder.client
        if client is not None and not client.has_left:
            client.complain("disconnected", text)
            client.end(reason, text)

    @contextmanager
    def _turning_away(self) -> Iterator[None]:
        """Refuse the client if the block raises `Refused` or `MqttError`."""
        try:
            yield
        except Refused as refused:
            reason = login_reason(refused, is_enhanced=self._login is not None) or reason_of(refused)
            self._turn_away(reason, str(refused))
        except MqttError as error:
            # MQTT 3 has no return code for a will that the broker does not accept, but the client must learn of it.
            is_will = isinstance(error, NotAccepted) and error.reason == ReasonCode.TOPIC_NAME_INVALID
            is_told = is_will and self._connect.version != V5
            self._turn_away(ReasonCode.NOT_AUTHORIZED if is_told else error.reason, str(error))

    def _turn_away(self, reason: ReasonCode, text: str) -> None:
        complain(self._context, self._peer, self._connect, "refused", text)
        client = self._holder.client
        if client is not None:
            client.has_ended = client.greeting is not None
        self._peer.send(self._connection.refusal(reason, text, State.ACCEPTING))
        if client is not None:
            client.leave()
        self._connection.end()
        self._peer.close(text)

    # the session

    async def _open_when_settled(self) -> None:
        """Accept the client once the state of its session after failed commits is known, usually at once."""
        await self._context.broker.sessions.wait_settled(PROTOCOL, self._connect.client_id)
        with self._turning_away():
            rest = self._open()
            if rest is not None:
                await rest

    def _open(self) -> Awaitable[None] | None:
        """Attach the client to its session, and begin or resume it. Raises `Refused` and `MqttError`."""
        context, connect = self._context, self._connect
        if self._connection.state is not State.ACCEPTING:
            return None  # the connection ended while a thread checked the password
        identity, origin = self._peer.identity, self._peer.login_origin(connect.client_id)
        gate = context.broker.gate(identity, origin)
        client_id, is_assigned = connect.client_id, not connect.client_id
        if is_assigned:
            if connect.version != V5 and not connect.clean_start:
                text = "a session needs a client identifier; send one, or connect with a clean session"
                raise MqttError(text, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)  # [MQTT-3.1.3-8]
            client_id = f"{AUTOMATIC}{context.broker.ids.unique()}"
            connect = replace(connect, client_id=client_id)
        will = check_will(context, gate, connect.will, origin.address) if connect.will is not None else b""
        expiry_s, keep_alive_s = expiry_of(connect, context.config), keep_alive_of(connect, context.config)
        final = self._login.final if self._login is not None else NO_PROPERTIES
        properties = connack_properties(connect, context, keep_alive_s, expiry_s, final, is_assigned)
        self._check_fits(Connack(False, ReasonCode.SUCCESS, properties))
        stored, _ = context.broker.sessions.find(PROTOCOL, client_id)
        if will:
            context.broker.sessions.quota.check_data(will, stored)
        if not connect.clean_start:
            check_stored(context.broker, stored.filters if stored is not None else {})
        context.ensure_topics()
        self._take_over(client_id)
        gate = context.broker.gate(identity, origin, self._peer)  # now, as its last connection counts no more
        client, is_old = self._open_session(gate, connect, expiry_s, is_known=stored is not None)
        try:
            self._begin(client, will, is_old=is_old)
        except (Refused, MqttError):
            if not is_old:
                client.session.end()
            raise
        context.clients[client_id] = client
        greeting = Connack(is_old, ReasonCode.SUCCESS, properties)
        if is_old:
            client.greeting = greeting
            return self._resume(client)
        client.greet(greeting)
        return None

    def _check_fits(self, answer: Connack) -> None:
        """Raise `MqttError` if *answer* is too large for the client, which needs all its properties."""
        connection = self._connection
        limit = connection.accepted_bytes_max
        if limit < ANY_BYTES and (size := len(encode_packet(answer, connection.version))) > limit:
            text = f"CONNACK has {size} bytes, but the client accepts at most {limit}; raise its maximum packet size"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)

    def _take_over(self, client_id: str) -> None:
        """Disconnect another client of this identifier [MQTT-3.1.4-3]. Raises `MqttError` if another user has it."""
        holder = self._context.clients.get(client_id)
        if holder is None:
            return
        if holder.identity.name != self._peer.identity.name:
            text = f"client identifier {client_id[:80]!r} belongs to somebody else; choose another one"
            raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
        holder.lose("another connection uses the client identifier")

    def _open_session(
        self, gate: Gate, connect: Connect, expiry_s: int | None, *, is_known: bool
    ) -> tuple[Client, bool]:
        """Return the client with its session, and whether the session is an old one. Raises `Refused`."""
        is_stored = expiry_s != 0 or connect.will is not None
        if is_known or is_stored:
            client, is_old = self._attach(gate, connect, connect.client_id, expiry_s)
            if not is_old or not connect.clean_start:
                return client, is_old
            self._wills.end(client.session)
            if is_stored:
                return self._attach(gate, connect, connect.client_id, expiry_s)
        return self._attach(gate, connect, "", 0)

    def _attach(self, gate: Gate, connect: Connect, name: str, expiry_s: int | None) -> tuple[Client, bool]:
        context = self._context
        position = context.feed.tail_position()
        session, is_old = gate.open_session(PROTOCOL, name, position, self._lose_changes, expiry_s=expiry_s)
        parts = self._wills, self._sys
        client = self._holder.client = Client(self._peer, self._connection, context, gate, session, connect, *parts)
        return client, is_old

    def _lose_changes(self, reason: str) -> None:
        if self._holder.client is not None:
            self._holder.client.lose_changes(reason)

    def _begin(self, client: Client, will: bytes, *, is_old: bool) -> None:
        """Begin or resume delivery, and store *will* in the session of *client*. Raises `Refused` and `MqttError`."""
        session = client.session
        if is_old:
            client.follow(is_old=True)
        else:
            session.where = self._context.feed.tail_position  # a new session needs nothing earlier
        self._wills.of_returned(session)
        session.keep(will)  # last, because the will of a refused client must not be published

    def _resume(self, client: Client) -> Awaitable[None] | None:
        """Resume the subscriptions of *client*, in slices if there are many; then send CONNACK."""
        subscriptions = client.subscriptions
        if subscriptions.takes_slices():
            return self._resume_in_slices(client, subscriptions.resume())
        finish_now(subscriptions.resume())
        return _begin_delivery(client)

    async def _resume_in_slices(self, client: Client, steps: Steps[None]) -> None:
        """Resume the subscriptions of *client*, an accepted client whose session others may take over meanwhile."""
        broker = self._context.broker
        with self._turning_away():
            await broker.turns.finish(steps)
            if broker.sessions.live.has(client.session) and client.greeting is not None:
                rest = _begin_delivery(client)
                if rest is not None:
                    await rest


def _begin_delivery(client: Client) -> Awaitable[None] | None:
    """Send CONNACK, begin delivery to *client*, and count the messages that it missed."""
    outgoing = client.subscriptions.outgoing
    assert client.greeting is not None
    client.greet(client.greeting)
    rest = count_missed(client) if outgoing.has_missed else None
    outgoing.resend()
    return rest
