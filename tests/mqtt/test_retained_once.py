"""Retained messages for subscriptions: each comes once, however often a client subscribes and whatever is published."""

from pathlib import Path

from tests.wire_clients.mqtt import MqttClient, mqtt_broker

from martlet_mqtt.wire.packets import FilterSubscription, Publish, Subscribe
from martlet_mqtt.wire.properties import Property

COUNT = 200
ONE_AT_A_TIME = {Property.RECEIVE_MAXIMUM: 1}


async def until(talk: MqttClient, last: bytes) -> list[tuple[str, bytes, bool]]:
    """Return the names, payloads and RETAIN flags of what comes up to *last*, acknowledged."""
    came: list[tuple[str, bytes, bool]] = []
    while True:
        packet = await talk.receive()
        if isinstance(packet, Publish):
            await talk.acknowledge(packet)
            if packet.payload == last:
                return came
            came.append((packet.topic, packet.payload, packet.retain))


async def test_a_message_retained_after_the_subscription_comes_once(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher, talk = await mqtt.connect("publisher"), await mqtt.connect("me", values=ONE_AT_A_TIME)
        for number in range(COUNT):
            await publisher.publish(f"r/{number}", b"old", 1, retain=True)
        await talk.subscribe("r/+", qos=1)
        [first] = await talk.messages(1)
        last = f"r/{COUNT - 1}"
        await publisher.publish(last, b"new", 1, retain=True)
        await publisher.publish("r/new", b"new", 1, retain=True)
        await mqtt.settle()
        # Retention copies all of them: the others are still to be sent.
        await mqtt.broker.turns.finish(mqtt.context.retained.roll(0, mqtt.broker.store.appended))
        await mqtt.settle()
        await publisher.publish("r/end", b"end", 1)
        await talk.acknowledge(first)
        came = [(first.topic, first.payload, first.retain), *await until(talk, b"end")]
        assert sorted(came) == sorted(
            [(f"r/{number}", b"old", True) for number in range(COUNT - 1)]
            + [(last, b"new", False), ("r/new", b"new", False)]
        )


async def test_a_client_that_subscribes_again_and_again_gets_the_rest_of_them_once(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher, talk = await mqtt.connect("publisher"), await mqtt.connect("me", values=ONE_AT_A_TIME)
        for number in range(COUNT):
            await publisher.publish(f"r/{number}", b"old", 1, retain=True)
        await talk.send(*[Subscribe(number + 1, (FilterSubscription("r/+", 1),)) for number in range(50)])
        await publisher.publish("r/end", b"end", 1)
        came = await until(talk, b"end")
        assert {name for name, _, _ in came} == {f"r/{number}" for number in range(COUNT)}
        assert len(came) <= COUNT + 1, "one was in flight when the last one began"
