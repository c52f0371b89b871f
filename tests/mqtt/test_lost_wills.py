"""Wills whose commit fails: each is published once all the same, when there is space again or after a restart."""

from collections.abc import Awaitable, Callable
from errno import ENOSPC
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.errors import Refused
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, FilterSubscription, Will
from martlet_mqtt.wire.properties import Properties, Property

SMALL = small_config(segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
ASYNC = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
DATA = Path("/data")
LONG_S = 2000


def will(delay_s: int = 0, payload: bytes = b"gone", *, retain: bool = False) -> Will:
    return Will("will", payload, 1, retain, Properties({Property.WILL_DELAY: delay_s}))


async def connect(mqtt: MqttBroker, expiry_s: int = LONG_S, delay_s: int = 0, *, retain: bool = False) -> MqttClient:
    talk = await mqtt.connect("c", expiry_s=expiry_s, keep_alive_s=3600, will=will(delay_s, retain=retain))
    await mqtt.settle()
    return talk


async def watching(mqtt: MqttBroker) -> MqttClient:
    watcher = await mqtt.connect("watcher", V4, keep_alive_s=0)
    await watcher.subscribe(FilterSubscription("will/#", 0))
    await mqtt.settle()
    return watcher


async def payloads(watcher: MqttClient) -> list[bytes]:
    return [each.payload for each in await watcher.rest()]


def fail_commits(mqtt: MqttBroker, disk: FakeDisk, count: int = 1) -> None:
    """Let the next commits fail, from the next one with something to write on."""

    def fail() -> None:
        nonlocal count
        disk.fail_next("write", ENOSPC)
        count -= 1
        if count:
            mqtt.broker.store.committer.before_commit.append(fail)

    mqtt.broker.store.committer.before_commit.append(fail)


async def gone(mqtt: MqttBroker) -> None:
    while "c" in mqtt.context.clients:
        await trio.lowlevel.checkpoint()
    await trio.sleep(1)


# How a client goes: called when the next commit will fail.


async def hang_up(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt)
    fail_commits(mqtt, disk)
    talk.hang_up()
    await gone(mqtt)


async def hang_up_retained(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt, retain=True)
    fail_commits(mqtt, disk)
    talk.hang_up()
    await gone(mqtt)


async def hang_up_twice_in_vain(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt)
    fail_commits(mqtt, disk, 3)
    talk.hang_up()
    await gone(mqtt)


async def end_with_the_session(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt, expiry_s=0)
    fail_commits(mqtt, disk)
    talk.hang_up()
    await gone(mqtt)


async def end_with_the_session_before_its_delay(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt, expiry_s=0, delay_s=1000)
    fail_commits(mqtt, disk)
    talk.hang_up()
    await gone(mqtt)


async def be_kicked(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt)
    fail_commits(mqtt, disk)
    mqtt.context.clients["c"].kick()
    last = await talk.closed()
    assert isinstance(last, Disconnect)
    assert last.reason == ReasonCode.ADMINISTRATIVE_ACTION
    await gone(mqtt)


async def say_so(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt)
    fail_commits(mqtt, disk)
    await talk.send(Disconnect(ReasonCode.DISCONNECT_WITH_WILL))
    assert await talk.closed() is None
    await gone(mqtt)


async def be_taken_over(mqtt: MqttBroker, disk: FakeDisk, *, clean: bool = False, expiry_s: int = LONG_S) -> None:
    talk = await connect(mqtt, expiry_s=expiry_s)
    fail_commits(mqtt, disk)
    properties = Properties({Property.SESSION_EXPIRY: LONG_S})
    another = will(payload=b"of a connection that was never accepted")
    _, answer = await mqtt.answer(Connect("c", V5, clean, will=another, properties=properties))
    assert answer.reason == ReasonCode.QUOTA_EXCEEDED
    last = await talk.closed()
    assert isinstance(last, Disconnect)
    assert last.reason == ReasonCode.SESSION_TAKEN_OVER


async def be_taken_over_by_a_clean_start(mqtt: MqttBroker, disk: FakeDisk) -> None:
    await be_taken_over(mqtt, disk, clean=True)


async def be_taken_over_and_end(mqtt: MqttBroker, disk: FakeDisk) -> None:
    await be_taken_over(mqtt, disk, expiry_s=0)


async def wait_for_the_delay(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt, delay_s=500)
    talk.hang_up()
    await gone(mqtt)
    await trio.sleep(495)
    fail_commits(mqtt, disk)
    await trio.sleep(6)


async def wait_for_the_end_of_the_session(mqtt: MqttBroker, disk: FakeDisk) -> None:
    talk = await connect(mqtt, expiry_s=500, delay_s=1000)
    talk.hang_up()
    await gone(mqtt)
    await trio.sleep(495)
    fail_commits(mqtt, disk)
    await trio.sleep(100)


WAYS = [
    hang_up,
    hang_up_retained,
    hang_up_twice_in_vain,
    end_with_the_session,
    end_with_the_session_before_its_delay,
    be_kicked,
    say_so,
    be_taken_over,
    be_taken_over_by_a_clean_start,
    be_taken_over_and_end,
    wait_for_the_delay,
    wait_for_the_end_of_the_session,
]
Way = Callable[[MqttBroker, FakeDisk], Awaitable[None]]


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_will_whose_commit_fails_is_published_when_there_is_space(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, way: Way, flush: str
) -> None:
    disk, store = FakeDisk(), SMALL if flush == "sync" else ASYNC
    async with mqtt_broker(DATA, store=store, disk=disk, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        await way(mqtt, disk)
        assert "writes are refused" in caplog.text
        assert "were not stored" in caplog.text or "dropped" in caplog.text
        await trio.sleep(120)
        assert await payloads(watcher) == [b"gone"]
        await trio.sleep(2 * LONG_S)
        assert await payloads(watcher) == []
        assert mqtt.context.counters.wills == 1
        assert (len(mqtt.broker.sessions), mqtt.broker.sessions.table.bytes) == (0, 0)
        wills = mqtt.wills
        assert (wills._latest, wills._overdue, wills._unwanted) == ({}, {}, set())


@pytest.mark.parametrize("way", WAYS)
async def test_a_will_whose_commit_failed_before_a_kill_is_published_after_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=clock) as mqtt:
        await watching(mqtt)
        await way(mqtt, disk)
        assert "writes are refused" in caplog.text
        after = disk.after_power_cut(Cut.KILLED, Random(1))
    async with mqtt_broker(DATA, store=SMALL, disk=after, clock=clock) as mqtt:
        watcher = await watching(mqtt)
        found = await payloads(watcher)
        await trio.sleep(1000)
        found += await payloads(watcher)
        queues = mqtt.broker.topics.get("mqtt")
        assert queues is not None
        assert sum(queue.next_offset for queue in queues.queues.values()) == 1  # before or after the watcher came
        assert found in ([], [b"gone"])


async def test_a_will_that_is_overdue_is_published_when_its_client_comes_back(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with mqtt_broker(DATA, store=ASYNC, disk=disk, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        await wait_for_the_delay(mqtt, disk)
        mqtt.broker.store.upkeep.retention.look()
        talk = await mqtt.connect("c", clean=False, expiry_s=LONG_S, present=True)
        assert await payloads(watcher) == [b"gone"]
        await talk.disconnect()
        await trio.sleep(1000)
        assert await payloads(watcher) == []


async def test_a_client_whose_connect_was_lost_was_not_back(autojump_clock: MockClock) -> None:
    """So the will that it left is published after its delay."""
    disk = FakeDisk()
    async with mqtt_broker(DATA, store=ASYNC, disk=disk, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await connect(mqtt, delay_s=500)
        talk.hang_up()
        await gone(mqtt)
        await mqtt.settle()
        await trio.sleep(100)
        fail_commits(mqtt, disk)
        properties = Properties({Property.SESSION_EXPIRY: LONG_S})
        never = will(payload=b"of a connection that was never accepted")
        _, answer = await mqtt.answer(Connect("c", V5, False, will=never, properties=properties))
        assert answer.reason == ReasonCode.QUOTA_EXCEEDED
        await trio.sleep(300)
        assert await payloads(watcher) == []
        await trio.sleep(300)
        assert await payloads(watcher) == [b"gone"]


async def test_a_client_waits_while_it_is_not_known_what_a_failed_commit_left_of_its_session(
    autojump_clock: MockClock,
) -> None:
    disk = FakeDisk()
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=TrioClock()) as mqtt:
        talk = await mqtt.connect("c", expiry_s=LONG_S)
        await mqtt.settle()
        session, store, flushed = mqtt.client("c").session, mqtt.broker.store, trio.Event()
        assert session is not None

        async def hold(work: Callable[[], None]) -> None:
            await flushed.wait()
            work()

        monkey: Any = store.flusher.files.disk
        monkey.off_loop = hold
        session.subscribe("written", b"\1")
        store.committer.commit()
        session.subscribe("lost", b"\1")
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            store.committer.commit()
        store.upkeep.retention.look()
        mqtt.broker.sessions.writer.find_lost()
        assert isinstance(await talk.closed(), Disconnect)
        again = mqtt.open()
        await again.send(Connect("c", V5, False, properties=Properties({Property.SESSION_EXPIRY: LONG_S})))
        await wait_all_tasks_blocked()
        assert "c" not in mqtt.context.clients
        flushed.set()
        answer = await again.expect(Connack)
        assert (answer.reason, answer.session_present) == (0, True)
        assert list(mqtt.context.clients["c"].filters) == ["written"]
