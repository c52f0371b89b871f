"""The topic table: names, permissions, automatic creation, and RocketMQ's topics.json."""

from typing import cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import Reason, Refused, StoreError
from martlet.runtime.steps import finish_now
from martlet.store import Queue, Store
from martlet.tables.topics import INHERIT, READ, TEMPLATE_TOPIC, WRITE, Topic, Topics, check_name, reserve_hours
from martlet.testing.stores import ManualClock

# As RocketMQ 5.x writes it (pretty-printed, keys in alphabetical order), with what only a real one has.
WRITTEN = b"""{
\t"dataVersion":{
\t\t"counter":3,
\t\t"stateVersion":1,
\t\t"timestamp":1700000000000
\t},
\t"topicConfigTable":{
\t\t"TBW102":{
\t\t\t"attributes":{},
\t\t\t"order":false,
\t\t\t"perm":7,
\t\t\t"readQueueNums":8,
\t\t\t"topicFilterType":"SINGLE_TAG",
\t\t\t"topicMessageType":"UNSPECIFIED",
\t\t\t"topicName":"TBW102",
\t\t\t"topicSysFlag":0,
\t\t\t"writeQueueNums":8
\t\t},
\t\t"Orders":{
\t\t\t"attributes":{"message.type":"FIFO"},
\t\t\t"order":true,
\t\t\t"perm":4,
\t\t\t"readQueueNums":16,
\t\t\t"topicFilterType":"MULTI_TAG",
\t\t\t"topicName":"Orders",
\t\t\t"topicSysFlag":1,
\t\t\t"writeQueueNums":4
\t\t}
\t}
}"""
WRITTEN_4X = (
    b'{"dataVersion":{"counter":1,"timestamp":1600000000000},"topicConfigTable":{"T":{"order":false,"perm":6,'
    b'"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":4}}}'
)


class Kept:
    """As much of a store's retention of topics as a topic table needs."""

    hours_max = 72

    def __init__(self) -> None:
        self.hours: dict[str, int] = {}

    def set_hours(self, topic: str, hours: int, *, loaded: bool = False) -> None:
        self.hours[topic] = hours

    def deleted(self, topic: str) -> None:
        self.hours.pop(topic, None)


class NoQueues:
    def __init__(self) -> None:
        self.topics: dict[str, dict[int, Queue]] = {}


class NoStore:
    """As much of a store as a topic table needs."""

    def __init__(self) -> None:
        self.queues = NoQueues()
        self.upkeep = self.deletions = self  # as far as a topic table needs these parts
        self.topic_retention = Kept()
        self.deleted: list[str] = []
        self.full = False

    def queue(self, topic: str, queue_id: int) -> Queue:
        return Queue(topic, queue_id)

    def delete_topic(self, name: str) -> None:
        if self.full:
            raise Refused(Reason.UNAVAILABLE, "the disk is full")
        self.deleted.append(name)


def make(*, auto_create: bool = True) -> Topics:
    return Topics(cast(Store, NoStore()), ManualClock(), auto_create=auto_create, auto_create_queues=8)


def test_a_table_written_by_rocketmq_is_read_whole() -> None:
    topics = make()
    topics.load(WRITTEN)
    orders = topics.get("Orders")
    assert orders is not None
    assert (orders.read_queues, orders.write_queues, orders.perm) == (16, 4, READ)
    assert orders.order
    assert orders.sys_flag == 1
    assert orders.filter_type == "MULTI_TAG"
    assert orders.attributes == {"message.type": "FIFO"}
    assert topics.version.counter == 3
    assert not topics.table.dirty, "reading is no change"


def test_a_table_of_4x_is_read() -> None:
    topics = make()
    topics.load(WRITTEN_4X)
    topic = topics.get("T")
    assert topic is not None
    assert topic.attributes == {}
    assert topics.version.timestamp == 1600000000000


def test_what_is_written_is_what_rocketmq_writes() -> None:
    topics = make()
    topics.load(WRITTEN)
    wanted = orjson.loads(WRITTEN)
    del wanted["topicConfigTable"]["TBW102"]["topicMessageType"]
    written = orjson.loads(b"".join(finish_now(topics.json_in_steps())))
    assert written["dataVersion"] == wanted["dataVersion"]
    for name in wanted["topicConfigTable"]:
        assert written["topicConfigTable"][name] == wanted["topicConfigTable"][name]


@given(
    st.dictionaries(
        st.text("%|aZ09_-", min_size=1, max_size=127),
        st.tuples(st.integers(0, 16384), st.integers(0, 16384), st.integers(0, 15), st.booleans()),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=8), max_size=3),
)
def test_a_table_comes_back_as_it_was(table: dict[str, tuple[int, int, int, bool]], attributes: dict[str, str]) -> None:
    topics = make()
    for name, (reads, writes, perm, order) in table.items():
        topics.update(name, reads, writes, perm, order=order, attributes=attributes)
    back = make()
    back.load(b"".join(finish_now(topics.json_in_steps())))
    assert {t.name: t.as_json() for t in back} == {t.name: t.as_json() for t in topics}
    assert back.version.counter == topics.version.counter


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b'{"topicConfigTable":[1]}',
        b'{"topicConfigTable":{"A":1}}',
        b'{"topicConfigTable":{"A":{"perm":"x"}}}',
        b'{"topicConfigTable":{"A":{"readQueueNums":null}}}',
        b'{"topicConfigTable":{"A":{"attributes":7}}}',
    ],
)
def test_a_broken_table_is_refused_and_changes_nothing(data: bytes) -> None:
    topics = make()
    topics.load(WRITTEN)
    before = b"".join(finish_now(topics.json_in_steps()))
    with pytest.raises(StoreError):
        topics.load(data)
    assert b"".join(finish_now(topics.json_in_steps())) == before


def test_half_a_broken_table_is_not_taken() -> None:
    topics = make()
    with pytest.raises(StoreError):
        topics.load(b'{"topicConfigTable":{"Good":{"perm":6},"Bad":{"perm":[]}}}')
    assert topics.get("Good") is None


@pytest.mark.parametrize("name", ["T", "a" * 127, "%RETRY%" + "g" * 248, "%DLQ%g", "a|b%c_d-e", "123"])
def test_a_good_name_is_taken(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", " ", "\t", "a b", "a.b", "a/b", "a\n", "é", "a" * 128, "%RETRY%" + "g" * 249])
def test_a_bad_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(Refused, match="The specified topic") as refused:
        check_name(name)
    assert refused.value.reason is Reason.PARAMETER


@pytest.mark.parametrize(
    ("reads", "writes", "perm"), [(-1, 8, 6), (8, -1, 6), (16385, 8, 6), (8, 16385, 6), (8, 8, -1), (8, 8, 16)]
)
def test_numbers_out_of_range_are_refused(reads: int, writes: int, perm: int) -> None:
    topics = make()
    with pytest.raises(Refused):
        topics.update("T", reads, writes, perm)
    assert topics.get("T") is None


def test_every_change_is_reported_and_counted() -> None:
    topics = make()
    told: list[Topic | None] = []
    topics.changed.append(told.append)
    topic = topics.update("T", 4, 4)
    assert topics.update("T", 4, 4) is topic
    assert told == [topic]
    changed = topics.update("T", 8, 4)
    assert told == [topic, changed]
    assert topics.version.counter == 2
    assert topics.delete("T")
    assert not topics.delete("T")
    assert told == [topic, changed, None]


def test_a_topic_that_the_store_cannot_delete_now_stays_whole() -> None:
    store = NoStore()
    topics = Topics(cast(Store, store), ManualClock(), auto_create=True, auto_create_queues=8)
    topic = topics.update("T", 4, 4)
    told: list[Topic | None] = []
    topics.changed.append(told.append)
    store.full = True
    with pytest.raises(Refused, match="the disk is full"):
        topics.delete("T")
    assert (topics.get("T"), told) == (topic, [])
    store.full = False
    assert topics.delete("T")
    assert (topics.get("T"), told, store.deleted) == (None, [None], ["T"])


def test_the_store_knows_which_topics_keep_messages_for_how_long() -> None:
    store = NoStore()
    topics = Topics(cast(Store, store), ManualClock(), auto_create=True, auto_create_queues=8)
    hours = store.topic_retention.hours
    topics.load(WRITTEN.replace(b'"message.type":"FIFO"', b'"reserve.time":"5"'))
    assert hours == {"Orders": 5}
    topics.update("T", attributes={"reserve.time": "72"})
    topics.update("U", attributes={"reserve.time": "-1"})
    topics.update("rmq_sys_own", attributes={"reserve.time": "1"})
    assert hours == {"Orders": 5, "T": 72}
    topics.update("Orders")
    topics.delete("T")
    assert hours == {"Orders": 0}


def test_no_topic_can_keep_messages_longer_than_the_log() -> None:
    topics = make()
    with pytest.raises(Refused, match=r"cannot keep messages for 73 hours .* share one log, which keeps them for 72;"):
        topics.update("T", attributes={"reserve.time": "73"})
    assert topics.get("T") is None
    topics.load(WRITTEN.replace(b'"message.type":"FIFO"', b'"reserve.time":"73"'))
    topics.update("Orders", 9, 9, attributes={"reserve.time": "73"})  # RocketMQ has set it, and it does not change


@pytest.mark.parametrize(
    ("value", "hours"), [("1", 1), ("072", 72), ("0", 0), ("-1", 0), ("", 0), ("x", 0), ("1.5", 0), ("²", 0)]
)
def test_hours_that_are_no_positive_number_mean_those_of_the_log(value: str, hours: int) -> None:
    assert reserve_hours({"reserve.time": value}) == hours
    assert reserve_hours({}) == 0


def test_a_changed_topic_keeps_its_queues() -> None:
    topics = make()
    queue = topics.update("T", 4, 4).queue(0)
    assert topics.update("T", 8, 8).queue(0) is queue


def test_a_topic_is_made_after_the_template_with_what_was_asked_for() -> None:
    topics = make()
    topics.update(TEMPLATE_TOPIC, 8, 8, READ | WRITE | INHERIT)
    made = topics.auto_create("New", TEMPLATE_TOPIC, 4)
    assert made is not None
    assert (made.read_queues, made.write_queues, made.perm) == (4, 4, READ | WRITE)
    most = topics.auto_create("Most", TEMPLATE_TOPIC, 100)
    assert most is not None
    assert most.write_queues == 8


def test_a_topic_is_not_made_where_that_is_forbidden() -> None:
    topics = make(auto_create=False)
    topics.update(TEMPLATE_TOPIC, 8, 8, READ | WRITE | INHERIT)
    topics.update("Plain", 8, 8)
    assert topics.auto_create("New", TEMPLATE_TOPIC, 4) is None
    assert topics.auto_create("New", "Plain", 4) is None, "it does not inherit"
    assert topics.auto_create("New", "Absent", 4) is None
    assert topics.get("New") is None


def test_topics_have_a_limit_and_known_ones_may_still_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.tables.topics.TOPICS_MAX", 1)
    topics = make()
    topics.update("first")
    with pytest.raises(Refused) as caught:
        topics.update("second")
    assert caught.value.reason is Reason.BUSY
    assert topics.update("first", 3, 3).read_queues == 3


def test_freezing_copies_nothing() -> None:
    topics, back = make(), make()
    steps = topics.json_in_steps()
    topics.update("later")
    back.load(b"".join(finish_now(steps)))
    assert back.get("later") is not None
