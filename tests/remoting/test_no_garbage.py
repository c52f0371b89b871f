"""Connections and errors leave no reference cycles: `gc_schedule` rarely collects the oldest generation."""

import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import orjson
import pytest
import trio

from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import pull_ext, send_ext

TIMES = 30
HEARTBEAT = {"clientID": "c", "consumerDataSet": [{"groupName": "G", "subscriptionDataSet": []}]}


class Wire:
    """Opens connections to the broker."""

    def __init__(self, serving: Serving, address: str) -> None:
        self.serving = serving
        host, _, port = address.rpartition(":")
        self._address = host, int(port)

    def connect(self) -> socket.socket:
        client = socket.create_connection(self._address)
        client.setblocking(False)
        return client

    async def wait_alone(self) -> None:
        """Wait until every connection has ended."""
        while self.serving.server.statistics()["connections"]:
            await trio.lowlevel.checkpoint()


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    plugin = RemotingPlugin(RemotingConfig(listen="127.0.0.1:0"))
    ports = lambda broker: list(plugin.martlet_protocols(broker))  # noqa: E731
    async with serving(tmp_path, store=StoreConfig(flush="async"), ports=ports) as running:
        running.broker.topics.ensure("T", 4)
        yield Wire(running, plugin.addresses["remoting"])


async def talk(client: socket.socket, *commands: Command) -> list[int]:
    """Send *commands*, one after the other, and return the codes of their answers."""
    codes: list[int] = []
    frames = FrameBuffer()
    for command in commands:
        client.sendall(encode_command(command))
        while (answer := frames.next_command()) is None or not answer.is_response:
            await trio.lowlevel.wait_readable(client)
            frames.receive_data(client.recv(65536))
        codes.append(answer.code)
    return codes


async def wait_closed(client: socket.socket) -> None:
    while True:
        await trio.lowlevel.wait_readable(client)
        try:
            if not client.recv(65536):
                return
        except ConnectionResetError:
            return


async def send_and_pull(wire: Wire) -> None:
    with wire.connect() as client:
        heartbeat = Command(RequestCode.HEART_BEAT, {}, orjson.dumps(HEARTBEAT), 1)
        send = Command(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"x", 2)
        pull = Command(RequestCode.PULL_MESSAGE, pull_ext("T", 0), b"", 3)
        assert await talk(client, heartbeat, send, pull) == [0, 0, 0]


async def refused(wire: Wire) -> None:
    with wire.connect() as client:
        nowhere = Command(RequestCode.PULL_MESSAGE, pull_ext("Nowhere", 0), b"", 1)
        unknown = Command(9999, {}, b"", 2)
        broken = Command(RequestCode.HEART_BEAT, {}, b"{", 3)
        codes = await talk(client, nowhere, unknown, broken)
        assert codes[0] == ResponseCode.TOPIC_NOT_EXIST
        assert 0 not in codes


async def long_work(wire: Wire) -> None:
    with wire.connect() as client:
        topics = Command(RequestCode.GET_ALL_TOPIC_CONFIG, {}, b"", 1)
        assert await talk(client, topics) == [0]


async def pull_and_leave(wire: Wire) -> None:
    with wire.connect() as client:
        client.sendall(encode_command(Command(RequestCode.PULL_MESSAGE, pull_ext("T", 0) | {"sysFlag": "6"}, b"", 1)))
        assert await talk(client, Command(RequestCode.GET_ALL_TOPIC_CONFIG, {}, b"", 2)) == [0]


async def half_a_frame(wire: Wire) -> None:
    with wire.connect() as client:
        client.sendall(encode_command(Command(RequestCode.HEART_BEAT, {}, bytes(1000), 1))[:500])


async def garbage(wire: Wire) -> None:
    with wire.connect() as client:
        client.sendall(b"\xff" * 1000)
        await wait_closed(client)


VISITS: list[Callable[[Wire], Awaitable[None]]] = [
    send_and_pull,
    refused,
    long_work,
    pull_and_leave,
    half_a_frame,
    garbage,
]


@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.__name__)
async def test_requests_of_clients_leave_no_cycles(
    visit: Callable[[Wire], Awaitable[None]], wire: Wire, no_collection: None
) -> None:
    for _ in range(3):  # what is made once
        await visit(wire)
    await wire.wait_alone()
    gc.collect()
    for _ in range(TIMES):
        await visit(wire)
    await wire.wait_alone()
    assert gc.collect() < TIMES  # less than one object for each time
