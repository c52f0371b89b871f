"""Batches that RocketMQ's own broker stores as one record, read by the Python client."""

from collections import Counter

from tests.client.listening import PATIENCE_S, Listener, wait_until

from martlet_client import (
    Admin,
    ClientSettings,
    ConsumeFrom,
    Message,
    Outcome,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceivedMessage,
)

from .store_exchange import RealBroker
from .test_python_client import patient

COUNT = 31


async def fill(settings: ClientSettings) -> None:
    """Create the topic with one queue, and send three batches of ten and one message."""
    async with Admin(settings) as admin:
        await admin.create_topic("Batches", queues=1, attributes="+queue.type=BatchCQ")
    async with Producer(settings, "batches", send_timeout_s=PATIENCE_S) as producer:
        sent = [Message("Batches", b"%d" % n, tags=f"T{n}", keys=[f"K{n}"]) for n in range(COUNT)]
        for first in (0, 10, 20):
            await producer.send_batch(sent[first : first + 10])
        await producer.send(sent[30])


def seen(message: ReceivedMessage) -> tuple[int, bytes, str, tuple[str, ...]]:
    return message.queue_offset, message.body, message.tags, message.keys


async def test_consumers_get_the_messages_of_inner_batches(real_broker: RealBroker) -> None:
    settings = patient(real_broker())
    await fill(settings)
    wanted = [(n, b"%d" % n, f"T{n}", (f"K{n}",)) for n in range(COUNT)]
    async with PullConsumer(settings, "readers") as reader:
        (queue,) = await reader.queues("Batches")

        async def readable() -> bool:
            return await reader.max_offset(queue) == COUNT

        await wait_until(readable)  # queues follow the log
        assert [seen(message) async for message in reader.read(queue)] == wanted
        assert [seen(message) async for message in reader.read(queue, 17)] == wanted[17:]
        pulled = await reader.pull(queue, 13, messages_max=1)
        assert ([seen(message) for message in pulled.messages], pulled.next_offset) == (wanted[13:20], 20)

    def fails_once(message: ReceivedMessage) -> Outcome | None:
        return Outcome.RETRY if message.body == b"17" and not message.reconsume_times else None

    listener = Listener(fails_once)
    async with PushConsumer(settings, "listeners", listener, {"Batches": "*"}, consume_from=ConsumeFrom.FIRST):
        await listener.wait_count(COUNT + 1)
    first = [message for message in listener.messages if not message.reconsume_times]
    assert sorted(map(seen, first)) == wanted
    (again,) = [message for message in listener.messages if message.reconsume_times]
    assert (again.topic, again.body, again.tags) == ("Batches", b"17", "T17")
    assert Counter(listener.bodies) == Counter([body for _, body, *_ in wanted] + [b"17"])
