"""Limits on what a group reads from the disk: who sets them, whom they stop, and for how long."""

import orjson
import pytest
import trio

from martlet.errors import Reason, Refused
from martlet.tables.groups import Group
from martlet_remoting.consumers.cold_reads import WINDOW_S, ColdReads
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext
from .test_pull import PULL, with_backlog

UPDATE = RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG
REMOVE = RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG
SHOW = RequestCode.GET_COLD_DATA_FLOW_CTR_INFO
PATIENCE_S = 300.0


class Times:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def now_ms(self) -> int:
        return round(self.seconds * 1000)


def test_a_group_may_read_up_to_its_limit_in_each_window() -> None:
    times = Times()
    reads = ColdReads(times.now, times.now_ms)
    reads.limits["slow"] = 1000
    for _ in range(2):
        reads.check("slow")
        reads.took("slow", 600)
        reads.check("slow")
        reads.took("slow", 600)
        with pytest.raises(Refused, match=r"group \[slow\] has read 1200 bytes .* limit per 5 s is 1000") as caught:
            reads.check("slow")
        assert caught.value.reason is Reason.BUSY
        reads.check("another")
        times.seconds += WINDOW_S
    reads.check("slow")
    assert reads.refused == 2


def test_a_limit_of_nothing_stops_every_read() -> None:
    times = Times()
    reads = ColdReads(times.now, times.now_ms)
    reads.limits["slow"] = 0
    with pytest.raises(Refused):
        reads.check("slow")


def test_a_group_without_a_limit_has_one_for_the_cold_tier() -> None:
    times = Times()
    reads = ColdReads(times.now, times.now_ms, 1000)
    reads.took("G", 5000)
    reads.check("G", is_cold=True)
    reads.took("G", 1000, is_cold=True)
    with pytest.raises(
        Refused, match=r"\[G\] has read 1000 bytes of old messages from the cold tier; its limit per 5 s is 1000"
    ):
        reads.check("G", is_cold=True)
    reads.check("G")
    reads.check("H", is_cold=True)
    reads.limits["G"] = 7000
    reads.check("G", is_cold=True)
    times.seconds += WINDOW_S
    reads.limits.clear()
    reads.check("G", is_cold=True)
    unlimited = ColdReads(times.now, times.now_ms)
    unlimited.took("G", 1 << 40, is_cold=True)
    unlimited.check("G", is_cold=True)


def test_reads_are_shown_for_their_window_only() -> None:
    times = Times()
    reads = ColdReads(times.now, times.now_ms)
    reads.took("a", 5)
    times.seconds += 1
    reads.took("a", 6)
    reads.took("b", 7)
    shown = reads.as_json()
    assert shown["globalAcc"] == 18
    assert shown["runtimeTable"] == {
        "a": {"coldAcc": 11, "createTimeMills": 100_000, "lastColdReadTimeMills": 101_000},
        "b": {"coldAcc": 7, "createTimeMills": 101_000, "lastColdReadTimeMills": 101_000},
    }
    times.seconds += WINDOW_S
    assert reads.as_json()["runtimeTable"] == {}


async def test_limits_are_set_shown_and_removed(harness: Harness) -> None:
    for name in ("G", "H"):
        harness.broker.groups.update(Group(name))
    client = harness.client()
    assert (await client.ask(UPDATE, body=b"G=100\nH=2000\n")).code == 0
    assert (await client.ask(REMOVE, body=b"H")).code == 0
    assert (await client.ask(REMOVE, body=b"H")).code == 0
    shown = orjson.loads((await client.ask(SHOW)).body)
    assert shown["configTable"] == {"G": 100}
    thresholds = {"cgColdReadThreshold", "globalColdReadThreshold"}
    assert shown.keys() == {"runtimeTable", "configTable", "globalAcc", *thresholds}


async def test_a_deleted_group_has_no_limit(harness: Harness) -> None:
    harness.broker.groups.update(Group("G"))
    client = harness.client()
    assert (await client.ask(UPDATE, body=b"G=100")).code == 0
    harness.broker.groups.delete("G", clean_offsets=True)
    assert harness.state.cold.limits == {}


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"G=100\nnobody=1", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group [nobody] does not exist"),
        (b"G=much", ResponseCode.INVALID_PARAMETER, "threshold 'much' is not a number of bytes; write 0 or more"),
        (b"G=-1", ResponseCode.INVALID_PARAMETER, "threshold '-1' is not a number"),
        (b"G=" + b"9" * 19, ResponseCode.INVALID_PARAMETER, "is not a number"),
        (b"G=\xff", ResponseCode.INVALID_PARAMETER, "not UTF-8"),
    ],
)
async def test_an_invalid_limit_changes_nothing(harness: Harness, body: bytes, code: int, remark: str) -> None:
    harness.broker.groups.update(Group("G"))
    answer = await harness.client().ask(UPDATE, body=body)
    assert (answer.code, harness.state.cold.limits) == (code, {})
    assert remark in str(answer.remark)


@pytest.mark.parametrize("body", [b"", b"G" * 256])
async def test_a_removal_must_name_a_group(harness: Harness, body: bytes) -> None:
    answer = await harness.client().ask(REMOVE, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER


async def pulled(client: FakeClient, topic: str, offset: int, group: str = "G") -> Command:
    """Return the answer to a pull of two messages, once a thread has read them."""
    number = client.send(PULL, pull_ext(topic, offset, maxMsgNums="2", consumerGroup=group))
    with trio.fail_after(PATIENCE_S):
        while number not in client.answers:
            await client.harness.step()
    return client.answers[number]


@pytest.mark.usefixtures("nothing_cached")
async def test_a_group_over_its_limit_is_refused_what_is_on_the_disk(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 40)
    limits = harness.state.cold.limits
    limits["G"] = 3000
    client = harness.client()
    answers = [await pulled(client, topic, 0)]
    while answers[-1].code == 0:  # on a slow machine a window may end before the limit is reached
        answers.append(await pulled(client, topic, 0))
    assert len(answers) >= 3
    assert answers[-1].code == ResponseCode.SYSTEM_BUSY
    assert "group [G] has read" in str(answers[-1].remark)
    assert client.handler.context.pulls.reading == {}
    # What is in memory is not limited, and neither is another group.
    assert (await pulled(client, topic, 39)).code == 0
    assert (await pulled(client, topic, 0, "other")).code == 0
    del limits["G"]
    assert (await pulled(client, topic, 0)).code == 0
    assert harness.state.statistics()["cold_reads_refused"] == 1
