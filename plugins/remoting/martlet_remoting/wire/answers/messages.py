"""Messages as consumers receive them."""

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, final

from martlet.message import KEYS, TAGS, UNIQ_KEY, Record, decode_properties
from martlet.records.compression import CompressionError, decompress
from martlet.runtime.checksum import crc32
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["DamagedMessage", "ReceivedMessage", "offset_message_id", "parse_message_id", "received"]

RETRY_PREFIX: Final = "%RETRY%"
RETRY_TOPIC: Final = "RETRY_TOPIC"


def offset_message_id(store_host: bytes, position: int) -> str:
    """Return the offset message id: it contains a broker's address and a position in its log."""
    return (store_host + position.to_bytes(8, "big")).hex().upper()


def parse_message_id(message_id: str) -> tuple[str, int]:
    """Return the broker address and the log position in an offset message id.

    Raises:
      ValueError: the text is no offset message id; a unique key looks similar but has no position.
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

    ``body`` is decompressed. ``topic`` is the topic it was sent to, also for a retry, whose ``queue`` belongs to
    another topic. ``message_id`` is the producer's unique key and stays the same in every delivery; ``reconsume_times``
    counts failed deliveries. ``position`` and ``store_bytes`` are the place and the size of the record in the broker's
    log. Times ending in ``_ms`` are milliseconds since 1970.
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
    """A record whose body does not match its checksum, or cannot be decompressed; ``text`` has the reason."""

    queue: MessageQueue
    queue_offset: int
    position: int
    topic: str
    text: str


def received(record: Record, broker_name: str) -> ReceivedMessage | DamagedMessage:
    """Return *record* as a consumer sees it; a `DamagedMessage` if its body differs from the one that was sent."""
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
