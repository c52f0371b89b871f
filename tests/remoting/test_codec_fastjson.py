"""Bodies in Fastjson's dialects are written as real brokers write them and read however they are spelt."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_remoting.wire import fastjson
from martlet_remoting.wire.packets import MessageQueue

QUEUE = MessageQueue("T", "b", 0)


def test_message_queue_map_is_printed_as_a_real_broker_does() -> None:
    stats = {"lastUpdateTimestamp": 0, "maxOffset": 1, "minOffset": 0}
    body = fastjson.dumps({"offsetTable": {QUEUE: stats}, "topicPutTps": 0.0})
    assert body == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:'
        b'{"lastUpdateTimestamp":0,"maxOffset":1,"minOffset":0}},"topicPutTps":0.0}'
    )
    assert fastjson.loads(body) == {"offsetTable": {QUEUE: stats}, "topicPutTps": 0.0}


def test_integer_map_has_bare_keys() -> None:
    printed = fastjson.dumps({0: "a:1", 1: "b:2"})
    assert printed == b'{0:"a:1",1:"b:2"}'
    assert fastjson.loads(printed) == {"0": "a:1", "1": "b:2"}


def test_pretty_printed_queue_keys_are_read() -> None:
    body = b'{ "t" : { { "topic" : "T",\n "brokerName":"b", "queueId":0 } : 5 } }\n'
    assert fastjson.loads(body) == {"t": {QUEUE: 5}}


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.text() | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_ordinary_json_reads_the_same_through_the_tolerant_reader(value: object) -> None:
    wrapped = b"{0:" + orjson.dumps(value) + b"}"
    assert fastjson.loads(wrapped) == {"0": orjson.loads(orjson.dumps(value))}


queues = st.builds(MessageQueue, st.text(), st.text(), st.integers(-1, 2**31 - 1))


@given(st.dictionaries(queues, st.integers(0, 2**60), max_size=5))
def test_queue_map_round_trip(table: dict[MessageQueue, int]) -> None:
    assert fastjson.loads(fastjson.dumps(table)) == table


HOSTILE = [
    b"",
    b"{",
    b"{0:",
    b"{0:1",
    b"{0 1}",
    b"{0:1 1:2}",
    b"{:1}",
    b"[1,{0:1}",
    b"[{0:1} 2]",
    b"{0:1}x",
    b'{0:"abc}',
    b'{0:"\\x"}',
    b'{0:"\xff"}',
    b"{0:-}",
    b"{0:1e}",
    b"{0:word}",
    b"{{}:1}",
    b'{{"topic":"T"}:1}',
    b'{{"topic":"T","brokerName":"b","queueId":"x"}:1}',
    b"{0:" * 80 + b"1" + b"}" * 80,
    b"{0:" + b"[" * 100_000,
    b"{" * 100_000,
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_body_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fastjson.loads(body)


@given(st.binary(max_size=60))
def test_garbage_never_raises_anything_else(body: bytes) -> None:
    try:
        fastjson.loads(b"{0:" + body)
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_queues_sort_as_rocketmq_sorts_them() -> None:
    order = [MessageQueue(*key) for key in (("A", "b", 9), ("B", "a", 2), ("B", "a", 10), ("B", "b", 0))]
    assert sorted([order[2], order[0], order[3], order[1]]) == order
