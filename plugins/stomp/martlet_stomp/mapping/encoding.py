"""MESSAGE frames: the part that is the same for all subscribers is encoded once.

A frame is the *head* of a subscription followed by the *rest* of a message. The head ends in the middle of the header
that identifies the message, ``ack`` with STOMP 1.2 and otherwise ``message-id``; the rest begins with ``QUEUE-OFFSET``.
So the frames of a subscription are its head joined with the rests of its messages. Headers of the broker come first,
because the first of repeated headers counts.

``timestamp`` is the time of the SEND in ms since 1970, as with ActiveMQ, unless the sender set such a header.

``message-id`` is ``TOPIC-QUEUE-OFFSET``, the same for all subscribers and at each delivery. With STOMP 1.0 and 1.1,
clients acknowledge by ``message-id``, so for them it is the ack id (`packets.AckPlace`).
"""

from collections.abc import Callable, Sequence
from typing import Final, final

from martlet.contracts import Buffer
from martlet.delivery.fanout import Encoding
from martlet.groups.strategy.sticky import Sticky
from martlet.records.compression import DELIVERED_BYTES_MAX
from martlet.runtime.clock import Clock
from martlet.runtime.native import native
from martlet_stomp.mapping.destinations import Destination
from martlet_stomp.mapping.messages import GROUP_ID, OF_BROKER, Arrived, arrived_from
from martlet_stomp.mapping.rests import message_rests
from martlet_stomp.wire.codec import encode_header, escape
from martlet_stomp.wire.packets import Version

__all__ = ["HeaderLines", "SubscriptionEncodings", "message_head"]

TIMESTAMP: Final = "timestamp"
# Most entries of `HeaderLines`, and their bytes; beyond these all are dropped.
LINES_KEPT: Final = 4096
LINES_BYTES_KEPT: Final = 1 << 20


def message_head(
    subscription_id: str | None, number: int, topic: str, version: Version, *, is_acknowledged: bool, delivery: int = 1
) -> bytes:
    """Return the head of a subscription's MESSAGE frames.

    Args:
      subscription_id: the client's id for the subscription; None for none, which STOMP 1.0 allows.
      number: the number of the subscription on this connection, as in `packets.AckPlace`.
      topic: the platform topic.
      is_acknowledged: whether the client acknowledges messages.
      delivery: the number of deliveries of the messages, including this one.
    """
    lines = [b"MESSAGE\n"]
    if subscription_id is not None:
        lines.append(encode_header("subscription", subscription_id, version))
    if delivery > 1:
        lines.append(b"redelivered:true\ndelivery-count:%d\n" % delivery)
    if is_acknowledged:
        lines.append(b"%b:%d-" % (b"ack" if version is Version.V1_2 else b"message-id", number))
    else:
        lines.append(b"message-id:%b-" % topic.encode())
    return b"".join(lines)


@final
class HeaderLines:
    """A cache of encoded header lines of messages, by the properties of their records.

    The lines are None if messages with equal properties still differ (`messages.Arrived.is_plain`), or have their
    sender's ``timestamp``.
    """

    __slots__ = ("_bytes", "_named", "_prefix", "_sticky", "_version", "table")

    def __init__(self, version: Version, named: str, prefix: str | None = None, sticky: Sticky | None = None) -> None:
        """Make an empty cache.

        Args:
          named: as for `messages.arrived_from`.
          prefix: the prefix of the destination, to which a message's name is appended. Empty to omit the destination
            from the lines; None if the messages have no names.
          sticky: notes messages with a group, which stay with one consumer.
        """
        self._sticky = sticky
        self._version = version
        self._named = named
        self._prefix = prefix
        self._bytes = 0
        self.table: Final[dict[bytes, bytes | None]] = {}

    def encode(self, headers: dict[str, str], name: str) -> bytes:
        """Return the encoded lines of *headers* of a message with *name*."""
        lines = [encode_header("destination", self._prefix + name, self._version)] if self._prefix else []
        is_trimmed = self._version is Version.V1_0
        for key, value in headers.items():
            if (key.strip() if is_trimmed else key) not in OF_BROKER:
                lines.append(encode_header(key, value, self._version))
        return b"".join(lines)

    def arrived(self, properties: bytes) -> Arrived:
        """Return the message of a record with *properties*."""
        message = arrived_from(properties, self._named, is_named=self._prefix is not None)
        if self._sticky is not None and GROUP_ID in message.headers:
            self._sticky.seen = True
        return message

    def learn(self, properties: bytes) -> bytes | None:
        """Return the lines of messages with *properties*, and cache them."""
        arrived = self.arrived(properties)
        is_usual = arrived.is_plain and TIMESTAMP not in arrived.headers
        lines = self.encode(arrived.headers, arrived.name) if is_usual else None
        self._bytes += len(properties) + len(lines or b"")
        if len(self.table) >= LINES_KEPT or self._bytes > LINES_BYTES_KEPT:
            self.table.clear()
            self._bytes = len(properties) + len(lines or b"")
        self.table[properties] = lines
        return lines


@final
class SubscriptionEncodings:
    """The encodings of all subscriptions."""

    def __init__(
        self,
        clock: Clock,
        names: Sequence[str],
        sticky: Sticky | None = None,
        bytes_max: int = DELIVERED_BYTES_MAX,
    ) -> None:
        """Make the encodings; *names* are the topics whose messages have names, *sticky* is as for `HeaderLines`.

        Bodies decompress to at most *bytes_max*.
        """
        self._bytes_max = bytes_max
        self._sticky = sticky
        self._clock = clock
        self._named = names[0] if names else ""
        self._lines: dict[tuple[Version, str | None], HeaderLines] = {}
        self.expired = 0
        self.unreadable = 0  # messages with a body that cannot be decompressed

    def of(self, version: Version, destination: Destination, *, is_acknowledged: bool) -> Encoding:
        """Return the encoding for subscribers of *destination*, whose topic must be set."""
        with_id = is_acknowledged and version is Version.V1_2
        text, topic = destination.text, destination.topic
        prefix = "" if not destination.kind.is_stored else None
        if destination.is_filter:
            text = prefix = f"{destination.kind.value}{topic}/"
        lines = self._lines.get((version, prefix))
        if lines is None:
            lines = self._lines[version, prefix] = HeaderLines(version, self._named, prefix, self._sticky)
        line = b"destination:%b\n" % escape(text, version) if not prefix else b""
        return Encoding(f"stomp {version.text} {with_id:d} {text}", self._encoder(topic, line, lines, with_id=with_id))

    def _encoder(
        self, topic: str, line: bytes, lines: HeaderLines, *, with_id: bool
    ) -> Callable[[Buffer], list[bytes]]:
        """Return the encode function of an encoding; each frame has *line*, and ``message-id`` if *with_id*."""
        id_line = b"message-id:%b-%%d-%%d\n" % topic.replace("%", "%%").encode() if with_id else b""
        start = b"%%d-%%d\n%b%bcontent-length:%%d\n" % (id_line, line.replace(b"%", b"%%"))
        own_rest, content_of, rests_of = start + b"%b\n%b\0", self._content, native(message_rests)

        def alone(queue_id: int, offset: int, sys_flag: int, born_ms: int, body: bytes, properties: bytes) -> bytes:
            content = content_of(sys_flag, born_ms, body, properties, lines)
            if content is None:
                return b""
            own_lines, plain = content
            place = (queue_id, offset, queue_id, offset) if with_id else (queue_id, offset)
            return own_rest % (*place, len(plain), own_lines, plain)

        terms = start + b"timestamp:%d\n%b\n%b\0", with_id, lines.table, lines.learn, alone
        return lambda piece: rests_of(bytes(piece), terms)

    def _content(
        self, sys_flag: int, born_ms: int, body: bytes, properties: bytes, lines: HeaderLines
    ) -> tuple[bytes, bytes] | None:
        """Return the header lines and the body of a message without cached lines; None if it is not delivered."""
        arrived = lines.arrived(properties)
        if 0 < arrived.expires_ms <= self._clock.now_ms():
            self.expired += 1
            return None
        content = arrived.content(sys_flag, body, self._bytes_max)
        if content is None:
            self.unreadable += 1
            return None
        headers, plain = content
        timestamp = b"timestamp:%d\n" % born_ms if TIMESTAMP not in headers else b""
        return timestamp + lines.encode(headers, arrived.name), plain
