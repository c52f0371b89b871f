"""A client of RocketMQ's remoting protocol that sends what a test says, over any connection."""

from collections.abc import Awaitable, Callable, Mapping

from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.packets import Command


class RemotingClient:
    """One connection; ``asked`` are the requests of the broker that came while an answer was waited for.

    *receive_bytes* returns nothing if the broker has closed the connection.
    """

    def __init__(
        self, send_bytes: Callable[[bytes], Awaitable[None]], receive_bytes: Callable[[], Awaitable[bytes]]
    ) -> None:
        self._send_bytes = send_bytes
        self._receive_bytes = receive_bytes
        self._frames = FrameBuffer()
        self._opaque = 0
        self.asked: list[Command] = []

    async def send(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> int:
        """Send a request and return its number."""
        self._opaque += 1
        await self.send_command(Command(code, ext, body, self._opaque))
        return self._opaque

    async def send_command(self, *commands: Command) -> None:
        """Send commands that the broker reads at once."""
        await self._send_bytes(b"".join(map(encode_command, commands)))

    async def receive(self) -> Command:
        """Return the next command.

        Raises:
          EOFError: the broker has closed the connection.
        """
        while (command := self._frames.next_command()) is None:
            data = await self._receive_bytes()
            if not data:
                raise EOFError("the broker closed the connection")
            self._frames.receive_data(data)
        return command

    async def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        """Send a request and return its answer."""
        number = await self.send(code, ext, body)
        while (command := await self.receive()).opaque != number or not command.is_response:
            if not command.is_response:
                self.asked.append(command)
        return command
