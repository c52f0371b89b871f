"""Long answers are rendered in short slices and have the same content as short ones."""

from collections.abc import Mapping

import orjson
import pytest

from martlet.message import Message, encode_properties
from martlet.records.codec import decode_records
from martlet.tables.groups import Group
from martlet_remoting.wire.answers.bodies import load_object
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import FakeClient, Harness, OpenHarness, pull_ext

MANY = 3000
PIECE_BYTES_MAX = 160_000


async def slices_of(client: FakeClient, code: int, ext: Mapping[str, object]) -> tuple[int, dict[object, object]]:
    """How many slices the answer to a request took, and its body, of which no slice made or copied much."""
    turns = client.harness.broker.turns
    before = turns.slices
    client.peer.piece_bytes.clear()
    answer = await client.ask(code, ext)
    assert answer.code == ResponseCode.SUCCESS
    assert max(client.peer.piece_bytes) <= PIECE_BYTES_MAX
    return turns.slices - before, dict(load_object(answer.body))


async def test_all_topics_are_listed_in_slices(harness: Harness) -> None:
    for number in range(MANY):
        harness.topic(f"t{number}")
    slices, body = await slices_of(harness.client(), RequestCode.GET_ALL_TOPIC_CONFIG, {})
    assert slices > 10
    table = body["topicConfigTable"]
    assert isinstance(table, dict)
    assert len(table) == MANY + 1
    topic = harness.broker.topics.get("t7")
    assert topic is not None
    assert table["t7"] == topic.as_json()


async def test_all_groups_are_listed_in_slices(harness: Harness) -> None:
    for number in range(MANY):
        harness.broker.groups.update(Group(f"g{number}"))
    slices, body = await slices_of(harness.client(), RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
    assert slices > 10
    table = body["subscriptionGroupTable"]
    assert isinstance(table, dict)
    assert table["g7"] == Group("g7").as_json()


async def test_all_offsets_are_listed_in_slices(harness: Harness) -> None:
    for number in range(MANY):
        harness.broker.groups.offsets.commit(f"g{number}", "T", 1, number)
    slices, body = await slices_of(harness.client(), RequestCode.GET_ALL_CONSUMER_OFFSET, {})
    assert slices > 10
    table = body["offsetTable"]
    assert isinstance(table, dict)
    assert table["T@g7"] == {"1": 7}


async def test_who_consumes_a_topic_is_listed_in_slices(harness: Harness) -> None:
    harness.topic("T")
    for number in range(MANY):
        harness.broker.groups.offsets.commit(f"g{number}", "T", 1, number)
    slices, body = await slices_of(harness.client(), RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"})
    assert slices > 10
    assert body == {"groupList": [f"g{number}" for number in range(MANY)]}


async def test_statistics_of_all_groups_are_made_in_slices(harness: Harness) -> None:
    harness.topic("T", 1)
    for number in range(MANY):
        harness.broker.groups.update(Group(f"g{number}"))
        harness.broker.groups.offsets.commit(f"g{number}", "T", 0, number)
    slices, body = await slices_of(harness.client(), RequestCode.GET_BROKER_CONSUME_STATS, {})
    assert slices > 100
    stats = body["consumeStatsList"]
    assert isinstance(stats, list)
    assert len(stats) == len(harness.broker.groups.names())


async def test_messages_of_a_key_are_not_joined(harness: Harness) -> None:
    harness.topic("T", 1)
    for _ in range(20):
        harness.broker.publish(Message("T", bytes(60_000), encode_properties({"KEYS": "k"}), queue_id=0))
    await harness.step()
    client = harness.client()
    ext = {"topic": "T", "key": "k", "maxNum": 64, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    answer = await client.ask(RequestCode.QUERY_MESSAGE, ext)
    assert len(decode_records(answer.body)) == 20
    assert max(client.peer.piece_bytes) <= PIECE_BYTES_MAX


async def test_pulls_with_a_long_expression_are_taken_one_a_turn(harness: Harness) -> None:
    """5,000 tags take 6 ms, and one socket read may hold several such pulls."""
    harness.topic("T", 1)
    tags = "||".join(chr(0x4E00 + number) for number in range(5000))
    client, turns = harness.client(), harness.broker.turns
    harness.broker.publish(Message("T", b"x", encode_properties({"TAGS": chr(0x4E00 + 77)}), queue_id=0))
    await harness.step()
    ext = pull_ext("T", 0, subscription=tags)
    assert (await client.ask(RequestCode.PULL_MESSAGE, ext)).code == ResponseCode.SUCCESS
    before = turns.slices
    for _ in range(3):
        client.send(RequestCode.PULL_MESSAGE, ext)
    await harness.step()
    assert turns.slices - before == 3
    assert [answer.code for answer in client.answers.values()] == [ResponseCode.SUCCESS] * 3


async def test_statistics_of_many_queues_are_made_in_slices(harness: Harness) -> None:
    harness.topic("T", 5000)
    slices, body = await slices_of(harness.client(), RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
    assert slices > 300
    table = body["offsetTable"]
    assert isinstance(table, dict)
    assert len(table) == 5000


async def test_members_of_a_large_group_are_listed_in_slices(harness: Harness) -> None:
    for number in range(500):
        heartbeat = {"clientID": f"c{number}", "consumerDataSet": [{"groupName": "G"}]}
        harness.client().send(RequestCode.HEART_BEAT, body=orjson.dumps(heartbeat))
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    slices, body = await slices_of(harness.client(), code, {"consumerGroup": "G"})
    assert slices >= 5
    connections = body["connectionSet"]
    assert isinstance(connections, list)
    assert len(connections) == 500


async def test_a_reset_of_many_queues_works_in_slices_and_before_the_next_request(harness: Harness) -> None:
    harness.topic("T", 3000)
    harness.broker.groups.ensure("G")
    client = harness.client()
    ext = {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"}
    slices, _ = await slices_of(client, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
    assert slices > 100
    assert len(harness.broker.groups.offsets.committed("G", "T")) == 3000


@pytest.mark.parametrize("code", [RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET])
async def test_more_offsets_than_may_be_kept_are_refused(open_harness: OpenHarness, code: int) -> None:
    harness = await open_harness(store={"flush": "async"}, broker={"offsets_max": 2})
    harness.topic("T", 4)
    for group in ("A", "G"):
        harness.broker.groups.ensure(group)
    harness.broker.groups.offsets.commit("A", "T", 0, 0)
    harness.broker.groups.offsets.commit("A", "T", 1, 0)
    ext = {"consumerGroup": "G", "group": "G", "topic": "T", "queueId": "2", "commitOffset": "0", "offset": "0"}
    answer = await harness.client().ask(code, ext)
    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert "broker.offsets_max is 2" in (answer.remark or "")
    answer = await harness.client().ask(code, {**ext, "consumerGroup": "A", "group": "A", "queueId": "1"})
    assert answer.code == ResponseCode.SUCCESS, "known ones still move"
