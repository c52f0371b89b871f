"""The topic of MQTT gets fewer queues and more again while clients are away: they get everything, once."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import MqttBroker, MqttClient, leave, mqtt_broker

from martlet_mqtt.config import MqttConfig

CONFIG = MqttConfig(queues=8)
NAMES = [f"n/{number}" for number in range(40)]


def change_queues(mqtt: MqttBroker, queues: int) -> None:
    mqtt.broker.topics.update("mqtt", queues, queues)


async def publish(mqtt: MqttBroker, payload: bytes = b"x") -> None:
    talk = await mqtt.connect("publisher")
    for name in NAMES:
        assert await talk.publish(name, payload, 1) == 0
    await leave(mqtt, talk, "publisher")


async def take(talk: MqttClient) -> list[str]:
    """Receive and acknowledge forty messages, and nothing else."""
    found: list[str] = []
    while len(found) < len(NAMES):  # fewer are in flight at once
        for message in await talk.messages(1) + await talk.rest():
            await talk.acknowledge(message)
            found.append(message.topic)
    assert await talk.rest() == []
    return sorted(found)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("subscribed", ["n/#", "$share/g/n/#"])
async def test_a_durable_session_gets_what_was_published_while_it_was_away(
    tmp_path: Path, subscribed: str, restart: bool
) -> None:
    async with mqtt_broker(tmp_path, CONFIG) as mqtt:
        talk = await mqtt.connect("sess", clean=False, expiry_s=1000)
        await talk.subscribe(subscribed, qos=1)
        await leave(mqtt, talk, "sess")
        await publish(mqtt)
        change_queues(mqtt, 1)
        if not restart:
            came = await back(mqtt)
    if restart:
        async with mqtt_broker(tmp_path, CONFIG) as mqtt:
            came = await back(mqtt)
    assert came == [sorted(NAMES)] * 4


async def back(mqtt: MqttBroker) -> list[list[str]]:
    """Return what the session gets at once, and after each further change of the number of queues."""
    used = mqtt.broker.topics.get("mqtt")
    assert used is not None
    assert (used.read_queues > 5, used.write_queues) == (True, 1)
    talk = await mqtt.connect("sess", clean=False, expiry_s=1000)
    came = [await take(talk)]
    for queues in (8, 2, 4):
        change_queues(mqtt, queues)
        await publish(mqtt)
        came.append(await take(talk))
    assert mqtt.context.counters.missed == 0
    return came


async def test_by_force_the_session_missed_what_is_gone(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, CONFIG) as mqtt:
        talk = await mqtt.connect("sess", clean=False, expiry_s=1000)
        await talk.subscribe("n/#", qos=1)
        await leave(mqtt, talk, "sess")
        await publish(mqtt)
        queues = mqtt.broker.store.queues.topics["mqtt"]
        left = queues[0].next_offset
        topic = mqtt.broker.topics.update("mqtt", 1, 1, force=True)
        await mqtt.broker.turns.finish(mqtt.broker.draining.drop(topic))
        talk = await mqtt.connect("sess", clean=False, expiry_s=1000)
        assert len(await talk.messages(left)) == left
        assert await talk.rest() == []
        assert mqtt.context.counters.missed == len(NAMES) - left
