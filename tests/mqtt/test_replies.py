"""Requests of MQTT clients that RocketMQ clients answer, and the other way."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from tests.wire_clients.remoting import REPLY_TOPIC, RemotingClient, remoting_of

from martlet.contracts import Identity
from martlet.message import Record, decode_properties
from martlet.records.codec import decode_record
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property
from martlet_remoting.wire.codes import ResponseCode

QOS = pytest.mark.parametrize("qos", [0, 1, 2])


class Both:
    """A broker with MQTT and remoting."""

    def __init__(self, mqtt: MqttBroker) -> None:
        self.mqtt = mqtt
        self._port = remoting_of(mqtt.broker)

    def remoting(self) -> RemotingClient:
        return RemotingClient.of(self.mqtt.running, self._port)

    async def records(self, topic: str) -> list[Record]:
        """Return the records of *topic*, which everybody has."""
        await self.mqtt.settle()
        found = self.mqtt.broker.topics.get(topic)
        assert found is not None
        store, records = self.mqtt.broker.store, []
        for queue in map(found.queue, range(found.read_queues)):
            entries = store.queues.entries(queue, 0, queue.next_offset)
            for at in range(0, len(entries), 20):
                data = store.lookup.known_record(int.from_bytes(entries[at : at + 8]))
                assert data is not None
                records.append(decode_record(data))
        return records


@asynccontextmanager
async def both(directory: Path) -> AsyncIterator[Both]:
    async with mqtt_broker(directory) as mqtt:
        yield Both(mqtt)


def request(payload: bytes, response: str, correlation: bytes | None, qos: int = 1, *users: tuple[str, str]) -> Publish:
    values: dict[Property, object] = {Property.RESPONSE_TOPIC: response}
    if correlation is not None:
        values[Property.CORRELATION_DATA] = correlation
    return Publish("ask", payload, qos, packet_id=7 if qos else 0, properties=Properties(values, users))


async def ask(talk: MqttClient, *words: Any) -> None:
    packet = request(*words)
    assert await talk.publish("ask", packet.payload, packet.qos, 7, properties=packet.properties) == 0
    await talk.rest()


@QOS
@pytest.mark.parametrize("correlation", [b"c1", b"\xff\x00", "é".encode(), b"", None, b"\x01", b"="])
async def test_a_rocketmq_client_answers_a_request_of_an_mqtt_client(
    tmp_path: Path, correlation: bytes | None, qos: int
) -> None:
    async with both(tmp_path) as brokers:
        asker = await brokers.mqtt.connect("asker")
        await asker.subscribe("answers/#", qos=qos)
        await ask(asker, b"what?", "answers/asker", correlation, qos)
        (record,) = await brokers.records("mqtt")
        replier = brokers.remoting()
        answer = await replier.reply(decode_properties(record.properties), b"that", colour="red", UNIQ_KEY="U1")
        assert answer.code == ResponseCode.SUCCESS
        (reply,) = await asker.messages(1)
        assert (reply.topic, reply.payload, reply.qos) == ("answers/asker", b"that", min(qos, 1))
        assert reply.properties.data(Property.CORRELATION_DATA) == correlation
        assert reply.properties.text(Property.RESPONSE_TOPIC) is None
        assert reply.properties.user == (("colour", "red"),)
        assert await brokers.records(REPLY_TOPIC) == []


async def test_what_a_request_has_for_rocketmq_clients_is_hidden_from_mqtt_clients(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        asker, replier = await brokers.mqtt.connect("asker"), await brokers.mqtt.connect("replier")
        await replier.subscribe("ask")
        for correlation in (b"c", b"\xff", None):
            await ask(asker, b"what?", "answers", correlation, 1, ("a", "b"))
            (got,) = await replier.messages(1)
            await replier.acknowledge(got)
            assert got.properties == request(b"", "answers", correlation, 1, ("a", "b")).properties


@QOS
@pytest.mark.parametrize("version", [V4, V5])
async def test_an_mqtt_client_answers_a_request_of_a_rocketmq_client(tmp_path: Path, qos: int, version: int) -> None:
    async with both(tmp_path) as brokers:
        replier, asker = await brokers.mqtt.connect("replier", version), brokers.remoting()
        await replier.subscribe("ask")
        await asker.introduce("10.0.0.1@77#é/x@y")
        wanted = {"CORRELATION_ID": "c9", "REPLY_TO_CLIENT": "10.0.0.1@77#é/x@y", "TTL": "3000", "TAGS": "ask"}
        assert (await asker.publish("mqtt", b"what?", {**wanted, "colour": "blue"})).code == 0
        (got,) = await replier.messages(1)
        await replier.acknowledge(got)
        assert got.payload == b"what?"
        if version == V4:
            return  # it cannot learn where to answer
        response, correlation = (
            got.properties.text(Property.RESPONSE_TOPIC),
            got.properties.data(Property.CORRELATION_DATA),
        )
        assert (response, correlation) == ("$REPLY/10.0.0.1@77%23%C3%A9%2Fx@y", b"c9")
        assert got.properties.user == (("colour", "blue"),)
        assert response
        back = Properties({Property.CORRELATION_DATA: correlation, Property.CONTENT_TYPE: "text"}, (("size", "1"),))
        assert await replier.publish(response, b"that", qos, properties=back) == 0
        command, properties = await asker.pushed()
        assert (command.body, command.ext["topic"]) == (b"that", REPLY_TOPIC)
        expected = {"CORRELATION_ID": "c9", "MSG_TYPE": "reply", "size": "1", "CONTENT_TYPE": "text"}
        assert expected.items() <= properties.items()
        (record,) = await brokers.records(REPLY_TOPIC)
        assert record.body == b"that"
        assert await replier.rest() == []


async def test_a_reply_by_topic_alias_and_one_again_arrive(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        replier, asker = await brokers.mqtt.connect("replier"), brokers.remoting()
        await asker.introduce("asker")
        for index, topic in enumerate(("$REPLY/asker", "")):
            found: dict[Property, object] = {Property.CORRELATION_DATA: b"%d" % index, Property.TOPIC_ALIAS: 3}
            assert await replier.publish(topic, b"x", 1, properties=Properties(found)) == 0
            _, properties = await asker.pushed()
            assert properties["CORRELATION_ID"] == str(index)


@QOS
async def test_a_reply_to_nobody_is_acknowledged_as_one_without_subscribers(tmp_path: Path, qos: int) -> None:
    async with both(tmp_path) as brokers:
        replier = await brokers.mqtt.connect("replier")
        found = Properties({Property.CORRELATION_DATA: b"c"})
        for _ in range(3):
            reason = await replier.publish("$REPLY/gone", b"x", qos, 5, properties=found)
            assert reason == (ReasonCode.NO_MATCHING_SUBSCRIBERS if qos else 0)
        assert await brokers.records(REPLY_TOPIC) == []


async def test_a_reply_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        replier, asker = await brokers.mqtt.connect("replier"), brokers.remoting()
        await asker.introduce("asker")
        for correlation in (None, b"\xff", b"a\x01"):
            found = Properties({} if correlation is None else {Property.CORRELATION_DATA: correlation})
            reason = await replier.publish("$REPLY/asker", b"x", 1, properties=found)
            assert reason == ReasonCode.TOPIC_NAME_INVALID
        found = Properties({Property.CORRELATION_DATA: b"c"})
        reason = await replier.publish("$REPLY/asker", b"x", 2, retain=True, properties=found)
        assert reason == ReasonCode.TOPIC_NAME_INVALID
        assert await brokers.records(REPLY_TOPIC) == []


async def test_a_reply_to_an_address_that_is_no_name_is_refused(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        replier = brokers.remoting()
        request = {"CORRELATION_ID": "c", "TTL": "1", "CLUSTER": "DefaultCluster"}
        for address in ("mqtt:text:a/#", "mqtt:text:", "mqtt:", "mqtt:text:$SYS/x", "mqtt:base64:$REPLY/x"):
            answer = await replier.reply({**request, "REPLY_TO_CLIENT": address}, b"x")
            assert answer.code != ResponseCode.SUCCESS, address
        assert await brokers.records("mqtt") == []


def only(allowed: set[tuple[str, str]]) -> Any:
    def authorize(identity: Identity, action: str, name: str) -> bool | None:
        return (action, name) in allowed if action == "publish" else True

    return authorize


async def test_who_replies_needs_the_permission_to_publish_where_the_reply_goes(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        asker, other, replier = await brokers.mqtt.connect("asker"), brokers.remoting(), brokers.remoting()
        await other.introduce("other")
        await asker.subscribe("answers")
        await ask(asker, b"what?", "answers", b"c", 1)
        (record,) = await brokers.records("mqtt")
        broker = brokers.mqtt.broker
        reply = Properties({Property.CORRELATION_DATA: b"c"})
        broker.authorizers = (only({("publish", REPLY_TOPIC)}),)
        answer = await replier.reply(decode_properties(record.properties), b"forged")
        assert answer.code == ResponseCode.NO_PERMISSION
        assert await asker.publish("$REPLY/other", b"x", 1, properties=reply) == 0
        await other.pushed()
        broker.authorizers = (only({("publish", REPLY_TOPIC), ("publish", "mqtt/answers"), ("publish", "mqtt")}),)
        assert (await replier.reply(decode_properties(record.properties), b"right")).code == ResponseCode.SUCCESS
        assert await asker.payloads(1) == [b"right"]
        broker.authorizers = (only({("publish", "mqtt"), ("publish", "mqtt/answers")}),)
        assert await asker.publish("$REPLY/other", b"x", 1, properties=reply) == ReasonCode.NOT_AUTHORIZED


async def test_an_address_of_an_unknown_protocol_is_that_of_nobody(tmp_path: Path) -> None:
    async with both(tmp_path) as brokers:
        talk = brokers.remoting()
        found = {"CORRELATION_ID": "c", "TTL": "1", "CLUSTER": "DefaultCluster", "REPLY_TO_CLIENT": "other:x"}
        answer = await talk.reply(found, b"x")
        assert (answer.code, "not found" in str(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)


async def test_without_remoting_nobody_waits_for_a_reply(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("replier")
        reason = await talk.publish("$REPLY/x", b"x", 1, properties=Properties({Property.CORRELATION_DATA: b"c"}))
        assert reason == ReasonCode.NO_MATCHING_SUBSCRIBERS
