"""Sends of all connections that were read in one round are stored by one call, and answered to whoever sent them."""

from collections.abc import Sequence

import pytest
from tests.limits import give

from martlet.access.round_publishes import BYTES_MAX, COUNT_MAX
from martlet.contracts import Identity, Quota, Stage
from martlet.errors import Reason, Refused, StoreFailed
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.testing.stores import drain
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode

from .conftest import FakeClient, Harness, OpenHarness, send_ext
from .test_send_runs import answers, ready, receive, request, unique, usual

BUSY = ResponseCode.SYSTEM_BUSY


def clients(harness: Harness, count: int, *topics: str) -> list[FakeClient]:
    return [ready(harness, *topics) for _ in range(count)]


def bodies(harness: Harness, topic: str = "T") -> list[bytes]:
    queues = harness.store.queues
    return [body for number in range(4) for body in drain(harness.store, queues.get(topic, number))]


def codes(client: FakeClient) -> list[tuple[int, int]]:
    return [(each.opaque, each.code) for each in answers(client)]


@pytest.mark.parametrize("each", [1, 2, 5])
async def test_many_clients_are_stored_by_one_call_and_answered_apart(
    harness: Harness, appended: list[int], each: int
) -> None:
    senders = clients(harness, 7, "T", "other")
    with harness.round():
        for at, sender in enumerate(senders):
            topic = "other" if at == 3 else "T"
            receive(sender, b"".join(usual(10 * at + i, topic, b"%d.%d" % (at, i), at % 4) for i in range(each)))
        assert not appended
        assert not any(sender.peer.sent for sender in senders)
    assert appended == [7 * each]
    said = [answers(sender) for sender in senders]
    await harness.step()
    for at, heard in enumerate(said):
        assert [(found.opaque, found.code) for found in heard] == [(10 * at + i, 0) for i in range(each)]
        for i, found in enumerate(heard):
            assert found.ext["queueId"] == str(at % 4)
            assert found.ext["transactionId"] == f"{10 * at + i:032X}"
            data = harness.store.lookup.record_at(int(str(found.ext["msgId"])[16:], 16))
            assert data is not None
            record = decode_record(data)
            assert record.body == b"%d.%d" % (at, i)
            assert record.queue_offset == int(str(found.ext["queueOffset"]))


async def test_an_answer_waits_for_its_own_messages_and_no_later_ones(harness: Harness) -> None:
    senders = clients(harness, 3, "T")
    with harness.round():
        for at, sender in enumerate(senders):
            receive(sender, usual(at))
    held = [sender.peer.held_until for sender in senders]
    assert held == sorted(set(held))
    assert held[-1] == harness.store.tail.position


@pytest.mark.parametrize(
    ("code", "ext"),
    [
        (RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": "0"}),
        (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
    ],
)
async def test_another_request_comes_after_all_sends_before_it(
    harness: Harness, appended: list[int], code: int, ext: dict[str, object]
) -> None:
    one, two, asker = clients(harness, 3, "T")
    with harness.round():
        receive(one, usual(1))
        receive(two, usual(2))
        receive(asker, request(3, ext, b"", code=code))
        receive(two, usual(4, "T"))
    assert appended[0] == 2
    assert codes(one) == [(1, 0)]
    assert codes(two)[0] == (2, 0)
    [answer] = answers(asker)
    assert answer.code == 0
    if code == RequestCode.GET_MAX_OFFSET:
        assert answer.ext["offset"] == "2"


async def test_a_request_after_a_send_of_its_own_connection_comes_after_it(harness: Harness) -> None:
    client = ready(harness, "T")
    odd = request(2, send_ext("T", 0, unique(2) + "DELAY\x0199\x02"))  # refused, or stored by itself
    with harness.round():
        receive(
            client,
            usual(1)
            + odd
            + usual(3)
            + request(4, {"topic": "T", "queueId": "0"}, b"", code=RequestCode.GET_MAX_OFFSET),
        )
    assert [opaque for opaque, _ in codes(client)] == [1, 2, 3, 4]


async def test_quotas_and_refusals_concern_whoever_sent_them(harness: Harness) -> None:
    give(harness.broker, Quota(messages_in=2, refuses=True), ann=[Quota(messages_in=2, refuses=True)], bob=[])
    senders = []
    for name in ("ann", "bob", "ann", "bob", "ann"):
        sender = harness.client()
        sender.peer.identity = Identity(name)
        harness.topic("T")
        sender.handler.context.own_gate = harness.broker.gate(Identity(name), peer=sender.peer)
        sender.handler.context.connection_gate().check_publish("T")
        senders.append(sender)
    with harness.round():
        for at, sender in enumerate(senders):
            receive(sender, usual(at, body=b"%d" % at))
    assert [codes(sender) for sender in senders] == [[(0, 0)], [(1, 0)], [(2, 0)], [(3, 0)], [(4, BUSY)]]
    await harness.step()
    assert bodies(harness) == [b"0", b"1", b"2", b"3"]


async def test_a_disk_that_fails_refuses_all_of_them(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> AppendResult:
        raise StoreFailed("the disk is gone")

    senders = clients(harness, 3, "T")
    monkeypatch.setattr(Writer, "append_all", fail)
    with harness.round():
        for at, sender in enumerate(senders):
            flag = FLAG_ONEWAY if at == 1 else 0
            receive(sender, request(at, send_ext("T", 0, unique(at)), flag=flag))
    unavailable = ResponseCode.SERVICE_NOT_AVAILABLE
    assert [codes(sender) for sender in senders] == [[(0, unavailable)], [], [(2, unavailable)]]
    assert not any(sender.peer.closed_with for sender in senders)


async def test_a_bug_ends_the_connections_whose_messages_it_concerns(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> AppendResult:
        raise ZeroDivisionError("a bug")

    *senders, other = clients(harness, 3, "T")
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "append_all", fail)
        harness.in_round = True
        for at, sender in enumerate(senders):
            receive(sender, usual(at))
        with pytest.raises(ZeroDivisionError):  # the server logs it
            harness.end_round()
    assert [sender.peer.closed_with for sender in senders] == ["ZeroDivisionError: a bug"] * 2
    receive(other, usual(9))
    assert codes(other) == [(9, 0)]


async def test_one_refused_message_does_not_affect_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Writer.append_all

    def refuse_second(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        result = real(self, [*items[:1], *items[2:]], atomic=atomic)
        result.add_refused({1: Refused(Reason.BUSY, "not now")})
        return result

    senders = clients(harness, 3, "T")
    monkeypatch.setattr(Writer, "append_all", refuse_second)
    with harness.round():
        for at, sender in enumerate(senders):
            receive(sender, usual(at))
    assert [codes(sender) for sender in senders] == [[(0, 0)], [(1, BUSY)], [(2, 0)]]


async def test_messages_for_a_stage_are_answered_in_their_place(harness: Harness) -> None:
    def hold(message: Message) -> Message:
        if b"LATER" in message.properties:
            message.topic = "held"
        return message

    one, two = clients(harness, 2, "T", "held")
    harness.broker.set_stages([("test", Stage(hold, properties=("LATER",)))])
    later = request(2, send_ext("T", 1, unique(2) + "LATER\x01x\x02"))
    with harness.round():
        receive(one, usual(1))
        receive(two, usual(3) + later + usual(4))
    assert codes(one) == [(1, 0)]
    assert codes(two) == [(3, 0), (2, 0), (4, 0)]
    await harness.step()
    assert len(bodies(harness)) == 3
    assert len(bodies(harness, "held")) == 1


async def test_very_many_are_stored_before_the_end_of_the_round(harness: Harness, appended: list[int]) -> None:
    senders = clients(harness, 5, "T")
    with harness.round():
        for sender in senders:
            receive(sender, b"".join(usual(i) for i in range(100)))
    assert len(appended) == 2
    assert sum(appended) == 500
    assert COUNT_MAX <= appended[0] < 500
    assert [len(codes(sender)) for sender in senders] == [100] * 5


async def test_large_messages_are_stored_before_the_end_of_the_round(harness: Harness, appended: list[int]) -> None:
    senders = clients(harness, 20, "T")
    with harness.round():
        for at, sender in enumerate(senders):
            receive(sender, usual(at, body=bytes(60_000)))
    assert appended == [BYTES_MAX // 60_000 + 1, 20 - BYTES_MAX // 60_000 - 1]
    assert [codes(sender) for sender in senders] == [[(at, 0)] for at in range(20)]


async def test_a_round_stays_within_what_may_be_unflushed(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"}, unflushed_bytes_max=1 << 20)
    senders = clients(harness, 8, "T")
    with harness.round():
        for at, sender in enumerate(senders):
            receive(sender, usual(at, body=bytes(300_000)))
    said = [codes(sender)[0][1] for sender in senders]
    assert said == sorted(said), "the first fit"
    assert set(said) == {0, BUSY}
    assert 3 <= said.count(0) <= 5
