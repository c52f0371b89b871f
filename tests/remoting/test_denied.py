"""A client without permissions cannot tell whether a topic or a group exists."""

from collections.abc import Mapping
from typing import Any

import pytest

from martlet.message import Message
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import Harness, long_ext, pull_ext, send_ext
from .test_permission import CASES, encoded, prepared

OTHER_NAMES = {"T": "U", "G": "H", "%RETRY%G": "%RETRY%H", "c": "d"}
# A message is named by its position, and the refusal names no topic.
BY_POSITION = {RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.CONSUMER_SEND_MSG_BACK}


def renamed(value: Any) -> Any:
    """Return *value* with the names of a topic and a group that do not exist."""
    if isinstance(value, Mapping):
        return {name: renamed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    if isinstance(value, bytes):
        return value.replace(b"G=1", b"H=1") if value != b"G" else b"H"
    return OTHER_NAMES.get(value, value) if isinstance(value, str) else value


def shown(text: object) -> str:
    """Return a remark with the names of the other topic and group."""
    return str(text).replace("[T]", "[U]").replace("[G]", "[H]").replace("'T'", "'U'").replace("'G'", "'H'")


TRACE = "RMQ_SYS_TRACE_TOPIC"  # clients of RocketMQ send their traces there, and its tools read them
TRACES: Mapping[int, tuple[Mapping[str, object], bytes]] = {
    RequestCode.SEND_MESSAGE: (long_ext(TRACE, queueId="0"), b"x"),
    RequestCode.SEND_MESSAGE_V2: (send_ext(TRACE, properties="UNIQ_KEY\x01A\x02"), b"x"),
    RequestCode.SEND_BATCH_MESSAGE: (send_ext(TRACE, m="true"), encode_batch([BatchMessage(b"x")])),
    RequestCode.PULL_MESSAGE: (pull_ext(TRACE, 0), b""),
    RequestCode.BULK_READ: ({"topic": TRACE, "queueId": "0", "offset": "0"}, b""),
    RequestCode.QUERY_MESSAGE: (
        {"topic": TRACE, "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "9"},
        b"",
    ),
}


@pytest.mark.parametrize("code", TRACES)
async def test_who_may_not_trace_does_not_learn_whether_anybody_does(harness: Harness, code: int) -> None:
    ext, body = TRACES[code]
    harness.broker.authorizers = (lambda identity, action, name: name != TRACE,)
    client = harness.client()
    missing = await client.ask(code, ext, body)
    assert missing.code == ResponseCode.NO_PERMISSION
    assert harness.broker.topics.get(TRACE) is None
    harness.topic(TRACE, 1)
    harness.broker.publish(Message(TRACE, b"a trace", b"KEYS\x01k\x02", 0))
    harness.broker.store.committer.commit()
    appended = harness.broker.store.appended
    existing = await client.ask(code, ext, body)
    assert (existing.code, existing.ext, existing.remark, existing.body) == (
        *(missing.code, missing.ext, missing.remark, missing.body),
    )
    assert harness.broker.store.appended == appended


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=[str(case[0]) for case in CASES])
async def test_a_request_is_refused_in_the_same_words_whether_its_topic_and_group_exist_or_not(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, wanted: list[str]
) -> None:
    await prepared(harness)
    harness.broker.groups.ensure("G")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    harness.broker.groups.offsets.commit("G", "T", 0, 1)
    harness.broker.authorizers = (lambda identity, action, name: False,)
    existing = await client.ask(code, ext, encoded(body))
    missing = await client.ask(code, renamed(ext), encoded(renamed(body)))
    assert (existing.code, existing.ext, existing.body) == (missing.code, missing.ext, missing.body)
    if code in BY_POSITION:
        assert "T" not in str(existing.remark).split()
    else:
        assert shown(existing.remark) == str(missing.remark)
    if wanted:
        assert existing.code == ResponseCode.NO_PERMISSION
