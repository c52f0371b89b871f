"""A topic gets fewer queues, and more again, by updateTopic: what RocketMQ's clients and tools see and get."""

import orjson
import pytest

from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.tables.groups import Group
from martlet.tables.topics import Topic
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import Harness, pull_ext, send_ext
from .pop_talk import ack, pop
from .test_admin_topics import CREATE, topic_ext


async def shrink(harness: Harness, queues: int = 1, **more: object) -> dict[str, object]:
    """Fill a topic of four queues, and ask for fewer as mqadmin does; return the fields of the answer."""
    topic = harness.topic("T", 4)
    for number in range(8):
        harness.broker.publish(Message(topic, b"%d" % number, b"", number % 4))
    await harness.step()
    answer = await update(harness, queues, **more)
    return dict(answer)


async def update(harness: Harness, queues: int, **more: object) -> dict[str, object]:
    ext = topic_ext("T", readQueueNums=str(queues), writeQueueNums=str(queues), **more)
    answer = await harness.client().ask(CREATE, ext)
    assert answer.code == 0, answer.remark
    return dict(answer.ext)


def topic_of(harness: Harness) -> Topic:
    topic = harness.broker.topics.get("T")
    assert topic is not None
    return topic


def numbers(harness: Harness) -> tuple[int, int]:
    return topic_of(harness).read_queues, topic_of(harness).write_queues


async def test_fewer_queues_for_producers_at_once_and_for_consumers_later(harness: Harness) -> None:
    await shrink(harness)
    assert numbers(harness) == (4, 1)
    shown = orjson.loads((await harness.client().ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "T"})).body)
    assert (shown["readQueueNums"], shown["writeQueueNums"], shown["martletReadQueueNums"]) == (4, 1, 1)
    stats = await harness.client().ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
    assert stats.body.count(b'"maxOffset":2') == 4
    client = harness.client()
    for queue_id in range(4):
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0, queue_id))
        assert answer.code == 0
        assert answer.integer("nextBeginOffset") == 2


async def test_pops_take_the_rest_and_then_the_queues_go(harness: Harness) -> None:
    await shrink(harness)
    client = harness.client()
    found = await pop(client, "T")
    assert sorted(message.body for message in found) == [b"%d" % number for number in range(8)]
    for message in found[:-1]:
        await ack(client, message)
    await harness.step()
    unread = finish_now(harness.broker.draining.unread(topic_of(harness), 1))
    assert (unread.messages, unread.reader) == (1, "group G")
    await ack(client, found[-1])
    await harness.step()
    await harness.broker.draining._look("T")
    assert numbers(harness) == (1, 1)
    answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0, 3))
    assert answer.code == 0, "a consumer with an old route, or one that keeps its offsets itself, reads on"
    assert (
        await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T", 3), b"x")
    ).code == ResponseCode.INVALID_PARAMETER


async def test_by_force_the_answer_counts_what_is_lost(harness: Harness) -> None:
    harness.broker.groups.update(Group("G"))
    harness.topic("T", 4)
    for queue_id, offset in ((0, 2), (1, 2), (2, 1)):
        harness.broker.groups.offsets.commit("G", "T", queue_id, offset)
    assert (await shrink(harness, force="true"))["lostMessages"] == "3"
    assert numbers(harness) == (1, 1)
    answer = await harness.client().ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0, 3))
    assert (answer.code, answer.integer("minOffset")) == (ResponseCode.PULL_OFFSET_MOVED, 2)


async def test_by_force_nothing_is_lost_that_was_consumed_or_never_there(harness: Harness) -> None:
    assert (await update(harness, 3, force="true"))["lostMessages"] == "0"
    assert numbers(harness) == (3, 3)


async def test_a_broadcasting_group_keeps_the_queues(harness: Harness) -> None:
    await shrink(harness)
    client = harness.client()
    for message in await pop(client, "T"):
        await ack(client, message)
    body = {
        "clientID": "c",
        "consumerDataSet": [
            {
                "groupName": "B",
                "messageModel": "BROADCASTING",
                "subscriptionDataSet": [{"topic": "T", "subString": "*", "subVersion": 1}],
            }
        ],
        "producerDataSet": [],
    }
    assert (await client.ask(RequestCode.HEART_BEAT, {}, orjson.dumps(body))).code == 0
    unread = finish_now(harness.broker.draining.unread(topic_of(harness), 1))
    assert (unread.messages, unread.reader) == (6, "broadcasting group B")


@pytest.mark.parametrize("size", [0, 1 << 20])
async def test_a_group_that_has_consumed_begins_at_the_beginning_of_added_queues(
    harness: Harness, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where RocketMQ's broker says that there is too much in them, and its client begins at their end."""
    harness.topic("T", 1)
    harness.broker.groups.update(Group("G"))
    harness.broker.groups.offsets.commit("G", "T", 0, 0)
    harness.broker.topics.update("T", 2, 2)
    harness.broker.publish(Message("T", bytes(size), b"", 1))
    harness.broker.store.queue("T", 1).expire_to(0)
    await harness.step()
    client = harness.client()
    ext = {"topic": "T", "queueId": "1", "setZeroIfNotFound": "false"}
    answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "G", **ext})
    assert (answer.code, answer.integer("offset")) == (0, 0)
    answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "New", **ext})
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
