"""Clients of every protocol read messages that retention has removed from the log, and notice no seam."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.delivery.pushing import LINES, Collector
from tests.remoting.conftest import pull_ext
from tests.remoting.pop_talk import ack_ext, pop_ext, popped
from tests.stomp.all_protocols import Protocols, all_protocols
from tests.tiered.cold import Tier
from tests.tiered.copying import CopyingTier, copying_tier
from tests.wire_clients.mqtt import MqttClient, leave
from tests.wire_clients.remoting import RemotingClient

from martlet.delivery import feed
from martlet.delivery.subscriptions import Start, from_earliest, from_offset
from martlet.groups.handing_out import dead_letters
from martlet.message import Message, encode_properties
from martlet.records.codec import decode_records
from martlet.store import Queue
from martlet.testing.cold import MemoryTier, remove_sealed, use_memory_tier
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock, small_config
from martlet_remoting.wire.codes import RequestCode, ResponseCode

# Small segments: the messages of a test fill several.
STORE = small_config(flush="async", segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 14)
COUNT = 120
BODIES = [b"%03d " % number * 100 for number in range(COUNT)]
STEP_MS = 1000
DAY_S = 86_400


class World:
    """A broker with a tier, and topics with messages of which the log has lost most."""

    def __init__(self, protocols: Protocols, clock: ManualClock, tier: MemoryTier | CopyingTier) -> None:
        self.protocols = protocols
        self.broker = protocols.broker
        self.store = protocols.broker.store
        self.clock = clock
        self.tier = tier
        self.begin_ms = clock.ms

    @property
    def memory(self) -> MemoryTier:
        assert isinstance(self.tier, MemoryTier)
        return self.tier

    def publish(self, topic: str, *bodies: bytes, tag: str = "a/b") -> None:
        for body in bodies:
            properties = encode_properties({"TAGS": tag, "KEYS": body[:3].decode()})
            self.broker.publish(Message(topic, body, properties, queue_id=0))
            self.store.committer.commit()
            self.clock.ms += STEP_MS

    async def bury(self, topic: str) -> Queue:
        """Publish *BODIES* and let most of them become cold."""
        self.broker.topics.ensure(topic, 1)
        self.publish(topic, *BODIES)
        await remove_sealed(self.store)
        queue = self.store.queue(topic, 0)
        assert queue.first_offset == 0
        assert COUNT // 2 < queue.local_from < COUNT
        return queue


@asynccontextmanager
async def world(directory: Path, place: Tier | None = None) -> AsyncIterator[World]:
    """Run a broker with a tier in memory, or with files at *place*."""
    clock = ManualClock()
    async with all_protocols(directory / "data", store=STORE, clock=clock) as protocols:
        store = protocols.broker.store
        if place is None:
            yield World(protocols, clock, use_memory_tier(store))
        else:
            async with copying_tier(store, place) as tier:
                yield World(protocols, clock, tier)


@pytest.fixture(params=["memory", "files"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Tier | None:
    """Where the tier of a test has its messages."""
    return Tier(str(tmp_path / "tier")) if request.param == "files" else None


async def until(condition: Callable[[], bool]) -> None:
    """Wait in real time for *condition*, which the broker reaches by trying again."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.001)


# ---- RocketMQ: pulls


async def pull_all(client: RemotingClient, topic: str, offset: int, **more: Any) -> list[bytes]:
    """Pull as a push consumer does, from *offset* until nothing is left."""
    found: list[bytes] = []
    while True:
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, offset, **more))
        assert answer.ext["minOffset"] == "0"
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            return found
        assert answer.code == 0, answer.remark
        records = list(decode_records(answer.body))
        assert [record.queue_offset for record in records] == list(range(offset, offset + len(records)))
        assert int(str(answer.ext["nextBeginOffset"])) == offset + len(records)
        found += [record.body for record in records]
        offset += len(records)


@pytest.mark.parametrize("hold", [False, True], ids=["at once", "long poll"])
async def test_a_pull_consumer_reads_the_whole_history(tmp_path: Path, place: Tier | None, hold: bool) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("T")
        client = made.protocols.remoting()
        if not hold:
            assert await pull_all(client, "T", 0) == BODIES
            assert await pull_all(client, "T", 7) == BODIES[7:]
            return
        how: dict[str, Any] = {"sysFlag": "6", "suspendTimeoutMillis": "15000"}
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 3, **how))
        assert [record.body for record in decode_records(answer.body)] == BODIES[3:35]


async def test_a_pull_by_tag_finds_cold_messages(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        made.broker.topics.ensure("T", 1)
        for number, body in enumerate(BODIES):
            made.publish("T", body, tag="AB"[number % 2])
        await remove_sealed(made.store)
        found: list[bytes] = []
        offset = 0
        while offset < COUNT:
            ext = pull_ext("T", offset, subscription="B")
            answer = await made.protocols.remoting().ask(RequestCode.PULL_MESSAGE, ext)
            found += [record.body for record in decode_records(answer.body)]
            offset = int(str(answer.ext["nextBeginOffset"]))
        assert found == BODIES[1::2]


async def test_expired_messages_are_gone_although_the_tier_has_them(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        queue = await made.bury("T")
        queue.expire_to(30)
        client = made.protocols.remoting()
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 5))
        assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "30")
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 30))
        assert [record.body for record in decode_records(answer.body)] == BODIES[30:62]
        assert answer.ext["minOffset"] == "30"


async def test_a_tier_that_fails_refuses_one_pull_and_no_other(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.bury("T")
        client = made.protocols.remoting()
        made.memory.gate = trio.Event()
        cold = await client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 0))
        hot = await client.send(RequestCode.PULL_MESSAGE, pull_ext("T", COUNT - 1))
        answer = await client.receive()
        assert (answer.opaque, answer.code) == (hot, 0), "the tier delays no other pull of the connection"
        made.memory.failure = OSError("connection reset")
        made.memory.gate.set()
        answer = await client.receive()
        assert (answer.opaque, answer.code) == (cold, ResponseCode.SERVICE_NOT_AVAILABLE)
        assert answer.remark is not None
        assert "cold tier 'memory' failed; OSError: connection reset" in answer.remark
        made.memory.failure = None
        assert await pull_all(client, "T", 0) == BODIES


async def test_a_group_that_reads_much_of_the_tier_has_to_wait(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        queue = await made.bury("T")
        client = made.protocols.remoting(cold_tier_bytes_max=2000)
        codes = []
        for offset in (0, 8, queue.local_from):
            answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", offset, maxMsgNums="8"))
            codes.append(answer.code)
        assert codes == [0, ResponseCode.SYSTEM_BUSY, 0]


# ---- RocketMQ: look-ups


async def test_rocketmqs_look_ups_know_the_cold_messages(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        queue = await made.bury("T")
        client, where = made.protocols.remoting(), {"topic": "T", "queueId": "0"}

        async def ask(code: int, field: str, **more: object) -> int:
            answer = await client.ask(code, {**where, **more})
            assert answer.code == 0, answer.remark
            return int(str(answer.ext[field]))

        assert await ask(RequestCode.GET_MIN_OFFSET, "offset") == 0
        assert await ask(RequestCode.GET_MAX_OFFSET, "offset") == COUNT
        assert await ask(RequestCode.GET_EARLIEST_MSG_STORETIME, "timestamp") == made.begin_ms
        for offset in (0, 17, queue.local_from - 1, queue.local_from, COUNT - 1):
            ms = made.begin_ms + offset * STEP_MS
            assert await ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, "offset", timestamp=str(ms)) == offset
        queue.expire_to(10)
        assert await ask(RequestCode.GET_MIN_OFFSET, "offset") == 10


async def test_a_new_group_asks_the_tier_nothing_to_learn_where_it_begins(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("T")
        ext = {"topic": "T", "queueId": "0", "consumerGroup": "G"}
        answer = await made.protocols.remoting().ask(RequestCode.QUERY_CONSUMER_OFFSET, dict(ext))
        assert (answer.code, made.tier.asked) == (ResponseCode.QUERY_NOT_FOUND, [])


async def test_a_dead_letter_of_a_cold_message_waits_for_the_tier_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dead_letters, "RETRY_S", 0.01)
    async with world(tmp_path) as made:
        await made.bury("orders")
        cold, hot = await made.protocols.stomp.connect(), await made.protocols.stomp.connect()
        await cold.subscribe("/queue/orders", "client-individual", prefetch_count="1")
        (message,) = await cold.messages(1)
        made.memory.failure = OSError("connection reset")
        await cold.nack(message, requeue="false")
        await hot.subscribe("/queue/other", "client-individual", prefetch_count="1")
        await hot.publish("/queue/other", b"fresh")
        (other,) = await hot.messages(1)
        await hot.nack(other, requeue="false")

        def letters() -> list[bytes]:
            return [record.body for record in made.protocols.stomp.records("stomp_dead_letters")]

        await until(lambda: letters() == [b"fresh"])
        await until(lambda: "cannot be read, retrying" in caplog.text)
        made.memory.failure = None
        await until(lambda: len(letters()) == 2)
        assert letters() == [b"fresh", BODIES[0]]


async def test_a_cold_message_is_found_by_key_and_by_id_and_can_be_sent_back(
    tmp_path: Path, place: Tier | None
) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("T")
        client = made.protocols.remoting()
        key = {"topic": "T", "key": "005", "maxNum": "8", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
        answer = await client.ask(RequestCode.QUERY_MESSAGE, dict(key))
        (record,) = decode_records(answer.body)
        assert (answer.code, record.body) == (0, BODIES[5])
        position = {"offset": str(record.position)}
        answer = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, dict(position))
        assert [each.body for each in decode_records(answer.body)] == [BODIES[5]]
        made.broker.groups.ensure("G")
        back = {**position, "group": "G", "delayLevel": "0", "originTopic": "T"}
        answer = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, dict(back))
        assert answer.code == 0, answer.remark
        retry = made.broker.store.queue("%RETRY%G", 0)
        assert retry.next_offset == 1


async def test_administrators_count_cold_messages(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("T")
        made.broker.groups.ensure("G")
        made.broker.groups.offsets.commit("G", "T", 0, 5)
        client = made.protocols.remoting()
        answer = await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
        assert b'"minOffset":0' in answer.body
        assert b'"maxOffset":%d' % COUNT in answer.body
        answer = await client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "G", "topic": "T"})
        assert b'"consumerOffset":5' in answer.body
        assert b'"lastTimestamp":%d' % (made.begin_ms + 4 * STEP_MS) in answer.body


async def test_a_topic_keeps_a_queue_with_only_cold_messages(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        made.broker.topics.ensure("T", 4)
        made.broker.groups.ensure("G")
        made.broker.groups.offsets.commit("G", "T", 3, 1)
        for _ in range(3):
            made.broker.publish(Message("T", b"old", queue_id=3))
        made.publish("T", *BODIES)
        await remove_sealed(made.store)
        queue = made.store.queue("T", 3)
        assert (queue.first_offset, queue.local_from, queue.next_offset) == (0, 3, 3)
        assert made.broker.topics.used_queues("T") == 4
        topic = made.broker.topics.get("T")
        assert topic is not None
        unread = await made.broker.turns.finish(made.broker.draining.unread(topic, 1))
        assert (unread.messages, unread.ends) == (2, [(queue, 3)])
        queue.expire_to(3)
        assert made.broker.topics.used_queues("T") == 1


async def test_a_session_in_the_cold_range_keeps_a_topic_from_losing_queues(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        made.broker.topics.ensure("mqtt", 2)
        await away(made, "#")
        for _ in range(3):
            properties = encode_properties({"TAGS": "a"})
            made.broker.publish(Message("mqtt", b"old", properties, queue_id=1))
        made.publish("mqtt", *BODIES)
        await remove_sealed(made.store)
        topic = made.broker.topics.get("mqtt")
        assert topic is not None
        unread = await made.broker.turns.finish(made.broker.draining.unread(topic, 1))
        assert unread.messages == 3


# ---- RocketMQ: pops


async def test_a_pop_consumer_takes_the_whole_history_once(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("T")
        made.broker.groups.ensure("G")
        client = made.protocols.remoting()
        found: list[bytes] = []
        while len(found) < COUNT:
            how: dict[str, Any] = {"pollTime": "15000", "invisibleTime": "600000"}
            answer = await client.ask(RequestCode.POP_MESSAGE, pop_ext("T", **how))
            messages = popped(answer)
            found += [message.body for message in messages]
            for message in messages:
                assert (await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message))).code == 0
        assert found == BODIES
        assert (await client.ask(RequestCode.POP_MESSAGE, pop_ext("T"))).code == ResponseCode.POLLING_TIMEOUT


# ---- subscriptions and STOMP


@pytest.mark.parametrize(("start", "first"), [(from_earliest, 0), (from_offset(7), 7)], ids=["earliest", "offset"])
async def test_a_subscription_reads_the_cold_range_and_never_jumps(
    tmp_path: Path, place: Tier | None, start: Start, first: int
) -> None:
    async with world(tmp_path, place) as made:
        queue = await made.bury("T")
        peer = RecordingPeer()
        subscription = made.broker.subscriptions.open(peer, "T", LINES, start=start, credit=COUNT)
        collector = Collector(peer, subscription)
        while len(collector.got) < COUNT - first:
            await collector.turn(5000)
        assert collector.got == [f"0:{number}:{BODIES[number].decode()}" for number in range(first, COUNT)]
        assert queue.local_from > first
        subscription.close()


async def test_a_durable_subscription_of_stomp_gets_what_came_while_it_was_away(
    tmp_path: Path, place: Tier | None
) -> None:
    async with world(tmp_path, place) as made:

        async def subscriber() -> Any:
            talk = await made.protocols.stomp.connect(client_id="ann")
            await talk.subscribe("/topic/news", "auto", **{"activemq.subscriptionName": "news"})
            return talk

        talk = await subscriber()
        await talk.disconnect()
        await made.bury("news")
        talk = await subscriber()
        assert await talk.bodies(COUNT) == BODIES
        assert await talk.rest() == []


async def test_consumers_and_browsers_of_a_stomp_queue_get_cold_messages(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        await made.bury("orders")
        browser = await made.protocols.stomp.connect()
        await browser.subscribe("/queue/orders", name="look", browser="true")
        messages = await browser.messages(COUNT + 1)
        assert [message.body for message in messages[:-1]] == BODIES
        assert messages[-1]["browser"] == "end"
        consumer = await made.protocols.stomp.connect()
        await consumer.subscribe("/queue/orders", "client-individual", prefetch_count="500")
        taken = await consumer.messages(COUNT)
        assert [message.body for message in taken] == BODIES
        await consumer.ack(*taken)
        await consumer.disconnect()
        consumer = await made.protocols.stomp.connect()
        await consumer.subscribe("/queue/orders")
        assert await consumer.rest() == []


# ---- MQTT sessions


async def away(made: World, topic_filter: str, before: Callable[[MqttClient], Awaitable[None]] | None = None) -> None:
    """Leave a session with *topic_filter*."""
    talk = await made.protocols.mqtt.connect("c", expiry_s=DAY_S)
    await talk.subscribe(topic_filter, qos=1)
    if before is not None:
        await before(talk)
    await leave(made.protocols.mqtt, talk, "c")


async def back(made: World, count: int) -> list[bytes]:
    """Return to the session and take *count* messages."""
    talk = await made.protocols.mqtt.connect("c", clean=False, expiry_s=DAY_S, present=True)
    found: list[bytes] = []
    while len(found) < count:
        for message in await talk.messages(1):
            found.append(message.payload)
            await talk.acknowledge(message)
    assert await talk.rest() == []
    return found


@pytest.mark.parametrize("topic_filter", ["#", "a/b"], ids=["wildcard", "name"])
async def test_a_session_that_was_away_for_longer_than_the_log_misses_nothing(
    tmp_path: Path, place: Tier | None, topic_filter: str
) -> None:
    async with world(tmp_path, place) as made:
        await away(made, topic_filter)
        made.publish("mqtt", *BODIES[:10], tag="a/b")
        made.publish("mqtt", *[b"other"] * 10, tag="c")
        made.publish("mqtt", *BODIES[10:], tag="a/b")
        await remove_sealed(made.store)
        assert made.broker.sessions.table.position("mqtt c")[0] < made.store.first_position
        expected = BODIES if topic_filter == "a/b" else [*BODIES[:10], *[b"other"] * 10, *BODIES[10:]]
        assert await back(made, len(expected)) == expected
        assert made.protocols.mqtt.context.counters.missed == 0
        assert "read" in made.tier.asked


async def test_a_session_over_several_queues_gets_them_in_the_order_of_the_log(
    tmp_path: Path, place: Tier | None
) -> None:
    async with world(tmp_path, place) as made:
        made.broker.topics.ensure("mqtt", 4)
        await away(made, "#")
        for number, body in enumerate(BODIES):
            properties = encode_properties({"TAGS": f"n/{number % 7}"})
            made.broker.publish(Message("mqtt", body, properties, queue_id=number % 4))
            made.store.committer.commit()
        await remove_sealed(made.store)
        assert await back(made, COUNT) == BODIES


async def test_messages_in_flight_are_sent_again_from_the_tier(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:

        async def take(talk: MqttClient) -> None:
            made.publish("mqtt", *BODIES[:3])
            assert [message.payload for message in await talk.messages(3)] == BODIES[:3]

        await away(made, "#", take)
        made.publish("mqtt", *BODIES[3:])
        await remove_sealed(made.store)
        assert await back(made, COUNT) == BODIES


async def test_a_session_is_told_what_the_tier_has_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await away(made, "#")
        made.publish("mqtt", *BODIES)
        await remove_sealed(made.store)
        made.memory.drop_before(made.store.queue("mqtt", 0), 10)
        assert await back(made, COUNT - 10) == BODIES[10:]
        assert made.protocols.mqtt.context.counters.missed == 10


async def test_a_shared_subscription_gets_what_came_while_its_members_were_away(
    tmp_path: Path, place: Tier | None
) -> None:
    async with world(tmp_path, place) as made:
        await away(made, "$share/g/#")
        made.publish("mqtt", *BODIES)
        await remove_sealed(made.store)
        assert await back(made, COUNT) == BODIES


async def test_a_session_waits_for_a_tier_that_is_down_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "READ_AGAIN_S", 0.01)
    async with world(tmp_path) as made:
        await away(made, "#")
        made.publish("mqtt", *BODIES)
        await remove_sealed(made.store)
        made.memory.gate = trio.Event()
        talk = await made.protocols.mqtt.connect("c", clean=False, expiry_s=DAY_S, present=True)
        near = await made.protocols.mqtt.connect("near", expiry_s=DAY_S)
        await near.subscribe("#", qos=1)
        await leave(made.protocols.mqtt, near, "near")
        made.publish("mqtt", b"new")
        near = await made.protocols.mqtt.connect("near", clean=False, expiry_s=DAY_S, present=True)
        assert await near.payloads(1) == [b"new"], "another session that is behind does not wait for the tier"
        made.memory.failure = OSError("connection reset")
        made.memory.gate.set()
        await until(lambda: made.store.cold.failed_reads >= 3)
        made.memory.failure = None
        found: list[bytes] = []
        while len(found) < COUNT + 1:
            for message in await talk.messages(1):
                found.append(message.payload)
                await talk.acknowledge(message)
        assert found == [*BODIES, b"new"]


# ---- everything at once


async def test_there_is_no_gap_while_producers_write_and_segments_leave(tmp_path: Path, place: Tier | None) -> None:
    async with world(tmp_path, place) as made:
        await away(made, "#")
        made.publish("mqtt", *BODIES)
        await remove_sealed(made.store)
        client = made.protocols.remoting()
        talk = await made.protocols.mqtt.connect("c", clean=False, expiry_s=DAY_S, present=True)
        sent, pulled, payloads = list(BODIES), list[bytes](), list[bytes]()
        while len(pulled) < 2 * COUNT:
            if len(sent) < 2 * COUNT:
                more = [b"%03d" % number * 100 for number in range(len(sent), len(sent) + 6)]
                made.publish("mqtt", *more)
                sent += more
                await remove_sealed(made.store)
            answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("mqtt", len(pulled), maxMsgNums="8"))
            pulled += [record.body for record in decode_records(answer.body)]
            for message in await talk.messages(min(8, len(sent) - len(payloads))):
                payloads.append(message.payload)
                await talk.acknowledge(message)
        while len(payloads) < len(sent):
            for message in await talk.messages(1):
                payloads.append(message.payload)
                await talk.acknowledge(message)
        assert pulled == sent
        assert payloads == sent
