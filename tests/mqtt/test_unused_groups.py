"""When a shared subscription is forgotten, and when not."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker
from trio.testing import MockClock

from martlet.state.log_order import LogOrder
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig

FILTER = "$share/g/a/#"
HOUR = MqttConfig(shared_expiry_s=3600, queues=2)
WHOLE_SWEEPS_S = 130
SMALL = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16)


def groups(mqtt: MqttBroker) -> set[str]:
    return set(mqtt.broker.shared_groups.groups_of("mqtt"))


async def publish(mqtt: MqttBroker, payload: bytes) -> None:
    publisher = await mqtt.connect("publisher")
    assert await publisher.publish("a/b", payload, 1) == 0
    await publisher.disconnect()


@pytest.mark.parametrize("how", ["unsubscribed", "session ended", "session expired", "connection ended"])
async def test_a_group_without_sessions_is_forgotten_after_its_time(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    async with mqtt_broker(tmp_path, HOUR, clock=TrioClock()) as mqtt:
        member = await mqtt.connect("member", expiry_s=0 if how == "connection ended" else 500)
        await member.subscribe(FILTER, qos=1)
        await publish(mqtt, b"one")
        (one,) = await member.messages(1)
        await member.acknowledge(one)
        if how == "unsubscribed":
            await member.unsubscribe(FILTER)
        await member.disconnect()
        if how == "session ended":
            await (await mqtt.connect("member", clean=True)).disconnect()
        await publish(mqtt, b"two")
        await trio.sleep(3000)
        assert groups(mqtt) == {"g/a/#"}
        await trio.sleep(1300)  # the session expired after 500
        assert groups(mqtt) == set()
        again = await mqtt.connect("again")
        await again.subscribe(FILTER, qos=1)
        await publish(mqtt, b"three")
        assert await again.payloads(1) == [b"three"]
    async with mqtt_broker(tmp_path, HOUR, clock=TrioClock()) as mqtt:
        assert groups(mqtt) == {"g/a/#"}


async def test_who_subscribes_again_in_time_gets_what_was_published_meanwhile(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, HOUR, clock=TrioClock()) as mqtt:
        for payload in (b"one", b"two", b"three"):
            member = await mqtt.connect("member")
            await member.subscribe(FILTER, qos=1)
            if payload != b"one":
                (found,) = await member.messages(1)
                await member.acknowledge(found)
                assert found.payload == payload
            await member.disconnect()
            await publish(mqtt, {b"one": b"two", b"two": b"three", b"three": b""}[payload])
            await trio.sleep(3000)
        assert groups(mqtt) == {"g/a/#"}


async def test_a_group_of_which_all_members_are_offline_keeps_its_messages(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Also over a restart, after which the sessions are known from the log alone."""
    config = MqttConfig(shared_expiry_s=100, queues=2)
    async with mqtt_broker(tmp_path, config, clock=TrioClock()) as mqtt:
        member = await mqtt.connect("member", expiry_s=1_000_000)
        await member.subscribe(FILTER, qos=1)
        member.hang_up()
        await publish(mqtt, b"one")
        await trio.sleep(1000)
    async with mqtt_broker(tmp_path, config, clock=TrioClock()) as mqtt:
        await publish(mqtt, b"two")
        await trio.sleep(1000)
        assert groups(mqtt) == {"g/a/#"}
        member = await mqtt.connect("member", clean=False, expiry_s=1_000_000, present=True)
        assert sorted(await member.payloads(2)) == [b"one", b"two"]


async def test_a_connected_member_and_its_message_in_flight_keep_a_group(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    config = MqttConfig(shared_expiry_s=0)
    async with mqtt_broker(tmp_path, config, clock=TrioClock()) as mqtt:
        member, other = await mqtt.connect("member"), await mqtt.connect("other")
        await member.subscribe(FILTER, qos=1)
        await publish(mqtt, b"one")
        (one,) = await member.messages(1)
        await trio.sleep(WHOLE_SWEEPS_S)
        await other.subscribe(FILTER, qos=1)
        member.hang_up()
        assert await other.payloads(1) == [b"one"]
        assert one.payload == b"one"


async def test_a_group_whose_session_is_not_known_yet_is_kept(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After very many changes, what is known of sessions is behind."""
    config, next_run = MqttConfig(shared_expiry_s=0), LogOrder.next_run

    async def late(order: LogOrder) -> Any:
        await trio.sleep(90)
        return await next_run(order)

    async with mqtt_broker(tmp_path, config, clock=TrioClock()) as mqtt:
        with monkeypatch.context() as patch:
            patch.setattr(LogOrder, "next_run_nowait", lambda order: None)
            patch.setattr(LogOrder, "next_run", late)
            member = await mqtt.connect("member", expiry_s=1_000_000)
            await member.subscribe(FILTER, qos=1)
            member.hang_up()
            await trio.sleep(80)
        await trio.sleep(WHOLE_SWEEPS_S)
        assert groups(mqtt) == {"g/a/#"}
        await publish(mqtt, b"one")
        member = await mqtt.connect("member", clean=False, expiry_s=1_000_000, present=True)
        assert await member.payloads(1) == [b"one"]


async def test_many_groups_go_together_and_others_stay(tmp_path: Path, autojump_clock: MockClock) -> None:
    config = MqttConfig(shared_expiry_s=10, queues=1, rules=["b/#=other"])
    async with mqtt_broker(tmp_path, config, clock=TrioClock()) as mqtt:
        going, staying = await mqtt.connect("going"), await mqtt.connect("staying")
        for number in range(300):
            await going.subscribe(f"$share/{number}/b/#", qos=1)
        await staying.subscribe("$share/7/b/#", "$share/7/a", qos=1)
        await going.disconnect()
        assert len(groups(mqtt)) == 301
        await trio.sleep(WHOLE_SWEEPS_S)
        assert groups(mqtt) == {"7/b/#", "7/a"}


async def test_a_power_cut_changes_nothing_for_a_group_with_sessions(tmp_path: Path, autojump_clock: MockClock) -> None:
    """What was acknowledged is there for members that were offline when the power failed, and when they come back."""
    disk, clock = FakeDisk(), TrioClock()
    config, directory = MqttConfig(shared_expiry_s=100, queues=2), Path("/data")
    async with mqtt_broker(directory, config, store=SMALL, disk=disk, clock=clock) as mqtt:
        for name in ("one", "two"):
            member = await mqtt.connect(name, expiry_s=1_000_000)
            await member.subscribe(FILTER, qos=1)
            member.hang_up()
        unused = await mqtt.connect("unused")
        await unused.subscribe("$share/unused/#", qos=1)
        unused.hang_up()
        await publish(mqtt, b"before")
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    for cut in (Cut.KILLED, Cut.LOST):
        async with mqtt_broker(directory, config, store=SMALL, disk=disk, clock=clock) as mqtt:
            await trio.sleep(1000)
            assert groups(mqtt) == {"g/a/#"}
            await mqtt.settle()
            disk = disk.after_power_cut(cut, Random(2))
    async with mqtt_broker(directory, config, store=SMALL, disk=disk, clock=clock) as mqtt:
        await publish(mqtt, b"after")
        member = await mqtt.connect("two", clean=False, expiry_s=1_000_000, present=True)
        assert sorted(await member.payloads(2)) == [b"after", b"before"]
