"""A client that is still writing when the broker closes reads all answers, then the end."""

import pytest
import trio
from msgspec.structs import replace
from tests.last_frames import MORE, read_after_writing
from tests.remoting.conftest import OpenHarness, send_ext
from tests.remoting.test_in_server import SEND, Served

from martlet.net.addresses import split_address
from martlet.settings import ServerConfig
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.packets import Command

NO_FRAME = b"\x00\x00\x00\x04\xff\xff\xff\xff"


async def answer(open_harness: OpenHarness, data: bytes) -> bytes:
    harness = await open_harness(store={"flush": "async"})
    served = Served(harness, ServerConfig())
    addresses: list[str] = []
    protocol = replace(served.protocol(), bound=addresses.append)
    await harness.nursery.start(served.server.run, [(protocol, served.server.bind(protocol))])
    harness.topic("T")
    async with await trio.open_tcp_stream(*split_address(addresses[0])) as stream:
        return await read_after_writing(stream, data)


@pytest.mark.parametrize("end", [NO_FRAME, b"\x7f\xff\xff\xff"])
async def test_the_answers_to_requests_before_a_bad_frame_arrive(open_harness: OpenHarness, end: bytes) -> None:
    sends = [encode_command(Command(SEND, send_ext("T", 0), b"%d" % number, number)) for number in range(1, 4)]
    frames = FrameBuffer()
    frames.receive_data(await answer(open_harness, b"".join(sends) + end + MORE))
    commands = list(frames.commands())
    assert [(each.opaque, each.code) for each in commands] == [(1, 0), (2, 0), (3, 0)]


async def test_the_answer_to_an_http_client_that_uploads_arrives(open_harness: OpenHarness) -> None:
    received = await answer(open_harness, b"POST / HTTP/1.1\r\nHost: h\r\n\r\n" + MORE)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"client speaks HTTP" in received
