"""Requests between MQTT clients and RocketMQ's Java client."""

from collections.abc import Callable, Iterator

import pytest
import trio
from tests.mqtt.test_mqtt_crash import talking

from martlet_mqtt.packets import Connack, Connect
from martlet_mqtt.properties import Properties, Property

from .java import Java, message
from .martlet_process import Martlet
from .process import free_port

Name = Callable[[str], str]


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    """Martlet with MQTT, whatever broker the other tests are about."""
    settings = {"plugins.enabled": '["nameserver", "remoting", "mqtt"]', "mqtt.listen": f"127.0.0.1:{free_port()}"}
    martlet = Martlet(tmp_path_factory.mktemp("mqtt"), {**settings, "mqtt.queues": "1"})
    yield martlet
    martlet.stop()


async def test_java_answers_mqtt_and_mqtt_answers_java(newest: Java, target: Martlet, name: Name) -> None:
    await trio.to_thread.run_sync(lambda: newest.push(name("group"), "mqtt", expression="ask", replying=True))
    asking = await trio.to_thread.run_sync(newest.producer, name("asking"))
    async with talking(target.settings["mqtt.listen"]) as talk:
        await talk.send(Connect("both"))
        assert (await talk.expect(Connack)).reason == 0
        await talk.subscribe("answers/+", "tell", qos=1)
        for correlation in (b"one", b"\xff", None):
            values: dict[Property, object] = {Property.RESPONSE_TOPIC: "answers/me"}
            if correlation is not None:
                values[Property.CORRELATION_DATA] = correlation
            assert await talk.publish("ask", b"what?", 1, properties=Properties(values)) == 0
            (reply,) = await talk.messages(1)
            await talk.acknowledge(reply)
            assert (reply.topic, reply.payload) == ("answers/me", b"re: what?")
            assert reply.properties.data(Property.CORRELATION_DATA) == correlation

        found: list[tuple[bytes, dict[str, str]]] = []

        async def ask() -> None:
            found.append(await trio.to_thread.run_sync(asking.request, message("mqtt", "and what?", tags="tell")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            (request,) = await talk.messages(1)
            response, correlation = (
                request.properties.text(Property.RESPONSE_TOPIC),
                request.properties.data(Property.CORRELATION_DATA),
            )
            assert response is not None
            back = Properties({Property.CORRELATION_DATA: correlation}, (("colour", "red"),))
            assert await talk.publish(response, b"that", 1, properties=back) == 0
        assert (found[0][0], found[0][1]["colour"]) == (b"that", "red")
