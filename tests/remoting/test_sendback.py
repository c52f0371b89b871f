import pytest
import trio
from msgspec.structs import replace

from martlet.message import Message, Record, decode_properties
from martlet.records.codec import decode_record, decode_records
from martlet.tables.groups import Group
from martlet.tables.topics import BROKER_TOPICS, EVENT_TOPIC
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext

BACK = RequestCode.CONSUMER_SEND_MSG_BACK


async def sent(
    harness: Harness, properties: str = "UNIQ_KEY\x01U1\x02TAGS\x01A\x02a\x01b\x02", **more: object
) -> Record:
    """One stored message of topic T."""
    harness.topic("T")
    client = harness.client()
    answer = await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T", 1, properties, **more), b"body")
    data = harness.store.lookup.record_at(int(str(answer.ext["msgId"])[16:], 16))
    assert data is not None
    return decode_record(data)


async def back(client: FakeClient, position: int, *, version: int = 479, **more: object) -> Command:
    ext = {"offset": str(position), "group": "G", "delayLevel": "0", "unitMode": "false", **more}
    return await client.ask(BACK, ext, version=version)


async def stored(harness: Harness, topic: str) -> list[Record]:
    if harness.broker.topics.get(topic) is None:
        return []
    ext = pull_ext(topic, 0, consumerGroup="Other")  # from which retries are not held back
    answer = await harness.client().ask(RequestCode.PULL_MESSAGE, ext)
    return decode_records(answer.body)


async def test_a_failed_message_comes_again_in_the_groups_retry_topic(harness: Harness) -> None:
    first = await sent(harness, h="7", f="1")
    client = harness.client()
    assert (await back(client, first.position)).code == 0
    (copy,) = await stored(harness, "%RETRY%G")
    assert (copy.body, copy.flag, copy.sys_flag, copy.reconsume_times) == (b"body", 7, 1, 1)
    assert (copy.born_ms, copy.born_host) == (first.born_ms, first.born_host)
    origin = f"7F00000100002A9F{first.position:016X}"
    assert decode_properties(copy.properties) == decode_properties(first.properties) | {
        "RETRY_TOPIC": "T",
        "ORIGIN_MESSAGE_ID": origin,
        "WAIT": "false",
        "DELAY": "3",
    }
    # Again: what says where it came from stays.
    assert (await back(client, copy.position)).code == 0
    again = (await stored(harness, "%RETRY%G"))[1]
    properties = decode_properties(again.properties)
    assert (properties["RETRY_TOPIC"], properties["ORIGIN_MESSAGE_ID"], properties["DELAY"]) == ("T", origin, "4")
    assert again.reconsume_times == 2


async def waited(client: FakeClient, code: int, **ext: object) -> Command:
    """Send a request for which a thread may have to read, and return its answer."""
    opaque = client.send(code, ext)
    while opaque not in client.answers:
        await trio.lowlevel.checkpoint()
        client.harness.store.committer.commit()
        client.receive()
    return client.answers.pop(opaque)


async def test_a_message_is_given_back_and_found_however_large_it_may_be(open_harness: OpenHarness) -> None:
    largest = 20 << 20
    harness = await open_harness(store={"flush": "async", "message_bytes_max": largest}, frame_bytes_max=24 << 20)
    harness.broker.config = replace(harness.broker.config, message_bytes_max=largest)
    harness.topic("T")
    client = harness.client()
    client._frames = FrameBuffer(24 << 20)
    answer = await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T", 1, "KEYS\x01k\x02"), bytes(largest))
    assert answer.code == 0
    position = int(str(answer.ext["msgId"])[16:], 16)
    assert (await waited(client, BACK, offset=position, group="G", delayLevel=0)).code == 0
    (queue,) = harness.store.queues.topics["%RETRY%G"].values()
    (copy,) = decode_records(b"".join(harness.store.readers.read(queue, 0, 1, 1).pieces))
    assert copy.body == bytes(largest)
    viewed = await waited(client, RequestCode.VIEW_MESSAGE_BY_ID, topic="T", offset=position)
    query = {"topic": "T", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    found = await waited(client, RequestCode.QUERY_MESSAGE, **query)
    for each in viewed, found:
        (record,) = decode_records(each.body)
        assert record.body == bytes(largest)


@pytest.mark.parametrize(
    ("times", "more", "version", "topic", "level"),
    [
        (0, {"delayLevel": "5"}, 479, "%RETRY%G", "5"),
        (0, {"delayLevel": "-1"}, 479, "%DLQ%G", "0"),
        (15, {}, 479, "%RETRY%G", "18"),
        (16, {}, 479, "%DLQ%G", "0"),
        (2, {"maxReconsumeTimes": "2"}, 479, "%DLQ%G", "0"),
        (1, {"maxReconsumeTimes": "2"}, 479, "%RETRY%G", "4"),
        (2, {"maxReconsumeTimes": "2"}, 120, "%RETRY%G", "5"),
        (16, {"maxReconsumeTimes": "99"}, 120, "%DLQ%G", "0"),
    ],
)
async def test_a_message_that_failed_too_often_is_dead(
    harness: Harness, times: int, more: dict[str, object], version: int, topic: str, level: str
) -> None:
    record = await sent(harness, j=str(times))
    assert (await back(harness.client(), record.position, version=version, **more)).code == 0
    (copy,) = await stored(harness, topic)
    assert (decode_properties(copy.properties)["DELAY"], copy.reconsume_times) == (level, times + 1)
    made = harness.broker.topics.get(topic)
    assert made is not None
    assert (made.write_queues, made.perm) == (1, 6)


async def test_the_groups_policy_rules(harness: Harness) -> None:
    record = await sent(harness)
    harness.broker.groups.update(Group("G", retry_max_times=0))
    assert (await back(harness.client(), record.position)).code == 0
    assert len(await stored(harness, "%DLQ%G")) == 1
    harness.broker.groups.update(Group("H", retry_queue_nums=0))
    assert (await back(harness.client(), record.position, group="H")).code == 0
    assert (await stored(harness, "%RETRY%H"), await stored(harness, "%DLQ%H")) == ([], [])


async def test_an_unknown_group_is_refused_where_groups_are_not_made(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_groups": False}, store={"flush": "async"})
    record = await sent(harness)
    answer = await back(harness.client(), record.position)
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.mark.parametrize("distance", [1, -1, 10**12, -(10**12)])
async def test_a_position_at_which_no_record_starts_is_refused(harness: Harness, distance: int) -> None:
    await sent(harness)
    second = await sent(harness)
    answer = await back(harness.client(), second.position + distance)
    assert (answer.code, "look message by offset failed" in str(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)


@pytest.mark.parametrize("topic", sorted(BROKER_TOPICS - {EVENT_TOPIC}))
async def test_a_half_or_delayed_message_is_not_had_early_by_sending_it_back(harness: Harness, topic: str) -> None:
    harness.topic(topic)
    placed = harness.broker.publish(Message(topic, b"half", b"REAL_TOPIC\x01T\x02", 0))
    await harness.step()
    end = harness.store.appended
    answer = await back(harness.client(), placed.position)
    assert (answer.code, f"Reading topic[{topic}] is forbidden" in str(answer.remark)) == (16, True)
    assert (harness.store.appended, harness.broker.groups.get("G")) == (end, None)


async def test_a_closed_retry_topic_is_refused(harness: Harness) -> None:
    record = await sent(harness)
    harness.topic("%RETRY%G", 1, perm=4)
    assert (await back(harness.client(), record.position)).code == ResponseCode.NO_PERMISSION


async def test_with_sync_flush_the_answer_waits_for_the_disk(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"})
    record = await sent(harness)
    client = harness.client()
    client.send(BACK, {"offset": str(record.position), "group": "G", "delayLevel": "0"})
    await trio.testing.wait_all_tasks_blocked()
    assert client.peer.held_until == harness.store.appended > harness.store.readable


async def test_nobody_sends_back_what_he_may_not_read(harness: Harness) -> None:
    record = await sent(harness)
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "T"),)
    assert (await back(harness.client(), record.position)).code == ResponseCode.NO_PERMISSION


# finding single messages


async def test_a_message_is_found_by_its_place(harness: Harness) -> None:
    record = await sent(harness)
    client = harness.client(fast=True)
    answer = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(record.position)})
    assert (answer.code, decode_record(answer.body).body) == (0, b"body")
    for offset in ("1", "-1", "99999999"):
        answer = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset})
        assert (answer.code, answer.remark) == (1, f"can not find message by the offset, {offset}")


async def test_messages_are_found_by_key_and_by_unique_key(harness: Harness) -> None:
    begin = harness.clock.ms
    for number in range(3):
        await sent(harness, f"UNIQ_KEY\x01U{number}\x02KEYS\x01order{number} all\x02")
        harness.clock.ms += 1000
    client = harness.client()

    async def query(key: str, most: str = "32", **more: object) -> list[str]:
        times = {"beginTimestamp": str(begin - 1000), "endTimestamp": str(harness.clock.ms + 1000)}
        ext = {"topic": "T", "key": key, "maxNum": most} | times | more
        answer = await client.ask(RequestCode.QUERY_MESSAGE, ext)
        assert answer.ext["indexLastUpdateTimestamp"]
        if answer.code != 0:
            assert (answer.code, answer.body) == (ResponseCode.QUERY_NOT_FOUND, b"")
            return []
        assert answer.ext["indexLastUpdatePhyoffset"]
        return [record.property("UNIQ_KEY") for record in decode_records(answer.body)]

    assert await query("all") == ["U2", "U1", "U0"]
    assert await query("all", "2") == ["U2", "U1"]
    assert await query("all", "0") == ["U2"]
    assert await query("order1") == ["U1"]
    assert await query("U1", "1", _UNIQUE_KEY_QUERY="true") == ["U1"]
    assert await query("nothing") == []
    assert await query("all", beginTimestamp=str(begin + 900_000), endTimestamp=str(begin + 999_000)) == []
    assert await query("all", topic="Other") == []


async def test_a_query_answers_no_more_than_a_frame_holds(harness: Harness) -> None:
    client = harness.client()
    harness.topic("T")
    for _ in range(5):
        ext = send_ext("T", 0, "KEYS\x01k\x02")
        assert (await client.ask(RequestCode.SEND_MESSAGE_V2, ext, bytes(4 * 1024 * 1024))).code == 0
    ext = {"topic": "T", "key": "k", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
    answer = await client.ask(RequestCode.QUERY_MESSAGE, ext)
    assert (answer.code, len(decode_records(answer.body))) == (0, 2)


QUERY = {"topic": "T", "key": "U1", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}


async def test_a_query_waits_until_a_damaged_key_index_is_rebuilt(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async", "persist_interval_ms": 1})
    await sent(harness)
    keys = harness.store.keys
    assert keys is not None
    keys.damaged = True
    client = harness.client()
    opaque = client.send(RequestCode.QUERY_MESSAGE, QUERY)
    client.receive()
    assert client.answers == {}
    while opaque not in client.answers:
        await trio.lowlevel.checkpoint()
        client.receive()
    answer = client.answers.pop(opaque)
    assert (answer.code, len(decode_records(answer.body))) == (0, 1)


async def test_a_query_is_refused_while_the_key_index_cannot_be_rebuilt(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet_remoting.handler.READY_WAIT_S", 0.0)
    await sent(harness)
    keys = harness.store.keys
    assert keys is not None
    keys.damaged = keys.saving = True
    answer = await harness.client().ask(RequestCode.QUERY_MESSAGE, QUERY)
    assert (answer.code, answer.remark) == (
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "the key index is being checked or rebuilt; try again in a few seconds",
    )


async def test_nobody_finds_what_he_may_not_read(harness: Harness) -> None:
    record = await sent(harness)
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "T"),)
    client = harness.client()
    view = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(record.position)})
    ext = {"topic": "T", "key": "U1", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
    query = await client.ask(RequestCode.QUERY_MESSAGE, ext)
    assert (view.code, query.code) == (ResponseCode.NO_PERMISSION, ResponseCode.NO_PERMISSION)


async def test_a_message_that_was_tried_as_often_as_a_record_can_say_goes_to_the_dead_letters(
    harness: Harness,
) -> None:
    first = await sent(harness, j="2147483647")
    assert first.reconsume_times == 2147483647
    assert (await back(harness.client(), first.position)).code == 0
    (letter,) = await stored(harness, "%DLQ%G")
    assert letter.reconsume_times == 2147483647


async def test_nobody_sends_back_to_a_group_whose_retries_he_may_not_read(harness: Harness) -> None:
    record = await sent(harness)
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "%RETRY%G"),)
    assert (await back(harness.client(), record.position)).code == ResponseCode.NO_PERMISSION
    assert harness.broker.topics.get("%RETRY%G") is None
    assert harness.broker.groups.get("G") is None


async def test_a_key_that_collides_shows_nothing_of_a_topic_that_may_not_be_read(harness: Harness) -> None:
    # "Aa" and "BB" have the same hash in Java, and the index knows no more than hashes.
    harness.topic("TAa")
    harness.topic("TBB")
    client = harness.client()
    for topic in ("TAa", "TBB"):
        await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext(topic, 1, "KEYS\x01k\x02"), topic.encode())
    ext = {"topic": "TBB", "key": "k", "maxNum": "9", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
    (mine,) = decode_records((await client.ask(RequestCode.QUERY_MESSAGE, ext)).body)
    assert mine.topic == "TBB"
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "TAa"),)
    (mine,) = decode_records((await client.ask(RequestCode.QUERY_MESSAGE, ext)).body)
    assert mine.topic == "TBB"


async def test_a_manager_of_a_group_feeds_it_nothing_that_he_may_not_read(harness: Harness) -> None:
    record = await sent(harness)
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "T"),)
    message_id = f"7F00000100002A9F{record.position:016X}"
    ext = {"consumerGroup": "G", "clientId": "c", "msgId": message_id}
    answer = await client.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert RequestCode.CONSUME_MESSAGE_DIRECTLY not in [request.code for request in client.requests]
