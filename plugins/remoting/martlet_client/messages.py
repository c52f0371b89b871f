"""Messages to send, and results of sends."""

from collections.abc import Mapping, Sequence
from enum import Enum, unique
from typing import Final, final

from msgspec import Struct, field

from martlet.message import KEYS, TAGS, UNIQ_KEY, encode_properties
from martlet.records.reserved import RESERVED
from martlet_client.arguments import I32_MAX, check_integer, check_text_mapping, check_time_ms, check_type
from martlet_remoting.wire.answers.errors import MessageRefused
from martlet_remoting.wire.answers.messages import RETRY_PREFIX
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["BODY_BYTES_MAX", "Message", "SendResult", "SendStatus", "check_topic"]

# RocketMQ maxMessageSize, the same in broker and client.
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
TOPIC_CHARACTERS_MAX: Final = 127
GROUP_CHARACTERS_MAX: Final = 120
_NAME_CHARACTERS: Final = frozenset("%|-_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
DELAY: Final = "DELAY"


def check_topic(topic: object) -> None:
    """Refuse a topic name that no broker accepts.

    Raises:
      TypeError: it is not a str.
      MessageRefused: it is empty, longer than 127 characters, or has characters except letters, digits and ``%|-_``.
    """
    is_retry = isinstance(topic, str) and topic.startswith(RETRY_PREFIX)
    _check_name("topic", topic, TOPIC_CHARACTERS_MAX + (128 if is_retry else 0))


def check_group(group: object) -> None:
    """Refuse a group name that no broker accepts; raises the same errors as `check_topic`."""
    _check_name("group", group, GROUP_CHARACTERS_MAX)


def _check_name(what: str, name: object, limit: int) -> None:
    check_type(what, name, str)
    assert isinstance(name, str)
    if not name:
        raise MessageRefused(f"{what} is empty; it needs a name")
    if len(name) > limit:
        raise MessageRefused(f"{what} {name[:20]!r}... has {len(name)} characters; {limit} are the limit")
    if not _NAME_CHARACTERS.issuperset(name):
        raise MessageRefused(f"{what} {name!r} has forbidden characters; letters, digits and %|-_ are allowed")


@final
class Message(Struct):
    """A message to send.

    Args:
      topic: letters, digits and ``%|-_``, at most 127.
      body: at least one byte; encode text with ``.encode()``.
      tags: one tag, by which consumers select messages; empty for none.
      keys: one key or several, without spaces; `Admin.messages_by_key` finds the message by each of them.
      properties: your own names and values, all of them non-empty texts.
      delay_level: delivers the message later: 1 is 1 s, 18 is 2 h, as the broker configures its levels.
      delay_ms: delivers the message this many milliseconds later; needs Martlet or RocketMQ 5.
      deliver_at_ms: delivers the message at this time, in milliseconds since 1970; needs Martlet or RocketMQ 5.
      flag: a number of your own; brokers ignore it.
      wait_stored: whether the broker answers only once the message is stored as safely as configured.

    Give at most one of the three delays. Arguments are checked when the message is sent.
    """

    topic: str
    body: bytes
    tags: str = ""
    keys: str | Sequence[str] = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    delay_level: int = 0
    delay_ms: int = 0
    deliver_at_ms: int = 0
    flag: int = 0
    wait_stored: bool = True

    def check(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        """Refuse a message that a broker would refuse, or that a consumer would receive changed.

        Raises:
          TypeError: a field has the wrong type.
          MessageRefused: a field has an invalid value; the text says what is wrong and what to do.
        """
        check_topic(self.topic)
        check_type("body", self.body, bytes, "for example text.encode() or bytes(buffer)")
        if not self.body:
            raise MessageRefused(f"message for topic {self.topic!r} has no body; give it at least one byte")
        if len(self.body) > body_bytes_max:
            raise MessageRefused(
                f"body of {len(self.body)} bytes is over the limit of {body_bytes_max}; split it, or store it elsewhere"
            )
        self._check_tags()
        _key_list(self.keys)
        self._check_properties()
        try:
            self._check_numbers()
        except ValueError as error:
            raise MessageRefused(str(error)) from None

    def _check_tags(self) -> None:
        check_type("tags", self.tags, str, "a message has one tag")
        if "||" in self.tags or self.tags != self.tags.strip() or self.tags == "*":
            raise MessageRefused(
                f"tag {self.tags!r} could never be selected; give one tag, without '||' and surrounding spaces"
            )

    def _check_properties(self) -> None:
        check_text_mapping("properties", self.properties)
        for name, value in self.properties.items():
            if name in RESERVED:
                raise MessageRefused(f"property {name!r} is the broker's own; choose another name")
            if not value:
                raise MessageRefused(f"property {name!r} is empty, and brokers drop empty ones; leave it out")

    def _check_numbers(self) -> None:
        check_integer("delay_level", self.delay_level, 0, I32_MAX)
        check_integer("delay_ms", self.delay_ms)
        check_time_ms("deliver_at_ms", self.deliver_at_ms)
        check_integer("flag", self.flag, -I32_MAX - 1, I32_MAX)
        check_type("wait_stored", self.wait_stored, bool)
        if sum(bool(delay) for delay in (self.delay_level, self.delay_ms, self.deliver_at_ms)) > 1:
            raise MessageRefused("message has several delays; give one of delay_level, delay_ms and deliver_at_ms")

    def encode_properties(self, unique_key: str, own: Mapping[str, str] | None = None) -> bytes:
        """Return the property string with *unique_key* and the client's *own* properties in it.

        Raises:
          MessageRefused: a name or value contains a separator, or the properties exceed 32767 bytes.
        """
        properties = {**self.properties, **(own or {})}
        properties[UNIQ_KEY] = unique_key
        properties["WAIT"] = "true" if self.wait_stored else "false"
        extra = {TAGS: self.tags, KEYS: " ".join(_key_list(self.keys))}
        numbers = {DELAY: self.delay_level, "TIMER_DELAY_MS": self.delay_ms, "TIMER_DELIVER_MS": self.deliver_at_ms}
        properties.update({name: text for name, text in extra.items() if text})
        properties.update({name: str(number) for name, number in numbers.items() if number})
        return encoded(properties)


def _key_list(keys: object) -> Sequence[str]:
    """Return *keys* one by one. Raises TypeError, and MessageRefused for a key that brokers would split."""
    found = ([keys] if keys else []) if isinstance(keys, str) else keys
    if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
        raise TypeError(f"keys {keys!r:.60} is of type {type(keys).__name__}; give a str, or a list of them")
    for key in found:
        check_type("key", key, str, "for example str(key)")
        if not key or " " in key:
            raise MessageRefused(
                f"key {key!r} is empty or has a space, which separates keys; give several keys as a list"
            )
    return found


def encoded(properties: Mapping[str, str]) -> bytes:
    """Return the property string of *properties*; raises MessageRefused when it cannot be sent."""
    try:
        data = encode_properties(properties)
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 10) : error.end]
        raise MessageRefused(f"text {text!r} has half a surrogate pair; decode it with errors='replace'") from error
    except ValueError as error:
        raise MessageRefused(str(error)) from error
    if len(data) > 32767:
        raise MessageRefused(f"properties of {len(data)} bytes are over the limit of 32767; put more into the body")
    return data


@final
@unique
class SendStatus(Enum):
    """How safely a message was stored; it was stored in all four cases.

    ``OK``: as safely as the broker is configured for. ``FLUSH_DISK_TIMEOUT``: the flush took too long.
    ``SLAVE_NOT_AVAILABLE``, ``FLUSH_SLAVE_TIMEOUT``: no replica has it yet.
    """

    OK = ResponseCode.SUCCESS
    FLUSH_DISK_TIMEOUT = ResponseCode.FLUSH_DISK_TIMEOUT
    SLAVE_NOT_AVAILABLE = ResponseCode.SLAVE_NOT_AVAILABLE
    FLUSH_SLAVE_TIMEOUT = ResponseCode.FLUSH_SLAVE_TIMEOUT


@final
class SendResult(Struct, frozen=True):
    """Where a sent message was stored.

    ``message_id`` is the unique key from the producer, ``offset_message_id`` the message's place in the broker's
    log. For a batch both are lists separated by commas, and ``queue_offset`` is that of the first message.
    ``recall_handle`` is for `Producer.recall`; a message has one if it is sent with a time or a delay in ms.
    """

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str
    region: str = "DefaultRegion"
    recall_handle: str = ""
