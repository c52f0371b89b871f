"""Consumer groups: policies, offsets, resets, and RocketMQ's two files of them."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import Reason, Refused, StoreError
from martlet.runtime.steps import finish_now
from martlet.tables.groups import Group, Groups
from martlet.testing.stores import ManualClock

WRITTEN = b"""{
\t"dataVersion":{"counter":5,"stateVersion":0,"timestamp":1700000000000},
\t"forbiddenTable":{"G":{"Secret":4}},
\t"subscriptionGroupTable":{
\t\t"G":{
\t\t\t"attributes":{},
\t\t\t"brokerId":0,
\t\t\t"consumeBroadcastEnable":false,
\t\t\t"consumeEnable":true,
\t\t\t"consumeFromMinEnable":true,
\t\t\t"consumeMessageOrderly":true,
\t\t\t"consumeTimeoutMinute":15,
\t\t\t"groupName":"G",
\t\t\t"groupRetryPolicy":{"type":"CUSTOMIZED"},
\t\t\t"groupSysFlag":0,
\t\t\t"notifyConsumerIdsChangedEnable":true,
\t\t\t"retryMaxTimes":3,
\t\t\t"retryQueueNums":2,
\t\t\t"subscriptionDataSet":null,
\t\t\t"whichBrokerWhenConsumeSlowly":1
\t\t}
\t}
}"""
WRITTEN_4X = (
    b'{"dataVersion":{"counter":1,"timestamp":1600000000000},"subscriptionGroupTable":{"G":{"brokerId":0,'
    b'"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,"groupName":"G",'
    b'"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,"whichBrokerWhenConsumeSlowly":1}}}'
)
# Exactly as RocketMQ writes it: integer keys without quotes.
OFFSETS = b"""{
\t"dataVersion":{
\t\t"counter":9,
\t\t"stateVersion":0,
\t\t"timestamp":1700000000000
\t},
\t"offsetTable":{
\t\t"T@G":{0:12,1:7
\t\t},
\t\t"%RETRY%G@G":{0:3
\t\t}
\t}
}"""


def make(*, auto_create: bool = True) -> Groups:
    return Groups(ManualClock(), auto_create=auto_create)


def test_policies_written_by_rocketmq_are_read() -> None:
    groups = make()
    groups.load(WRITTEN)
    group = groups.get("G")
    assert group is not None
    assert not group.consume_broadcast_enable
    assert group.consume_message_orderly
    assert (group.retry_max_times, group.retry_queue_nums) == (3, 2)
    assert groups.is_forbidden("G", "Secret")
    assert not groups.is_forbidden("G", "Other")
    assert groups.get("TOOLS_CONSUMER") is not None, "the built-in ones stay"
    assert groups.version.counter == 5
    assert not groups.table.dirty


def test_policies_of_4x_are_read() -> None:
    groups = make()
    groups.load(WRITTEN_4X)
    assert groups.get("G") == Group("G")


def test_policies_are_written_as_rocketmq_does() -> None:
    groups = make()
    groups.load(WRITTEN)
    written, wanted = orjson.loads(b"".join(finish_now(groups.json_in_steps()))), orjson.loads(WRITTEN)
    del wanted["subscriptionGroupTable"]["G"]["subscriptionDataSet"]
    assert written["subscriptionGroupTable"]["G"] == wanted["subscriptionGroupTable"]["G"]
    assert written["forbiddenTable"] == wanted["forbiddenTable"]
    assert written["dataVersion"] == wanted["dataVersion"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"subscriptionGroupTable":[]}1',
        b'{"subscriptionGroupTable":[1]}',
        b'{"subscriptionGroupTable":{"A":1}}',
        b'{"subscriptionGroupTable":{"Good":{},"Bad":{"retryMaxTimes":"many"}}}',
        b'{"subscriptionGroupTable":{"Good":{}},"forbiddenTable":[1]}',
        b'{"subscriptionGroupTable":{"Good":{}},"forbiddenTable":{"G":1}}',
    ],
)
def test_broken_policies_are_refused_and_change_nothing(data: bytes) -> None:
    groups = make()
    groups.load(WRITTEN)
    before = b"".join(finish_now(groups.json_in_steps()))
    with pytest.raises(StoreError):
        groups.load(data)
    assert b"".join(finish_now(groups.json_in_steps())) == before


def test_offsets_written_by_rocketmq_are_read() -> None:
    groups = make()
    groups.offsets.load(OFFSETS)
    assert groups.offsets.get("G", "T", 0) == 12
    assert groups.offsets.get("G", "T", 1) == 7
    assert groups.offsets.get("G", "%RETRY%G", 0) == 3
    assert groups.offsets.get("G", "T", 2) == -1
    assert groups.offsets.topics_of("G") == ["T", "%RETRY%G"]
    assert groups.offsets.groups_of("T") == ["G"]
    assert not groups.offsets.table.dirty


def test_offsets_are_written_as_rocketmq_does() -> None:
    groups = make()
    groups.offsets.load(OFFSETS)
    assert b"".join(b"".join(finish_now(groups.offsets.json_in_steps())).split()) == (
        b'{"dataVersion":{"counter":9,"stateVersion":0,"timestamp":1700000000000},'
        b'"offsetTable":{"T@G":{0:12,1:7},"%RETRY%G@G":{0:3}}}'
    )


@given(
    st.dictionaries(
        st.tuples(st.text("%|aZ09_-", min_size=1, max_size=9), st.text("%|aZ09_-", min_size=1, max_size=9)),
        st.dictionaries(st.integers(0, 20000), st.integers(0, 2**62), min_size=1, max_size=4),
        max_size=4,
    )
)
def test_offsets_come_back_as_they_were(table: dict[tuple[str, str], dict[int, int]]) -> None:
    groups = make()
    for (topic, group), offsets in table.items():
        for queue_id, offset in offsets.items():
            groups.offsets.commit(group, topic, queue_id, offset)
    back = make()
    back.offsets.load(b"".join(finish_now(groups.offsets.json_in_steps())))
    for (topic, group), offsets in table.items():
        assert back.offsets.committed(group, topic) == offsets


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{1:",
        b'{"offsetTable":[1]}',
        b'{"offsetTable":{"T@G":7}}',
        b'{"offsetTable":{"A@G":{0:1},"T@G":{"x":7}}}',
        b'{"offsetTable":{"A@G":{0:1},"T@G":{0:null}}}',
    ],
)
def test_broken_offsets_are_refused_and_change_nothing(data: bytes) -> None:
    groups = make()
    groups.offsets.load(OFFSETS)
    before = b"".join(finish_now(groups.offsets.json_in_steps()))
    with pytest.raises(StoreError):
        groups.offsets.load(data)
    assert b"".join(finish_now(groups.offsets.json_in_steps())) == before


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({}, "groupName is missing"),
        ({"groupName": 5}, "wrong type"),
        ({"groupName": "G", "retryMaxTimes": True}, "retryMaxTimes"),
    ],
)
def test_a_policy_with_a_wrong_value_names_it(table: dict[str, object], text: str) -> None:
    with pytest.raises(Refused, match=text):
        Group.from_json(table)


def test_a_group_is_made_when_it_is_wanted_and_allowed() -> None:
    changed: list[str] = []
    groups = make()
    groups.changed.append(changed.append)
    assert groups.ensure("G") == Group("G")
    assert groups.ensure("G") is groups.get("G")
    assert changed == ["G"]
    assert make(auto_create=False).ensure("G") is None
    with pytest.raises(Refused):
        groups.ensure("a b")


@pytest.mark.parametrize("name", ["", " ", "a b", "ü", "g" * 121])
def test_a_bad_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(Refused, match="The specified group") as refused:
        make().update(Group(name))
    assert refused.value.reason is Reason.PARAMETER


def test_a_reset_outlives_commits_of_the_old_consumers_until_it_is_taken() -> None:
    groups = make()
    groups.offsets.commit("G", "T", 0, 100)
    groups.offsets.reset("G", "T", {0: 5})
    assert groups.offsets.get("G", "T", 0) == 5
    groups.offsets.commit("G", "T", 0, 101)
    assert groups.offsets.get("G", "T", 0) == 5
    assert groups.offsets.pending_reset("G", "T", 0) == 5
    assert groups.offsets.take_reset("G", "T", 0) == 5
    assert groups.offsets.take_reset("G", "T", 0) == -1
    groups.offsets.commit("G", "T", 0, 6)
    assert groups.offsets.get("G", "T", 0) == 6


def test_a_deleted_group_keeps_its_offsets_unless_they_are_cleaned() -> None:
    groups = make()
    groups.update(Group("G"))
    groups.offsets.commit("G", "T", 0, 5)
    assert groups.delete("G", clean_offsets=False)
    assert groups.offsets.get("G", "T", 0) == 5
    assert not groups.delete("G", clean_offsets=True)
    assert groups.offsets.get("G", "T", 0) == -1


def test_a_deleted_topic_is_forgotten_by_every_group() -> None:
    groups = make()
    for group in ("G", "H"):
        groups.offsets.commit(group, "T", 0, 5)
        groups.offsets.commit(group, "U", 0, 6)
        groups.offsets.reset(group, "T", {1: 1})
    groups.offsets.forget_topic("T")
    assert groups.offsets.groups_of("T") == []
    assert groups.offsets.pending_reset("G", "T", 1) == -1
    assert groups.offsets.get("G", "U", 0) == 6


def test_forbidding_is_undone() -> None:
    groups = make()
    groups.set_forbidden("G", "T", readable=False)
    assert groups.is_forbidden("G", "T")
    groups.set_forbidden("G", "T", readable=True)
    assert not groups.is_forbidden("G", "T")


def test_forgetting_one_topic_of_a_group_leaves_the_rest() -> None:
    groups = Groups(ManualClock(), auto_create=True)
    for group, topic in (("a", "T"), ("a", "U"), ("b", "T")):
        groups.offsets.commit(group, topic, 0, 7)
        groups.offsets.reset(group, topic, {1: 3})
    groups.offsets.forget("a", "T")
    assert (groups.offsets.committed("a", "T"), groups.offsets.committed("a", "U")) == ({}, {0: 7, 1: 3})
    assert (groups.offsets.groups_of("T"), groups.offsets.topics_of("a")) == (["b"], ["U"])
    assert (groups.offsets.pending_reset("a", "T", 1), groups.offsets.pending_reset("b", "T", 1)) == (-1, 3)
    groups.offsets.forget_topic("T")
    assert (
        groups.offsets.groups_of("T"),
        groups.offsets.topics_of("b"),
        groups.offsets.pending_reset("b", "T", 1),
    ) == ([], [], -1)
    assert groups.offsets.groups_of("U") == ["a"]


def test_offsets_have_a_total_bound_and_known_ones_still_move() -> None:
    groups = Groups(ManualClock(), auto_create=True, offsets_max=3)
    groups.offsets.check_may_commit("a", "T", range(3))
    for queue_id in range(3):
        groups.offsets.commit("a", "T", queue_id, 7)
    assert groups.statistics()["offsets"] == 3
    with pytest.raises(Refused, match=r"3 offsets are stored and 1 more requested; broker\.offsets_max is 3") as error:
        groups.offsets.check_may_commit("b", "T", (0,))
    assert error.value.reason is Reason.BUSY
    groups.offsets.check_may_commit("a", "T", (0, 2))
    groups.offsets.commit("a", "T", 0, 8)
    assert groups.offsets.get("a", "T", 0) == 8


def test_offsets_that_are_forgotten_make_room() -> None:
    def full() -> Groups:
        groups = Groups(ManualClock(), auto_create=True, offsets_max=2)
        groups.offsets.commit("a", "T", 0, 7)
        groups.offsets.reset("a", "U", {0: 1})
        with pytest.raises(Refused):
            groups.offsets.check_may_commit("b", "T", (0,))
        return groups

    made = [full() for _ in range(4)]
    made[0].offsets.forget_topic("T")
    made[1].offsets.forget("a", "U")
    made[2].delete("a", clean_offsets=True)
    back = Groups(ManualClock(), auto_create=True, offsets_max=2)
    back.offsets.load(b"".join(finish_now(made[3].offsets.json_in_steps())))
    back.offsets.load(b"".join(finish_now(made[3].offsets.json_in_steps())))
    assert [groups.statistics()["offsets"] for groups in (*made, back)] == [1, 1, 0, 2, 2]
    for groups in made[:3]:
        groups.offsets.check_may_commit("b", "T", (0,))


def test_large_tables_are_rendered_in_slices() -> None:
    groups = make()
    for number in range(1000):
        groups.update(Group(f"g{number}"))
        groups.offsets.commit(f"g{number}", "T", 0, number)
    assert sum(1 for _ in groups.json_in_steps()) >= 3
    assert sum(1 for _ in groups.offsets.json_in_steps()) >= 3
    for steps in (groups.json_in_steps(), groups.offsets.json_in_steps()):
        sizes = [len(piece) for piece in finish_now(steps)]
        assert max(sizes) < sum(sizes) / 3, "no slice copies the whole"


def test_a_group_that_goes_while_offsets_are_rendered_harms_nothing() -> None:
    groups = make()
    for number in range(1000):
        groups.offsets.commit(f"g{number}", "T", 0, number)
    steps = groups.offsets.json_in_steps()
    next(steps)
    groups.offsets.table.dirty = False
    groups.offsets.forget_topic("T")
    back = make()
    back.offsets.load(b"".join(finish_now(steps)))
    assert back.offsets.get("g0", "T", 0) == 0
    assert groups.offsets.table.dirty, "what changed meanwhile is written the next time"


def test_freezing_copies_nothing() -> None:
    groups = make()
    groups.offsets.commit("old", "T", 0, 1)
    offsets, policies = groups.offsets.json_in_steps(), groups.json_in_steps()
    groups.offsets.commit("new", "T", 0, 2)
    groups.update(Group("later"))
    back = make()
    back.offsets.load(b"".join(finish_now(offsets)))
    back.load(b"".join(finish_now(policies)))
    assert (back.offsets.get("old", "T", 0), back.offsets.get("new", "T", 0)) == (1, 2), (
        "the first slice takes the names"
    )
    assert back.get("later") is not None
