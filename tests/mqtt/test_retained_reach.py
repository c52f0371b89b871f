"""A subscription brings each retained message once as such, wherever its client is in the log.

A client that is behind gets messages of its earlier subscriptions first; a new one brings only what comes after it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
from tests.mqtt.retained_talk import append, applied, came, come_back, remove_old_segments
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.store import StoreConfig
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.packets import FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Property

DATA = Path("/data")
SEGMENT = 1 << 14


@asynccontextmanager
async def broker(disk: FakeDisk, config: MqttConfig | None = None, segment: int = SEGMENT) -> AsyncIterator[MqttBroker]:
    store = small_config(
        flush="async", segment_bytes=segment, page_bytes=1 << 12, cache_bytes=1 << 16, disk_clean_ratio=0.9
    )
    async with mqtt_broker(DATA, config, store=store, disk=disk) as mqtt:
        yield mqtt


async def leave_session(mqtt: MqttBroker, *filters: str) -> None:
    """Let client "c" subscribe, and go; its session stays."""
    talk = await mqtt.connect("c", expiry_s=1000)
    await talk.subscribe(*filters, qos=1)
    await came(talk)
    await talk.disconnect()


async def retire(mqtt: MqttBroker, disk: FakeDisk, segment: int = SEGMENT) -> None:
    """Fill the log, and have retention remove all segments but the last."""
    for _ in range(2 * segment // 3000):
        append(mqtt, "filler", bytes(3000), retain=False)
    await applied(mqtt)
    await remove_old_segments(mqtt, disk)


async def test_a_session_that_got_it_last_before_a_kill_gets_it_again() -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        talk = await mqtt.connect("c", expiry_s=1000)
        await talk.subscribe("a", qos=1)
        append(mqtt, "a", b"kept")
        assert await came(talk) == [(b"kept", False)]
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker(disk) as mqtt:
        assert await come_back(mqtt) == [(b"kept", True)]


async def test_what_a_session_missed_comes_in_order_and_then_as_retained() -> None:
    async with broker(FakeDisk()) as mqtt:
        append(mqtt, "b", b"before")
        await applied(mqtt)
        await leave_session(mqtt, "#")
        for payload in (b"1", b"2", b"3"):
            append(mqtt, "a", payload)
        append(mqtt, "c", b"passing", retain=False)
        await applied(mqtt)
        missed = [(payload, False) for payload in (b"1", b"2", b"3", b"passing")]
        assert await come_back(mqtt, "#") == [(b"before", True), *missed, (b"3", True)]


async def test_what_retention_removed_from_the_missed_messages_still_comes_as_retained() -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await leave_session(mqtt, "a")
        append(mqtt, "a", b"kept")
        await retire(mqtt, disk)
        assert mqtt.broker.store.first_position > 0
        assert await come_back(mqtt) == [(b"kept", True)]


async def test_what_was_deleted_with_its_topic_still_comes_as_retained() -> None:
    async with broker(FakeDisk()) as mqtt:
        await leave_session(mqtt, "a")
        append(mqtt, "a", b"kept")
        await applied(mqtt)
        mqtt.broker.topics.delete("mqtt")
        assert await come_back(mqtt) == [(b"kept", True)]


@pytest.mark.parametrize(
    ("before", "after", "missed"),
    [("a=other", "b=other", [b"kept"]), ("a=other", "a=another", []), ("b=other", "a=other", [b"kept"])],
)
async def test_what_is_in_a_topic_of_older_rules_still_comes_as_retained(
    before: str, after: str, missed: list[bytes]
) -> None:
    disk = FakeDisk()
    async with broker(disk, MqttConfig(rules=[before])) as mqtt:
        await leave_session(mqtt, "a", "b")
        append(mqtt, "a", b"kept")
        await applied(mqtt)
    async with broker(disk, MqttConfig(rules=[after])) as mqtt:
        assert await come_back(mqtt) == [*((each, False) for each in missed), (b"kept", True)]


async def test_a_new_subscription_of_a_session_that_is_behind_brings_nothing_old() -> None:
    async with broker(FakeDisk()) as mqtt:
        await leave_session(mqtt, "a")
        for name, payload, retain in (
            ("a", b"missed", False),
            ("b", b"old", True),
            ("b", b"retained", True),
            ("b", b"passing", False),
            ("a", b"missed too", False),
        ):
            append(mqtt, name, payload, retain=retain)
        await applied(mqtt)
        assert await come_back(mqtt, "b", "b/#") == [
            (b"retained", True),
            (b"retained", True),
            (b"missed", False),
            (b"missed too", False),
        ]
        await mqtt.settle()


async def test_a_subscription_while_new_messages_are_routed_misses_none(tmp_path: Path) -> None:
    """They take several turns, and the first of them were routed before the subscription."""
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("other", qos=1)
        await applied(mqtt)
        append(mqtt, "a", b"kept")
        for _ in range(1500):
            append(mqtt, "a/b", b"x", retain=False)
        append(mqtt, "b", b"kept too")
        mqtt.broker.store.committer.commit()
        (reader,) = mqtt.broker.tails._readers.values()
        assert reader.is_behind
        subscribe = Subscribe(5, (FilterSubscription("a", 0), FilterSubscription("b", 0)))
        assert mqtt.client("c").subscriptions.subscribe(subscribe) is None
        await talk.expect(Suback)
        assert sorted(await came(talk)) == [(b"kept", True), (b"kept too", True)]


async def test_messages_that_wait_for_a_slow_client_are_found_where_retention_puts_them() -> None:
    disk, segment = FakeDisk(), 1 << 16
    async with broker(disk, segment=segment) as mqtt:
        expected = [(b"%02d" % number * 5000, True) for number in range(60)]
        for number, (payload, _) in enumerate(expected):
            append(mqtt, f"a/{number:02}", payload)
        await applied(mqtt)
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: 1})
        await talk.subscribe("a/#", qos=1)
        (first,) = await talk.messages(1)
        await trio.testing.wait_all_tasks_blocked()
        await retire(mqtt, disk, segment)
        await talk.acknowledge(first)
        assert [(first.payload, True), *await came(talk)] == expected


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_no_local_leaves_out_no_retained_message_of_others(tmp_path: Path, qos: int) -> None:
    """They say who published them, so that they are not taken for those of the client if they come at the same time."""
    async with mqtt_broker(tmp_path, store=StoreConfig(flush="sync")) as mqtt:
        me, other = await mqtt.connect("me"), await mqtt.connect("other")
        await other.publish("b", b"", 1)
        append(mqtt, "a", b"of another")
        await me.send(
            Publish("a/mine", b"mine", qos, True, packet_id=1 if qos else 0),
            Publish("a/mine", b"mine", qos, packet_id=2 if qos else 0),
            Subscribe(3, (FilterSubscription("a/#", 1, no_local=True),)),
        )
        found: list[bytes] = []
        while not isinstance(packet := await me.receive(), Suback):
            found += [packet.payload] if isinstance(packet, Publish) else []
        await other.publish("a/end", b"end", 1)
        while b"end" not in found:
            packet = await me.receive()
            found += [packet.payload] if isinstance(packet, Publish) else []
        assert found == [b"of another", b"end"]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_what_is_in_flight_is_sent_again_after_retention_moved_it(killed: bool, replaced: bool) -> None:
    """Unless a newer message has replaced it: then it is gone, as others that retention removed."""
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        for number in range(3):
            append(mqtt, f"a/{number}", b"%d" % number)
        await applied(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000)
        await talk.subscribe("a/+", qos=1)
        before = {message.payload: message.packet_id for message in await talk.messages(3)}
        await talk.disconnect()
        if replaced:
            append(mqtt, "a/1", b"")
            del before[b"1"]
        await retire(mqtt, disk)
        await retire(mqtt, disk)
        found = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker(found if killed else disk) as mqtt:
        talk = await mqtt.connect("c", clean=False, expiry_s=1000, present=True)
        await trio.testing.wait_all_tasks_blocked()
        again = await talk.rest()
        assert {message.payload: message.packet_id for message in again} == before
        assert all(message.is_duplicate and message.retain for message in again)
        for message in again:
            await talk.acknowledge(message)
        assert await came(talk) == []
