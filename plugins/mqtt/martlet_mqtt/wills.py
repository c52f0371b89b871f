"""Wills: messages that the broker publishes for clients that are gone (MQTT 5 section 3.1.2.5).

The session of a client with a will keeps it, so that it is published after a crash of the broker, too. It is published
in one atomic group with the note that removes it from the session.
"""

import math
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final, final

import trio

from martlet.access import Gate
from martlet.contracts import Identity
from martlet.delivery.session_notes import SessionState
from martlet.delivery.sessions import JointChanges, Session
from martlet.errors import Reason, Refused, StoreError
from martlet.steps import Pace, Steps

from .codec import decode_packet, encode_packet, packet_bytes
from .codes import V5
from .context import PROTOCOL, Context
from .errors import MqttError
from .messages import record_of
from .packets import Publish, Will
from .properties import Property, decode_varint, encode_varint
from .storing import check_response_topic, check_retain, store

__all__ = ["Wills", "check_will", "decode_will", "encode_will"]

AGAIN_S: Final = 10.0
NO_HOST: Final = bytes(8)
# Steps of a slice that publishing one will counts as: it takes 100 to 300 us.
STEPS_A_WILL: Final = 32
STEPS_A_LOOK: Final = 4
# Times that count no longer are removed when there are so many more than times that count.
SPARE: Final = 1000


def check_will(context: Context, gate: Gate, will: Will) -> None:
    """Raise `MqttError` or `Refused` unless the client of *gate* may publish *will* when it is gone."""
    name = context.names.find(will.topic)
    gate.check_message(name.topic, name.properties[1])
    packet = _packet(will)
    check_response_topic(packet)
    check_retain(packet)
    record_of(packet, name, 0)


def _packet(will: Will) -> Publish:
    properties = will.properties.without(Property.WILL_DELAY)
    return Publish(will.topic, will.payload, will.qos, will.retain, False, 1 if will.qos else 0, properties)


def encode_will(will: Will) -> bytes:
    """Return what a session keeps for *will*: its delay in seconds, and the packet to publish."""
    packet = _packet(will)
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
        # Clients that said DISCONNECT lately: their sessions may still keep the will, if the disk was full.
        self._unwanted: set[str] = set()
        # Clients whose will was published, with the end of the log then: the table of sessions may not know it yet.
        self._published: dict[str, int] = {}
        self._woken = trio.Event()

    # a client is gone

    def publish(self, identity: Identity, client_id: str, data: bytes, changes: JointChanges | None) -> None:
        """Publish the will *data*, together with *changes*; a will that may not be published is dropped.

        Raises:
          Refused: the store accepts nothing at the moment.
        """
        gate = self._context.broker.gate(identity)
        try:
            self._store(gate, client_id, data, changes)
        except (MqttError, Refused) as error:
            if isinstance(error, Refused) and error.reason in (Reason.BUSY, Reason.UNAVAILABLE):
                raise
            self._context.complaints.warn("the will of client %r is not published; %s", client_id, error)
            if changes is not None:
                _note(gate, changes)
        else:
            self._context.counters.wills += 1
            self._note_published(client_id)

    def _note_published(self, client_id: str) -> None:
        store = self._context.broker.store
        if len(self._published) >= SPARE:
            self._published = {each: end for each, end in self._published.items() if end > store.readable}
        self._published[client_id] = store.appended

    def _was_published(self, client_id: str) -> bool:
        """Whether the will was published just now, so that the table of sessions may still have it."""
        broker, end = self._context.broker, self._published.get(client_id, 0)
        if broker.store.readable < end or (end and not broker.projections.has_applied(broker.sessions.table)):
            return True
        self._published.pop(client_id, None)
        return False

    def _store(self, gate: Gate, client_id: str, data: bytes, changes: JointChanges | None) -> None:
        context, (_, packet) = self._context, decode_will(data)
        name = context.names.find(packet.topic)
        try:
            store(context, gate, packet, name, NO_HOST, client_id, changes)
        except Refused as refused:
            if not packet.retain or refused.reason is not Reason.BUSY:
                raise
            # There may never be room for another retained message, but subscribers can have it now.
            context.complaints.warn("the will of client %r is published but not retained; %s", client_id, refused)
            store(context, gate, replace(packet, retain=False), name, NO_HOST, client_id, changes)

    def of_gone(self, session: Session, identity: Identity, *, is_wanted: bool, is_delayed: bool = True) -> None:
        """Publish the will of the client that leaves *session*, now or after its delay; drop it unless *is_wanted*."""
        if not session.data:
            return
        client_id, delay_s = session.name, capped(decode_will(session.data)[0], session.expiry_s)
        delay_s = delay_s if is_delayed else 0
        try:
            if not is_wanted or client_id in self._unwanted:
                self._unwanted.add(client_id)
                self.publish_later(client_id, AGAIN_S)  # which sees whether the session keeps it no more
                session.keep(b"")
            elif delay_s <= 0:
                changes = session.changes()
                changes.keep(b"")
                self.publish(identity, client_id, session.data, changes)
            else:
                self.publish_later(client_id, delay_s)
        except (Refused, StoreError) as error:
            self._try_again(client_id, error)

    def _try_again(self, client_id: str, error: Exception) -> None:
        what = "removed" if client_id in self._unwanted else "published"
        self._context.complaints.warn("the will of client %r is not %s yet, trying again; %s", client_id, what, error)
        self.publish_later(client_id, AGAIN_S)

    def forget(self, client_id: str) -> None:
        """Publish nothing for *client_id*, which is connected again and may have another will."""
        self._latest.pop(client_id, None)
        self._unwanted.discard(client_id)
        self._published.pop(client_id, None)

    def of_ended(self, session: Session, identity: Identity) -> None:
        """Publish the will that *session* still keeps, because it ends now (MQTT 5 section 3.1.3.2.2)."""
        if session.data:
            self.of_gone(session, identity, is_wanted=True, is_delayed=False)

    def publish_later(self, client_id: str, delay_s: float) -> None:
        """Publish the will that the session of *client_id* keeps after *delay_s*, unless a client comes back."""
        at = self._latest[client_id] = trio.current_time() + delay_s
        heappush(self._due, (at, client_id))
        if self._due[0][1] == client_id or self._has_many_stale:
            self._woken.set()

    def ending(self, state: SessionState) -> None:
        """Publish the will of a session that ends."""
        self._context.counters.expired_sessions += 1
        client_id = state.key.partition(" ")[2]
        if not state.data or client_id in self._unwanted or self._was_published(client_id):
            return
        try:
            self.publish(Identity(state.owner), client_id, state.data, None)
        except (Refused, StoreError) as error:
            self._context.complaints.warn("the will of client %r is not published; %s", client_id, error)

    # later

    async def run(self) -> None:
        """Publish delayed wills, until cancelled; those of before the start first."""
        turns = self._context.broker.turns
        await turns.finish(self._find_all())
        while True:
            self._woken = trio.Event()
            if self._has_many_stale:
                await turns.finish(self._remove_stale())
            pause_s = self._due[0][0] - trio.current_time() if self._due else math.inf
            with trio.move_on_after(max(0, pause_s)):
                await self._woken.wait()
            await turns.finish(self._publish_all_due())

    def _publish_all_due(self) -> Steps[None]:
        pace = Pace()
        while self._due and self._due[0][0] <= trio.current_time():
            at, client_id = heappop(self._due)
            if self._latest.get(client_id) == at:
                del self._latest[client_id]
                self._publish_due(client_id)
                pace.spend(STEPS_A_WILL)
            if pace.is_over():
                yield

    @property
    def _has_many_stale(self) -> bool:
        return len(self._due) > 2 * len(self._latest) + SPARE

    def _remove_stale(self) -> Steps[None]:
        """Remove the times of clients that came back, in slices."""
        before, self._due = self._due, []
        kept: list[tuple[float, str]] = []
        pace = Pace()
        for each in before:
            if self._latest.get(each[1]) == each[0]:
                kept.append(each)
            if pace.is_over():
                yield
        kept += self._due  # since then
        heapify(kept)
        self._due = kept

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
            if pace.is_over(STEPS_A_LOOK):
                yield
        heapify(self._due)

    def _publish_due(self, client_id: str) -> None:
        sessions = self._context.broker.sessions
        sessions.find_lost()
        state, has_client = sessions.find(PROTOCOL, client_id)
        if self._was_published(client_id):
            return
        if state is None or has_client or not state.data:
            stored = sessions.table.get(f"{PROTOCOL} {client_id}")
            if has_client or stored is None or not stored.data:
                self._unwanted.discard(client_id)
            elif client_id in self._unwanted:
                self.publish_later(client_id, AGAIN_S)  # that it is removed is not durable yet
            return
        changes = sessions.changes_without_client(PROTOCOL, client_id)
        assert changes is not None
        try:
            changes.keep(b"")
            if client_id in self._unwanted:
                _note(self._context.broker.gate(Identity(state.owner)), changes)
                self.publish_later(client_id, AGAIN_S)  # see again: the commit may fail
            else:
                self.publish(Identity(state.owner), client_id, state.data, changes)
        except (Refused, StoreError) as error:
            self._try_again(client_id, error)


def _note(gate: Gate, changes: JointChanges) -> None:
    """Store *changes* without a message. Raises `Refused`."""
    if changes.notes:
        gate.publish_atomic([], changes.notes)
    changes.apply()


def capped(delay_s: float, expiry_s: int) -> float:
    """Return after which time a will is published: its delay, or earlier if the session ends earlier."""
    return delay_s if expiry_s < 0 else min(delay_s, expiry_s)
