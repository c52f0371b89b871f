"""The pop consumer: handles as the Java client makes them, acknowledgements one by one and in batches."""

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from trio.testing import MockClock

from martlet_client import BadAnswer, BrokerError, PopConsumer, PoppedMessage, RouteNotFound, Sql
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.pop_handles import bit_set

from .fake import Cluster, Reply

POP = RequestCode.POP_MESSAGE
ACK = RequestCode.ACK_MESSAGE
BATCH = RequestCode.BATCH_ACK_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME


def popping(cluster: Cluster, *places: tuple[int, int], starts: str, code: int = 0) -> None:
    """Let the broker answer a pop with the messages at *places*, each a queue and an offset."""
    body = b"".join(cluster.broker.queues["T", queue_id][offset] for queue_id, offset in places)
    ext: dict[str, object] = {"popTime": "1700000000123", "invisibleTime": "30000", "reviveQid": "5", "restNum": "0"}
    cluster.broker.overrides[POP] = lambda command: Reply(code, {**ext, "startOffsetInfo": starts}, body)
    for request in (ACK, BATCH):
        cluster.broker.overrides[request] = lambda command: Reply()


async def received(cluster: Cluster, *places: tuple[int, int], starts: str) -> list[PoppedMessage]:
    popping(cluster, *places, starts=starts)
    async with PopConsumer(cluster.settings(), "G") as consumer:
        return await consumer.receive("T", invisible_s=30)


def fill(cluster: Cluster, tag: str = "") -> None:
    for queue_id in (0, 1):
        for number in range(4):
            cluster.broker.put("T", queue_id, b"%d.%d" % (queue_id, number), tag)


async def test_messages_come_with_their_handles(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster)
    one, two, three = await received(cluster, (0, 1), (0, 3), (1, 2), starts="0 0 1;0 1 2")
    broker = cluster.broker.name
    assert str(one.handle) == f"1 1700000000123 30000 5 0 {broker} 0 1"
    assert str(two.handle) == f"1 1700000000123 30000 5 0 {broker} 0 3"
    assert str(three.handle) == f"2 1700000000123 30000 5 0 {broker} 1 2"
    assert [popped.body for popped in (one, two, three)] == [b"0.1", b"0.3", b"1.2"]
    (asked,) = cluster.broker.asked(POP)
    names = ("consumerGroup", "queueId", "maxMsgNums", "invisibleTime", "initMode")
    fields = {name: asked.text(name) for name in names}
    assert fields == {
        "consumerGroup": "G",
        "queueId": "-1",
        "maxMsgNums": "32",
        "invisibleTime": "30000",
        "initMode": "0",
    }


async def test_what_is_asked_for_is_said(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster)
    popping(cluster, (0, 0), starts="0 0 0")
    async with PopConsumer(cluster.settings(), "G", from_newest=True) as consumer:
        await consumer.receive("T", messages_max=3, wait_s=2.5, expression=Sql("a > 5"), in_order=True)
    (asked,) = cluster.broker.asked(POP)
    names = ("maxMsgNums", "pollTime", "initMode", "expType", "exp", "order")
    assert [asked.text(name) for name in names] == ["3", "2500", "1", "SQL92", "a > 5", "true"]
    assert asked.integer("bornTime") > 0


async def test_one_message_is_acknowledged_by_its_handle(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster)
    _, popped = await received(cluster, (0, 1), (0, 3), starts="0 0 1")
    async with PopConsumer(cluster.settings(), "G") as consumer:
        await consumer.ack(popped)
        await consumer.ack()
    (asked,) = cluster.broker.asked(ACK)
    assert dict(asked.ext) == {
        "consumerGroup": "G",
        "topic": "T",
        "queueId": "0",
        "extraInfo": str(popped.handle),
        "offset": "3",
        "bname": cluster.broker.name,
    }


async def test_several_messages_are_acknowledged_together(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster)
    found = await received(cluster, (0, 1), (0, 3), (1, 2), starts="0 0 1;0 1 2")
    async with PopConsumer(cluster.settings(), "G") as consumer:
        await consumer.ack(*found)
    (asked,) = cluster.broker.asked(BATCH)
    acks = orjson.loads(asked.body)["acks"]
    shared = {"c": "G", "t": "T", "r": "0", "rq": 5, "pt": 1700000000123, "it": 30000}
    assert [{name: ack[name] for name in shared} for ack in acks] == [shared, shared]
    assert [(ack["q"], ack["so"], b64decode(ack["b"])) for ack in acks] == [(0, 1, b"\x05"), (1, 2, b"\x01")]


async def test_the_new_handle_of_a_changed_message_replaces_the_old(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    fill(cluster)
    (popped,) = await received(cluster, (1, 2), starts="0 1 2")
    answer: dict[str, object] = {"popTime": "1700000000999", "invisibleTime": "1500", "reviveQid": "5"}
    cluster.broker.overrides[CHANGE] = lambda command: Reply(0, answer)
    async with PopConsumer(cluster.settings(), "G") as consumer:
        changed = await consumer.change_invisible(popped, 1.5)
        assert str(changed.handle) == f"2 1700000000999 1500 5 0 {cluster.broker.name} 1 2"
        cluster.broker.overrides[CHANGE] = lambda command: Reply(208, remark="too late")
        with pytest.raises(BrokerError, match="208"):
            await consumer.change_invisible(popped, 0)
    assert [asked.text("invisibleTime") for asked in cluster.broker.asked(CHANGE)] == ["1500", "0"]


@pytest.mark.parametrize("code", [210, 19])
async def test_without_messages_the_list_is_empty(cluster: Cluster, autojump_clock: MockClock, code: int) -> None:
    cluster.broker.put("T", 0, b"x")
    popping(cluster, starts="", code=code)
    async with PopConsumer(cluster.settings(), "G") as consumer:
        assert await consumer.receive("T") == []


async def test_a_broker_that_refuses_is_told(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    popping(cluster, starts="", code=209)
    async with PopConsumer(cluster.settings(), "G") as consumer:
        with pytest.raises(BrokerError, match="POLLING_FULL"):
            await consumer.receive("T")
        with pytest.raises(RouteNotFound):
            await consumer.receive("Nowhere")


async def test_tags_with_the_same_hash_are_acknowledged_unseen(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster, "AaBB")
    popping(cluster, (0, 0), starts="0 0 0")
    async with PopConsumer(cluster.settings(), "G") as consumer:
        assert await consumer.receive("T", expression="BBAa") == []
    assert len(cluster.broker.asked(ACK)) == 1


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda consumer: consumer.receive("T", messages_max=33), ValueError, "messages_max 33 is out of range"),
        (lambda consumer: consumer.receive("T", invisible_s=0), ValueError, "invisible_s 0 is out of range"),
        (lambda consumer: consumer.receive("T", wait_s=-1), ValueError, "wait_s -1 is out of range"),
        (lambda consumer: consumer.receive("T", in_order="yes"), TypeError, "in_order 'yes'"),
        (lambda consumer: consumer.receive("T", expression="a > 5"), ValueError, "looks like SQL92"),
        (lambda consumer: consumer.ack("handle"), TypeError, "popped 'handle'"),
        (lambda consumer: consumer.change_invisible("handle", 1), TypeError, "popped 'handle'"),
    ],
)
async def test_wrong_arguments_are_refused(
    cluster: Cluster,
    autojump_clock: MockClock,
    call: Callable[[PopConsumer], Any],
    error: type[Exception],
    says: str,
) -> None:
    async with PopConsumer(cluster.settings(), "G") as consumer:
        with pytest.raises(error, match=says):
            await call(consumer)
    assert not [command for command in cluster.broker.requests if command.code in (POP, ACK, CHANGE)]


@pytest.mark.parametrize(("numbers", "data"), [([], b"\0"), ([0], b"\1"), ([9], b"\0\2"), ([7, 0, 8], b"\x81\1")])
def test_bit_sets_are_javas(numbers: list[int], data: bytes) -> None:
    assert b64decode(bit_set(numbers)) == data


async def test_an_answer_that_contradicts_itself_is_refused(cluster: Cluster, autojump_clock: MockClock) -> None:
    fill(cluster)
    popping(cluster, (0, 0), starts="0 0")
    async with PopConsumer(cluster.settings(), "G") as consumer:
        with pytest.raises(BadAnswer, match="malformed"):
            await consumer.receive("T")
