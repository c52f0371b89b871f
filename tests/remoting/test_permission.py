"""What each request asks the authorizers, and that nothing happens when they say no."""

from collections.abc import Mapping

import orjson
import pytest
import trio

from martlet.contracts import Identity
from martlet_remoting.handler import TABLE
from martlet_remoting.wire.codes import REQUEST_NAMES, RequestCode, ResponseCode

from .conftest import NO_HEADER, Harness, long_ext, pull_ext, send_ext
from .pop_talk import pop_ext

Asked = tuple[str, str]

BROKER: Asked = ("read", "")
TOPIC: Asked = ("read", "T")
GROUP: Asked = ("read", "%RETRY%G")
PUBLISH: Asked = ("publish", "T")
MANAGE_BROKER: Asked = ("manage", "")
MANAGE_TOPIC: Asked = ("manage", "T")
MANAGE_GROUP: Asked = ("manage", "%RETRY%G")

PLACE: Mapping[str, object] = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": "0",
    "commitOffset": "1",
    "timestamp": "1",
}
HANDLE: Mapping[str, object] = {**PLACE, "extraInfo": "0 1 1 0 0 b 0 0", "offset": "0"}
KEY: Mapping[str, object] = {"topic": "T", "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "9"}
BACK: Mapping[str, object] = {"offset": "0", "group": "G", "delayLevel": "0"}
HEARTBEAT = {
    "clientID": "c",
    "consumerDataSet": [{"groupName": "G", "subscriptionDataSet": [{"topic": "T"}, {"topic": "%RETRY%G"}]}],
    "producerDataSet": [{"groupName": "P"}],
}
LOCK = {
    "clientId": "c",
    "consumerGroup": "G",
    "mqSet": [{"topic": "T", "brokerName": "b", "queueId": n} for n in (0, 1)],
}
ASSIGNMENT = {"consumerGroup": "G", "topic": "T", "clientId": "c", "messageModel": "CLUSTERING", "strategyName": "AVG"}
NEW_TOPIC: Mapping[str, object] = {
    "topic": "T",
    "defaultTopic": "TBW102",
    "readQueueNums": "1",
    "writeQueueNums": "1",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "order": "false",
}
TG: Mapping[str, object] = {"topic": "T", "group": "G"}

# code -> header, body, what is asked
REQUESTS: Mapping[int, tuple[Mapping[str, object], object, list[Asked]]] = {
    RequestCode.SEND_MESSAGE: (long_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_MESSAGE_V2: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_BATCH_MESSAGE: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_REPLY_MESSAGE: (long_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_REPLY_MESSAGE_V2: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.PULL_MESSAGE: (pull_ext("T", 0), b"", [GROUP, TOPIC]),
    RequestCode.LITE_PULL_MESSAGE: (pull_ext("T", 0), b"", [GROUP, TOPIC]),
    RequestCode.BULK_READ: ({"topic": "T", "queueId": "0", "offset": "0"}, b"", [TOPIC]),
    RequestCode.POP_MESSAGE: (pop_ext("T"), b"", [GROUP, TOPIC]),
    RequestCode.NOTIFICATION: (pop_ext("T"), b"", [GROUP, TOPIC]),
    RequestCode.PEEK_MESSAGE: (pop_ext("T"), b"", [GROUP, TOPIC]),
    RequestCode.POLLING_INFO: (pop_ext("T"), b"", [GROUP, TOPIC]),
    RequestCode.ACK_MESSAGE: (HANDLE, b"", [GROUP, TOPIC]),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: ({**HANDLE, "invisibleTime": "1"}, b"", [GROUP, TOPIC]),
    RequestCode.BATCH_ACK_MESSAGE: ({}, {"acks": [{"c": "G", "t": "T", "q": 0, "b": "AQ=="}]}, [GROUP, TOPIC]),
    RequestCode.RECALL_MESSAGE: ({"topic": "T", "recallHandle": "x"}, b"", [PUBLISH]),
    RequestCode.GET_TIMER_METRICS: ({}, b"", [BROKER]),
    RequestCode.LIST_TRANSACTIONS: ({}, b"", [MANAGE_BROKER]),
    RequestCode.LIST_EXTERNAL_TRANSACTIONS: ({}, b"", [MANAGE_BROKER]),
    # Refused without the plugin that holds transactions, before anybody is asked.
    RequestCode.BEGIN_EXTERNAL_TRANSACTIONS: ({}, b"", []),
    RequestCode.STAGE_EXTERNAL_MESSAGES: ({}, b"", []),
    RequestCode.PREPARE_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.COMMIT_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.ABORT_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.END_TRANSACTION: ({}, b"", []),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: ({}, b"", []),
    RequestCode.END_TRANSACTION_AS_ADMIN: ({}, b"", []),
    RequestCode.CONSUMER_SEND_MSG_BACK: (BACK, b"", [GROUP, TOPIC]),
    RequestCode.QUERY_MESSAGE: (KEY, b"", [TOPIC]),
    RequestCode.VIEW_MESSAGE_BY_ID: ({"offset": "0"}, b"", [TOPIC]),
    RequestCode.QUERY_CONSUMER_OFFSET: (PLACE, b"", [GROUP, TOPIC]),
    RequestCode.UPDATE_CONSUMER_OFFSET: (PLACE, b"", [GROUP, TOPIC]),
    RequestCode.GET_MAX_OFFSET: (PLACE, b"", [TOPIC]),
    RequestCode.GET_MIN_OFFSET: (PLACE, b"", [TOPIC]),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: (PLACE, b"", [TOPIC]),
    RequestCode.GET_EARLIEST_MSG_STORETIME: (PLACE, b"", [TOPIC]),
    RequestCode.HEART_BEAT: ({}, HEARTBEAT, [GROUP, TOPIC]),
    RequestCode.UNREGISTER_CLIENT: ({"clientID": "c", "consumerGroup": "G"}, b"", []),
    RequestCode.CHECK_CLIENT_CONFIG: ({}, b"", []),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: (PLACE, b"", [GROUP]),
    RequestCode.LOCK_BATCH_MQ: ({}, LOCK, [GROUP, TOPIC]),
    RequestCode.UNLOCK_BATCH_MQ: ({}, LOCK, [GROUP, TOPIC]),
    RequestCode.QUERY_ASSIGNMENT: ({}, ASSIGNMENT, [GROUP, TOPIC]),
    RequestCode.SET_MESSAGE_REQUEST_MODE: ({}, ASSIGNMENT, [MANAGE_GROUP]),
    RequestCode.UPDATE_AND_CREATE_TOPIC: (NEW_TOPIC, b"", [MANAGE_TOPIC]),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: ({}, {"topicConfigList": [{"topicName": "T"}]}, [MANAGE_TOPIC]),
    RequestCode.DELETE_TOPIC_IN_BROKER: (TG, b"", [MANAGE_TOPIC]),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: ({}, {"groupName": "G"}, [MANAGE_GROUP]),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (
        {},
        {"groupConfigList": [{"groupName": "G"}]},
        [MANAGE_GROUP],
    ),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: ({"groupName": "G"}, b"", [MANAGE_GROUP]),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: ({**TG, "readable": "true"}, b"", [GROUP, MANAGE_GROUP]),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (TG, b"", [MANAGE_GROUP]),
    RequestCode.CLONE_GROUP_OFFSET: ({"srcGroup": "H", "destGroup": "G"}, b"", [MANAGE_GROUP, ("read", "%RETRY%H")]),
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: ({}, b"G=1", [MANAGE_GROUP]),
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: ({}, b"G", [MANAGE_GROUP]),
    RequestCode.GET_CONSUMER_RUNNING_INFO: (PLACE, b"", [MANAGE_GROUP]),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: (PLACE, b"", [MANAGE_GROUP]),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (TG, b"", [MANAGE_GROUP]),
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: (TG, b"", [MANAGE_GROUP]),
    RequestCode.UPDATE_BROKER_CONFIG: ({}, b"", [MANAGE_BROKER]),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: ({}, b"", [MANAGE_BROKER]),
    RequestCode.CLEAN_UNUSED_TOPIC: ({}, b"", [MANAGE_BROKER]),
    RequestCode.DELETE_EXPIRED_COMMITLOG: ({}, b"", [MANAGE_BROKER]),
    RequestCode.GET_ALL_TOPIC_CONFIG: ({}, b"", [BROKER]),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: ({}, b"", [BROKER]),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: ({}, b"", [BROKER]),
    RequestCode.GET_ALL_CONSUMER_OFFSET: ({}, b"", [BROKER]),
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: ({}, b"", [BROKER]),
    RequestCode.GET_BROKER_CONSUME_STATS: ({"isOrder": "false"}, b"", [BROKER]),
    RequestCode.VIEW_BROKER_STATS_DATA: ({"statsName": "TOPIC_PUT_NUMS", "statsKey": "T"}, b"", [BROKER]),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: ({"producerGroup": "P"}, b"", [BROKER]),
    RequestCode.GET_ALL_PRODUCER_INFO: ({}, b"", [BROKER]),
    RequestCode.GET_BROKER_CONFIG: ({}, b"", [BROKER]),
    RequestCode.GET_BROKER_RUNTIME_INFO: ({}, b"", [BROKER]),
    RequestCode.GET_BROKER_HA_STATUS: ({}, b"", [BROKER]),
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO: ({}, b"", [BROKER]),
    RequestCode.GET_TOPIC_CONFIG: (TG, b"", [TOPIC]),
    RequestCode.GET_TOPIC_STATS_INFO: (TG, b"", [TOPIC]),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: (TG, b"", [TOPIC]),
    RequestCode.QUERY_CONSUME_TIME_SPAN: (TG, b"", [TOPIC]),
    RequestCode.QUERY_CONSUME_QUEUE: ({**PLACE, "index": "0", "count": "1"}, b"", [TOPIC]),
    RequestCode.QUERY_CORRECTION_OFFSET: ({**TG, "compareGroup": "G"}, b"", [TOPIC]),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: (TG, b"", [GROUP]),
    RequestCode.GET_CONSUME_STATS: (PLACE, b"", [GROUP]),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: (PLACE, b"", [GROUP]),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: (TG, b"", [GROUP]),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: (TG, b"", [GROUP]),
}
CASES = [(code, ext, body, asked) for code, (ext, body, asked) in REQUESTS.items()]
REFUSALS = [(code, ext, body, no) for code, (ext, body, asked) in REQUESTS.items() for no in asked]


def encoded(body: object) -> bytes:
    return body if isinstance(body, bytes) else orjson.dumps(body)


async def prepared(harness: Harness) -> None:
    """A topic with one message, which is the first of the log, and no group."""
    harness.topic("T")
    await harness.client().ask(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"x")


def test_every_request_that_is_served_is_in_the_table() -> None:
    assert REQUESTS.keys() == TABLE.keys()


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=[str(case[0]) for case in CASES])
async def test_authorizers_are_asked_for_what_a_request_touches(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, wanted: list[Asked]
) -> None:
    await prepared(harness)
    asked: list[Asked] = []

    def allow(identity: Identity, action: str, topic: str) -> bool:
        asked.append((action, topic))
        return True

    harness.broker.authorizers = (allow,)
    harness.client().send(code, ext, encoded(body))
    await trio.testing.wait_all_tasks_blocked()
    assert list(dict.fromkeys(asked)) == wanted


@pytest.mark.parametrize(
    ("code", "ext", "body", "no"), REFUSALS, ids=[f"{case[0]}-{case[3][0]}-{case[3][1]}" for case in REFUSALS]
)
async def test_one_no_is_enough_and_nothing_is_made(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, no: Asked
) -> None:
    await prepared(harness)
    end = harness.store.appended
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != no,)
    answer = await harness.client().ask(code, ext, encoded(body))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "'' may not " in str(answer.remark)
    assert (harness.broker.groups.get("G"), harness.state.members.group("G")) == (None, None)
    assert (harness.state.members.producers, len(harness.state.locks)) == ({}, 0)
    assert harness.store.appended == end


QUERIES = [case[:3] for case in CASES if REQUEST_NAMES[case[0]].startswith(("GET_", "QUERY_", "VIEW_"))]


@pytest.mark.parametrize(("code", "ext", "body"), QUERIES, ids=[str(case[0]) for case in QUERIES])
async def test_no_query_creates_a_group_or_a_topic(
    harness: Harness, code: int, ext: Mapping[str, object], body: object
) -> None:
    """A dashboard asks about groups that were deleted, and a tool about mistyped ones."""
    await prepared(harness)
    topics = {topic.name for topic in harness.broker.topics}
    harness.client().send(code, ext, encoded(body))
    await trio.testing.wait_all_tasks_blocked()
    assert harness.broker.groups.get("G") is None
    assert {topic.name for topic in harness.broker.topics} == topics


async def test_without_authorizers_nobody_is_asked(harness: Harness) -> None:
    await prepared(harness)
    client = harness.client()
    for code in (RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ, RequestCode.GET_ALL_TOPIC_CONFIG):
        ext, body, _ = REQUESTS[code]
        assert (await client.ask(code, ext or NO_HEADER, encoded(body))).code == ResponseCode.SUCCESS
