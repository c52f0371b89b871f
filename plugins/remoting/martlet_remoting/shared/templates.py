"""Constant parts of answers and records, and the messages of usual sends, which get them.

The native kernel has `usual_items` and `batch_items` as well; see `martlet.runtime.native`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from martlet.errors import Reason
from martlet.message import PROPERTIES_BYTES_MAX, Message
from martlet.runtime.native import native
from martlet.store.append.items import AppendItem
from martlet.store.queues.queues import Queue
from martlet.tables.topics import Topic
from martlet_remoting.wire.batches import Member
from martlet_remoting.wire.codec import (
    ack_response_template,
    pop_response_template,
    pull_response_template,
    send_response_template,
)
from martlet_remoting.wire.codes import FLAG_ONEWAY
from martlet_remoting.wire.sends import Send, sent_answers

__all__ = ["Templates", "batch_items", "contains", "usual_items"]

OTHER_FLAGS: Final = ~FLAG_ONEWAY


@final
class Templates:
    """The fixed parts of frequent answers and of stored properties, and the functions that fill them in for runs."""

    def __init__(
        self, store_host: bytes, cluster: str, region: str, reason_codes: Mapping[Reason, int], *, trace: bool
    ) -> None:
        self.reason_codes: Final = reason_codes  # of refusals
        tracing = str(trace).lower()
        self.pulled: Final = pull_response_template()
        self.popped: Final = pop_response_template()
        self.acknowledged: Final = ack_response_template()
        self.sent: Final = send_response_template(region, trace)
        self.usual_items: Final = native(usual_items)
        self.batch_items: Final = native(batch_items)
        self.sent_answers: Final = native(sent_answers)
        # Header fields of every answer to a send, including refusals.
        self.send_ext: Final = {"TRACE_ON": tracing, "MSG_REGION": region}
        self.stamp: Final = f"CLUSTER\x01{cluster}\x02MSG_REGION\x01{region}\x02TRACE_ON\x01{tracing}\x02".encode()
        # For properties without the separator at the end.
        self.stamp_after: Final = b"\x02" + self.stamp
        self.set_store_host(store_host)

    def set_store_host(self, host: bytes) -> None:
        """Set this broker's address, in the format of records."""
        self.store_host = host
        self.host_text = host.hex().upper()
        self.sent_usual = _usual_template(self.sent, self.host_text)

    def message_id(self, position: int) -> str:
        """Return the offset message id of the record at *position*: the advertised address, then the position."""
        return f"{self.host_text}{position:016X}"


def _usual_template(template: str, host_text: str) -> bytes:
    """Return *template* for the usual answer: code 0, one message with a unique key that needs no escaping."""
    for old, new in (('"code":%d', '"code":0'), ('%s"msgId":"%s"', f'"transactionId":"%s","msgId":"{host_text}%016X"')):
        assert old in template
        template = template.replace(old, new)
    return template.encode()


def usual_items(
    sends: Sequence[Send],
    run: list[AppendItem | Message] | list[AppendItem],
    room: int,
    staged_flags: int,
    words: Sequence[bytes],
    topic: Topic,
    host: bytes,
    stamp: bytes,
    body_bytes_max: int,
    code_of: Callable[[bytes], int],
) -> int:
    """Add to *run* the items of *sends* from index ``len(run)`` on, up to the first that is not usual; return *room*
    without their bytes.

    Stops before a send to another topic or to a queue that is not open, and before one that is too large, or that has
    bits of *staged_flags* in its sysFlag or one of *words* in its properties; also once *room* is negative.

    Args:
      stamp: the properties that each message gets.
      code_of: returns the tag code of encoded properties (`PublishGrant.code_of`).
    """
    name, open_queues, queues = topic.name, topic.open_queues, topic.queues
    properties_bytes_max = PROPERTIES_BYTES_MAX - len(stamp) - 1
    for send in sends[len(run) :] if run else sends:
        to, queue_id, body, properties, flag, sys_flag, born_ms, _, _, command_flag, _ = send
        if (
            to != name
            or not 0 <= queue_id < open_queues
            or room < 0
            or sys_flag & staged_flags
            or command_flag & OTHER_FLAGS
            or len(body) > body_bytes_max
            or len(properties) > properties_bytes_max
            or (words and contains(properties, words))
        ):
            break
        properties += stamp if properties[-1] == 2 else b"\x02" + stamp
        queue = queues.get(queue_id) or topic.queue(queue_id)
        room -= queue.overhead + len(body) + len(properties)
        run.append((queue, body, properties, code_of(properties), flag, sys_flag, born_ms, host, 0, 0))
    return room


def batch_items(
    members: Sequence[Member],
    queue: Queue,
    sys_flag: int,
    born_ms: int,
    host: bytes,
    reconsume_times: int,
    code_of: Callable[[bytes], int],
) -> list[AppendItem]:
    """Return the items of *members* of a batch, which go to *queue*; *code_of* returns the tag code of properties."""
    return [
        (queue, body, properties, code_of(properties), flag, sys_flag, born_ms, host, reconsume_times, 0)
        for body, properties, flag in members
    ]


def contains(properties: bytes, words: Sequence[bytes]) -> bool:
    """Return whether *properties* contain one of *words*."""
    # `in` on bytes raises and catches a TypeError internally each time. A generator is slower.
    for word in words:  # noqa: SIM110
        if properties.find(word) >= 0:
            return True
    return False
