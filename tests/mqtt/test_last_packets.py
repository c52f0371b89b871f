"""A client that is still writing when the broker closes reads the last packet, then the end; its will is not late."""

from pathlib import Path

import pytest
from tests.last_frames import MORE, read_after_writing
from tests.wire_clients.mqtt import V4, V5, mqtt_port
from tests.wire_clients.streams import dialed

from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, Packet, Publish, Will

BAD = b"\x00\x00"  # a packet of the reserved type


async def answers(address: str, data: bytes, version: int) -> list[Packet]:
    async with dialed(address) as wire:
        received = await read_after_writing(wire.stream, data)
    packets = []
    while received:
        size = packet_bytes(received, 0)
        head = 2 if received[1] < 128 else 3
        packets.append(decode_packet(received[0], received[head:size], version))
        received = received[size:]
    return packets


async def test_disconnect_arrives(tmp_path: Path) -> None:
    async with mqtt_port(tmp_path) as port:
        connack, last = await answers(port.address, encode_packet(Connect("c", V5), V5) + BAD + MORE, V5)
        assert isinstance(connack, Connack)
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_refusing_connack_arrives(tmp_path: Path, version: int) -> None:
    connect = encode_packet(Connect("c", version), version)
    connect = connect.replace(b"MQTT" + bytes([version]), b"MQTT" + bytes([9]))
    async with mqtt_port(tmp_path) as port:
        (connack,) = await answers(port.address, connect + MORE, V5)
        assert isinstance(connack, Connack)
        assert connack.reason != ReasonCode.SUCCESS


async def test_answers_before_an_end_without_a_packet_arrive(tmp_path: Path) -> None:
    """MQTT 3.1.1 has no DISCONNECT of the broker."""
    publish = encode_packet(Publish("a", b"x", 1, packet_id=7), V4)
    async with mqtt_port(tmp_path) as port:
        packets = await answers(port.address, encode_packet(Connect("c", V4), V4) + publish + BAD + MORE, V4)
        assert [type(each).__name__ for each in packets] == ["Connack", "Ack"]


async def test_a_will_does_not_wait_until_the_client_has_closed(tmp_path: Path) -> None:
    async with mqtt_port(tmp_path) as port:
        watcher = await port.broker.connect("watcher")
        await watcher.subscribe("will")
        async with dialed(port.address) as wire:
            await wire.send(encode_packet(Connect("c", V5, will=Will("will", b"gone")), V5) + BAD)
            assert await watcher.payloads(1) == [b"gone"]
            assert port.broker.running.server.statistics()["lingering"] == 1
            again = await port.broker.connect("c")
            await again.disconnect()
