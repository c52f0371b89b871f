"""Clients of every protocol behind a proxy, in a running broker: plain, with TLS and over WebSocket."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme
from tests.net.proxy_headers import LOCAL, UNKNOWN, binary, text
from tests.remoting.conftest import pull_ext, send_ext
from tests.wire_clients.mqtt import MqttClient
from tests.wire_clients.remoting import RemotingClient
from tests.wire_clients.stomp import connected, websocket
from tests.wire_clients.streams import StreamWire, WebSocketWire, Wire
from wsproto.events import AcceptConnection

from martlet.app.config import read_config
from martlet.app.startup import run
from martlet.net.addresses import pack_host, show_address, split_address
from martlet.net.tls import client_context
from martlet.records.codec import decode_records
from martlet_mqtt.wire.packets import Connack, Connect
from martlet_remoting.wire.codes import RequestCode

PROXY = "127.0.0.9"
CLIENT, PORT = "203.0.113.7", 51234
HEADERS: dict[str, Callable[..., bytes]] = {"v1": text, "v2": binary}
PORTS = "remoting", "remoting-vip", "nameserver", "mqtt", "stomp"


class Ports:
    """The addresses of a broker's ports, and connections to them as a proxy makes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority = trustme.CA()
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
        authority.cert_pem.write_to_path(folder / "ca.pem")
        self.addresses: dict[str, str] = {}
        self._wires: list[Wire] = []

    async def dial(self, port: str, header: bytes, *, tls: bool = False, source: str = PROXY) -> StreamWire:
        host, number = split_address(self.addresses[port])
        stream = await trio.open_tcp_stream(host, number, local_address=source)
        wire = StreamWire(stream)
        self._wires.append(wire)
        if header:
            await stream.send_all(header)
        if tls:
            context = client_context(str(self._folder / "ca.pem"))
            wire.stream = trio.SSLStream(stream, context, server_hostname="localhost")
        return wire

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


@asynccontextmanager
async def broker(folder: Path, **keys: object) -> AsyncIterator[Ports]:
    """Run a broker in which each port has the *keys*; it may be reached through a proxy."""
    ports, ready, stop = Ports(folder), trio.Event(), trio.Event()
    section = {"listen": "127.0.0.1:0", "proxy_networks": [PROXY], "tls_cert": str(folder / "server.pem"), **keys}
    tables: dict[str, object] = {
        "broker": {"data": str(folder / "data")},
        "plugins": {"enabled": ["remoting", "nameserver", "mqtt", "stomp"]},
        "remoting": section,
        "nameserver": section,
        "mqtt": {**section, "queues": 1},
        "stomp": section,
        "store": {"flush": "async"},
    }

    def is_ready(addresses: dict[str, str]) -> None:
        ports.addresses = addresses
        ready.set()

    async def serve() -> None:
        await run(read_config(tables), ready=is_ready, stop=stop)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await ready.wait()
            try:
                yield ports
            finally:
                stop.set()
                ports.close()


def remoting(wire: Wire) -> RemotingClient:
    return RemotingClient(wire.send, wire.receive_some)


async def born_host(ports: Ports, topic: str) -> bytes:
    """Return the client's address in the only record of *topic*."""
    client = remoting(await ports.dial("remoting", LOCAL))
    while not (found := await client.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0))).body:
        await trio.lowlevel.checkpoint()
    (record,) = decode_records(found.body)
    return record.born_host


async def talk_remoting(wire: Wire) -> str:
    client = remoting(wire)
    await client.introduce("shop")
    assert (await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"hello")).code == 0
    return "T"


async def talk_mqtt(wire: Wire) -> str:
    client = MqttClient(wire)
    await client.send(Connect("shop"))
    await client.expect(Connack)
    assert await client.publish("home/door", b"hello", 1) == 0
    return "mqtt"


async def talk_mqtt_websocket(wire: Wire) -> str:
    socket = WebSocketWire(wire)
    assert isinstance(await socket.shake_hands("mqtt"), AcceptConnection)
    return await talk_mqtt(socket)


async def talk_stomp(wire: Wire) -> str:
    client, answer = await connected(wire, client_id="shop")
    assert answer.command == "CONNECTED"
    await client.publish("/topic/S", b"hello")
    return "S"


async def talk_stomp_websocket(wire: Wire) -> str:
    return await talk_stomp(await websocket(wire, text=True))


Talk = Callable[[Wire], Awaitable[str]]
TALKS: dict[str, tuple[str, Talk]] = {
    "remoting": ("remoting", talk_remoting),
    "vip": ("remoting-vip", talk_remoting),
    "mqtt": ("mqtt", talk_mqtt),
    "mqtt over websocket": ("mqtt", talk_mqtt_websocket),
    "stomp": ("stomp", talk_stomp),
    "stomp over websocket": ("stomp", talk_stomp_websocket),
}


@pytest.mark.parametrize("form", HEADERS)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("talk", TALKS)
async def test_log_and_records_have_the_address_of_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, talk: str, tls: bool, form: str
) -> None:
    caplog.set_level(logging.INFO)
    port, speak = TALKS[talk]
    client = CLIENT if form == "v1" else "2001:db8::7"
    async with broker(tmp_path) as ports:
        topic = await speak(await ports.dial(port, HEADERS[form](client, PORT), tls=tls))
        assert await born_host(ports, topic) == pack_host(client, PORT)
    assert f"client 'shop' at {show_address(client, PORT)} connected" in caplog.text
    assert PROXY not in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def answers(port: str, wire: Wire) -> bool:
    """Whether *port* answers on *wire* to a client that says hello."""
    try:
        if port == "nameserver":
            return b"DefaultCluster" in (await remoting(wire).ask(RequestCode.GET_BROKER_CLUSTER_INFO, {})).body
        await TALKS[port.replace("remoting-", "")][1](wire)
    except (EOFError, trio.BrokenResourceError):
        return False
    return True


@pytest.mark.parametrize("port", PORTS)
async def test_networks_are_those_of_the_client(tmp_path: Path, port: str) -> None:
    async with broker(tmp_path, networks=["203.0.113.0/24"]) as ports:
        for header in text(CLIENT, PORT), binary(CLIENT, PORT), LOCAL, UNKNOWN:
            assert await answers(port, await ports.dial(port, header)), header
        for header in text("198.51.100.7", PORT), binary("2001:db8::7", PORT):
            assert not await answers(port, await ports.dial(port, header)), header
        assert not await answers(port, await ports.dial(port, b"", source="127.0.0.1"))


@pytest.mark.parametrize("port", PORTS)
async def test_a_port_needs_the_header_from_proxies_alone(tmp_path: Path, port: str) -> None:
    async with broker(tmp_path) as ports:
        assert await answers(port, await ports.dial(port, b"", source="127.0.0.1"))
        assert not await answers(port, await ports.dial(port, b""))
        for header in text(CLIENT, PORT), binary(CLIENT, PORT):
            wire = await ports.dial(port, header, source="127.0.0.1")
            await wire.stream.send_eof()
            assert await wire.receive_some() == b"" or port == "stomp", "STOMP says what is wrong"


async def test_a_wrong_network_stops_the_start(tmp_path: Path) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match=r"config key 'remoting\.networks': network 'home' is"), flatten_subgroups=True
    ):
        async with broker(tmp_path, networks=["home"]):
            pass
