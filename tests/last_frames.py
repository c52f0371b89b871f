"""Clients over real sockets that read only after they have written everything, as many blocking clients do."""

import trio

__all__ = ["MORE", "read_after_writing"]

MORE = bytes(16 << 20)  # more than the kernel takes for a server that does not read


async def read_after_writing(stream: trio.abc.Stream, data: bytes) -> bytes:
    """Send all of *data*, then return what comes up to the end. Raises `trio.BrokenResourceError` after a reset."""
    await stream.send_all(data)
    received = bytearray()
    while more := await stream.receive_some(65536):
        received += more
    return bytes(received)
