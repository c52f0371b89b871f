"""ActiveMQ's scheduler: periods, repetitions and cron, and how to end them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.stomp.all_protocols import Protocols, all_protocols, properties_of, timer_plugin
from trio.testing import MockClock

from martlet.contracts import Identity
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config

QUEUE = "/queue/orders"
MANAGEMENT = "/topic/ActiveMQ.Scheduler.Management"
USUAL = {"subscription", "message-id", "destination", "content-length", "timestamp"}
STORE = small_config(segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16)


@asynccontextmanager
async def repeating(disk: FakeDisk | None = None, clock: TrioClock | None = None) -> AsyncIterator[Protocols]:
    async with all_protocols(
        Path("/data"), timer=timer_plugin(), store=STORE, clock=clock or TrioClock(), disk=disk or FakeDisk()
    ) as protocols:
        yield protocols


async def test_a_message_comes_once_more_than_it_is_repeated(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        repeated = {"AMQ_SCHEDULED_DELAY": "1000", "AMQ_SCHEDULED_PERIOD": "2000", "AMQ_SCHEDULED_REPEAT": "2"}
        await talk.publish(QUEUE, b"x", colour="red", **repeated)
        counts: list[int] = []
        for _ in range(4):
            await trio.sleep(1.9 if counts else 0.9)
            counts.append(len(await talk.rest()))
            await trio.sleep(0.1)
            found = await talk.rest()
            counts.append(len(found))
            for message in found:
                assert (message.body, message["destination"], message["colour"]) == (b"x", QUEUE, "red")
                assert message.headers.keys() - USUAL == {"colour", "scheduledJobId"}
        assert sum(counts) == 3
        await trio.sleep(60)
        assert await talk.rest() == []


async def test_a_schedule_comes_each_minute(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"x", AMQ_SCHEDULED_CRON="* * * * *")
        await trio.sleep(3.5 * 60)
        assert [message.body for message in await talk.rest()] == [b"x"] * 3
        times = [record.store_ms - START_MS for record in protocols.stomp.records("orders")]
        assert times == pytest.approx([60_000, 120_000, 180_000], abs=20)


async def test_a_schedule_begins_a_series_each_time(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        repeated = {"AMQ_SCHEDULED_PERIOD": "1000", "AMQ_SCHEDULED_REPEAT": "4", "AMQ_SCHEDULED_DELAY": "500"}
        await talk.publish(QUEUE, b"x", AMQ_SCHEDULED_CRON="* * * * *", **repeated)
        await trio.sleep(2.5 * 60)
        assert len(await talk.rest()) == 10


@pytest.mark.parametrize("destination", [MANAGEMENT, "/queue/activemq.scheduler.management"])
async def test_remove_ends_a_message_for_good(autojump_clock: MockClock, destination: str) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with repeating(disk, clock) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"x", b"y", AMQ_SCHEDULED_PERIOD="1000", AMQ_SCHEDULED_REPEAT="-1")
        await trio.sleep(20.5)
        found = await talk.rest()
        assert sorted(message.body for message in found) == [b"x"] * 20 + [b"y"] * 20
        (job,) = {message["scheduledJobId"] for message in found if message.body == b"x"}
        for _ in range(2):  # the second time there is nothing to end, as with ActiveMQ
            await talk.publish(destination, b"", AMQ_SCHEDULER_ACTION="REMOVE", scheduledJobId=job)
        await trio.sleep(10)
        assert [message.body for message in await talk.rest()] == [b"y"] * 10
        assert protocols.broker.topics.get("ActiveMQ%2EScheduler%2EManagement") is None
    async with repeating(disk, clock) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await trio.sleep(5)
        assert {message.body for message in await talk.rest()} == {b"y"}


async def test_a_message_outlives_a_restart(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with repeating(disk, clock) as protocols:
        talk = await protocols.stomp.connect()
        await talk.publish(QUEUE, b"x", AMQ_SCHEDULED_PERIOD="10000", AMQ_SCHEDULED_REPEAT="3")
        await trio.sleep(11)
    await trio.sleep(100)
    async with repeating(disk, clock) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await trio.sleep(1)
        assert len(await talk.rest()) == 2
        await trio.sleep(100)
        assert len(await talk.rest()) == 2


async def test_a_time_to_live_begins_with_each_copy(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        repeated = {"AMQ_SCHEDULED_DELAY": "5000", "AMQ_SCHEDULED_PERIOD": "5000", "AMQ_SCHEDULED_REPEAT": "2"}
        await talk.publish(QUEUE, b"x", expiration="1000", **repeated)
        await talk.publish(QUEUE, b"y", expires=str(START_MS + 1000), **repeated)
        await trio.sleep(30)
        assert sorted(message.body for message in await talk.rest()) == [b"x"] * 3 + [b"y"] * 3


@pytest.mark.parametrize("end", ["COMMIT", "ABORT"])
async def test_a_message_of_a_transaction_is_repeated_from_its_end(autojump_clock: MockClock, end: str) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        repeated = {"AMQ_SCHEDULED_PERIOD": "1000", "AMQ_SCHEDULED_REPEAT": "2"}
        await talk.send(
            talk.frame("BEGIN", transaction="t"),
            talk.frame("SEND", b"x", destination=QUEUE, transaction="t", **repeated),
        )
        await trio.sleep(10)
        assert await talk.rest() == []
        await talk.send(talk.frame(end, transaction="t", receipt="end"))
        await talk.receipt("end")
        await trio.sleep(10)
        assert len(await talk.rest()) == (3 if end == "COMMIT" else 0)


async def test_all_destinations_of_a_list_have_all_copies(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe("/queue/a,/topic/b")
        await talk.publish("/queue/a,/topic/b", b"x", AMQ_SCHEDULED_PERIOD="1000", AMQ_SCHEDULED_REPEAT="1")
        await trio.sleep(10)
        assert sorted(message["destination"] for message in await talk.rest()) == ["/queue/a"] * 2 + ["/topic/b"] * 2


@pytest.mark.parametrize(
    "headers",
    [
        {"AMQ_SCHEDULED_PERIOD": "0"},
        {"AMQ_SCHEDULED_REPEAT": "0"},
        {"AMQ_SCHEDULED_CRON": ""},
        {"AMQ_SCHEDULED_CRON": "", "AMQ_SCHEDULED_PERIOD": "0", "AMQ_SCHEDULED_REPEAT": "0"},
    ],
)
async def test_a_schedule_of_nothing_needs_no_timers(tmp_path: Path, headers: dict[str, str]) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"now", **headers)
        (message,) = await talk.messages(1)
        assert message.headers.keys() == USUAL


@pytest.mark.parametrize("transaction", [{}, {"transaction": "t"}])
@pytest.mark.parametrize(
    "headers", [{"AMQ_SCHEDULED_CRON": "* * * * *"}, {"AMQ_SCHEDULED_PERIOD": "1000", "AMQ_SCHEDULED_REPEAT": "1"}]
)
async def test_without_timers_the_error_says_what_to_do(
    tmp_path: Path, headers: dict[str, str], transaction: dict[str, str]
) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk = await protocols.stomp.connect()
        await talk.send(
            talk.frame("BEGIN", transaction="t"),
            talk.frame("SEND", b"x", destination=QUEUE, receipt="r", **headers, **transaction),
        )
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert b"add timer to plugins.enabled" in error.body


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"AMQ_SCHEDULED_PERIOD": "soon"}, "header AMQ_SCHEDULED_PERIOD is 'soon'; it is a number of milliseconds"),
        ({"AMQ_SCHEDULED_PERIOD": ""}, "header AMQ_SCHEDULED_PERIOD is ''"),
        ({"AMQ_SCHEDULED_PERIOD": "-1"}, "header AMQ_SCHEDULED_PERIOD is '-1'"),
        ({"AMQ_SCHEDULED_REPEAT": "-2"}, "header AMQ_SCHEDULED_REPEAT is '-2'; it is a number of repetitions, or -1"),
        ({"AMQ_SCHEDULED_REPEAT": "5"}, "period 0 of a repeated message is too short"),
        ({"AMQ_SCHEDULED_PERIOD": "99", "AMQ_SCHEDULED_REPEAT": "5"}, "the minimum is 100 ms (timer.period_min_ms)"),
        ({"AMQ_SCHEDULED_REPEAT": "9999999999", "AMQ_SCHEDULED_PERIOD": "100"}, "use 0 to 2147483647"),
        ({"AMQ_SCHEDULED_CRON": "* * * *"}, "schedule '* * * *' has not the 5 fields"),
        ({"AMQ_SCHEDULED_CRON": "* * * * 8"}, "schedule has the day of week '8'; use 0 to 6"),
        ({"AMQ_SCHEDULED_CRON": "* \x01 * * *"}, "header AMQ_SCHEDULED_CRON contains a control character"),
        (
            {"AMQ_SCHEDULED_CRON": "* * * * *", "AMQ_SCHEDULED_REPEAT": "-1", "AMQ_SCHEDULED_PERIOD": "1000"},
            "the series of a schedule has no end",
        ),
    ],
)
async def test_a_wrong_schedule_is_an_error(autojump_clock: MockClock, headers: dict[str, str], reason: str) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination=QUEUE, receipt="r", **headers))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert reason in error.body.decode()
        assert protocols.stomp.records("orders") == []


@pytest.mark.parametrize("destination", ["/temp-queue/mine", "/temp-topic/mine"])
async def test_a_temporary_destination_has_no_repeated_messages(autojump_clock: MockClock, destination: str) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination=destination, AMQ_SCHEDULED_CRON="* * * * *"))
        assert b"ends with its connection, and a repeated message does not" in (await talk.error()).body


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "header AMQ_SCHEDULER_ACTION is ''"),
        ({"AMQ_SCHEDULER_ACTION": "BROWSE"}, "is 'BROWSE', which is not supported; send REMOVE with scheduledJobId"),
        ({"AMQ_SCHEDULER_ACTION": "REMOVEALL"}, "`martlet timer list` lists all"),
        ({"AMQ_SCHEDULER_ACTION": "REMOVE"}, "header scheduledJobId is ''; use that of a message that came"),
        ({"AMQ_SCHEDULER_ACTION": "REMOVE", "scheduledJobId": "ID"}, "header scheduledJobId is 'ID'"),
    ],
)
async def test_what_the_scheduler_cannot_do_is_an_error(
    autojump_clock: MockClock, headers: dict[str, str], reason: str
) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination=MANAGEMENT, receipt="r", **headers))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert reason in error.body.decode()


@pytest.mark.parametrize("headers", [{"transaction": "t"}, {"destination": f"{QUEUE},{MANAGEMENT}"}])
async def test_remove_stands_alone(autojump_clock: MockClock, headers: dict[str, str]) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        remove = {"destination": MANAGEMENT, "AMQ_SCHEDULER_ACTION": "REMOVE", "scheduledJobId": "orders:K"}
        await talk.send(talk.frame("BEGIN", transaction="t"), talk.frame("SEND", **{**remove, **headers}))
        assert b"outside of transactions, and to no other destination" in (await talk.error()).body
        assert protocols.stomp.records("orders") == []


async def test_remove_without_timers_is_an_error(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk = await protocols.stomp.connect()
        await talk.send(
            talk.frame("SEND", destination=MANAGEMENT, AMQ_SCHEDULER_ACTION="REMOVE", scheduledJobId="orders:K")
        )
        assert b"no plugin repeats messages; add timer to plugins.enabled" in (await talk.error()).body


async def test_only_who_may_publish_to_a_topic_ends_its_messages(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk = await protocols.stomp.connect()
        await talk.publish(QUEUE, b"x", AMQ_SCHEDULED_PERIOD="1000", AMQ_SCHEDULED_REPEAT="-1")
        await trio.sleep(1.5)
        (record,) = protocols.stomp.records("orders")
        job = properties_of(record)["scheduledJobId"]

        def opinion(identity: Identity, action: str, name: str) -> bool | None:
            return name != "orders"

        protocols.broker.authorizers = (opinion,)
        protocols.broker.rules.changed()
        remove = {"destination": MANAGEMENT, "AMQ_SCHEDULER_ACTION": "REMOVE", "scheduledJobId": job}
        await talk.send(talk.frame("SEND", receipt="r", **remove))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert b"may not publish to" in error.body
        await trio.sleep(10)
        assert len(protocols.stomp.records("orders")) == 11


async def test_mqtt_clients_get_each_copy(autojump_clock: MockClock) -> None:
    async with repeating() as protocols:
        talk, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#", qos=1)
        repeated = {"AMQ_SCHEDULED_PERIOD": "1000", "AMQ_SCHEDULED_REPEAT": "1"}
        await talk.publish("/topic/mqtt/home/door", b"later", colour="red", **repeated)
        await trio.sleep(0.9)
        await protocols.stomp.idle()
        assert await mqtt.rest() == []
        found = await mqtt.messages(2)
        assert [(message.topic, message.payload) for message in found] == [("home/door", b"later")] * 2
        assert ("colour", "red") in found[0].properties.user
        assert [properties_of(record)["TAGS"] for record in protocols.stomp.records("mqtt")] == ["home/door"] * 2
