"""What a broker refuses, and with which code.

The Java client checks most of this itself, so most of these requests go out by hand, as a careless client's would.
"""

import time
from collections.abc import Callable

import pytest

from . import wire
from .conftest import Target
from .java import Failed, Java, message
from .process import eventually

Name = Callable[[str], str]

SYSTEM_ERROR = 1
NOT_SUPPORTED = 3
MESSAGE_ILLEGAL = 13
NO_PERMISSION = 16
TOPIC_NOT_EXIST = 17
GROUP_NOT_EXIST = 26
INVALID_PARAMETER = 29


def send(target: Target, topic: str, body: bytes = b"x", **more: str) -> int:
    """Send one message by hand and return the response code."""
    fields = {
        "producerGroup": "by_hand",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": str(time.time_ns() // 1_000_000),
        "flag": "0",
        "properties": "",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "batch": "false",
        **more,
    }
    return code(wire.ask(target.address, wire.SEND_MESSAGE, fields, body))


def code(answer: wire.Answer | None) -> int:
    assert answer is not None, "the connection was closed instead of an answer"
    return answer.code


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("with space", INVALID_PARAMETER),
        ("dot.ted", INVALID_PARAMETER),
        ("sla/sh", INVALID_PARAMETER),
        ("umläut", INVALID_PARAMETER),
        ("", INVALID_PARAMETER),
        ("t" * 128, INVALID_PARAMETER),
        ("t" * 127, 0),
        ("per%cent|bar-dash_under", 0),
    ],
)
def test_topic_names_follow_the_rules(target: Target, topic: str, expected: int) -> None:
    assert send(target, topic) == expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("SCHEDULE_TOPIC_XXXX", NO_PERMISSION),
        ("RMQ_SYS_TRANS_HALF_TOPIC", NO_PERMISSION),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", NO_PERMISSION),
        ("TRANS_CHECK_MAX_TIME_TOPIC", NO_PERMISSION),
        ("SELF_TEST_TOPIC", NO_PERMISSION),
        ("OFFSET_MOVED_EVENT", NO_PERMISSION),
        ("TBW102", 0),
        ("RMQ_SYS_TRACE_TOPIC", 0),
    ],
)
def test_which_system_topics_take_messages(target: Target, topic: str, expected: int) -> None:
    assert send(target, topic) == expected


def test_a_queue_number_that_the_topic_does_not_have(target: Target, name: Name) -> None:
    topic = name("queue")
    assert send(target, topic) == 0
    assert send(target, topic, queueId="9") == INVALID_PARAMETER
    assert send(target, topic, queueId="-1") == 0, "a negative number leaves the choice to the broker"


def test_a_topic_is_not_made_from_a_template_that_is_not_there(target: Target, name: Name) -> None:
    assert send(target, name("orphan"), defaultTopic="NO_SUCH_TEMPLATE") == TOPIC_NOT_EXIST


def test_a_body_over_the_limit(target: Target, name: Name) -> None:
    assert send(target, name("big"), b"x" * (4 * 1024 * 1024 + 1)) == MESSAGE_ILLEGAL


def test_an_empty_body(target: Target, name: Name) -> None:
    assert send(target, name("empty"), b"") == SYSTEM_ERROR


def test_properties_that_do_not_fit(target: Target, name: Name) -> None:
    assert send(target, name("properties"), properties="p\x01" + "v" * 40_000 + "\x02") == MESSAGE_ILLEGAL


def test_a_request_without_its_fields(target: Target) -> None:
    assert code(wire.ask(target.address, wire.SEND_MESSAGE, {"topic": "incomplete"})) == SYSTEM_ERROR


@pytest.mark.parametrize("unknown", [0, 9_999, -5, 105])
def test_a_request_code_that_a_broker_does_not_know(target: Target, unknown: int) -> None:
    answer = wire.ask(target.address, unknown)
    assert code(answer) == NOT_SUPPORTED
    assert answer is not None
    assert answer.remark == f" request type {unknown} not supported"


@pytest.mark.parametrize("unknown", [10, 9_999])
def test_a_request_code_that_a_name_server_does_not_know(target: Target, unknown: int) -> None:
    answer = wire.ask(target.name_server, unknown)
    assert code(answer) == NOT_SUPPORTED
    assert answer is not None
    assert answer.remark == f" request type {unknown} not supported"


def pull(target: Target, topic: str, group: str, **more: str) -> int:
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": "0",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subscription": "*",
        "subVersion": "0",
        "expressionType": "TAG",
        **more,
    }
    return code(wire.ask(target.address, wire.PULL_MESSAGE, fields))


def test_pulls_answer_the_codes_that_clients_wait_for(target: Target, name: Name) -> None:
    topic, group = name("pulled"), name("group")
    assert send(target, topic) == 0
    assert eventually(lambda: 0 if pull(target, topic, group) == 0 else None) == 0
    found = {
        "at the end": pull(target, topic, group, queueOffset="1"),
        "beyond the end": pull(target, topic, group, queueOffset="7"),
        "before the beginning": pull(target, topic, group, queueOffset="-1"),
        "no tag matches": pull(target, topic, group, subscription="T"),
        "no such topic": pull(target, name("nowhere"), group),
        "no such queue": pull(target, topic, group, queueId="9"),
        "negative queue": pull(target, topic, group, queueId="-1"),
        "never subscribed": pull(target, topic, name("stranger"), sysFlag="0"),
    }
    assert found == {
        "at the end": 19,
        "beyond the end": 21,
        "before the beginning": 21,
        "no tag matches": 20,
        "no such topic": TOPIC_NOT_EXIST,
        "no such queue": INVALID_PARAMETER,
        "negative queue": INVALID_PARAMETER,
        "never subscribed": 24,
    }


def test_the_route_of_an_unknown_topic(java: Java, name: Name, target: Target) -> None:
    fields = {"topic": name("nowhere")}
    assert code(wire.ask(target.name_server, wire.GET_ROUTEINFO_BY_TOPIC, fields)) == TOPIC_NOT_EXIST
    with pytest.raises(Failed) as refused:
        java.producer().queues(fields["topic"])
    assert refused.value.type == "MQClientException"


@pytest.mark.parametrize(("perm", "sends", "pulls"), [(6, 0, 19), (4, NO_PERMISSION, 19), (2, 0, NO_PERMISSION)])
def test_permissions_of_a_topic_hold(
    newest: Java, name: Name, target: Target, target_kind: str, perm: int, sends: int, pulls: int
) -> None:
    topic = name("perm")
    newest.queries().create_topic(topic, target.address, queues=1, perm=perm)
    assert pull(target, topic, name("group")) == pulls
    if target_kind == "rocketmq":
        sends = 0  # it stores what is sent straight to a read-only topic; Martlet keeps to the permission
    assert send(target, topic) == sends


def test_the_java_client_is_told_of_a_read_only_topic(java: Java, name: Name, target: Target) -> None:
    topic = name("readonly")
    java.queries().create_topic(topic, target.address, queues=1, perm=4)
    eventually(lambda: True if topic in java.mqadmin("topicList") else None)
    [refused] = java.producer(retries=0).try_send(message(topic, "x"))
    assert refused.error is not None


def test_a_topic_that_nobody_made_has_no_messages(java: Java, name: Name) -> None:
    assert java.lite(name("group"), name("nowhere")).poll(200) == []


@pytest.mark.parametrize(
    ("attributes", "remark"),
    [
        ("+nonsense=1", "unsupported key: nonsense"),
        ("nonsense=1", "add/alter attribute format is wrong: nonsense"),
        ("+message.type", "delete attribute format is wrong: +message.type"),
        ("-message.type", "only add attribute is supported while creating topic. key: message.type"),
        ("+message.type=WRONG", "value is not in set: ["),
        ("+message.type=NORMAL,+message.type=FIFO", "key duplication: +message.type"),
    ],
)
def test_an_attribute_that_a_topic_cannot_have(target: Target, name: Name, attributes: str, remark: str) -> None:
    fields = {
        "topic": name("attributes"),
        "defaultTopic": "TBW102",
        "readQueueNums": "1",
        "writeQueueNums": "1",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        "attributes": attributes,
    }
    answer = wire.ask(target.address, wire.UPDATE_AND_CREATE_TOPIC, fields)
    assert code(answer) == SYSTEM_ERROR
    assert answer is not None
    assert answer.remark[: len(remark)] == remark
    assert pull(target, fields["topic"], name("group")) == TOPIC_NOT_EXIST


def test_a_negative_commit_is_accepted(target: Target, target_kind: str, newest: Java, name: Name) -> None:
    topic, group = name("negative"), name("group")
    newest.queries().create_topic(topic, target.address, queues=1)
    assert pull(target, topic, group) == 19  # which makes the group
    place = {"consumerGroup": group, "topic": topic, "queueId": "0"}

    def commit(offset: int) -> int:
        return code(wire.ask(target.address, wire.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": f"{offset}"}))

    def committed() -> str | None:
        answer = wire.ask(target.address, wire.QUERY_CONSUMER_OFFSET, {**place, "setZeroIfNotFound": "false"})
        assert answer is not None
        return answer.fields.get("offset")

    assert (commit(-1), committed()) == (0, None)
    assert (commit(5), committed()) == (0, "5")
    # The real broker takes the position away from the group then.
    assert (commit(-1), committed()) == (0, None if target_kind == "rocketmq" else "5")
