"""Wills: messages that the broker publishes for clients that are gone (MQTT 5 section 3.1.2.5).

A will is stored in its client's session, so that it is published even after a crash of the broker. The broker publishes
it in one atomic group with the note that removes it from the session.

Whether it may be published is asked when that happens: as its client would ask, so the session also has the client's
address, and the groups that its token named.
"""

import math
from heapq import heapify, heappop, heappush
from typing import Final, final

import msgspec
import trio
from msgspec import Struct
from msgspec.structs import replace

from martlet.access import Gate
from martlet.contracts import Identity, LoginOrigin
from martlet.errors import Reason, Refused, StoreError
from martlet.runtime.steps import Budget, Steps
from martlet.sessions.journal_codec import SessionState
from martlet.sessions.session import JointChanges, Session
from martlet_mqtt.mapping.bridges import check_state, is_state, state_name
from martlet_mqtt.mapping.messages import record_of
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.shared.storing import check_response_topic, check_retain, store
from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.errors import Malformed, MqttError
from martlet_mqtt.wire.packets import Publish, Will
from martlet_mqtt.wire.properties import Property, decode_varint, encode_varint

__all__ = ["StoredWill", "Wills", "check_will", "decode_will", "encode_will"]

AGAIN_S: Final = 10.0
NO_HOST: Final = bytes(8)
# Steps that publishing a will counts as in a slice: it takes 100 to 300 us.
STEPS_A_WILL: Final = 32
# Bytes of a will that count as one more step: each user property takes as long as a step or two.
WILL_BYTES_A_STEP: Final = 8
STEPS_A_LOOK: Final = 4
# Stale times are removed once this many more are in the heap than valid ones.
SPARE: Final = 1000


@final
class StoredWill(Struct, frozen=True):
    """The will in a session: its delay, the packet to publish, and who publishes it from where."""

    delay_s: int
    packet: Publish
    address: str = ""
    groups: tuple[str, ...] = ()


class _Publisher(Struct, array_like=True):
    address: str = ""
    groups: tuple[str, ...] = ()


def check_will(context: Context, gate: Gate, will: Will, address: str) -> bytes:
    """Check *will* of a client at *address*; return its encoding for the session.

    Raises:
      Refused: the client of *gate* may not publish the will.
      MqttError: the will cannot be published, or is too large for a session.
    """
    packet = _packet(will)
    check_response_topic(packet)
    check_retain(packet)
    if is_state(will.topic):
        gate.check("publish", state_name(will.topic, context.config.name_bytes_max))
        check_state(will.topic, will.payload)
    else:
        name = context.names.find(will.topic)
        gate.check_message(name.topic, name.properties[1])
        record_of(packet, name, 0)
    data, limit = encode_will(will, address, gate.identity.groups), context.broker.sessions.quota.data_bytes_max
    if len(data) > limit:
        text = f"the will takes {len(data)} bytes; a session has room for {limit}"
        raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)
    return data


def _packet(will: Will) -> Publish:
    properties = will.properties.without(Property.WILL_DELAY)
    return Publish(will.topic, will.payload, will.qos, will.retain, False, 1 if will.qos else 0, properties)


def encode_will(will: Will, address: str = "", groups: tuple[str, ...] = ()) -> bytes:
    """Return the encoding of *will* for the session: its delay in seconds, the packet to publish, and its publisher."""
    packet = _packet(will)
    delay_s = will.properties.number(Property.WILL_DELAY, 0)
    publisher = msgspec.msgpack.encode(_Publisher(address, groups)) if address or groups else b""
    return encode_varint(min(delay_s, (1 << 28) - 1)) + encode_packet(packet, V5) + publisher


def decode_will(data: bytes) -> StoredWill:
    """Return what `encode_will` has encoded. Raises `MqttError`."""
    delay_s, at = decode_varint(data, 0)
    end = at + packet_bytes(data, at)
    head = at + 2
    while data[head - 1] > 127:
        head += 1
    packet = decode_packet(data[at], data[head:end], V5)
    assert isinstance(packet, Publish)
    try:
        publisher = msgspec.msgpack.decode(data[end:], type=_Publisher) if data[end:] else _Publisher()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"the publisher of a will is damaged; {error}") from error
    return StoredWill(delay_s, packet, publisher.address, publisher.groups)


@final
class Wills:
    """Publishes the wills of all clients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due: list[tuple[float, str]] = []  # a heap of times on trio's clock, with client identifiers
        self._latest: dict[str, float] = {}  # the valid time of each client; other times in the heap are stale
        # Clients that sent DISCONNECT lately: their sessions may still have the will, if the disk was full.
        self._unwanted: set[str] = set()
        # Clients whose will is due, and whether it was published. If that commit fails, the session still has the will.
        self._overdue: dict[str, bool] = {}
        self._woken = trio.Event()

    # storing

    def _publish(self, client_id: str, owner: str, data: bytes, changes: JointChanges) -> None:
        """Publish the will *data* as user *owner*, together with *changes*; drop a will that may not be published.

        Raises:
          Refused: the store accepts nothing at the moment.
        """
        try:
            will = decode_will(data)
            origin = LoginOrigin(will.address, PROTOCOL)
            gate = self._context.broker.gate(Identity(owner, will.groups), origin)
            self._store(gate, client_id, will.packet, changes)
        except (MqttError, Refused) as error:
            if isinstance(error, Refused) and error.reason in (Reason.BUSY, Reason.UNAVAILABLE):
                raise
            self._context.complaints.warn("the will of client %r is not published; %s", client_id, error)
            changes.store()
        else:
            self._context.counters.wills += not self._overdue.get(client_id)

    def _publish_overdue(self, client_id: str, owner: str, data: bytes, changes: JointChanges) -> None:
        """Like `_publish`, for a will that is due: it stays due if the commit fails. Raises `Refused`."""
        self._overdue.setdefault(client_id, False)
        self._publish(client_id, owner, data, changes)
        self._overdue[client_id] = True
        self.publish_later(client_id, AGAIN_S)  # looks whether the commit failed

    def _store(self, gate: Gate, client_id: str, packet: Publish, changes: JointChanges) -> None:
        context = self._context
        if is_state(packet.topic):
            context.bridges.publish(gate, client_id, packet.topic, packet.payload, retain=packet.retain)
            changes.store()
            return
        name = context.names.find(packet.topic)
        try:
            store(context, gate, packet, name, NO_HOST, client_id, changes)
        except Refused as refused:
            if not packet.retain or refused.reason is not Reason.BUSY:
                raise
            # There may never be room for another retained message, but current subscribers can get the will.
            context.complaints.warn("the will of client %r is published but not retained; %s", client_id, refused)
            store(context, gate, replace(packet, retain=False), name, NO_HOST, client_id, changes)

    def _try_again(self, client_id: str, error: Exception) -> None:
        what = "removed" if client_id in self._unwanted else "published"
        self._context.complaints.warn("the will of client %r is not %s yet, trying again; %s", client_id, what, error)
        self.publish_later(client_id, AGAIN_S)

    # a client leaves or returns

    def of_gone(self, session: Session, *, is_wanted: bool) -> None:
        """Publish the will of the client that leaves *session*, now or after its delay; drop it unless *is_wanted*.

        If the session ends now, the caller's `Session.leave` publishes or drops the will (`ending`).
        """
        has_session = self._context.broker.sessions.live.has(session)
        if has_session and not session.data:
            return
        kept, client_id = session if has_session else self._stored(session), session.name
        if not kept.data:
            return
        if has_session:
            self._unwanted.discard(client_id)  # the mark was for an earlier will
            self._overdue.pop(client_id, None)
        delay_s = _delay_of(kept)
        try:
            if not is_wanted or client_id in self._unwanted:
                self._unwanted.add(client_id)
                self.publish_later(client_id, AGAIN_S)  # looks whether the session still has the will
                if kept.expiry_s:
                    session.keep(b"")
            elif delay_s > 0 and client_id not in self._overdue:
                self.publish_later(client_id, delay_s)
            else:
                self._publish_now(session)
        except (Refused, StoreError) as error:
            self._try_again(client_id, error)

    def _publish_now(self, session: Session) -> None:
        """Publish the will of *session*; end the session if its expiry is 0. Raises `Refused`."""
        changes, data = session.changes(), session.data
        if session.expiry_s:
            changes.keep(b"")
        else:
            changes.end()
        self._publish_overdue(session.name, session.owner, data, changes)

    def _stored(self, session: Session) -> Session | SessionState:
        """Return the stored state of *session*, whose last changes were lost; *session* itself while it is unknown."""
        sessions = self._context.broker.sessions
        if not session.name or not sessions.is_settled(PROTOCOL, session.name):
            return session
        state, _ = sessions.find(PROTOCOL, session.name)
        return state if state is not None else SessionState("", "", 0, 0)

    def of_returned(self, session: Session) -> None:
        """Drop the will in *session* because its client returned; publish a will that is due.

        Raises:
          Refused: the will cannot be published now.
        """
        client_id, data = session.name, session.data
        if not (data or self._latest):
            return
        if client_id in self._unwanted or (client_id in self._overdue and not data):
            return  # the will was removed or published; `_publish_due` looks later whether that commit failed
        if data and (client_id in self._overdue or not _delay_in(data)):
            changes = session.changes()
            changes.keep(b"")
            self._publish_overdue(client_id, session.owner, data, changes)
        else:
            self._latest.pop(client_id, None)

    def end(self, session: Session) -> None:
        """End *session*, because the client asks for a new one; publish its will (MQTT 5 section 3.1.3.2.2).

        Raises:
          Refused: the store accepts nothing at the moment.
        """
        changes = session.changes()
        changes.end()
        if session.data and session.name not in self._unwanted:
            self._publish(session.name, session.owner, session.data, changes)
        else:
            changes.store()

    def ending(self, changes: JointChanges) -> None:
        """Publish the will of a session that ends with *changes*. Raises `Refused`."""
        state = changes.state
        client_id, has_expired = state.key.partition(" ")[2], state.ends_ms > 0
        if state.data and client_id not in self._unwanted:
            self._publish_overdue(client_id, state.owner, state.data, changes)
        else:
            changes.store()
        self._context.counters.expired_sessions += has_expired

    # later

    def publish_later(self, client_id: str, delay_s: float) -> None:
        """Publish the will in the session of *client_id* after *delay_s*, unless the client returns before."""
        at = self._latest[client_id] = trio.current_time() + delay_s
        heappush(self._due, (at, client_id))
        if self._due[0][1] == client_id or self._has_many_stale:
            self._woken.set()

    async def run(self) -> None:
        """Publish delayed wills, beginning with wills from before the broker's start, until cancelled."""
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
        budget = Budget()
        while self._due and self._due[0][0] <= trio.current_time():
            at, client_id = heappop(self._due)
            if self._latest.get(client_id) == at:
                del self._latest[client_id]
                budget.spend(STEPS_A_WILL + self._publish_due(client_id) // WILL_BYTES_A_STEP)
            if budget.is_over():
                yield

    @property
    def _has_many_stale(self) -> bool:
        return len(self._due) > 2 * len(self._latest) + SPARE

    def _remove_stale(self) -> Steps[None]:
        """Remove stale times from the heap, in slices."""
        before, self._due = self._due, []
        kept: list[tuple[float, str]] = []
        budget = Budget()
        for each in before:
            if self._latest.get(each[1]) == each[0]:
                kept.append(each)
            if budget.is_over():
                yield
        kept += self._due  # added meanwhile
        heapify(kept)
        self._due = kept

    def _find_all(self) -> Steps[None]:
        """Schedule the wills in all sessions of absent clients, after a start of the broker; in slices."""
        table, budget, now = self._context.broker.sessions.table, Budget(), trio.current_time()
        for key in table:
            protocol, _, client_id = key.partition(" ")
            if protocol == PROTOCOL and client_id not in self._latest and client_id not in self._context.clients:
                state = table.get(key)
                if state is not None and state.data:
                    at = self._latest[client_id] = now + _delay_of(state)
                    self._due.append((at, client_id))
            if budget.is_over(STEPS_A_LOOK):
                yield
        heapify(self._due)

    def _publish_due(self, client_id: str) -> int:
        """Publish the will of *client_id*; return the size of the will in bytes, 0 if there is none."""
        sessions = self._context.broker.sessions
        if not sessions.is_settled(PROTOCOL, client_id):
            self.publish_later(client_id, AGAIN_S)
            return 0
        changes = sessions.changes_without_client(PROTOCOL, client_id)
        if changes is None or not changes.state.data:
            self._unwanted.discard(client_id)
            self._overdue.pop(client_id, None)
            return 0
        state, data = changes.state, changes.state.data
        try:
            if state.expiry_s:
                changes.keep(b"")
            else:
                changes.end()
            if client_id in self._unwanted:
                changes.store()
                self.publish_later(client_id, AGAIN_S)  # looks whether the commit failed
            else:
                self._publish_overdue(client_id, state.owner, data, changes)
        except (Refused, StoreError) as error:
            self._try_again(client_id, error)
        return len(data)


def _delay_of(kept: Session | SessionState) -> float:
    """Return the delay in seconds of the will in session *kept*; 0 for a damaged will."""
    return capped(_delay_in(kept.data), kept.expiry_s)


def _delay_in(data: bytes) -> int:
    try:
        return decode_will(data).delay_s
    except MqttError:
        return 0


def capped(delay_s: float, expiry_s: int) -> float:
    """Return the delay in seconds after which a will is published: *delay_s*, or the session's expiry if shorter."""
    return delay_s if expiry_s < 0 else min(delay_s, expiry_s)
