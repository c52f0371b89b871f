"""Consumers that are killed hold very many handles: all of their messages come again in time."""

from collections import Counter

import trio
from trio.testing import MockClock

from martlet.message import Message
from martlet_remoting.wire.codes import RequestCode

from .conftest import FakeClient, Harness, OpenHarness
from .pop_talk import pop_ext, popped, run

HANDLES = 100_000
QUEUES = 8
AT_ONCE = 125
INVISIBLE_MS = 60_000


async def take_all(harness: Harness, client: FakeClient, topic: str) -> Counter[tuple[int, int, int]]:
    """Pop until nothing comes; return the messages as queue, offset and reconsume times."""
    found: Counter[tuple[int, int, int]] = Counter()
    while True:
        ext = pop_ext(topic, invisibleTime=str(INVISIBLE_MS))
        sent = [client.send(RequestCode.POP_MESSAGE, ext) for _ in range(AT_ONCE)]
        await harness.step()
        answers = [client.answers.pop(number) for number in sent]
        came = [message for answer in answers if answer.code == 0 for message in popped(answer)]
        if not came:
            return found
        found.update((message.queue_id, message.offset, message.times) for message in came)


async def test_what_killed_consumers_held_comes_again_within_a_second(
    open_harness: OpenHarness, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    harness = await open_harness(store={"flush": "async"}, cached=True)
    topic = harness.topic("T", QUEUES)
    for number in range(HANDLES):
        harness.broker.publish(Message(topic, b"x", b"", number % QUEUES))
        if number % 1000 == 0:
            await harness.step()
    every = {(number % QUEUES, number // QUEUES) for number in range(HANDLES)}
    await harness.step()
    run(harness, nursery)
    killed = [harness.client() for _ in range(4)]
    first: Counter[tuple[int, int, int]] = Counter()
    for client in killed:
        first += await take_all(harness, client, topic)
    assert first == dict.fromkeys(((queue, offset, 0) for queue, offset in every), 1)
    for client in killed:
        client.close()
    popped_at = trio.current_time()
    await trio.sleep(INVISIBLE_MS / 1000 - 1)
    heir = harness.client()
    assert not await take_all(harness, heir, topic)
    await trio.sleep_until(popped_at + INVISIBLE_MS / 1000 + 0.1)
    again = await take_all(harness, heir, topic)
    assert again == dict.fromkeys(((queue, offset, 1) for queue, offset in every), 1)
    assert trio.current_time() - popped_at <= INVISIBLE_MS / 1000 + 1
