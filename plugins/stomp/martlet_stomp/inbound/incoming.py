"""Messages from one client: SEND outside of transactions, and the receipts for it."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final
from zlib import crc32

from martlet.access import Gate
from martlet.contracts import Peer, Timers
from martlet.errors import MartletError, Refused
from martlet.message import TAGS, Message, encode_properties
from martlet.store import Queue
from martlet.store.append.items import AppendItem, AppendResult
from martlet_stomp.mapping.destinations import Destination, Kind
from martlet_stomp.mapping.messages import Template
from martlet_stomp.mapping.schedules import Removal
from martlet_stomp.shared.context import Context
from martlet_stomp.shared.replies import send_reply
from martlet_stomp.shared.round_runs import Part
from martlet_stomp.shared.storing import queue_count
from martlet_stomp.shared.temporary import is_temporary
from martlet_stomp.wire.codec import encode_receipts
from martlet_stomp.wire.connection import State, StompConnection
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import MessageHeaders, SendRun

__all__ = ["Incoming"]

TOPICS_REMEMBERED: Final = 1000


@final
class _Place(NamedTuple):
    """The queue and properties of messages with equal headers; ``tag_properties`` follow those of the template."""

    queue: Queue
    template: Template
    tag_properties: bytes
    is_wanted: bool  # a stage may want the messages
    reply_to: str

    @property
    def is_plain(self) -> bool:
        """Whether all records have the same properties, and no stage wants the messages."""
        return self.template.is_plain and not self.is_wanted


@final
class Incoming:
    """Stores the messages of one client."""

    __slots__ = ("_connection", "_context", "_gate", "_peer", "_queue_ids", "_reply_to", "_session", "waits")

    def __init__(
        self,
        peer: Peer,
        connection: StompConnection,
        context: Context,
        gate: Gate,
        session: str,
        reply_to: Callable[[Destination], str],
    ) -> None:
        """Begin without messages.

        Args:
          session: the client's session.
          reply_to: subscribes the client to a temporary destination, and returns its text for other clients.
        """
        self._peer = peer
        self._connection = connection
        self._context = context
        self._gate = gate
        self._session = session
        self._reply_to = reply_to
        # A client's messages stay in order: its messages of one topic go to one queue.
        self._queue_ids: dict[str, int] = {}
        self.waits = False  # whether a run waits in `RoundPublishes`

    def send_run(self, run: SendRun) -> None:
        """Store the messages of *run*, and answer receipts, at the end of the round.

        Raises `StompError` if a message cannot be stored.
        """
        context, publishes = self._context, self._context.broker.round_publishes
        if self.waits:
            publishes.finish()
            if self._connection.state is State.ENDED:
                return  # a message before these was refused
        context.counters.received += len(run.bodies)
        items = self._items_together(run)
        if items is None:
            publishes.finish()
            self._send_singly(run)
            return
        self.waits = True
        publishes.add(context.runs, Part(self, self._peer, self._gate, items, run), sum(map(len, run.bodies)))

    def answer_run(self, run: SendRun, result: AppendResult, begin: int) -> None:
        self.waits = False
        end, counters = begin + len(run.bodies), self._context.counters
        if not result.refused:
            counters.stored += len(run.bodies)
            if run.receipts:
                self._answer(run.receipts, result.ends[end - 1])
            return
        refused_indexes = [index - begin for index in sorted(result.refused) if begin <= index < end]
        counters.stored += len(run.bodies) - len(refused_indexes)
        index = refused_indexes[0] if refused_indexes else len(run.bodies)
        self._answer(run.receipts_before(index), result.ends[begin + index - 1])
        if refused_indexes:
            counters.errors += 1
            error = StompError(str(result.refused[begin + index]), run.receipt_of(index))
            self._peer.send(self._connection.farewell(error))
            self._peer.close(str(error))

    def lose_run(self, error: MartletError) -> None:
        self.waits = False
        self._peer.close(str(error))

    def _items_together(self, run: SendRun) -> list[AppendItem | Message] | None:
        """Return the items of *run* for `publish_all`; None if they must be published one by one.

        One message that is too large is such a case, because no message after it may be stored.
        """
        if max(map(len, run.bodies)) > self._context.broker.config.message_bytes_max:
            return None
        try:
            return self._items(run)
        except (Refused, StompError):
            return None

    def _items(self, run: SendRun) -> list[AppendItem | Message] | None:
        """Return the items of *run* as `_items_together`. Raises as `_place`."""
        find, headers, now_ms, host = self._context.templates.find, run.headers, self._now_ms, self._peer.host
        code_of = self._context.code_of
        items: list[AppendItem | Message] = []
        places: dict[MessageHeaders, _Place] = {}
        is_same = headers.count(headers[0]) == len(headers)
        for each in headers[:1] if is_same else dict.fromkeys(headers):
            place = self._place(find(each))
            if place is None:
                return None
            places[each] = place
        if is_same and places[headers[0]].is_plain:
            queue, template, tag_properties, _, _ = places[headers[0]]
            properties = template.properties + tag_properties
            code = code_of(properties)
            items += [(queue, body, properties, code, 0, 0, now_ms, host, 0, 0) for body in run.bodies]
            return items
        for each, body in zip(headers, run.bodies, strict=True):
            queue, template, tag_properties, is_wanted, reply_to = places[each]
            content, properties = template.record_of(body, now_ms, reply_to)
            properties += tag_properties
            if is_wanted:
                items.append(Message(queue.topic, content, properties, queue.queue_id, 0, 0, now_ms, host))
            else:
                items.append((queue, content, properties, code_of(properties), 0, 0, now_ms, host, 0, 0))
        return items

    def _place(self, template: Template) -> "_Place | None":
        """Return the place of messages of *template*; None if they must be published one by one.

        Raises:
          Refused: as for `_queue_id`.
          StompError: no plugin holds delayed messages, or the temporary destination is invalid.
        """
        if template.parts or template.removal is not None:
            return None
        self._check_delay(template)
        tag = None if template.destination.kind is Kind.REPLY else self._tag(template)
        if tag is None:
            return None
        topic, tag_properties = self._topic(template), _encode_tag(tag)
        queue_id = self._queue_ids.get(topic, -1) if not (template.name or tag or template.group) else -1
        find = self._gate.find_queue
        queue = find(topic, queue_id) or find(topic, self._queue_id(template, tag))
        if queue is None:
            return None
        is_wanted = self._context.broker.stages.may_want_properties(template.properties + tag_properties)
        return _Place(queue, template, tag_properties, is_wanted, self._resolve_reply_to(template))

    def _send_singly(self, run: SendRun) -> None:
        for index, body in enumerate(run.bodies):
            receipt = run.receipt_of(index)
            try:
                end = self._send_one(self._context.templates.find(run.headers[index]), body)
            except Refused as refused:
                raise StompError(str(refused), receipt) from refused
            except StompError as error:
                error.receipt = receipt
                raise
            if receipt is not None:
                self._answer((receipt,), end)

    def _send_one(self, template: Template, body: bytes) -> int:
        """Store a message, or drop it if its receiver is gone. Raises `StompError` and `Refused`."""
        if template.destination.kind is Kind.REPLY:
            reply_to = self._resolve_reply_to(template)
            return send_reply(self._context, self._gate, template, body, reply_to, self._peer.host)
        if template.parts:
            return self._send_to_all(template, body)
        if template.removal is not None:
            return self._remove(template.removal)
        message = self._record(template, body)
        if message is None:
            return 0
        location = self._gate.publish(message)
        self._context.counters.stored += 1
        return location.end

    def _send_to_all(self, template: Template, body: bytes) -> int:
        """Store a message in each destination of a list, or in none. Raises `StompError` and `Refused`."""
        result = self._gate.publish_all(self._records(template, body), atomic=True)
        self._context.counters.stored += len(result.ends)
        return result.end

    def _remove(self, removal: Removal) -> int:
        """End a repeated message, if it has not ended already. Raises `StompError` and `Refused`."""
        timers = self._context.broker.capability(Timers)
        if timers is None or timers.end_repeated is None:
            raise StompError("no plugin repeats messages; add timer to plugins.enabled")
        self._gate.check_publish(removal.topic)
        return timers.end_repeated(removal.topic, removal.key)

    def _answer(self, receipts: Sequence[bytes], end: int) -> None:
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.hold_until(end)
            self._peer.send(encode_receipts(receipts))

    # one message

    def messages(self, headers: MessageHeaders, body: bytes) -> list[Message]:
        """Return the messages to store, one for each destination; empty if the receiver is gone.

        Raises `StompError` and `Refused`.
        """
        template = self._context.templates.find(headers)
        if template.destination.kind is Kind.REPLY:
            text = "is a reply to another protocol, which cannot be in a transaction; send it without one"
            raise StompError(f"the message to {shown(template.destination.text)} {text}")
        return self._records(template, body)

    def _records(self, template: Template, body: bytes) -> list[Message]:
        parts = template.parts or (template,)
        return [message for part in parts if (message := self._record(part, body)) is not None]

    def _record(self, template: Template, body: bytes) -> Message | None:
        if template.removal is not None:
            text = "ends a repeated message; send that outside of transactions, and to no other destination"
            raise StompError(f"the message to {shown(template.destination.text)} {text}")
        self._check_delay(template)
        now_ms = self._now_ms
        content, properties = template.record_of(body, now_ms, self._resolve_reply_to(template))
        tag = self._tag(template)
        if tag is None:
            self._context.temporary.unanswered += 1
            return None
        properties += _encode_tag(tag)
        queue_id = self._queue_id(template, tag)
        return Message(self._topic(template), content, properties, queue_id, 0, 0, now_ms, self._peer.host)

    def _topic(self, template: Template) -> str:
        return template.destination.topic or self._context.temporary.topic

    def _tag(self, template: Template) -> str | None:
        """Return the tag of messages to a temporary destination; empty for other destinations.

        Returns None if the destination's connection is gone. Raises as `Temporary.tag_of`.
        """
        destination = template.destination
        return self._context.temporary.tag_of(destination, self._session) if is_temporary(destination.kind) else ""

    def _resolve_reply_to(self, template: Template) -> str:
        """Return the text for other clients of the temporary destination in reply-to; empty for none."""
        return self._reply_to(template.reply) if template.reply is not None else ""

    @property
    def _now_ms(self) -> int:
        return self._context.broker.clock.now_ms()

    def _queue_id(self, template: Template, tag: str) -> int:
        """Return the queue for messages of *template* with a *tag* from `_tag`; creates a missing topic.

        Raises `Refused` if the topic is missing and may not be created.
        """
        topic, name = self._topic(template), template.name or tag or template.group
        self._context.check_exists(template.destination, self._gate, "publish")
        count = queue_count(self._context, self._gate, topic)
        if name:
            return crc32(name.encode()) % count
        queue_id = self._queue_ids.get(topic, -1)
        if not 0 <= queue_id < count:
            if len(self._queue_ids) >= TOPICS_REMEMBERED:
                self._queue_ids.clear()
            queue_id = self._queue_ids[topic] = self._context.broker.ids.below(count)
        return queue_id

    def _check_delay(self, template: Template) -> None:
        if template.is_delayed and self._context.broker.capability(Timers) is None:
            text = "no plugin holds delayed messages; add timer to plugins.enabled, or send the message when it is due"
            raise StompError(f"{shown(template.destination.text)}: {text}")


def _encode_tag(tag: str) -> bytes:
    return encode_properties({TAGS: tag}) if tag else b""
