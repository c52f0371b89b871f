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
from martlet.contracts import Buffer, Identity, LoginOrigin, Peer
from martlet.delivery.cursor import CursorPlace
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
    gate: Callable[[Identity, LoginOrigin, Peer], Gate]
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
class Client:
    """A client with a session: what it sends, and what it gets.

    *is_old*: whether the session existed before.

    Raises:
      Refused: the topic is gone.
    """

    __slots__ = ("_again", "_cursor", "_gate", "_groups", "_ids", "_is_old", "_peer", "_session", "_shared", "_waiting")

    def __init__(self, peer: Peer, shared: Shared, gate: Gate, session: Session, *, is_old: bool) -> None:
        self._peer = peer
        self._shared = shared
        self._gate = gate
        self._session = session
        self._is_old = is_old
        self._ids = PacketIds(session)
        self._groups = SharedFilters(peer, gate, shared.config, shared.feed, self._ids)
        # Filters of QoS 0: what was sent before is not sent again, so they wait for the tail.
        self._waiting: dict[str, int] = {}
        # By position the packet ids that were in flight when the client came.
        self._again = {position: packet_id for packet_id, position in session.flight.items()}
        is_paused = any(self._may_follow(each) for each, qos in session.filters.items() if qos == AT_LEAST_ONCE)
        start = session.start if is_paused else None
        self._cursor = gate.follow(shared.feed, peer.wake, {}, start, is_paused=is_paused)

    def _may_follow(self, topic_filter: str) -> bool:
        return not is_shared(topic_filter) and self._gate.may_follow(self._shared.feed, topic_filter)

    def begin(self) -> None:
        """Go on with the session: follow the log from where it needs messages. Raises `Refused`."""
        session, feed, cursor = self._session, self._shared.feed, self._cursor
        # A filter that may not be followed any more stays in the session, and brings nothing.
        allowed = {each: options for each, options in session.filters.items() if self._may_follow(each)}
        durable = {each: 1 for each, options in allowed.items() if options == AT_LEAST_ONCE}
        self._waiting = {each: 0 for each, options in allowed.items() if options != AT_LEAST_ONCE}
        for each, qos in durable.items():
            cursor.add_filter(each, qos, begin=session.begins.get(each, 0))
        cursor.resume()
        for each, options in session.filters.items():
            if is_shared(each):
                with suppress(Refused):
                    self._groups.add(each, int(options == AT_LEAST_ONCE))
        session.where = lambda: cursor.position
        self._peer.hold_until(session.until)
        has_gap = self._is_old and feed.has_removed(session.start, durable)
        self._peer.send(b"OK gap\n" if has_gap else b"OK old\n" if self._is_old else b"OK new\n")
        self._peer.wake()

    def let_go(self) -> None:
        """Deliver nothing more."""
        self._cursor.close()
        self._groups.leave()

    def leave(self) -> None:
        """Detach from the session: the client is gone."""
        self._session.leave()
        self.let_go()

    def act(self, event: Command) -> None:
        """Act on *event*. Raises `Refused`."""
        session = self._session
        self._groups.touch()
        match event:
            case Publish():
                self._publish(event)
            case Acknowledge(first_id, count):
                if self._groups.acknowledge(first_id, count) < count:
                    session.acknowledge(first_id, count)
                self._peer.wake()  # the window has room
            case Subscribe(topic_filter, qos):
                self._subscribe(topic_filter, qos)
            case Unsubscribe(topic_filter):
                session.unsubscribe(topic_filter)
                self._peer.hold_until(session.until)
                self._cursor.remove_filter(topic_filter)
                self._groups.remove(topic_filter)
                self._waiting.pop(topic_filter, None)
                self._peer.send(b"OK\n")
            case Forget():
                session.end()
                self._peer.hold_until(session.until)
                self._peer.send(b"OK\n")
                self._peer.close("")
            case Ping():
                self._peer.send(b"PONG\n")
            case Quit():
                self._peer.send(b"BYE\n")
                self._peer.close("")

    def _subscribe(self, topic_filter: str, qos: int) -> None:
        session, cursor, limit = self._session, self._cursor, self._shared.config.filters_max
        if len(session.filters) >= limit and topic_filter not in session.filters:
            raise Refused(Reason.BUSY, f"the session has {limit} filters; topics.filters_max allows no more")
        cursor.check(split_shared(topic_filter)[1] if is_shared(topic_filter) else topic_filter)
        if is_shared(topic_filter):
            self._groups.add(topic_filter, qos)
        try:
            is_durable = session.filters.get(topic_filter) == AT_LEAST_ONCE
            begin = self._shared.feed.end_position() if qos and not is_durable else 0
            session.subscribe(topic_filter, AT_LEAST_ONCE if qos else AT_MOST_ONCE, begin)
        except Refused:
            if topic_filter not in session.filters:
                self._groups.remove(topic_filter)
            raise
        self._peer.hold_until(session.until)
        if is_shared(topic_filter):
            self._peer.send(b"OK\n")
            return
        self._waiting.pop(topic_filter, None)
        if qos or cursor.place is CursorPlace.TAIL:
            cursor.add_filter(topic_filter, qos)
        else:
            cursor.remove_filter(topic_filter)
            self._waiting[topic_filter] = qos
        self._peer.send(b"OK\n")

    # publishing

    def _publish(self, run: Publish) -> None:
        shared, gate = self._shared, self._gate
        messages: list[Message] = []
        born_ms, host = shared.clock.now_ms(), self._peer.host
        try:
            topic = gate.find_topic(shared.config.topic, "publish", shared.config.queues)
            queues = topic.write_queues if topic is not None else 0
            for word, body in zip(run.names, run.bodies, strict=True):
                properties, code = shared.prepared(word)
                queue_id = code % queues if queues else 0
                messages.append(Message(shared.config.topic, body, properties, queue_id, 0, 0, born_ms, host))
            results = self._publish_all(run, messages)
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

    def _publish_all(self, run: Publish, messages: list[Message]) -> list[Placed | Refused]:
        if not run.is_atomic:
            return self._gate.publish_all(messages).outcomes()
        done = run.acknowledged
        if done is None:
            return self._gate.publish_all(messages, atomic=True).outcomes()
        first_id, count, groups = done.first_id, done.count, self._groups
        notes = groups.acknowledgements(first_id, count)
        session = self._session
        changes = session.changes()
        if not notes:
            if not all(packet_id in session.flight for packet_id in range(first_id, first_id + count)):
                text = f"packet ids {first_id} to {first_id + count - 1} are not in flight; acknowledge what was sent"
                raise Refused(Reason.NOT_FOUND, text)
            changes.acknowledge(first_id, count)
        try:
            result = self._gate.publish_all(messages, atomic=True, notes=notes or changes.notes)
        except Refused:
            groups.withdraw(first_id, count)
            raise
        if notes:
            groups.settle(first_id, count)
        else:
            changes.apply()
        self._peer.wake()
        return result.outcomes()

    def _answer(self, first_id: int, results: list[Placed | Refused]) -> None:
        """Acknowledge neighbours together; without packet ids nothing is said."""
        for _, group in groupby(results, lambda result: isinstance(result, Refused)):
            neighbours = list(group)
            why = neighbours[0]
            if isinstance(why, Refused):
                self._shared.refused += len(neighbours)
            if first_id:
                line = b"ACK %d %d\n" % (first_id, len(neighbours))
                if isinstance(why, Refused):
                    line = encode_error(why.reason.name, str(why), first_id, len(neighbours))
                self._peer.send(line)
                first_id += len(neighbours)

    # delivery

    def collect(self, budget_bytes: int) -> None:
        """Send what there is, about *budget_bytes*."""
        session, cursor = self._session, self._cursor
        window = self._shared.config.window
        try:
            self._shared.delivered += self._groups.collect(budget_bytes // 2)
            while (room := window - len(session.flight) + len(self._again)) > 0:
                if budget_bytes <= 0:
                    self._peer.wake()
                    return
                runs = cursor.collect(budget_bytes, room)
                for run, grants in runs:
                    budget_bytes -= len(run.data)
                    self._deliver(run, grants)
                if not cursor.has_pending:
                    self._at_end()
                    return
                if not runs:
                    return  # it must wait, by the client's quotas
        except Refused as refused:
            self._peer.close(str(refused))

    def _at_end(self) -> None:
        """Nothing is pending; at the tail everything old has come that the log and the filters still have."""
        session, cursor = self._session, self._cursor
        if not (self._again or self._waiting) or cursor.place is not CursorPlace.TAIL:
            return
        for position, packet_id in self._again.items():
            if session.flight.get(packet_id) == position:
                session.acknowledge(packet_id)
        self._again.clear()
        for topic_filter, qos in self._waiting.items():
            cursor.add_filter(topic_filter, qos)
        self._waiting.clear()

    def _deliver(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        frames = run.frames(ENCODING)
        self._shared.delivered += run.count
        if not any(grants):
            self._peer.send(encode_run(0, run.count, len(frames.data)), frames.data)
            return
        session = self._session
        positions = [record.position for record in run.records()]
        old = bisect_left(positions, session.position)
        for index in range(old):
            packet_id = self._again.pop(positions[index], 0)
            if session.flight.get(packet_id) == positions[index]:
                frame = frames.part(index, index + 1).data
                self._peer.send(encode_run(packet_id, 1, len(frame), again=True), frame)
        while old < run.count:
            first, count = self._ids.take(run.count - old)
            last = old + count
            end = run.end if last == run.count else positions[last]
            session.hand_out(first, positions[old:last], end)
            self._peer.hold_until(session.until)
            part = frames if count == run.count else frames.part(old, last)
            self._peer.send(encode_run(first, count, len(part.data)), part.data)
            old = last


@final
class TopicsHandler:
    """One connection (martlet.contracts.Handler); its client has a session once it has said hello."""

    __slots__ = ("_client", "_peer", "_shared")

    def __init__(self, peer: Peer, shared: Shared) -> None:
        self._peer = peer
        self._shared = shared
        self._client: Client | None = None

    def handle(self, event: Command) -> None:
        try:
            if isinstance(event, Hello):
                self._begin(event.name)
            elif self._client is not None:
                self._client.act(event)
        except Refused as refused:
            self._shared.refused += 1
            self._peer.send(_error(refused))
            if isinstance(event, Hello):
                self._peer.close(str(refused))  # without a session there is nothing to do

    def _begin(self, name: str) -> None:
        """Attach to the session."""
        peer, shared = self._peer, self._shared
        gate = shared.gate(peer.identity, peer.login_origin(), peer)  # known once TLS has shaken hands
        session, is_old = gate.open_session(
            PROTOCOL, name, shared.feed.tail_position(), self._lose, expiry_s=shared.config.session_expiry_s
        )
        try:
            self._client = Client(self._peer, shared, gate, session, is_old=is_old)
        except Refused as refused:
            session.leave()
            raise RemoteProtocolError(str(refused)) from refused
        self._client.begin()

    def _lose(self, reason: str) -> None:
        """Another connection has the session now."""
        if self._client is not None:
            self._client.let_go()
            self._client = None
        self._peer.send(encode_error("LOST", reason))
        self._peer.close(reason)

    def collect(self, budget_bytes: int) -> None:
        if self._client is not None:
            self._client.collect(budget_bytes)

    def refuse(self, answer: Buffer, refused: Refused) -> bytes | None:
        """Answer a publisher with the error; close any other connection, whose client connects again."""
        words = bytes(answer).split()
        if words[0] != b"ACK":
            return None
        return encode_error(refused.reason.name, str(refused), int(words[1]), int(words[2]))

    def closed(self, reason: str) -> None:
        if self._client is not None:
            self._client.leave()
            self._client = None


def _error(refused: Refused) -> bytes:
    return encode_error(refused.reason.name, str(refused))
