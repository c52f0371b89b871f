"""A client that is still writing when the broker closes reads the last packet, then the end; its will is not late."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.last_frames import MORE, read_after_writing
from tests.mqtt.mqtt_talk import ASYNC, V4, V5, Running

from martlet.net.addresses import split_address
from martlet.testing.peers import serving
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, Packet, Publish, Will

BAD = b"\x00\x00"  # a packet of the reserved type


@asynccontextmanager
async def port_of(directory: Path) -> AsyncIterator[tuple[Running, str]]:
    plugin = MqttPlugin(MqttConfig(listen="127.0.0.1:0"))
    addresses: list[str] = []
    async with serving(
        directory,
        store=ASYNC,
        projections=plugin.martlet_projections,
        services=plugin.martlet_services,
        ports=lambda broker: (plugin.protocol(broker, addresses.append),),
    ) as running:
        yield Running(running, plugin.protocol(running.broker), plugin), addresses[0]


async def answers(address: str, data: bytes, version: int) -> list[Packet]:
    async with await trio.open_tcp_stream(*split_address(address)) as stream:
        received = await read_after_writing(stream, data)
    packets = []
    while received:
        size = packet_bytes(received, 0)
        head = 2 if received[1] < 128 else 3
        packets.append(decode_packet(received[0], received[head:size], version))
        received = received[size:]
    return packets


async def test_disconnect_arrives(tmp_path: Path) -> None:
    async with port_of(tmp_path) as (_, address):
        connack, last = await answers(address, encode_packet(Connect("c", V5), V5) + BAD + MORE, V5)
        assert isinstance(connack, Connack)
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_refusing_connack_arrives(tmp_path: Path, version: int) -> None:
    connect = encode_packet(Connect("c", version), version)
    connect = connect.replace(b"MQTT" + bytes([version]), b"MQTT" + bytes([9]))
    async with port_of(tmp_path) as (_, address):
        (connack,) = await answers(address, connect + MORE, V5)
        assert isinstance(connack, Connack)
        assert connack.reason != ReasonCode.SUCCESS


async def test_answers_before_an_end_without_a_packet_arrive(tmp_path: Path) -> None:
    """MQTT 3.1.1 has no DISCONNECT of the broker."""
    publish = encode_packet(Publish("a", b"x", 1, packet_id=7), V4)
    async with port_of(tmp_path) as (_, address):
        packets = await answers(address, encode_packet(Connect("c", V4), V4) + publish + BAD + MORE, V4)
        assert [type(each).__name__ for each in packets] == ["Connack", "Ack"]


async def test_a_will_does_not_wait_until_the_client_has_closed(tmp_path: Path) -> None:
    async with port_of(tmp_path) as (running, address):
        watcher = await running.connect("watcher")
        await watcher.subscribe("will")
        async with await trio.open_tcp_stream(*split_address(address)) as stream:
            await stream.send_all(encode_packet(Connect("c", V5, will=Will("will", b"gone")), V5) + BAD)
            assert await watcher.payloads(1) == [b"gone"]
            assert running.running.server.statistics()["lingering"] == 1
            again = await running.connect("c")
            await again.disconnect()
