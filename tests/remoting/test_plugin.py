"""The plugin in a running broker, spoken to through sockets of this machine."""

import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
import trio
import trustme
from tests.interop.process import free_ports
from tests.wire_clients.remoting import RemotingClient
from tests.wire_clients.streams import Stream, StreamWire

from martlet.app.config import read_config
from martlet.app.startup import run
from martlet.errors import ConfigError
from martlet.net.tls import Tls
from martlet.records.codec import decode_records
from martlet.tables.groups import Group
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import TABLE
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codes import REQUEST_NAMES, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import Harness, keep_nothing, pull_ext, send_ext

SEND, PULL = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE
PATIENCE_S = 120.0
NO_SECTIONS: Mapping[str, object] = {}


class Caller(RemotingClient):
    """A client of one connection."""

    def __init__(self, stream: Stream) -> None:
        wire = StreamWire(stream)
        super().__init__(wire.send, wire.receive_some)
        self.stream = stream

    async def receive(self) -> Command:
        with trio.fail_after(PATIENCE_S):
            return await super().receive()


class Running:
    """A broker in this process; *stop* it to leave the block."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.stop = trio.Event()
        self.streams: list[trio.abc.Stream] = []

    async def connect(self, name: str = "remoting", context: ssl.SSLContext | None = None) -> Caller:
        host, _, port = self.addresses[name].rpartition(":")
        stream = await trio.open_tcp_stream(host, int(port))
        self.streams.append(stream)
        if context is None:
            return Caller(stream)
        secured = trio.SSLStream(stream, context, server_hostname="localhost")
        with trio.fail_after(PATIENCE_S):
            await secured.do_handshake()
        return Caller(secured)


@asynccontextmanager
async def broker(
    folder: Path, *plugins: str, sections: Any = NO_SECTIONS, **remoting: object
) -> AsyncIterator[Running]:
    """Run a broker with *plugins*; *remoting* are keys of that section, *sections* are others."""
    tables: dict[str, object] = {
        "broker": {"data": str(folder / "data")},
        "plugins": {"enabled": ["remoting", *plugins]},
        "nameserver": {"listen": "127.0.0.1:0"},
        "remoting": {"listen": "127.0.0.1:0", **remoting},
        "store": {"flush": "async"},
        **sections,
    }
    running = Running()
    ready = trio.Event()

    def is_ready(addresses: dict[str, str]) -> None:
        running.addresses = addresses
        ready.set()

    async with trio.open_nursery() as nursery:
        config = read_config(tables)

        async def serve() -> None:
            await run(config, ready=is_ready, stop=running.stop)

        nursery.start_soon(serve)
        with trio.fail_after(PATIENCE_S):
            await ready.wait()
        try:
            yield running
        finally:
            running.stop.set()
            for stream in running.streams:
                await trio.aclose_forcefully(stream)


async def test_messages_go_through_a_running_broker(tmp_path: Path) -> None:
    async with broker(tmp_path) as running:
        assert set(running.addresses) <= {"remoting", "remoting-vip"}
        sender, reader = await running.connect(), await running.connect()
        number = await reader.send(SEND, send_ext("T"), b"first")
        answer = await reader.receive()
        port = int(running.addresses["remoting"].rpartition(":")[2])
        assert (answer.opaque, answer.code) == (number, 0)
        assert str(answer.ext["msgId"]).startswith(f"7F000001{port:08X}")
        waiting = await reader.send(PULL, pull_ext("T", 1, sysFlag="6"))
        assert (await sender.ask(SEND, send_ext("T"), b"second")).code == 0
        found = await reader.receive()
        assert (found.opaque, [record.body for record in decode_records(found.body)]) == (waiting, [b"second"])


async def test_members_hear_of_each_other(tmp_path: Path) -> None:
    async with broker(tmp_path) as running:
        first, second = await running.connect(), await running.connect()
        for caller, name in ((first, "c1"), (second, "c2")):
            body = orjson.dumps({"clientID": name, "consumerDataSet": [{"groupName": "G"}]})
            assert (await caller.ask(RequestCode.HEART_BEAT, {}, body)).code == 0

        async def notified() -> None:
            assert (await first.receive()).code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED

        async def members() -> list[str]:
            answer = await first.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
            return list(orjson.loads(answer.body)["consumerIdList"])

        await notified()
        await second.stream.aclose()
        while await members() != ["c1"]:
            await notified()


async def test_a_broker_that_stops_answers_held_pulls_first(tmp_path: Path) -> None:
    async with broker(tmp_path) as running:
        caller = await running.connect()
        await caller.ask(SEND, send_ext("T"), b"x")
        number = await caller.send(PULL, pull_ext("T", 1, sysFlag="6", suspendTimeoutMillis="30000"))
        assert (await caller.ask(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": "0"})).ext["offset"] == "1"
        running.stop.set()
        answer = await caller.receive()
        assert (answer.opaque, answer.code) == (number, ResponseCode.PULL_NOT_FOUND)
        with trio.fail_after(PATIENCE_S):
            assert await caller.stream.receive_some(1) == b""


async def test_the_route_of_a_retry_topic_is_known_before_the_first_heartbeat(tmp_path: Path) -> None:
    async with broker(tmp_path, "nameserver") as running:
        caller, tool = await running.connect("nameserver"), await running.connect("nameserver")
        # Who asks for it alone may be a tool with a mistyped name.
        for topic, code in (("%RETRY%Fresh", ResponseCode.TOPIC_NOT_EXIST), ("TBW102", 0)):
            assert (await caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})).code == code
        answer = await caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%Fresh"})
        assert (answer.code, b'"writeQueueNums":1' in answer.body) == (0, True)
        assert b'"brokerAddrs":{"0":"127.0.0.1:' in answer.body
        for topic in ("Fresh", "%RETRY%a b", "%DLQ%Fresh"):
            answer = await caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
            assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        # A tool, such as RocketMQ's dashboard, gets other routes over the same connection, and lists.
        await tool.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        for topic, code in (("TBW102", 0), ("%RETRY%Fresh", ResponseCode.TOPIC_NOT_EXIST)):
            assert (await tool.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})).code == code


async def test_a_lookup_of_a_retry_topic_creates_no_group_and_no_topic(harness: Harness) -> None:
    broker, name_server = harness.broker, NameServer(NameServerConfig(), keep_nothing)
    broker.capabilities[NameServer] = name_server
    [protocol] = RemotingPlugin(RemotingConfig(vip=False)).martlet_protocols(broker)
    protocol.bound("127.0.0.1:10911")
    broker.groups.update(Group("Gone", retry_queue_nums=3))
    planned = name_server.planned("%RETRY%Gone")
    assert planned is not None
    assert planned.read_queues == 3
    broker.groups.delete("Gone", clean_offsets=True)
    for name in ("Gone", "Mistyped"):
        assert name_server.planned(f"%RETRY%{name}") is not None
        assert broker.groups.get(name) is None
        assert broker.topics.get(f"%RETRY%{name}") is None
    broker.groups.auto_create = False
    assert name_server.planned("%RETRY%Gone") is None


async def test_garbage_closes_its_own_connection_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with broker(tmp_path) as running:
        good, bad, browser = await running.connect(), await running.connect(), await running.connect()
        await bad.stream.send_all(b"\xff\xff\xff\xff" + bytes(100))
        await browser.stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        with trio.fail_after(PATIENCE_S):
            assert await bad.stream.receive_some(100) == b""
            told = bytes(await browser.stream.receive_some(1000))
        assert told.startswith(b"HTTP/1.1 400")
        assert (await good.ask(SEND, send_ext("T"), b"x")).code == 0
    assert not [record for record in caplog.records if record.exc_info]


# the VIP port


def protocols(harness: Harness, **keys: object) -> dict[str, tuple[str, bool]]:
    from martlet.config import fill

    plugin = RemotingPlugin(fill(RemotingConfig, keys, "remoting"))
    return {p.name: (p.listen, p.optional) for p in plugin.martlet_protocols(harness.broker)}


@pytest.mark.parametrize(
    ("keys", "vip"),
    [
        ({}, "127.0.0.1:10909"),
        ({"listen": "[::1]:20000"}, "[::1]:19998"),
        ({"listen": "127.0.0.1:2"}, ""),
        ({"vip": False}, ""),
    ],
)
async def test_the_vip_port_is_two_below(harness: Harness, keys: dict[str, object], vip: str) -> None:
    found = protocols(harness, **keys)
    assert found["remoting"][1] is False
    assert found.get("remoting-vip") == ((vip, True) if vip else None)


async def test_the_vip_port_is_two_below_a_free_port_as_well(tmp_path: Path) -> None:
    async with broker(tmp_path, listen="127.0.0.1:0") as running:
        # Somebody else may have that one.
        if "remoting-vip" in running.addresses:
            ports = [int(running.addresses[name].rpartition(":")[2]) for name in ("remoting", "remoting-vip")]
            assert ports[0] - ports[1] == 2
            caller = await running.connect("remoting-vip")
            assert (await caller.ask(SEND, send_ext("T"), b"x")).code == 0


async def test_without_its_vip_port_the_broker_starts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports((0, -2))
    with socket.create_server(("127.0.0.1", port - 2)), caplog.at_level(logging.WARNING):
        async with broker(tmp_path, listen=f"127.0.0.1:{port}") as running:
            assert list(running.addresses) == ["remoting"]
            caller = await running.connect()
            assert (await caller.ask(SEND, send_ext("T"), b"x")).code == 0
    assert "remoting-vip cannot listen" in caplog.text


async def test_both_ports_are_one_broker(tmp_path: Path) -> None:
    async with broker(tmp_path, listen=f"127.0.0.1:{free_ports((0, -2))}") as running:
        main, fast = await running.connect(), await running.connect("remoting-vip")
        assert (await fast.ask(SEND, send_ext("T"), b"x")).code == 0
        assert (await main.ask(PULL, pull_ext("T", 0))).code == 0
        assert (await fast.ask(PULL, pull_ext("T", 0))).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# TLS


class Certificates:
    """An authority, and the files that a broker is given."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.cert, self.key, self.client_ca = folder / "cert.pem", folder / "key.pem", folder / "client-ca.pem"
        self.authority.cert_pem.write_to_path(str(self.client_ca))
        self.issue()

    def issue(self) -> None:
        """Write a new certificate for the broker."""
        made = self.authority.issue_cert("localhost")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    @property
    def keys(self) -> dict[str, object]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def test_one_port_takes_tls_and_plain(tmp_path: Path, certificates: Certificates) -> None:
    async with broker(tmp_path, **certificates.keys) as running:
        plain, secured = await running.connect(), await running.connect(context=certificates.client())
        assert (await plain.ask(SEND, send_ext("T"), b"x")).code == 0
        assert (await secured.ask(PULL, pull_ext("T", 0))).code == 0


async def test_enforcing_takes_tls_alone(tmp_path: Path, certificates: Certificates) -> None:
    async with broker(tmp_path, tls="enforcing", **certificates.keys) as running:
        secured, plain = await running.connect(context=certificates.client()), await running.connect()
        assert (await secured.ask(SEND, send_ext("T"), b"x")).code == 0
        await plain.send(SEND, send_ext("T"), b"x")
        with trio.fail_after(PATIENCE_S):
            assert await plain.stream.receive_some(100) == b""


async def send_one(running: Running, context: ssl.SSLContext) -> None:
    caller = await running.connect(context=context)
    await caller.ask(SEND, send_ext("T"), b"x")


async def test_a_client_certificate_can_be_asked_for(tmp_path: Path, certificates: Certificates) -> None:
    keys = {"tls_client_ca": str(certificates.client_ca), **certificates.keys}
    async with broker(tmp_path, **keys) as running:
        context = certificates.client()
        certificates.authority.issue_cert("client").configure_cert(context)
        known = await running.connect(context=context)
        assert (await known.ask(SEND, send_ext("T"), b"x")).code == 0
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError, EOFError)):
            await send_one(running, certificates.client())


def tls(certificates: Certificates, **keys: object) -> Tls:
    from martlet.config import fill

    return Tls(fill(RemotingConfig, {**certificates.keys, **keys}, "remoting"), "remoting")


def test_certificates_change_while_it_runs_and_bad_ones_change_nothing(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    made = tls(certificates)
    first = made.context()
    certificates.issue()
    made.reload()
    second = made.context()
    assert second is not None
    assert second is not first
    certificates.cert.write_text("nonsense")
    made.reload()
    assert made.context() is second
    assert "keeping the old ones" in caplog.text


def test_disabled_tls_has_no_context(certificates: Certificates) -> None:
    assert tls(certificates, tls="disabled").context() is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tls": "enforcing", "tls_cert": ""}, "tls_cert is empty"),
        ({"tls_cert": "/nowhere/cert.pem"}, "'/nowhere/cert.pem'"),
        ({"tls_client_ca": "/nowhere/ca.pem"}, "'/nowhere/ca.pem'"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(
    certificates: Certificates, keys: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tls(certificates, **keys)


def test_the_documentation_names_every_code_that_is_answered() -> None:
    page = Path(__file__).parents[2] / "docs" / "remoting.md"
    rows = re.findall(r"^\| (\d+) \| ([A-Z_0-9]+) \|", page.read_text(), re.MULTILINE)
    assert {int(code): name for code, name in rows} == {code: REQUEST_NAMES[code] for code in TABLE}


@pytest.mark.parametrize("port", ["remoting", "nameserver"])
async def test_a_real_grpc_client_shows_the_reason_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, port: str
) -> None:
    def call(address: str) -> str:
        with grpc.insecure_channel(address) as channel:
            method = channel.unary_unary("/apache.rocketmq.v2.MessagingService/QueryRoute")
            try:
                method(b"", timeout=60)
            except grpc.RpcError as error:
                return str(error)
        return "it answered"

    async with broker(tmp_path, "nameserver") as running:
        text = await trio.to_thread.run_sync(call, running.addresses[port])
    wanted = "client speaks HTTP/2, as RocketMQ's gRPC clients do; this port speaks RocketMQ remoting"
    assert wanted in text
    assert wanted in caplog.text
