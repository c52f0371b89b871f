"""Finds the usual packets in what was received, many at a time; pure functions.

A publisher or subscriber at full speed sends the same kind of packet again and again: PUBLISH with neither RETAIN nor
properties, and acknowledgements of four bytes. These are taken out of the received bytes without an object for each.
All others are left to the codec, and so is every packet with an error.
"""

import re
from collections.abc import Sequence
from struct import unpack
from typing import Final, NamedTuple, final

from martlet_mqtt.wire.codes import V5, PacketType
from martlet_mqtt.wire.names import Name, Names

__all__ = ["AckRun", "PublishRun", "scan_acks", "scan_publishes"]

# The first bytes of PUBLISH with QoS 0, 1 and 2, without DUP and RETAIN.
PUBLISH_FIRST: Final = frozenset((0x30, 0x32, 0x34))
# Acknowledgements without a reason, by their first byte.
_ACK_RUNS: Final = {
    first: re.compile(b"(?:%b\x02(?!\x00\x00)..)+" % re.escape(bytes((first,))), re.DOTALL)
    for first in (0x40, 0x50, 0x62, 0x70)
}
ACK_BYTES: Final = 4
# What one turn of the event loop handles takes 3 to 8 ms with this many.
RUN_PACKETS_MAX: Final = 1024


@final
class PublishRun(NamedTuple):
    """Consecutive PUBLISH packets with one QoS, without RETAIN, DUP and properties.

    ``ids`` has two bytes for each, and is empty with QoS 0. Packet *i* is in ``data`` before ``ends[i]``, the first
    one from ``start`` on.
    """

    qos: int
    names: Sequence[Name]
    bodies: Sequence[bytes]
    ids: Sequence[bytes]
    data: bytes
    start: int
    ends: Sequence[int]


@final
class AckRun(NamedTuple):
    """Consecutive PUBACK, PUBREC, PUBREL or PUBCOMP packets that report success."""

    kind: PacketType
    ids: tuple[int, ...]


def scan_publishes(
    data: bytes, at: int, version: int, names: Names, bytes_max: int, packets_max: int = RUN_PACKETS_MAX
) -> PublishRun | None:
    """Return the run of PUBLISH packets at *at*; None if the codec must decode the packet there.

    A run ends before a packet of another kind, one that is incomplete or not usual, one with a name that is not
    allowed, one of more than *bytes_max*, and after *packets_max* packets.
    """
    first = data[at]
    qos = first >> 1 & 3
    found: list[Name] = []
    bodies: list[bytes] = []
    ids: list[bytes] = []
    ends: list[int] = []
    start, end, has_properties = at, len(data), version == V5
    prefix, size, name_end = b"\0", 0, 0  # fixed header and name of the previous packet, and their sizes
    name: Name | None = None
    table = names.table
    while at < end and len(ends) < packets_max:
        if data.startswith(prefix, at):
            begin, stop = at + name_end, at + size
        else:
            if data[at] != first or at + 4 > end:
                break
            size, head = data[at + 1], at + 2
            if size > 127:
                if 0 < data[head] < 128:  # a length of two bytes, as most packets have
                    size, head = size & 127 | data[head] << 7, head + 1
                else:
                    size, head = _long_size(data, at, end)
            begin = head + 2 + (data[head] << 8 | data[head + 1]) if head + 2 <= end else end
            stop = head + size
            if stop > end or begin > stop or stop - at > bytes_max:
                break
            name = table.get(data[head + 2 : begin]) or names.learn(data[head + 2 : begin])
            if name is None:
                break
            prefix, name_end, size = data[at:begin], begin - at, stop - at
        if qos:
            packet_id = data[begin : begin + 2]
            begin += 2
            if packet_id == b"\0\0":
                break
        if has_properties:
            if begin >= stop or stop > end or data[begin]:
                break
            begin += 1
        if stop > end or begin > stop:
            break
        assert name is not None
        found.append(name)
        bodies.append(data[begin:stop])
        if qos:
            ids.append(packet_id)
        ends.append(stop)
        at = stop
    return PublishRun(qos, found, bodies, ids, data, start, ends) if ends else None


def _long_size(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the size of the rest of the packet at *at*, and where that begins; one beyond the end if unknown."""
    value = shift = 0
    for place in range(at + 1, min(at + 5, end)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # A length with more bytes than necessary is decoded and encoded again [MQTT-1.5.5-1].
            return (value, place + 1) if byte else (end, end)
        shift += 7
    return end, end


def scan_acks(data: bytes, at: int, packets_max: int = RUN_PACKETS_MAX) -> tuple[AckRun, int] | None:
    """Return the run of acknowledgements at *at*, and where it ends; None if the codec must decode the packet there.

    It ends after *packets_max* packets.
    """
    match = _ACK_RUNS[data[at]].match(data, at, at + ACK_BYTES * packets_max) if data[at] in _ACK_RUNS else None
    if match is None:
        return None
    end = match.end()
    found = data[at:end]
    pairs = bytearray(len(found) // 2)
    pairs[0::2] = found[2::ACK_BYTES]
    pairs[1::2] = found[3::ACK_BYTES]
    return AckRun(PacketType(found[0] >> 4), unpack(f">{len(pairs) // 2}H", pairs)), end
