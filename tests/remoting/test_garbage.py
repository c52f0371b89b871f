"""Every request is answered, whatever it contains, and the broker continues."""

import random

import pytest

from martlet_remoting.handler import TABLE
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

from .conftest import Harness, pull_ext, send_ext

VALUES: list[object] = [
    "",
    " ",
    "0",
    "1",
    "-1",
    "7",
    "T",
    "G",
    "%RETRY%G",
    "%DLQ%G",
    "TBW102",
    "true",
    "*",
    "a || b",
    "SQL92",
    "9" * 19,
    "9" * 5000,
    "-9223372036854775808",
    "2147483648",
    "1e3",
    "0x10",
    "\u0661",
    "\x00",
    "\x01\x02",
    "UNIQ_KEY\x01\x02",
    "名前",
    "/../../etc/passwd",
    "x" * 300,
    0,
    -1,
    1 << 40,
    True,
    None,
    1.5,
    ["a"],
    {"a": "b"},
]
BODIES = [
    b"",
    b"x",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"clientID":"c","consumerDataSet":[{"groupName":"G","subscriptionDataSet":[{"topic":"T"}]}]}',
    b'{"clientId":"c","consumerGroup":"G","mqSet":[{"topic":"T","brokerName":"b","queueId":0},{"topic":null}]}',
    b'{"topicConfigList":[{"topicName":"T"},{"topicName":7}]}',
    b'{"groupName":"G","retryMaxTimes":"many"}',
    b'{"consumerDataSet":{"a":1},"producerDataSet":"x","clientID":"c"}',
    b'{"subscriptionData":{"topic":{},"expressionType":[],"subString":7}}',
    b"a=b\nc",
    b"\x00\x00\x00\x20" + bytes(40),
]
FIELDS = sorted(
    {
        *send_ext("T"),
        *pull_ext("T", 0),
        "_UNIQUE_KEY_QUERY",
        "attributes",
        "batch",
        "beginTimestamp",
        "bornTimestamp",
        "brokerName",
        "cleanOffset",
        "clientAddr",
        "clientID",
        "clientId",
        "compareGroup",
        "count",
        "defaultTopic",
        "defaultTopicQueueNums",
        "delayLevel",
        "destGroup",
        "endTimestamp",
        "filterGroups",
        "flag",
        "group",
        "groupName",
        "index",
        "isForce",
        "isOrder",
        "key",
        "maxNum",
        "maxReconsumeTimes",
        "msgId",
        "offline",
        "offset",
        "order",
        "perm",
        "producerGroup",
        "properties",
        "readQueueNums",
        "readable",
        "reconsumeTimes",
        "srcGroup",
        "statsKey",
        "statsName",
        "timestamp",
        "topicFilterType",
        "topicList",
        "topicSysFlag",
        "writeQueueNums",
    }
)


@pytest.mark.parametrize("seed", range(8))
async def test_no_request_harms_the_broker(harness: Harness, seed: int) -> None:
    choice = random.Random(seed)
    harness.topic("T")
    client = harness.client()
    await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T", 0, "KEYS\x017\x02"), b"x")
    await client.heartbeat("c", "G", "T")
    codes = sorted(TABLE)
    for number in range(100, 1600):
        code = choice.choice(codes)
        ext: dict[str, object] = {name: choice.choice(VALUES) for name in choice.sample(FIELDS, choice.randrange(30))}
        if choice.random() < 0.5:
            ext = {**send_ext("T"), **pull_ext("T", 0), "offset": "0", "group": "G", "key": "7", "maxNum": "5"} | ext
        flag = 2 if choice.random() < 0.05 else 0
        version = choice.choice([0, 317, 513])
        client.handle(Command(code, ext, choice.choice(BODIES), number, flag, None, "JAVA", version))
    harness.state.parked.answer_all()
    await harness.step()
    assert len(client.answers) > 1000
    answer = await harness.client().ask(RequestCode.GET_MIN_OFFSET, {"topic": "T", "queueId": "0"})
    assert answer.code == 0


async def test_answers_that_nobody_asked_for_are_passed_over(harness: Harness) -> None:
    client = harness.client()
    for code in (*TABLE, 0, -1, 99999):
        client.handle(Command(code, {"a": None}, b"x", code, 1))
        client.handle(Command(code, {}, b"", code, 3))
    await harness.step()
    assert (client.answers, client.requests) == ({}, [])
