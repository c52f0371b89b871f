"""Wills: messages that the broker publishes for clients that are gone (MQTT 5 section 3.1.2.5).

The session of a client with a will keeps it, so that it is published after a crash of the broker, too. It is published
in one atomic group with the note that removes it from the session.
"""

import logging
import math
from heapq import heapify, heappop, heappush
from typing import Final, final

import trio

from martlet.contracts import Identity
from martlet.delivery.session_notes import SessionState
from martlet.delivery.sessions import JointChanges, Session
from martlet.errors import Reason, Refused, StoreError
from martlet.steps import Pace, Steps

from .codec import decode_packet, encode_packet, packet_bytes
from .codes import V5
from .context import PROTOCOL, Context
from .errors import MqttError
from .packets import Publish, Will
from .properties import Property, decode_varint, encode_varint
from .storing import store

__all__ = ["Wills", "decode_will", "encode_will"]

log = logging.getLogger("martlet.mqtt")

AGAIN_S: Final = 10.0
NO_HOST: Final = bytes(8)


def encode_will(will: Will) -> bytes:
    """Return what a session keeps for *will*: its delay in seconds, and the packet to publish."""
    properties = will.properties.without(Property.WILL_DELAY)
    packet = Publish(will.topic, will.payload, will.qos, will.retain, False, 1 if will.qos else 0, properties)
    delay_s = will.properties.number(Property.WILL_DELAY, 0)
    return encode_varint(min(delay_s, (1 << 28) - 1)) + encode_packet(packet, V5)


def decode_will(data: bytes) -> tuple[int, Publish]:
    """Return the delay and the packet of `encode_will`. Raises `MqttError`."""
    delay_s, at = decode_varint(data, 0)
    end = at + packet_bytes(data, at)
    head = at + 2
    while data[head - 1] > 127:
        head += 1
    packet = decode_packet(data[at], data[head:end], V5)
    assert isinstance(packet, Publish)
    return delay_s, packet


@final
class Wills:
    """Publishes the wills of all clients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due: list[tuple[float, str]] = []  # a heap of times on trio's clock, and client identifiers
        self._latest: dict[str, float] = {}  # the time that counts, by identifier
        self._woken = trio.Event()

    # a client is gone

    def publish(self, identity: Identity, client_id: str, data: bytes, changes: JointChanges | None) -> None:
        """Publish the will *data*, together with *changes*.

        Raises:
          Refused: the store accepts nothing at the moment.
        """
        context = self._context
        try:
            _, packet = decode_will(data)
            name = context.names.find(packet.topic)
            store(context, context.broker.gate(identity), packet, name, NO_HOST, "", changes)
        except MqttError as error:
            log.warning("the will of client %r cannot be published; %s", client_id, error)
        except Refused as refused:
            if refused.reason in (Reason.BUSY, Reason.UNAVAILABLE):
                raise
            log.warning("the will of client %r is not published; %s", client_id, refused)
        else:
            context.counters.wills += 1

    def of_gone(self, session: Session, identity: Identity, *, is_wanted: bool, is_delayed: bool = True) -> None:
        """Publish the will of the client that leaves *session*, now or after its delay; drop it unless *is_wanted*."""
        if not session.data:
            return
        client_id, delay_s = session.name, capped(decode_will(session.data)[0], session.expiry_s)
        delay_s = delay_s if is_delayed else 0
        try:
            if not is_wanted:
                session.keep(b"")
            elif delay_s <= 0:
                changes = session.changes()
                changes.keep(b"")
                self.publish(identity, client_id, session.data, changes)
            else:
                self.publish_later(client_id, delay_s)
        except (Refused, StoreError) as error:
            log.warning("the will of client %r is not published yet, trying again; %s", client_id, error)
            self.publish_later(client_id, AGAIN_S)

    def of_ended(self, session: Session, identity: Identity) -> None:
        """Publish the will that *session* still keeps, because it ends now (MQTT 5 section 3.1.3.2.2)."""
        if session.data:
            self.of_gone(session, identity, is_wanted=True, is_delayed=False)

    def publish_later(self, client_id: str, delay_s: float) -> None:
        """Publish the will that the session of *client_id* keeps after *delay_s*, unless a client comes back."""
        at = self._latest[client_id] = trio.current_time() + delay_s
        heappush(self._due, (at, client_id))
        if self._due[0][1] == client_id:
            self._woken.set()

    def ending(self, state: SessionState) -> None:
        """Publish the will of a session that ends."""
        self._context.counters.expired_sessions += 1
        if not state.data:
            return
        client_id = state.key.partition(" ")[2]
        try:
            self.publish(Identity(state.owner), client_id, state.data, None)
        except (Refused, StoreError) as error:
            log.warning("the will of client %r is not published; %s", client_id, error)

    # later

    async def run(self) -> None:
        """Publish delayed wills, until cancelled; those of before the start first."""
        await self._context.broker.turns.finish(self._find_all())
        while True:
            self._woken = trio.Event()
            pause_s = self._due[0][0] - trio.current_time() if self._due else math.inf
            with trio.move_on_after(max(0, pause_s)):
                await self._woken.wait()
            while self._due and self._due[0][0] <= trio.current_time():
                at, client_id = heappop(self._due)
                if self._latest.get(client_id) == at:
                    del self._latest[client_id]
                    self._publish_due(client_id)

    def _find_all(self) -> Steps[None]:
        """Find the wills of clients that were connected when the broker ended, and those whose time had not come."""
        table, pace, now = self._context.broker.sessions.table, Pace(), trio.current_time()
        for key in table:
            protocol, _, client_id = key.partition(" ")
            if protocol == PROTOCOL and client_id not in self._latest and client_id not in self._context.clients:
                state = table.get(key)
                if state is not None and state.data:
                    delay_s, _ = decode_will(state.data)
                    at = self._latest[client_id] = now + capped(delay_s, state.expiry_s)
                    self._due.append((at, client_id))
            if pace.is_over():
                yield
        heapify(self._due)

    def _publish_due(self, client_id: str) -> None:
        sessions = self._context.broker.sessions
        state, has_client = sessions.find(PROTOCOL, client_id)
        if state is None or has_client or not state.data:
            return
        changes = sessions.changes_without_client(PROTOCOL, client_id)
        assert changes is not None
        try:
            changes.keep(b"")
            self.publish(Identity(state.owner), client_id, state.data, changes)
        except (Refused, StoreError) as error:
            log.warning("the will of client %r is not published yet, trying again; %s", client_id, error)
            self.publish_later(client_id, AGAIN_S)


def capped(delay_s: float, expiry_s: int) -> float:
    """Return after which time a will is published: its delay, or earlier if the session ends earlier."""
    return delay_s if expiry_s < 0 else min(delay_s, expiry_s)
