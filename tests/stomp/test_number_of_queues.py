"""The topic of a destination gets fewer queues and more again: waiting messages come all the same, once."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker

from martlet_stomp.config import StompConfig

CONFIG = StompConfig(queues=8)
BODIES = [b"%d" % number for number in range(40)]


async def subscribe(stomp: StompBroker, kind: str) -> StompClient:
    talk = await stomp.connect(client_id="ann")
    more = {"activemq.subscriptionName": "news"} if kind == "topic" else {}
    await talk.subscribe(f"/{kind}/news", "client-individual", **more)
    return talk


async def take(talk: StompClient) -> list[bytes]:
    """Receive and acknowledge all messages."""
    found = await talk.messages(len(BODIES))
    await talk.ack(*found)
    assert await talk.rest() == []
    return sorted((each.body for each in found), key=int)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", ["queue", "topic"])
async def test_waiting_messages_come(tmp_path: Path, kind: str, restart: bool) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await subscribe(stomp, kind)
        await talk.disconnect()
        sender = await stomp.connect()
        await sender.publish(f"/{kind}/news", *BODIES)
        stomp.broker.topics.update("news", 1, 1)
        received = [] if restart else await receive_with(stomp, kind, (8, 2, 4))
    if restart:
        async with stomp_broker(tmp_path, CONFIG) as stomp:
            received = await receive_with(stomp, kind, (8, 2, 4))
    assert received == [BODIES] * 4


async def receive_with(stomp: StompBroker, kind: str, numbers: Sequence[int]) -> list[list[bytes]]:
    """Return the waiting messages, and those that are sent with each of *numbers* of queues."""
    topic = stomp.broker.topics.get("news")
    assert topic is not None
    assert (topic.read_queues > 5, topic.write_queues) == (True, 1)
    talk = await subscribe(stomp, kind)
    received = [await take(talk)]
    for queues in numbers:
        stomp.broker.topics.update("news", queues, queues)
        await talk.publish(f"/{kind}/news", *BODIES)
        received.append(await take(talk))
    return received
