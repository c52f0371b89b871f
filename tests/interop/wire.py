"""Just enough of the remoting protocol to ask a server whether it is there: one JSON request, one answer."""

import json
import socket
import struct
from collections.abc import Mapping

GET_BROKER_RUNTIME_INFO = 28
GET_BROKER_CLUSTER_INFO = 106
GET_ROUTEINFO_BY_TOPIC = 105


def ask(
    address: str, code: int, fields: Mapping[str, str] | None = None, limit_s: float = 3.0
) -> tuple[int, bytes] | None:
    """Send one request and return (response code, body), or None when nobody answers."""
    host, _, port = address.rpartition(":")
    header = {
        "code": code,
        "language": "PYTHON",
        "version": 435,
        "opaque": 1,
        "flag": 0,
        "extFields": dict(fields or {}),
    }
    said = json.dumps(header).encode()
    try:
        with socket.create_connection((host, int(port)), limit_s) as peer:
            peer.sendall(struct.pack(">ii", 4 + len(said), len(said)) + said)
            (length,) = struct.unpack(">i", _read(peer, 4))
            frame = _read(peer, length)
    except OSError:
        return None
    header_bytes = struct.unpack(">i", frame[:4])[0] & 0xFFFFFF
    answer = json.loads(frame[4 : 4 + header_bytes])
    return int(answer["code"]), frame[4 + header_bytes :]


def _read(peer: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = peer.recv(count - len(parts))
        if not part:
            raise ConnectionError("closed in the middle of a frame")
        parts += part
    return parts
