"""Administration of topics and groups over remoting."""

import orjson
import pytest

from martlet.message import Message
from martlet.tables.groups import Group
from martlet_remoting.handlers.admin.topics import alter_attributes, parse_attributes
from martlet_remoting.handlers.context import Declined
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, pull_ext, send_ext

CREATE = RequestCode.UPDATE_AND_CREATE_TOPIC


def topic_ext(name: str, **more: object) -> dict[str, object]:
    return {
        "topic": name,
        "defaultTopic": "TBW102",
        "readQueueNums": "3",
        "writeQueueNums": "2",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        **more,
    }


async def refused(client: FakeClient, code: int, wanted: int, body: bytes = b"", **ext: object) -> str:
    answer = await client.ask(code, ext, body)
    assert answer.code == wanted
    assert answer.remark
    return answer.remark


async def test_topic_is_created_changed_and_shown(harness: Harness) -> None:
    client = harness.client()
    assert (await client.ask(CREATE, topic_ext("T", attributes="+message.type=FIFO"))).code == 0
    shown = await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "T"})
    assert shown.body == (
        b'{"attributes":{"message.type":"FIFO"},"order":false,"perm":6,"readQueueNums":3,'
        b'"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":2}'
    )
    await client.ask(CREATE, topic_ext("T", perm="4", order="true"))
    topic = harness.broker.topics.get("T")
    assert topic is not None
    assert (topic.perm, topic.order, topic.attributes) == (4, True, {"message.type": "FIFO"})


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": ""},
        {"topic": "no blanks"},
        {"topic": "x" * 128},
        {"topic": "TBW102"},
        {"topic": "rmq_sys_x"},
        {"topic": "DefaultCluster"},
        {"perm": "99"},
        {"readQueueNums": "-1"},
        {"attributes": "+message.type=MIXED"},
    ],
)
async def test_topic_that_cannot_be_is_refused(harness: Harness, changes: dict[str, str]) -> None:
    before = len(harness.broker.topics)
    answer = await harness.client().ask(CREATE, topic_ext("T") | changes)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark
    assert len(harness.broker.topics) == before


# What a RocketMQ 5.5.0 broker answers with code 1, and how its remark begins; empty where ours has other words.
BAD_ATTRIBUTES = [
    ("+nonsense=1", "unsupported key: nonsense"),
    ("nonsense=1", "add/alter attribute format is wrong: nonsense"),
    ("+message.type", "delete attribute format is wrong: +message.type"),
    ("+message.type=WRONG", "value is not in set: ["),
    ("+message.type=NORMAL,+message.type=FIFO", "key duplication: +message.type"),
    ("+reserve.time=soon", ""),
    ("+reserve.time=1.5", ""),
    ("+reserve.time=-2", "value is not in range(-1, 9223372036854775807)"),
    ("+reserve.time=9223372036854775808", "value is not in range(-1, 9223372036854775807)"),
    ("+queue.type=BatchCQ", ""),
]


@pytest.mark.parametrize(
    ("attributes", "remark"),
    [*BAD_ATTRIBUTES, ("-message.type", "only add attribute is supported while creating topic. key: message.type")],
)
async def test_a_topic_with_an_attribute_that_cannot_be_is_not_made(
    harness: Harness, attributes: str, remark: str
) -> None:
    answer = await harness.client().ask(CREATE, topic_ext("T", attributes=attributes))
    assert (answer.code, str(answer.remark)[: len(remark)]) == (ResponseCode.SYSTEM_ERROR, remark)
    assert answer.remark
    assert harness.broker.topics.get("T") is None


@pytest.mark.parametrize(
    ("attributes", "remark"), [*BAD_ATTRIBUTES, ("-message.type", "attempt to delete a nonexistent key: message.type")]
)
async def test_an_attribute_that_cannot_be_changes_nothing(harness: Harness, attributes: str, remark: str) -> None:
    client = harness.client()
    assert (await client.ask(CREATE, topic_ext("T"))).code == 0
    before = harness.broker.topics.get("T")
    answer = await client.ask(CREATE, topic_ext("T", attributes=attributes) | {"readQueueNums": "9"})
    assert (answer.code, str(answer.remark)[: len(remark)]) == (ResponseCode.SYSTEM_ERROR, remark)
    assert harness.broker.topics.get("T") == before


async def test_messages_of_a_topic_expire_after_its_reserve_time(harness: Harness) -> None:
    client, broker = harness.client(), harness.broker
    assert (await client.ask(CREATE, topic_ext("T", attributes="+reserve.time=2"))).code == 0
    assert (await client.ask(CREATE, topic_ext("U", attributes="+reserve.time=-1"))).code == 0
    queue_of = {name: harness.store.queue(name, 0) for name in "TU"}
    for _ in range(2):
        for name in "TU":
            broker.publish(Message(name, b"x", queue_id=0))
        harness.store.committer.commit()
        await harness.store.flusher.flush()
        harness.clock.ms += 3 * 3_600_000
        await harness.store.upkeep.topic_retention.sweep()
    assert (queue_of["T"].first_offset, queue_of["U"].first_offset) == (2, 0)
    answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))
    assert answer.code == ResponseCode.PULL_OFFSET_MOVED
    assert answer.ext["nextBeginOffset"] == answer.ext["minOffset"] == "2"
    answer = await client.ask(RequestCode.GET_MIN_OFFSET, {"topic": "T", "queueId": "0"})
    assert answer.ext["offset"] == "2"


async def test_a_reserve_time_beyond_the_retention_of_the_log_is_refused(harness: Harness) -> None:
    client = harness.client()
    answer = await client.ask(CREATE, topic_ext("T", attributes="+reserve.time=73"))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "share one log, which keeps them for 72; set store.file_reserved_hours higher" in str(answer.remark)
    assert harness.broker.topics.get("T") is None
    assert (await client.ask(CREATE, topic_ext("T", attributes="+reserve.time=72"))).code == 0
    assert (await client.ask(CREATE, topic_ext("T", attributes="-reserve.time"))).code == 0
    assert dict(harness.store.upkeep.topic_retention.topics) == {}


def test_attributes_are_set_and_removed_by_sign() -> None:
    assert parse_attributes("+a=b, -c ,,+d=e=f") == {"+a": "b", "-c": "", "+d": "e=f"}
    held = {"message.type": "FIFO", "reserve.time": "5"}
    changed = alter_attributes(held, {"-message.type": "", "+reserve.time": "9"}, new=False)
    assert changed == {"reserve.time": "9"}
    assert held == {"message.type": "FIFO", "reserve.time": "5"}
    with pytest.raises(Declined, match="unchangeable"):
        alter_attributes(held, {"+queue.type": "BatchCQ"}, new=False)


async def test_a_number_that_does_not_fit_changes_no_topic(harness: Harness) -> None:
    harness.topic("T", 2, 4)
    changed = {"topicName": "T", "readQueueNums": 2, "writeQueueNums": 1 << 63, "perm": "9999999999999999999"}
    body = orjson.dumps({"topicConfigList": [changed]})
    answer = await harness.client().ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
    assert (answer.code, "64 bits" in str(answer.remark)) == (ResponseCode.INVALID_PARAMETER, True)
    found = harness.broker.topics.get("T")
    assert found is not None
    assert (found.write_queues, found.perm) == (2, 4)


async def test_many_topics_are_made_at_once_or_none(harness: Harness) -> None:
    client = harness.client()
    code = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
    bad = {"topicConfigList": [{"topicName": "A"}, {"topicName": "no blanks"}]}
    assert (await client.ask(code, body=orjson.dumps(bad))).code == ResponseCode.INVALID_PARAMETER
    assert harness.broker.topics.get("A") is None
    good = {"topicConfigList": [{"topicName": "A"}, {"topicName": "B", "readQueueNums": "2", "writeQueueNums": 1}]}
    assert (await client.ask(code, body=orjson.dumps(good))).code == 0
    made = [harness.broker.topics.get(name) for name in "AB"]
    assert [(t.read_queues, t.write_queues, t.perm) for t in made if t is not None] == [(16, 16, 6), (2, 1, 6)]
    assert (await client.ask(code, body=b"no json")).code == ResponseCode.SYSTEM_ERROR


async def test_deleted_topic_takes_messages_and_offsets_along(harness: Harness) -> None:
    client = harness.client()
    harness.topic("T")
    await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"body")
    harness.broker.groups.offsets.commit("G", "T", 0, 1)
    assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})).code == 0
    assert harness.broker.topics.get("T") is None
    assert harness.broker.groups.offsets.get("G", "T", 0) == -1
    assert harness.store.queues.find("T", 0) is None
    assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})).code == 0
    for name in ("", "TBW102", "SCHEDULE_TOPIC_XXXX"):
        await refused(client, RequestCode.DELETE_TOPIC_IN_BROKER, ResponseCode.INVALID_PARAMETER, topic=name)


async def test_unused_topics_are_cleaned_from_the_store(harness: Harness) -> None:
    client = harness.client()
    for name in ("T", "U"):
        harness.topic(name)
        await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext(name), b"body")
    del harness.broker.topics._table["U"]
    assert (await client.ask(RequestCode.CLEAN_UNUSED_TOPIC)).code == 0
    assert harness.store.queues.find("U", 0) is None
    assert harness.store.queues.find("T", 0) is not None


async def test_all_topics_come_whole_or_in_pages(harness: Harness) -> None:
    client = harness.client()
    for name in ("A", "B", "C"):
        harness.topic(name)
    answer = await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
    whole = orjson.loads(answer.body)
    assert answer.ext == {"totalTopicNum": "4"}
    assert list(whole["topicConfigTable"]) == ["TBW102", "A", "B", "C"], "in the order in which they were made"
    assert set(whole) == {
        "dataVersion",
        "mappingDataVersion",
        "topicConfigTable",
        "topicQueueMappingDetailMap",
        "topicQueueMappingInfoMap",
    }
    version = orjson.dumps(whole["dataVersion"]).decode()
    page = {"topicSeq": "1", "maxTopicNum": "2", "dataVersion": version}
    answer = await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG, page)
    assert list(orjson.loads(answer.body)["topicConfigTable"]) == ["A", "B"]
    for stale in ('{"counter":99}', "nonsense"):
        answer = await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG, page | {"dataVersion": stale})
        assert list(orjson.loads(answer.body)["topicConfigTable"]) == ["TBW102", "A"]


async def test_system_topics_are_named(harness: Harness) -> None:
    answer = await harness.client().ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    names = orjson.loads(answer.body)["topicList"]
    assert {"TBW102", "DefaultCluster", "martlet", "OFFSET_MOVED_EVENT"} <= set(names)
    assert len(names) == len(set(names))


async def test_unknown_topic_and_group(harness: Harness) -> None:
    client = harness.client()
    harness.broker.groups.auto_create = False
    for code in RequestCode.GET_TOPIC_CONFIG, RequestCode.GET_TOPIC_STATS_INFO:
        assert "nope" in await refused(client, code, ResponseCode.TOPIC_NOT_EXIST, topic="nope")
    code = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG
    assert "nope" in await refused(client, code, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, group="nope")


# groups


def group_body(**fields: object) -> bytes:
    return orjson.dumps({"groupName": "G", "retryMaxTimes": 3, "groupRetryPolicy": {"type": "CUSTOMIZED"}, **fields})


async def test_group_is_created_and_shown(harness: Harness) -> None:
    client = harness.client()
    body = group_body(attributes={"+priority.factor": "7"}, subscriptionDataSet=[])
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
    assert harness.broker.groups.get("G") == Group("G", retry_max_times=3, attributes={"priority.factor": "7"})
    shown = await client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "G"})
    assert orjson.loads(shown.body)["retryMaxTimes"] == 3
    everything = await client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    table = orjson.loads(everything.body)
    assert "G" in table["subscriptionGroupTable"]
    assert everything.ext == {"totalGroupNum": str(len(table["subscriptionGroupTable"]))}


async def test_attributes_of_a_group_are_changed_one_by_one(harness: Harness) -> None:
    client, code = harness.client(), RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    for attributes, held in (
        ({"+priority.factor": "100"}, {"priority.factor": "100"}),
        ({}, {"priority.factor": "100"}),
        (None, {"priority.factor": "100"}),
        ({"+priority.factor": "0"}, {"priority.factor": "0"}),
        ({"-priority.factor": ""}, {}),
    ):
        assert (await client.ask(code, body=group_body(attributes=attributes))).code == 0
        group = harness.broker.groups.get("G")
        assert group is not None
        assert group.attributes == held


@pytest.mark.parametrize(
    ("attributes", "remark"),
    [
        ({"+nobody.knows": "1"}, "unsupported key: nobody.knows; attributes are priority.factor"),
        ({"priority.factor": "1"}, "wrong format key: 'priority.factor'"),
        ({"+priority.factor": "101"}, "value is not in range(0, 100)"),
        ({"+priority.factor": "x"}, "attribute priority.factor is 'x'; it must be a number"),
        ({"-priority.factor": ""}, "only add attribute is supported while creating"),
    ],
)
async def test_a_group_with_an_attribute_that_cannot_be_is_not_made(
    harness: Harness, attributes: dict[str, str], remark: str
) -> None:
    code, body = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group_body(attributes=attributes)
    answer = await harness.client().ask(code, body=body)
    assert (answer.code, str(answer.remark)[: len(remark)]) == (ResponseCode.SYSTEM_ERROR, remark)
    assert harness.broker.groups.get("G") is None


async def test_groups_come_in_pages(harness: Harness) -> None:
    client = harness.client()
    harness.broker.groups.update(Group("AAA"))
    version = orjson.dumps(harness.broker.groups.version.as_json()).decode()
    page = {"groupSeq": "0", "maxGroupNum": "1", "dataVersion": version}
    answer = await client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, page)
    assert list(orjson.loads(answer.body)["subscriptionGroupTable"]) == ["TOOLS_CONSUMER"]
    last = str(int(str(answer.ext["totalGroupNum"])) - 1)
    answer = await client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, page | {"groupSeq": last})
    assert list(orjson.loads(answer.body)["subscriptionGroupTable"]) == ["AAA"]


@pytest.mark.parametrize("body", [b"{}", group_body(groupName="no blanks"), group_body(retryMaxTimes="x")])
async def test_group_that_cannot_be_is_refused(harness: Harness, body: bytes) -> None:
    await refused(
        harness.client(), RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, ResponseCode.INVALID_PARAMETER, body
    )
    assert harness.broker.groups.get("G") is None


async def test_many_groups_are_made_at_once_or_none(harness: Harness) -> None:
    client = harness.client()
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    bad = b'{"groupConfigList":[{"groupName":"A"},{"groupName":"no blanks"}]}'
    await refused(client, code, ResponseCode.INVALID_PARAMETER, bad)
    assert harness.broker.groups.get("A") is None
    await client.ask(code, body=b'{"groupConfigList":[{"groupName":"A"},{"groupName":"B"}]}')
    assert None not in (harness.broker.groups.get("A"), harness.broker.groups.get("B"))


@pytest.mark.parametrize(("flag", "left"), [({}, 5), ({"cleanOffset": "true"}, -1), ({"removeOffset": "true"}, -1)])
async def test_deleted_group_keeps_its_offsets_unless_they_are_cleaned(
    harness: Harness, flag: dict[str, str], left: int
) -> None:
    harness.broker.groups.update(Group("G"))
    harness.broker.groups.offsets.commit("G", "T", 0, 5)
    answer = await harness.client().ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "G", **flag})
    assert answer.code == 0
    assert harness.broker.groups.get("G") is None
    assert harness.broker.groups.offsets.get("G", "T", 0) == left


async def test_group_is_forbidden_a_topic(harness: Harness) -> None:
    client = harness.client()
    ext = {"group": "G", "topic": "T"}

    async def ask(**more: object) -> bytes:
        return (await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, {**ext, **more})).body

    assert await ask() == b'{"group":"G","readable":true,"topic":"T"}'
    assert await ask(readable="false") == b'{"group":"G","readable":false,"topic":"T"}'
    assert harness.broker.groups.is_forbidden("G", "T")
    assert await ask(readable="true") == b'{"group":"G","readable":true,"topic":"T"}'


async def test_a_client_that_may_not_manage_changes_nothing(harness: Harness) -> None:
    harness.topic("T")
    harness.broker.authorizers = (lambda identity, action, topic: action != "manage",)
    client = harness.client()
    requests = [
        Command(CREATE, topic_ext("X")),
        Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=b'{"topicConfigList":[{"topicName":"X"}]}'),
        Command(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
        Command(RequestCode.CLEAN_UNUSED_TOPIC),
        Command(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"X"}'),
        Command(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "TOOLS_CONSUMER"}),
        Command(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": "X", "topic": "T", "readable": "false"}),
        Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"autoCreateTopicEnable=false"),
        Command(RequestCode.DELETE_EXPIRED_COMMITLOG),
        Command(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": "T", "group": "TOOLS_CONSUMER"}),
        Command(RequestCode.CLONE_GROUP_OFFSET, {"srcGroup": "A", "destGroup": "B"}),
        Command(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "c"}),
        Command(RequestCode.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "G", "clientId": "c"}),
        Command(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "T", "group": "G"}),
    ]
    for request in requests:
        answer = await client.ask(request.code, request.ext, request.body)
        assert answer.code == ResponseCode.NO_PERMISSION, request
    assert harness.broker.topics.get("X") is None
    assert harness.broker.topics.get("T") is not None
    assert harness.broker.groups.get("X") is None
