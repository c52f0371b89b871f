"""What each request asks the authorizers, and that nothing happens when they say no."""

from collections.abc import Mapping

import orjson
import pytest
import trio

from martlet.contracts import AccessControl, Network, Question, Verdict
from martlet_remoting.handler import TABLE
from martlet_remoting.wire.codes import REQUEST_NAMES, RequestCode, ResponseCode

from .access_control import FakeAccessControl
from .conftest import NO_HEADER, Harness, long_ext, pull_ext, send_ext
from .pop_talk import pop_ext

# What is asked, as "action kind:name"; "a|b kind:name" means that each of the actions is enough.
LIST_BROKER = "list cluster"
GET_BROKER = "get cluster"
UPDATE_BROKER = "update cluster"
PUBLISH = "publish topic:T"
READ_TOPIC = "subscribe topic:T"
READ_GROUP = "subscribe group:G"
SHOW_TOPIC = "get|subscribe topic:T"
SHOW_MESSAGE = "subscribe|get topic:T"
SHOW_GROUP = "get|subscribe group:G"
CHANGE_TOPIC = "create|update topic:T"
CREATE_GROUP = "create group:G"

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
ACL = {"policies": [{"entries": [{"resource": "*", "actions": ["All"], "decision": "Allow"}]}]}
TG: Mapping[str, object] = {"topic": "T", "group": "G"}

# code -> header, body, what is asked
REQUESTS: Mapping[int, tuple[Mapping[str, object], object, list[str]]] = {
    RequestCode.SEND_MESSAGE: (long_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_MESSAGE_V2: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_BATCH_MESSAGE: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_REPLY_MESSAGE: (long_ext("T"), b"x", [PUBLISH]),
    RequestCode.SEND_REPLY_MESSAGE_V2: (send_ext("T"), b"x", [PUBLISH]),
    RequestCode.PULL_MESSAGE: (pull_ext("T", 0), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.LITE_PULL_MESSAGE: (pull_ext("T", 0), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.BULK_READ: ({"topic": "T", "queueId": "0", "offset": "0"}, b"", [READ_TOPIC]),
    RequestCode.POP_MESSAGE: (pop_ext("T"), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.NOTIFICATION: (pop_ext("T"), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.PEEK_MESSAGE: (pop_ext("T"), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.POLLING_INFO: (pop_ext("T"), b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.ACK_MESSAGE: (HANDLE, b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: ({**HANDLE, "invisibleTime": "1"}, b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.BATCH_ACK_MESSAGE: (
        {},
        {"acks": [{"c": "G", "t": "T", "q": 0, "b": "AQ=="}]},
        [READ_GROUP, READ_TOPIC],
    ),
    RequestCode.RECALL_MESSAGE: ({"topic": "T", "recallHandle": "x"}, b"", [PUBLISH]),
    RequestCode.GET_TIMER_METRICS: ({}, b"", [GET_BROKER]),
    RequestCode.LIST_TRANSACTIONS: ({}, b"", [UPDATE_BROKER]),
    RequestCode.LIST_EXTERNAL_TRANSACTIONS: ({}, b"", [UPDATE_BROKER]),
    # Refused without the plugin that holds transactions, before anybody is asked.
    RequestCode.BEGIN_EXTERNAL_TRANSACTIONS: ({}, b"", []),
    RequestCode.STAGE_EXTERNAL_MESSAGES: ({}, b"", []),
    RequestCode.PREPARE_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.COMMIT_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.ABORT_EXTERNAL_TRANSACTION: ({}, b"", []),
    RequestCode.END_TRANSACTION: ({}, b"", []),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: ({}, b"", []),
    RequestCode.END_TRANSACTION_AS_ADMIN: ({}, b"", []),
    RequestCode.CONSUMER_SEND_MSG_BACK: (BACK, b"", [SHOW_GROUP, READ_TOPIC, READ_GROUP]),
    RequestCode.QUERY_MESSAGE: (KEY, b"", [SHOW_MESSAGE]),
    RequestCode.VIEW_MESSAGE_BY_ID: ({"offset": "0"}, b"", [SHOW_MESSAGE]),
    RequestCode.QUERY_CONSUMER_OFFSET: (PLACE, b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.UPDATE_CONSUMER_OFFSET: (PLACE, b"", [READ_GROUP, READ_TOPIC]),
    RequestCode.GET_MAX_OFFSET: (PLACE, b"", [SHOW_TOPIC]),
    RequestCode.GET_MIN_OFFSET: (PLACE, b"", [SHOW_TOPIC]),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: (PLACE, b"", [SHOW_TOPIC]),
    RequestCode.GET_EARLIEST_MSG_STORETIME: (PLACE, b"", [SHOW_TOPIC]),
    RequestCode.HEART_BEAT: ({}, HEARTBEAT, [READ_GROUP, READ_TOPIC, SHOW_GROUP]),
    RequestCode.UNREGISTER_CLIENT: ({"clientID": "c", "consumerGroup": "G"}, b"", []),
    RequestCode.CHECK_CLIENT_CONFIG: ({}, b"", []),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: (PLACE, b"", [SHOW_GROUP]),
    RequestCode.LOCK_BATCH_MQ: ({}, LOCK, [READ_GROUP, READ_TOPIC]),
    RequestCode.UNLOCK_BATCH_MQ: ({}, LOCK, [READ_GROUP, READ_TOPIC]),
    RequestCode.QUERY_ASSIGNMENT: ({}, ASSIGNMENT, [READ_GROUP, READ_TOPIC]),
    RequestCode.SET_MESSAGE_REQUEST_MODE: ({}, ASSIGNMENT, [CREATE_GROUP]),
    RequestCode.UPDATE_AND_CREATE_TOPIC: (NEW_TOPIC, b"", [CHANGE_TOPIC]),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: ({}, {"topicConfigList": [{"topicName": "T"}]}, [CHANGE_TOPIC]),
    RequestCode.DELETE_TOPIC_IN_BROKER: (TG, b"", ["delete topic:T"]),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: ({}, {"groupName": "G"}, [CREATE_GROUP]),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (
        {},
        {"groupConfigList": [{"groupName": "G"}]},
        [CREATE_GROUP],
    ),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: ({"groupName": "G"}, b"", ["delete group:G"]),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: ({**TG, "readable": "true"}, b"", [SHOW_GROUP, CREATE_GROUP]),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (TG, b"", [CREATE_GROUP]),
    RequestCode.CLONE_GROUP_OFFSET: ({"srcGroup": "H", "destGroup": "G"}, b"", [CREATE_GROUP, "get|subscribe group:H"]),
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: ({}, b"G=1", [CREATE_GROUP]),
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: ({}, b"G", [CREATE_GROUP]),
    RequestCode.GET_CONSUMER_RUNNING_INFO: (PLACE, b"", [CREATE_GROUP]),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: (PLACE, b"", [CREATE_GROUP]),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (TG, b"", [CREATE_GROUP]),
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: (TG, b"", [CREATE_GROUP]),
    RequestCode.UPDATE_BROKER_CONFIG: ({}, b"", [UPDATE_BROKER]),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: ({}, b"", [UPDATE_BROKER]),
    RequestCode.CLEAN_UNUSED_TOPIC: ({}, b"", [UPDATE_BROKER]),
    RequestCode.DELETE_EXPIRED_COMMITLOG: ({}, b"", [UPDATE_BROKER]),
    RequestCode.GET_ALL_TOPIC_CONFIG: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_ALL_CONSUMER_OFFSET: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_BROKER_CONSUME_STATS: ({"isOrder": "false"}, b"", [LIST_BROKER]),
    RequestCode.VIEW_BROKER_STATS_DATA: ({"statsName": "TOPIC_PUT_NUMS", "statsKey": "T"}, b"", [GET_BROKER]),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: ({"producerGroup": "P"}, b"", [LIST_BROKER]),
    RequestCode.GET_ALL_PRODUCER_INFO: ({}, b"", [LIST_BROKER]),
    RequestCode.GET_BROKER_CONFIG: ({}, b"", [GET_BROKER]),
    RequestCode.GET_BROKER_RUNTIME_INFO: ({}, b"", [GET_BROKER]),
    RequestCode.GET_BROKER_HA_STATUS: ({}, b"", [GET_BROKER]),
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO: ({}, b"", [GET_BROKER]),
    RequestCode.GET_TOPIC_CONFIG: (TG, b"", [SHOW_TOPIC]),
    RequestCode.GET_TOPIC_STATS_INFO: (TG, b"", [SHOW_TOPIC]),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: (TG, b"", [SHOW_TOPIC]),
    RequestCode.QUERY_CONSUME_TIME_SPAN: (TG, b"", [SHOW_TOPIC]),
    RequestCode.QUERY_CONSUME_QUEUE: ({**PLACE, "index": "0", "count": "1"}, b"", [SHOW_TOPIC]),
    RequestCode.QUERY_CORRECTION_OFFSET: ({**TG, "compareGroup": "G"}, b"", [SHOW_TOPIC]),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: (TG, b"", [SHOW_GROUP]),
    RequestCode.GET_CONSUME_STATS: (PLACE, b"", [SHOW_GROUP]),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: (PLACE, b"", [SHOW_GROUP]),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: (TG, b"", [SHOW_GROUP]),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: (TG, b"", [SHOW_GROUP]),
    RequestCode.AUTH_CREATE_USER: ({"username": "u"}, {"password": "a password"}, [UPDATE_BROKER]),
    RequestCode.AUTH_UPDATE_USER: ({"username": "u"}, {"userStatus": "disable"}, [UPDATE_BROKER]),
    RequestCode.AUTH_DELETE_USER: ({"username": "u"}, b"", [UPDATE_BROKER]),
    RequestCode.AUTH_GET_USER: ({"username": "u"}, b"", [GET_BROKER]),
    RequestCode.AUTH_LIST_USER: ({}, b"", [GET_BROKER]),
    RequestCode.AUTH_CREATE_ACL: ({"subject": "Everybody"}, ACL, [UPDATE_BROKER]),
    RequestCode.AUTH_UPDATE_ACL: ({"subject": "Everybody"}, ACL, [UPDATE_BROKER]),
    RequestCode.AUTH_DELETE_ACL: ({"subject": "Everybody"}, b"", [UPDATE_BROKER]),
    RequestCode.AUTH_GET_ACL: ({"subject": "Everybody"}, b"", [GET_BROKER]),
    RequestCode.AUTH_LIST_ACL: ({}, b"", [GET_BROKER]),
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: ({"accessKey": "u", "secretKey": "a secret"}, b"", [UPDATE_BROKER]),
    RequestCode.DELETE_ACL_CONFIG: ({"accessKey": "u"}, b"", [UPDATE_BROKER]),
}
CASES = [(code, ext, body, asked) for code, (ext, body, asked) in REQUESTS.items()]
REFUSALS = [(code, ext, body, no) for code, (ext, body, asked) in REQUESTS.items() for no in asked]
ALTERNATIVES = [(code, ext, body, each) for code, ext, body, each in REFUSALS if "|" in each]


def encoded(body: object) -> bytes:
    return body if isinstance(body, bytes) else orjson.dumps(body)


class Everything:
    """Allows everything but the questions in *denied*, and keeps what it is asked."""

    def __init__(self, *denied: str) -> None:
        self.asked: list[str] = []
        self.denied = denied

    @property
    def networks(self) -> tuple[Network, ...]:
        return ()

    def decide(self, question: Question) -> Verdict:
        resource = f"{question.kind}:{question.name}" if question.name else question.kind
        self.asked.append(f"{question.action} {resource}")
        return Verdict(self.asked[-1] not in self.denied)


def questions(asked: str) -> list[str]:
    """The questions of which one must be allowed, in the order in which they are asked."""
    actions, resource = asked.split()
    return [f"{action} {resource}" for action in actions.split("|")]


async def prepared(harness: Harness) -> FakeAccessControl:
    """A topic with one message, which is the first of the log, no group, and access control without users."""
    harness.topic("T")
    await harness.client().ask(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"x")
    control = FakeAccessControl()
    harness.broker.capabilities[AccessControl] = control
    return control


def test_every_request_that_is_served_is_in_the_table() -> None:
    assert REQUESTS.keys() == TABLE.keys()


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=[str(case[0]) for case in CASES])
async def test_authorizers_are_asked_for_what_a_request_touches(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, wanted: list[str]
) -> None:
    await prepared(harness)
    everything = Everything()
    harness.broker.authorizers = (everything,)
    harness.client().send(code, ext, encoded(body))
    await trio.testing.wait_all_tasks_blocked()
    assert list(dict.fromkeys(everything.asked)) == [questions(each)[0] for each in wanted]


@pytest.mark.parametrize(
    ("code", "ext", "body", "no"), REFUSALS, ids=[f"{case[0]}-{case[3].replace(' ', '-')}" for case in REFUSALS]
)
async def test_one_no_is_enough_and_nothing_is_made(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, no: str
) -> None:
    control = await prepared(harness)
    end = harness.store.appended
    harness.broker.authorizers = (Everything(*questions(no)),)
    answer = await harness.client().ask(code, ext, encoded(body))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "'' may not " in str(answer.remark)
    assert (harness.broker.groups.get("G"), harness.state.members.group("G")) == (None, None)
    assert (harness.state.members.producers, len(harness.state.locks)) == ({}, 0)
    assert (control.users, control.policies) == ({}, {})
    assert harness.store.appended == end


@pytest.mark.parametrize(
    ("code", "ext", "body", "no"), ALTERNATIVES, ids=[f"{case[0]}-{case[3].replace(' ', '-')}" for case in ALTERNATIVES]
)
async def test_one_of_several_actions_is_enough(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, no: str
) -> None:
    await prepared(harness)
    everything = Everything(questions(no)[0])
    harness.broker.authorizers = (everything,)
    answer = await harness.client().ask(code, ext, encoded(body))
    assert answer.code != ResponseCode.NO_PERMISSION
    assert set(questions(no)) <= set(everything.asked)


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
