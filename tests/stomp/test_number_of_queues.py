"""The topic of a destination gets fewer queues and more again: waiting messages come all the same, once."""

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
        if not restart:
            await back(stomp, kind)
    if restart:
        async with stomp_broker(tmp_path, CONFIG) as stomp:
            await back(stomp, kind)


async def back(stomp: StompBroker, kind: str) -> None:
    topic = stomp.broker.topics.get("news")
    assert topic is not None
    assert (topic.read_queues > 5, topic.write_queues) == (True, 1)
    talk = await subscribe(stomp, kind)
    assert await take(talk) == BODIES
    for queues in (8, 2, 4):
        stomp.broker.topics.update("news", queues, queues)
        await talk.publish(f"/{kind}/news", *BODIES)
        assert await take(talk) == BODIES
