"""A blocking peer that speaks remoting frames by hand: no retry, no reconnect, nothing hidden."""

import socket
from collections.abc import Mapping, Sequence
from typing import Self

from martlet.message import encode_properties
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

TIMEOUT_S = 180.0


class Remote:
    """One connection; `send` and `receive` are apart, so that requests can be under way when the broker dies."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._frames = FrameBuffer()
        self._answers: list[Command] = []

    def send(self, command: Command) -> None:
        self.socket.sendall(encode_command(command))

    def receive(self) -> Command:
        """Return the next answer.

        Raises:
          ConnectionError: the broker is gone.
        """
        while not self._answers:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._frames.receive_data(data)
            self._answers.extend(self._frames.commands())
        return self._answers.pop(0)

    def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        self.send(Command(code, ext, body, opaque=0))
        return self.receive()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_request(topic: str, queue_id: int, key: str, body: bytes, opaque: int, light: Sequence[str] = ()) -> Command:
    """Return a SEND_MESSAGE_V2 of one message, which names the topics *light*."""
    said = {"UNIQ_KEY": key, "TAGS": "A", "INNER_MULTI_DISPATCH": ",".join(light)}
    properties = encode_properties(said).decode()
    ext = {"a": "g", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "f": 0, "g": 1, "h": 0, "i": properties}
    return Command(RequestCode.SEND_MESSAGE_V2, {**ext, "j": 0, "k": "false", "m": "false"}, body, opaque=opaque)


def pull(remote: Remote, topic: str, queue_id: int, offset: int, most: int = 32, hold_ms: int = 0) -> Command:
    """Return the answer of a pull that the broker holds for *hold_ms* if there is no message."""
    ext = {"consumerGroup": "g", "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": most}
    how = {"sysFlag": 6 if hold_ms else 4, "suspendTimeoutMillis": hold_ms}
    flags = {**how, "commitOffset": 0, "subscription": "*", "subVersion": 0}
    return remote.ask(RequestCode.PULL_MESSAGE, {**ext, **flags, "expressionType": "TAG"})
