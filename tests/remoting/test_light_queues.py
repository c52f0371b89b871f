"""RocketMQ's light message queues over the protocol: `INNER_MULTI_DISPATCH` of producers, pulls from light topics."""

import json
from collections.abc import Sequence

import pytest
from trio.testing import MockClock

from martlet.message import Record
from martlet.records.codec import decode_records
from martlet.testing.stores import drain
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import FakeClient, Harness, OpenHarness, long_ext, pull_ext, send_ext
from .pop_talk import ack_ext, pop, pop_ext
from .test_send_runs import receive, request, unique

PULL = RequestCode.PULL_MESSAGE
V2 = RequestCode.SEND_MESSAGE_V2
SUSPEND = "6"


def properties(*names: str, number: int = 1) -> str:
    return f"{unique(number)}INNER_MULTI_DISPATCH\x01{','.join(f'%LMQ%{name}' for name in names)}\x02TAGS\x01A\x02"


@pytest.fixture
async def light(open_harness: OpenHarness) -> Harness:
    """A harness with light queues."""
    return await with_light_queues(open_harness)


async def with_light_queues(open_harness: OpenHarness, **store: object) -> Harness:
    harness = await open_harness(store={"flush": "async", **store}, light_queues=True)
    routers = RemotingPlugin(harness.config).martlet_routers(harness.broker)
    harness.broker.set_stages((), tuple(("remoting", router) for router in routers))
    harness.topic("T")
    return harness


async def pulled(client: FakeClient, name: str, offset: int = 0) -> list[Record]:
    answer = await client.ask(PULL, pull_ext(f"%LMQ%{name}", offset))
    assert answer.code == 0, answer.remark
    return decode_records(answer.body)


def places(records: Sequence[Record]) -> list[tuple[int, int, bytes]]:
    return [(record.queue_id, record.queue_offset, record.body) for record in records]


async def test_a_message_is_pulled_from_every_light_queue_that_it_names(light: Harness) -> None:
    client = light.client()
    for number, names in enumerate((["a"], ["a", "b"], ["b"])):
        answer = await client.ask(V2, send_ext("T", number, properties(*names)), b"%d" % number)
        assert (answer.code, answer.ext["queueId"], answer.ext["queueOffset"]) == (0, str(number), "0")
    await client.ask(V2, send_ext("T", 0, unique(9)), b"plain")
    assert places(await pulled(client, "a")) == [(0, 0, b"0"), (0, 1, b"1")]
    assert places(await pulled(client, "b")) == [(0, 0, b"1"), (0, 1, b"2")]
    answer = await client.ask(PULL, pull_ext("%LMQ%b", 1))
    assert (answer.ext["nextBeginOffset"], answer.ext["minOffset"], answer.ext["maxOffset"]) == ("2", "0", "2")
    (record,) = decode_records(answer.body)
    assert (record.topic, record.property("INNER_MULTI_QUEUE_OFFSET")) == ("T", "1")
    tagged = await client.ask(PULL, pull_ext("%LMQ%a", 0, subscription="B"))
    assert tagged.code == ResponseCode.PULL_RETRY_IMMEDIATELY


async def test_batches_and_long_field_names_name_light_queues_as_well(light: Harness) -> None:
    client = light.client()
    batch = encode_batch([BatchMessage(b"%d" % n, properties("a", number=n).encode()) for n in range(3)])
    assert (await client.ask(V2, send_ext("T", 1, m="true"), batch)).code == 0
    assert (await client.ask(RequestCode.SEND_MESSAGE, long_ext("T", properties=properties("a")), b"3")).code == 0
    assert places(await pulled(client, "a")) == [(0, n, b"%d" % n) for n in range(4)]


async def test_a_pull_waits_at_a_light_queue_that_nobody_wrote_yet(light: Harness, autojump_clock: MockClock) -> None:
    client = light.client()
    for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET):
        assert (await client.ask(code, {"topic": "%LMQ%new", "queueId": "0"})).ext["offset"] == "0"
    waiting = client.send(PULL, pull_ext("%LMQ%new", 0, sysFlag=SUSPEND))
    await light.step()
    assert waiting not in client.answers
    await client.ask(V2, send_ext("T", 0, properties("other")), b"other")
    assert waiting not in client.answers
    await client.ask(V2, send_ext("T", 0, properties("new")), b"new")
    await light.step()
    assert places(decode_records(client.answers.pop(waiting).body)) == [(0, 0, b"new")]


@pytest.mark.parametrize("group", ["G", "%LMQ%g"])
async def test_offsets_of_a_light_queue_are_committed_and_asked_for(light: Harness, group: str) -> None:
    client = light.client()
    await client.ask(V2, send_ext("T", 0, properties("a")), b"x")
    await client.heartbeat("c", group, "%LMQ%a")
    assert (await client.ask(PULL, pull_ext("%LMQ%a", 0, consumerGroup=group))).code == 0
    commit = {"consumerGroup": group, "topic": "%LMQ%a", "queueId": "0", "commitOffset": "1"}
    assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, commit)
    assert (answer.code, answer.ext["offset"]) == (0, "1")
    answer = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, {**commit, "queueId": "1"})
    assert answer.code != 0


async def test_a_message_given_back_keeps_to_its_retry_topic(light: Harness) -> None:
    client = light.client()
    await client.ask(V2, send_ext("T", 0, properties("a")), b"x")
    (record,) = await pulled(client, "a")
    await client.heartbeat("c", "G", "%LMQ%a")
    back = {"group": "G", "offset": str(record.position), "delayLevel": "0", "originTopic": "%LMQ%a"}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
    (retry,) = drain(light.store, light.store.queue("%RETRY%G", 0))
    assert retry == b"x"
    assert len(await pulled(client, "a")) == 1
    data = light.store.readers.read(light.store.queue("%RETRY%G", 0), 0, 1, 10**6).pieces[0]
    (given_back,) = decode_records(data)
    assert given_back.property("INNER_MULTI_QUEUE_OFFSET") == ""


@pytest.mark.parametrize("denied", ["T", "%LMQ%a", "%LMQ%b"])
async def test_whoever_may_read_a_light_queue_may_give_its_messages_back(light: Harness, denied: str) -> None:
    client = light.client()
    await client.ask(V2, send_ext("T", 0, properties("a")), b"x")
    await client.ask(V2, send_ext("T", 0, unique(2)), b"in T alone")
    await client.heartbeat("c", "G", "%LMQ%a")
    light.broker.authorizers = (lambda identity, action, name: (action, name) != ("read", denied),)
    light.broker.rules.changed()
    codes: list[int] = []
    for queue_offset in (0, 1):
        position = light.store.queues.position_at(light.store.queue("T", 0), queue_offset)
        back = {"group": "G", "offset": str(position), "delayLevel": "0", "originTopic": "%LMQ%a"}
        codes.append((await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code)
    assert codes == [0, ResponseCode.NO_PERMISSION if denied == "T" else 0]


async def test_light_topics_that_cannot_be_are_refused_with_the_reason(open_harness: OpenHarness) -> None:
    light = await with_light_queues(open_harness, light_queues_max=1)
    client = light.client()
    named = f"{unique(1)}INNER_MULTI_DISPATCH\x01other\x02"
    answer = await client.ask(V2, send_ext("T", 0, named), b"x")
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "'other' in INNER_MULTI_DISPATCH is no light topic" in str(answer.remark)
    answer = await client.ask(V2, send_ext("T", 0, properties("a", "b")), b"x")
    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert "store.light_queues_max" in str(answer.remark)
    answer = await client.ask(V2, send_ext("%LMQ%a", 0, unique(1)), b"x")
    assert answer.code != 0
    assert await pulled_count(client, "T") == 0


async def pulled_count(client: FakeClient, topic: str) -> int:
    answer = await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": "0"})
    return int(str(answer.ext["offset"]))


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in a run"])
async def test_without_light_queues_the_property_is_kept_and_means_nothing(harness: Harness, together: bool) -> None:
    harness.topic("T")
    client = harness.client()
    forged = properties("a") + "INNER_MULTI_QUEUE_OFFSET\x0117\x02"
    if together:
        await client.ask(V2, send_ext("T", 0, unique(7)), b"first")
        receive(client, b"".join(request(n, send_ext("T", 0, forged)) for n in range(50, 53)))
        await harness.step()
        assert [client.answers.pop(n).code for n in range(50, 53)] == [0, 0, 0]
    else:
        assert (await client.ask(V2, send_ext("T", 0, forged), b"x")).code == 0
    answer = await client.ask(PULL, pull_ext("T", 0))
    record = decode_records(answer.body)[-1]
    assert record.property("INNER_MULTI_DISPATCH") == "%LMQ%a"
    assert record.property("INNER_MULTI_QUEUE_OFFSET") == ""
    answer = await client.ask(PULL, pull_ext("%LMQ%a", 0))
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert harness.store.queues.light == 0


async def test_the_broker_shares_out_the_one_queue_of_a_light_topic(light: Harness) -> None:
    client = light.client()
    await client.heartbeat("c", "G", "%LMQ%a")
    question = {
        "topic": "%LMQ%a",
        "consumerGroup": "G",
        "clientId": "c",
        "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    }
    answer = await client.ask(RequestCode.QUERY_ASSIGNMENT, body=json.dumps(question).encode())
    (assignment,) = json.loads(answer.body)["messageQueueAssignments"]
    assert assignment["messageQueue"] == {"brokerName": "martlet", "queueId": 0, "topic": "%LMQ%a"}


async def test_a_light_topic_is_deleted_like_any_other(light: Harness) -> None:
    client = light.client()
    await client.ask(V2, send_ext("T", 0, properties("a", "b")), b"x")
    waiting = client.send(PULL, pull_ext("%LMQ%a", 1, sysFlag=SUSPEND))
    await light.step()
    assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "%LMQ%a"})).code == 0
    await light.step()
    assert client.answers.pop(waiting).code == ResponseCode.TOPIC_NOT_EXIST
    assert places(await pulled(client, "b")) == [(0, 0, b"x")]
    await client.ask(V2, send_ext("T", 0, properties("a")), b"again")
    assert places(await pulled(client, "a")) == [(0, 0, b"again")]


async def test_light_queues_can_be_popped(light: Harness) -> None:
    client = light.client()
    assert (await client.ask(RequestCode.POP_MESSAGE, pop_ext("%LMQ%a"))).code == 210
    for number, names in enumerate((["b"], ["a", "b"], ["a"])):
        await client.ask(V2, send_ext("T", number, properties(*names)), b"%d" % number)
    one, two = await pop(client, "%LMQ%a")
    assert [(message.queue_id, message.offset, message.body) for message in (one, two)] == [(0, 0, b"1"), (0, 1, b"2")]
    for message in (one, two):
        answer = await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message, topic="%LMQ%a"))
        assert (answer.code, answer.remark) == (0, None)
    assert light.broker.groups.offsets.get("G", "%LMQ%a", 0) == 2
