"""Checks of topic names, topic filters, shared subscriptions and client identifiers (MQTT 5 sections 4.7, 4.8).

Like Mosquitto, the broker also refuses control characters in all of them: nobody could see them in a list. Client
identifiers and user names may contain wildcards, because phone numbers, Base64 and mail addresses do. Code that puts
such a name into a pattern escapes it.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, final
from urllib.parse import quote
from zlib import crc32

from msgspec import Struct

from martlet.errors import ConfigError
from martlet.records.codec import tags_code
from martlet.runtime.native import native
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.errors import Malformed, MqttError, NotAccepted

__all__ = [
    "AUTOMATIC",
    "SHARE",
    "Name",
    "Names",
    "SharedFilter",
    "check_client_id",
    "check_filter",
    "check_name",
    "check_prefix",
    "check_user_name",
    "is_shared",
    "response_prefix",
    "split_shared",
    "usual_name",
]

# Packets that a new name counts as besides its own: it takes 8 us, and 3 with the native kernel.
NAME_ROOM: Final = 3
NAME_ROOM_NATIVE: Final = 1
NAMES_KEPT: Final = 50_000
NAMES_KEPT_BYTES: Final = 16 << 20
LEVELS_MAX: Final = 200
# The first character of names to which only the broker publishes. Wildcards at a filter's first level do not match it.
HIDDEN: Final = "$"
SHARE: Final = "$share/"
# The beginning of client identifiers that the broker chooses.
AUTOMATIC: Final = "auto-"
_SHOWN: Final = 80
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A name to which clients may publish, if it is not too long.
_USUAL: Final = re.compile(r"(?!\$)[^\x00-\x1f\x7f-\x9f+#]+")
WILDCARD: Final = re.compile(r"[+#]")
# A level that contains a wildcard and other characters, or # before the last level.
_MISPLACED: Final = re.compile(r"[^/][+#]|\+[^/]|#.")


class SharedFilter(NamedTuple):
    """``$share/GROUP/FILTER``."""

    group: str
    topic_filter: str


def check_name(name: str) -> None:
    """Raise `MqttError` (TOPIC_NAME_INVALID) unless messages may be published to *name*."""
    if not name:
        raise MqttError("the topic name is empty; give at least one character", ReasonCode.TOPIC_NAME_INVALID)
    if WILDCARD.search(name):
        raise _invalid("topic name", name, "contains a wildcard", ReasonCode.TOPIC_NAME_INVALID)
    _check_text("topic name", name, ReasonCode.TOPIC_NAME_INVALID)


def check_filter(topic_filter: str) -> None:
    """Raise `MqttError` (TOPIC_FILTER_INVALID) unless *topic_filter*, which is not shared, may be subscribed to."""
    if not topic_filter:
        raise MqttError("the topic filter is empty; give at least one character", ReasonCode.TOPIC_FILTER_INVALID)
    if _MISPLACED.search(topic_filter):
        text = "has a wildcard that is not a level of its own, or # before its end"
        raise _invalid("topic filter", topic_filter, text, ReasonCode.TOPIC_FILTER_INVALID)
    _check_text("topic filter", topic_filter, ReasonCode.TOPIC_FILTER_INVALID)


def check_prefix(prefix: str) -> None:
    """Raise `ConfigError` unless topic names may begin with *prefix* (``mqtt.response_prefix``); empty is allowed."""
    try:
        if prefix:
            check_name(prefix)
    except MqttError as error:
        raise ConfigError(f"mqtt.response_prefix is invalid; {error}") from error
    if prefix.startswith(HIDDEN):
        raise ConfigError(f"mqtt.response_prefix {prefix!r} begins with {HIDDEN}; clients cannot publish there")


def response_prefix(prefix: str, client_id: str) -> str:
    """Return the first levels of a client's response topics: *prefix*, and one level for *client_id*, escaped."""
    return f"{prefix}/{quote(client_id, safe='@:')}"


def is_shared(topic_filter: str) -> bool:
    """Return whether *topic_filter* is a shared subscription."""
    return topic_filter.startswith(SHARE)


def split_shared(topic_filter: str) -> SharedFilter | None:
    """Return the parts of a shared subscription [MQTT-4.8.2-1, MQTT-4.8.2-2]; None if *topic_filter* is not shared.

    Raises:
      MqttError: the group is empty or has a wildcard, or the filter is empty.
    """
    if not topic_filter.startswith(SHARE):
        return None
    group, _, inner = topic_filter[len(SHARE) :].partition("/")
    if not group or not inner or WILDCARD.search(group):
        text = "is no shared subscription; write $share/GROUP/FILTER, with a group without wildcards"
        raise _invalid("topic filter", topic_filter, text, ReasonCode.TOPIC_FILTER_INVALID)
    _check_text("group", group, ReasonCode.TOPIC_FILTER_INVALID)
    return SharedFilter(group, inner)


def check_client_id(client_id: str) -> None:
    """Raise `MqttError` (CLIENT_IDENTIFIER_NOT_VALID) if a client must not have the identifier *client_id*."""
    reason = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    _check_text("client identifier", client_id, reason)


def check_user_name(user: str) -> None:
    """Raise `MqttError` (BAD_USER_NAME_OR_PASSWORD) if a client must not have the user name *user*."""
    reason = ReasonCode.BAD_USER_NAME_OR_PASSWORD
    if _CONTROL.search(user):
        raise _invalid("user name", user, "contains a control character", reason)


def _check_text(what: str, text: str, reason: ReasonCode) -> None:
    if _CONTROL.search(text):
        raise _invalid(what, text, "contains a control character", reason)
    if text.count("/") >= LEVELS_MAX:
        raise _invalid(what, text, f"has more than {LEVELS_MAX} levels", reason)


def _invalid(what: str, text: str, why: str, reason: ReasonCode) -> MqttError:
    return MqttError(f"{what} {text[:_SHOWN]!r} {why}", reason)


# The encoded properties, by QoS, of a record whose message has no properties of its own.
Properties: TypeAlias = tuple[bytes, bytes, bytes]


class Name(Struct, frozen=True, eq=False):
    """A valid topic name, with values for the records of its messages.

    ``raw`` is its UTF-8, ``topic`` the platform topic of its messages, ``code`` RocketMQ's tag code, ``place`` a number
    that chooses the queue, and ``properties`` those of records, by QoS.
    """

    raw: bytes
    topic: str
    text: str
    code: int
    place: int
    properties: Properties

    @classmethod
    def of(cls, text: str, topic: str) -> "Name":
        """Return the name *text*, which is not checked."""
        raw = text.encode()
        return cls(raw, topic, text, *_values_of(raw))


def _values_of(raw: bytes) -> tuple[int, int, Properties]:
    """Return code, place and properties of the name with the UTF-8 *raw*."""
    tags = b"TAGS\x01%b\x02" % raw
    return tags_code(raw), crc32(raw), (tags + b"MQTT_QOS\x010\x02", tags, tags + b"MQTT_QOS\x012\x02")


def usual_name(raw: bytes, bytes_max: int) -> tuple[str, int, int, Properties] | None:
    """Return text, code, place and properties of the name with the UTF-8 *raw*, of at most *bytes_max* bytes.

    None if clients must not publish to it. The native kernel has this function as well; see `martlet.runtime.native`.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if len(raw) > bytes_max or not _USUAL.fullmatch(text) or text.count("/") >= LEVELS_MAX:
        return None
    return text, *_values_of(raw)


@final
class Names:
    """A cache of valid names by their UTF-8, shared by all connections.

    *topic_of* returns the platform topic of a name. A new name counts as ``room`` packets besides its own.
    """

    def __init__(self, name_bytes_max: int, topic_of: Callable[[str], str] = lambda name: "mqtt") -> None:
        self.table: dict[bytes, Name] = {}
        self._topic_of = topic_of
        self._name_bytes_max = name_bytes_max
        self._usual_name = native(usual_name)
        self.room = NAME_ROOM if self._usual_name is usual_name else NAME_ROOM_NATIVE
        self.learned = 0  # number of names that were new
        self._bytes = 0

    def find(self, name: str) -> Name:
        """Return the `Name` of *name*. Raises `MqttError` (TOPIC_NAME_INVALID) if clients must not publish to it."""
        raw = name.encode()
        known = self.table.get(raw)
        if known is None:
            known = self.learn(raw)
        if known is None:
            raise self._error(name, raw)
        return known

    def is_valid(self, name: str) -> bool:
        """Return whether *name* is valid; other protocols' messages may have any text as their tag."""
        raw = name.encode()
        return raw in self.table or self._usual_name(raw, self._name_bytes_max) is not None

    def _error(self, name: str, raw: bytes) -> MqttError:
        """Return why clients must not publish to *name*."""
        try:
            check_name(name)
        except MqttError as error:
            return error
        if len(raw) > self._name_bytes_max:
            text = f"has {len(raw)} bytes; mqtt.name_bytes_max is {self._name_bytes_max}"
            return NotAccepted(f"topic name {name[:_SHOWN]!r} {text}", ReasonCode.TOPIC_NAME_INVALID)
        text = f"topic name {name[:_SHOWN]!r} begins with {HIDDEN}; only the broker publishes to such names"
        return NotAccepted(text, ReasonCode.TOPIC_NAME_INVALID)

    def find_raw(self, raw: bytes) -> Name:
        """Return the `Name` with the UTF-8 *raw*. Raises as `find`, and `Malformed` if *raw* is not UTF-8."""
        try:
            return self.find(raw.decode())
        except UnicodeDecodeError as error:
            raise Malformed(f"topic name {raw[:_SHOWN]!r} is not UTF-8; send UTF-8") from error

    def learn(self, raw: bytes) -> Name | None:
        """Return the `Name` with the UTF-8 *raw*; None if it is invalid."""
        usual = self._usual_name(raw, self._name_bytes_max)
        if usual is None:
            return None
        text, code, place, properties = usual
        return self._keep(Name(raw, self._topic_of(text), text, code, place, properties))

    def _keep(self, name: Name) -> Name:
        self.learned += 1
        self._bytes += len(name.raw)
        if len(self.table) >= NAMES_KEPT or self._bytes > NAMES_KEPT_BYTES:
            self.table.clear()
            self._bytes = len(name.raw)
        self.table[name.raw] = name
        return name
