"""Bytes that no client should send to an MQTT broker, and what a broker answers to them.

Everything is drawn from fixed seeds, so that all brokers get the same bytes in every run.
"""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from martlet_mqtt.wire.codec import encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V3, V4, V5, PacketType
from martlet_mqtt.wire.errors import Malformed
from martlet_mqtt.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

LIMIT_S: Final = 180.0
PING: Final = b"\xc0\x00"
SEED: Final = 20261123


@dataclass(frozen=True)
class Case:
    """What is sent: after a valid CONNECT of *version*, or at once if that is 0."""

    name: str
    version: int
    data: bytes


def _connect(version: int, client_id: str = "hostile", **more: object) -> bytes:
    return encode_packet(Connect(client_id, version, **more), version)  # type: ignore[arg-type]


def examples(version: int) -> list[Packet]:
    """Return one packet of each type, with every field of *version*."""
    is_newest = version == V5
    whole = Properties(
        {
            Property.PAYLOAD_FORMAT: 1,
            Property.MESSAGE_EXPIRY: 100,
            Property.CONTENT_TYPE: "text/plain",
            Property.RESPONSE_TOPIC: "answers",
            Property.CORRELATION_DATA: b"\0\xff",
            Property.TOPIC_ALIAS: 1,
        },
        (("colour", "red"), ("colour", "green")),
    )
    will = {which: whole.get(which) for which in (Property.MESSAGE_EXPIRY, Property.CONTENT_TYPE)}
    asked = {Property.SESSION_EXPIRY: 0, Property.RECEIVE_MAXIMUM: 10, Property.TOPIC_ALIAS_MAXIMUM: 5}

    def given(values: Properties) -> Properties:
        return values if is_newest else NO_PROPERTIES

    subscription = FilterSubscription("h/+", 1, is_newest, is_newest, 1 if is_newest else 0)
    user = given(Properties({}, (("colour", "red"),)))
    last_words = Will("h/will", b"will", 1, False, given(Properties(will)))
    found: list[Packet] = [
        Connect("hostile", version, True, 60, last_words, "u", b"p", given(Properties(asked))),
        Publish("h/0", b"text", 0, properties=given(whole)),
        Publish("h/1", b"text", 1, packet_id=7, properties=given(whole)),
        Publish("h/2", b"text", 2, packet_id=8),
        *(
            Ack(kind, 9, 0x92 if is_newest and kind in (PacketType.PUBREL, PacketType.PUBCOMP) else 0, user)
            for kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
        ),
        Subscribe(10, (subscription, FilterSubscription("h/#", 2)), given(Properties({}, (), (5,)))),
        Unsubscribe(11, ("h/+", "h/none"), user),
        Pingreq(),
        Disconnect(0, user if is_newest else NO_PROPERTIES),
    ]
    return found


def foreign(version: int) -> list[Packet]:
    """Return packets that only brokers send, and AUTH without a method."""
    found: list[Packet] = [Connack(False, 0), Suback(10, (0,)), Unsuback(10, (0,) if version == V5 else ()), Pingresp()]
    return [*found, Auth(0x18)] if version == V5 else found


def cuts() -> Iterator[Case]:
    """Yield each packet, cut at each byte."""
    for version in (V3, V4, V5):
        for packet in [*examples(version), *foreign(version)]:
            data = encode_packet(packet, version)
            kind = type(packet).__name__
            for end in range(1, len(data) + 1):
                yield Case(f"cut {kind}", 0 if isinstance(packet, Connect) else version, data[:end])


def _text(value: bytes) -> bytes:
    return len(value).to_bytes(2) + value


def _packet(first: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    assert len(content) < 16384
    size = bytes((len(content),)) if len(content) < 128 else bytes((len(content) & 127 | 128, len(content) >> 7))
    return bytes((first,)) + size + content


BAD_TEXTS: Final = {
    "U+0000": b"a\0b",
    "a surrogate": b"a\xed\xa0\x80",
    "overlong UTF-8": b"a\xc0\xaf",
    "a byte that is no UTF-8": b"a\xff",
    "half a character": b"a\xe2\x82",
    "U+FEFF": b"\xef\xbb\xbfa",
    "U+0001": b"a\x01",
    "U+FFFF": b"a\xef\xbf\xbf",
    "nothing": b"",
}
BAD_NAMES: Final = {
    "+": b"a/+",
    "#": b"a/#",
    "$SYS": b"$SYS/broker/version",
    "$other": b"$other/x",
    "199 levels": b"/" * 199,
}
BAD_NAMES_LONG: Final = {"300 levels": b"/" * 300, "5000 bytes": b"x" * 5000}
BAD_FILTERS: Final = {
    "a+": b"a+",
    "a#": b"a#",
    "#/a": b"#/a",
    "a/#/b": b"a/#/b",
    "300 levels": b"+/" * 300,
    "$share": b"$share",
    "$share/g": b"$share/g",
    "$share//a": b"$share//a",
    "$share/g/": b"$share/g/",
    "$share/+/a": b"$share/+/a",
    "$share/g/a+": b"$share/g/a+",
}


def by_hand() -> Iterator[Case]:
    """Yield single errors, by their names."""
    for version in (V4, V5):
        none = b"\0" if version == V5 else b""
        yield from _broken_order(version)
        yield from _broken_heads(version, none)
        yield from _broken_texts(version, none)
        yield from _broken_subscriptions(version, none)
    yield from _broken_connects()
    yield from _broken_properties()


def _broken_order(version: int) -> Iterator[Case]:
    publish = encode_packet(Publish("h/1", b"x", 1, packet_id=1), version)
    yield Case("second CONNECT", version, _connect(version))
    yield Case("PUBLISH before CONNECT", 0, publish)
    yield Case("PINGREQ before CONNECT", 0, PING)
    for packet in foreign(version):
        yield Case(f"{type(packet).__name__} of a client", version, encode_packet(packet, version))
        yield Case(f"{type(packet).__name__} before CONNECT", 0, encode_packet(packet, version))
    yield Case("PUBLISH after DISCONNECT", version, encode_packet(Disconnect(), version) + publish)
    for kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP):
        yield Case(f"{kind.name} of nothing", version, encode_packet(Ack(kind, 77), version))
        yield Case(f"{kind.name} with id 0", version, encode_packet(Ack(kind, 1), version)[:2] + b"\0\0")
    twice = encode_packet(Publish("h/1", b"x", 2, packet_id=1), version)
    yield Case("PUBLISH of QoS 2 twice", version, twice + twice)


def _broken_heads(version: int, none: bytes) -> Iterator[Case]:
    for kind in range(16):
        yield Case(f"type {kind} with nothing", version, bytes((kind << 4, 0)))
        yield Case(f"type {kind} with flags 15", version, bytes((kind << 4 | 15, 2, 0, 1)))
        yield Case(f"type {kind} with a length of 5 bytes", version, bytes((kind << 4, 255, 255, 255, 255, 1)))
        yield Case(f"type {kind} with a length in 4 bytes", version, bytes((kind << 4, 0x80, 0x80, 0x80, 0)))
    for flags, name in ((6, "QoS 3"), (8, "DUP and QoS 0"), (14, "DUP and QoS 3")):
        yield Case(f"PUBLISH with {name}", version, _packet(0x30 | flags, _text(b"h/1"), b"\0\1", none, b"x"))
    for first, name in ((0x32, "PUBLISH"), (0x34, "PUBLISH of QoS 2")):
        yield Case(f"{name} with id 0", version, _packet(first, _text(b"h/1"), b"\0\0", none, b"x"))
    yield Case("SUBSCRIBE with id 0", version, _packet(0x82, b"\0\0", none, _text(b"h/1"), b"\0"))
    yield Case("UNSUBSCRIBE with id 0", version, _packet(0xA2, b"\0\0", none, _text(b"h/1")))
    yield Case("SUBSCRIBE without filters", version, _packet(0x82, b"\0\1", none))
    yield Case("UNSUBSCRIBE without filters", version, _packet(0xA2, b"\0\1", none))
    yield Case("SUBSCRIBE without options", version, _packet(0x82, b"\0\1", none, _text(b"h/1")))
    yield Case("PUBLISH with a name beyond its end", version, _packet(0x30, b"\0\xff", b"h/1"))
    yield Case("PINGREQ with content", version, _packet(0xC0, b"x"))
    yield Case("DISCONNECT with content", version, _packet(0xE0, b"xyz"))


def _broken_texts(version: int, none: bytes) -> Iterator[Case]:
    for name, text in (BAD_TEXTS | BAD_NAMES | BAD_NAMES_LONG).items():
        yield Case(f"PUBLISH to {name}", version, _packet(0x32, _text(text), b"\0\1", none, b"x"))
    for name, text in (BAD_TEXTS | BAD_FILTERS).items():
        yield Case(f"SUBSCRIBE to {name}", version, _packet(0x82, b"\0\1", none, _text(text), b"\1"))
        yield Case(f"UNSUBSCRIBE from {name}", version, _packet(0xA2, b"\0\1", none, _text(text)))
    head = b"\0\4MQTT" + bytes((version, 2, 0, 60)) + none
    for name, text in BAD_TEXTS.items():
        yield Case(f"CONNECT as {name}", 0, _packet(0x10, head, _text(text)))
    head = b"\0\4MQTT" + bytes((version, 6, 0, 60)) + none + _text(b"hostile") + none
    for name, text in (BAD_TEXTS | {"+": b"a/+", "#": b"#"}).items():
        yield Case(f"CONNECT with a will to {name}", 0, _packet(0x10, head, _text(text), _text(b"will")))
    head = b"\0\4MQTT" + bytes((version, 0x82, 0, 60)) + none + _text(b"hostile")
    for name, text in BAD_TEXTS.items():
        yield Case(f"CONNECT of user {name}", 0, _packet(0x10, head, _text(text)))


def _broken_subscriptions(version: int, none: bytes) -> Iterator[Case]:
    for options in (3, 4, 8, 0x10, 0x30, 0x40, 0x80, 0xFF):
        data = _packet(0x82, b"\0\1", none, _text(b"h/1"), bytes((options,)))
        yield Case(f"SUBSCRIBE with options {options:#04x}", version, data)


def _broken_connects() -> Iterator[Case]:
    for name, level in ((b"MQTT", 0), (b"MQTT", 3), (b"MQTT", 6), (b"MQIsdp", 4), (b"mqtt", 4), (b"", 4), (b"HTTP", 5)):
        data = _packet(0x10, _text(name), bytes((level, 2, 0, 60)), b"\0" if level >= 5 else b"", _text(b"hostile"))
        yield Case(f"CONNECT of {name.decode()!r} level {level}", 0, data)
    for version in (V3, V4, V5):
        name, none = (b"MQIsdp" if version == V3 else b"MQTT"), (b"\0" if version == V5 else b"")
        for flags in range(256):
            parts = [_text(b"hostile")]
            parts += [none, _text(b"h/will"), _text(b"will")] if flags & 4 else []
            parts += [_text(b"user")] if flags & 0x80 else []
            parts += [_text(b"secret")] if flags & 0x40 else []
            data = _packet(0x10, _text(name), bytes((version, flags, 0, 60)), none, *parts)
            yield Case(f"CONNECT with flags {flags:08b}", 0, data)
        for clean in (0, 2):
            data = _packet(0x10, _text(name), bytes((version, clean, 0, 60)), none, _text(b""))
            yield Case(f"CONNECT without an identifier, clean {clean}", 0, data)
        yield Case("CONNECT with bytes after its end", 0, _packet(0x10, _connect(version)[2:], b"more"))
        yield Case("CONNECT with flags 1", 0, b"\x11" + _connect(version)[1:])
        yield Case("GET", 0, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[: 10 + version])


# Each property with a valid value, and one with a value that is not allowed.
_VALUES: Final = {
    0x01: (b"\1", b"\2"),
    0x02: (b"\0\0\0\1",),
    0x03: (_text(b"text"), _text(b"\xff")),
    0x08: (_text(b"answers"), _text(b"a/+"), _text(b"")),
    0x09: (_text(b"\0\xff"),),
    0x0B: (b"\1", b"\0", b"\xff\xff\xff\xff\1"),
    0x11: (b"\0\0\0\1",),
    0x12: (_text(b"other"),),
    0x13: (b"\0\1",),
    0x15: (_text(b"method"),),
    0x16: (_text(b"data"),),
    0x17: (b"\1", b"\2"),
    0x18: (b"\0\0\0\1",),
    0x19: (b"\1", b"\2"),
    0x1A: (_text(b"information"),),
    0x1C: (_text(b"server"),),
    0x1F: (_text(b"reason"),),
    0x21: (b"\0\1", b"\0\0"),
    0x22: (b"\0\1", b"\0\0", b"\xff\xff"),
    0x23: (b"\0\1", b"\0\0", b"\xff\xff"),
    0x24: (b"\1", b"\3"),
    0x25: (b"\1", b"\2"),
    0x26: (_text(b"name") + _text(b"value"), _text(b"name"), _text(b"\xff") + _text(b"value")),
    0x27: (b"\0\0\1\0", b"\0\0\0\0"),
    0x28: (b"\1", b"\2"),
    0x29: (b"\1",),
    0x2A: (b"\1",),
    0x7F: (b"\1",),
}


def _with_properties(listed: bytes) -> dict[str, tuple[int, bytes]]:
    """Return packets of MQTT 5 with the properties *listed*, and the version after whose CONNECT they are sent."""
    size = bytes((len(listed),))
    head = b"\0\4MQTT\5"
    will = head + b"\6\0\x3c\0" + _text(b"hostile") + size + listed + _text(b"h/will") + _text(b"will")
    return {
        "CONNECT": (0, _packet(0x10, head, b"\2\0\x3c", size, listed, _text(b"hostile"))),
        "will": (0, _packet(0x10, will)),
        "PUBLISH": (V5, _packet(0x32, _text(b"h/1"), b"\0\1", size, listed, b"text")),
        "PUBACK": (V5, _packet(0x40, b"\0\x4d\0", size, listed)),
        "PUBREL": (V5, _packet(0x62, b"\0\x4d\0", size, listed)),
        "SUBSCRIBE": (V5, _packet(0x82, b"\0\1", size, listed, _text(b"h/1"), b"\1")),
        "UNSUBSCRIBE": (V5, _packet(0xA2, b"\0\1", size, listed, _text(b"h/1"))),
        "DISCONNECT": (V5, _packet(0xE0, b"\0", size, listed)),
        "AUTH": (V5, _packet(0xF0, b"\x19", size, listed)),
    }


def _broken_properties() -> Iterator[Case]:
    for number, values in _VALUES.items():
        for index, value in enumerate(values):
            one = bytes((number,)) + value
            for repeated in (1, 2):
                for kind, (version, data) in _with_properties(one * repeated).items():
                    how = f"property {number:#04x} {'twice' if repeated == 2 else f'({index})'}"
                    yield Case(f"{kind} with {how}", version, data)
    for kind, (version, data) in _with_properties(b"\x26").items():
        yield Case(f"{kind} with half a property", version, data)
    named, unnamed = (encode_packet(Publish(topic, b"x", 1, packet_id=1), V5)[:-2] for topic in ("h/1", ""))
    for alias in (0, 1, 10, 17, 65_535):
        listed = b"\3\x23" + alias.to_bytes(2)
        for name, start in (("named", named), ("unnamed", unnamed)):
            data = _packet(0x32, start[2:], listed, b"x")
            yield Case(f"alias {alias} {name}", V5, data)


def mutated(count: int, seed: int = SEED) -> Iterator[Case]:
    """Yield packets in which something was changed by chance."""
    chance = random.Random(seed)
    for _ in range(count):
        version = chance.choice((V3, V4, V5, V5))
        packet = chance.choice([*examples(version), *foreign(version)])
        data = bytearray(encode_packet(packet, version))
        for _ in range(chance.randint(1, 3)):
            _mutate(chance, data)
        yield Case(f"changed {type(packet).__name__}", 0 if isinstance(packet, Connect) else version, bytes(data))


def _mutate(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data)) if data else 0
    how = chance.randrange(5)
    if how == 0 and data:
        data[at] ^= 1 << chance.randrange(8)
    elif how == 1 and data:
        data[at] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
    elif how == 2:
        data[at:at] = chance.randbytes(chance.randint(1, 4))
    elif how == 3:
        del data[at : at + chance.randint(1, 4)]
    elif data:
        end = min(len(data), at + chance.randint(1, 8))
        data[end:end] = data[at:end]
    if len(data) > 2 and chance.random() < 0.7:  # otherwise most packets only have a wrong length
        data[1] = min(127, len(data) - 2)


def cases() -> list[Case]:
    """Return all cases, in the order in which they are sent."""
    return [*by_hand(), *cuts(), *mutated(1000)]


# what a broker answers


def is_whole(data: bytes) -> bool:
    """Return whether a broker need not wait for more after *data*."""
    at = 0
    try:
        while at < len(data) and (size := packet_bytes(data, at)):
            at += size
    except Malformed:
        return True
    return at == len(data)


def split_packets(data: bytes) -> list[tuple[int, bytes]]:
    """Return the first byte and the content of each whole packet in *data*."""
    found: list[tuple[int, bytes]] = []
    while len(data) >= 2:
        end, size, shift = 1, 0, 0
        while end < min(5, len(data)) and data[end] > 127:
            size |= (data[end] & 127) << shift
            end, shift = end + 1, shift + 7
        if end >= min(5, len(data)) or end + 1 + (size := size | data[end] << shift) > len(data):
            break
        found.append((data[0], data[end + 1 : end + 1 + size]))
        data = data[end + 1 + size :]
    return found


class Asking:
    """One connection to a broker."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # it may have closed already; what it said can still be read
            self.socket.sendall(data)

    def packet(self) -> tuple[int, bytes] | None:
        """Return the first byte and the content of the next packet; None when the broker has closed."""
        while True:
            if whole := split_packets(self._data):
                self._data = self._data[packet_bytes(self._data, 0) :]
                return whole[0]
            try:
                more = self.socket.recv(65_536)
            except ConnectionError:
                more = b""
            if not more:
                return None
            self._data += more


def told(first: int, content: bytes, version: int) -> str:
    """Return an answer in words: its type and its reasons."""
    kind = PacketType(first >> 4)
    if kind is PacketType.CONNACK:
        return f"CONNACK {content[1]:02x}"
    if kind in (PacketType.SUBACK, PacketType.UNSUBACK):
        at = 2 + (1 + content[2] if version == V5 else 0)
        return " ".join([kind.name, *(f"{code:02x}" for code in content[at:])])
    if kind is PacketType.DISCONNECT:
        return f"DISCONNECT {content[0] if content else 0:02x}"
    if kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP):
        return f"{kind.name} {content[2] if len(content) > 2 else 0:02x}"
    return kind.name


def version_of(case: Case) -> int:
    """Return the version in which a broker answers *case*."""
    return case.version or (V5 if case.data[2:9] in (b"\0\4MQTT\5", b"\0\4MQTT\x85") else V4)


def outcome(port: int, case: Case) -> str:
    """Return what a broker does with *case*: its answers, and ``closed`` or ``open``; messages are left out."""
    asking = Asking(port)
    with asking.socket:
        if case.version:
            asking.send(_connect(case.version))
            answer = asking.packet()
            assert answer is not None, case
            assert answer[0] == 0x20, case
            assert answer[1][1] == 0, case
        asking.send(case.data)
        if is_whole(case.data):
            asking.send(PING)
        else:
            with suppress(OSError):
                asking.socket.shutdown(socket.SHUT_WR)
        said: list[str] = []
        while (answer := asking.packet()) is not None:
            kind = answer[0] >> 4
            if kind == PacketType.PINGRESP:
                return ", ".join([*said, "open"])
            if kind != PacketType.PUBLISH:
                said.append(told(*answer, version_of(case)))
        return ", ".join([*said, "closed"])
