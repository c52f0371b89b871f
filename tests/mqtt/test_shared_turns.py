"""Shared subscriptions take turns: what one client does for them in a turn of the event loop is limited."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from tests.broker.calls import Calls
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.groups.leaving import LEAVES_A_SLICE
from martlet.testing.clock import TrioClock
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.outbound.outgoing import Outgoing
from martlet_mqtt.outbound.shares import STEPS_A_GROUP, STEPS_A_READ, STEPS_A_TURN, STEPS_OF
from martlet_mqtt.wire.properties import Property

FEW, MANY = 3, 300


def counted_calls() -> Calls:
    """Return a counter of calls of functions that look for messages of groups."""
    return Calls(lambda code: code.co_name in ("hand_out", "collect", "room"))


def sent_in_turns(mqtt: MqttBroker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each turn of a client adds how many messages it was sent."""
    sent: list[int] = []
    collect: Callable[[Outgoing, int], None] = Outgoing.collect

    def counted(outgoing: Outgoing, budget_bytes: int) -> None:
        before = mqtt.context.counters.delivered
        collect(outgoing, budget_bytes)
        sent.append(mqtt.context.counters.delivered - before)

    monkeypatch.setattr(Outgoing, "collect", counted)
    return sent


async def calls_of_a_message(directory: Path, filters: int) -> int:
    """Return how often a client with *filters* looks for messages when there is one for one of them."""
    async with mqtt_broker(directory / str(filters)) as mqtt:
        member, publisher = await mqtt.connect("member"), await mqtt.connect("publisher")
        for number in range(filters):
            await member.subscribe(f"$share/g{number}/{number}/#", qos=1)
        await member.rest()
        with counted_calls() as calls:
            await publisher.publish("2/x", b"one", 1)
            (one,) = await member.messages(1)
            await member.acknowledge(one)
            await member.rest()
        assert one.payload == b"one"
        return calls.count


async def test_a_message_and_its_acknowledgement_cost_the_same_beside_many_shared_filters(tmp_path: Path) -> None:
    few = await calls_of_a_message(tmp_path, FEW)
    assert 0 < await calls_of_a_message(tmp_path, MANY) <= few + 4


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("filters", [1, 40])
async def test_a_turn_sends_a_limited_number_of_messages_and_the_next_ones_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qos: int, filters: int
) -> None:
    config = MqttConfig(queues=4)
    async with mqtt_broker(tmp_path, config) as mqtt:
        publisher = await mqtt.connect("publisher")
        member = await mqtt.connect("member", expiry_s=1000)
        for number in range(filters):
            await member.subscribe(f"$share/g/{number}/#", qos=qos)
        member.hang_up()
        for number in range(600):
            await publisher.publish(f"{number % filters}/{number}", b"%d" % number, max(qos, 1))
        sent = sent_in_turns(mqtt, monkeypatch)
        member = await mqtt.connect("member", clean=False, expiry_s=1000, present=True)
        assert sorted(map(int, await member.payloads(600))) == list(range(600))
        assert max(sent) <= (STEPS_A_TURN + STEPS_A_GROUP) // STEPS_OF[qos] + 1
        assert await member.rest() == []


async def test_a_turn_reads_for_a_limited_number_of_groups_when_their_client_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group of one filter has a message, and costs a read of its own."""
    groups = 100
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("publisher")
        member = await mqtt.connect("member", expiry_s=1000)
        await member.subscribe(*[f"$share/g{number}/a/#" for number in range(groups)], qos=1)
        member.hang_up()
        await publisher.publish("a/x", b"one", 1)
        sent = sent_in_turns(mqtt, monkeypatch)
        member = await mqtt.connect("member", clean=False, expiry_s=1000, present=True)
        assert await member.payloads(groups) == [b"one"] * groups
        assert max(sent) <= STEPS_A_TURN // (STEPS_A_GROUP + STEPS_A_READ + STEPS_OF[1]) + 1
        assert await member.rest() == []


async def fill(member: MqttClient, publisher: MqttClient, count: int) -> None:
    """Let *member* hold *count* messages."""
    for number in range(count):
        await publisher.publish("a", b"%d" % number, 1)
    await member.messages(count)


async def test_a_member_at_its_receive_maximum_does_not_delay_messages_of_its_groups(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        full = await mqtt.connect("full", values={Property.RECEIVE_MAXIMUM: 2})
        publisher = await mqtt.connect("publisher")
        await full.subscribe("$share/g/a", "$share/g/b", qos=1)
        await fill(full, publisher, 2)
        other = await mqtt.connect("other")
        await other.subscribe("$share/g/b", qos=1)
        began = trio.current_time()
        for number in range(6):
            await publisher.publish("b", b"%d" % number, 1)
            assert await other.payloads(1) == [b"%d" % number]
        assert trio.current_time() == began


async def test_a_full_member_gets_what_waits_for_it_when_it_has_room(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        member = await mqtt.connect("member", values={Property.RECEIVE_MAXIMUM: 2})
        publisher = await mqtt.connect("publisher")
        await member.subscribe("$share/g/a", "$share/g/b", "$share/h/b", qos=1)
        for number in range(2):
            await publisher.publish("a", b"%d" % number, 1)
        held = await member.messages(2)
        await publisher.publish("b", b"b", 1)
        assert await member.rest() == []
        for packet in held:
            await member.acknowledge(packet)
        assert await member.payloads(2) == [b"b", b"b"]


async def test_what_a_client_with_very_many_shared_filters_held_goes_to_others(tmp_path: Path) -> None:
    count = 2 * LEAVES_A_SLICE + 10
    async with mqtt_broker(tmp_path) as mqtt:
        gone, other, publisher = (
            await mqtt.connect("gone"),
            await mqtt.connect("other"),
            await mqtt.connect("publisher"),
        )
        filters = [f"$share/g/{number}/+" for number in range(count)]
        await gone.subscribe(*filters, qos=1)
        for number in range(count):
            await publisher.publish(f"{number}/x", b"%d" % number, 1)
        await gone.messages(count)
        await other.subscribe(*filters, qos=1)
        gone.hang_up()
        assert sorted(map(int, await other.payloads(count))) == list(range(count))
        assert mqtt.broker.shared_groups.statistics()["members"] == count
