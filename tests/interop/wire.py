"""Just enough of the remoting protocol to ask a server one question by hand: a JSON request out, the answer in."""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .process import eventually

SEND_MESSAGE = 10
PULL_MESSAGE = 11
QUERY_CONSUMER_OFFSET = 14
UPDATE_CONSUMER_OFFSET = 15
UPDATE_AND_CREATE_TOPIC = 17
CONSUMER_SEND_MSG_BACK = 36
GET_BROKER_RUNTIME_INFO = 28
GET_ROUTEINFO_BY_TOPIC = 105
GET_BROKER_CLUSTER_INFO = 106


@dataclass(frozen=True)
class Answer:
    code: int
    fields: dict[str, str]
    remark: str
    body: bytes


def ask(
    address: str, code: int, fields: Mapping[str, str] | None = None, body: bytes = b"", limit_s: float = 120.0
) -> Answer | None:
    """Send one request and return its answer, or None when nobody answers or the connection is closed."""
    host, _, port = address.rpartition(":")
    header: dict[str, object] = {"code": code, "language": "PYTHON", "version": 435, "opaque": 1, "flag": 0}
    header["extFields"] = dict(fields or {})
    said = json.dumps(header).encode()
    try:
        with socket.create_connection((host, int(port)), limit_s) as peer:
            peer.sendall(struct.pack(">ii", 4 + len(said) + len(body), len(said)) + said + body)
            (length,) = struct.unpack(">i", _read(peer, 4))
            frame = _read(peer, length)
    except OSError:
        return None
    end = 4 + (struct.unpack(">i", frame[:4])[0] & 0xFFFFFF)
    answer = json.loads(frame[4:end])
    return Answer(int(answer["code"]), answer.get("extFields") or {}, answer.get("remark") or "", frame[end:])


def wait_committed(
    address: str, group: str, topic: str, count: int, queues: int, tell: Callable[[], object] | None = None
) -> None:
    """Return when a broker knows that a group consumed *count* messages of a topic; *tell* makes its client say so.

    A client that stops says so on its way out, but waits for no answer, and another of its threads may be about to say
    what was true a moment before: what comes next may overtake the one, and the other may come last.
    """

    def look() -> bool | None:
        if tell is not None:
            tell()
        return True if sum(_committed(address, group, topic, queue) for queue in range(queues)) == count else None

    eventually(look)


def _committed(address: str, group: str, topic: str, queue: int) -> int:
    fields = {"consumerGroup": group, "topic": topic, "queueId": str(queue), "setZeroIfNotFound": "false"}
    answer = ask(address, QUERY_CONSUMER_OFFSET, fields)
    return int(answer.fields["offset"]) if answer is not None and answer.code == 0 else 0


def _read(peer: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = peer.recv(count - len(parts))
        if not part:
            raise ConnectionError("closed in the middle of a frame")
        parts += part
    return parts
