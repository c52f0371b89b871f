"""Frames: PUBLISH packets for subscribers, encoded once for all subscribers that get the same bytes.

A `Shape` is the MQTT version, the QoS and the subscription identifiers of a subscriber, and has its own encoding. The
packet identifier always differs between subscribers; it is written into a copy.
Some messages differ even within a shape: they expire, must not come back to their publisher, or keep their RETAIN flag.
The shared encoding leaves their frames empty, and `encode_alone` encodes them for each subscriber.

Subscribers of a large message have their own frames without the payload, and share the payload: whole frames would take
the memory of one payload for each subscriber that does not read.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

from martlet.contracts import Buffer
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.runs import Frames
from martlet.records.compression import COMPRESSED
from martlet_mqtt.mapping.messages import Arrived, to_deliver
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.packets import FilterSubscription
from martlet_mqtt.wire.properties import U16, encode_varint

__all__ = [
    "LARGE_BYTES",
    "Grant",
    "Shape",
    "Shapes",
    "arrived_in",
    "encode_alone",
    "has_selector",
    "number_frames",
    "payloads_of",
    "publish_frame",
    "with_payloads",
]

SHAPES_KEPT: Final = 10_000
# In all kept shapes: a client may have many filters that match the same message, and each subset has its own shape.
GRANTS_KEPT: Final = 100_000
DUPLICATE: Final = 0x08
_FIRST: Final = [bytes((0x30 | flags,)) for flags in range(16)]
_EXPIRY: Final = b"\x02"
_IDENTIFIER: Final = b"\x0b"
# Payloads of this size and above are shared. Copying a shorter payload is faster than sending it apart from its frame:
# measured with 1 to 64 KiB, both take the same time at 32 to 64 KiB.
LARGE_BYTES: Final = 1 << 15


@final
class Grant(NamedTuple):
    """A granted subscription; ``identifier`` is 0 for none, and ``selector`` (`selectors.py`) empty for none."""

    subscription: FilterSubscription
    identifier: int
    selector: str = ""


def has_selector(grants: tuple[Grant, ...]) -> bool:
    """Return whether any of *grants* has a selector."""
    return any(grant.selector for grant in grants)


@final
class Shape(NamedTuple):
    """The form of messages for a subscriber, from all its subscriptions that match.

    ``identifiers`` are subscription identifiers as encoded properties. ``keeps_retain`` is True if any subscription has
    the option retain as published, ``no_local`` if all have the option no local.
    """

    version: int
    qos: int
    identifiers: bytes
    encoding: Encoding
    keeps_retain: bool
    no_local: bool
    selects: bool  # any subscription has a selector


@final
class Shapes:
    """A cache of the shapes of all subscribers; equal shapes share their encoding."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, tuple[Grant, ...]], Shape] = {}
        self._grants = 0  # number of grants in all kept shapes
        # Names of the encodings of kept shapes.
        self.encodings: set[str] = set()

    def __len__(self) -> int:
        return len(self._shapes)

    def of(self, version: int, grants: tuple[Grant, ...]) -> Shape:
        """Return the shape for a client of MQTT *version* whose subscriptions *grants* match."""
        shape = self._shapes.get((version, grants))
        if shape is None:
            self._grants += len(grants)
            if len(self._shapes) >= SHAPES_KEPT or self._grants > GRANTS_KEPT:
                self._shapes.clear()
                self.encodings.clear()
                self._grants = len(grants)
            shape = self._shapes[version, grants] = self._make(version, grants)
            self.encodings.add(shape.encoding.name)
        return shape

    def _make(self, version: int, grants: tuple[Grant, ...]) -> Shape:
        qos = max(grant.subscription.qos for grant in grants)
        identifiers = b""
        if version == V5:
            numbers = sorted({grant.identifier for grant in grants if grant.identifier})
            identifiers = b"".join([_IDENTIFIER + encode_varint(number) for number in numbers])
        return Shape(
            version,
            qos,
            identifiers,
            encoding_of(version == V5, qos, identifiers),
            any(grant.subscription.retain_as_published for grant in grants),
            all(grant.subscription.no_local for grant in grants),
            has_selector(grants),
        )


def encoding_of(has_properties: bool, qos: int, identifiers: bytes = b"") -> Encoding:
    """Return the encoding of a shape: a frame for each message, with packet identifier 0 if it has QoS 1 or 2."""

    def encode(piece: Buffer) -> list[bytes]:
        frames: list[bytes] = []
        for _queue_id, _offset, sys_flag, body, properties in parts(piece):
            if len(body) >= LARGE_BYTES or sys_flag & COMPRESSED:  # a compressed body may be large
                frames.append(b"")
                continue
            arrived = to_deliver(sys_flag, body, properties, LARGE_BYTES)
            if arrived is None or arrived.expires_ms or arrived.client_id or arrived.retain:
                frames.append(b"")
                continue
            content = arrived.properties + identifiers if has_properties else None
            frames.append(publish_frame(arrived.name, arrived.payload, min(qos, arrived.qos) << 1, content))
        return frames

    return Encoding(f"mqtt {has_properties:d}{qos} {identifiers.hex()}", encode)


def publish_frame(
    name: bytes, payload: bytes, flags: int, properties: bytes | None, packet_id: int = 0, more: int = 0
) -> bytes:
    """Return a PUBLISH packet without the last *more* bytes of its payload, which the caller sends after it.

    Args:
      flags: the lower four bits of the first byte; with QoS 1 or 2, the packet has *packet_id*.
      properties: in MQTT's encoding without their length; None for MQTT 3.
    """
    number = U16.pack(packet_id) if flags & 6 else b""
    if properties is None:
        head = number
    elif properties:
        head = number + encode_varint(len(properties)) + properties
    else:
        head = number + b"\0"
    size = 2 + len(name) + len(head) + len(payload) + more
    return b"%b%b%b%b%b%b" % (_FIRST[flags], encode_varint(size), U16.pack(len(name)), name, head, payload)


def encode_alone(
    arrived: Arrived, shape: Shape, client_id: str, now_ms: int, *, retain: bool = False, expires: bool = True
) -> bytes:
    """Return the frame of one message for one subscriber, without its ``large`` payload; empty if it must not be sent.

    Args:
      retain: whether a new subscription causes the delivery, which sets RETAIN. Otherwise the publisher's RETAIN is
        kept for a shape that ``keeps_retain``.
      expires: whether to omit an expired message; False for a message sent before, which is sent again even after its
        expiry [MQTT-4.3.3-7].
    """
    if arrived.client_id and shape.no_local and arrived.client_id == client_id:
        return b""
    properties: bytes | None = None
    if shape.version == V5:
        properties = arrived.properties + shape.identifiers
        if arrived.expires_ms:
            left_s = max(0, arrived.expires_ms - now_ms + 999) // 1000
            # A producer of another protocol may have chosen an expiry beyond MQTT's 32 bits.
            properties = _EXPIRY + min(left_s, 0xFFFF_FFFF).to_bytes(4) + properties
    if expires and 0 < arrived.expires_ms <= now_ms:
        return b""
    flags = min(shape.qos, arrived.qos) << 1 | (retain or (arrived.retain and shape.keeps_retain))
    return publish_frame(arrived.name, arrived.payload, flags, properties, 0, len(arrived.large))


def number_frames(data: bytearray, starts: Iterable[int], ids: Sequence[int], flags: int = 0) -> None:
    """Write packet identifiers into the frames that begin at *starts* in *data*; add *flags* to their first bytes.

    The native kernel has this function as well; see `martlet.runtime.native`.
    """
    for start, packet_id in zip(starts, ids, strict=True):
        at = start + 2
        while data[at - 1] > 127:
            at += 1
        at += 2 + (data[at] << 8 | data[at + 1])
        data[at] = packet_id >> 8
        data[at + 1] = packet_id & 255
        if flags:
            data[start] |= flags


def arrived_in(records: Buffer, bytes_max: int) -> Sequence[Arrived | None]:
    """Return the message of each of *records*, as `to_deliver`, with large payloads in ``large``."""
    messages: list[Arrived | None] = []
    for _queue_id, _offset, sys_flag, body, properties in parts(records):
        arrived = to_deliver(sys_flag, body, properties, bytes_max)
        if arrived is not None and len(arrived.payload) >= LARGE_BYTES:
            arrived.large, arrived.payload = arrived.payload, b""
        messages.append(arrived)
    return messages


def payloads_of(frames: Frames, first: int, last: int) -> Sequence[tuple[int, bytes]]:
    """Return the shared payloads of messages *first* to *last* (exclusive), as arguments of `with_payloads`."""
    if frames.payloads is None:
        return ()
    begin = frames.ends[first - 1] if first else 0
    return [(frames.ends[index] - begin, each) for index, each in frames.payloads.items() if first <= index < last]


def with_payloads(data: Buffer, payloads: Iterable[tuple[int, bytes]]) -> list[Buffer]:
    """Return *data* in pieces with *payloads* inserted; each is a position in *data* and a payload."""
    pieces: list[Buffer] = []
    at = 0
    for end, payload in payloads:
        pieces += (data[at:end], payload)
        at = end
    if at < len(data):
        pieces.append(data[at:])
    return pieces
