"""The plugin `nameserver`: what it offers a broker, and how one of its peers is served."""

import logging

import orjson
import pytest
import trio

from martlet.runtime.steps import finish_now
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.plugin import KV_FILE, NameServerPlugin
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode
from martlet_remoting.wire.packets import Command

from .conftest import Harness
from .nameserver_talk import ServerPeer


def registration(opaque: int, flag: int = 0) -> bytes:
    fields = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    topics = {name: {"perm": 6, "readQueueNums": 4, "writeQueueNums": 4} for name in "TU"}
    body = orjson.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": topics}})
    return encode_command(Command(RequestCode.REGISTER_BROKER, fields, body, opaque, flag))


def question(opaque: int, flag: int = 0) -> bytes:
    return encode_command(Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "T"}, b"", opaque, flag))


async def test_peer_is_answered_in_order_and_its_brokers_go_with_it(harness: Harness) -> None:
    plugin = NameServerPlugin(NameServerConfig(listen="127.0.0.1:0"))
    (server,) = plugin.martlet_capabilities(harness.broker).values()
    assert isinstance(server, NameServer)
    (protocol,) = plugin.martlet_protocols(harness.broker)
    assert (protocol.name, protocol.listen, protocol.tls()) == ("nameserver", "127.0.0.1:0", None)
    protocol.bound("127.0.0.1:45678")
    assert b"listenPort=45678\n" in server.properties()
    peer, connection = ServerPeer("127.0.0.1"), protocol.connect(0.0)
    handler = protocol.handle(peer, connection)
    stray = encode_command(Command(0, {}, b"", 9, FLAG_RESPONSE))
    data = registration(1) + stray + question(2) + question(3, FLAG_ONEWAY) + question(4)
    for start in range(0, len(data), 7):
        connection.receive_data(data[start : start + 7], trio.current_time())
        for event in connection.events():
            handler.handle(event)
    handler.collect(1)
    frames = FrameBuffer()
    frames.receive_data(peer.sent)
    assert [(answer.opaque, answer.code) for answer in frames.commands()] == [(1, 0), (2, 0), (4, 0)]
    handler.closed("")
    assert finish_now(server.table.index.names()) == []
    assert harness.broker.stats.collect()["nameserver"]["requests"] == 4


async def test_texts_outlive_the_broker_and_a_broken_file(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    def start() -> NameServer:
        (server,) = NameServerPlugin(NameServerConfig()).martlet_capabilities(harness.broker).values()
        assert isinstance(server, NameServer)
        return server

    await start().kv.put("n", "k", "v")
    assert start().kv.get("n", "k") == "v"
    harness.store.data_directory.write_file(KV_FILE, b"torn")
    with caplog.at_level(logging.WARNING):
        assert start().kv.get("n", "k") == "v"
    assert "trying its previous generation" in caplog.text


async def test_services_and_capability_are_of_one_name_server(harness: Harness) -> None:
    plugin = NameServerPlugin(NameServerConfig())
    (service,) = plugin.martlet_services(harness.broker)
    (server,) = plugin.martlet_capabilities(harness.broker).values()
    assert isinstance(server, NameServer)
    assert service == server.scan
