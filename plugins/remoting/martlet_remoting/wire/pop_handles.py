"""The text forms of POP: handles of messages, and the places of an answer's messages (RocketMQ ExtraInfoUtil).

A handle is ``first popTime invisibleTime reviveQueue retry broker queue offset``: *first* is the first offset of the
queue in the answer, *popTime* is the generation of the message's lease, *retry* is the kind of the topic.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Final, final

from msgspec import Struct

from martlet.errors import Reason, Refused
from martlet.tables.topics import RETRY_PREFIX

__all__ = [
    "IN_ORDER_QUEUE",
    "ORDER_COUNTS",
    "Handle",
    "Popped",
    "bit_set",
    "handle_ms",
    "parse_handle",
    "places",
    "real_topic",
    "retry_flag",
    "retry_topics",
]

# The reviveQid of messages popped in order (RocketMQ KeyBuilder.POP_ORDER_REVIVE_QUEUE); 0 for all others.
IN_ORDER_QUEUE: Final = 999
ORDER_COUNTS: Final = "orderCountInfo"
NORMAL: Final = "0"
RETRY_V1: Final = "1"
RETRY_V2: Final = "2"
TOKENS: Final = 8
NUMBER_CHARS_MAX: Final = 19
DIGITS: Final = frozenset("0123456789")


@final
class Handle(Struct, frozen=True):
    """The handle with which a consumer acknowledges a popped message."""

    first: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    def __str__(self) -> str:
        front = f"{self.first} {self.pop_ms} {self.invisible_ms} {self.revive_queue} {self.retry}"
        return f"{front} {self.broker_name} {self.queue_id} {self.offset}"


def _number(text: str, handle: str) -> int:
    if not text or len(text) > NUMBER_CHARS_MAX or not DIGITS.issuperset(text):
        raise _malformed(handle)
    return int(text)


def _malformed(handle: str) -> Refused:
    return Refused(
        Reason.MALFORMED, f"extraInfo {handle!r:.120} is not a handle; send the one of the popped message unchanged"
    )


def handle_ms(handle: str) -> int:
    """Return the pop time in *handle*. Raises `Refused` (MALFORMED) if the handle has none."""
    tokens = handle.split(" ", 2)
    if len(tokens) < 2:
        raise _malformed(handle)
    return _number(tokens[1], handle)


def parse_handle(handle: str) -> Handle:
    """Return the parts of *handle*. Raises `Refused` (MALFORMED) if the text is no handle."""
    tokens = handle.split(" ")
    if len(tokens) != TOKENS:
        raise _malformed(handle)
    first, pop_ms, invisible_ms, revive, retry, broker_name, queue_id, offset = tokens
    return Handle(
        _number(first, handle),
        _number(pop_ms, handle),
        _number(invisible_ms, handle),
        _number(revive, handle),
        retry,
        broker_name,
        _number(queue_id, handle),
        _number(offset, handle),
    )


def bit_set(numbers: Sequence[int]) -> str:
    """Return the set of *numbers* as batches of acknowledgements encode it: base64 of Java's BitSet."""
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return b64encode(bits).decode()


def retry_flag(topic: str) -> str:
    """Return the kind of *topic*; a group's own retry topic and POP's V1 look alike, as in RocketMQ."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """Return the topic of a handle with the kind *retry*. Raises `Refused` (MALFORMED) if there is no such kind."""
    if retry == NORMAL:
        return topic
    if retry == RETRY_V1:
        return f"{RETRY_PREFIX}{group}_{topic}"
    if retry == RETRY_V2:
        return f"{RETRY_PREFIX}{group}+{topic}"
    raise Refused(Reason.MALFORMED, f"retry flag {retry!r:.20} of a handle is unknown; it must be 0, 1 or 2")


def retry_topics(topic: str, group: str) -> list[str]:
    """Return the topics into which RocketMQ puts messages of *topic* that *group* popped and did not acknowledge."""
    if topic.startswith(RETRY_PREFIX):
        return []
    return [real_topic(topic, group, RETRY_V1), real_topic(topic, group, RETRY_V2)]


@final
class Popped(Struct, frozen=True):
    """Messages of one queue in an answer: offsets in the order of the body, and numbers of earlier deliveries."""

    queue_id: int
    offsets: list[int]
    failures: dict[int, int]  # offset -> earlier deliveries, if there were any


def places(topic: str, popped: Sequence[Popped], *, in_order: bool) -> dict[str, str]:
    """Return the header fields with the places of an answer's messages."""
    retry = retry_flag(topic)
    starts = [f"{retry} {each.queue_id} {min(each.offsets)}" for each in popped]
    offsets = [f"{retry} {each.queue_id} {','.join(map(str, each.offsets))}" for each in popped]
    found = {"startOffsetInfo": ";".join(starts), "msgOffsetInfo": ";".join(offsets)}
    if in_order:
        found[ORDER_COUNTS] = ";".join([text for each in popped for text in _order_counts(retry, each)])
    return found


def _order_counts(retry: str, popped: Popped) -> list[str]:
    """Return the number of earlier deliveries per message, and for old clients the least of all."""
    counts = [
        f"{retry} qo{popped.queue_id}%{offset} {popped.failures[offset]}"
        for offset in popped.offsets
        if offset in popped.failures
    ]
    fewest = min(popped.failures.get(offset, 0) for offset in popped.offsets)
    return [*counts, f"{retry} {popped.queue_id} {fewest}"]
