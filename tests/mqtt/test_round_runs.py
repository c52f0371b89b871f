"""Runs of PUBLISH of all clients that were read in one round are stored by one call; each client gets its answers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker, mqtt_port
from tests.wire_clients.reads import Read, Reads

from martlet.errors import Reason, Refused, StoreFailed
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V4, V5, PacketType
from martlet_mqtt.wire.packets import Ack, Connect, FilterSubscription, Packet, Pingreq, Publish, Subscribe


@asynccontextmanager
async def broker(flush: str = "async", disk: FakeDisk | None = None) -> AsyncIterator[tuple[MqttBroker, Reads]]:
    store = small_config(flush=flush, flush_interval_ms=60_000)
    async with mqtt_broker(Path("/data"), store=store, disk=disk or FakeDisk(), clock=TrioClock()) as mqtt:
        yield mqtt, Reads(mqtt.broker)


async def clients(mqtt: MqttBroker, reads: Reads, count: int, version: int = V4) -> list[Read]:
    found = [reads.connect(mqtt.protocol) for _ in range(count)]
    for number, client in enumerate(found):
        await client.receive(encode_packet(Connect(f"c{number}", version=version), version))
        assert client.sent()[0] == PacketType.CONNACK << 4
    mqtt.broker.store.committer.commit()
    return found


def packets(*given: Packet, version: int = V4) -> bytes:
    return b"".join([encode_packet(each, version) for each in given])


def message(number: int, qos: int = 1, packet_id: int = 0) -> Publish:
    return Publish(f"a/{number}", b"%d" % number, qos, packet_id=packet_id or number if qos else 0)


def puback(*ids: int) -> bytes:
    return b"".join([b"\x40\x02" + each.to_bytes(2) for each in ids])


async def test_many_clients_are_stored_by_one_call_and_answered_apart(appended: list[int]) -> None:
    async with broker() as (mqtt, reads):
        publishers = await clients(mqtt, reads, 7)
        talk = await mqtt.connect("s", V4)
        await talk.subscribe("a/#", qos=0)
        appended.clear()
        with reads.round():
            for at, client in enumerate(publishers, 1):
                await client.receive(packets(*(message(10 * at + i) for i in range(3))))
            assert not appended
            assert not any(client.sent() for client in publishers)
        assert appended == [21]
        for at, client in enumerate(publishers, 1):
            assert client.sent() == puback(*(10 * at + i for i in range(3)))
        held = [client.peer.held for client in publishers]
        assert held == sorted(set(held))
        assert held[-1] == mqtt.broker.store.written
        assert await talk.payloads(21) == [b"%d" % (10 * at + i) for at in range(1, 8) for i in range(3)]
        assert mqtt.context.counters.stored == 21


async def test_messages_of_qos_0_alone_need_no_fdatasync() -> None:
    disk = FakeDisk()
    async with broker("sync", disk) as (mqtt, reads):
        publishers = await clients(mqtt, reads, 3)
        await mqtt.broker.store.flusher.wait_flushed(mqtt.broker.store.written)
        wanted = mqtt.broker.store.flusher.wanted
        with reads.round():
            for at, client in enumerate(publishers):
                await client.receive(packets(message(at, 0)))
        assert mqtt.broker.store.flusher.wanted == wanted < mqtt.broker.store.written
        with reads.round():
            for at, client in enumerate(publishers, 1):
                await client.receive(packets(message(at, at % 2)))
        assert mqtt.broker.store.flusher.wanted == mqtt.broker.store.written
        assert [client.sent() for client in publishers] == [puback(1), b"", puback(3)]


@pytest.mark.parametrize(
    "packet",
    [
        Subscribe(1, (FilterSubscription("a/#", 0),)),
        Publish("a/9", b"9", 1, retain=True, packet_id=9),
        Publish("a/9", b"9", 2, packet_id=9),
        Pingreq(),
    ],
    ids=lambda packet: type(packet).__name__,
)
async def test_another_packet_comes_after_all_messages_before_it(packet: Packet, appended: list[int]) -> None:
    async with broker() as (mqtt, reads):
        one, two = await clients(mqtt, reads, 2)
        appended.clear()
        with reads.round():
            await one.receive(packets(message(1)))
            await two.receive(packets(message(2)))
            assert not appended
            await two.receive(packets(packet, message(3)))
            assert appended[0] == 2
        assert one.sent() == puback(1)
        answers = two.sent()
        assert answers.startswith(puback(2))
        assert answers.endswith(puback(3))


async def test_acknowledgements_do_not_store_what_waits(appended: list[int]) -> None:
    async with broker() as (mqtt, reads):
        one, two = await clients(mqtt, reads, 2)
        appended.clear()
        with reads.round():
            await one.receive(packets(message(1)))
            await two.receive(packets(*(Ack(PacketType.PUBREL, each) for each in (5, 6))))
            assert not appended
        assert two.sent() == b"\x70\x02\x00\x05\x70\x02\x00\x06"
        assert one.sent() == puback(1)


async def test_after_a_refused_message_that_must_come_again_no_later_one_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Writer.append_all

    def refuse_first(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        result = real(self, items[1:], atomic=atomic)
        result.add_refused({0: Refused(Reason.UNAVAILABLE, "not now")})
        return result

    async with broker() as (mqtt, reads):
        one, two = await clients(mqtt, reads, 2)
        appended = mqtt.broker.store.appended
        with reads.round(), monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", refuse_first)
            await one.receive(packets(message(1)))
            await two.receive(packets(message(2)))
            await one.receive(packets(message(3)))
            assert one.peer.reason == "not now"
            assert mqtt.broker.store.appended > appended
            reads.finish()
        assert one.sent() == b""
        assert two.sent() == puback(2)
        assert mqtt.context.counters.stored == 1


async def test_a_client_of_mqtt_5_hears_of_its_own_refusal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Writer.append_all

    def refuse_second(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        result = real(self, [*items[:1], *items[2:]], atomic=atomic)
        result.add_refused({1: Refused(Reason.QUOTA, "too many")})
        return result

    async with broker() as (mqtt, reads):
        publishers = await clients(mqtt, reads, 3, V5)
        with reads.round(), monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", refuse_second)
            for at, client in enumerate(publishers, 1):
                await client.receive(packets(message(at), version=V5))
            reads.finish()
        one, two, three = (client.sent() for client in publishers)
        assert (one, three) == (puback(1), puback(3))
        assert two[:1] == b"\x40"
        assert b"too many" in two


async def test_a_failing_disk_ends_the_connections_whose_messages_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> AppendResult:
        raise StoreFailed("the disk is gone")

    async with broker() as (mqtt, reads):
        one, two, other = await clients(mqtt, reads, 3)
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", fail)
            await one.receive(packets(message(1)))
            await two.receive(packets(message(2, 0)))
            reads.finish()
        assert [each.peer.reason for each in (one, two, other)] == ["the disk is gone"] * 2 + [None]
        assert one.sent() == two.sent() == b""


async def test_the_last_packet_comes_after_the_answers_to_earlier_ones_of_its_read(tmp_path: Path) -> None:
    async with mqtt_port(tmp_path) as port:
        wire = await port.wire()
        await wire.send(encode_packet(Connect("c", version=V5), V5))
        received = b""
        while len(received) < 2 or len(received) < 2 + received[1]:
            received += await wire.receive_some()
        await wire.send(packets(message(1), version=V5) + b"\x00\x00")
        received = b""
        while data := await wire.receive_some():
            received += data
        assert received[:4] == puback(1)
        assert received[4] == PacketType.DISCONNECT << 4
