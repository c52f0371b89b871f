"""Requests and replies between clients of STOMP, MQTT 5 and RocketMQ, each pair both ways."""

from pathlib import Path

import pytest
from tests.stomp.all_protocols import all_protocols, properties_of, values_of
from tests.wire_clients.mqtt import MqttClient as MqttTalk
from tests.wire_clients.remoting import REPLY_TOPIC

from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property
from martlet_remoting.wire.codes import ResponseCode

WORK = "/topic/mqtt/work"
MINE = "/temp-queue/mine"


async def answer(talk: MqttTalk, request: Publish, payload: bytes, *users: tuple[str, str]) -> int:
    """Answer *request* as MQTT 5 says, and return the reason of PUBACK."""
    response = request.properties.text(Property.RESPONSE_TOPIC)
    assert response is not None
    values: dict[Property, object] = {Property.CONTENT_TYPE: "text/plain"}
    correlation = request.properties.data(Property.CORRELATION_DATA)
    if correlation is not None:
        values[Property.CORRELATION_DATA] = correlation
    return await talk.publish(response, payload, 1, properties=Properties(values, users))


@pytest.mark.parametrize("correlation", ["c: 1", "=", None])
@pytest.mark.parametrize("reply", [MINE, "/temp-topic/mine", "/queue/mine", "/topic/mqtt/mine"])
async def test_an_mqtt_client_answers_one_of_stomp(tmp_path: Path, reply: str, correlation: str | None) -> None:
    async with all_protocols(tmp_path) as protocols:
        asker, replier = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await replier.subscribe("work")
        await asker.subscribe(reply)
        more = {"correlation_id": correlation} if correlation is not None else {}
        await asker.publish(WORK, b"what?", reply_to=reply, colour="red", **more)
        (request,) = await replier.messages(1)
        assert (request.payload, request.properties.user) == (b"what?", (("colour", "red"),))
        expected = correlation.encode() if correlation is not None else None
        assert values_of(request).keys() == {Property.RESPONSE_TOPIC} | (
            {Property.CORRELATION_DATA} if correlation is not None else set()
        )
        assert request.properties.data(Property.CORRELATION_DATA) == expected
        assert await answer(replier, request, b"that", ("colour", "blue")) == 0
        (message,) = await asker.messages(1)
        assert (message.body, message["destination"]) == (b"that", reply)
        assert message.headers.get("correlation-id") == correlation
        assert (message["colour"], message["content-type"]) == ("blue", "text/plain")
        assert not message.headers.keys() & {"TAGS", "CLUSTER", "TTL", "reply-to"}


async def test_an_answer_of_mqtt_to_a_connection_that_is_gone_has_no_subscriber(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        asker, replier = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await replier.subscribe("work")
        await asker.publish(WORK, b"what?", reply_to=MINE, correlation_id="1")
        (request,) = await replier.messages(1)
        await asker.disconnect()
        assert await answer(replier, request, b"that") == ReasonCode.NO_MATCHING_SUBSCRIBERS


@pytest.mark.parametrize("correlation", [b"c1", b"\xff\x00", "é".encode(), b"", None, b"="])
async def test_a_stomp_client_answers_one_of_mqtt(tmp_path: Path, correlation: bytes | None) -> None:
    async with all_protocols(tmp_path) as protocols:
        replier, asker = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await replier.subscribe(WORK)
        await asker.subscribe("answers/+")
        values: dict[Property, object] = {Property.RESPONSE_TOPIC: "answers/m"}
        if correlation is not None:
            values[Property.CORRELATION_DATA] = correlation
        await asker.publish("work", b"what?", 1, properties=Properties(values, (("colour", "red"),)))
        (request,) = await replier.messages(1)
        assert (request.body, request["colour"]) == (b"what?", "red")
        same = {"correlation_id": request["correlation-id"]} if "correlation-id" in request.headers else {}
        assert ("correlation_id" in same) is (correlation is not None)
        await replier.publish(request["reply-to"], b"that", content_type="text/plain", colour="blue", empty="", **same)
        (message,) = await asker.messages(1)
        assert (message.topic, message.payload) == ("answers/m", b"that")
        assert message.properties.data(Property.CORRELATION_DATA) == correlation
        assert message.properties.text(Property.CONTENT_TYPE) == "text/plain"
        assert message.properties.text(Property.RESPONSE_TOPIC) is None
        assert message.properties.user == (("colour", "blue"),)


@pytest.mark.parametrize("correlation", ["c1", None])
async def test_a_rocketmq_client_answers_one_of_stomp(tmp_path: Path, correlation: str | None) -> None:
    async with all_protocols(tmp_path) as protocols:
        asker, replier = await protocols.stomp.connect(), protocols.remoting()
        more = {"correlation_id": correlation} if correlation is not None else {}
        await asker.publish("/queue/work", b"what?", reply_to=MINE, **more)
        (record,) = protocols.stomp.records("work")
        found = dict(properties_of(record))
        assert (await replier.reply(found, b"that", colour="red", UNIQ_KEY="U1", KEYS="k")).code == 0
        (message,) = await asker.messages(1)
        assert (message.body, message["subscription"]) == (b"that", MINE)
        assert (message["colour"], message["KEYS"]) == ("red", "k")
        assert message.headers.get("correlation-id") == correlation
        assert not message.headers.keys() & {"UNIQ_KEY", "MSG_TYPE", "TTL", "REPLY_TO_CLIENT", "TAGS"}
        await asker.disconnect()
        late = await replier.reply(found, b"late")
        assert late.code != ResponseCode.SUCCESS
        assert "is gone" in str(late.remark)


@pytest.mark.parametrize("mine", [None, MINE, "/queue/mine"])
async def test_a_stomp_client_answers_one_of_rocketmq(tmp_path: Path, mine: str | None) -> None:
    """Also with a message that has a reply-to of its own."""
    async with all_protocols(tmp_path) as protocols:
        replier, asker = await protocols.stomp.connect(), protocols.remoting()
        await replier.subscribe("/queue/work")
        await asker.introduce("10.0.0.1@77#é/x@y")
        wanted = {"CORRELATION_ID": "c9", "REPLY_TO_CLIENT": "10.0.0.1@77#é/x@y", "TTL": "3000", "TAGS": "t"}
        protocols.broker.topics.ensure("work", 1)
        assert (await asker.publish("work", b"what?", {**wanted, "colour": "blue", "KEYS": "k1"})).code == 0
        (request,) = await replier.messages(1)
        assert (request.body, request["colour"], request["KEYS"], request["TAGS"]) == (b"what?", "blue", "k1", "t")
        more = {"reply_to": mine} if mine is not None else {}
        await replier.publish(
            request["reply-to"], b"that", correlation_id=request["correlation-id"], size="1", empty="", **more
        )
        command, properties = await asker.pushed()
        assert (command.body, command.ext["topic"]) == (b"that", REPLY_TOPIC)
        expected = {"CORRELATION_ID": "c9", "MSG_TYPE": "reply", "size": "1", "REPLY_TO_CLIENT": "10.0.0.1@77#é/x@y"}
        assert expected.items() <= properties.items()
        assert await replier.rest() == []
