"""Scanners for runs of the most common packets in the receive buffer; pure functions.

A client at full speed sends the same kind of packet again and again: PUBLISH without RETAIN and properties, or
acknowledgements of four bytes. The scanners decode a run of them without an object for each packet. The codec decodes
all other packets, and reports every error.
"""

import re
from collections.abc import Sequence
from struct import pack, unpack
from typing import Final, NamedTuple, final

from martlet_mqtt.wire.codes import V5, PacketType
from martlet_mqtt.wire.names import Name, Names

__all__ = ["PUBCOMP", "PUBREL", "AckRun", "PublishRun", "acks_of", "ids_of", "scan_acks", "scan_publishes"]

# The first bytes of PUBLISH with QoS 0, 1 and 2, without DUP and RETAIN.
PUBLISH_FIRST: Final = frozenset((0x30, 0x32, 0x34))
# Acknowledgements without a reason, and their kind, by their first byte.
_ACK_RUNS: Final = {
    first: (re.compile(b"(?:%b\x02(?!\x00\x00)..)+" % re.escape(bytes((first,))), re.DOTALL), PacketType(first >> 4))
    for first in (0x40, 0x50, 0x62, 0x70)
}
ACK_BYTES: Final = 4
# First bytes of packets.
PUBREL: Final = 0x62
PUBCOMP: Final = 0x70
# The upper and the lower bytes of all packet identifiers from 0 on. For consecutive identifiers, comparing with these
# bytes and copying them takes a tenth of decoding and encoding them one by one.
_HIGH: Final = b"".join([bytes((high,)) * 256 for high in range(256)])
_LOW: Final = bytes(range(256)) * 256
# Packets in one turn of the event loop: handling this many takes 3 to 8 ms.
RUN_PACKETS_MAX: Final = 1024


@final
class PublishRun(NamedTuple):
    """Consecutive PUBLISH packets with one QoS, without RETAIN, DUP and properties.

    ``ids`` has two bytes for each packet, and is empty with QoS 0. Packet *i* is in ``data`` from ``ends[i - 1]`` to
    ``ends[i]``; the first packet begins at ``start``.
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
    """Consecutive PUBACK, PUBREC, PUBREL or PUBCOMP packets that report success; ``ids`` as `ids_of` returns them."""

    kind: PacketType
    ids: Sequence[int]


def scan_publishes(
    data: bytes, at: int, version: int, names: Names, bytes_max: int, packets_max: int = RUN_PACKETS_MAX
) -> PublishRun | None:
    """Return the run of PUBLISH packets at *at*; None if the codec must decode the packet there.

    The run ends after *packets_max* packets, or before a packet that is of another kind or incomplete, or has RETAIN,
    DUP, properties, an invalid name, or more than *bytes_max* bytes.
    """
    first = data[at]
    qos = first >> 1 & 3
    run_names: list[Name] = []
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
                if 0 < data[head] < 128:  # a length field of two bytes, the common case
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
        run_names.append(name)
        bodies.append(data[begin:stop])
        if qos:
            ids.append(packet_id)
        ends.append(stop)
        at = stop
    return PublishRun(qos, run_names, bodies, ids, data, start, ends) if ends else None


def _long_size(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the size of the content of the packet at *at*, and the position where it begins; both *end* if unknown."""
    value = shift = 0
    for place in range(at + 1, min(at + 5, end)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # The codec handles a length field with more bytes than necessary [MQTT-1.5.5-1].
            return (value, place + 1) if byte else (end, end)
        shift += 7
    return end, end


def scan_acks(data: bytes, at: int, packets_max: int = RUN_PACKETS_MAX) -> tuple[AckRun, int] | None:
    """Return the run of acknowledgements at *at* and its end; None if the codec must decode the packet there.

    The run ends after *packets_max* packets.
    """
    found = _ACK_RUNS.get(data[at])
    if found is None:
        return None
    pattern, kind = found
    match = pattern.match(data, at, at + ACK_BYTES * packets_max)
    if match is None:
        return None
    end = match.end()
    run = data[at:end]
    ids = bytearray(len(run) // 2)
    ids[0::2] = run[2::ACK_BYTES]
    ids[1::2] = run[3::ACK_BYTES]
    return AckRun(kind, ids_of(ids)), end


def _all_ids() -> bytes:
    ids = bytearray(2 * len(_LOW))
    ids[0::2], ids[1::2] = _HIGH, _LOW
    return bytes(ids)


_IDS: Final = _all_ids()


def ids_of(data: bytes | bytearray) -> Sequence[int]:
    """Return the packet identifiers in *data*, two bytes each; a range if they are consecutive, as they usually are."""
    first, count = data[0] << 8 | data[1], len(data) // 2
    if _IDS.startswith(data, 2 * first):
        return range(first, first + count)
    ids: tuple[int, ...] = unpack(f">{count}H", data)
    return ids


def acks_of(first: int, ids: Sequence[int], reason: int = 0) -> bytes:
    """Return acknowledgements of *ids*, with *reason* unless that is 0; *first* is their first byte."""
    one = bytes((first, 3, 0, 0, reason)) if reason else bytes((first, 2, 0, 0))
    found = bytearray(one * len(ids))
    if isinstance(ids, range) and ids.step == 1:
        found[2 :: len(one)], found[3 :: len(one)] = _HIGH[ids.start : ids.stop], _LOW[ids.start : ids.stop]
    else:
        packed = pack(f">{len(ids)}H", *ids)
        found[2 :: len(one)], found[3 :: len(one)] = packed[0::2], packed[1::2]
    return bytes(found)
