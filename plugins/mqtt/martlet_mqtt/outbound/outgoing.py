"""Messages to one client: its cursor in the log, its shared subscriptions, and the order in which they are sent.

| part | module |
|---|---|
| packet identifiers and acknowledgements | `flight.py` |
| messages sent again, and retained messages | `due.py` |
| frames that depend on the client | `client_frames.py` |
| metrics of the broker | `Metrics` |
| messages of shared subscriptions | `shares.py` |
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, cast, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.delivery.cursor import CursorPlace
from martlet.delivery.runs import Frames, Run
from martlet.delivery.subscriptions import Delivery
from martlet.errors import Refused
from martlet.groups.member import Member
from martlet.runtime.steps import Budget, Steps
from martlet.sessions.session import Session
from martlet.state.journal import NEXT_COMMIT
from martlet_mqtt.mapping.frames import DUPLICATE, Grant, number_frames, payloads_of, publish_frame, with_payloads
from martlet_mqtt.outbound.client_frames import ClientFrames
from martlet_mqtt.outbound.due import DueMessages
from martlet_mqtt.outbound.flight import IDS_MAX, QOS2, Flight
from martlet_mqtt.outbound.shares import Leased, SharedSubscriptions
from martlet_mqtt.outbound.stored_subscriptions import Rest
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.packets import Connect
from martlet_mqtt.wire.properties import Property

__all__ = ["Metrics", "Outgoing"]

BEGIN: Final = -1
CHECK_US: Final = 20.0  # cost of a question about a filter, which an authorizer answers


@final
class Metrics:
    """Metrics of the broker (`$SYS`) that wait until the socket has room; they are not in the log, and have QoS 0.

    A newer value replaces an unsent value.
    """

    __slots__ = ("_context", "_filters", "_frames", "_gate", "_peer", "_refused", "_waiting")

    def __init__(self, peer: Peer, context: Context, gate: Gate, frames: ClientFrames) -> None:
        self._peer = peer
        self._context = context
        self._gate = gate
        self._frames = frames
        # By name and subscriptions: the value, and whether it is sent with RETAIN.
        self._waiting: dict[tuple[str, tuple[Grant, ...]], tuple[bytes, bool]] = {}
        self._filters: dict[str, None] = {}  # filters of the client that match only metrics
        self._refused: Refused | None = None  # why the client may not follow one of them any more

    def __bool__(self) -> bool:
        """Whether any metric waits."""
        return bool(self._waiting)

    def add(self, name: str, value: bytes, grants: Sequence[Grant], *, retain: bool) -> None:
        """Send *value* for *grants* once the socket has room."""
        self._waiting[name, tuple(grants)] = value, retain
        self._peer.wake()

    def follow(self, topic_filter: str) -> None:
        """Note that the client has subscribed to *topic_filter*, which it may read."""
        self._filters[topic_filter] = None

    def check(self) -> None:
        """Raise `Refused` if `recheck` found that the client may not follow one of its filters any more."""
        if self._refused is not None:
            raise self._refused

    def recheck(self) -> Steps[None]:
        """Check the filters again after a change of the rules, and wake the client if one is denied."""
        self._refused, budget = None, Budget(CHECK_US)
        for topic_filter in list(self._filters):
            try:
                self._gate.check("subscribe", topic_filter)
            except Refused as refused:
                self._refused = refused
                self._peer.wake()
                return
            if budget.is_over():
                yield

    def forget(self, topic_filter: str) -> None:
        """Forget *topic_filter*, and drop waiting metrics for it."""
        self._filters.pop(topic_filter, None)
        for key in [key for key in self._waiting if any(e.subscription.topic_filter == topic_filter for e in key[1])]:
            del self._waiting[key]

    def send(self, budget_bytes: int) -> int:
        """Send about *budget_bytes* of waiting metrics; return the bytes sent."""
        size = 0
        for name, grants in list(self._waiting):
            if size >= budget_bytes:
                self._peer.wake()
                break
            value, retain = self._waiting.pop((name, grants))
            if not self._gate.allows("subscribe", name):
                continue
            frames = self._frames
            properties = frames.shape(grants).identifiers if frames.version == V5 else None
            frame = frames.fitting(publish_frame(name.encode(), value, int(retain), properties))
            if frame:
                self._peer.send(frame)
                self._context.counters.delivered += 1
                size += len(frame)
        return size


@final
class Outgoing:
    """The messages to one client.

    ``flight`` handles its acknowledgements, ``shares`` are its shared subscriptions, and ``metrics`` sends metrics.
    It follows the log from its end, or from position *start*. With *start*, it sends nothing before `resend`.

    Raises:
      Refused: the client may not follow the log.
    """

    __slots__ = (
        "_context",
        "_cursor",
        "_due",
        "_frames",
        "_gate",
        "_later",
        "_peer",
        "_session",
        "flight",
        "metrics",
        "shares",
    )

    def __init__(
        self, peer: Peer, context: Context, gate: Gate, session: Session, connect: Connect, start: int | None
    ) -> None:
        self._peer = peer
        self._context = context
        self._gate = gate
        self._session = session
        self.shares = SharedSubscriptions(peer, context, gate, connect.version)
        window = min(connect.properties.number(Property.RECEIVE_MAXIMUM, IDS_MAX), context.config.in_flight_max)
        self.flight = Flight(peer, context.counters, session, self.shares, window)
        self._frames = ClientFrames(context, connect)
        self.metrics = Metrics(peer, context, gate, self._frames)
        self._due = DueMessages(peer, context, gate.allowance, session, self.flight, self._frames)
        # By filter, retained messages to send once the client has caught up: some are among the messages that it
        # missed, and would come before older messages of their names.
        self._later: dict[str, tuple[Grant, Rest]] = {}
        cursor = gate.follow(context.feed, peer.wake, {}, start, _is_droppable, is_paused=start is not None)
        self._cursor, session.where, self._due.may_read = cursor, lambda: cursor.position, cursor.may_read

    # begin

    def go_on(self, grant: Grant, rest: Rest | None) -> None:
        """Resume *grant* of the session, and send its retained messages *rest*. Raises `Refused`.

        With QoS 1 or 2 it resumes at the session's position, or at its own later beginning; with QoS 0 at the end.
        """
        topic_filter = grant.subscription.topic_filter
        begin = self._session.begins.get(topic_filter, 0)
        self._cursor.add_filter(topic_filter, grant, is_live=not grant.subscription.qos, begin=begin)
        if rest is not None:
            self._later[topic_filter] = grant, rest

    def resend(self) -> None:
        """Send messages in flight again, and then the messages of the cursor."""
        for number, position in self.flight.resume():
            self._due.resend(number, position)
        for grant, rest in list(self._later.values()):
            if rest.start == BEGIN or rest.name:  # the others wait until the client has caught up
                self.send_retained(grant, rest)
        self._cursor.resume()
        self._peer.wake()

    @property
    def has_missed(self) -> bool:
        """Whether retention may have removed messages of the client's subscriptions before it returned."""
        cursor, feed, begins = self._cursor, self._context.feed, self._cursor.begins or {}
        if feed.has_removed(self._session.position, cursor.filters.keys() - begins):
            return True
        return any(feed.has_removed(begin, (topic_filter,)) for topic_filter, begin in begins.items())

    @property
    def client_id(self) -> str:
        """The identifier of the client."""
        return self._frames.client_id

    @property
    def dropped(self) -> int:
        """The number of QoS 0 messages dropped because the client was too slow."""
        return self._cursor.dropped

    def close(self) -> None:
        """Stop; the session keeps the position."""
        self.flight.close()
        self.shares.leave()
        self._context.counters.dropped += self._cursor.dropped
        self._cursor.close()

    # subscriptions

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless the client may subscribe to *topic_filter*."""
        self._cursor.check(topic_filter)

    def rest_of_new(self, grant: Grant) -> Rest:
        """Return the retained messages to send if *grant* begins now.

        If the client has the subscription already and is behind, retained messages that its cursor has not reached yet
        are the last part, sent once the client has caught up.
        """
        cursor, store = self._cursor, self._context.broker.store
        if grant.subscription.topic_filter not in cursor.filters:
            return Rest(BEGIN, store.appended, store.appended)
        now = store.readable
        is_at_end = cursor.place is CursorPlace.TAIL and not cursor.has_pending
        begin = (cursor.begins or {}).get(grant.subscription.topic_filter, 0)
        return Rest(BEGIN, now if is_at_end else min(max(cursor.position, begin), now), now)

    def subscribe(self, grant: Grant) -> None:
        """Send messages for *grant* that are published from now on. Raises `Refused`.

        If the client has the subscription already, messages that wait for it are sent, too (MQTT 5 section 3.8.4).
        """
        self._cursor.add_filter(grant.subscription.topic_filter, grant)

    def unsubscribe(self, topic_filter: str) -> None:
        """Stop sending messages for *topic_filter*, except messages in flight."""
        self._later.pop(topic_filter, None)
        self._cursor.remove_filter(topic_filter)
        self.shares.remove(topic_filter)
        self.metrics.forget(topic_filter)
        self._due.forget_retained(topic_filter)

    def send_retained(self, grant: Grant, rest: Rest) -> None:
        """Send the retained messages *rest* for *grant*, instead of those due for an earlier SUBSCRIBE."""
        topic_filter = grant.subscription.topic_filter
        self._due.forget_retained(topic_filter)
        self._later.pop(topic_filter, None)
        if rest.last > rest.end:
            self._later[topic_filter] = grant, Rest(rest.end, rest.last, rest.last)
        self._due.add_retained(grant, rest)

    # delivery

    def collect(self, budget_bytes: int) -> None:
        """Send about *budget_bytes* of messages. Raises `Refused`."""
        # Also of a client that owes acknowledgements, or gets retained messages first.
        if not self._cursor.check_rules():
            return
        self.metrics.check()
        self.shares.check()
        if self.metrics:
            budget_bytes -= self.metrics.send(budget_bytes)
        if self._due:
            budget_bytes -= self._due.collect(budget_bytes)
            if self._due:
                return
        room = self.flight.room
        for member, grant, delivery in self.shares.collect(budget_bytes // 2, room):
            budget_bytes -= delivery.size
            self._deliver_shared(member, grant, delivery)
        cursor = self._cursor
        while (count := room()) > 0:
            if budget_bytes <= 0:
                self._peer.wake()
                return
            try:
                runs = cursor.collect(budget_bytes, count)
                for run, grants in runs:
                    budget_bytes = 0 if run.is_compressed or run.is_heavy else budget_bytes - len(run.data)
                    self._deliver(run, cast("tuple[Grant, ...]", grants))
            except Exception:  # any error ends the connection
                self._session.where = lambda: 0  # not the cursor's position: some of its messages were not sent
                raise
            if not cursor.has_pending:
                if self._later and cursor.place is CursorPlace.TAIL:
                    self._end_catching_up()
                return
            if not runs:
                return  # it must wait, by the client's quotas

    def _end_catching_up(self) -> None:
        """Send the retained messages that had to wait until the client had caught up."""
        waiting_retained, self._later = self._later, {}
        for grant, rest in waiting_retained.values():
            self._due.add_retained(grant, rest)

    def _deliver(self, run: Run, grants: tuple[Grant, ...]) -> None:
        shape = self._frames.shape(grants)
        frames = self._frames.of_run(run, grants, shape)
        counters = self._context.counters
        if not shape.qos:
            counters.delivered += run.count if frames.is_whole else len({0, *frames.ends}) - 1
            if frames.payloads is None:
                self._peer.send(frames.data)
            else:
                self._peer.send(*with_payloads(frames.data, payloads_of(frames, 0, run.count)))
            return
        data, ends, positions = frames.data, frames.ends, run.positions()
        for index, end_index in _stretches(frames):
            start = ends[index - 1] if index else 0
            frames_data, payloads = data[start : ends[end_index - 1]], payloads_of(frames, index, end_index)
            if data[start] & 6:
                starts = [0, *ends[: end_index - 1]]
                if index:
                    starts = [each - start for each in starts[index:]]
                end = positions[end_index] if end_index < run.count else run.end
                packets = bytearray(frames_data)
                self.flight.number_and_send(packets, starts, positions[index:end_index], end, 0, payloads)
            else:
                counters.delivered += end_index - index
                self._peer.send(*with_payloads(frames_data, payloads))

    # shared subscriptions

    def _deliver_shared(self, member: Member, grant: Grant, delivery: Delivery) -> None:
        data, start, queue_id = bytes(delivery.data), 0, delivery.queue_id
        for end, offset, position in zip(delivery.ends, delivery.offsets, delivery.positions, strict=True):
            frame = self._frames.fitting(data[start:end])
            start = end
            if not frame or not frame[0] & 6:
                member.ack(queue_id, offset)
                if frame:
                    self._context.counters.delivered += 1
                    self._peer.send(frame)
                continue
            (packet_id, _), flags = self.flight.take_ids(1), 0
            if frame[0] & 6 == 4:
                self._hand_over(member, delivery, offset, position, packet_id)
            else:
                self.shares.lease(packet_id, Leased(member, queue_id, offset))
                flags = DUPLICATE if delivery.delivery > 1 else 0  # perhaps to this session [MQTT-3.3.1-1]
            packet = bytearray(frame)
            number_frames(packet, [0], [packet_id], flags)
            self._peer.send(packet)
            self._context.counters.delivered += 1

    def _hand_over(self, member: Member, delivery: Delivery, offset: int, position: int, packet_id: int) -> None:
        """Move a message from its group into this session, which alone may complete it [MQTT-4.8.2-5]."""
        changes = self._session.changes()
        changes.hand_out(QOS2 + packet_id, [position], self._session.position)
        note = member.group.acknowledgement(delivery.queue_id, offset, delivery.generation)
        try:
            self._gate.publish_all([], atomic=True, notes=[*changes.notes, note])
        except Refused:
            member.group.withdraw(delivery.queue_id, offset)
            raise
        changes.apply()
        self._peer.hold_until(NEXT_COMMIT)


def _stretches(frames: Frames) -> Iterator[tuple[int, int]]:
    """Yield the indexes of the first frame, and after the last one, of stretches of frames with the same QoS."""
    data, ends, count = frames.data, frames.ends, len(frames.ends)
    if frames.is_whole and len({first & 6 for first in set(map(data.__getitem__, [0, *ends[:-1]]))}) == 1:
        yield 0, count
        return
    index = 0
    while index < count:
        start = ends[index - 1] if index else 0
        end_index = index + 1
        if start < ends[index]:
            qos = data[start] & 6
            while end_index < count and ends[end_index] > ends[end_index - 1] and data[ends[end_index - 1]] & 6 == qos:
                end_index += 1
            yield index, end_index
        index = end_index


def _is_droppable(grants: tuple[Hashable, ...]) -> bool:
    """Return whether messages for *grants* may be dropped: all grants have QoS 0."""
    return not any(cast("Grant", grant).subscription.qos for grant in grants)
