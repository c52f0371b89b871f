"""Destinations, such as ``/queue/NAME``, and the platform topics of their messages; pure functions.

``/queue/NAME`` and ``/topic/NAME`` are the same platform topic; the prefix of a subscription decides how it consumes
the messages. The topic's name is NAME, with each character that RocketMQ does not allow percent-encoded (``orders.new``
is topic ``orders%2Enew``). As with ActiveMQ and RabbitMQ, a NAME without a prefix is a queue.

As with ActiveMQ, ``/queue/Consumer.APPLICATION.VirtualTopic.NAME`` has the messages that were sent to
``/topic/VirtualTopic.NAME`` since it was first consumed; all consumers of one application share them.

As with RabbitMQ, ``/exchange/amq.topic/KEY`` is ``/topic/KEY``. Any other exchange is only the first level of a name:
``/exchange/NAME/KEY`` is ``/topic/NAME/KEY``. ``/amq/queue/NAME`` is ``/queue/NAME`` if the queue exists.

In some topics each message has a name, which is its tag: the topics in `StompConfig.names`, such as the topic of the
plugin mqtt. ``/topic/mqtt/home/door`` is the name ``home/door`` in topic ``mqtt``, and a subscription may have
wildcards as in MQTT (`select_names`).
"""

import re
from collections.abc import Collection
from enum import Enum, unique
from typing import Final, NamedTuple, final
from urllib.parse import unquote

from martlet.contracts import RecordView
from martlet.delivery.routing.selection import Selection, select_tags
from martlet.message import TAGS
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX
from martlet_stomp.wire.errors import StompError, shown

__all__ = [
    "Destination",
    "Kind",
    "check_filter",
    "check_name",
    "destination_of",
    "is_name",
    "name_of",
    "parse_destination",
    "parse_destinations",
    "select_names",
]

TOPIC_CHARS_MAX: Final = 127
NAME_BYTES_MAX: Final = 4096
# Longest name of a temporary destination; the name is up to three times as long in the reply-to of a message.
TEMP_NAME_BYTES_MAX: Final = 255
LEVELS_MAX: Final = 200
# The first character of names to which only the broker publishes.
HIDDEN: Final = "$"
# RabbitMQ's prefix of exchanges, its predefined exchanges, and its prefix of queues that must exist.
EXCHANGE: Final = "/exchange/"
BY_TOPIC: Final = "amq.topic"
BY_HEADERS: Final = "amq.headers"
BY_DEFAULT: Final = "amq.default"
TO_ALL: Final = "amq.fanout"
AMQ_QUEUE: Final = "/amq/queue/"
_UNFIT: Final = re.compile(r"[^%|a-zA-Z0-9_-]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A level that is a wildcard of ActiveMQ or RabbitMQ.
_WILDCARD: Final = re.compile(r"(?:^|[./])[*>#](?:$|[./])")

_VIRTUAL: Final = re.compile(r"Consumer\.([^.]+)\.(VirtualTopic\..+)", re.DOTALL)

# ActiveMQ's composite destinations, options, and prefixes that this broker does not support.
_COMPOSITE: Final = re.compile(
    r"(?:^|,)(?:temp-)?(?:queue|topic)://|,/(?:remote-)?(?:temp-)?(?:queue|topic)/|\?consumer\."
)
LIST_MAX: Final = 100
_NEXT: Final = re.compile(r",(?=/(?:queue|topic)/)")
TAGS_NAME: Final = TAGS.encode()


@unique
class Kind(Enum):
    """The prefix of a destination, which decides how its messages are consumed."""

    QUEUE = "/queue/"  # each message by one consumer
    TOPIC = "/topic/"  # each message by all subscriptions
    # Temporary destinations: prefixes for their own connection, and for other clients.
    TEMP_QUEUE = "/temp-queue/"
    TEMP_TOPIC = "/temp-topic/"
    REMOTE_TEMP_QUEUE = "/remote-temp-queue/"
    REMOTE_TEMP_TOPIC = "/remote-temp-topic/"
    # Replies to clients of other protocols that wait for them.
    REPLY = "/reply/"

    @property
    def is_stored(self) -> bool:
        """Whether a destination of this kind has its own platform topic."""
        return self in (Kind.QUEUE, Kind.TOPIC)


_PREFIX: Final = re.compile(r"/[a-z-]+/")


@final
class Destination(NamedTuple):
    """A parsed destination of SEND or SUBSCRIBE.

    Attributes:
      text: the destination as the client wrote it.
      topic: the platform topic; empty if not `Kind.is_stored`.
      name: the name of messages, or a filter of names, in a topic whose messages have names; empty for none. If not
        `Kind.is_stored`, the text after the prefix.
      must_exist: whether the topic must exist, and is not created.
      application: the application whose consumers share a virtual topic; empty for other destinations.
    """

    kind: Kind
    text: str
    topic: str
    name: str = ""
    application: str = ""
    must_exist: bool = False

    @property
    def is_pattern(self) -> bool:
        """Whether the destination is a pattern for the names of topics."""
        is_whole = self.kind is Kind.TOPIC and not self.name
        return is_whole and _WILDCARD.search(self.text.removeprefix(self.prefix)) is not None

    @property
    def prefix(self) -> str:
        """The part of ``text`` before the name."""
        return EXCHANGE if self.text.startswith(EXCHANGE) else self.kind.value

    @property
    def is_filter(self) -> bool:
        """Whether ``name`` is the name of messages in ``topic``, or a filter of such names."""
        return bool(self.name) and self.kind.is_stored


def parse_destinations(text: str, named: Collection[str] = ()) -> list[Destination]:
    """Return the destinations in *text*: one, or as with ActiveMQ several separated by commas.

    Args:
      named: topics whose messages have names, which may contain commas; a destination in such a topic is no list.

    Raises:
      StompError: a destination is invalid, or there are more than `LIST_MAX`.
    """
    texts = _NEXT.split(text)
    levels = texts[0].split("/", 3)
    if len(texts) == 1 or (len(levels) > 2 and levels[2] in named):
        return [parse_destination(text, named)]
    if len(texts) > LIST_MAX:
        raise StompError(f"destination {shown(text)} is a list of {len(texts)}; name at most {LIST_MAX}")
    destinations = [parse_destination(each, named) for each in texts]
    for each in destinations:
        if not each.kind.is_stored:
            raise StompError(f"destination {shown(each.text)} is temporary, and cannot be in a list; use it alone")
    return destinations


def parse_destination(text: str, named: Collection[str] = ()) -> Destination:
    """Return the destination *text*.

    Args:
      named: topics whose messages have names.

    Raises:
      StompError: *text* is no valid destination.
    """
    if text.startswith(AMQ_QUEUE):
        queue = Kind.QUEUE.value + text.removeprefix(AMQ_QUEUE)
        return parse_destination(queue, named)._replace(must_exist=True)
    if text.startswith(EXCHANGE):
        return _parse_exchange(text, named)
    kind, name = _split(text)
    if not name:
        raise StompError(f"destination {shown(text)} has no name; write {kind.value}NAME")
    if _CONTROL.search(name):
        raise StompError(f"destination {shown(text)} contains a control character")
    if not kind.is_stored:
        limit = TEMP_NAME_BYTES_MAX if kind in (Kind.TEMP_QUEUE, Kind.TEMP_TOPIC) else NAME_BYTES_MAX
        if len(name.encode()) > limit:
            raise StompError(f"destination {shown(text)} has a name of {len(name.encode())} bytes; use at most {limit}")
        return Destination(kind, text, "", name)
    topic, slash, inner = name.partition("/")
    if slash and topic in named:
        if not inner:
            raise StompError(f"destination {shown(text)} has no name in topic {topic}; write {kind.value}{topic}/NAME")
        return Destination(kind, text, topic, inner)
    if _COMPOSITE.search(name):
        hint = "a list is /queue/a,/topic/b, and most options are also headers"
        raise StompError(f"destination {shown(text)} has a prefix or options that are not supported; {hint}")
    virtual = _VIRTUAL.fullmatch(name) if kind is Kind.QUEUE else None
    application, name = (virtual[1], virtual[2]) if virtual is not None else ("", name)
    topic = _UNFIT.sub(_encoded, name)
    # Dead letters of a group can be consumed, and their topics have longer names.
    limit = TOPIC_CHARS_MAX + (len(DLQ_PREFIX) if topic.startswith(DLQ_PREFIX) else 0)
    if len(topic) > limit:
        raise StompError(f"destination {shown(text)} is topic {shown(topic)}, of {len(topic)} characters; use {limit}")
    return Destination(kind, text, topic, application=application)


def _parse_exchange(text: str, named: Collection[str]) -> Destination:
    """Return the topic for messages sent to an exchange of RabbitMQ. Raises `StompError`."""
    exchange, _, key = text.removeprefix(EXCHANGE).partition("/")
    if not exchange:
        raise StompError(f"destination {shown(text)} has no name; write {EXCHANGE}NAME/KEY")
    if exchange in (BY_HEADERS, BY_DEFAULT):
        raise StompError(f"destination {shown(text)} is an exchange that the broker does not have; use another one")
    if exchange == BY_TOPIC:
        if not key:
            raise StompError(f"destination {shown(text)} has no routing key; write {EXCHANGE}{BY_TOPIC}/KEY")
        return parse_destination(Kind.TOPIC.value + key, named)
    if exchange == TO_ALL:
        text, key = EXCHANGE + TO_ALL, ""
    topic = parse_destination(Kind.TOPIC.value + exchange + (f"/{key}" if key else ""), named)
    return topic if topic.name else topic._replace(text=text)


def _split(text: str) -> tuple[Kind, str]:
    if not text.startswith("/"):
        return Kind.QUEUE, text
    prefix = _PREFIX.match(text)
    for kind in Kind:
        if prefix is not None and prefix[0] == kind.value:
            return kind, text.removeprefix(kind.value)
    known = ", ".join((*(kind.value for kind in Kind), EXCHANGE, AMQ_QUEUE))
    raise StompError(f"destination {shown(text)} is unknown; it begins with one of {known}, or with no slash")


def _encoded(match: re.Match[str]) -> str:
    return "".join([f"%{byte:02X}" for byte in match[0].encode()])


def destination_of(topic: str) -> str:
    """Return the destination of the queue *topic*, without escapes if that is still the same queue."""
    name = unquote(topic)
    is_special = "/" in name or _CONTROL.search(name) or _COMPOSITE.search(name)
    is_same = not is_special and _UNFIT.sub(_encoded, name) == topic
    return f"{Kind.QUEUE.value}{name if is_same else topic}"


def name_of(topic: str) -> str:
    """Return the NAME of ``/topic/NAME`` for *topic*, without escapes if that is still the same topic."""
    name = unquote(topic)
    return topic if _CONTROL.search(name) or _UNFIT.sub(_encoded, name) != topic else name


def check_name(destination: Destination) -> None:
    """Raise `StompError` unless clients may send to *destination*."""
    name, text = destination.name, destination.text
    if not destination.kind.is_stored:
        return
    if destination.topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        raise StompError(f"destination {shown(text)} is written only by the broker; send to another one")
    if destination.application:
        topic = Kind.TOPIC.value + unquote(destination.topic)
        raise StompError(f"destination {shown(text)} has what is sent to a virtual topic; send to {shown(topic)}")
    if not name:
        _check_no_wildcard(destination)
        return
    if name.startswith(HIDDEN):
        raise StompError(f"destination {shown(text)} has a name that begins with {HIDDEN}; only the broker sends there")
    if "+" in name or "#" in name:
        raise StompError(f"destination {shown(text)} has a wildcard; only a subscription may have one")
    _check_length(destination)


def check_filter(destination: Destination) -> None:
    """Raise `StompError` unless clients may subscribe to *destination*."""
    if destination.kind in (Kind.REMOTE_TEMP_QUEUE, Kind.REMOTE_TEMP_TOPIC, Kind.REPLY):
        raise StompError(f"destination {shown(destination.text)} is that of somebody else; only its owner reads it")
    if destination.name:
        _check_length(destination)
    elif destination.kind.is_stored and not destination.is_pattern:
        _check_no_wildcard(destination)


def _check_no_wildcard(destination: Destination) -> None:
    if _WILDCARD.search(destination.text.removeprefix(destination.prefix)):
        text = "has a wildcard, which only SUBSCRIBE to a topic may have; name each destination"
        raise StompError(f"destination {shown(destination.text)} {text}")


def _check_length(destination: Destination) -> None:
    if destination.name.count("/") >= LEVELS_MAX or len(destination.name.encode()) > NAME_BYTES_MAX:
        text = f"has a name of more than {LEVELS_MAX} levels or {NAME_BYTES_MAX} bytes"
        raise StompError(f"destination {shown(destination.text)} {text}")


def is_name(name: str) -> bool:
    """Return whether the tag *name* of a message can match topic filters; it may be empty."""
    return bool(name) and "+" not in name and "#" not in name


def select_names(topic_filter: str) -> Selection:
    """Return the selection of messages whose names match *topic_filter*."""
    levels = topic_filter.split("/")
    if not {"+", "#"} & set(levels):
        return select_tags((topic_filter,))
    pattern = f"(?!{re.escape(HIDDEN)})" if levels[0] in ("+", "#") else ""
    for index, level in enumerate(levels):
        if level == "#":
            pattern += "(?:/.*)?" if index else ".*"
        else:
            pattern += ("/" if index else "") + ("[^/]*" if level == "+" else re.escape(level))
    matches = re.compile(pattern, re.DOTALL).fullmatch

    def is_wanted(record: RecordView) -> bool:
        name = record.property(TAGS_NAME)
        return name is not None and is_name(name) and matches(name) is not None

    return Selection(f"names {topic_filter}", None, is_wanted)
