"""POP: messages are taken for a time, acknowledged over any connection, and come again when they must."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from martlet.message import Message
from martlet.records.codec import decode_records
from martlet.tables.groups import Group
from martlet_remoting.consumers.pops import IDLE_S, STALL_S
from martlet_remoting.handlers.pops import finish
from martlet_remoting.wire.codec import encode_binary_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness
from .pop_talk import Popped, ack, ack_ext, bodies, committed, let_pass, pop, pop_ext, popped, run, waiting_ext

POP = RequestCode.POP_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
SUCCESS, POLLING_FULL, POLLING_TIMEOUT = 0, 209, 210


async def fill(harness: Harness, topic: str, *messages: bytes, queue_id: int = 0, tag: str = "") -> None:
    for body in messages:
        harness.broker.publish(Message(topic, body, f"TAGS\x01{tag}\x02".encode() if tag else b"", queue_id))
    await harness.step()


async def test_messages_come_as_they_are_stored_and_say_where_they_are(harness: Harness) -> None:
    topic = harness.topic("T", 2)
    await fill(harness, topic, b"a", b"b")
    await fill(harness, topic, b"c", queue_id=1)
    answer = await harness.client().ask(POP, pop_ext(topic))
    assert (answer.code, answer.remark) == (SUCCESS, "FOUND")
    assert dict(answer.ext) == {
        "popTime": str(harness.clock.ms),
        "invisibleTime": "30000",
        "reviveQid": "0",
        "restNum": "0",
        "startOffsetInfo": "0 0 0;0 1 0",
        "msgOffsetInfo": "0 0 0,1;0 1 0",
    }
    stored = [record.body for record in decode_records(answer.body)]
    assert stored == bodies(popped(answer)) == [b"a", b"b", b"c"]


async def test_the_committed_offset_is_that_of_the_oldest_message_not_acknowledged(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b", b"c")
    one, two = harness.client(), harness.client()
    first, second, third = await pop(one, topic)
    assert await pop(two, topic) == []
    assert committed(harness, topic) == 0
    await ack(two, second)  # over another connection
    assert committed(harness, topic) == 0
    await ack(one, first)
    assert committed(harness, topic) == 2
    one.close()
    await ack(two, third)
    assert committed(harness, topic) == 3


async def test_answers_to_acknowledgements_wait_for_the_disk(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"})
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    one, two = await pop(client, topic)
    for code, ext in ((RequestCode.ACK_MESSAGE, ack_ext(one)), (CHANGE, ack_ext(two, invisibleTime=1))):
        client.peer.holds_commit = False
        await client.ask(code, ext)
        assert client.peer.holds_commit


async def test_what_is_not_acknowledged_comes_again_after_its_time(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    one, two = await pop(client, topic, invisibleTime="20000")
    assert (one.times, two.times) == (0, 0)
    await ack(client, two)
    await let_pass(harness, 19.9)
    assert await pop(client, topic) == []
    await let_pass(harness, 0.2)
    (again,) = await pop(client, topic)
    assert (again.body, again.offset, again.times) == (b"a", 0, 1)
    assert again.handle.pop_ms > one.handle.pop_ms
    stale = await client.ask(RequestCode.ACK_MESSAGE, ack_ext(one))
    assert stale.code == SUCCESS
    assert "nothing was acknowledged" in str(stale.remark)
    assert committed(harness, topic) == 0
    await ack(client, again)
    assert committed(harness, topic) == 2


async def test_the_invisible_time_can_be_made_longer_and_shorter(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    (first,) = await pop(client, topic, invisibleTime="10000")
    await let_pass(harness, 9)
    longer = await client.ask(CHANGE, ack_ext(first, invisibleTime="60000"))
    assert longer.code == SUCCESS
    assert (longer.text("invisibleTime"), longer.text("reviveQid")) == ("60000", "0")
    assert longer.integer("popTime") > first.handle.pop_ms
    await let_pass(harness, 50)
    assert await pop(client, topic) == []
    old = await client.ask(CHANGE, ack_ext(first, invisibleTime="0"))
    assert (old.code, old.text("popTime")) == (208, "0")
    (again,) = [first.handle]
    newer = ack_ext(first, extraInfo=str(again).replace(str(again.pop_ms), longer.text("popTime")), invisibleTime="0")
    assert (await client.ask(CHANGE, newer)).code == SUCCESS
    await let_pass(harness, 0.1)
    assert [message.times for message in await pop(client, topic)] == [1]


async def test_a_message_that_fails_too_often_is_a_dead_letter(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    harness.broker.groups.update(Group("G", retry_max_times=2))
    await fill(harness, topic, b"bad", b"good")
    client = harness.client()
    times = []
    for _ in range(3):
        bad, *good = await pop(client, topic, invisibleTime="5000")
        times.append(bad.times)
        await ack(client, *good)
        await let_pass(harness, 6)
    assert times == [0, 1, 2]
    assert await pop(client, topic) == []
    assert committed(harness, topic) == 2
    letters = await pop(client, "%DLQ%G", consumerGroup="H")
    assert [(letter.body, letter.times) for letter in letters] == [(b"bad", 1)]


async def test_the_number_of_retries_can_be_changed(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"bad")
    client = harness.client()
    assert bodies(await pop(client, topic, invisibleTime="5000")) == [b"bad"]
    harness.broker.groups.update(Group("G", retry_max_times=0))
    await let_pass(harness, 6)
    assert await pop(client, topic) == []
    assert bodies(await pop(client, "%DLQ%G", consumerGroup="H")) == [b"bad"]


# waiting


async def test_a_pop_waits_for_a_message(harness: Harness) -> None:
    topic = harness.topic("T", 3)
    client, other = harness.client(), harness.client()
    first = client.send(POP, waiting_ext(topic))
    second = other.send(POP, waiting_ext(topic))
    await harness.step()
    assert not client.answers
    await fill(harness, topic, b"a", queue_id=2)
    assert bodies(popped(client.answers.pop(first))) == [b"a"]
    assert not other.answers
    await fill(harness, topic, b"b", queue_id=0)
    assert bodies(popped(other.answers.pop(second))) == [b"b"]


async def test_a_pop_waits_no_longer_than_it_says(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic, bornTime=str(harness.clock.now_ms() - 5000)))
    await let_pass(harness, 9.9)
    assert not client.answers
    await let_pass(harness, 0.4)
    answer = client.answers.pop(opaque)
    assert (answer.code, answer.text("restNum"), answer.text("popTime")) == (POLLING_TIMEOUT, "0", "0")
    assert harness.state.pops.waiting == 0
    assert not harness.state.pops.find("G", topic).waiting  # type: ignore[union-attr]


async def test_a_pop_that_came_too_late_is_not_run(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, b"a")
    client = harness.client()
    answer = await client.ask(POP, waiting_ext(topic, bornTime=str(harness.clock.now_ms() - 15_501)))
    assert (answer.code, answer.text("restNum")) == (POLLING_TIMEOUT, "0")
    assert bodies(await pop(client, topic)) == [b"a"]


async def test_messages_of_other_tags_wake_nobody_and_are_passed_over(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic, exp="A || B"))
    await harness.step()
    client.peer.woken = False
    harness.broker.publish(Message(topic, b"c", b"TAGS\x01C\x02", 0))
    harness.store.committer.commit()
    await harness.store.flusher.wait_flushed(harness.store.written)
    assert not client.peer.woken
    await fill(harness, topic, b"b", tag="B")
    assert bodies(popped(client.answers.pop(opaque))) == [b"b"]
    assert committed(harness, topic) == 1


async def test_a_message_wakes_only_the_pops_of_its_queue(harness: Harness) -> None:
    topic = harness.topic("T", 3)
    one, two = harness.client(), harness.client()
    first, second = one.send(POP, waiting_ext(topic, 0)), two.send(POP, waiting_ext(topic, 1))
    await harness.step()
    await fill(harness, topic, b"a", queue_id=1)
    assert not one.answers
    assert bodies(popped(two.answers.pop(second))) == [b"a"]
    await fill(harness, topic, b"b", queue_id=0)
    assert bodies(popped(one.answers.pop(first))) == [b"b"]


async def test_many_messages_wake_many_pops(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    clients = [harness.client() for _ in range(5)]
    sent = [client.send(POP, waiting_ext(topic, maxMsgNums="2")) for client in clients]
    await harness.step()
    await fill(harness, topic, *[b"%d" % number for number in range(8)])
    counts = [
        len(popped(client.answers[opaque])) if opaque in client.answers else 0
        for client, opaque in zip(clients, sent, strict=True)
    ]
    assert counts == [2, 2, 2, 2, 0]


async def test_too_many_waiting_pops_are_refused(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, pops_waiting_max=3, pops_line_max=2, parked_peer_max=2)
    one, two = harness.topic("One"), harness.topic("Two")
    client, other = harness.client(), harness.client()

    async def code(client: FakeClient, ext: dict[str, object]) -> int:
        opaque = client.send(POP, ext)
        await harness.step()
        answer = client.answers.get(opaque)
        if answer is not None and answer.code == POLLING_FULL:
            assert answer.text("restNum") == "0"
        return answer.code if answer is not None else -1

    assert [await code(client, waiting_ext(one)) for _ in range(2)] == [-1, -1]
    assert await code(client, waiting_ext(two)) == POLLING_FULL  # of this connection
    assert await code(other, waiting_ext(one)) == POLLING_FULL  # for this queue
    assert await code(other, waiting_ext(one, 0)) == -1
    assert await code(other, waiting_ext(two)) == POLLING_FULL  # of all
    client.close()
    assert harness.state.pops.waiting == 1
    assert await code(other, waiting_ext(one)) == -1


async def test_client_addresses_that_wait_take_turns(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    busy, modest = harness.client(host="10.0.0.1"), harness.client(host="10.0.0.2")
    sent = [busy.send(POP, waiting_ext(topic, maxMsgNums="1")) for _ in range(4)]
    other = [modest.send(POP, waiting_ext(topic, maxMsgNums="1")) for _ in range(2)]
    await harness.step()
    await fill(harness, topic, b"a", b"b", b"c", b"d", b"e")
    assert [bodies(popped(busy.answers[opaque])) for opaque in sent[:3]] == [[b"a"], [b"c"], [b"e"]]
    assert [bodies(popped(modest.answers[opaque])) for opaque in other] == [[b"b"], [b"d"]]
    assert sent[3] not in busy.answers


@pytest.mark.parametrize("poll_ms", ["15000", "0"])
async def test_a_client_that_pops_all_the_time_takes_nothing_from_one_that_waits(
    harness: Harness, poll_ms: str
) -> None:
    topic = harness.topic("T", 1)
    waiting, busy = harness.client(host="10.0.0.2"), harness.client(host="10.0.0.1")
    opaque = waiting.send(POP, waiting_ext(topic, maxMsgNums="1"))
    await harness.step()
    for body in b"a", b"b":
        harness.broker.publish(Message(topic, body, queue_id=0))
    harness.store.committer.commit()
    await harness.store.flusher.wait_flushed(harness.store.written)
    sent = [busy.send(POP, waiting_ext(topic, maxMsgNums="1", pollTime=poll_ms)) for _ in range(2)]
    assert not busy.answers
    await harness.step()
    assert bodies(popped(waiting.answers.pop(opaque))) == [b"a"]
    assert bodies(popped(busy.answers.pop(sent[0]))) == [b"b"]
    assert sent[1] not in busy.answers


async def test_a_client_that_does_not_read_delays_the_pops_of_others_only_for_a_moment(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    slow, other = harness.client(host="10.0.0.2"), harness.client(host="10.0.0.1")
    slow.send(POP, waiting_ext(topic))
    await harness.step()
    harness.clients.remove(slow)  # the server does not let it collect
    await fill(harness, topic, b"a")
    opaque = other.send(POP, waiting_ext(topic, pollTime="0"))
    assert not other.answers
    await let_pass(harness, 3 * STALL_S)
    assert bodies(popped(other.answers.pop(opaque))) == [b"a"]
    await fill(harness, topic, b"b")
    assert bodies(await pop(other, topic)) == [b"b"]
    slow.handler.closed("")


async def test_in_a_full_line_a_busy_address_gives_way(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, pops_line_max=4)
    topic = harness.topic("T", 1)
    busy, modest = harness.client(host="10.0.0.1"), harness.client(host="10.0.0.2")
    sent = [busy.send(POP, waiting_ext(topic)) for _ in range(5)]
    await harness.step()
    assert [(place, busy.answers.pop(sent[place]).code) for place in range(5) if sent[place] in busy.answers] == [
        (4, POLLING_FULL)
    ]
    other = [modest.send(POP, waiting_ext(topic)) for _ in range(3)]
    await harness.step()
    assert {opaque: answer.code for opaque, answer in busy.answers.items()} == {
        sent[3]: POLLING_TIMEOUT,
        sent[2]: POLLING_TIMEOUT,
    }
    assert {opaque: answer.code for opaque, answer in modest.answers.items()} == {other[2]: POLLING_FULL}
    assert harness.state.pops.waiting == 4


async def test_a_message_for_a_connection_that_closes_goes_to_another(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    client, other = harness.client(), harness.client()
    client.send(POP, waiting_ext(topic))
    opaque = other.send(POP, waiting_ext(topic))
    await harness.step()
    harness.broker.publish(Message(topic, b"a", queue_id=0))
    harness.store.committer.commit()
    await harness.store.flusher.wait_flushed(harness.store.written)
    assert client.peer.woken
    client.close()
    await harness.step()
    assert bodies(popped(other.answers.pop(opaque))) == [b"a"]


async def test_a_message_for_a_connection_that_does_not_read_goes_to_another(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    slow, other = harness.client(), harness.client()
    slow.send(POP, waiting_ext(topic))
    opaque = other.send(POP, waiting_ext(topic))
    await harness.step()
    harness.clients.remove(slow)  # the server does not let it collect
    await fill(harness, topic, b"a")
    assert not other.answers
    await let_pass(harness, 3 * STALL_S)
    assert bodies(popped(other.answers.pop(opaque))) == [b"a"]
    slow.handler.closed("")


async def test_returned_messages_wake_pops(harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    await pop(client, topic, invisibleTime="3000")
    opaque = client.send(POP, waiting_ext(topic))
    await let_pass(harness, 3.1)
    assert [message.times for message in popped(client.answers.pop(opaque))] == [1]


async def test_messages_far_behind_the_tail_are_read_by_a_thread(
    open_harness: OpenHarness, nursery: trio.Nursery
) -> None:
    harness = await open_harness(store={"flush": "async", "page_bytes": 4096, "cache_bytes": 0})
    topic = harness.topic("T", 2)
    for number in range(100):
        await fill(harness, topic, b"%d" % number + bytes(1000), queue_id=number % 2)
    client = harness.client()
    came: list[bytes] = []
    while len(came) < 100:
        opaque = client.send(POP, pop_ext(topic))
        while opaque not in client.answers:
            await harness.step()
        found = popped(client.answers.pop(opaque))
        came += bodies(found)
        await ack(client, *found)
    assert sorted(body.rstrip(b"\0") for body in came) == sorted(b"%d" % number for number in range(100))
    assert [committed(harness, topic, queue_id) for queue_id in (0, 1)] == [50, 50]


async def test_at_shutdown_waiting_pops_are_answered(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic))
    await harness.step()
    harness.state.pops.answer_all()
    finish(client.handler.context)
    await harness.step()
    assert client.answers.pop(opaque).code == POLLING_TIMEOUT
    assert (await client.ask(POP, waiting_ext(topic))).code == POLLING_TIMEOUT


# in order


async def test_in_order_the_next_messages_wait_for_those_before(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b", b"c")
    client = harness.client()
    a, b = await pop(client, topic, order="true", maxMsgNums="2", invisibleTime="10000")
    assert a.handle.revive_queue == 999
    opaque = client.send(POP, waiting_ext(topic, order="true"))
    await ack(client, b)
    assert opaque not in client.answers
    await let_pass(harness, 10.3)
    answer = client.answers.pop(opaque)
    assert answer.text("orderCountInfo") == "0 qo0%0 1;0 qo0%1 1;0 0 0"
    again, b, c = popped(answer)
    assert (again.body, again.times, b.body, b.times, c.body, c.times) == (b"a", 1, b"b", 1, b"c", 0)
    await fill(harness, topic, b"d")
    opaque = client.send(POP, waiting_ext(topic, order="true"))
    await ack(client, c, b)
    assert opaque not in client.answers
    await ack(client, again)
    assert bodies(popped(client.answers.pop(opaque))) == [b"d"]


async def ack_late(client: FakeClient, *messages: Popped) -> None:
    """Send acknowledgements that have no effect."""
    for message in messages:
        answer = await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message))
        assert (answer.code, "nothing was acknowledged" in (answer.remark or "")) == (SUCCESS, True)


async def test_in_order_what_was_acknowledged_after_an_extended_message_follows_it_again(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"1", b"2", b"3", b"4")
    client = harness.client()
    first, second, third = await pop(client, topic, order="true", maxMsgNums="3", invisibleTime="5000")
    await ack(client, first)
    answer = await client.ask(CHANGE, ack_ext(second, invisibleTime="3000"))
    assert answer.code == SUCCESS
    await ack(client, third)
    assert committed(harness, topic) == 1
    assert await pop(client, topic, order="true") == []
    await let_pass(harness, 3.3)
    found = await pop(client, topic, order="true", invisibleTime="5000")
    assert [(each.body, each.times) for each in found] == [(b"2", 1), (b"3", 1), (b"4", 0)]
    await ack(client, *found)
    assert committed(harness, topic) == 4
    assert harness.broker.shared_groups.statistics()["unsettled"] == 0


async def test_in_order_an_acknowledgement_before_an_earlier_one_counts_if_that_follows(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"1", b"2", b"3")
    client = harness.client()
    first, second = await pop(client, topic, order="true", maxMsgNums="2")
    await ack(client, second)
    await ack(client, first)
    assert committed(harness, topic) == 2
    assert bodies(await pop(client, topic, order="true")) == [b"3"]


async def test_the_last_attempt_takes_the_same_messages_again(harness: Harness) -> None:
    """Its answer was lost; another one waits for the invisible time."""
    topic = harness.topic("T", 1)
    await fill(harness, topic, *[b"%d" % number for number in range(5)])
    one: dict[str, Any] = {"order": "true", "maxMsgNums": "2", "attemptId": "X"}
    lost = await pop(harness.client(), topic, **one)
    client = harness.client()
    assert await pop(client, topic, order="true", attemptId="Y") == []
    assert await pop(client, topic, order="true") == []
    notification = {**waiting_ext(topic, order="true", pollTime="0"), "attemptId": "X"}
    assert (await client.ask(RequestCode.NOTIFICATION, notification)).boolean("hasMsg")
    again = await pop(client, topic, **one)
    assert bodies(again) == bodies(lost) == [b"0", b"1"]
    await ack_late(client, *lost)
    assert committed(harness, topic) == 0, "these handles are no longer valid"
    await ack(client, again[1])
    assert bodies(await pop(client, topic, **one)) == [b"0", b"1"], "from the first that is not acknowledged"
    for _ in range(20):
        again = await pop(client, topic, **one)
    assert bodies(again) == [b"0", b"1"], "an attempt is no failed delivery"
    await ack(client, *again)
    assert bodies(await pop(client, topic, **one)) == [b"2", b"3"]


@pytest.mark.parametrize("queue_id", [-1, 0])
@pytest.mark.parametrize(("offset", "came"), [(0, [b"0", b"1"]), (3, [b"3", b"4"])])
async def test_a_reset_ends_what_is_popped_in_order(
    harness: Harness, offset: int, came: list[bytes], queue_id: int
) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, *[b"%d" % number for number in range(5)])
    client = harness.client()
    old = await pop(client, topic, queue_id, order="true", maxMsgNums="2")
    opaque = client.send(POP, waiting_ext(topic, queue_id, order="true", maxMsgNums="2"))
    await harness.step()
    assert opaque not in client.answers
    harness.broker.groups.offsets.reset("G", topic, {0: offset})
    await harness.step()
    assert bodies(popped(client.answers.pop(opaque))) == came
    await ack_late(client, *old)
    assert committed(harness, topic) == offset
    assert await pop(client, topic, queue_id, order="true") == []


# where a group begins, and what ends it


@pytest.mark.parametrize(
    ("mode", "memory", "came"), [("0", 1 << 40, [b"a", b"b"]), ("1", 1 << 40, [b"a", b"b"]), ("1", 0, [b"b"])]
)
async def test_a_new_group_begins_where_its_first_pop_says(
    harness: Harness, mode: str, memory: int, came: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet_remoting.handlers.offsets.NEAR_BYTES", memory)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    assert bodies(await pop(harness.client(), topic, initMode=mode)) == came


async def test_a_group_continues_where_its_pulls_have_committed(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b", b"c")
    client = harness.client()
    harness.broker.groups.ensure("G")
    ext = {"consumerGroup": "G", "topic": topic, "queueId": "0", "commitOffset": "2"}
    assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == SUCCESS
    assert bodies(await pop(client, topic)) == [b"c"]


async def test_a_reset_makes_waiting_pops_look_again(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    old = await pop(client, topic)
    await ack(client, *old)
    opaque = client.send(POP, waiting_ext(topic, 0))
    await harness.step()
    harness.broker.groups.offsets.reset("G", topic, {0: 1})
    await harness.step()
    (again,) = popped(client.answers.pop(opaque))
    assert (again.body, committed(harness, topic)) == (b"b", 1)


async def test_waiting_pops_of_a_deleted_topic_are_answered(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic))
    await harness.step()
    harness.broker.topics.delete(topic)
    await harness.step()
    assert client.answers.pop(opaque).code == 17
    harness.topic("T", 1)
    await fill(harness, topic, b"new")
    assert bodies(await pop(client, topic)) == [b"new"]


async def test_waiting_pops_of_a_group_that_may_read_no_more_are_answered(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic))
    await harness.step()
    harness.broker.groups.update(Group("G", consume_enable=False))
    await harness.step()
    assert client.answers.pop(opaque).code == 16
    harness.broker.groups.update(Group("G"))
    await fill(harness, topic, b"a")
    assert bodies(await pop(client, topic)) == [b"a"]


async def test_permissions_are_checked_again_before_a_waiting_pop_is_answered(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    client = harness.client()
    opaque = client.send(POP, waiting_ext(topic))
    await harness.step()
    harness.broker.authorizers = (lambda identity, action, topic: action != "read",)
    await fill(harness, topic, b"secret")
    answer = client.answers.pop(opaque)
    assert (answer.code, answer.body) == (16, b"")
    harness.broker.authorizers = ()
    assert bodies(await pop(client, topic)) == [b"secret"]


async def test_a_deleted_group_is_forgotten(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    assert len(await pop(client, topic)) == 1
    harness.broker.groups.delete("G", clean_offsets=True)
    await harness.step()
    assert harness.broker.shared_groups.statistics()["shares"] == 0
    (again,) = await pop(client, topic)
    assert again.times == 0
    await ack(client, again)


async def test_a_group_that_nobody_pops_leaves_memory_and_its_handles_stay_valid(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    one, two = await pop(client, topic, invisibleTime="3000000")
    await let_pass(harness, IDLE_S + 1)
    harness.state.pops.sweep()
    assert harness.state.pops.statistics()["popping_groups"] == 0
    await ack(client, one)
    await let_pass(harness, 700)  # delivery.share_memory_s
    assert harness.broker.shared_groups.statistics()["shares"] == 0
    await ack(client, two)
    assert committed(harness, topic) == 2


# requests


@pytest.mark.parametrize(
    ("ext", "code", "says"),
    [
        ({"topic": "Nowhere"}, 17, "topic[Nowhere] not exist"),
        ({"topic": "WriteOnly"}, 16, "its perm lacks 4"),
        ({"queueId": "4"}, 29, "topicConfig.readQueueNums:[4]"),
        ({"maxMsgNums": "33"}, 29, "not between 1 and 32"),
        ({"maxMsgNums": "0"}, 29, "not between 1 and 32"),
        ({"invisibleTime": "-1"}, 29, "invisibleTime -1"),
        ({"invisibleTime": str(1 << 60)}, 29, "invisibleTime 1152921504606846976"),
        ({"consumerGroup": "Stopped"}, 16, "consumeEnable"),
        ({"consumerGroup": "a/b"}, 29, "illegal characters"),
        ({"exp": "||"}, 23, "parse the consumer's subscription failed"),
        ({"exp": "||" + " " * 600}, 23, "parse the consumer's subscription failed"),
        ({"expType": "SQL92", "exp": "a > 1"}, 1, "SQL92"),
        ({"queueId": None}, 1, "lacks the header field queueId"),
        ({"invisibleTime": "x"}, 1, "invisibleTime 'x' is not a 64-bit integer"),
    ],
)
async def test_what_may_not_be_popped_is_refused(
    harness: Harness, ext: dict[str, object], code: int, says: str
) -> None:
    topic = harness.topic("T")
    harness.topic("WriteOnly", perm=2)
    harness.broker.groups.update(Group("Stopped", consume_enable=False))
    answer = await harness.client().ask(POP, pop_ext(topic) | ext)
    assert answer.code == code
    assert says in str(answer.remark)


async def test_an_unknown_group_is_refused_if_none_is_made(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_groups": False}, store={"flush": "async"})
    answer = await harness.client().ask(POP, pop_ext(harness.topic("T")))
    assert answer.code == 26


async def test_the_code_may_be_cut_to_16_bits_by_the_binary_header(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    for code, ext in ((POP, pop_ext(topic)), (RequestCode.POLLING_INFO, pop_ext(topic))):
        client.connection.receive_data(encode_binary_command(Command(code & 0xFFFF, ext, opaque=7)), 0.0)
        for event in client.connection.events():
            client.handle(event)
        await harness.step()
        assert client.answers.pop(7).code == SUCCESS


async def test_oneway_pops_take_nothing(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    client.send(POP, pop_ext(topic), flag=2)
    client.send(RequestCode.NOTIFICATION, pop_ext(topic), flag=2)
    await harness.step()
    assert not client.answers
    assert bodies(await pop(client, topic)) == [b"a"]


async def test_notifications_tell_of_messages_and_take_none(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    client = harness.client()

    def said(answer: Command) -> tuple[Any, ...]:
        return answer.code, answer.text("hasMsg"), answer.text("pollingFull")

    ask = {"consumerGroup": "G", "topic": topic, "queueId": "-1", "pollTime": "5000", "bornTime": "0"}
    waiting = client.send(RequestCode.NOTIFICATION, ask)
    took = client.send(POP, waiting_ext(topic))
    await let_pass(harness, 1)
    assert not client.answers
    await fill(harness, topic, b"a")
    assert said(client.answers.pop(waiting)) == (0, "true", "false")
    assert bodies(popped(client.answers.pop(took))) == [b"a"]
    waiting = client.send(RequestCode.NOTIFICATION, ask)
    await let_pass(harness, 5.5)
    assert said(client.answers.pop(waiting)) == (0, "false", "false")
    assert said(await client.ask(RequestCode.NOTIFICATION, ask | {"consumerGroup": "New"})) == (0, "true", "false")
    assert bodies(await pop(client, topic, consumerGroup="New")) == [b"a"]


async def test_a_full_queue_of_notifications_is_reported(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, pops_waiting_max=1)
    topic = harness.topic("T", 1)
    ask = {"consumerGroup": "G", "topic": topic, "queueId": "-1", "pollTime": "5000", "bornTime": "0"}
    client = harness.client()
    client.send(RequestCode.NOTIFICATION, ask)
    answer = await client.ask(RequestCode.NOTIFICATION, ask)
    assert (answer.code, answer.text("hasMsg"), answer.text("pollingFull")) == (0, "false", "true")


async def test_peeks_show_what_was_not_popped_and_take_nothing(harness: Harness) -> None:
    topic = harness.topic("T", 2)
    client = harness.client()
    peek = {"consumerGroup": "G", "topic": topic, "queueId": "-1", "maxMsgNums": "2"}
    empty = await client.ask(RequestCode.PEEK_MESSAGE, peek)
    assert (empty.code, empty.text("restNum")) == (19, "0")
    await fill(harness, topic, b"a", b"b", b"c")
    found = await client.ask(RequestCode.PEEK_MESSAGE, peek)
    assert [record.body for record in decode_records(found.body)] == [b"a", b"b"]
    assert (found.code, found.text("restNum")) == (0, "3")
    await pop(client, topic, maxMsgNums="1")
    found = await client.ask(RequestCode.PEEK_MESSAGE, peek | {"queueId": "0"})
    assert [record.body for record in decode_records(found.body)] == [b"b", b"c"]
    assert (await client.ask(RequestCode.PEEK_MESSAGE, peek | {"maxMsgNums": "33"})).code == 29
    assert (await client.ask(RequestCode.PEEK_MESSAGE, peek | {"queueId": "2"})).code == 29


async def test_polling_info_counts_waiting_pops(harness: Harness) -> None:
    topic = harness.topic("T", 2)
    client = harness.client()
    for queue_id in (-1, -1, 1):
        client.send(POP, waiting_ext(topic, queue_id))
    client.send(POP, waiting_ext(topic, order="true"))
    counts = []
    for queue_id in (-1, 0, 1):
        ext = {"consumerGroup": "G", "topic": topic, "queueId": str(queue_id)}
        counts.append((await client.ask(RequestCode.POLLING_INFO, ext)).text("pollingNum"))
    assert counts == ["3", "0", "1"]


async def test_consumers_of_a_group_may_change_its_expression(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    client = harness.client()
    assert await pop(client, topic, exp="A") == []
    await fill(harness, topic, b"b", tag="B")
    assert bodies(await pop(client, topic, exp="B")) == [b"b"]


def taken(client: FakeClient) -> set[tuple[int, int]]:
    """Return the queue and offset of each message that the answers to *client* have, and drop the answers."""
    found: set[tuple[int, int]] = set()
    for answer in client.answers.values():
        for line in answer.text("msgOffsetInfo").split(";") if answer.code == SUCCESS else ():
            _, queue_id, offsets = line.split(" ")
            found |= {(int(queue_id), int(offset)) for offset in offsets.split(",")}
    client.answers.clear()
    return found


async def test_a_hundred_thousand_handles_of_killed_consumers_come_again_in_time(
    open_harness: OpenHarness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    harness = await open_harness(store={"flush": "async"}, cached=True, parked_peer_max=10_000)
    run(harness, nursery)
    topic = harness.topic("T", 8)
    every = {(queue_id, offset) for queue_id in range(8) for offset in range(12_500)}
    for queue_id, _ in sorted(every):
        harness.store.writer.append(Message(topic, b"x"), queue_id)
    await harness.step()
    killed, client = harness.client(), harness.client()
    held: set[tuple[int, int]] = set()
    while len(held) < len(every):
        for _ in range(100):
            killed.send(POP, pop_ext(topic, invisibleTime="60000"))
        await harness.step()
        held |= taken(killed)
    killed.close()
    last = trio.current_time()
    again: set[tuple[int, int]] = set()
    while len(again) < len(every) and trio.current_time() <= last + 61:
        for _ in range(100):
            client.send(POP, waiting_ext(topic, invisibleTime="600000"))
        await harness.step()
        again |= taken(client)
        if not again:
            await trio.sleep(10)
    assert again == held == every
    assert trio.current_time() <= last + 61


async def test_looking_without_taking_makes_no_group(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, b"a")
    client = harness.client()
    peek = {**pop_ext(topic, 0), "consumerGroup": "made-up"}
    assert (await client.ask(RequestCode.PEEK_MESSAGE, peek)).code == SUCCESS
    assert (await client.ask(RequestCode.POLLING_INFO, peek)).code == SUCCESS
    assert harness.broker.groups.get("made-up") is None
    assert bodies(await pop(client, topic, consumerGroup="made-up")) == [b"a"]
    assert harness.broker.groups.get("made-up") is not None
