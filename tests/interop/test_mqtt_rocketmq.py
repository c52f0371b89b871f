"""Messages between MQTT clients and RocketMQ's Java client."""

import time
from collections.abc import Callable, Iterator

import pytest

from . import fetch
from .java import Java, Jvm, message
from .mqtt_broker import MqttMartlet
from .mqtt_clients import Message, PahoClients
from .process import eventually

TOPIC = "mqtt"  # the default of mqtt.topic


@pytest.fixture
def java(jvms: Callable[[str], Jvm], broker: MqttMartlet) -> Iterator[Java]:
    clients = Java(jvms(fetch.CLIENT_VERSIONS[-1]), broker.name_server)
    yield clients
    clients.leave()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_java_consumer_gets_the_names_that_it_selects_as_tags(
    java: Java, mqtt: PahoClients, broker: MqttMartlet
) -> None:
    consumer = java.push("orders", TOPIC, expression="orders/7 || orders/8")
    publisher = mqtt.connect(broker.link(), "shop")
    began_ms = now_ms()
    whole = Message(
        "orders/7",
        b"\0 three apples \xff",
        2,
        user=(("colour", "red"), ("KEYS", "order-7 customer-1")),
        content_type="text/plain",
        response_topic="orders/answers",
        correlation=b"number 7",
        expiry_s=3600,
    )
    large = Message("orders/8", b"large " * 50_000)
    for each in (whole, Message("orders/9", b"for others"), large, Message("orders/8", b"of QoS 0", 0)):
        publisher.publish(each)
    ended_ms = now_ms()
    got = {m.body: m for m in consumer.wait_bodies({whole.payload, large.payload, b"of QoS 0"})}
    assert {m.tags for m in got.values()} == {"orders/7", "orders/8"}
    found = got[whole.payload]
    assert (found.topic, found.tags, found.keys) == (TOPIC, "orders/7", "order-7 customer-1")
    said = found.properties
    expected = {
        "colour": "red",
        "CONTENT_TYPE": "text/plain",
        "REPLY_TO": "orders/answers",
        "CORRELATION_ID": "number 7",
        "MQTT_QOS": "2",
    }
    assert {name: said.get(name) for name in expected} == expected
    assert began_ms + 3_600_000 <= int(said["EXPIRES_MS"]) <= ended_ms + 3_600_000
    queries = java.queries()
    [by_key] = eventually(lambda: queries.by_key(TOPIC, "order-7") or None)
    assert by_key.body == whole.payload


def test_mqtt_subscribers_get_what_a_java_producer_sends_with_a_tag(
    java: Java, mqtt: PahoClients, broker: MqttMartlet
) -> None:
    newest, older = mqtt.connect(broker.link(), "newest"), mqtt.connect(broker.link(version=4), "older")
    for client in (newest, older):
        client.subscribe("stock/#")
    properties = {
        "colour": "green",
        "CONTENT_TYPE": "application/json",
        "REPLY_TO": "stock/answers",
        "EXPIRES_MS": str(now_ms() + 3_600_000),
    }
    system = {"CORRELATION_ID": "number 8"}
    expired = {"EXPIRES_MS": str(now_ms() - 1000)}
    producer = java.producer("stock")
    producer.send(
        message(TOPIC, "too late", tags="stock/pears", properties=expired),
        message(TOPIC, "no name"),
        message(TOPIC, "a filter is no name", tags="stock/+"),
        message(TOPIC, b"\0\xff", tags="stock/apples", keys="k1 k2", properties=properties, system=system),
        message(TOPIC, "large " * 50_000, tags="stock/apples/large"),  # the client compresses it
    )
    producer.send(*(message(TOPIC, f"{number}", tags="stock/batch") for number in range(5)), how="batch")
    payloads = {b"\0\xff", b"large " * 50_000, *(b"%d" % number for number in range(5))}
    for client in (newest, older):
        assert {m.payload for m in client.inbox.wait(len(payloads))} == payloads
        assert {m.qos for m in client.inbox.now()} == {1}
    [found] = [m for m in newest.inbox.now() if m.topic == "stock/apples"]
    assert found.content_type == "application/json"
    assert (found.response_topic, found.correlation) == ("stock/answers", b"number 8")
    assert found.expiry_s is not None
    assert 0 < found.expiry_s <= 3600
    user = dict(found.user)
    assert (user["colour"], user["KEYS"]) == ("green", "k1 k2")
    assert [m for m in older.inbox.now() if m.topic == "stock/apples"] == [found.plain()]


def test_a_java_consumer_replies_to_an_mqtt_client(java: Java, mqtt: PahoClients, broker: MqttMartlet) -> None:
    java.push("service", TOPIC, expression="questions", replying=True)
    client = mqtt.connect(broker.link(), "asking")
    client.subscribe("answers/asking", 1)
    numbers = (b"first", b"\0\xff", None)
    for number in numbers:
        client.publish(Message("questions", b"what?", response_topic="answers/asking", correlation=number))
    answers = client.inbox.wait(len(numbers))
    assert {(m.topic, m.payload) for m in answers} == {("answers/asking", b"re: what?")}
    assert {m.correlation for m in answers} == set(numbers)


def test_an_mqtt_client_replies_to_a_java_producer(java: Java, mqtt: PahoClients, broker: MqttMartlet) -> None:
    service = mqtt.connect(broker.link(), "service")

    def reply(asked: Message) -> None:
        assert asked.response_topic is not None
        answer = b"re: " + asked.payload
        service.send(Message(asked.response_topic, answer, user=(("colour", "red"),), correlation=asked.correlation))

    service.inbox.on_message = reply
    service.subscribe("java-questions", 1)
    asking = java.producer("asking")
    for number in range(3):
        body, properties = asking.request(message(TOPIC, f"what {number}?", tags="java-questions"))
        assert (body, properties["colour"]) == (b"re: what %d?" % number, "red")
