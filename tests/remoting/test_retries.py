"""Retries are delivered after a pause that grows, whatever restarts in between."""

from struct import pack
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from martlet.contracts import Timers
from martlet.groups.strategy.redelivery import LONGEST_MS, pause_ms
from martlet.message import Message, Record
from martlet.records.codec import decode_records, encode_record
from martlet.records.layout import BORN_V6, STORE_V6
from martlet.store import ReadResult, ReadStatus
from martlet_remoting.consumers.retries import hold_back
from martlet_remoting.consumers.timeouts import TICK_S
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext

PULL = RequestCode.PULL_MESSAGE
RETRY = "%RETRY%G"
MAY_WAIT = "6"
HELD_MS = 30_000
LATE_MS = TICK_S * 1000 + 10


@pytest.fixture
async def running(open_harness: OpenHarness, nursery: trio.Nursery) -> Harness:
    """A harness whose clocks and timeouts run, with one message in topic T."""
    harness = await open_harness(store={"flush": "async"})
    harness.clock.run()
    nursery.start_soon(harness.state.timeouts.run)
    harness.topic("T")
    return harness


async def publish(harness: Harness, body: bytes, topic: str = "T", times: int = 0) -> int:
    """Store a message; return its position."""
    ext = send_ext(topic, 0, j=str(times), l="16")
    answer = await harness.client().ask(RequestCode.SEND_MESSAGE_V2, ext, body)
    assert answer.code == 0
    return int(str(answer.ext["msgId"])[16:], 16)


async def fail(client: FakeClient, position: int) -> None:
    ext = {"offset": str(position), "group": "G", "delayLevel": "0"}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)).code == 0


async def answer_to(harness: Harness, client: FakeClient, opaque: int) -> Command:
    """Wait for the answer to a held pull."""
    while opaque not in client.answers:
        await trio.sleep(0.01)
        await harness.step()
    return client.answers.pop(opaque)


async def pull(harness: Harness, client: FakeClient, offset: int) -> list[Record]:
    """The next messages of the retry topic for a pull that waits as a push consumer's does."""
    ext = pull_ext(RETRY, offset, sysFlag=MAY_WAIT, suspendTimeoutMillis=str(HELD_MS))
    answer = await answer_to(harness, client, client.send(PULL, ext))
    assert answer.code in (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND)
    return decode_records(answer.body)


async def test_each_retry_comes_after_its_pause_until_the_message_is_dead(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    position = await publish(running, b"poison")
    await fail(client, position)
    for failures in range(1, 17):
        began_ms = running.clock.now_ms()
        (record,) = await pull(running, client, failures - 1)
        waited_ms = running.clock.now_ms() - began_ms
        assert record.reconsume_times == failures
        assert pause_ms(failures) <= waited_ms <= pause_ms(failures) + LATE_MS
        await fail(client, record.position)
    (letter,) = decode_records((await client.ask(PULL, pull_ext("%DLQ%G", 0))).body)
    assert (letter.body, letter.reconsume_times) == (b"poison", 17)
    assert trio.current_time() >= 60


async def test_a_pull_that_may_not_wait_gets_an_empty_answer(running: Harness, autojump_clock: MockClock) -> None:
    client = running.client()
    await fail(client, await publish(running, b"a"))
    answer = await client.ask(PULL, pull_ext(RETRY, 0))
    assert (answer.code, answer.ext["nextBeginOffset"], answer.body) == (ResponseCode.PULL_NOT_FOUND, "0", b"")
    await trio.sleep(pause_ms(1) / 1000)
    assert (await client.ask(PULL, pull_ext(RETRY, 0))).code == ResponseCode.SUCCESS


async def test_a_held_pull_whose_time_ends_before_the_pause_is_answered_then(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    await publish(running, b"a", RETRY, 16)
    ext = pull_ext(RETRY, 0, sysFlag=MAY_WAIT, suspendTimeoutMillis="1000")
    answer = await answer_to(running, client, client.send(PULL, ext))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "0")
    assert 1 <= trio.current_time() <= 1.5


async def test_due_messages_are_delivered_without_those_that_are_not(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    for body in (b"a", b"b"):
        await publish(running, body, RETRY, 1)
    await trio.sleep(0.4)
    await publish(running, b"c", RETRY, 1)
    assert [record.body for record in await pull(running, client, 0)] == [b"a", b"b"]
    assert [record.body for record in await pull(running, client, 2)] == [b"c"]


async def test_a_retry_waits_for_another_no_longer_than_the_longest_pause(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    await publish(running, b"often", RETRY, 16)
    await trio.sleep(LONGEST_MS / 1000 - 1)
    began_ms = running.clock.now_ms()
    await publish(running, b"once", RETRY, 1)
    assert [record.body for record in await pull(running, client, 0)] == [b"often", b"once"]
    assert running.clock.now_ms() - began_ms <= 1000 + LATE_MS


async def test_nothing_remains_of_a_pull_in_a_pause_when_its_client_leaves(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    await publish(running, b"a", RETRY, 16)
    client.send(PULL, pull_ext(RETRY, 0, sysFlag=MAY_WAIT))
    await running.step()
    assert len(running.state.parked) == 1
    client.close()
    assert len(running.state.parked) == 0
    await trio.sleep(LONGEST_MS / 1000 + 1)
    assert len(running.state.timeouts) == 0


async def test_a_pull_with_an_earlier_offset_is_not_late_for_its_own_record(
    running: Harness, autojump_clock: MockClock
) -> None:
    """Two clients that read one queue, as while it goes from one to the other."""
    one, two = running.client(), running.client()
    await publish(running, b"a", RETRY, 3)
    await publish(running, b"b", RETRY, 5)
    later = one.send(PULL, pull_ext(RETRY, 1, sysFlag=MAY_WAIT))
    await running.step()
    sooner = two.send(PULL, pull_ext(RETRY, 0, sysFlag=MAY_WAIT))
    await running.step()
    (record,) = decode_records((await answer_to(running, two, sooner)).body)
    assert (record.body, trio.current_time() <= (pause_ms(3) + LATE_MS) / 1000) == (b"a", True)
    (record,) = decode_records((await answer_to(running, one, later)).body)
    assert (record.body, trio.current_time() >= pause_ms(5) / 1000) == (b"b", True)


async def test_new_retries_do_not_wake_a_pull_that_waits_for_an_older_one(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    await publish(running, b"a", RETRY, 16)
    client.send(PULL, pull_ext(RETRY, 0, sysFlag=MAY_WAIT))
    await running.step()
    for _ in range(3):
        await publish(running, b"b", RETRY, 1)
        assert not client.handler.context.pulls.ready
        assert len(running.state.parked) == 1


async def test_a_reset_and_a_deletion_reach_a_pull_that_waits_for_a_retry(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    for _ in range(2):
        await publish(running, b"a", RETRY, 16)
    opaque = client.send(PULL, pull_ext(RETRY, 0, sysFlag=MAY_WAIT))
    await running.step()
    running.broker.groups.offsets.reset("G", RETRY, {0: 1})
    running.state.parked.wake_topic(RETRY)
    await running.step()
    answer = client.answers.pop(opaque)
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "1")
    opaque = client.send(PULL, pull_ext(RETRY, 1, sysFlag=MAY_WAIT))
    await running.step()
    running.broker.topics.delete(RETRY)
    await running.step()
    assert client.answers.pop(opaque).code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_broker_that_stops_answers_a_pull_that_waits_for_a_retry(
    running: Harness, autojump_clock: MockClock
) -> None:
    client = running.client()
    await publish(running, b"a", RETRY, 16)
    opaque = client.send(PULL, pull_ext(RETRY, 0, sysFlag=MAY_WAIT))
    await running.step()
    running.state.parked.answer_all()
    await running.step()
    assert client.answers.pop(opaque).code == ResponseCode.PULL_NOT_FOUND


async def test_others_than_the_group_see_its_retries_at_once(running: Harness, autojump_clock: MockClock) -> None:
    await publish(running, b"a", RETRY, 16)
    answer = await running.client().ask(PULL, pull_ext(RETRY, 0, consumerGroup="Inspector"))
    assert [record.body for record in decode_records(answer.body)] == [b"a"]


async def test_a_message_sent_to_the_retry_topic_that_never_failed_comes_at_once(
    running: Harness, autojump_clock: MockClock
) -> None:
    await publish(running, b"a", RETRY, 0)
    answer = await running.client().ask(PULL, pull_ext(RETRY, 0))
    assert [record.body for record in decode_records(answer.body)] == [b"a"]


async def test_retries_that_a_timer_holds_do_not_wait_again(running: Harness, autojump_clock: MockClock) -> None:
    running.broker.capabilities = {Timers: Timers()}
    await publish(running, b"a", RETRY, 16)
    assert (await running.client().ask(PULL, pull_ext(RETRY, 0))).code == ResponseCode.SUCCESS


@pytest.mark.usefixtures("nothing_cached")
async def test_retries_far_behind_the_end_of_the_log_wait_as_well(
    open_harness: OpenHarness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    harness = await open_harness(store={"flush": "async", "page_bytes": 4096, "cache_bytes": 0})
    harness.clock.run()
    nursery.start_soon(harness.state.timeouts.run)
    harness.topic("T")
    await publish(harness, b"a", RETRY, 3)
    for _ in range(40):
        await publish(harness, bytes(1000))
    queue = harness.store.queue(RETRY, 0)
    assert harness.store.readers.read_near(queue, 0, 1, 1) is None
    (record,) = await pull(harness, harness.client(), 0)
    assert (record.body, harness.clock.now_ms() - record.store_ms >= pause_ms(3)) == (b"a", True)


async def test_a_restart_neither_loses_a_retry_nor_shortens_its_pause(
    open_harness: OpenHarness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    before = await open_harness(store={"flush": "sync"})
    before.topic("T")
    await fail(before.client(), await publish(before, b"a"))
    await before.store.close()
    after = await open_harness(store={"flush": "async"})
    after.broker.topics.ensure(RETRY, 1)
    after.clock.run()
    nursery.start_soon(after.state.timeouts.run)
    (record,) = await pull(after, after.client(), 0)
    assert (record.body, record.reconsume_times) == (b"a", 1)
    assert pause_ms(1) <= after.clock.now_ms() - record.store_ms <= pause_ms(1) + LATE_MS


# what is cut


def retry(offset: int, *, times: int = 1, store_ms: int = 1000, **more: Any) -> bytes:
    host = pack(">Ii", 0x7F000001, 1)
    message = Message(RETRY, b"body", b"", 0, reconsume_times=times, **more)
    return bytes(encode_record(message, 0, offset, 4096 * offset, store_ms, host))


def found(*pieces: bytes) -> ReadResult:
    records = decode_records(b"".join(pieces))
    result = ReadResult(ReadStatus.FOUND, records[-1].queue_offset + 1, 0, 99)
    result.pieces, result.count, result.size = list(pieces), len(records), sum(map(len, pieces))
    return result


def test_a_result_is_cut_at_its_first_record_that_has_to_wait_in_whichever_piece() -> None:
    records = [retry(7), retry(8), retry(10, store_ms=1100), retry(11)]
    for border in range(1, 4):
        result = found(b"".join(records[:border]), b"".join(records[border:]))
        assert hold_back(result, 1300) == 50
        assert b"".join(result.pieces) == records[0] + records[1]
        assert (result.count, result.size, result.next_offset) == (2, len(records[0]) * 2, 10)


def test_due_messages_are_not_cut() -> None:
    result = found(retry(1), retry(2))
    pieces = list(result.pieces)
    assert hold_back(result, 1250) == 0
    assert (result.pieces, result.count, result.next_offset) == (pieces, 2, 3)


@pytest.mark.parametrize("now_ms", [999, 0, -(10**12)])
def test_a_clock_that_was_set_back_holds_nothing_back(now_ms: int) -> None:
    assert hold_back(found(retry(1)), now_ms) == 0


@pytest.mark.parametrize(("born", "store"), [(4, 4), (16, 4), (4, 16), (16, 16)])
def test_records_with_ipv6_hosts_wait_as_others_do(born: int, store: int) -> None:
    flags = (BORN_V6 if born == 16 else 0) | (STORE_V6 if store == 16 else 0)
    message = Message(RETRY, b"x", b"", 0, 0, flags, 5, bytes(range(born + 4)), 3)
    data = bytes(encode_record(message, 0, 1, 4096, 1000, bytes(range(store + 4))))
    assert hold_back(found(data), 1200) == pause_ms(3) - 200


async def test_a_group_that_is_deleted_during_a_pause_misses_no_retry(running: Harness) -> None:
    """A consumer without an offset that begins at the end, as Java's do by CONSUME_FROM_TIMESTAMP."""
    client, end = running.client(), {"topic": RETRY, "queueId": "0"}
    await client.heartbeat("c", "G", "T")

    async def max_offset() -> int:
        return int(str((await client.ask(RequestCode.GET_MAX_OFFSET, end)).ext["offset"]))

    await fail(client, await publish(running, b"done"))
    await trio.sleep(LONGEST_MS / 1000 + 0.001)
    assert await max_offset() == 1, "its pause is over"
    await fail(client, await publish(running, b"failed"))
    client.send(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "G", "cleanOffset": "true"})
    await running.step()
    begin = await max_offset()
    assert begin == 1, "as on a real broker, it is not there yet"
    await client.heartbeat("c", "G", "T")
    await trio.sleep(LONGEST_MS / 1000 + 0.001)
    assert [record.body for record in await pull(running, client, begin)] == [b"failed"]
