"""Due messages: read from the log and sent before the messages of a client's cursor.

When a client returns, its messages in flight are sent again first, with DUP and their old identifiers (MQTT 5 section
4.4); then the cursor continues at the session's position. Retained messages are due when a subscription begins. The
session stores the progress, so the remaining ones follow on the next connection.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, cast, final

import trio
from msgspec.structs import replace

from martlet.access import Allowance
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

# Records read ahead for a client.
READ_MESSAGES: Final = 64
READ_BYTES: Final = 1 << 18
FILTER_US: Final = 16.0
PROPERTY_BYTES: Final = 64  # bytes that take as long as one unusual property
# Refusals of a progress note because the session has no room; the client may get some retained messages again.
NO_ROOM: Final = frozenset((Reason.ILLEGAL, Reason.BUSY))


class Wanted(NamedTuple):
    """The retained messages due for ``grant``: the first part of ``rest``."""

    grant: Grant
    rest: Rest


class Due(NamedTuple):
    """A message to read from the log and send before the cursor continues.

    A message in flight has its ``number`` and its log position. A retained message has its ``name``, and ``wanted`` for
    the subscription; its number is 0, and its position is 0 until it is read, and then its origin. An entry with an
    empty name marks the end of the retained messages of a subscription.
    """

    position: int
    number: int
    name: str = ""
    wanted: Wanted | None = None


@final
class DueMessages:
    """The due messages of one client; the caller sets ``may_read``, which returns whether it may read a name."""

    __slots__ = (
        "_allowance",
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

    def __init__(
        self,
        peer: Peer,
        context: Context,
        allowance: Allowance,
        session: Session,
        flight: Flight,
        frames: ClientFrames,
    ) -> None:
        self._allowance = allowance
        self.may_read: Callable[[str], bool] = lambda name: False
        self._peer = peer
        self._context = context
        self._session = session
        self._flight = flight
        self._frames = frames
        self._due: deque[Due] = deque()
        # By filter, the names of retained messages that are not in `_due` yet.
        self._retained: dict[str, tuple[Iterator[str], Wanted]] = {}
        self._ready: deque[tuple[Due, bytes | None]] = deque()
        self._is_reading = False
        # Names of retained messages in flight, by origin; computed once retention has moved one of them.
        self._moved: dict[int, str] | None = None
        # The subscriptions of the session, by filter, while messages are sent again.
        self._resent: RouteCache[bool] | None = None

    def __bool__(self) -> bool:
        """Whether any message is due."""
        return bool(self._due or self._ready or self._retained)

    def resend(self, number: int, position: int) -> None:
        """Send the message in flight as *number*, at *position*, again."""
        self._due.append(Due(position, number))

    def add_retained(self, grant: Grant, rest: Rest) -> None:
        """Send the first part of *rest* for *grant*."""
        topic_filter = grant.subscription.topic_filter
        self._retained[topic_filter] = self._context.retained.matches(topic_filter, rest.name), Wanted(grant, rest)
        self._peer.wake()

    def forget_retained(self, topic_filter: str) -> None:
        """Drop the retained messages that are due for *topic_filter*."""
        self._retained.pop(topic_filter, None)
        self._due = deque(due for due in self._due if not _is_for(due, topic_filter))
        self._ready = deque(each for each in self._ready if not _is_for(each[0], topic_filter))

    def collect(self, budget_bytes: int) -> int:
        """Send about *budget_bytes* of messages already read, and read more; return the bytes sent."""
        size = messages = message_bytes = 0
        last_sent = dict[str, Due]()
        messages_max, budget_bytes = self._allowance.room(READ_MESSAGES, budget_bytes)
        while self._ready and size < budget_bytes and messages < messages_max and self._flight.room() > 0:
            due, record = self._ready.popleft()
            if frame_bytes := self._send_due(due, record):
                messages += 1
                message_bytes += frame_bytes
            size += frame_bytes
            if record is not None:
                size += PROPERTY_BYTES * property_cost(record, 0)
            if due.wanted is not None:
                last_sent[due.wanted.grant.subscription.topic_filter] = due
        if messages:
            self._allowance.charge_out(messages, message_bytes)
        for topic_filter, due in last_sent.items():
            self._store_progress(topic_filter, due)
        if not self:
            self._resent = None
        elif not self._ready and not self._is_reading:
            self._is_reading = True
            self._peer.start(self._read_ahead)
        elif self._ready and (size >= budget_bytes or messages >= messages_max):
            self._peer.wake()
        return size

    async def _read_ahead(self) -> None:
        """Read some due messages from the log."""
        if self._resent is None and any(due.number for due in self._due):
            self._resent = await self._context.broker.turns.finish(self._index_filters())
        size, projections = 0, self._context.broker.projections
        while len(self._ready) < READ_MESSAGES and size < READ_BYTES:
            if not self._due:
                if not self._retained:
                    break
                await projections.wait_applied(self._context.retained, self._end_of_retained())
                self._queue_retained()
                await trio.lowlevel.checkpoint()
                continue
            due = self._due[0]
            entry = self._find_entry(due)
            record = await self._read_record(due, entry)
            if not self._due or self._due[0] is not due:
                continue  # the client unsubscribed meanwhile
            if record is None and self._find_entry(due) != entry:
                continue  # retention moved the record meanwhile
            self._due.popleft()
            if entry is not None:
                self._ready.append((due._replace(position=entry.origin), record))
            elif due.wanted is None or not due.name:
                self._ready.append((due, record))
            size += len(record or b"")
        self._is_reading = False
        self._peer.wake()

    async def _read_record(self, due: Due, entry: Entry | None) -> bytes | None:
        """Return the record of *due*, a message in flight or the retained message *entry*; None if there is none."""
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
        """Return the log position at which the next part of due retained messages ends; 0 if none are due."""
        return next((wanted.rest.end for _, wanted in self._retained.values()), 0)

    def _queue_retained(self) -> None:
        """Move the names of some retained messages to the due messages."""
        if not self._retained:
            return  # the client unsubscribed meanwhile
        topic_filter, (matches, wanted) = next(iter(self._retained.items()))
        for _ in range(READ_MESSAGES):
            name = next(matches, None)
            if name is None:
                del self._retained[topic_filter]
                self._due.append(Due(0, 0, "", wanted))
            if not name:
                return
            self._due.append(Due(0, 0, name, wanted))

    def _find_entry(self, due: Due) -> Entry | None:
        """Return the retained message of *due*; None if it is no longer due, or if *due* is in flight."""
        wanted, entry = due.wanted, self._context.retained.get(due.name)
        if wanted is None or entry is None:
            return None
        # The origin counts: the hidden copy follows the message directly, and a part may end between the two.
        return entry if wanted.rest.start < entry.origin <= wanted.rest.end else None

    def _send_due(self, due: Due, record: bytes | None) -> int:
        """Send one due message; return its size in bytes."""
        number = due.number
        if due.wanted is not None and not due.name:
            return 0
        if number and not self._flight.is_due(number, due.position):
            return 0  # the client acknowledged it meanwhile
        frame = b""
        if record is None:
            self._context.counters.removed += 1
        else:
            frame = self._encode(record, due)
        if number:
            self._send_again(number, frame)
        elif frame:
            self._flight.number_and_send(bytearray(frame), [0], [due.position], self._session.position, RETAINED)
        return len(frame)

    def _store_progress(self, topic_filter: str, due: Due) -> None:
        """Store the progress of retained messages in the session: sent up to *due*, or all if *due* marks their end."""
        options, wanted = self._session.filters.get(topic_filter, b""), due.wanted
        if wanted is None or rest_of(options) is None:
            return  # the session does not outlive the connection, or stores no progress of this filter
        rest: Rest | None = wanted.rest._replace(name=due.name)
        if not due.name:
            _, end, last_end, _ = wanted.rest
            rest = Rest(end, last_end, last_end) if last_end > end else None
        try:
            self._session.record_progress(topic_filter, options_of(grant_of(topic_filter, options), rest))
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

    def _encode(self, record: bytes, due: Due) -> bytes:
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
        """Return the filters of the session, with True for a shared subscription; in slices."""
        filters, budget = RouteCache[bool](), Budget(FILTER_US)
        for topic_filter, options in list(self._session.filters.items()):
            shared = split_shared(topic_filter)
            inner = topic_filter if shared is None else shared.topic_filter
            filters.add(inner, shared is not None, grant_of(topic_filter, options))
            if budget.is_over():
                yield
        return filters

    def _grants_of(self, name: str, qos: int, record: RecordView) -> tuple[Grant, ...]:
        """Return the subscriptions for which a message of *name* is sent again, with *qos* as at the first time."""
        assert self._resent is not None  # set before its record was read
        matching = self._resent.match(name)
        own = self._frames.chosen(cast("tuple[Grant, ...]", matching.get(False) or ()), record)
        grants = own or self._frames.chosen(cast("tuple[Grant, ...]", matching.get(True) or ()), record)
        subscription = replace(grants[0].subscription, qos=qos) if grants else FilterSubscription("", qos)
        return Grant(subscription, grants[0].identifier if grants else 0), *grants[1:]


def _is_for(due: Due, topic_filter: str) -> bool:
    """Return whether *due* is a retained message for the subscription with *topic_filter*."""
    return due.wanted is not None and due.wanted.grant.subscription.topic_filter == topic_filter
