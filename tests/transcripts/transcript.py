"""Hold a conversation over raw sockets and write it down, with what differs from run to run masked."""

import json
import re
import socket
import struct
from collections.abc import Sequence

from tests.transcripts.conversations import BROKER, NAMES, Step

TIMEOUT_S = 180.0

# Times, places and identifiers differ from run to run. Remarks for people are ours to choose; a status is not.
MASKS = (
    (re.compile(r'"remark":"(?![A-Z_]+")(?:[^"\\]|\\.)*",?'), ""),
    (re.compile(r'"extFields":\{\},'), ""),
    (re.compile(r'"version":\d+'), '"version":<version>'),
    (re.compile(r'"language":"\w+"'), '"language":<language>'),
    (re.compile(r'"(msgId|offsetMsgId)":"[0-9A-F,]+"'), r'"\1":<id>'),
    (re.compile(r"\b1[6-9]\d{11}\b"), "<ms>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "<address>"),
)


class Talk:
    """One connection to one server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)

    def ask(self, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Return header and body of the answer; what the server asks by itself is passed over."""
        self._socket.sendall(struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body)
        while True:
            (length,) = struct.unpack(">i", self._read(4))
            frame = self._read(length)
            end = 4 + (struct.unpack(">i", frame[:4])[0] & 0xFFFFFF)
            if json.loads(frame[4:end])["flag"] & 1:
                return frame[4:end], frame[end:]

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return data

    def close(self) -> None:
        self._socket.close()


def hold(steps: Sequence[Step], broker: str, nameserver: str, name: str) -> list[str]:
    """Hold a conversation with a broker called *name* and return its transcript, two lines a step."""
    talks = {BROKER: Talk(broker), NAMES: Talk(nameserver)}
    lines: list[str] = []
    known = {"@broker": broker, "@name": name, "@msgId": "", "@position": ""}
    try:
        for number, step in enumerate(steps, 1):
            header, body = _request(step, known, number)
            answer, data = talks[step.server].ask(header, body)
            fields = json.loads(answer).get("extFields") or {}
            if "msgId" in fields:
                known["@msgId"] = fields["msgId"]
                known["@position"] = str(int(fields["msgId"][-16:], 16))
            lines.append(f"> {step.server} {step.code} {json.dumps(dict(step.fields), sort_keys=True)} {step.body!r}")
            lines.append(f"< {_mask(answer.decode(), name)} {_body(data, name)}".rstrip())
    finally:
        for talk in talks.values():
            talk.close()
    return lines


def _request(step: Step, known: dict[str, str], number: int) -> tuple[bytes, bytes]:
    fields = {key: known.get(value, value) for key, value in step.fields.items()}
    body = step.body
    for mark, value in known.items():
        body = body.replace(mark.encode(), value.encode())
    header = {"code": step.code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": number}
    return json.dumps({**header, "serializeTypeCurrentRPC": "JSON", "version": step.version}).encode(), body


def _mask(text: str, name: str) -> str:
    for pattern, by in MASKS:
        text = pattern.sub(by, text)
    return text.replace(f'"{name}"', '"<name>"').replace(f"[{name}]", "[<name>]")


def _body(data: bytes, name: str) -> str:
    """Return a body as text: JSON as it is, records field by field, for their times and places differ."""
    if not data:
        return ""
    if data[:1] == b"{":
        return _mask(data.decode(), name)
    shown: list[str] = []
    while data:
        (size,) = struct.unpack_from(">i", data)
        shown.append(_record(data[:size]))
        data = data[size:]
    return " ".join(shown)


def _record(data: bytes) -> str:
    """Return one record: its fixed fields in hexadecimal (position, times and ports masked), and the rest in words.

    The order of properties is that of a hash table in RocketMQ, so it says nothing.
    """
    kept = bytearray(data)
    for start, end in ((28, 36), (52, 64), (68, 72)):
        kept[start:end] = bytes(end - start)
    (size,) = struct.unpack_from(">i", data, 84)
    topic = 88 + size
    rest = topic + 1 + data[topic]
    properties = sorted(data[rest + 2 :].decode().split("\x02"))
    return f"{kept[:88].hex()} {data[88:topic]!r} {data[topic + 1 : rest]!r} {properties!r}"
