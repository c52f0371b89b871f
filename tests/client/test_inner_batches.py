"""Batches that RocketMQ 5 stores as one record (``queue.type=BatchCQ``) reach listeners message by message."""

import zlib

import pytest
from trio.testing import MockClock

from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet_client import ConsumeFrom, MessageQueue, Outcome, PullConsumer, PushConsumer, ReceivedMessage
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import decode_pull_header, decode_send_header
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_remoting.wire.packets import Command

from .fake import Cluster, Reply
from .listening import Listener, wait_for

HOST = bytes((127, 0, 0, 1, 0, 0, 0, 1))
QUEUE = MessageQueue("T", "broker-a", 0)


def members(first: int, count: int) -> list[BatchMessage]:
    numbers = range(first, first + count)
    return [BatchMessage(b"%d" % n, encode_properties({"TAGS": f"T{n % 2}", "UNIQ_KEY": f"ID{n}"}), 7) for n in numbers]


def record(first: int, count: int, sys_flag: int = INNER_BATCH, body: bytes | None = None) -> bytes:
    """The record of a batch of *count* messages from offset *first* on."""
    if body is None:
        body = encode_batch(members(first, count))
        body = zlib.compress(body) if sys_flag & 1 else body
    return encode_record(Message("T", body, b"", sys_flag=sys_flag), 0, first, 1000 * first, 5000, HOST)


def serve(cluster: Cluster, *batches: tuple[int, bytes], end: int) -> None:
    """Let the broker answer pulls of queue 0 with the batch that has the offset, as RocketMQ does."""

    def answer(command: Command) -> Reply:
        header = decode_pull_header(command)
        ext: dict[str, object] = {"minOffset": 0, "maxOffset": end, "suggestWhichBrokerId": 0}
        if header.topic != "T" or header.queue_id or header.offset >= end:
            ext["nextBeginOffset"] = header.offset
            held = cluster.broker.arrived if header.suspend_ms else None
            return Reply(ResponseCode.PULL_NOT_FOUND, ext, hold=held, hold_s=header.suspend_ms / 1000)
        after = min([first for first, _ in batches if first > header.offset], default=end)
        found = [data for first, data in batches if first < after][-1]
        return Reply(0, {**ext, "nextBeginOffset": after}, found)

    cluster.broker.queues["T", 0] = [b""] * end  # for the queue's end
    cluster.broker.overrides[RequestCode.PULL_MESSAGE] = answer


@pytest.mark.parametrize("sys_flag", [INNER_BATCH, INNER_BATCH | 0x301])
async def test_a_pull_has_the_messages_of_a_batch(cluster: Cluster, sys_flag: int) -> None:
    serve(cluster, (0, record(0, 10, sys_flag)), (10, record(10, 10, sys_flag)), end=20)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        found = [message async for message in consumer.read(QUEUE, 7)]
        tagged = await consumer.pull(QUEUE, 3, expression="T1")
    assert [(message.queue_offset, message.body) for message in found] == [(n, b"%d" % n) for n in range(7, 20)]
    assert {(message.flag, message.store_ms, message.sys_flag) for message in found} == {(7, 5000, INNER_BATCH)}
    assert [message.message_id for message in found] == [f"ID{n}" for n in range(7, 20)]
    assert {message.position for message in found} == {0, 10_000}
    assert ([message.queue_offset for message in tagged.messages], tagged.next_offset) == ([3, 5, 7, 9], 10)


@pytest.mark.parametrize("flag", [0x40, 0x80])
async def test_a_record_with_one_of_both_flags_is_a_message(cluster: Cluster, flag: int) -> None:
    serve(cluster, (0, record(0, 3, flag)), end=1)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        (message,) = (await consumer.pull(QUEUE, 0)).messages
    assert message.body == encode_batch(members(0, 3))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (record(0, 3).replace(b"ID1", b"ID9"), "does not match its CRC"),
        (record(0, 3, body=encode_batch(members(0, 3))[:-1]), "batch message 2 claims"),
        (record(0, 3, INNER_BATCH | 1, b"no zlib"), "ZLIB body of 7 bytes is damaged"),
    ],
    ids=["CRC", "cut", "compressed"],
)
async def test_a_damaged_batch_is_a_damaged_message(cluster: Cluster, data: bytes, text: str) -> None:
    serve(cluster, (0, data), end=3)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        pulled = await consumer.pull(QUEUE, 1)
    assert not pulled.messages
    (damaged,) = pulled.damaged
    assert (damaged.queue_offset, damaged.topic, damaged.position) == (1, "T", 0)
    assert text in damaged.text


async def test_a_listener_gets_each_message_of_a_batch(cluster: Cluster, autojump_clock: MockClock) -> None:
    serve(cluster, (0, record(0, 10)), (10, record(10, 10)), end=20)
    cluster.broker.offsets["G", "T", 0] = 7

    def fails_once(message: ReceivedMessage) -> Outcome | None:
        return Outcome.RETRY if message.body == b"12" and not message.reconsume_times else None

    listener = Listener(fails_once)
    async with PushConsumer(cluster.settings(), "G", listener, {"T": "*"}, consume_from=ConsumeFrom.FIRST):
        await wait_for(lambda: len(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)) == 1)
        await listener.wait_count(13)
    assert sorted(listener.bodies) == sorted(b"%d" % n for n in range(7, 20))
    assert cluster.broker.offsets["G", "T", 0] == 20
    # A broker finds the whole batch at the position of its messages, so the failed one goes back by itself.
    assert not cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK)
    (back,) = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
    header = decode_send_header(back)
    assert (header.topic, header.sys_flag & INNER_BATCH, back.body) == ("%RETRY%G", 0, b"12")
