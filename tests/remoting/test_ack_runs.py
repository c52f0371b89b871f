"""Acknowledgements that come in one read are handled together, and answered as if each had come alone."""

from collections.abc import Sequence

import orjson
import pytest
import trio

from martlet.message import Message
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import bit_set

from .conftest import FakeClient, Harness, opaques_of_cut
from .pop_talk import Popped, ack, ack_ext, committed, pop, pop_ext

ACK = RequestCode.ACK_MESSAGE


def request(number: int, message: Popped, *, flag: int = 0, code: int = ACK, **more: object) -> bytes:
    return encode_command(Command(code, ack_ext(message, **more), b"", number, flag))


def receive(client: FakeClient, data: bytes) -> None:
    """What the server does with one read."""
    client.connection.receive_data(data, trio.current_time())
    for event in client.connection.events():
        client.handle(event)


def said(client: FakeClient, topic: str) -> list[tuple[object, ...]]:
    frames = FrameBuffer()
    frames.receive_data(b"".join(client.peer.sent))
    client.peer.sent.clear()
    return [
        (
            each.opaque,
            each.code,
            (each.remark or "").replace(topic, "TOPIC").replace(client.peer.address, "CLIENT"),
            dict(each.ext),
        )
        for each in frames.commands()
    ]


async def fill(harness: Harness, topic: str, count: int) -> list[Popped]:
    """Return *count* popped messages of each of two queues."""
    harness.topic(topic, 2)
    for number in range(2 * count):
        harness.broker.publish(Message(topic, b"%d" % number, queue_id=number % 2))
    await harness.step()
    client, found = harness.client(), list[Popped]()
    while len(found) < 2 * count:
        found += await pop(client, topic)
    return sorted(found, key=lambda message: (message.queue_id, message.offset))


def mixture(messages: Sequence[Popped]) -> list[bytes]:
    """Requests of all kinds about *messages*, eight of each queue."""
    one, other = messages[:8], messages[8:]
    return [
        request(1, one[1]),
        request(2, one[2]),
        request(3, other[0]),
        request(4, one[2]),  # twice
        request(5, one[0]),
        request(6, one[3], extraInfo="nonsense"),
        request(7, one[3], flag=FLAG_ONEWAY),
        request(8, one[4]),
        request(9, one[5], extraInfo=str(one[5].handle).replace(str(one[5].handle.pop_ms), "7")),
        request(10, one[6]),
        request(11, one[7], offset="100"),
        request(12, one[7], queueId="7"),
        request(13, one[7], topic="unknown"),
        request(14, one[7], consumerGroup="stranger"),
        request(15, one[5], code=RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime="60000"),
        request(16, one[5]),  # the handle is no longer valid
        request(17, other[1], offset=""),
        request(18, other[1]),
        request(19, other[2], flag=1),
        request(20, other[3]),
        encode_command(Command(RequestCode.POP_MESSAGE, pop_ext(messages[0].topic), b"", 21)),
        request(22, other[5]),
        request(23, other[7]),
    ]


@pytest.mark.parametrize("together", [1, 2, 5, 23])
async def test_acknowledgements_of_one_read_are_answered_in_order_as_if_each_came_alone(
    harness: Harness, together: int
) -> None:
    alone, client = harness.client(), harness.client()
    alone.connection.takes_runs = False
    requests = mixture(await fill(harness, "alone", 8))
    for data in requests:
        receive(alone, data)
    expected = said(alone, "alone")
    requests = mixture(await fill(harness, "together", 8))
    for start in range(0, len(requests), together):
        receive(client, b"".join(requests[start : start + together]))
    heard = said(client, "together")
    assert heard == expected
    assert [number for number, *_ in heard] == [number for number in range(1, 24) if number not in (7, 19)]
    await harness.step()
    for queue_id in range(2):
        assert committed(harness, "together", queue_id) == committed(harness, "alone", queue_id)
    assert [committed(harness, "together", queue_id) for queue_id in range(2)] == [5, 2]


async def test_answers_of_a_run_wait_until_it_is_durable(harness: Harness) -> None:
    messages = await fill(harness, "T", 40)
    client, before = harness.client(), harness.state.counters.requests
    receive(client, b"".join(request(number, message) for number, message in enumerate(messages)))
    assert client.peer.holds_commit
    assert harness.state.counters.requests == before + len(messages)
    assert len(client.peer.sent) == 1
    await harness.step()
    assert all((answer.code, answer.remark) == (ResponseCode.SUCCESS, None) for answer in client.answers.values())
    assert sorted(client.answers) == list(range(len(messages)))
    assert [committed(harness, "T", queue_id) for queue_id in range(2)] == [40, 40]


async def test_a_run_comes_out_however_the_bytes_were_cut(harness: Harness) -> None:
    messages = (await fill(harness, "T", 5))[:9]
    data = b"".join(request(number, message) for number, message in enumerate(messages))
    for size in (1, 7, 100, 700, len(data)):
        assert opaques_of_cut(data, size) == list(range(9))


async def test_a_batch_of_very_many_acknowledgements_skips_those_that_are_not_valid(harness: Harness) -> None:
    messages = await fill(harness, "T", 40)
    client, numbers = harness.client(), [number for number in range(2000) if number != 3]
    handle = messages[0].handle
    part = {"c": "G", "t": "T", "r": "0", "so": 0, "q": 0, "rq": 0, "pt": handle.pop_ms, "it": 30000}
    body = orjson.dumps({"brokerName": "martlet", "acks": [{**part, "b": bit_set(numbers)}]})
    answer = await client.ask(RequestCode.BATCH_ACK_MESSAGE, body=body)
    assert answer.code == ResponseCode.SUCCESS
    await harness.step()
    assert committed(harness, "T") == 3
    await ack(client, messages[3])
    await harness.step()
    assert committed(harness, "T") == sum(message.handle.pop_ms == handle.pop_ms for message in messages[:40])
