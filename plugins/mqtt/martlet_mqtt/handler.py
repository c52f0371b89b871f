"""Acts on the packets of one client (martlet.contracts.Handler)."""

from collections.abc import Awaitable, Sequence
from typing import Final, final

from martlet.contracts import Buffer, Peer
from martlet.errors import Refused
from martlet.runtime.steps import Steps
from martlet_mqtt.admin.control import answer_request
from martlet_mqtt.admin.sys_topics import SysTopics
from martlet_mqtt.inbound.incoming import replaced
from martlet_mqtt.session.client import Client
from martlet_mqtt.session.handshake import Handshake
from martlet_mqtt.session.wills import Wills
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codes import V5, PacketType, ReasonCode
from martlet_mqtt.wire.connection import Event, LargePublish, LongPacket, MqttConnection, State
from martlet_mqtt.wire.errors import MqttError, reason_of
from martlet_mqtt.wire.packets import (
    Ack,
    Auth,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import Property
from martlet_mqtt.wire.scanner import PUBREL, AckRun, PublishRun, acks_of

__all__ = ["MqttHandler"]

# User properties of a packet after which other clients have their turn: 1,000 take 10 ms.
PROPERTIES_A_TURN: Final = 100
FILTERS_A_TURN: Final = 8
RUNS: Final = PublishRun, AckRun
_PINGRESP: Final = b"\xd0\x00"
_CONNACK: Final = 0x20


@final
class MqttHandler:
    """Passes each packet of one client to the part for it.

    ``client`` is None until `Handshake` has opened its session.
    """

    __slots__ = ("_connection", "_context", "_handshake", "_peer", "_sys", "_wills", "client")

    def __init__(
        self, peer: Peer, connection: MqttConnection, context: Context, wills: Wills, sys_topics: SysTopics
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._context = context
        self._wills = wills
        self._sys = sys_topics
        self._handshake: Handshake | None = None  # from CONNECT on
        self.client: Client | None = None

    # events

    def handle(self, event: Event) -> Awaitable[None] | None:
        context, is_run = self._context, isinstance(event, RUNS)
        context.counters.packets_received += _packets_in(event)
        if not is_run and context.broker.round_publishes.parts:
            context.broker.round_publishes.finish()
        try:
            rest = self._act(event)
        except Refused as refused:
            raise MqttError(str(refused), reason_of(refused)) from refused
        if rest is not None:
            return self._finish(rest)
        if self._connection.is_turn_over or (not is_run and _takes_long(event)):
            return context.broker.turns.wait()
        return None

    def _act(self, event: Event) -> Awaitable[None] | None:
        if isinstance(event, Connect):
            parts = self._wills, self._sys
            self._handshake = Handshake(self, self._peer, self._connection, self._context, event, *parts)
            return self._handshake.accept()
        if isinstance(event, Auth):
            assert self._handshake is not None  # else the connection has refused AUTH
            return self._handshake.authenticate_more(event)
        client = self.client
        if client is None or client.has_left:
            # The client is not accepted yet, or its session was taken over in the middle of a read.
            if isinstance(event, Disconnect):
                self._peer.close("")
            return None
        match event:
            case PublishRun():
                client.incoming.publish_run(event)
            case AckRun(kind, ids):
                self._acknowledge(client, kind, ids, ReasonCode.SUCCESS)
            case Publish():
                request = client.incoming.request_in(event)
                if request is not None:
                    return self._answer_request(client, request)
                client.incoming.publish(event)
            case Ack(kind, packet_id, reason):
                self._acknowledge(client, kind, (packet_id,), reason)
            case Pingreq():
                self._context.counters.answers += 1
                self._peer.send(_PINGRESP)
            case Subscribe():
                return client.subscriptions.subscribe(event)
            case Unsubscribe():
                return client.subscriptions.unsubscribe(event)
            case LargePublish(packet, size):
                client.incoming.refuse_large(packet, size)
            case LongPacket(steps):
                return self._decode(steps)
            case Disconnect():
                self._disconnect(client, event)
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

    def _answer_request(self, client: Client, packet: Publish) -> Awaitable[None] | None:
        """Acknowledge a request of an administrator, and answer it in slices."""
        context = self._context
        if not client.incoming.acknowledge(packet):
            return None
        return context.broker.turns.finish(answer_request(context, client.gate, self._peer, packet, self._connection))

    def _acknowledge(self, client: Client, kind: PacketType, ids: Sequence[int], reason: int) -> None:
        if kind is PacketType.PUBREL:
            client.incoming.released(ids)
        elif kind is PacketType.PUBREC:
            unknown = client.subscriptions.outgoing.flight.received(ids, reason)
            if unknown:
                reason = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if self._connection.version == V5 else 0
                self._context.counters.answers += len(unknown)
                self._peer.send(acks_of(PUBREL, unknown, reason))
        else:
            client.subscriptions.outgoing.flight.acknowledged(kind, ids)  # ignored for an earlier session

    def _disconnect(self, client: Client, packet: Disconnect) -> None:
        expiry_s = packet.properties.number(Property.SESSION_EXPIRY, -1)
        if expiry_s > 0 and not client.connect.properties.number(Property.SESSION_EXPIRY, 0):
            text = "the session expiry interval was 0 in CONNECT, and stays that [MQTT-3.1.2-11.2]"
            raise MqttError(text, ReasonCode.PROTOCOL_ERROR)
        client.has_ended = packet.reason == ReasonCode.SUCCESS
        if expiry_s >= 0:
            try:
                client.session.expire_after(min(expiry_s, self._context.config.session_expiry_max_s))
            except Refused as refused:
                client.complain("did not change the session expiry of", str(refused))
        self._peer.close("")

    # the server's calls

    def refuse(self, answer: Buffer, refused: Refused) -> bytes | None:
        if answer[0] == _CONNACK:
            self._connection.state = State.ACCEPTING  # so that the last packet is a CONNACK again
            if self.client is not None:
                self.client.has_ended = False  # a DISCONNECT after the refused CONNACK does not count
        return replaced(answer, refused, self._connection.version)

    def collect(self, budget_bytes: int) -> None:
        client = self.client
        if client is None or client.outgoing is None or client.greeting is not None:
            return
        try:
            client.outgoing.collect(budget_bytes)
        except Refused as refused:
            client.end(reason_of(refused), str(refused))

    def closed(self, reason: str) -> None:
        if self.client is not None:
            self.client.leave()
            self.client = None
        self._connection.end()
        self._handshake = None  # which holds the handler


def _takes_long(event: Event) -> bool:
    """Return whether other clients must have their turn before the next packet of this one."""
    if isinstance(event, PublishRun | AckRun | Pingreq | Pingresp | LongPacket | LargePublish):
        return False
    count = len(event.subscriptions) if isinstance(event, Subscribe) else 0
    count = len(event.filters) if isinstance(event, Unsubscribe) else count
    return count > FILTERS_A_TURN or len(event.properties.user) > PROPERTIES_A_TURN


def _packets_in(event: Event) -> int:
    if isinstance(event, PublishRun):
        return len(event.ends)
    return len(event.ids) if isinstance(event, AckRun) else 1
