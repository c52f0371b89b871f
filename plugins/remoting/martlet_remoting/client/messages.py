"""Messages to send, results of sends, and received messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, final

from martlet.checksum import crc32
from martlet.message import KEYS, TAGS, UNIQ_KEY, Record, decode_properties, encode_properties
from martlet_remoting.codes import ResponseCode
from martlet_remoting.compression import CompressionError, decompress
from martlet_remoting.packets import MessageQueue

from .arguments import I32_MAX, check_integer, check_text_mapping, check_time_ms, check_type
from .errors import MessageRefused

__all__ = [
    "BODY_BYTES_MAX",
    "DamagedMessage",
    "Message",
    "ReceivedMessage",
    "SendResult",
    "SendStatus",
    "check_topic",
    "offset_message_id",
    "parse_message_id",
    "received",
]

# RocketMQ maxMessageSize, the same in broker and client.
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
TOPIC_CHARACTERS_MAX: Final = 127
GROUP_CHARACTERS_MAX: Final = 120
_NAME_CHARACTERS: Final = frozenset("%|-_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
RETRY_PREFIX: Final = "%RETRY%"
RETRY_TOPIC: Final = "RETRY_TOPIC"
DELAY: Final = "DELAY"
CLUSTER: Final = "CLUSTER"
# Properties that brokers and clients write; a user's property of that name would change what they do.
_RESERVED: Final = frozenset(
    (
        "KEYS",
        "TAGS",
        "WAIT",
        "DELAY",
        "RETRY_TOPIC",
        "REAL_TOPIC",
        "REAL_QID",
        "TRAN_MSG",
        "PGROUP",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "ORIGIN_MESSAGE_ID",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "MSG_REGION",
        "TRACE_ON",
        "UNIQ_KEY",
        "EXTEND_UNIQ_INFO",
        "CONSUME_START_TIME",
        "INNER_NUM",
        "INNER_BASE",
        "DUP_INFO",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "__transactionId__",
        "TRANSACTION_CHECK_TIMES",
        CLUSTER,
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "TTL",
        "MSG_TYPE",
        "ARRIVE_TIME",
        "PUSH_REPLY_TIME",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DEL_UNIQKEY",
        "__CRC32#",
    )
)


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
@dataclass(slots=True)
class Message:
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
            if name in _RESERVED:
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
@dataclass(frozen=True, slots=True)
class SendResult:
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


def offset_message_id(store_host: bytes, position: int) -> str:
    """Return the id that contains a broker's address and a position in its log."""
    return (store_host + position.to_bytes(8, "big")).hex().upper()


def parse_message_id(message_id: str) -> tuple[str, int]:
    """Return the broker address and the log position in an offset message id.

    Raises:
      ValueError: it is not such an id; a unique key looks similar but has no position.
    """
    if len(message_id) not in (32, 56):
        raise ValueError(f"message id {message_id!r} is not an offset message id; these have 32 or 56 characters")
    data = bytes.fromhex(message_id)
    host = host_text(data[:-8])
    return host, int.from_bytes(data[-8:], "big", signed=True)


# Nearly all records of a pull come from few hosts, and formatting costs more than a look-up.
@lru_cache(maxsize=1024)
def host_text(host: bytes) -> str:
    """Return the 8 or 20 bytes of a record's host as address:port."""
    address = ip_address(host[:-4])
    port = int.from_bytes(host[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


@final
@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as a consumer gets it.

    ``body`` is decompressed. ``topic`` is the one it was sent to, while a retry is read from another ``queue``.
    ``message_id`` is the producer's unique key and stays the same in every delivery; ``reconsume_times`` counts
    failed deliveries. ``position`` and ``store_bytes`` are the place and the size of the record in the broker's log.
    Times ending in ``_ms`` are milliseconds since 1970.
    """

    topic: str
    body: bytes
    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str
    tags: str
    keys: tuple[str, ...]
    properties: dict[str, str]
    born_ms: int
    born_host: str
    store_ms: int
    store_host: str
    reconsume_times: int
    flag: int
    sys_flag: int
    position: int
    store_bytes: int


@final
@dataclass(frozen=True, slots=True)
class DamagedMessage:
    """A record whose body does not match its checksum, or cannot be decompressed; ``text`` says which."""

    queue: MessageQueue
    queue_offset: int
    position: int
    topic: str
    text: str


def received(record: Record, broker_name: str) -> ReceivedMessage | DamagedMessage:
    """Return *record* as a consumer sees it; a `DamagedMessage` if its body is not what the producer sent."""
    queue = MessageQueue(record.topic, broker_name, record.queue_id)
    properties = decode_properties(record.properties)
    text = ""
    body = b""
    if record.body and crc32(record.body) & 0x7FFFFFFF != record.body_crc:
        text = f"body of {len(record.body)} bytes does not match its CRC"
    else:
        try:
            body = decompress(record.body, record.sys_flag)
        except CompressionError as error:
            text = str(error)
    if text:
        return DamagedMessage(queue, record.queue_offset, record.position, record.topic, text)
    place = offset_message_id(record.store_host, record.position)
    retried = record.topic.startswith(RETRY_PREFIX)
    return ReceivedMessage(
        topic=properties.get(RETRY_TOPIC, record.topic) if retried else record.topic,
        body=body,
        queue=queue,
        queue_offset=record.queue_offset,
        message_id=properties.get(UNIQ_KEY, place),
        offset_message_id=place,
        tags=properties.get(TAGS, ""),
        keys=tuple(filter(None, properties.get(KEYS, "").split(" "))),
        properties=properties,
        born_ms=record.born_ms,
        born_host=host_text(record.born_host),
        store_ms=record.store_ms,
        store_host=host_text(record.store_host),
        reconsume_times=record.reconsume_times,
        flag=record.flag,
        sys_flag=record.sys_flag,
        position=record.position,
        store_bytes=record.size,
    )
