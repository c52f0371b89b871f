"""Sends that come in one read are stored together, and answered as if each had come alone."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import trio

from martlet.access import Gate
from martlet.contracts import Identity, Stage
from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet_remoting.handlers import send
from martlet_remoting.handlers.context import RequestContext
from martlet_remoting.wire.codec import FrameBuffer, decode_frame, encode_binary_command, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.sends import Send

from .conftest import FakeClient, Harness, OpenHarness, opaques_of_cut, send_ext

V2 = RequestCode.SEND_MESSAGE_V2


def unique(number: int) -> str:
    return f"UNIQ_KEY\x01{number:032X}\x02"


def request(number: int, ext: Mapping[str, object], body: bytes = b"hello", flag: int = 0, code: int = V2) -> bytes:
    return encode_command(Command(code, ext, body, number, flag))


def usual(number: int, topic: str = "T", body: bytes = b"hello", queue_id: int = 0) -> bytes:
    return request(number, send_ext(topic, queue_id, unique(number)), body)


def in_json(frames: Sequence[bytes]) -> list[bytes]:
    return list(frames)


def in_binary(frames: Sequence[bytes]) -> list[bytes]:
    return [encode_binary_command(decode_frame(frame)) for frame in frames]


def by_turns(frames: Sequence[bytes]) -> list[bytes]:
    return [(in_binary if place % 2 else in_json)([frame])[0] for place, frame in enumerate(frames)]


def receive(client: FakeClient, data: bytes) -> None:
    """What the server does with one read."""
    client.connection.receive_data(data, trio.current_time())
    for event in client.connection.events():
        client.handle(event)


def answers(client: FakeClient) -> list[Command]:
    """All that was sent to *client* so far, in order."""
    frames = FrameBuffer()
    frames.receive_data(b"".join(client.peer.sent))
    client.peer.sent.clear()
    return list(frames.commands())


def said(client: FakeClient) -> list[tuple[object, ...]]:
    hidden = ("msgId", "queueOffset")
    return [
        (each.opaque, each.code, each.remark, {k: v for k, v in each.ext.items() if k not in hidden})
        for each in answers(client)
    ]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sends in each run of several."""
    counts: list[int] = []
    real = send.send_run

    def counted(context: RequestContext, gate: Gate, sends: Sequence[Send], code: int = 310) -> int:
        count = real(context, gate, sends)
        if len(sends) > 1:
            counts.append(count)
        return count

    monkeypatch.setattr(send, "send_run", counted)
    return counts


def ready(harness: Harness, *topics: str) -> FakeClient:
    """A client that has sent to *topics* before."""
    client = harness.client()
    for topic in topics:
        harness.topic(topic)
        client.handler.context.connection_gate().check_publish(topic)
    return client


MIXTURE = [
    usual(1),
    usual(2, queue_id=1),
    usual(3, "other"),
    request(4, send_ext("T", 0, unique(4) + "DELAY\x013\x02")),
    usual(5),
    request(6, {"topic": "T", "queueId": "0"}, b"", code=RequestCode.GET_MAX_OFFSET),
    usual(7, queue_id=9),
    usual(8, "closed"),
    request(9, send_ext("T", 0, unique(9)), flag=FLAG_ONEWAY),
    usual(10),
    request(11, send_ext("T", 0, unique(11)), b""),
    request(12, send_ext("T", 0, unique(12) + "A\x01\x00\x02")),
    usual(13, "other"),
    request(14, send_ext("T", -1, unique(14))),
    request(15, {"b": "T"}),
    usual(16),
]


@pytest.mark.parametrize("encoded", [in_json, in_binary, by_turns])
@pytest.mark.parametrize("together", [1, 2, 5, 16])
async def test_sends_of_one_read_are_answered_in_order_as_if_each_came_alone(
    harness: Harness,
    taken: list[int],
    together: int,
    encoded: Callable[[Sequence[bytes]], list[bytes]],
) -> None:
    frames = encoded(MIXTURE)
    harness.topic("closed", perm=4)
    client, alone = ready(harness, "T", "other"), harness.client()
    alone.connection.takes_runs = False
    for data in MIXTURE:
        receive(alone, data)
    for start in range(0, len(MIXTURE), together):
        receive(client, b"".join(frames[start : start + together]))
    numbers = [number for number in range(1, 17) if number != 9]
    heard = said(client)
    assert [number for number, *_ in heard] == numbers
    expected = said(alone)
    # Where the log ends has grown, and the broker chose the queue of number 14.
    for place in (numbers.index(14), numbers.index(6)):
        assert heard.pop(place)[1] == expected.pop(place)[1] == 0
    assert heard == expected
    # Number 12 is refused in its run, and number 4, which this broker cannot delay, by a stage.
    assert sum(taken) == {1: 0, 2: 7, 5: 9, 16: 9}[together]
    await harness.step()


@pytest.mark.parametrize("field", ["d", "e", "g", "l"])
async def test_a_number_that_needs_more_than_64_bits_is_refused(harness: Harness, field: str) -> None:
    client = ready(harness, "T")
    wrong = [request(2, send_ext("T", 0, unique(2), **{field: number})) for number in (1 << 63, -(1 << 63) - 1)]
    wrong.append(wrong[0].replace(b'"9223372036854775808"', b"922337203685477580800"))
    receive(client, b"".join([usual(1), *wrong, usual(3)]))
    assert [answer.code for answer in answers(client)] == [0, *[ResponseCode.SYSTEM_ERROR] * 3, 0]
    await harness.step()


async def test_messages_of_a_run_are_stored_whole(harness: Harness, taken: list[int]) -> None:
    client = ready(harness, "T")
    receive(client, b"".join(usual(number, body=b"body %d" % number) for number in range(1, 41)))
    found = answers(client)
    assert [each.opaque for each in found] == list(range(1, 41))
    assert [each.ext["queueOffset"] for each in found] == [str(offset) for offset in range(40)]
    assert taken == [40]
    assert client.peer.held_until == harness.store.appended
    await harness.step()
    for number, answer in enumerate(found, 1):
        position = int(str(answer.ext["msgId"])[16:], 16)
        data = harness.store.lookup.record_at(position)
        assert data is not None
        record = decode_record(data, 0, position)
        assert record.body == b"body %d" % number
        assert record.properties.startswith(unique(number).encode())
        assert (record.flag, record.reconsume_times, record.prepared_position) == (0, 0, 0)


@pytest.mark.parametrize("encoded", [in_json, in_binary, by_turns])
def test_a_run_comes_out_however_the_bytes_were_cut(encoded: Callable[[Sequence[bytes]], list[bytes]]) -> None:
    data = b"".join(encoded([usual(number) for number in range(1, 10)]))
    for size in (1, 7, 100, 300, len(data)):
        assert opaques_of_cut(data, size) == list(range(1, 10))


BROKEN_TOPICS = [
    (b"\x00\x01b\x00\x00\x40\x01T", "length 16385 of the field value exceeds the header"),
    (b"\x7f\xffb\x00\x00\x00\x01T", "length 32767 of the field name exceeds the header"),
    (b"\x00\x01\xff\x00\x00\x00\x01T", "binary header is not UTF-8"),
]


@pytest.mark.parametrize(("broken", "text"), BROKEN_TOPICS, ids=["value", "name", "UTF-8"])
async def test_a_broken_binary_header_ends_the_connection_after_the_run_before_it(
    harness: Harness, taken: list[int], broken: bytes, text: str
) -> None:
    client = ready(harness, "T")
    frames = in_binary(list(map(usual, range(1, 9))))
    frames[5] = frames[5].replace(b"\x00\x01b\x00\x00\x00\x01T", broken)
    with pytest.raises(RemoteProtocolError, match=text):
        receive(client, b"".join(frames))
    assert [each.opaque for each in answers(client)] == [1, 2, 3, 4, 5]
    assert taken == [5]
    await harness.step()


async def test_a_run_ends_where_too_much_waits_for_the_disk(open_harness: OpenHarness, taken: list[int]) -> None:
    harness = await open_harness(store={"flush": "sync"}, unflushed_bytes_max=1 << 20)
    client = ready(harness, "T")
    receive(client, b"".join(usual(number, body=bytes(60_000)) for number in range(1, 31)))
    assert [each.code for each in answers(client)] == [0] * 18 + [ResponseCode.SYSTEM_BUSY] * 12
    assert taken[0] == 18
    await harness.step()


async def test_each_message_passes_the_stages(harness: Harness) -> None:
    client = ready(harness, "T")

    def stage(message: Message) -> Message:
        if message.body == b"2":
            raise Refused(Reason.ILLEGAL, "not this one")
        message.properties += b"stamped\x01yes\x02"
        return message

    harness.broker.set_stages([("test", Stage(stage))])
    receive(client, b"".join(usual(number, body=b"%d" % number) for number in range(1, 6)))
    found = answers(client)
    assert [each.code for each in found] == [0, ResponseCode.MESSAGE_ILLEGAL, 0, 0, 0]
    await harness.step()
    record = harness.store.lookup.record_at(int(str(found[2].ext["msgId"])[16:], 16))
    assert record is not None
    assert b"stamped\x01yes" in record


async def test_a_run_is_refused_once_the_rules_deny_its_topic(harness: Harness, taken: list[int]) -> None:
    client = ready(harness, "T")
    receive(client, b"".join(usual(number) for number in range(1, 5)))

    def deny(identity: Identity, action: str, name: str) -> bool:
        return False

    harness.broker.authorizers = (deny,)
    receive(client, b"".join(usual(number) for number in range(5, 9)))
    assert [each.code for each in answers(client)] == [0] * 4 + [ResponseCode.NO_PERMISSION] * 4
    assert sum(taken) == 4
    await harness.step()


async def test_messages_beyond_the_brokers_limit_are_refused_one_by_one(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, broker={"message_bytes_max": 2000})
    client = ready(harness, "T")
    receive(client, usual(1) + usual(2, body=bytes(2001)) + usual(3) + b"".join(map(usual, range(4, 8))))
    found = answers(client)
    assert [each.code for each in found] == [0, ResponseCode.MESSAGE_ILLEGAL] + [0] * 5
    assert "message body is 2001 bytes; broker.message_bytes_max is 2000" in str(found[1].remark)
    await harness.step()


async def test_answers_of_a_run_that_was_not_stored_are_all_replaced(harness: Harness) -> None:
    client = ready(harness, "T")
    receive(client, usual(9))  # the first message begins a segment
    client.peer.sent.clear()
    receive(client, b"".join(map(usual, range(1, 5))))
    (piece,) = client.peer.sent
    frames = FrameBuffer()
    frames.receive_data(client.handler.refuse(piece, Refused(Reason.UNAVAILABLE, "the disk is full")))
    refused = list(frames.commands())
    assert [each.opaque for each in refused] == [1, 2, 3, 4]
    assert {each.code for each in refused} == {ResponseCode.SERVICE_NOT_AVAILABLE}
    assert {each.remark for each in refused} == {"the disk is full"}
    await harness.step()


async def test_answers_are_held_separately_if_a_run_continues_in_the_next_segment(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async", "segment_bytes": 1 << 20, "message_bytes_max": 1 << 19})
    client = ready(harness, "T")
    for first in (1, 21):
        receive(client, b"".join(usual(number, body=bytes(40_000)) for number in range(first, first + 20)))
    assert len(client.peer.sent) > 1
    single = [piece for piece in client.peer.sent if len(piece) < 1000]
    assert len(single) > 10
    assert {decode_frame(piece).code for piece in single} == {0}
    assert [each.opaque for each in answers(client)] == list(range(1, 41))
    await harness.step()
