"""Messages that precede those of a client's cursor: messages sent again and retained ones, read from the log.

When a client comes back, what is in flight is sent first, with DUP and the identifiers of before (MQTT 5 section 4.4);
then the cursor continues where the session is. Retained messages are due when a subscription begins. A session knows
how far they were sent, so that the rest follows on another connection.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, cast, final

import trio
from msgspec.structs import replace

from martlet.contracts import Peer, RecordView
from martlet.delivery.costly import property_cost
from martlet.delivery.fanout import parts
from martlet.delivery.routing.route_cache import RouteCache
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.sessions.session import Session
from martlet_mqtt.mapping.frames import DUPLICATE, Grant, encode_alone, number_frames
from martlet_mqtt.mapping.messages import to_deliver
from martlet_mqtt.outbound.client_frames import ClientFrames
from martlet_mqtt.outbound.flight import IDS_MAX, QOS2, RETAINED, Flight
from martlet_mqtt.outbound.stored_subscriptions import Rest, grant_of, options_of, rest_of
from martlet_mqtt.shared.context import Context
from martlet_mqtt.shared.retained import Entry
from martlet_mqtt.wire.names import split_shared
from martlet_mqtt.wire.packets import FilterSubscription

__all__ = ["DueMessages"]

# Records that are read at once for a client.
READ_MESSAGES: Final = 64
READ_BYTES: Final = 1 << 18
FILTER_US: Final = 16.0
PROPERTY_BYTES: Final = 64  # a property beyond the usual ones takes as long as so many bytes
# The session has no room for the name up to which retained messages were sent; it may get some of them again.
NO_ROOM: Final = frozenset((Reason.ILLEGAL, Reason.BUSY))


class Wanted(NamedTuple):
    """Retained messages that are due for ``grant``: the first part of ``rest``."""

    grant: Grant
    rest: Rest


class Due(NamedTuple):
    """A message to read from the log and send before the cursor goes on.

    It is in flight already as ``number``; or it is what is ``wanted`` of the retained message of ``name``, and number
    and position are 0 until it is read. The position of a retained message is where it was published. After all that is
    wanted, one follows without a name.
    """

    position: int
    number: int
    name: str = ""
    wanted: Wanted | None = None


@final
class DueMessages:
    """The due messages of one client; ``may_read`` tells whether it may get messages of a name, and is set first."""

    __slots__ = (
        "_context",
        "_due",
        "_flight",
        "_frames",
        "_is_reading",
        "_moved",
        "_peer",
        "_ready",
        "_resent",
        "_retained",
        "_session",
        "may_read",
    )

    def __init__(self, peer: Peer, context: Context, session: Session, flight: Flight, frames: ClientFrames) -> None:
        self.may_read: Callable[[str], bool] = lambda name: False
        self._peer = peer
        self._context = context
        self._session = session
        self._flight = flight
        self._frames = frames
        self._due: deque[Due] = deque()
        # By filter, the names with retained messages that are due after these.
        self._retained: dict[str, tuple[Iterator[str], Wanted]] = {}
        self._ready: deque[tuple[Due, bytes | None]] = deque()
        self._is_reading = False
        # The names of retained messages in flight, by where they were published; known once retention has moved one.
        self._moved: dict[int, str] | None = None
        # The subscriptions of the session, by filter, as long as messages are sent again for them.
        self._resent: RouteCache[bool] | None = None

    def __bool__(self) -> bool:
        """Whether something is due."""
        return bool(self._due or self._ready or self._retained)

    def resend(self, number: int, position: int) -> None:
        """Send the message at *position* again, which is in flight as *number*."""
        self._due.append(Due(position, number))

    def add_retained(self, grant: Grant, rest: Rest) -> None:
        """Send the first part of *rest* for *grant*."""
        topic_filter = grant.subscription.topic_filter
        self._retained[topic_filter] = self._context.retained.matches(topic_filter, rest.name), Wanted(grant, rest)
        self._peer.wake()

    def forget_retained(self, topic_filter: str) -> None:
        """Do not send retained messages for *topic_filter* that are due."""
        self._retained.pop(topic_filter, None)
        self._due = deque(due for due in self._due if not _is_for(due, topic_filter))
        self._ready = deque(each for each in self._ready if not _is_for(each[0], topic_filter))

    def collect(self, budget_bytes: int) -> int:
        """Send about *budget_bytes* of what was read, and read more; return how many bytes."""
        size, sent = 0, dict[str, Due]()
        while self._ready and size < budget_bytes and self._flight.room() > 0:
            due, record = self._ready.popleft()
            size += self._send(due, record)
            if record is not None:
                size += PROPERTY_BYTES * property_cost(record, 0)
            if due.wanted is not None:
                sent[due.wanted.grant.subscription.topic_filter] = due
        for topic_filter, due in sent.items():
            self._note_sent(topic_filter, due)
        if not self:
            self._resent = None
        elif not self._ready and not self._is_reading:
            self._is_reading = True
            self._peer.start(self._read)
        elif self._ready and size >= budget_bytes:
            self._peer.wake()
        return size

    async def _read(self) -> None:
        """Read some of what is due from the log."""
        if self._resent is None and any(due.number for due in self._due):
            self._resent = await self._context.broker.turns.finish(self._index_filters())
        size, projections = 0, self._context.broker.projections
        while len(self._ready) < READ_MESSAGES and size < READ_BYTES:
            if not self._due:
                if not self._retained:
                    break
                await projections.wait_applied(self._context.retained, self._end_of_retained())
                self._take_retained()
                await trio.lowlevel.checkpoint()
                continue
            due = self._due[0]
            entry = self._entry_of(due)
            record = await self._record_of(due, entry)
            if not self._due or self._due[0] is not due:
                continue  # it was unsubscribed from meanwhile
            if record is None and self._entry_of(due) != entry:
                continue  # retention has moved it meanwhile
            self._due.popleft()
            if entry is not None:
                self._ready.append((due._replace(position=entry.origin), record))
            elif due.wanted is None or not due.name:
                self._ready.append((due, record))
            size += len(record or b"")
        self._is_reading = False
        self._peer.wake()

    async def _record_of(self, due: Due, entry: Entry | None) -> bytes | None:
        """Read the record of *due*, whose retained message is *entry*; None if there is none."""
        store, retained = self._context.broker.store, self._context.retained
        if due.wanted is not None:
            return await store.lookup.known_record_far(entry.position) if entry is not None else None
        record = await store.lookup.known_record_far(due.position)
        if record is not None and not due.number & RETAINED and store.upkeep.topic_retention.has_expired(record):
            return None
        if record is not None or not due.number & RETAINED:
            return record
        if self._moved is None:
            origins = {position for number, position in self._session.flight.items() if number & RETAINED}
            self._moved = await self._context.broker.turns.finish(retained.find_origins(origins))
        entry = retained.get(self._moved.get(due.position, ""))
        return await store.lookup.known_record_far(entry.position) if entry and entry.origin == due.position else None

    def _end_of_retained(self) -> int:
        """Return the log position before which the next retained messages that are due were published."""
        return next((wanted.rest.end for _, wanted in self._retained.values()), 0)

    def _take_retained(self) -> None:
        """Find some retained messages that are due."""
        if not self._retained:
            return  # all were unsubscribed from meanwhile
        topic_filter, (matches, wanted) = next(iter(self._retained.items()))
        for _ in range(READ_MESSAGES):
            name = next(matches, None)
            if name is None:
                del self._retained[topic_filter]
                self._due.append(Due(0, 0, "", wanted))
            if not name:
                return
            self._due.append(Due(0, 0, name, wanted))

    def _entry_of(self, due: Due) -> Entry | None:
        """Return the retained message that is due; None if it is not due any more, or in flight."""
        wanted, entry = due.wanted, self._context.retained.get(due.name)
        if wanted is None or entry is None:
            return None
        # It was published right before its record among the retained ones, so if the end is between them, it is due.
        return entry if wanted.rest.start < entry.origin <= wanted.rest.end else None

    def _send(self, due: Due, record: bytes | None) -> int:
        """Send one message that is due; return its size."""
        number = due.number
        if due.wanted is not None and not due.name:
            return 0
        if number and not self._flight.is_due(number, due.position):
            return 0  # it was acknowledged meanwhile
        frame = b""
        if record is None:
            self._context.counters.removed += 1
        else:
            frame = self._frame_of(record, due)
        if number:
            self._send_again(number, frame)
        elif frame:
            self._flight.number_and_send(bytearray(frame), [0], [due.position], self._session.position, RETAINED)
        return len(frame)

    def _note_sent(self, topic_filter: str, due: Due) -> None:
        """Note how far retained messages were sent: up to *due*, which may be the last one."""
        stored, wanted = self._session.filters.get(topic_filter, b""), due.wanted
        if wanted is None or rest_of(stored) is None:
            return  # the session does not outlive the connection, or need not know
        rest: Rest | None = wanted.rest._replace(name=due.name)
        if not due.name:
            _, end, last, _ = wanted.rest
            rest = Rest(end, last, last) if last > end else None
        try:
            self._session.record_progress(topic_filter, options_of(grant_of(topic_filter, stored), rest))
        except Refused as refused:
            if refused.reason not in NO_ROOM:
                raise

    def _send_again(self, number: int, frame: bytes) -> None:
        if not frame:
            self._flight.drop(number)
            return
        data = bytearray(frame)
        number_frames(data, [0], [number & IDS_MAX], DUPLICATE)
        self._peer.send(data)
        self._context.counters.delivered += 1

    def _frame_of(self, record: bytes, due: Due) -> bytes:
        _, _, sys_flag, body, properties = parts(record)[0]
        arrived = to_deliver(sys_flag, body, properties, self._context.broker.delivered_bytes_max)
        if arrived is None:
            self._context.counters.unreadable += 1
            return b""
        name = self._context.names.learn(arrived.name)
        if name is None or not self.may_read(name.text):
            return b""
        frames, now_ms = self._frames, self._context.broker.clock.now_ms()
        if due.wanted is not None:
            grants = (due.wanted.grant,)
            if not frames.chosen(grants, RecordView(record)):
                return b""
            return frames.fitting(encode_alone(arrived, frames.shape(grants), frames.client_id, now_ms, retain=True))
        arrived.qos = 2 if due.number & QOS2 else 1
        arrived.client_id = ""
        shape = frames.shape(self._grants_of(name.text, arrived.qos, RecordView(record)))
        retain = bool(due.number & RETAINED)
        return frames.fitting(encode_alone(arrived, shape, "", now_ms, retain=retain, expires=False))

    def _index_filters(self) -> Steps[RouteCache[bool]]:
        """Return the filters of the session, by whether they are shared, in slices."""
        found, budget = RouteCache[bool](), Budget(FILTER_US)
        for topic_filter, options in list(self._session.filters.items()):
            shared = split_shared(topic_filter)
            inner = topic_filter if shared is None else shared.topic_filter
            found.add(inner, shared is not None, grant_of(topic_filter, options))
            if budget.is_over():
                yield
        return found

    def _grants_of(self, name: str, qos: int, record: RecordView) -> tuple[Grant, ...]:
        """Return the subscriptions for which a message of *name* is sent again with *qos*, that of the first time."""
        assert self._resent is not None  # since its record was read
        found = self._resent.match(name)
        own = self._frames.chosen(cast("tuple[Grant, ...]", found.get(False) or ()), record)
        grants = own or self._frames.chosen(cast("tuple[Grant, ...]", found.get(True) or ()), record)
        same = replace(grants[0].subscription, qos=qos) if grants else FilterSubscription("", qos)
        return Grant(same, grants[0].identifier if grants else 0), *grants[1:]


def _is_for(due: Due, topic_filter: str) -> bool:
    """Return whether a retained message is due for the subscription with *topic_filter*."""
    return due.wanted is not None and due.wanted.grant.subscription.topic_filter == topic_filter
