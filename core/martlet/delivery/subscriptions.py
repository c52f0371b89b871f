"""Subscriptions: a cursor, a selection and credit over the queues of a topic.

A subscription holds numbers, never messages: a slow subscriber, or one without credit, costs one cursor per queue. The
topic's tail reader wakes its peer when records with a wanted tag arrive. When the peer's socket has room, the server
calls the handler's `collect`, which calls `TopicSubscription.collect`. The subscription reads from the log in batches
and shares the encoded bytes with other readers at the tail (`fanout.py`).
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol, final

from martlet.contracts import Buffer, DeliveryLimit
from martlet.delivery.costly import cut_after_costly
from martlet.delivery.fanout import Batch, Encoding, Encodings, SharedTail
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.tail_reader import Tails
from martlet.errors import Reason, Refused
from martlet.settings import DeliveryConfig
from martlet.store import Queue, QueueReader, Store
from martlet.tables.topics import READ, Topic, Topics

__all__ = [
    "Delivery",
    "MemberPeer",
    "Subscriptions",
    "TopicSubscription",
    "collect_limited",
    "from_earliest",
    "from_offset",
    "from_tail",
]

# Messages that a call of `TopicSubscription.collect` returns; the last read may add as many. Encoding so many small
# messages takes 2 to 4 ms.
MESSAGES_A_COLLECT: Final = 1024

Start = Callable[[Queue], int]


def from_tail(queue: Queue) -> int:
    """Start at the end, with messages published from now on."""
    return queue.next_offset


def from_earliest(queue: Queue) -> int:
    """Start with the oldest message in the queue."""
    return queue.first_offset


def from_offset(offset: int) -> Start:
    """Start at *offset* of every queue, or at the nearest existing offset."""
    return lambda queue: min(max(offset, queue.first_offset), queue.next_offset)


class MemberPeer(Protocol):
    """The peer of a subscription, or of a member of a shared group; usually a `martlet.contracts.Peer`.

    A protocol with many subscriptions of one client passes an object for each, so that a wake names its subscription.
    """

    def wake(self) -> None:
        """Request a call of `TopicSubscription.collect` or `Member.collect`, soon."""
        ...

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run *work* in the background, as `Peer.start`."""
        ...


@final
class Delivery:
    """Encoded messages of one queue, ready to be sent.

    They are the ``count`` messages selected from offset ``first`` up to ``next``. ``delivery`` is above 1 if a shared
    group delivers them again, and ``generation`` is the group's part of their handles.
    """

    __slots__ = ("_batch", "count", "delivery", "first", "generation", "next", "queue_id")

    def __init__(
        self,
        queue_id: int,
        first: int,
        next_offset: int,
        count: int,
        batch: Batch,
        delivery: int = 1,
        generation: int = 0,
    ) -> None:
        self.generation = generation
        self.queue_id = queue_id
        self.first = first
        self.next = next_offset
        self.count = count
        self.delivery = delivery
        self._batch = batch

    @property
    def data(self) -> Buffer:
        """The frames of all messages, one after the other."""
        return self._batch.cut(self._batch.index(self.first), self.count)

    @property
    def frames(self) -> list[bytes]:
        """The frame of each message, for protocols that put bytes before each."""
        index = self._batch.index(self.first)
        return self._batch.frames[index : index + self.count]

    @property
    def size(self) -> int:
        """The size of all frames."""
        index = self._batch.index(self.first)
        return self._batch.ends[index + self.count - 1] - (self._batch.ends[index - 1] if index else 0)

    @property
    def offsets(self) -> Sequence[int]:
        """The offset of each message."""
        index = self._batch.index(self.first)
        return self._batch.offsets[index : index + self.count]

    @property
    def positions(self) -> Sequence[int]:
        """The log position of each message."""
        index = self._batch.index(self.first)
        return self._batch.positions[index : index + self.count]

    @property
    def ends(self) -> list[int]:
        """The end of each message's frame in ``data``."""
        index = self._batch.index(self.first)
        begin = self._batch.ends[index - 1] if index else 0
        return [end - begin for end in self._batch.ends[index : index + self.count]]


class Collecting(Protocol):
    """What collects messages for one client."""

    credit: int

    def collect_unlimited(self, budget_bytes: int) -> list[Delivery]: ...


def collect_limited(receiver: Collecting, limit: DeliveryLimit, budget_bytes: int) -> tuple[list[Delivery], bool]:
    """Return what *receiver* collects within *limit*, and whether it may have more, for which *limit* has no room now.

    Raises:
      Refused: as `Collecting.collect_unlimited`.
    """
    messages, budget_bytes = limit.room(receiver.credit, budget_bytes)
    kept_credit, receiver.credit = receiver.credit - messages, messages
    try:
        deliveries = receiver.collect_unlimited(budget_bytes)
    finally:
        is_full = receiver.credit <= 0
        receiver.credit += kept_credit
    if deliveries:
        limit.charge_out(sum([each.count for each in deliveries]), sum([each.size for each in deliveries]))
    return deliveries, is_full and kept_credit > 0


@final
class _QueueReading:
    """The reading state of one queue of one subscription."""

    __slots__ = ("cursor", "may_have_more", "queue", "tail")

    def __init__(self, queue: Queue, cursor: int, tail: SharedTail) -> None:
        self.queue = queue
        self.cursor = cursor
        self.tail = tail
        self.may_have_more = False


@final
class TopicSubscription:
    """One subscriber of one topic; created by `Subscriptions.open`.

    ``credit`` is the number of messages that may be sent; at 0 the subscription waits for `add_credit`. If the topic is
    deleted or no longer readable, ``gone`` is set and the peer is woken: the handler then tells its client and closes
    the subscription. ``limit`` is what the client's quotas allow; None if it has none.
    """

    __slots__ = (
        "_denied",
        "_failure",
        "_owner",
        "_permit",
        "_reader",
        "_readings",
        "_start",
        "_tail",
        "_to_read",
        "closed",
        "credit",
        "encoding",
        "gone",
        "limit",
        "peer",
        "selection",
        "topic",
    )

    def __init__(
        self,
        owner: "Subscriptions",
        peer: MemberPeer,
        topic: Topic,
        encoding: Encoding,
        selection: Selection,
        start: Start,
        credit: int,
        permit: Callable[[], None] | None,
    ) -> None:
        self._owner = owner
        self._permit = permit
        self.limit: DeliveryLimit | None = None
        self.peer = peer
        self.topic = topic
        self.encoding = encoding
        self.selection = selection
        self._start = start
        self.credit = credit
        self.gone = False
        self.closed = False
        self._readings: dict[int, _QueueReading] = {}
        self._to_read: deque[_QueueReading] = deque()
        self._tail = owner.tails.of(topic)
        self._reader = QueueReader(owner.store.readers, self._wake_peer, 1)
        self._failure: Refused | None = None
        self._denied: Refused | None = None  # what `recheck` found

    def cursor(self, queue_id: int) -> int:
        """Return the offset of the next message from that queue; -1 if there is no such queue."""
        reading = self._readings.get(queue_id)
        return reading.cursor if reading is not None else -1

    def add_credit(self, count: int) -> None:
        """Allow *count* more messages, and wake the peer if some are waiting."""
        self.credit += count
        if self._to_read and self.credit > 0:
            self.peer.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Return the messages to send now: at most ``credit`` messages and about *budget_bytes*; reduces ``credit`` by
        their number.

        Call it in `Handler.collect`. It wakes the peer again if there is more to send.

        Raises:
          Refused: the filter failed, or reading is no longer allowed; close the subscription.
        """
        if self.limit is None or not self.limit.applies:
            return self.collect_unlimited(budget_bytes)
        deliveries, may_have_more = collect_limited(self, self.limit, budget_bytes)
        if may_have_more and self._to_read:
            self.peer.wake()
        return deliveries

    def collect_unlimited(self, budget_bytes: int) -> list[Delivery]:
        """As `collect`, whatever the client's quotas are."""
        if self._denied is not None:
            raise self._denied
        if self._permit is not None:
            self._permit()
        if self._failure is not None:
            raise self._failure
        deliveries: list[Delivery] = []
        to_read = self._to_read
        empty_reads, messages_left = 0, MESSAGES_A_COLLECT
        while empty_reads < len(to_read) and self.credit > 0 and budget_bytes > 0 and messages_left > 0:
            reading = to_read.popleft()
            try:
                delivery = self._read_queue(reading, budget_bytes)
            except Refused as refused:
                self._failure = refused
                if not deliveries:
                    raise
                self.peer.wake()
                return deliveries
            if reading.may_have_more:
                to_read.append(reading)
                empty_reads += 1
            if delivery is not None:
                deliveries.append(delivery)
                self.credit -= delivery.count
                budget_bytes -= delivery.size
                messages_left -= delivery.count
                empty_reads = 0
        # Queues that were not asked do not wait for the reader.
        if to_read and self.credit > 0 and (empty_reads < len(to_read) or not self._reader.must_wait):
            self.peer.wake()
        return deliveries

    def recheck(self) -> None:
        """Wake the peer if it may no longer read: `collect` refuses it. Called after a change of the rules."""
        self._denied = None
        try:
            if self._permit is not None:
                self._permit()
        except Refused as refused:
            self._denied = refused
            self.peer.wake()

    def _wake_peer(self, key: Hashable) -> None:
        self.peer.wake()

    def arrived_at(self, queue: Queue) -> None:
        """Handle new readable records of *queue* that may be selected."""
        reading = self._readings.get(queue.queue_id)
        if reading is not None and reading.queue is queue:
            self._queue_reading(reading)

    def _queue_reading(self, reading: _QueueReading) -> None:
        if not reading.may_have_more:
            reading.may_have_more = True
            self._to_read.append(reading)
        if self.credit > 0:
            self.peer.wake()

    def close(self) -> None:
        """End the subscription; call it in `Handler.closed` at the latest."""
        if not self.closed:
            self.closed = True
            self._reader.close()
            self._owner.forget(self)
            self._tail.leave(self)
            for reading in self._readings.values():
                self._owner.encodings.leave(reading.tail)
            self._readings.clear()
            self._to_read.clear()

    def listen(self) -> None:
        """Wake the peer when records become readable that may be selected."""
        self._tail.listen(self)

    def follow(self, topic: Topic, *, new: bool = False) -> None:
        """Read all queues that *topic* has now, new queues from their beginning."""
        self.topic = topic
        for queue_id in range(topic.read_queues):
            if queue_id not in self._readings:
                queue = topic.queue(queue_id)
                self._add(queue, self._start(queue) if new else topic.beginning_of(queue))

    def _add(self, queue: Queue, cursor: int) -> None:
        tail = self._owner.encodings.join(queue, self.encoding, self.selection)
        reading = self._readings[queue.queue_id] = _QueueReading(queue, cursor, tail)
        if cursor < queue.next_offset:
            self._queue_reading(reading)

    def _read_queue(self, reading: _QueueReading, budget_bytes: int) -> Delivery | None:
        """Advance the cursor of *reading* over the messages that fit, and update ``may_have_more``."""
        reading.cursor = max(reading.cursor, reading.queue.first_offset)  # a batch in memory may have expired
        batch = reading.tail.find(reading.cursor)
        if batch is None:
            batch = self._read_batch(reading, budget_bytes)
            if batch is None:
                return None
        else:
            self._reader.forget(reading)
        first = reading.cursor
        count, reading.cursor = batch.span(first, self.credit, budget_bytes)
        reading.may_have_more = reading.cursor < reading.queue.next_offset
        return Delivery(reading.queue.queue_id, first, reading.cursor, count, batch) if count else None

    def _read_batch(self, reading: _QueueReading, budget_bytes: int) -> Batch | None:
        selection, queue = self.selection, reading.queue
        count = min(self.credit, MESSAGES_A_COLLECT)
        result = self._reader.read(
            self.peer.start, reading, queue, reading.cursor, count, budget_bytes, selection.codes, selection.predicate
        )
        if result is None:
            return None
        if result.next_offset <= reading.cursor:
            # At the end of the readable records; `arrived_at` is called when more follow. The cursor is only beyond the
            # end if the queue was recreated.
            reading.cursor = min(reading.cursor, queue.next_offset)
            reading.may_have_more = False
            return None
        if not result.count:
            reading.cursor = result.next_offset
            reading.may_have_more = reading.cursor < queue.next_offset
            return None
        cut_after_costly(result)
        return reading.tail.encode(result, reading.cursor)


def is_readable(topic: Topic) -> bool:
    """Return whether *topic* is readable and has queues for readers."""
    return bool(topic.perm & READ) and topic.read_queues > 0


def readable(topics: Topics, name: str) -> Topic:
    """Return topic *name*, which must be readable. Raises `Refused`."""
    topic = topics.get(name)
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{name}] does not exist; create it, or publish to it first")
    if not is_readable(topic):
        text = f"topic[{name}] is not readable; its perm is {topic.perm} with {topic.read_queues} read queues"
        raise Refused(Reason.NO_PERMISSION, text)
    return topic


@final
class Subscriptions:
    """All subscriptions of a broker; keeps them up to date with the topic table."""

    def __init__(self, store: Store, topics: Topics, tails: Tails, config: DeliveryConfig) -> None:
        self.store = store
        self.tails = tails
        self._topics = topics
        self._config = config
        self.encodings = Encodings(config.encoded_bytes)
        self._by_topic: dict[str, dict[TopicSubscription, None]] = {}
        self._count = 0
        topics.changed.append(self._topic_changed)
        topics.deleted.append(self._topic_deleted)

    def open(
        self,
        peer: MemberPeer,
        topic: str,
        encoding: Encoding,
        *,
        selection: Selection = EVERYTHING,
        start: Start = from_tail,
        credit: int = 0,
        permit: Callable[[], None] | None = None,
    ) -> TopicSubscription:
        """Return a new subscription of *peer* to all queues of *topic*.

        Args:
          peer: woken when there is something to collect.
          topic: its name; it must exist.
          encoding: encodes records into frames.
          selection: selects the messages for the peer.
          start: where to begin in each queue: `from_tail`, `from_earliest` or `from_offset`.
          credit: the number of messages that may be sent before `TopicSubscription.add_credit` is called.
          permit: raises `Refused` if the peer may not read any more; called at each collect.

        Raises:
          Refused: there is no such topic, it is not readable, or there are too many subscriptions.
        """
        readable_topic = readable(self._topics, topic)
        limit = self._config.subscriptions_max
        if self._count >= limit:
            raise Refused(Reason.BUSY, f"{limit} subscriptions are open; delivery.subscriptions_max is {limit}")
        subscription = TopicSubscription(self, peer, readable_topic, encoding, selection, start, credit, permit)
        self._by_topic.setdefault(topic, {})[subscription] = None
        self._count += 1
        subscription.listen()
        subscription.follow(readable_topic, new=True)
        return subscription

    def waiting(self) -> Iterator[TopicSubscription]:
        """Yield all subscriptions; more may be opened and closed meanwhile."""
        for table in list(self._by_topic.values()):
            for subscription in list(table):
                if not subscription.closed:
                    yield subscription

    def forget(self, subscription: TopicSubscription) -> None:
        """Remove *subscription*, which was closed."""
        name = subscription.topic.name
        table = self._by_topic[name]
        del table[subscription]
        self._count -= 1
        if not table:
            del self._by_topic[name]

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is None:
            return
        for subscription in list(self._by_topic.get(topic.name, ())):
            if subscription.topic.queues is topic.queues:  # otherwise the topic was deleted, and the subscription ends
                subscription.follow(topic)
                subscription.gone = not is_readable(topic)
                if subscription.gone:
                    subscription.peer.wake()

    def _topic_deleted(self, name: str) -> None:
        for subscription in self._by_topic.get(name, ()):
            subscription.gone = True
            subscription.peer.wake()

    def statistics(self) -> dict[str, object]:
        return {"subscriptions": self._count, "encoded_bytes": self.encodings.kept_bytes}
