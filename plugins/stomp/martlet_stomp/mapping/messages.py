"""Conversion between STOMP messages and records of the log; pure functions.

| header | property of the record |
|---|---|
| ``content-type``, ``correlation-id`` | ``CONTENT_TYPE``, ``CORRELATION_ID`` |
| ``reply-to`` | ``STOMP_REPLY_TO``, and the properties of a request (`requests.py`) |
| ``expires``, and ``expiration`` as with RabbitMQ | ``EXPIRES_MS``: time of expiry, in ms since 1970 |
| ``AMQ_SCHEDULED_DELAY``, ``x-delay`` | ``TIMER_DELAY_MS``: delay in ms for the plugin timer |
| ``AMQ_SCHEDULED_PERIOD``, ``_REPEAT``, ``_CRON`` | see `schedules.py` |
| ``KEYS``, ``TAGS``, and RocketMQ's delays, such as ``TIMER_DELIVER_MS`` | the same, with RocketMQ's meaning |
| others | the same name |

A property cannot hold an empty value or a character up to U+0002, and some names have a meaning for brokers. Headers
that do not fit are in ``STOMP_BLOCK``, a JSON object. If the properties would be longer than a record allows, a JSON
object with all headers follows the body, and ``STOMP_BODY_BYTES`` is the size of the body.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final, final

import orjson

from martlet.message import CORRELATION_ID, KEYS, PROPERTIES_BYTES_MAX, TAGS, decode_properties
from martlet.records.compression import COMPRESSED, CompressionError, decompress
from martlet.records.reserved import BODY_BYTES, OF_PROTOCOLS, RESERVED
from martlet_stomp.mapping.destinations import Destination, Kind, destination_of, parse_destination
from martlet_stomp.mapping.requests import DESTINATION, correlation_of, reply_to_of, request_of
from martlet_stomp.mapping.schedules import SCHEDULE_HEADERS, Removal, removal_of, schedule_of
from martlet_stomp.wire.arguments import check_send_arguments
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.events import OF_FRAME
from martlet_stomp.wire.packets import MessageHeaders

__all__ = ["GROUP_ID", "OF_BROKER", "Arrived", "Template", "arrived_from"]

# Messages with the same value of this header go to the same consumer of a queue, as with ActiveMQ.
GROUP_ID: Final = "JMSXGroupID"

# Room for properties that are added later: the timer's, a transaction's and the position of a queue.
SPARE_BYTES: Final = 1024
# Room for the properties that `Template.record_of` adds for a temporary destination in reply-to.
REPLY_BYTES: Final = 4096
DLQ_ORIGIN: Final = "DLQ_ORIGIN_TOPIC"
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_UNFIT: Final = re.compile("[\x00-\x02]")
_DELAYING: Final = frozenset(("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"))
_ACTING: Final = _DELAYING | {KEYS, TAGS}
# Names that brokers and other clients use: a header of such a name is only in the block.
_TAKEN: Final = (RESERVED | OF_PROTOCOLS | {"INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"}) - _ACTING
# Properties of a record that do not become headers.
_HIDDEN: Final = _TAKEN | _DELAYING
_PROPERTIES: Final = {"content-type": "CONTENT_TYPE", "correlation-id": CORRELATION_ID}
# Properties that become headers of other names.
_HEADERS: Final = frozenset(("CONTENT_TYPE", CORRELATION_ID, DLQ_ORIGIN))
_TEMPORARY: Final = (Kind.TEMP_QUEUE.value, Kind.TEMP_TOPIC.value)
_DELAYS: Final = ("AMQ_SCHEDULED_DELAY", "x-delay")
# Headers of MESSAGE that the broker sets.
_SET: Final = frozenset(("ack", "delivery-count", "message-id", "redelivered", "subscription"))
# Names that no header of a message may have: a sender's content-length, for example, would break the frame.
OF_BROKER: Final = _SET | OF_FRAME
_TIMES: Final = frozenset(("expires", "expiration", *_DELAYS, *SCHEDULE_HEADERS))


@final
class Template:
    """The common part of the records of messages with equal headers.

    Attributes:
      destination: the destination of the messages.
      name: the name of the messages, in a topic whose messages have names; otherwise empty.
      correlation: the ``correlation-id``; empty for none.
      group: the `GROUP_ID`; empty for none.
      properties: the encoded properties that all records have; each record has only these if ``is_plain``.
      is_delayed: whether the plugin timer must hold the messages.
      removal: the repeated message that the messages end, instead of being stored; None for most.
      parts: one template for each destination of a list; empty for a single destination.
      reply: the sender's temporary destination for replies; None for none.
    """

    __slots__ = (
        "_cluster",
        "_tail",
        "_ttl_ms",
        "correlation",
        "destination",
        "group",
        "is_delayed",
        "name",
        "parts",
        "properties",
        "removal",
        "reply",
    )

    def __init__(
        self, headers: MessageHeaders, destination: Destination, named: Collection[str] = (), cluster: str = ""
    ) -> None:
        """Make the template of *headers*.

        Args:
          named: topics whose messages have names.
          cluster: the broker's cluster, for RocketMQ clients that reply.

        Raises:
          StompError: a header is invalid.
        """
        self.destination = destination
        self.parts: tuple[Template, ...] = ()
        check_send_arguments(headers.pairs)
        self.removal: Removal | None = removal_of(headers, destination)
        delay_ms = next(filter(None, (_number(headers, name) for name in _DELAYS)), 0)
        self._ttl_ms = _number(headers, "expiration")
        self._cluster = cluster
        self._tail = b""
        own = _acting(headers, destination)
        self.name = own.get(TAGS, "") if destination.topic in named else ""
        if delay_ms:
            own["TIMER_DELAY_MS"] = str(delay_ms)
        schedule = schedule_of(headers)
        if schedule and not destination.kind.is_stored:
            text = "ends with its connection, and a repeated message does not; send it to another one"
            raise StompError(f"destination {shown(destination.text)} {text}")
        self.is_delayed = bool(schedule) or not _DELAYING.isdisjoint(own)
        own |= schedule
        if self._ttl_ms and not schedule:  # the plugin timer adds the delays of a schedule
            self._ttl_ms += delay_ms
        expires_ms = _number(headers, "expires")
        if expires_ms and not self._ttl_ms:
            own["EXPIRES_MS"] = str(expires_ms)
        users, block = _divided(headers, destination)
        self.correlation = users.get(CORRELATION_ID, "")
        self.group = users.get(GROUP_ID, "")
        self.reply = self._take_reply_to(users, own, named)
        if block:
            users["STOMP_BLOCK"] = _json(block)
        self._make(own, users, headers)

    def _take_reply_to(self, users: dict[str, str], own: dict[str, str], named: Collection[str]) -> Destination | None:
        """Move reply-to and the correlation id from *users* to *own*; return the destination if it is temporary.

        Raises `StompError` if the temporary destination is invalid.
        """
        text = users.pop("reply-to", None)
        if text is None:
            return None
        users.pop(CORRELATION_ID, None)
        try:
            reply: Destination | None = parse_destination(text, named)
        except StompError:
            if text.startswith(_TEMPORARY):
                raise
            reply = None  # a destination of another broker, which this one stores as it is
        if reply is None or reply.kind is Kind.REPLY:
            own[DESTINATION] = text
            if self.correlation:
                own[CORRELATION_ID] = self.correlation
            return None
        if text.startswith(_TEMPORARY):
            return reply
        own |= request_of(text, self.correlation, self._cluster)
        if reply.kind is Kind.TOPIC and reply.name:
            own["REPLY_TO"] = reply.name
        return None

    def _make(self, own: dict[str, str], users: dict[str, str], headers: MessageHeaders) -> None:
        """Encode the properties. Raises `StompError` if they are too long."""
        bytes_max = PROPERTIES_BYTES_MAX - SPARE_BYTES - (REPLY_BYTES if self.reply is not None else 0)
        self.properties = _encoded(own | users)
        if len(self.properties) <= bytes_max:
            return
        self.properties = _encoded(own | ({GROUP_ID: self.group} if self.group else {}))
        left = {name: value for name, value in headers.pairs if _is_users(name) and name != "reply-to"}
        self._tail = _json(left).encode()
        if len(self.properties) > bytes_max:
            names = f"{KEYS}, {TAGS}, {GROUP_ID}, reply-to and correlation-id"
            text = f"headers {names} have {len(self.properties)} bytes"
            raise StompError(f"{text}; shorten them")

    @property
    def is_plain(self) -> bool:
        """Whether each record has exactly ``properties``, and the message's body."""
        return not (self._ttl_ms or self._tail or self.reply is not None)

    def record_of(self, body: bytes, now_ms: int, reply_to: str = "") -> tuple[bytes, bytes]:
        """Return the body and the properties of the record for a message with *body*.

        Args:
          reply_to: the text of ``reply`` for other clients; empty for none.
        """
        properties = self.properties
        if reply_to:
            properties += _encoded(request_of(reply_to, self.correlation, self._cluster))
        if self._ttl_ms:
            properties += b"EXPIRES_MS\x01%d\x02" % (now_ms + self._ttl_ms)
        if self._tail:
            return body + self._tail, properties + b"STOMP_BODY_BYTES\x01%d\x02" % len(body)
        return body, properties


def _number(headers: MessageHeaders, name: str) -> int:
    """Return the milliseconds in header *name*, 0 if absent. Raises `StompError`."""
    value = headers.get(name)
    if value is None:
        return 0
    if _NUMBER.fullmatch(value) is None:
        raise StompError(f"header {name} is {shown(value)}; it is a number of milliseconds")
    return int(value)


def _acting(headers: MessageHeaders, destination: Destination) -> dict[str, str]:
    """Return the properties with RocketMQ's meaning (`_ACTING`), including the name of the message."""
    acting = {TAGS: destination.name} if destination.is_filter else {}
    for name in _ACTING:
        value = headers.get(name)
        if value and not _UNFIT.search(value) and not (name == TAGS and destination.name):
            acting[name] = value
    return acting


def _is_users(name: str) -> bool:
    """Return whether the header *name* goes unchanged to subscribers."""
    return name not in _TIMES and name not in _SET and name not in _ACTING


def _divided(headers: MessageHeaders, destination: Destination) -> tuple[dict[str, str], dict[str, str]]:
    """Return the headers for subscribers: as properties, and in a block if they cannot be properties."""
    users: dict[str, str] = {}
    block: dict[str, str] = {}
    for name, value in headers.pairs:
        if not _is_users(name):
            if name == TAGS and destination.name:
                block[name] = value
            continue
        key = _PROPERTIES.get(name, name)
        is_free = name in _PROPERTIES or (name not in _TAKEN and name not in _HEADERS)
        if is_free and value and not _UNFIT.search(name + value):
            users[key] = value
        else:
            block[name] = value
    return users, block


def _json(headers: Mapping[str, str]) -> str:
    return orjson.dumps(headers).decode()


def _encoded(properties: Mapping[str, str]) -> bytes:
    return b"".join([b"%b\x01%b\x02" % (key.encode(), value.encode()) for key, value in properties.items()])


@final
class Arrived:
    """A message read from the log, on its way to subscribers.

    ``headers`` are the sender's, ``name`` is its name in a topic whose messages have names, and ``expires_ms`` is 0 if
    it never expires.
    """

    __slots__ = ("_body_bytes", "expires_ms", "headers", "name")

    def __init__(self, headers: dict[str, str], name: str, expires_ms: int, body_bytes: int) -> None:
        self.headers = headers
        self.name = name
        self.expires_ms = expires_ms
        self._body_bytes = body_bytes

    @property
    def is_plain(self) -> bool:
        """Whether all records with these properties are delivered with ``headers``, and with their bodies unchanged."""
        return not self.expires_ms and self._body_bytes < 0

    def content(self, sys_flag: int, body: bytes, bytes_max: int) -> tuple[dict[str, str], bytes] | None:
        """Return the headers and the body of the message in a record; None if *body* cannot be decompressed.

        A body decompresses to at most *bytes_max*.
        """
        try:
            plain = decompress(body, sys_flag, bytes_max) if sys_flag & COMPRESSED else body
        except CompressionError:
            return None
        if self._body_bytes < 0:
            return self.headers, plain
        return self.headers | _decoded(plain[self._body_bytes :]), plain[: self._body_bytes]


def arrived_from(properties: bytes, named: str, *, is_named: bool = False) -> Arrived:
    """Return the message in a record of any protocol with *properties*.

    Args:
      named: the topic of the plugin mqtt, which gets the reply to a message that has only a response topic; empty for
        none.
      is_named: whether the tag of the message is its name, and not a header.
    """
    found = decode_properties(properties)
    headers = {name: value for name, value in found.items() if name not in _HIDDEN and name not in _HEADERS}
    if is_named:
        headers.pop(TAGS, None)
    others = {
        "content-type": found.get("CONTENT_TYPE"),
        "correlation-id": correlation_of(found),
        "reply-to": reply_to_of(found, named),
        "original-destination": destination_of(found[DLQ_ORIGIN]) if DLQ_ORIGIN in found else None,
    }
    headers |= {name: value for name, value in others.items() if value is not None}
    expires_ms = _plain_number(found.get("EXPIRES_MS", ""))
    if expires_ms > 0:
        headers["expires"] = str(expires_ms)
    headers |= _decoded(found.get("STOMP_BLOCK", ""))
    body_bytes = max(_plain_number(found.get(name, "")) for name in BODY_BYTES)
    return Arrived(headers, found.get(TAGS, ""), max(expires_ms, 0), body_bytes)


def _plain_number(text: str) -> int:
    """Return *text* as a number; -1 if it is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def _decoded(block: bytes | str) -> dict[str, str]:
    """Return the headers in *block*, a JSON object; empty if it is damaged. Ignores values that are not text."""
    try:
        found = orjson.loads(block) if block else {}
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}
