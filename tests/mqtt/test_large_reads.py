"""No client keeps the others waiting: what one turn of the event loop does is bounded. Counts, never times."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker, mqtt_port

from martlet.net.reader import EVENTS_A_TURN
from martlet.runtime.steps import per_slice
from martlet_mqtt.inbound.subscriptions import FILTER_US
from martlet_mqtt.wire.codec import FILTERS_A_PACKET
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.connection import ACK_ROOM, LONG_BYTES
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import PROPERTIES_BYTES_MAX, USER_PROPERTIES_MAX, Properties, Property
from martlet_mqtt.wire.scanner import RUN_PACKETS_MAX

FILTERS = tuple(f"sensors/{number}/+" for number in range(1000))


@asynccontextmanager
async def most_a_turn(counted: Callable[[], int]) -> AsyncIterator[list[int]]:
    """Yield a list of how much *counted* changes from look to look: in one turn of the event loop, or in two."""
    changes: list[int] = []

    async def look() -> None:
        before = counted()
        while True:
            await trio.lowlevel.checkpoint()
            now = counted()
            changes.append(abs(now - before))
            before = now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.lowlevel.checkpoint()
        yield changes
        nursery.cancel_scope.cancel()


def large(mqtt: MqttBroker, version: int = V5) -> MqttClient:
    """Return a connection on which a whole read of the server arrives at once."""
    return MqttClient(mqtt.running.connect(mqtt.protocol, 1 << 20), version)


async def accepted(talk: MqttClient, client_id: str = "c") -> MqttClient:
    await talk.send(Connect(client_id, talk.version))
    assert not (await talk.expect(Connack)).reason
    return talk


async def test_a_read_of_many_packets_is_handled_over_many_turns(tmp_path: Path) -> None:
    count = 20 * EVENTS_A_TURN
    async with mqtt_broker(tmp_path) as mqtt:
        talk, counters = await accepted(large(mqtt)), mqtt.context.counters
        async with most_a_turn(lambda: counters.packets_received) as changes:
            await talk.send(*[Pingreq()] * count, Publish("last", b"", 1, packet_id=7))
            for _ in range(count):
                await talk.expect(Pingresp)
            assert (await talk.expect(Ack)).packet_id == 7
        assert max(changes) <= 2 * EVENTS_A_TURN
        assert sum(changes) == count + 1


async def test_a_read_from_a_socket_is_handled_over_many_turns(tmp_path: Path) -> None:
    count = 20 * EVENTS_A_TURN
    async with mqtt_port(tmp_path) as port:
        counters = port.broker.context.counters
        wire = await port.wire()
        async with most_a_turn(lambda: counters.packets_received) as changes:
            await wire.send(b"\x10\x10\0\4MQTT\5\2\0\0\0\0\3abc" + b"\xc0\0" * count)
            received = b""
            while received.count(b"\xd0\0") < count:
                received += await wire.receive_some()
        assert max(changes) <= 2 * EVENTS_A_TURN


@pytest.mark.parametrize(("step", "room"), [(1, 1), (2, ACK_ROOM)])
@pytest.mark.parametrize("run", [1, 10, 100, RUN_PACKETS_MAX - 1, RUN_PACKETS_MAX, 5 * RUN_PACKETS_MAX])
async def test_runs_of_acknowledgements_that_others_interrupt_are_handled_over_many_turns(
    tmp_path: Path, run: int, step: int, room: int
) -> None:
    kinds, count = (0x40, 0x50, 0x62, 0x70), 20 * RUN_PACKETS_MAX
    data = b"".join(b"%c\x02%b" % (kinds[at // run % 4], (step * at % 65_535 + 1).to_bytes(2)) for at in range(count))
    async with mqtt_broker(tmp_path) as mqtt:
        talk, counters = await accepted(large(mqtt)), mqtt.context.counters
        async with most_a_turn(lambda: counters.packets_received) as changes:
            await talk.wire.send(data + b"\xc0\x00")
            while not isinstance(await talk.receive(), Pingresp):
                pass
        assert max(changes) <= 2 * RUN_PACKETS_MAX // room
        assert sum(changes) == count + 1


async def test_runs_of_messages_that_others_interrupt_are_handled_over_many_turns(tmp_path: Path) -> None:
    count = 10 * (RUN_PACKETS_MAX - 1)
    async with mqtt_broker(tmp_path) as mqtt:
        talk, counters = await accepted(large(mqtt)), mqtt.context.counters
        async with most_a_turn(lambda: counters.packets_received) as changes:
            at_most_once = b"\x30\x04\x00\x01a\x00" * (RUN_PACKETS_MAX - 2)
            await talk.wire.send((at_most_once + b"\x32\x06\x00\x01a\x00\x01\x00") * 10 + b"\xc0\x00")
            await talk.expect(Ack)
            while not isinstance(await talk.receive(), Pingresp):
                pass
        assert max(changes) <= 2 * RUN_PACKETS_MAX
        assert sum(changes) == count + 1


@pytest.mark.parametrize("has_socket", [True, False])
async def test_large_reads_of_many_clients_are_handled_over_many_turns(tmp_path: Path, has_socket: bool) -> None:
    count, clients = 8 * RUN_PACKETS_MAX, 8
    async with mqtt_port(tmp_path) as port:
        counters = port.broker.context.counters

        async def publish(name: bytes) -> None:
            data = b"\x10\x0e\0\4MQTT\4\2\0\0\0\2c" + name + b"\x30\x04\0\1ax" * count
            wire = await port.wire() if has_socket else large(port.broker).wire
            await wire.send(data)

        async with most_a_turn(lambda: counters.packets_received) as changes, trio.open_nursery() as nursery:
            for number in range(clients):
                nursery.start_soon(publish, b"%d" % number)
            while counters.packets_received < clients * (count + 1):
                await trio.lowlevel.checkpoint()
        # In each of two turns, the next part of one read, and the beginning of a new one.
        assert max(changes) <= 4 * RUN_PACKETS_MAX + clients


@pytest.mark.parametrize("version", [V4, V5])
async def test_many_filters_begin_and_end_in_slices_and_later_packets_wait(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await accepted(large(mqtt, version))
        session = mqtt.context.clients["c"]
        async with most_a_turn(lambda: len(session.filters)) as changes:
            await talk.send(Subscribe(1, tuple(FilterSubscription(each, 1) for each in FILTERS)), Pingreq())
            answer = await talk.receive()
            assert isinstance(answer, Suback)
            assert answer.codes == (1,) * len(FILTERS)
            assert isinstance(await talk.receive(), Pingresp)
            await talk.send(Publish("sensors/999/x", b"found", 0))
            assert await talk.payloads(1) == [b"found"]
            await talk.send(Unsubscribe(2, (*FILTERS, "none")), Pingreq())
            last = await talk.receive()
            assert isinstance(last, Unsuback)
            assert version == V4 or last.codes == (*(0,) * len(FILTERS), ReasonCode.NO_SUBSCRIPTION_EXISTED)
            assert isinstance(await talk.receive(), Pingresp)
        assert max(changes) <= 2 * per_slice(FILTER_US)
        assert sum(changes) == 2 * len(FILTERS)


async def test_a_client_that_goes_in_the_middle_of_a_long_subscribe_leaves_nothing_behind(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await accepted(large(mqtt))
        await talk.send(Subscribe(1, tuple(FilterSubscription(each, 1) for each in FILTERS)))
        while not mqtt.context.clients["c"].filters:
            await trio.lowlevel.checkpoint()
        assert len(mqtt.context.clients["c"].filters) < len(FILTERS)
        other = await mqtt.connect("c")  # takes over
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        assert mqtt.context.clients["c"].filters == {}
        assert await other.rest() == []


async def test_a_long_packet_that_is_malformed_is_refused(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for filters in (*FILTERS, ""), (*FILTERS, "a\0"):
            talk = await accepted(large(mqtt))
            await talk.send(Unsubscribe(1, filters))
            last = await talk.receive()
            if filters[-1]:
                assert isinstance(last, Disconnect)
                assert last.reason == ReasonCode.MALFORMED_PACKET
            assert len(filters) * 10 > LONG_BYTES


async def test_one_packet_with_many_properties_is_handled_in_a_turn(tmp_path: Path) -> None:
    properties = Properties({}, (("", ""),) * USER_PROPERTIES_MAX)
    async with mqtt_broker(tmp_path) as mqtt:
        talk, counters = await accepted(large(mqtt)), mqtt.context.counters
        async with most_a_turn(lambda: counters.packets_received) as changes:
            for packet in (
                Publish("a", b"x", 1, packet_id=1, properties=properties),
                Ack(PacketType.PUBACK, 1, 0, properties),
                Subscribe(1, (FilterSubscription("b", 0),), properties),
            ):
                await talk.send(*[packet] * 20, Pingreq())
                while not isinstance(await talk.receive(), Pingresp):
                    pass
        assert max(changes) <= 2 * 2


@pytest.mark.parametrize("many", [True, False])
async def test_more_properties_than_a_packet_may_have_are_refused(tmp_path: Path, many: bool) -> None:
    pair = ("", "") if many else ("name", "x" * 1000)
    most = USER_PROPERTIES_MAX if many else PROPERTIES_BYTES_MAX // 1009
    async with mqtt_broker(tmp_path) as mqtt:
        for kind in "PUBLISH", "PUBACK", "SUBSCRIBE":
            for count, is_accepted in (most, True), (most + 1, False):
                talk, properties = await accepted(large(mqtt)), Properties({}, (pair,) * count)
                packets: dict[str, Packet] = {
                    "PUBLISH": Publish("a", b"x", 1, packet_id=1, properties=properties),
                    "PUBACK": Ack(PacketType.PUBACK, 1, 0, properties),
                    "SUBSCRIBE": Subscribe(1, (FilterSubscription("b", 0),), properties),
                }
                await talk.send(packets[kind], Pingreq())
                if is_accepted:
                    await talk.expect(Suback if kind == "SUBSCRIBE" else Ack) if kind != "PUBACK" else None
                    await talk.expect(Pingresp)
                else:
                    last = await talk.closed()
                    assert isinstance(last, Disconnect)
                    assert last.reason == ReasonCode.QUOTA_EXCEEDED


async def test_more_filters_than_a_packet_may_have_are_refused(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await accepted(large(mqtt))
        await talk.send(Unsubscribe(1, ("a",) * (FILTERS_A_PACKET + 1)))
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.QUOTA_EXCEEDED
        assert last.properties.text(Property.REASON_STRING)
