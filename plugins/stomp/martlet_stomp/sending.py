"""Messages from one client: SEND outside of transactions, and the receipts for it."""

from collections.abc import Sequence
from typing import Final, final
from zlib import crc32

from martlet.access import Gate
from martlet.contracts import Peer, Timers
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.store import Queue
from martlet.store.writer import RunItem, RunResult

from .codec import encode_receipts
from .context import Context
from .errors import StompError, shown
from .messages import Template
from .packets import MessageHeaders, SendRun

__all__ = ["Sending"]

TOPICS_REMEMBERED: Final = 1000


@final
class Sending:
    """Stores what one client sends."""

    __slots__ = ("_context", "_gate", "_peer", "_queue_ids")

    def __init__(self, peer: Peer, context: Context, gate: Gate) -> None:
        self._peer = peer
        self._context = context
        self._gate = gate
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
        places: dict[MessageHeaders, tuple[Template, Queue, bool]] = {}
        for each in dict.fromkeys(headers):
            template = find(each)
            queue = self._queue(template)
            if queue is None:
                return None
            places[each] = template, queue, self._is_wanted(template)
        for each, body in zip(headers, run.bodies, strict=True):
            template, queue, is_wanted = places[each]
            content, properties = template.record_of(body, now_ms)
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
                placed = self._gate.publish(self.message(run.headers[index], body))
            except Refused as refused:
                raise StompError(str(refused), receipt) from refused
            except StompError as error:
                error.receipt = receipt
                raise
            self._context.counters.stored += 1
            if receipt is not None:
                self._answer((receipt,), placed.end)

    def _answer(self, receipts: Sequence[bytes], end: int) -> None:
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.hold_until(end)
            self._peer.send(encode_receipts(receipts))

    # one message

    def message(self, headers: MessageHeaders, body: bytes) -> Message:
        """Return the message to store. Raises `StompError`, and `Refused` if it may not be stored."""
        template, now_ms = self._context.templates.find(headers), self._now_ms
        queue_id = self._queue_id(template)
        content, properties = template.record_of(body, now_ms)
        return Message(template.destination.topic, content, properties, queue_id, 0, 0, now_ms, self._peer.host)

    @property
    def _now_ms(self) -> int:
        return self._context.broker.clock.now_ms()

    def _is_wanted(self, template: Template) -> bool:
        """Return whether a stage may want messages of *template*."""
        return self._context.broker.stages.may_want_properties(template.properties)

    def _queue(self, template: Template) -> Queue | None:
        """Return the queue for messages of *template*; None if they must be published one by one.

        Raises as `_queue_id`.
        """
        self._check_delay(template)
        topic = template.destination.topic
        queue_id = self._queue_ids.get(topic, -1) if not template.destination.name else -1
        return self._gate.find_queue(topic, queue_id) or self._gate.find_queue(topic, self._queue_id(template))

    def _queue_id(self, template: Template) -> int:
        """Return the queue of the topic for messages of *template*; the topic is created if there is none.

        Raises:
          Refused: there is no such topic, and it may not be created.
          StompError: no plugin holds delayed messages.
        """
        self._check_delay(template)
        topic, name = template.destination.topic, template.destination.name
        found = self._gate.find_topic(topic, "publish", self._context.config.queues)
        if found is None:
            text = f"topic[{topic}] does not exist; create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text)
        count = found.write_queues or 1
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
