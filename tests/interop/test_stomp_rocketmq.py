"""Messages between STOMP clients, RocketMQ's Java client and MQTT clients."""

from collections.abc import Callable, Iterator

import pytest

from . import fetch
from .java import Java, Jvm, message
from .mqtt_broker import MqttMartlet
from .mqtt_clients import Message as MqttMessage
from .mqtt_clients import PahoClients
from .stomp_clients import StompPy, StompPyClients

LARGE = b"large " * 50_000


@pytest.fixture
def java(jvms: Callable[[str], Jvm], broker: MqttMartlet) -> Iterator[Java]:
    clients = Java(jvms(fetch.CLIENT_VERSIONS[-1]), broker.name_server)
    yield clients
    clients.leave()


@pytest.fixture
def stomp(broker: MqttMartlet) -> Iterator[StompPy]:
    clients = StompPyClients("1.2")
    yield clients.connect(broker.stomp)
    clients.close()


def test_a_java_consumer_gets_what_a_stomp_client_sends(java: Java, stomp: StompPy) -> None:
    headers = {"content-type": "text/plain", "correlation-id": "number 7", "colour": "red: dark", "priority": "5"}
    stomp.send("/queue/orders", b"\0 three apples \xff", KEYS="order-7 customer-1", TAGS="fruit", **headers)
    stomp.send("/queue/orders", b"for others", TAGS="fish")
    stomp.begin("t")
    stomp.send("/queue/orders", b"in a transaction", "t", TAGS="fruit")
    stomp.end("commit", "t")
    consumer = java.push("shop", "orders", expression="fruit")
    got = {m.body: m for m in consumer.wait_bodies({b"\0 three apples \xff", b"in a transaction"})}
    assert len(got) == 2
    found = got[b"\0 three apples \xff"]
    assert (found.topic, found.tags, found.keys) == ("orders", "fruit", "order-7 customer-1")
    expected = {"CONTENT_TYPE": "text/plain", "CORRELATION_ID": "number 7", "colour": "red: dark", "priority": "5"}
    assert {name: found.properties.get(name) for name in expected} == expected


def test_a_stomp_client_gets_what_a_java_producer_sends(java: Java, stomp: StompPy) -> None:
    stomp.subscribe("/queue/stock", "client-individual")
    more = {"colour": "green: light", "CONTENT_TYPE": "application/json"}
    producer = java.producer("stock")
    producer.send(message("stock", b"\0\xff", tags="apples", keys="k1 k2", properties=more))
    producer.send(message("stock", LARGE))  # the client compresses it
    messages = stomp.heard.take(2)
    found = {each.body: each.headers for each in messages}
    assert set(found) == {b"\0\xff", LARGE}
    expected = {"TAGS": "apples", "KEYS": "k1 k2", "colour": "green: light", "content-type": "application/json"}
    assert found[b"\0\xff"].items() >= {**expected, "destination": "/queue/stock"}.items()
    for each in messages:
        stomp.settle(each)


def test_names_are_the_same_for_stomp_mqtt_and_java(
    java: Java, stomp: StompPy, mqtt: PahoClients, broker: MqttMartlet
) -> None:
    device = mqtt.connect(broker.link(), "device")
    device.subscribe("home/+/door")
    stomp.subscribe("/topic/mqtt/home/+/door")
    consumer = java.push("doors", "mqtt", expression="home/hall/door")
    name = "/topic/mqtt/home/hall/door"
    stomp.send(name, b"from STOMP", colour="red", **{"content-type": "text/plain", "correlation-id": "7"})
    device.publish(
        MqttMessage("home/hall/door", b"from MQTT", user=(("colour", "green"),), content_type="a/b", correlation=b"8")
    )
    producer = java.producer("doors")
    producer.send(message("mqtt", b"from Java", tags="home/hall/door", properties={"colour": "blue"}))
    bodies = {b"from STOMP", b"from MQTT", b"from Java"}
    by_java = {m.body: m.properties for m in consumer.wait_bodies(bodies)}
    by_stomp = {each.body: each.headers for each in stomp.heard.take(3)}
    by_mqtt = {each.payload: each for each in device.inbox.wait(3)}
    assert set(by_java) == set(by_stomp) == set(by_mqtt) == bodies
    for body, colour, kind, correlation in (
        (b"from STOMP", "red", "text/plain", "7"),
        (b"from MQTT", "green", "a/b", "8"),
        (b"from Java", "blue", None, None),
    ):
        assert by_java[body]["colour"] == by_stomp[body]["colour"] == dict(by_mqtt[body].user)["colour"] == colour
        assert by_stomp[body]["destination"] == name
        assert by_mqtt[body].topic == "home/hall/door"
        assert by_java[body].get("CONTENT_TYPE") == by_stomp[body].get("content-type") == kind
        assert by_mqtt[body].content_type == kind
        assert by_java[body].get("CORRELATION_ID") == by_stomp[body].get("correlation-id") == correlation
        assert by_mqtt[body].correlation == (correlation.encode() if correlation else None)
