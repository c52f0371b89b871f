"""Bytes that no client should send to a STOMP broker, and what a broker answers to them.

Everything is drawn from fixed seeds, so that all brokers get the same bytes in every run.
"""

import random
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from martlet_stomp.wire.packets import Version

V1_0, V1_1, V1_2 = Version
LIMIT_S: Final = 180.0
ANSWER_S: Final = 0.5
SEED: Final = 20261124
DESTINATION: Final = b"destination:/queue/hostile\n"
FENCE: Final = b"\nSEND\n%breceipt:the fence\n\nfence\0" % DESTINATION


@dataclass(frozen=True)
class Case:
    """What is sent: after a valid CONNECT of *version*, or at once if that is None.

    ``is_error`` says whether a broker must answer ERROR and close: True or False, or None if it may do either. With
    ``is_cut``, the data is the beginning of a frame.
    """

    name: str
    version: Version | None
    data: bytes
    is_error: bool | None = True
    is_cut: bool = False


def connect_frame(version: Version) -> bytes:
    lines = b"" if version is V1_0 else b"accept-version:%b\nhost:localhost\n" % version.text.encode()
    return b"CONNECT\nlogin:guest\npasscode:guest\n%b\n\0" % lines


def command_of(frame: bytes) -> str:
    return frame.partition(b"\n")[0].decode()


def examples(version: Version) -> list[bytes]:
    """Return a frame of each command, with its usual headers."""
    name = b"id" if version is V1_2 else b"message-id"
    return [
        connect_frame(version),
        b"SEND\n%bcontent-length:4\nreceipt:r\nkey:value\n\nbody\0" % DESTINATION,
        b"SEND\n%bcontent-type:text/plain\n\nbody\0" % DESTINATION,
        b"SUBSCRIBE\nid:1\n%back:client-individual\nreceipt:r\n\n\0" % DESTINATION,
        b"UNSUBSCRIBE\nid:1\n\n\0",
        b"ACK\n%b:1-0-0\nsubscription:1\n\n\0" % name,
        b"NACK\n%b:1-0-0\nsubscription:1\n\n\0" % name,
        b"BEGIN\ntransaction:t\nreceipt:r\n\n\0",
        b"COMMIT\ntransaction:t\n\n\0",
        b"ABORT\ntransaction:t\n\n\0",
        b"DISCONNECT\nreceipt:77\n\n\0",
    ]


def cuts() -> Iterator[Case]:
    """Yield each frame, cut at each byte: nothing is answered, and the broker waits."""
    for version in Version:
        for frame in examples(version):
            for end in range(1, len(frame)):
                is_connect = frame.startswith(b"CONNECT")
                yield Case(f"cut {command_of(frame)}", None if is_connect else version, frame[:end], False, True)


def by_hand() -> Iterator[Case]:
    """Yield single errors, by their names."""
    yield from _before_connect()
    for version in Version:
        yield from _broken_frames(version)
        yield from _broken_headers(version)
        yield from _unknown(version)
        yield from _unusual(version)


def _before_connect() -> Iterator[Case]:
    for frame in examples(V1_2)[1:]:
        yield Case(f"{command_of(frame)} before CONNECT", None, frame)
    for name, data in {
        "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[1:],  # the whole request would begin a WebSocket
        "MQTT": b"\x10\x0c\0\4MQTT\4\2\0\x3c\0\0",
        "Redis": b"*1\r\n$4\r\nPING\r\n" + b"x" * 40,
        "only NUL": b"\0",
        "many NUL": bytes(100),
        "one long line": b"x" * 10_000,
        "headers without end": b"CONNECT\n" + b"a:b\n" * 20_000,
        "a body without end": b"CONNECT\naccept-version:1.2\n\n" + b"x" * 70_000,
        "a large content-length": b"CONNECT\naccept-version:1.2\ncontent-length:70000\n\n",
        "connect in lower case": b"connect\naccept-version:1.2\n\n\0",
        "no common version": b"CONNECT\naccept-version:2.0,9.9\nhost:x\n\n\0",
        "an empty version": b"CONNECT\naccept-version:\nhost:x\n\n\0",
    }.items():
        yield Case(name, None, data)
    for beats in (b"", b"1", b"-1,0", b"0,-1", b"a,b", b"1,2,3", b"9" * 30 + b",1"):
        yield Case(f"heart-beat {beats!r}", None, b"CONNECT\naccept-version:1.2\nheart-beat:%b\n\n\0" % beats)
    for beats in (b"0,0", b"999999999999,999999999999", b"1,1"):
        frame = b"CONNECT\naccept-version:1.2\nheart-beat:%b\n\n\0" % beats
        yield Case(f"heart-beat {beats!r}", None, frame, False)


def _broken_frames(version: Version) -> Iterator[Case]:
    send = b"SEND\n%breceipt:r\n" % DESTINATION
    for name, data in {
        "second CONNECT": connect_frame(version),
        "second STOMP": connect_frame(version).replace(b"CONNECT", b"STOMP"),
        "empty command": b"\n\n:\n\n\0",
        "unknown command": b"PUBLISH\n%b\n\0" % DESTINATION,
        "a command in lower case": b"send\n%b\n\0" % DESTINATION,
        "a command with a blank": b"SEND \n%b\n\0" % DESTINATION,
        "a command of a broker": b"MESSAGE\n%b\n\0" % DESTINATION,
        "no NUL, another frame": b"%bcontent-length:4\n\nbodySEND\n\n\0" % send,
        "content-length too short": b"%bcontent-length:3\n\nbody\0" % send,
        "content-length too long": b"%bcontent-length:5\n\nbody\0\n\n" % send,
        "NUL in a header": b"%bkey:a\0b\n\n\0" % send,
        "NUL in a name": b"%bk\0y:ab\n\n\0" % send,
        "NUL in the command": b"SE\0ND\n%b\n\0" % DESTINATION,
        "a long first line": b"SEND" * 100,
        "a long header line": b"%bkey:%b\n\n\0" % (send, b"x" * 9000),
        "a long header name": b"%b%b:x\n\n\0" % (send, b"x" * 9000),
        "a header line without end": b"%bkey:%b" % (send, b"x" * 100_000),
        "many headers": send + b"".join(b"h%d:x\n" % each for each in range(200)) + b"\n\0",
        "headers without end": send + b"a:b\n" * 50_000,
        "a body over the limit": b"%b\n%b\0" % (send, b"x" * (5 << 20)),
        "a content-length over the limit": b"%bcontent-length:5000000\n\n" % send,
    }.items():
        yield Case(name, version, data)
    for length in (b"-1", b"+4", b"0x4", b"4.0", b"9" * 11, b"9" * 5000, b"", b"four", b"4 4", "\u0664".encode()):
        yield Case(f"content-length {length[:20]!r}", version, b"%bcontent-length:%b\n\nbody\0" % (send, length))


def _broken_headers(version: Version) -> Iterator[Case]:
    send = b"SEND\n%breceipt:r\n" % DESTINATION
    for name, line in {
        "no colon": b"key",
        "no name": b":value",
        "bytes that are no UTF-8": b"key:\xff",
        "a surrogate": b"key:\xed\xa0\x80",
        "overlong UTF-8": b"key:\xc0\xaf",
        "half a character": b"key:\xe2\x82",
    }.items():
        yield Case(name, version, b"%b%b\n\n\0" % (send, line))
    for escape in (b"\\t", b"\\", b"\\x00", b"\\C", b"\\N", b"\\u0041"):
        for line in (b"key:%b" % escape, b"%b:value" % escape):
            yield Case(f"escape {escape!r}", version, b"%b%b\n\n\0" % (send, line), version is not V1_0)
    yield Case("escape \\r", version, b"%bkey:\\r\n\n\0" % send, version is V1_1)
    yield Case("CR in a line", version, b"%bkey:a\rb\n\n\0" % send, version is V1_2)
    for command, missing in (
        (b"SEND", b"key:value"),
        (b"SUBSCRIBE", b"id:1"),
        (b"BEGIN", b"key:value"),
        (b"COMMIT", b"key:value"),
        (b"ABORT", b"key:value"),
        (b"ACK", b"key:value"),
        (b"NACK", b"key:value"),
        (b"UNSUBSCRIBE", b"key:value"),
    ):
        yield Case(f"{command.decode()} without its header", version, b"%b\n%b\n\n\0" % (command, missing))
    if version is not V1_0:
        yield Case("SUBSCRIBE without id", version, b"SUBSCRIBE\n%b\n\0" % DESTINATION)
        for frame in examples(version)[3:]:
            yield Case("a body that must not be", version, frame[:-1] + b"body\0")
    for ack in (b"", b"AUTO", b"individual"):
        yield Case(f"ack {ack!r}", version, b"SUBSCRIBE\nid:1\n%back:%b\n\n\0" % (DESTINATION, ack))


def _unknown(version: Version) -> Iterator[Case]:
    name = b"id" if version is V1_2 else b"message-id"
    for frame in (b"ACK", b"NACK"):
        for place in (b"x", b"1-2", b"7-0-0", b"-1-0-0", b"1-2-" + b"9" * 30, b""):
            data = b"%b\n%b:%b\nsubscription:7\n\n\0" % (frame, name, place)
            yield Case(f"{frame.decode()} of {place[:10]!r}", version, data)
    for frame in (b"COMMIT", b"ABORT"):
        yield Case(f"{frame.decode()} of no transaction", version, b"%b\ntransaction:none\n\n\0" % frame)
    yield Case("BEGIN twice", version, b"BEGIN\ntransaction:t\n\n\0" * 2)
    yield Case("SEND in no transaction", version, b"SEND\n%btransaction:none\n\n\0" % DESTINATION)
    yield Case("UNSUBSCRIBE of nothing", version, b"UNSUBSCRIBE\nid:none\n\n\0")
    yield Case("a selector that is none", version, b"SUBSCRIBE\nid:1\n%bselector:a ==> 1\n\n\0" % DESTINATION)
    for destination in (b"/queue/", b"/topic/", b"/queue/" + b"x" * 4000, b"/queue/\xc3\xa4" * 100, b"/temp-queue/"):
        yield Case(f"SEND to {destination[:20]!r}", version, b"SEND\ndestination:%b\n\n\0" % destination)


def _unusual(version: Version) -> Iterator[Case]:
    """Yield what looks wrong and is allowed."""
    send = b"SEND\n%b" % DESTINATION
    for name, data in {
        "many heart-beats": b"\n" * 100_000,
        "many heart-beats with CR": b"\r\n" * 50_000,
        "CR LF": b"SEND\r\n%b\r\n\r\nbody\0" % DESTINATION.rstrip(),
        "no blank line": b"%b\0" % send,
        "an empty value": b"%bkey:\n\nbody\0" % send,
        "colons in a value": b"%bkey:a:b::\n\nbody\0" % send,
        "a header twice": b"%bkey:a\nkey:b\n%b\nbody\0" % (send, DESTINATION),
        "NUL in a body": b"%bcontent-length:9\n\n\0\0SEND\n\n\0\0" % send,
        "a line feed after NUL": b"%b\nbody\0\n\n\r\n" % send,
        "an empty receipt": b"%breceipt:\n\nbody\0" % send,
        "control characters": b"%bk\x01\x02y:\x01\x1b[31m\x7f\n\nbody\0" % send,
        "99 headers": send + b"".join(b"h%d:x\n" % each for each in range(99)) + b"\n\0",
        "a body of zeros": b"%bcontent-length:100000\n\n%b\0" % (send, bytes(100_000)),
        "leading zeros": b"%bcontent-length:0000000004\n\nbody\0" % send,
        "a transaction that is aborted": b"BEGIN\ntransaction:t\n\n\0%btransaction:t\n\n\0ABORT\ntransaction:t\n\n\0"
        % send,
    }.items():
        yield Case(name, version, data, False)


def mutated(count: int, seed: int = SEED) -> Iterator[Case]:
    """Yield frames in which something was changed by chance."""
    chance = random.Random(seed)
    for _ in range(count):
        version = chance.choice(list(Version))
        frame = chance.choice(examples(version))
        data = bytearray(frame)
        for _ in range(chance.randint(1, 3)):
            _mutate(chance, data)
        name = f"changed {command_of(frame)}"
        yield Case(name, None if frame.startswith(b"CONNECT") else version, bytes(data), None)


def _mutate(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data)) if data else 0
    how = chance.randrange(5)
    if how == 0 and data:
        data[at] ^= 1 << chance.randrange(8)
    elif how == 1:
        data[at:at] = chance.choice(
            (b"\0", b"\n", b"\r", b":", b"\\", b"\xff", b"\n\n", b"\0\n", b"content-length:3\n")
        )
    elif how == 2:
        data[at:at] = chance.randbytes(chance.randint(1, 4))
    elif how == 3:
        del data[at : at + chance.randint(1, 4)]
    elif data:
        end = min(len(data), at + chance.randint(1, 30))
        data[end:end] = data[at:end]


def cases() -> list[Case]:
    """Return all cases, in the order in which they are sent."""
    return [*by_hand(), *cuts(), *mutated(1000)]


# what a broker answers


class Asking:
    """One connection to a broker."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_impatient = False
        self._data = b""

    def send(self, data: bytes) -> bool:
        """Send *data*; return False if the broker has closed. What it said can still be read."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def end(self) -> None:
        """Tell the broker that nothing more comes."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> bytes:
        # What was sent last may be part of a frame that is not complete, and then nothing comes.
        if self.is_impatient and not select.select([self.socket], [], [], ANSWER_S)[0]:
            self.end()
        try:
            return self.socket.recv(65_536)
        except ConnectionError:
            return b""

    def frame(self) -> tuple[str, dict[str, str]] | None:
        """Return the command and headers of the next frame; None when the broker has closed."""
        while True:
            self._data = self._data.lstrip(b"\n")
            head, blank, rest = self._data.partition(b"\n\n")
            if blank:
                command, *lines = head.decode().split("\n")
                headers: dict[str, str] = {}
                for line in lines:
                    name, _, value = line.partition(":")
                    headers.setdefault(name, value)
                size = int(headers["content-length"]) if "content-length" in headers else rest.find(b"\0")
                if 0 <= size < len(rest):
                    self._data = rest[size + 1 :]
                    return command, headers
            more = self._receive()
            if not more:
                return None
            self._data += more


def connected(port: int, version: Version = V1_2) -> Asking:
    """Return a connection that the broker has accepted."""
    asking = Asking(port)
    asking.send(connect_frame(version))
    answer = asking.frame()
    assert answer is not None
    assert answer[0] == "CONNECTED"
    return asking


def outcome(port: int, case: Case) -> str:
    """Return what a broker does with *case*: its answers, and ``closed`` or ``open``; messages are left out.

    A frame that must be answered follows, except after a beginning of a frame.
    """
    asking = Asking(port) if case.version is None else connected(port, case.version)
    with asking.socket:
        asking.send(case.data if case.is_cut else case.data + FENCE)
        if case.is_cut:
            asking.end()
        asking.is_impatient = case.is_error is None
        said: list[str] = []
        while (found := asking.frame()) is not None:
            command, headers = found
            if command == "RECEIPT" and headers.get("receipt-id") == "the fence":
                return ", ".join([*said, "open"])
            if command != "MESSAGE":
                said.append(command)
        return ", ".join([*said, "closed"])
