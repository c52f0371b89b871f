"""Messages from one client: SEND outside of transactions, and the receipts for it."""

from collections.abc import Callable, Sequence
from typing import Final, final
from zlib import crc32

from martlet.access import Gate
from martlet.contracts import Peer, Timers
from martlet.errors import Refused
from martlet.message import TAGS, Message, encode_properties
from martlet.store import Queue
from martlet.store.writer import RunItem, RunResult

from .codec import encode_receipts
from .context import Context
from .destinations import Destination, Kind
from .errors import StompError, shown
from .messages import Template
from .packets import MessageHeaders, SendRun
from .replies import send_reply
from .storing import find_queue_id, queue_count
from .temporary import is_temporary

__all__ = ["Sending"]

TOPICS_REMEMBERED: Final = 1000


@final
class Sending:
    """Stores what one client sends."""

    __slots__ = ("_context", "_gate", "_peer", "_queue_ids", "_reply_to", "_session")

    def __init__(
        self, peer: Peer, context: Context, gate: Gate, session: str, reply_to: Callable[[Destination], str]
    ) -> None:
        """Begin.

        Args:
          session: of the client.
          reply_to: returns what others call a temporary destination of the client, which then subscribes to it.
        """
        self._peer = peer
        self._context = context
        self._gate = gate
        self._session = session
        self._reply_to = reply_to
        # A client's messages stay in order: its messages of one topic go to one queue.
        self._queue_ids: dict[str, int] = {}

    def send_run(self, run: SendRun) -> None:
        """Store the messages of *run*, and answer receipts. Raises `StompError` if one cannot be stored."""
        self._context.counters.received += len(run.bodies)
        result = self._store(run)
        if result is None:
            self._send_singly(run)
            return
        self._context.counters.stored += len(run.bodies) - len(result.refused)
        if result.refused:
            first = min(result.refused)
            self._answer([run.receipts[place] for place, at in enumerate(run.asking) if at < first], result.end)
            raise StompError(str(result.refused[first]), run.receipt_of(first)) from result.refused[first]
        if run.receipts:
            self._answer(run.receipts, result.end)

    def _store(self, run: SendRun) -> RunResult | None:
        """Store all messages of *run*; None, and none is stored, if they must be published one by one."""
        try:
            items = self._items(run)
            return self._gate.publish_run(items) if items is not None else None
        except (Refused, StompError):
            return None

    def _items(self, run: SendRun) -> list[RunItem | Message] | None:
        """Return *run* as the store takes it; None if it must be published one by one. Raises as `_queue`."""
        find, headers, now_ms, host = self._context.templates.find, run.headers, self._now_ms, self._peer.host
        items: list[RunItem | Message] = []
        if headers.count(headers[0]) == len(headers):
            template = find(headers[0])
            queue, is_wanted = self._queue(template), self._is_wanted(template)
            if queue is None:
                return None
            if template.is_plain and not is_wanted:
                properties, code = template.properties, self._context.code_of(template.properties)
                items += [(queue, body, properties, code, 0, 0, now_ms, host, 0, 0) for body in run.bodies]
                return items
        places: dict[MessageHeaders, tuple[Template, Queue, bool, str]] = {}
        for each in dict.fromkeys(headers):
            template = find(each)
            queue = self._queue(template)
            if queue is None:
                return None
            places[each] = template, queue, self._is_wanted(template), self._answered_at(template)
        for each, body in zip(headers, run.bodies, strict=True):
            template, queue, is_wanted, reply_to = places[each]
            content, properties = template.record_of(body, now_ms, reply_to)
            if is_wanted:
                items.append(Message(queue.topic, content, properties, queue.queue_id, 0, 0, now_ms, host))
            else:
                code = self._context.code_of(properties)
                items.append((queue, content, properties, code, 0, 0, now_ms, host, 0, 0))
        return items

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
        """Store a message, or drop it if nobody can get it. Raises `StompError` and `Refused`."""
        if template.destination.kind is Kind.REPLY:
            reply_to = self._answered_at(template)
            return send_reply(self._context, self._gate, template, body, reply_to, self._peer.host)
        message = self._record(template, body)
        if message is None:
            return 0
        placed = self._gate.publish(message)
        self._context.counters.stored += 1
        return placed.end

    def _answer(self, receipts: Sequence[bytes], end: int) -> None:
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.hold_until(end)
            self._peer.send(encode_receipts(receipts))

    # one message

    def message(self, headers: MessageHeaders, body: bytes) -> Message | None:
        """Return the message to store; None if nobody can get it. Raises `StompError` and `Refused`."""
        template = self._context.templates.find(headers)
        if template.destination.kind is Kind.REPLY:
            text = "is a reply to another protocol, which cannot be in a transaction; send it without one"
            raise StompError(f"the message to {shown(template.destination.text)} {text}")
        return self._record(template, body)

    def _record(self, template: Template, body: bytes) -> Message | None:
        self._check_delay(template)
        destination, context, now_ms = template.destination, self._context, self._now_ms
        content, properties = template.record_of(body, now_ms, self._answered_at(template))
        if not is_temporary(destination.kind):
            queue_id = self._queue_id(template)
            return Message(destination.topic, content, properties, queue_id, 0, 0, now_ms, self._peer.host)
        tag = context.temporary.tag_of(destination, self._session)
        if tag is None:
            context.temporary.unanswered += 1
            return None
        properties += encode_properties({TAGS: tag})
        topic = context.temporary.topic
        queue_id = find_queue_id(context, self._gate, topic, tag)
        return Message(topic, content, properties, queue_id, 0, 0, now_ms, self._peer.host)

    def _answered_at(self, template: Template) -> str:
        """Return what others call the temporary destination where the client waits for an answer; empty for none."""
        return self._reply_to(template.reply) if template.reply is not None else ""

    @property
    def _now_ms(self) -> int:
        return self._context.broker.clock.now_ms()

    def _is_wanted(self, template: Template) -> bool:
        """Return whether a stage may want messages of *template*."""
        return self._context.broker.stages.may_want_properties(template.properties)

    def _queue(self, template: Template) -> Queue | None:
        """Return the queue for messages of *template*; None if they must be published one by one.

        Raises:
          Refused: as for `_queue_id`.
          StompError: no plugin holds delayed messages.
        """
        self._check_delay(template)
        if not template.destination.kind.is_stored:
            return None
        topic = template.destination.topic
        queue_id = self._queue_ids.get(topic, -1) if not template.destination.name else -1
        return self._gate.find_queue(topic, queue_id) or self._gate.find_queue(topic, self._queue_id(template))

    def _queue_id(self, template: Template) -> int:
        """Return the queue of the topic for messages of *template*; the topic is created if there is none.

        Raises `Refused` if there is no such topic, and it may not be created.
        """
        topic, name = template.destination.topic, template.destination.name
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
