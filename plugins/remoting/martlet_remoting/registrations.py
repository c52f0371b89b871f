"""The body and header of REGISTER_BROKER, read and written.

A broker says who it is in the header and what topics it has in the body: JSON, or, when
the header says so, a deflated sequence of length-prefixed texts (RocketMQ RegisterBrokerBody).
Brokers before 3.0.11 send the bare topic table.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, final

import orjson

from martlet.errors import Reason, Refused, RemoteProtocolError

from .codes import VERSION_3_0_11, VERSION_5_0_0
from .packets import Command
from .routes import TopicShape, Version, integer, load_object

__all__ = ["Registration", "decode_registration", "encode_registration", "order_topics"]

# A million topics of the longest name; deflate makes 1000 times more of a frame than it holds.
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
CRC_MASK: Final = 0x7FFFFFFF
# How a deflated body begins (RFC 1950); 5.x brokers with compressedRegister say ``compressed=false`` and send one.
ZLIB: Final = b"\x78"

_LENGTH: Final = Struct(">i")


@final
@dataclass(frozen=True, slots=True)
class Registration:
    """One broker and its topics. ``acting_master`` is None from brokers that do not know of it (4.x).

    ``complete`` says that ``topics`` are all it has; a broker may register a changed topic alone.
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


def decode_registration(command: Command) -> Registration:
    """Return what a REGISTER_BROKER says.

    Raises:
      Refused: a header field is missing or wrong, or the checksum does not match.
      RemoteProtocolError: the body cannot be read.
    """
    crc = command.integer("bodyCrc32", 0)
    if crc and crc != zlib.crc32(command.body) & CRC_MASK:
        raise Refused(Reason.NOT_SUPPORTED, "crc32 not match")
    table = _Table(command)
    timeout_ms = command.integer("heartbeatTimeoutMillis", -1)
    return Registration(
        command.text("clusterName"),
        command.text("brokerName"),
        command.integer("brokerId"),
        command.text("brokerAddr"),
        command.text("haServerAddr", ""),
        timeout_ms if timeout_ms >= 0 else None,
        command.boolean("enableActingMaster") if command.ext.get("enableActingMaster") is not None else None,
        command.text("__ZONE_NAME", "") or None,
        table.version,
        tuple(table.topics),
        table.mappings,
        table.filter_servers,
    )


@final
class _Table:
    """The body, in whichever of its three forms."""

    def __init__(self, command: Command) -> None:
        self.version = Version()
        self.topics: list[TopicShape] = []
        self.mappings: Mapping[str, Mapping[str, object]] = {}
        self.filter_servers: tuple[str, ...] | None = None
        if not command.body:
            return
        if command.version < VERSION_3_0_11:
            self.take_wrapper(load_object(command.body))
        elif command.boolean("compressed") or command.body.startswith(ZLIB):
            self.take_compressed(_inflated(command.body), command.version)
        else:
            body = load_object(command.body)
            self.take_wrapper(_mapping(body.get("topicConfigSerializeWrapper")))
            self.take_filter_servers(body.get("filterServerList"))

    def take_wrapper(self, wrapper: Mapping[str, object]) -> None:
        self.version = Version.from_json(wrapper.get("dataVersion"))
        table = _mapping(wrapper.get("topicConfigTable"))
        self.topics = [TopicShape.from_json(name, fields) for name, fields in table.items()]
        mappings = _mapping(wrapper.get("topicQueueMappingInfoMap"))
        self.mappings = {topic: _mapping(fields) for topic, fields in mappings.items()}

    def take_filter_servers(self, value: object) -> None:
        if isinstance(value, list):
            self.filter_servers = tuple(str(address) for address in value)

    def take_compressed(self, body: bytes, version: int) -> None:
        texts = _Texts(body)
        self.version = Version.from_json(load_object(texts.text()))
        self.topics = [_shape_of_text(texts.text().decode()) for _ in range(texts.count())]
        self.take_filter_servers(orjson.loads(texts.text() or b"null"))
        if version >= VERSION_5_0_0 and texts.left():
            found = [load_object(texts.text()) for _ in range(texts.count())]
            self.mappings = {str(fields.get("topic")): fields for fields in found}


@final
class _Texts:
    """Reads i32 counts, and texts behind their i32 length."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def left(self) -> int:
        return len(self.data) - self.position

    def count(self) -> int:
        if self.left() < 4:
            raise RemoteProtocolError(f"registration is cut short at byte {self.position}")
        number: int = _LENGTH.unpack_from(self.data, self.position)[0]
        self.position += 4
        # Each item takes at least its length field, so a count over this is not true.
        if not 0 <= number <= self.left():
            raise RemoteProtocolError(f"registration says {number} at byte {self.position}; {self.left()} bytes follow")
        return number

    def text(self) -> bytes:
        length = self.count()
        self.position += length
        return self.data[self.position - length : self.position]


def _inflated(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(body, BODY_BYTES_MAX)
    except zlib.error as error:
        raise RemoteProtocolError(f"registration cannot be inflated; {error}") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise RemoteProtocolError(f"registration is cut short, or over {BODY_BYTES_MAX} bytes when inflated")
    return data


def _shape_of_text(text: str) -> TopicShape:
    """The topic of ``name readQueues writeQueues perm filterType [attributes]`` (TopicConfig.encode)."""
    words = text.split(" ", 5)
    if len(words) < 4:
        raise RemoteProtocolError(f"topic {text!r:.200} is registered without its queues and permission")
    return TopicShape(words[0], integer(words[1], 16), integer(words[2], 16), integer(words[3], 6))


def _mapping(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RemoteProtocolError(f"registration has {value!r:.80} where an object should be")
    return value


def encode_registration(
    registration: Registration, topics: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, object], bytes]:
    """Return header fields and body; *topics* are TopicConfigs by name and stand for ``registration.topics``."""
    version = registration.version.as_json()
    body = orjson.dumps(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": version,
                "mappingDataVersion": Version().as_json(),
                "topicConfigTable": topics,
                "topicQueueMappingDetailMap": {},
                "topicQueueMappingInfoMap": {},
            },
        }
    )
    ext: dict[str, object] = {
        "brokerAddr": registration.address,
        "brokerId": registration.broker_id,
        "brokerName": registration.name,
        "bodyCrc32": zlib.crc32(body) & CRC_MASK,
        "clusterName": registration.cluster,
        "compressed": False,
        "enableActingMaster": False,
        "haServerAddr": registration.ha_address,
    }
    if registration.timeout_ms is not None:
        ext["heartbeatTimeoutMillis"] = registration.timeout_ms
    return ext, body


def order_topics(body: bytes) -> Iterable[tuple[str, str]]:
    """Return (topic, order configuration) from the answer to a registration; none when there is no body."""
    if not body:
        return ()
    return [(topic, str(value)) for topic, value in _mapping(load_object(body).get("table")).items()]
