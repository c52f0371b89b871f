"""Messages to one client: numbering, flow control and resending (MQTT 5 sections 4.3, 4.4 and 4.9).

The session knows which packet identifiers are in use, as numbers above 65,535 that say what for:

| number | what the identifier is for |
|---|---|
| id | a message of QoS 1, until PUBACK |
| `TWICE` + id | a message of QoS 2, until PUBREC; then nothing but the identifier, until PUBCOMP |
| `INCOMING` + id | a message of QoS 2 that the client sent, until PUBREL (`incoming.py`) |

`RETAINED` is added for a message that is sent because a subscription began. A message leaves when it is durable that it
is in flight, so that its identifier means the same after any crash. When the client comes back, what is in flight is
read from the log and sent first; then the cursor continues where the session is.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple, cast, final

import trio

from martlet.access import Gate
from martlet.contracts import Peer, RecordView
from martlet.delivery.cursor import Cursor, Place
from martlet.delivery.fanout import parts
from martlet.delivery.group_members import Member
from martlet.delivery.interest import FilterTrie
from martlet.delivery.session_notes import NO_MESSAGE
from martlet.delivery.sessions import Session
from martlet.delivery.subscriptions import Delivery
from martlet.delivery.tail_reader import Frames, Run
from martlet.errors import Refused
from martlet.state.journal import NEXT_COMMIT

from .aliases import Aliases
from .codec import encode_packet
from .codes import V5, PacketType, ReasonCode
from .context import Context
from .frames import DUPLICATE, Grant, Shape, encode_alone, has_selector, number_frames, publish_frame
from .messages import to_deliver
from .names import SharedFilter, split_shared
from .packets import Ack, Connect, Subscription
from .properties import Property
from .selecting import chooser
from .shares import Leased, SharedSubscriptions
from .subscribing import grant_of

__all__ = ["IDS_MAX", "INCOMING", "TWICE", "Outgoing"]

IDS_MAX: Final = 65_535
INCOMING: Final = 1 << 16
TWICE: Final = 1 << 17
RETAINED: Final = 1 << 18
# Records that are read at once for a client.
READ_MESSAGES: Final = 64
READ_BYTES: Final = 1 << 18
# What an alias can add to a packet: itself, and a byte to each of two lengths.
ALIAS_BYTES: Final = 5
NEVER: Final = 1 << 62


class Due(NamedTuple):
    """A message to read from the log and send before the cursor goes on.

    It is in flight already as ``number``; 0 for a retained message, which ``grant`` is for.
    """

    position: int
    number: int
    grant: Grant | None


@final
class Outgoing:
    """What one client is sent."""

    __slots__ = (
        "_aliases",
        "_client_id",
        "_context",
        "_cursor",
        "_due",
        "_figures",
        "_fresh",
        "_fresh_from",
        "_gate",
        "_is_reading",
        "_next_id",
        "_packet_bytes_max",
        "_peer",
        "_ready",
        "_resent",
        "_retained",
        "_session",
        "_shares",
        "_unsent",
        "_used",
        "_version",
        "_waiting",
        "_window",
    )

    def __init__(self, peer: Peer, context: Context, gate: Gate, session: Session, connect: Connect) -> None:
        properties, config = connect.properties, context.config
        self._peer = peer
        self._context = context
        self._gate = gate
        self._session = session
        self._version = connect.version
        self._client_id = connect.client_id
        self._window = min(properties.number(Property.RECEIVE_MAXIMUM, IDS_MAX), config.in_flight_max)
        self._packet_bytes_max = properties.number(Property.MAXIMUM_PACKET_SIZE, 1 << 30)
        alias_max = min(properties.number(Property.TOPIC_ALIAS_MAXIMUM, 0), config.alias_max)
        self._aliases = Aliases(alias_max) if alias_max else None
        self._cursor: Cursor | None = None
        # Identifiers in flight to the client, without what they are for.
        self._used = {number & IDS_MAX for number in session.flight if not number & INCOMING}
        # Those of messages that are in flight since an earlier connection, and not yet sent on this one.
        self._unsent: set[int] = set()
        self._next_id = session.next_id & IDS_MAX or 1
        self._due: deque[Due] = deque()
        # By filter, the names with retained messages that are due after these, the subscription that they are for, and
        # the position from which on it brings them itself.
        self._retained: dict[str, tuple[Iterator[str], Grant, int]] = {}
        self._ready: deque[tuple[Due, bytes | None]] = deque()
        self._is_reading = False
        self._shares = SharedSubscriptions(peer, context, gate, connect.version)
        # Figures of the broker to send when there is room; a newer value replaces one that has not been sent yet.
        self._figures: dict[tuple[str, tuple[Grant, ...]], tuple[bytes, bool]] = {}
        # Subscriptions of QoS 0 of a session that catches up: nothing old is sent for them.
        self._waiting: dict[str, Grant] = {}
        # The filters of new subscriptions that bring nothing before this position.
        self._fresh: frozenset[str] = frozenset()
        self._fresh_from = 0
        # The subscriptions of the session, by filter, as long as messages are sent again for them.
        self._resent: FilterTrie[bool] | None = None

    # the beginning

    def begin(self, grants: dict[str, Grant], *, is_old: bool) -> None:
        """Follow the log from where the session is; nothing is sent before `resend`. Raises `Refused`."""
        session = self._session
        durable = {each: grant for each, grant in grants.items() if grant.subscription.qos}
        start = session.position if is_old and durable else None
        first = grants if start is None else durable
        self._waiting = {} if start is None else {each: grants[each] for each in grants.keys() - durable.keys()}
        self._cursor = cursor = self._gate.follow(
            self._context.feed, self._peer.wake, cast("dict[str, Hashable]", first), start, _is_droppable
        )
        session.where = lambda: cursor.position

    def resend(self) -> None:
        """Send what is in flight, and then what the cursor brings."""
        for number, position in self._session.flight.items():
            if position == NO_MESSAGE and number & TWICE:
                self._peer.send(encode_packet(Ack(PacketType.PUBREL, number & IDS_MAX), self._version))
            elif position != NO_MESSAGE:
                self._unsent.add(number & IDS_MAX)
                self._due.append(Due(position, number, None))
        self._peer.wake()

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless the client may subscribe to *topic_filter*."""
        self._the_cursor.check(topic_filter)

    def share(self, grant: Grant, shared: SharedFilter) -> None:
        """Take part in a shared subscription. Raises `Refused`."""
        self._shares.add(grant, shared)

    def unshare(self, topic_filter: str) -> None:
        """Take no part in a shared subscription any more."""
        self._shares.remove(topic_filter)

    def subscribe(self, grant: Grant) -> None:
        """Send messages for *grant* from now on. Raises `Refused`."""
        cursor, topic_filter = self._the_cursor, grant.subscription.topic_filter
        self._waiting.pop(topic_filter, None)
        is_replaced = topic_filter in cursor.filters  # what waits for it must not be lost (MQTT 5 section 3.8.4)
        if grant.subscription.qos or is_replaced or cursor.place is Place.TAIL:
            cursor.add_filter(topic_filter, grant)
        else:
            cursor.remove_filter(topic_filter)
            self._waiting[topic_filter] = grant

    def leave_out_earlier(self, topic_filter: str) -> None:
        """Send nothing for *topic_filter*, which is new, that was published before: it may be the client's own."""
        if not self._fresh:
            self._fresh_from = self._context.broker.store.appended
        self._fresh |= {topic_filter}

    def unsubscribe(self, topic_filter: str) -> None:
        """Send nothing more for *topic_filter*, except what is in flight."""
        self._waiting.pop(topic_filter, None)
        self._the_cursor.remove_filter(topic_filter)
        self._shares.remove(topic_filter)
        for key in [key for key in self._figures if any(e.subscription.topic_filter == topic_filter for e in key[1])]:
            del self._figures[key]
        self._forget_retained(topic_filter)

    def _forget_retained(self, topic_filter: str) -> None:
        """Do not send retained messages for *topic_filter* that are due."""
        self._retained.pop(topic_filter, None)
        self._due = deque(due for due in self._due if not _is_for(due, topic_filter))
        self._ready = deque(each for each in self._ready if not _is_for(each[0], topic_filter))

    def send_retained(self, matches: Iterator[str], grant: Grant, *, is_new: bool) -> None:
        """Send the retained messages of *matches* (`Retained.matches`) for a subscription that begins or is renewed."""
        topic_filter = grant.subscription.topic_filter
        if not is_new:
            self._forget_retained(topic_filter)
        end = NEVER if topic_filter in self._waiting else self._the_cursor.reach
        if topic_filter in self._fresh:
            end = max(end, self._fresh_from)
        self._retained[topic_filter] = matches, grant, end
        self._peer.wake()

    def send_figure(self, name: str, value: bytes, grants: Sequence[Grant], *, retain: bool) -> None:
        """Send a figure of the broker, which is in no log, with QoS 0, when there is room."""
        self._figures[name, tuple(grants)] = value, retain
        self._peer.wake()

    def _send_figures(self, budget_bytes: int) -> int:
        """Send figures, about *budget_bytes*; return how many bytes."""
        size = 0
        for name, grants in list(self._figures):
            if size >= budget_bytes:
                self._peer.wake()
                break
            value, retain = self._figures.pop((name, grants))
            if not self._gate.allows("read", name):
                continue
            properties = self._shape(grants).identifiers if self._version == V5 else None
            frame = self._fitting(publish_frame(name.encode(), value, int(retain), properties))
            if frame:
                self._peer.send(frame)
                self._context.counters.delivered += 1
                size += len(frame)
        return size

    @property
    def dropped(self) -> int:
        """How many messages of QoS 0 the client did not get because it was too slow."""
        return self._cursor.dropped if self._cursor is not None else 0

    @property
    def _the_cursor(self) -> Cursor:
        assert self._cursor is not None
        return self._cursor

    def close(self) -> None:
        """Stop; the session remembers where."""
        self._shares.leave()
        if self._cursor is not None:
            self._context.counters.dropped += self._cursor.dropped
            self._cursor.close()

    # acknowledgements

    def acknowledged(self, kind: PacketType, ids: Sequence[int]) -> list[int]:
        """Take PUBACK or PUBCOMP for *ids*; return those that are not in flight like that. Raises `Refused`."""
        base = TWICE if kind is PacketType.PUBCOMP else 0
        if self._shares.has_leased and not base:
            rest = self._shares.settle(ids)
            self._used.difference_update(set(ids).difference(rest))
            ids = rest
        unknown = self._settle(base, ids)
        if unknown and base == 0:
            unknown = self._settle(RETAINED, unknown)
        self._peer.wake()
        return unknown

    def _settle(self, base: int, ids: Sequence[int]) -> list[int]:
        session, flight, at, count = self._session, self._session.flight, 0, len(ids)
        unknown: list[int] = []
        while at < count:
            first = last = ids[at]
            if base + first not in flight:
                unknown.append(first)
                at += 1
                continue
            at += 1
            while at < count and ids[at] == last + 1 and base + last + 1 in flight:
                last += 1
                at += 1
            session.acknowledge(base + first, last - first + 1)
            freed = range(first, last + 1)
            self._used.difference_update(freed)
            if self._unsent:
                self._unsent.difference_update(freed)
        return unknown

    def received(self, ids: Sequence[int], reason: int) -> list[int]:
        """Take PUBREC for *ids* with *reason*; return those that are unknown. Raises `Refused`.

        The answer PUBREL leaves when it is durable that they were received [MQTT-4.3.3-4].
        """
        session, unknown = self._session, []
        answers: list[bytes] = []
        for packet_id in ids:
            numbers = [each for each in (TWICE + packet_id, TWICE + RETAINED + packet_id) if each in session.flight]
            if not numbers:
                unknown.append(packet_id)
                continue
            if reason >= ReasonCode.UNSPECIFIED_ERROR:
                session.acknowledge(numbers[0])
                self._used.discard(packet_id)
                continue
            if numbers[0] & RETAINED:
                session.acknowledge(numbers[0])
            if session.flight.get(TWICE + packet_id) != NO_MESSAGE:
                session.hold(TWICE + packet_id)
            answers.append(b"\x62\x02" + packet_id.to_bytes(2))
        if answers and self._the_cursor.place is not Place.CLOSED:  # else the session was lost with a failed commit
            self._peer.hold_until(session.until)
            self._context.counters.answers += len(answers)
            self._peer.send(b"".join(answers))
        self._peer.wake()
        return unknown

    # delivery

    def collect(self, budget_bytes: int) -> None:
        """Send what is due, about *budget_bytes*. Raises `Refused`."""
        if self._figures:
            budget_bytes -= self._send_figures(budget_bytes)
        while self._ready and budget_bytes > 0 and self._room() > 0:
            due, record = self._ready.popleft()
            budget_bytes -= self._send_due(due, record)
        if not self._due and not self._ready and not self._retained:
            self._resent = None
        else:
            if not self._ready and not self._is_reading:
                self._is_reading = True
                self._peer.start(self._read_due)
            elif self._ready and budget_bytes <= 0:
                self._peer.wake()
            return
        for member, grant, delivery in self._shares.collect(budget_bytes // 2, self._room):
            budget_bytes -= delivery.size
            self._deliver_shared(member, grant, delivery)
        cursor = self._the_cursor
        while (room := self._room()) > 0:
            if budget_bytes <= 0:
                self._peer.wake()
                return
            try:
                for run, grants in cursor.collect(budget_bytes, room):
                    budget_bytes -= len(run.data)
                    if self._fresh:
                        self._deliver_around(run, cast("tuple[Grant, ...]", grants))
                    else:
                        self._deliver(run, cast("tuple[Grant, ...]", grants))
            except Exception:
                self._session.where = lambda: 0  # not the cursor's: some of what it gave was not delivered
                raise
            if not cursor.has_pending:
                if self._waiting and cursor.place is Place.TAIL:
                    self._join_waiting(cursor)
                return

    def _room(self) -> int:
        """Return how many messages may be sent; those in flight that were not sent on this connection do not count."""
        return self._window - len(self._used) + len(self._unsent)

    def _deliver_shared(self, member: Member, grant: Grant, delivery: Delivery) -> None:
        data, start, queue_id = bytes(delivery.data), 0, delivery.queue_id
        for end, offset, position in zip(delivery.ends, delivery.offsets, delivery.positions, strict=True):
            frame = self._fitting(data[start:end])
            start = end
            if not frame or not frame[0] & 6:
                member.ack(queue_id, offset)
                if frame:
                    self._context.counters.delivered += 1
                    self._peer.send(frame)
                continue
            packet_id, _ = self._take_ids(1)
            if frame[0] & 6 == 4:
                self._hand_over(member, delivery, offset, position, packet_id)
            else:
                self._shares.lease(packet_id, Leased(member, queue_id, offset))
            numbered = bytearray(frame)
            number_frames(numbered, [0], [packet_id])
            self._peer.send(numbered)
            self._context.counters.delivered += 1

    def _hand_over(self, member: Member, delivery: Delivery, offset: int, position: int, packet_id: int) -> None:
        """Make a message of a group one of this session, which alone may complete it [MQTT-4.8.2-5]."""
        changes = self._session.changes()
        changes.hand_out(TWICE + packet_id, [position], self._session.position)
        note = member.share.acknowledgement(delivery.queue_id, offset, delivery.generation)
        try:
            self._gate.publish_atomic([], [*changes.notes, note])
        except Refused:
            member.share.withdraw(delivery.queue_id, offset)
            raise
        changes.apply()
        self._peer.hold_until(NEXT_COMMIT)

    def _join_waiting(self, cursor: Cursor) -> None:
        waiting, self._waiting = self._waiting, {}
        for topic_filter, grant in waiting.items():
            cursor.add_filter(topic_filter, grant)

    async def _read_due(self) -> None:
        """Read some of what is due from the log."""
        size = 0
        while len(self._ready) < READ_MESSAGES and size < READ_BYTES:
            if not self._due:
                if not self._retained:
                    break
                self._take_retained()
                await trio.lowlevel.checkpoint()
                continue
            due = self._due[0]
            record = await self._context.broker.store.known_record_far(due.position)
            if self._due and self._due[0] is due:  # it was not unsubscribed from meanwhile
                self._due.popleft()
                self._ready.append((due, record))
                size += len(record or b"")
        self._is_reading = False
        self._peer.wake()

    def _take_retained(self) -> None:
        """Find some retained messages that are due."""
        topic_filter, (matches, grant, end) = next(iter(self._retained.items()))
        retained = self._context.retained
        for _ in range(READ_MESSAGES):
            name = next(matches, None)
            if name is None:
                del self._retained[topic_filter]
            if not name:
                return
            position = retained.position(name)
            if 0 <= retained.origin(position) < end:
                self._due.append(Due(position, 0, grant))

    def _send_due(self, due: Due, record: bytes | None) -> int:
        """Send one message that is due; return its size."""
        number, session = due.number, self._session
        if number:
            self._unsent.discard(number & IDS_MAX)
            if session.flight.get(number) != due.position:
                return 0  # it was acknowledged meanwhile
        frame = b""
        if record is None:
            self._context.counters.removed += 1
        else:
            frame = self._frame_of(record, due)
        if number:
            self._send_again(number, frame)
        elif frame:
            self._number_and_send(bytearray(frame), [0], [due.position], session.position, RETAINED)
        return len(frame)

    def _frame_of(self, record: bytes, due: Due) -> bytes:
        _, _, sys_flag, body, properties = parts(record)[0]
        arrived = to_deliver(sys_flag, body, properties)
        if arrived is None or not self._the_cursor.may_read(arrived.name.decode()):
            return b""
        now_ms = self._context.broker.clock.now_ms()
        if due.grant is not None:
            if due.grant.selector and not self._choose((due.grant,))(RecordView(record)):
                return b""
            shape = self._context.shapes.of(self._version, (due.grant,))
            return self._fitting(encode_alone(arrived, shape, self._client_id, now_ms, retain=True))
        arrived.qos = 2 if due.number & TWICE else 1
        arrived.client_id = ""
        shape = self._shape(self._grants_of(arrived.name.decode(), arrived.qos, RecordView(record)))
        retain = bool(due.number & RETAINED)
        return self._fitting(encode_alone(arrived, shape, "", now_ms, retain=retain, expires=False))

    def _grants_of(self, name: str, qos: int, record: RecordView) -> tuple[Grant, ...]:
        """Return the subscriptions for which a message of *name* is sent again with *qos*, that of the first time."""
        if self._resent is None:
            self._resent = FilterTrie()
            for topic_filter, options in self._session.filters.items():
                shared = split_shared(topic_filter)
                inner = topic_filter if shared is None else shared.topic_filter
                self._resent.add(inner, shared is not None, grant_of(topic_filter, options))
        found = self._resent.match(name)
        own = self._chosen(cast("tuple[Grant, ...]", found.get(False) or ()), record)
        grants = own or self._chosen(cast("tuple[Grant, ...]", found.get(True) or ()), record)
        same = replace(grants[0].subscription, qos=qos) if grants else Subscription("", qos)
        return Grant(same, grants[0].identifier if grants else 0), *grants[1:]

    def _send_again(self, number: int, frame: bytes) -> None:
        packet_id = number & IDS_MAX
        if not frame:
            self._session.acknowledge(number)
            self._used.discard(packet_id)
            return
        data = bytearray(frame)
        number_frames(data, [0], [packet_id], DUPLICATE)
        self._peer.send(data)
        self._context.counters.delivered += 1

    def _shape(self, grants: tuple[Grant, ...]) -> Shape:
        return self._context.shapes.of(self._version, grants)

    def _shortened(self, frame: bytes) -> bytes:
        """Return *frame* with an alias, if aliases are in use and the client accepts what one may add."""
        if not frame or self._aliases is None or len(frame) + ALIAS_BYTES > self._packet_bytes_max:
            return frame
        return self._aliases.shorten(frame)

    def _fitting(self, frame: bytes) -> bytes:
        """Return *frame*; empty if it is larger than the client accepts [MQTT-3.1.2-24, MQTT-3.1.2-25]."""
        if len(frame) <= self._packet_bytes_max:
            return frame
        self._context.counters.oversize += 1
        return b""

    def _deliver_around(self, run: Run, grants: tuple[Grant, ...]) -> None:
        """Deliver *run*, whose first messages may be older than some of the subscriptions."""
        older = sum(position < self._fresh_from for position in run.positions())
        head, rest = run.split(older) if 0 < older < run.count else (run, run)
        if older:
            wanted = tuple(grant for grant in grants if grant.subscription.topic_filter not in self._fresh)
            if wanted:
                self._deliver(head, wanted)
        if older < run.count:
            self._fresh = frozenset()
            self._deliver(rest, grants)

    def _deliver(self, run: Run, grants: tuple[Grant, ...]) -> None:
        shape = self._shape(grants)
        if shape.selects:
            frames = self._selected(run, grants)
        else:
            frames = run.frames(shape.encoding)
            if not frames.is_whole or self._aliases is not None or len(frames.data) > self._packet_bytes_max:
                frames = self._one_by_one(run, frames, grants, shape)
        if not shape.qos:
            self._context.counters.delivered += run.count if frames.is_whole else len({0, *frames.ends}) - 1
            self._peer.send(frames.data)
            return
        data, ends, positions = frames.data, frames.ends, run.positions()
        first, count = 0, run.count
        while first < count:
            start = ends[first - 1] if first else 0
            if start == ends[first]:
                first += 1
                continue
            qos = data[start] & 6
            last = first + 1
            while last < count and ends[last] > ends[last - 1] and data[ends[last - 1]] & 6 == qos:
                last += 1
            if qos:
                starts = [start, *ends[first : last - 1]]
                end = positions[last] if last < count else run.end
                part = bytearray(data[start : ends[last - 1]])
                self._number_and_send(part, [each - start for each in starts], positions[first:last], end, 0)
            else:
                self._context.counters.delivered += last - first
                self._peer.send(data[start : ends[last - 1]])
            first = last

    def _number_and_send(
        self, data: bytearray, starts: Sequence[int], positions: Sequence[int], end: int, flags: int
    ) -> None:
        """Give the frames in *data* packet identifiers, note that they are in flight, and send them."""
        qos, count, session = data[0] >> 1 & 3, len(starts), self._session
        self._context.counters.delivered += count
        if not qos:
            self._peer.send(data)
            return
        base, at = flags | (TWICE if qos == 2 else 0), 0
        while at < count:
            first, taken = self._take_ids(count - at)
            last = at + taken
            number_frames(data, starts[at:last], range(first, first + taken))
            session.hand_out(base + first, positions[at:last], end if last == count else positions[last])
            at = last
        self._peer.hold_until(session.until)
        self._peer.send(data)

    def _take_ids(self, count: int) -> tuple[int, int]:
        """Return the next free packet identifier, and how many from there on are free, up to *count*; they are used."""
        used, first = self._used, self._next_id
        while first > IDS_MAX or first in used:
            first = first + 1 if first < IDS_MAX else 1
        last = first + 1
        while last < first + count and last <= IDS_MAX and last not in used:
            last += 1
        used.update(range(first, last))
        self._next_id = last
        return first, last - first

    def _one_by_one(self, run: Run, frames: Frames, grants: tuple[Grant, ...], shape: Shape) -> Frames:
        """Return the frames of a run of which some are not the same for all subscribers."""
        found: list[bytes] = []
        ends: list[int] = []
        records = parts(run.data) if not frames.is_whole else []
        now_ms, size, start = self._context.broker.clock.now_ms(), 0, 0
        for index, end in enumerate(frames.ends):
            frame = frames.data[start:end]
            if start == end:
                _, _, sys_flag, body, properties = records[index]
                frame = self._alone(sys_flag, body, properties, grants, shape, now_ms)
            start = end
            frame = self._shortened(self._fitting(frame))
            found.append(frame)
            size += len(frame)
            ends.append(size)
        return Frames(b"".join(found), ends, all(found))

    def _choose(self, grants: tuple[Grant, ...]) -> Callable[[RecordView], tuple[Grant, ...]]:
        return chooser(self._context.broker, grants)

    def _chosen(self, grants: tuple[Grant, ...], record: RecordView) -> tuple[Grant, ...]:
        """Return which of *grants* bring *record*."""
        return self._choose(grants)(record) if has_selector(grants) else grants

    def _selected(self, run: Run, grants: tuple[Grant, ...]) -> Frames:
        """Return the frames of a run, which selectors leave out some messages of."""
        found: list[bytes] = []
        choose, now_ms = self._choose(grants), self._context.broker.clock.now_ms()
        for record, (_, _, sys_flag, body, properties) in zip(run.records(), parts(run.data), strict=True):
            own, frame = choose(record), b""
            if own:
                frame = self._alone(sys_flag, body, properties, own, self._shape(own), now_ms)
                frame = self._shortened(self._fitting(frame))
            found.append(frame)
        return Frames(b"".join(found), list(accumulate(map(len, found))), all(found))

    def _alone(
        self, sys_flag: int, body: bytes, properties: bytes, grants: tuple[Grant, ...], shape: Shape, now_ms: int
    ) -> bytes:
        arrived = to_deliver(sys_flag, body, properties)
        if arrived is None:
            return b""
        if arrived.client_id == self._client_id:
            grants = tuple(grant for grant in grants if not grant.subscription.no_local)
            if not grants:
                return b""
            shape = self._shape(grants)
        if 0 < arrived.expires_ms <= now_ms:
            self._context.counters.expired += 1
            return b""
        return encode_alone(arrived, shape, self._client_id, now_ms)


def _is_droppable(grants: tuple[Hashable, ...]) -> bool:
    """Whether messages for *grants* may be dropped: all of them have QoS 0."""
    return not any(cast("Grant", grant).subscription.qos for grant in grants)


def _is_for(due: Due, topic_filter: str) -> bool:
    """Return whether a retained message is due for the subscription with *topic_filter*."""
    return due.grant is not None and due.grant.subscription.topic_filter == topic_filter
