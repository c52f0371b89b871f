"""Requests between MQTT clients and RocketMQ's Java and Go clients."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.mqtt.test_mqtt_crash import talking
from tests.wire_clients.mqtt import MqttClient

from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect
from martlet_mqtt.wire.properties import Properties, Property

from .java import Java, message
from .martlet_process import Martlet
from .other_clients import Program, send_words
from .process import free_port

GONE = ReasonCode.NO_MATCHING_SUBSCRIBERS
Name = Callable[[str], str]


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    """Martlet with MQTT, whatever broker the other tests are about."""
    settings = {"plugins.enabled": '["nameserver", "remoting", "mqtt"]', "mqtt.listen": f"127.0.0.1:{free_port()}"}
    martlet = Martlet(tmp_path_factory.mktemp("mqtt"), {**settings, "mqtt.queues": "1"})
    yield martlet
    martlet.stop()


@asynccontextmanager
async def connected(target: Martlet) -> AsyncIterator[MqttClient]:
    async with talking(target.settings["mqtt.listen"]) as talk:
        await talk.send(Connect("both"))
        assert (await talk.expect(Connack)).reason == 0
        await talk.subscribe("answers/+", "tell", qos=1)
        yield talk


async def check_answers(talk: MqttClient, topic: str) -> None:
    """Ask a RocketMQ consumer of the tag *topic* with correlation data of all kinds."""
    for correlation in (b"one", b"\xff", None):
        values: dict[Property, object] = {Property.RESPONSE_TOPIC: f"answers/{topic}"}
        if correlation is not None:
            values[Property.CORRELATION_DATA] = correlation
        assert await talk.publish(topic, b"what?", 1, properties=Properties(values)) == 0
        (reply,) = await talk.messages(1)
        await talk.acknowledge(reply)
        assert (reply.topic, reply.payload) == (f"answers/{topic}", b"re: what?")
        assert reply.properties.data(Property.CORRELATION_DATA) == correlation


async def answer_one(talk: MqttClient) -> None:
    """Answer the request of a RocketMQ producer that comes next."""
    (request,) = await talk.messages(1)
    await talk.acknowledge(request)
    response = request.properties.text(Property.RESPONSE_TOPIC)
    assert response is not None
    correlation = request.properties.data(Property.CORRELATION_DATA)
    back = Properties({Property.CORRELATION_DATA: correlation}, (("colour", "red"),))
    # A Go client does not tell the broker of itself before its first request.
    reason: int = GONE
    while reason == GONE:
        await trio.sleep(0.1)
        reason = await talk.publish(response, b"re: " + request.payload, 1, properties=back)
    assert reason == ReasonCode.SUCCESS


async def test_java_answers_mqtt_and_mqtt_answers_java(newest: Java, target: Martlet, name: Name) -> None:
    await trio.to_thread.run_sync(lambda: newest.push(name("group"), "mqtt", expression="java", replying=True))
    asking = await trio.to_thread.run_sync(newest.producer, name("asking"))
    found: list[tuple[bytes, dict[str, str]]] = []

    async def ask() -> None:
        found.append(await trio.to_thread.run_sync(asking.request, message("mqtt", "and what?", tags="tell")))

    async with connected(target) as talk:
        await check_answers(talk, "java")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await answer_one(talk)
    assert (found[0][0], found[0][1]["colour"]) == (b"re: and what?", "red")


async def test_go_answers_mqtt_and_mqtt_answers_go(go: Program, target: Martlet, name: Name) -> None:
    words = ("consume", target.name_server, name("group"), "mqtt", f"{10**9}", "go", "replying", "0")
    await trio.to_thread.run_sync(lambda: go.start(*words))
    found: list[dict[str, object]] = []

    async def ask() -> None:
        words = send_words("go", target.name_server, "request", message("mqtt", "and what?", tags="tell"))
        found.extend(await trio.to_thread.run_sync(lambda: go.run(*words)))

    async with connected(target) as talk:
        await check_answers(talk, "go")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await answer_one(talk)
    assert [line["body"] for line in found] == ["re: and what?"]
