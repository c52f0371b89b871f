"""What commands mean to the broker.

All messages are in one topic, in which the name of a message is its tag and chooses its queue. A client has one cursor
with the filters of its session. What the cursor brings leaves in the frames that all its receivers share: packet ids
are in the line before.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final, final
from zlib import crc32

from martlet.access import Gate
from martlet.contracts import Buffer, Identity, Peer
from martlet.delivery.cursor import Cursor, Place
from martlet.delivery.feed import Feed
from martlet.delivery.runs import Run
from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.message import Message, Placed
from martlet.runtime.clock import Clock
from martlet.sessions.session import Session
from martlet_topics.codec import ENCODING, decode_name, encode_error, encode_run
from martlet_topics.config import TopicsConfig
from martlet_topics.packets import (
    Acknowledge,
    Command,
    Forget,
    Hello,
    Ping,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)
from martlet_topics.shares import PacketIds, SharedFilters, is_shared, split_shared

__all__ = ["Shared", "TopicsHandler"]

PROTOCOL: Final = "topics"
# The options of a filter in a session: its QoS.
AT_MOST_ONCE: Final = b""
AT_LEAST_ONCE: Final = b"\x01"
NAMES_KEPT: Final = 50_000


@final
@dataclass(slots=True)
class Shared:
    """What all handlers use, and what their clients did since the start."""

    config: TopicsConfig
    clock: Clock
    gate: Callable[[Identity], Gate]
    feed: Feed
    names: dict[bytes, tuple[bytes, int]]  # by name as it comes: properties and hash of the name
    published: int = 0
    delivered: int = 0
    refused: int = 0

    def prepared(self, word: bytes) -> tuple[bytes, int]:
        """Return the properties and the hash of the name that *word* says. Raises `Refused`."""
        found = self.names.get(word)
        if found is None:
            name = decode_name(word).encode()
            if not name or len(name) > self.config.name_bytes_max:
                text = f"name {word[:60]!r} cannot be published to; send UTF-8 without wildcards and control characters"
                raise Refused(Reason.ILLEGAL, f"{text}, 1 to {self.config.name_bytes_max} bytes")
            if len(self.names) >= NAMES_KEPT:
                self.names.clear()
            found = self.names[word] = b"TAGS\x01%b\x02" % name, crc32(name)
        return found


@final
class TopicsHandler:
    """One client (martlet.contracts.Handler)."""

    __slots__ = ("_again", "_cursor", "_gate", "_groups", "_ids", "_peer", "_session", "_waiting", "shared")

    def __init__(self, peer: Peer, shared: Shared) -> None:
        self._peer = peer
        self.shared = shared
        self._gate: Gate | None = None
        self._session: Session | None = None
        self._cursor: Cursor | None = None
        self._ids: PacketIds | None = None
        self._groups: SharedFilters | None = None
        # By position the packet ids that were in flight when the client came.
        self._again: dict[int, int] = {}
        # Filters of QoS 0: what was sent before is not sent again, so they wait for the tail.
        self._waiting: dict[str, int] = {}

    def handle(self, event: Command) -> None:
        try:
            if isinstance(event, Hello):
                self._begin(event.name)
            elif self._session is not None:
                self._the_groups.touch()
                self._act(event, self._session)
        except Refused as refused:
            self.shared.refused += 1
            self._peer.send(_error(refused))
            if isinstance(event, Hello):
                self._peer.close(str(refused))  # without a session there is nothing to do

    def _act(self, event: Command, session: Session) -> None:
        match event:
            case Publish():
                self._publish(event, session)
            case Acknowledge(first_id, count):
                if self._the_groups.acknowledge(first_id, count) < count:
                    session.acknowledge(first_id, count)
                self._peer.wake()  # the window has room
            case Subscribe(topic_filter, qos):
                self._subscribe(session, topic_filter, qos)
            case Unsubscribe(topic_filter):
                session.unsubscribe(topic_filter)
                self._peer.hold_until(session.until)
                self._the_cursor.remove_filter(topic_filter)
                self._the_groups.remove(topic_filter)
                self._waiting.pop(topic_filter, None)
                self._peer.send(b"OK\n")
            case Forget():
                self._forget(session)
            case Ping():
                self._peer.send(b"PONG\n")
            case Quit():
                self._peer.send(b"BYE\n")
                self._peer.close("")

    def refuse(self, answer: Buffer, refused: Refused) -> bytes | None:
        """Answer a publisher with the error; close any other connection, whose client connects again."""
        words = bytes(answer).split()
        if words[0] != b"ACK":
            return None
        return encode_error(refused.reason.name, str(refused), int(words[1]), int(words[2]))

    def closed(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.leave()
        self._let_go()

    def _let_go(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        if self._groups is not None:
            self._groups.leave()

    # sessions

    @property
    def _the_gate(self) -> Gate:
        """The gate of this client's identity, which is known once TLS has shaken hands."""
        if self._gate is None:
            self._gate = self.shared.gate(self._peer.identity)
        return self._gate

    @property
    def _the_cursor(self) -> Cursor:
        assert self._cursor is not None
        return self._cursor

    @property
    def _the_groups(self) -> SharedFilters:
        assert self._groups is not None
        return self._groups

    def _begin(self, name: str) -> None:
        """Attach to the session and follow the log from where it needs messages."""
        shared, gate = self.shared, self._the_gate
        session, is_old = gate.open_session(
            PROTOCOL, name, shared.feed.tail_position(), self._lose, expiry_s=shared.config.session_expiry_s
        )
        self._session = session
        self._ids = PacketIds(session)
        self._groups = SharedFilters(self._peer, gate, shared.config, shared.feed, self._ids)
        # A filter that may not be followed any more stays in the session, and brings nothing.
        own = {each: options for each, options in session.filters.items() if not is_shared(each)}
        allowed = {each: options for each, options in own.items() if gate.may_follow(shared.feed, each)}
        durable = {each: 1 for each, options in allowed.items() if options == AT_LEAST_ONCE}
        self._waiting = {each: 0 for each, options in allowed.items() if options != AT_LEAST_ONCE}
        self._again = {position: packet_id for packet_id, position in session.flight.items()}
        try:
            start = session.start if durable else None
            cursor = gate.follow(shared.feed, self._peer.wake, {}, start, is_paused=bool(durable))
        except Refused as refused:
            raise RemoteProtocolError(str(refused)) from refused  # the topic is gone
        self._cursor = cursor
        for each, qos in durable.items():
            cursor.add_filter(each, qos, begin=session.begins.get(each, 0))
        cursor.resume()
        for each in session.filters.keys() - own.keys():
            with suppress(Refused):
                self._groups.add(each, int(session.filters[each] == AT_LEAST_ONCE))
        session.where = lambda: cursor.position
        self._peer.hold_until(session.until)
        has_gap = is_old and shared.feed.has_removed(session.start, durable)
        self._peer.send(b"OK gap\n" if has_gap else b"OK old\n" if is_old else b"OK new\n")
        self._peer.wake()

    def _lose(self, reason: str) -> None:
        """Another connection has the session now."""
        self._session = None
        self._let_go()
        self._peer.send(encode_error("LOST", reason))
        self._peer.close(reason)

    def _forget(self, session: Session) -> None:
        session.end()
        self._peer.hold_until(session.until)
        self._peer.send(b"OK\n")
        self._peer.close("")

    def _subscribe(self, session: Session, topic_filter: str, qos: int) -> None:
        cursor, limit = self._the_cursor, self.shared.config.filters_max
        if len(session.filters) >= limit and topic_filter not in session.filters:
            raise Refused(Reason.BUSY, f"the session has {limit} filters; topics.filters_max allows no more")
        cursor.check(split_shared(topic_filter)[1] if is_shared(topic_filter) else topic_filter)
        if is_shared(topic_filter):
            self._the_groups.add(topic_filter, qos)
        try:
            is_durable = session.filters.get(topic_filter) == AT_LEAST_ONCE
            begin = self.shared.feed.end_position() if qos and not is_durable else 0
            session.subscribe(topic_filter, AT_LEAST_ONCE if qos else AT_MOST_ONCE, begin)
        except Refused:
            if topic_filter not in session.filters:
                self._the_groups.remove(topic_filter)
            raise
        self._peer.hold_until(session.until)
        if is_shared(topic_filter):
            self._peer.send(b"OK\n")
            return
        self._waiting.pop(topic_filter, None)
        if qos or cursor.place is Place.TAIL:
            cursor.add_filter(topic_filter, qos)
        else:
            cursor.remove_filter(topic_filter)
            self._waiting[topic_filter] = qos
        self._peer.send(b"OK\n")

    # publishing

    def _publish(self, run: Publish, session: Session) -> None:
        shared, gate = self.shared, self._the_gate
        messages: list[Message] = []
        born_ms, host = shared.clock.now_ms(), self._peer.host
        try:
            topic = gate.find_topic(shared.config.topic, "publish", shared.config.queues)
            queues = topic.write_queues if topic is not None else 0
            for word, body in zip(run.names, run.bodies, strict=True):
                properties, code = shared.prepared(word)
                queue_id = code % queues if queues else 0
                messages.append(Message(shared.config.topic, body, properties, queue_id, 0, 0, born_ms, host))
            results = self._publish_all(run, messages, session)
        except Refused as refused:
            shared.refused += 1
            self._peer.send(encode_error(refused.reason.name, str(refused), run.first_id, len(run.names)))
            return
        placed = [each for each in results if isinstance(each, Placed)]
        shared.published += len(placed)
        if len(placed) == len(messages) and b"%" not in run.frames:
            positions = [each.position for each in placed]
            shared.feed.hand_on(shared.config.topic, ENCODING.name, positions, run.frames, run.ends)
        if placed:
            self._peer.hold_until(placed[-1].end)
        self._answer(run.first_id, results)

    def _publish_all(self, run: Publish, messages: list[Message], session: Session) -> list[Placed | Refused]:
        if not run.is_atomic:
            return self._the_gate.publish_many(messages)
        done = run.acknowledged
        if done is None:
            return list(self._the_gate.publish_atomic(messages))
        first_id, count, groups = done.first_id, done.count, self._the_groups
        notes = groups.acknowledgements(first_id, count)
        changes = session.changes()
        if not notes:
            if not all(packet_id in session.flight for packet_id in range(first_id, first_id + count)):
                text = f"packet ids {first_id} to {first_id + count - 1} are not in flight; acknowledge what was sent"
                raise Refused(Reason.NOT_FOUND, text)
            changes.acknowledge(first_id, count)
        try:
            placed = self._the_gate.publish_atomic(messages, notes or changes.notes)
        except Refused:
            groups.withdraw(first_id, count)
            raise
        if notes:
            groups.settle(first_id, count)
        else:
            changes.apply()
        self._peer.wake()
        return list(placed)

    def _answer(self, first_id: int, results: list[Placed | Refused]) -> None:
        """Acknowledge neighbours together; without packet ids nothing is said."""
        for _, group in groupby(results, lambda result: isinstance(result, Refused)):
            neighbours = list(group)
            why = neighbours[0]
            if isinstance(why, Refused):
                self.shared.refused += len(neighbours)
            if first_id:
                line = b"ACK %d %d\n" % (first_id, len(neighbours))
                if isinstance(why, Refused):
                    line = encode_error(why.reason.name, str(why), first_id, len(neighbours))
                self._peer.send(line)
                first_id += len(neighbours)

    # delivery

    def collect(self, budget_bytes: int) -> None:
        session, cursor = self._session, self._cursor
        if session is None or cursor is None:
            return
        window = self.shared.config.window
        try:
            self.shared.delivered += self._the_groups.collect(budget_bytes // 2)
            while (room := window - len(session.flight) + len(self._again)) > 0:
                if budget_bytes <= 0:
                    self._peer.wake()
                    return
                for run, grants in cursor.collect(budget_bytes, room):
                    budget_bytes -= len(run.data)
                    self._deliver(session, run, grants)
                if not cursor.has_pending:
                    self._at_end(session, cursor)
                    return
        except Refused as refused:
            self._peer.close(str(refused))

    def _at_end(self, session: Session, cursor: Cursor) -> None:
        """Nothing is pending; at the tail everything old has come that the log and the filters still have."""
        if not (self._again or self._waiting) or cursor.place is not Place.TAIL:
            return
        for position, packet_id in self._again.items():
            if session.flight.get(packet_id) == position:
                session.acknowledge(packet_id)
        self._again.clear()
        for topic_filter, qos in self._waiting.items():
            cursor.add_filter(topic_filter, qos)
        self._waiting.clear()

    def _deliver(self, session: Session, run: Run, grants: tuple[Hashable, ...]) -> None:
        frames = run.frames(ENCODING)
        self.shared.delivered += run.count
        if not any(grants):
            self._peer.send(encode_run(0, run.count, len(frames.data)), frames.data)
            return
        ids = self._ids
        assert ids is not None
        positions = [record.position for record in run.records()]
        old = bisect_left(positions, session.position)
        for index in range(old):
            packet_id = self._again.pop(positions[index], 0)
            if session.flight.get(packet_id) == positions[index]:
                frame = frames.part(index, index + 1).data
                self._peer.send(encode_run(packet_id, 1, len(frame), again=True), frame)
        while old < run.count:
            first, count = ids.take(run.count - old)
            last = old + count
            end = run.end if last == run.count else positions[last]
            session.hand_out(first, positions[old:last], end)
            self._peer.hold_until(session.until)
            part = frames if count == run.count else frames.part(old, last)
            self._peer.send(encode_run(first, count, len(part.data)), part.data)
            old = last


def _error(refused: Refused) -> bytes:
    return encode_error(refused.reason.name, str(refused))
