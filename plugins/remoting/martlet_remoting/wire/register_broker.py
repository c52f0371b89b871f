"""Decodes and encodes REGISTER_BROKER requests.

The header identifies the broker, and the body has its topics: in JSON, or if the header has ``compressed=true``, as a
deflated sequence of length-prefixed texts (RocketMQ RegisterBrokerBody). Brokers before 3.0.11 send the bare topic
table.
"""

import zlib
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final, final

import msgspec
import orjson
from msgspec import field
from msgspec.structs import replace

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.runtime.steps import Budget, Steps
from martlet_remoting.wire.codes import VERSION_3_0_11, VERSION_5_0_0
from martlet_remoting.wire.fastjson import (
    BODY_BYTES_MAX,
    VALUES_MAX,
    Lazy,
    dumps_in_steps,
    integer,
    load_object,
    read_object,
)
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import TopicShape, Version

__all__ = ["Registration", "decode_registration", "encode_registration", "order_topics"]

# 100,000 topics with the longest names inflate to 30 MiB; deflate can expand a frame 1000 times. Only one inflated
# piece is in memory at a time.
INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024
INFLATED_AT_ONCE: Final = 131_072
FED_AT_ONCE: Final = 65_536
CHECKED_AT_ONCE: Final = 1 << 20
BYTE_US: Final = 0.001  # of a CRC
# A topic's table has nine values; a broker with 100,000 topics takes about 100 MB while it is decoded.
VALUES_OF_A_TOPIC: Final = 16
BYTES_OF_A_STEP: Final = 256
NAME_CHARS_MAX: Final = 512  # RocketMQ's topics have at most 262, with %RETRY% before them
VERSION_BYTES_MAX: Final = 1024
TOPIC_BYTES_MAX: Final = 65_536  # a topic with all its attributes; also the list of filter servers
FILTER_SERVERS_MAX: Final = 256
# RocketMQ TopicQueueMappingInfo, without currIdMap.
MAPPING_FIELDS: Final = ("bname", "dirty", "epoch", "scope", "topic", "totalQueues")
CRC_MASK: Final = 0x7FFFFFFF
# First byte of a deflated body (RFC 1950); 5.x brokers with compressedRegister send one with ``compressed=false``.
ZLIB: Final = b"\x78"

_LENGTH: Final = Struct(">i")


@final
class Registration(msgspec.Struct, frozen=True):
    """One broker and its topics. ``acting_master`` is None for brokers that do not support it (4.x).

    If ``complete``, ``topics`` are all topics of the broker; otherwise only the changed ones.
    """

    cluster: str
    name: str
    broker_id: int
    address: str
    ha_address: str = ""
    timeout_ms: int | None = None
    acting_master: bool | None = None
    zone: str | None = None
    version: Version = field(default_factory=Version)
    topics: tuple[TopicShape, ...] = ()
    mappings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    filter_servers: tuple[str, ...] | None = None
    complete: bool = False


def decode_registration(command: Command, topics_max: int) -> Steps[Registration]:
    """Decode a REGISTER_BROKER request in slices.

    Raises:
      Refused: a header field is missing or wrong, the checksum does not match, or there are more than *topics_max*
        topics.
      RemoteProtocolError: the body cannot be read.
    """
    crc = command.integer("bodyCrc32", 0)
    if crc and crc != (yield from _checksum(command.body)):
        raise Refused(Reason.NOT_SUPPORTED, "crc32 not match")
    timeout_ms = command.integer("heartbeatTimeoutMillis", -1)
    found = Registration(
        _short("clusterName", command.text("clusterName")),
        _short("brokerName", command.text("brokerName")),
        command.integer("brokerId"),
        _short("brokerAddr", command.text("brokerAddr")),
        _short("haServerAddr", command.text("haServerAddr", "")),
        timeout_ms if timeout_ms >= 0 else None,
        command.boolean("enableActingMaster") if command.ext.get("enableActingMaster") is not None else None,
        _short("__ZONE_NAME", command.text("__ZONE_NAME", "")) or None,
    )
    table = _Table(topics_max)
    try:
        yield from table.read(command)
    except ValueError as error:
        raise RemoteProtocolError(f"registration cannot be read; {error}") from error
    return replace(
        found,
        version=table.version,
        topics=tuple(table.topics),
        mappings=table.mappings,
        filter_servers=table.filter_servers,
    )


def _checksum(body: bytes) -> Steps[int]:
    whole = memoryview(body)
    return _checksum_of_pieces(whole[start : start + CHECKED_AT_ONCE] for start in range(0, len(body), CHECKED_AT_ONCE))


def _checksum_of_pieces(pieces: Iterable[bytes | memoryview]) -> Steps[int]:
    crc, budget = 0, Budget(BYTE_US)
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        if budget.is_over(len(piece)):
            yield
    return crc & CRC_MASK


def _short(what: str, text: str) -> str:
    if len(text) > NAME_CHARS_MAX:
        raise Refused(Reason.PARAMETER, f"{what} {text!r:.80} has {len(text)} characters; at most {NAME_CHARS_MAX}")
    return text


@final
class _Table:
    """The topic table in the body, read from any of the three formats."""

    def __init__(self, topics_max: int) -> None:
        self.version = Version()
        self.topics: list[TopicShape] = []
        self.mappings: dict[str, Mapping[str, object]] = {}
        self.filter_servers: tuple[str, ...] | None = None
        self._topics_max = topics_max
        self._mapped = 0
        self._budget = Budget()

    def read(self, command: Command) -> Steps[None]:
        if not command.body:
            return
        bare = command.version < VERSION_3_0_11
        if not bare and (command.boolean("compressed") or command.body.startswith(ZLIB)):
            yield from self._take_compressed(_Texts(command.body), command.version)
            return
        values_max = VALUES_MAX + VALUES_OF_A_TOPIC * self._topics_max
        body = yield from read_object(
            command.body, bytes_max=INFLATED_BYTES_MAX, values_max=values_max, shape=_shape_of_object
        )
        yield from self._take_wrapper(body if bare else _mapping(body.get("topicConfigSerializeWrapper")))
        if not bare:
            self._take_filter_servers(body.get("filterServerList"))

    def _check_count(self, count: int, what: str) -> None:
        if count > self._topics_max:
            text = f"broker registers {count} {what}; nameserver.broker_topics_max is {self._topics_max}"
            raise Refused(Reason.PARAMETER, text)

    def _take_wrapper(self, wrapper: Mapping[str, object]) -> Steps[None]:
        self.version = Version.from_json(wrapper.get("dataVersion"))
        table = _mapping(wrapper.get("topicConfigTable"))
        self._check_count(len(table), "topics")
        for name, fields in table.items():
            shape = fields if isinstance(fields, TopicShape) else TopicShape.from_json(name, fields)
            _short("topic", shape.name)
            self.topics.append(shape)
            if self._budget.is_over():
                yield
        mappings = _mapping(wrapper.get("topicQueueMappingInfoMap"))
        for topic, fields in mappings.items():
            self._take_mapping(topic, _mapping(fields))
            if self._budget.is_over():
                yield

    def _take_mapping(self, topic: str, fields: Mapping[str, object]) -> None:
        ids = fields.get("currIdMap")
        self._mapped += 1 + (len(ids) if isinstance(ids, Mapping) else 0)
        self._check_count(self._mapped, "mapped topics and queues")
        self.mappings[_short("topic", topic)] = _mapping_info(fields)

    def _take_filter_servers(self, value: object) -> None:
        if isinstance(value, list):
            if len(value) > FILTER_SERVERS_MAX:
                text = f"broker registers {len(value)} filter servers; at most {FILTER_SERVERS_MAX}"
                raise Refused(Reason.PARAMETER, text)
            self.filter_servers = tuple(_short("filter server", str(address)) for address in value)

    def _take_compressed(self, texts: "_Texts", version: int) -> Steps[None]:
        self.version = Version.from_json(load_object((yield from texts.text(VERSION_BYTES_MAX))))
        count = yield from texts.count()
        self._check_count(count, "topics")
        for _ in range(count):
            text = yield from texts.text(TOPIC_BYTES_MAX)
            self.topics.append(_shape_of_text(text.decode()))
            if self._budget.is_over():
                yield
        self._take_filter_servers(orjson.loads((yield from texts.text(TOPIC_BYTES_MAX)) or b"null"))
        if version >= VERSION_5_0_0 and not (yield from texts.at_end()):
            yield from self._take_mappings(texts)
        yield from texts.read_to_end()

    def _take_mappings(self, texts: "_Texts") -> Steps[None]:
        for _ in range((yield from texts.count())):
            data = yield from texts.text(BODY_BYTES_MAX)
            fields = yield from read_object(data)
            self._take_mapping(str(fields.get("topic")), fields)
            if self._budget.is_over(1 + len(data) // BYTES_OF_A_STEP):
                yield


def _shape_of_object(name: object, fields: dict[object, object]) -> object:
    """Convert a topic's configuration to its much smaller `TopicShape`; return other objects unchanged."""
    if "writeQueueNums" not in fields or not isinstance(name, str):
        return fields
    return TopicShape.from_json(name, fields)


def _mapping_info(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of a static topic's mapping that clients read (RocketMQ TopicQueueMappingInfo)."""
    found: dict[str, object] = {}
    for name in MAPPING_FIELDS:
        value = fields.get(name)
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= NAME_CHARS_MAX):
            found[name] = value
    ids = fields.get("currIdMap")
    if isinstance(ids, Mapping):
        found["currIdMap"] = {key: value for key, value in ids.items() if isinstance(value, int)}
    return found


@final
class _Texts:
    """Reads i32 counts and texts with an i32 length from a deflated body; inflates no more than needed."""

    __slots__ = ("_at", "_body", "_data", "_fed", "_inflated", "_inflater")

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._fed = 0  # bytes of the body passed to the inflater
        self._inflater = zlib.decompressobj()
        self._inflated = 0
        self._data = b""
        self._at = 0

    def _inflate(self) -> bool:
        """Inflate the next piece; return False at the end."""
        inflater = self._inflater
        if inflater.eof:
            return False
        more = inflater.unconsumed_tail
        if not more:
            more = self._body[self._fed : self._fed + FED_AT_ONCE]
            self._fed += len(more)
            if not more:
                raise RemoteProtocolError(f"registration is cut short after {self._inflated} bytes")
        try:
            piece = inflater.decompress(more, INFLATED_AT_ONCE)
        except zlib.error as error:
            raise RemoteProtocolError(f"registration cannot be inflated; {error}") from error
        self._inflated += len(piece)
        if self._inflated > INFLATED_BYTES_MAX:
            raise RemoteProtocolError(f"registration is over {INFLATED_BYTES_MAX} bytes when inflated")
        self._data = self._data[self._at :] + piece
        self._at = 0
        return True

    def _take(self, size: int) -> Steps[bytes]:
        while len(self._data) - self._at < size:
            if not self._inflate():
                raise RemoteProtocolError(f"registration is cut short after {self._inflated} bytes")
            yield
        self._at += size
        return self._data[self._at - size : self._at]

    def at_end(self) -> Steps[bool]:
        while self._at == len(self._data):
            if not self._inflate():
                return True
            yield
        return False

    def read_to_end(self) -> Steps[None]:
        """Inflate the remaining bytes, which newer brokers may add, to verify the checksum."""
        while self._inflate():
            self._at = len(self._data)
            yield

    def count(self) -> Steps[int]:
        number: int = _LENGTH.unpack((yield from self._take(4)))[0]
        if number < 0:
            raise RemoteProtocolError(f"registration says {number} before byte {self._inflated}; a count is at least 0")
        return number

    def text(self, bytes_max: int) -> Steps[bytes]:
        size = yield from self.count()
        if size > bytes_max:
            text = f"registration has a text of {size} bytes before byte {self._inflated}; at most {bytes_max}"
            raise RemoteProtocolError(text)
        return (yield from self._take(size))


def _shape_of_text(text: str) -> TopicShape:
    """Parse ``name readQueues writeQueues perm filterType [attributes]`` (TopicConfig.encode)."""
    words = text.split(" ", 5)
    if len(words) < 4:
        raise RemoteProtocolError(f"topic {text!r:.200} is registered without its queues and permission")
    return TopicShape(_short("topic", words[0]), integer(words[1], 16), integer(words[2], 16), integer(words[3], 6))


def _mapping(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RemoteProtocolError(f"registration has {value!r:.80} where an object should be")
    return value


def encode_registration(
    registration: Registration, topics: Iterable[tuple[str, Mapping[str, object]]]
) -> Steps[tuple[dict[str, object], list[bytes]]]:
    """Return header fields and the body in pieces; *topics*, TopicConfigs by name, replace ``registration.topics``."""
    version = registration.version.as_json()
    body = yield from dumps_in_steps(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": version,
                "mappingDataVersion": Version().as_json(),
                "topicConfigTable": Lazy((name, orjson.dumps(fields)) for name, fields in topics),
                "topicQueueMappingDetailMap": {},
                "topicQueueMappingInfoMap": {},
            },
        }
    )
    ext: dict[str, object] = {
        "brokerAddr": registration.address,
        "brokerId": registration.broker_id,
        "brokerName": registration.name,
        "bodyCrc32": (yield from _checksum_of_pieces(body)),
        "clusterName": registration.cluster,
        "compressed": False,
        "enableActingMaster": False,
        "haServerAddr": registration.ha_address,
    }
    if registration.timeout_ms is not None:
        ext["heartbeatTimeoutMillis"] = registration.timeout_ms
    return ext, body


def order_topics(body: bytes) -> Iterable[tuple[str, str]]:
    """Yield (topic, order configuration) from the answer to a registration; nothing if it has no body."""
    if not body:
        return ()
    return [(topic, str(value)) for topic, value in _mapping(load_object(body).get("table")).items()]
