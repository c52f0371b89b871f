"""A connection of this broker to a remote name server."""

from collections.abc import Sequence
from typing import Final, final

import trio

from martlet.errors import RemoteProtocolError
from martlet.runtime.turns import Turns
from martlet_remoting.cluster.broker_key import BrokerKey
from martlet_remoting.wire.codec import FrameBuffer, encode_command_in_pieces
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import sign_in_slices

__all__ = ["REQUEST_TIMEOUT_S", "NameServerConnection", "NotAdmitted", "refusal_error"]

REQUEST_TIMEOUT_S: Final = 6.0
RECEIVE_BYTES: Final = 65536
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024


@final
class NotAdmitted(RemoteProtocolError):
    """The name server does not know this broker by this secret, or does not let it do what it asked for."""


@final
class NameServerConnection:
    """A connection to a name server, with one request at a time, signed with *key* if there is one."""

    def __init__(self, stream: trio.abc.Stream, key: BrokerKey, turns: Turns) -> None:
        self.is_broken = False
        self._stream = stream
        self._key = key
        self._turns = turns
        self._frames = FrameBuffer(ANSWER_BYTES_MAX)
        self._opaque = 0

    async def ask(self, command: Command, body: Sequence[bytes] = ()) -> Command:
        """Send *command*, with *body* if given, and return the answer.

        Raises:
          NotAdmitted: the request was refused, because it was not signed by a user who may send it.
          RemoteProtocolError: the request was refused, or the connection has closed.
        """
        answer = await self.exchange(command, body)
        if answer.code != ResponseCode.SUCCESS:
            raise refusal_error(command, answer, self._key)
        return answer

    async def exchange(self, command: Command, body: Sequence[bytes] = ()) -> Command:
        """Send *command* like `ask`, but return also an answer that is a refusal.

        Raises:
          RemoteProtocolError: the connection has closed.
        """
        self._opaque += 1
        command.opaque = self._opaque
        pieces = body or [command.body]
        if self._key.signing_key is not None:
            command.set_ext(await self._turns.finish(sign_in_slices(self._key.signing_key, command.ext, pieces)))
        self.is_broken = True  # after half a request the connection is unusable
        with trio.fail_after(REQUEST_TIMEOUT_S):
            for piece in encode_command_in_pieces(command, pieces):
                await self._stream.send_all(piece)
            while (answer := await self._receive_command()).opaque != self._opaque or not answer.is_response:
                pass
        self.is_broken = False
        return answer

    async def listen(self) -> None:
        """Read and drop unexpected data, to notice a closed connection."""
        while True:
            await self._receive_command()

    async def _receive_command(self) -> Command:
        while (command := self._frames.next_command()) is None:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            if not data:
                self.is_broken = True
                raise RemoteProtocolError("it closed the connection")
            self._frames.receive_data(bytes(data))
        return command


def refusal_error(command: Command, answer: Command, key: BrokerKey) -> RemoteProtocolError:
    """Return the error for *answer*, a refusal of *command*, which *key* has signed."""
    text = f"request {command.code} was answered {answer.code}: {answer.remark}"
    if answer.code == ResponseCode.NO_PERMISSION:
        return NotAdmitted(f"{text}; {key.advice}")
    return RemoteProtocolError(text)
