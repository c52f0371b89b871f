"""PINGREQ, DISCONNECT, AUTH and enhanced authentication (sections 3.12 to 3.15 and 4.12)."""

from pathlib import Path

import pytest
from tests.mqtt.normative import (
    VERSIONS,
    after_connect,
    before_fence,
    check_disconnect,
    leave,
    packet,
    statement,
    stay,
)
from tests.wire_clients.mqtt import mqtt_broker

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    Will,
)
from martlet_mqtt.wire.properties import Properties, Property

DISCONNECT_REASONS = {0, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, *range(0x93, 0xA3)}
METHOD = Properties({Property.AUTHENTICATION_METHOD: "SCRAM-SHA-256", Property.AUTHENTICATION_DATA: b"n,,n=u,r=x"})


@statement(V4, "MQTT-3.12.4-1")
@statement(V5, "MQTT-3.12.4-1")
@VERSIONS
async def test_pingreq_is_answered(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.send(*([Pingreq()] * 5))
        assert await talk.wire.receive_exactly(10) == b"\xd0\0" * 5


@statement(V4, "MQTT-3.14.4-1", "MQTT-3.14.4-2")
@statement(V5, "MQTT-3.14.4-1", "MQTT-3.14.4-2")
@VERSIONS
async def test_after_disconnect_nothing_is_processed_and_the_broker_closes(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#", qos=1)
        talk = await mqtt.connect("c", version)
        await talk.send(Disconnect(), Publish("a", b"too late", 1, packet_id=1), Pingreq())
        with pytest.raises(EOFError):
            await talk.receive()
        assert await before_fence(watcher, publisher) == []


@statement(V5, "MQTT-3.14.0-1", "MQTT-3.14.2-1", "MQTT-3.14.2-2", "MQTT-3.14.4-1", "MQTT-3.14.4-2")
async def test_disconnect_of_the_broker_has_one_of_its_reasons_and_is_the_last_packet(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(packet_bytes_max=5000, receive_max=1)) as mqtt:
        causes = {
            ReasonCode.PROTOCOL_ERROR: packet(0xD0),
            ReasonCode.MALFORMED_PACKET: packet(0xC1),
            ReasonCode.PACKET_TOO_LARGE: packet(0x30, bytes(6000)),
            ReasonCode.TOPIC_NAME_INVALID: packet(0x30, b"\0\1#\0"),
            ReasonCode.TOPIC_ALIAS_INVALID: packet(0x30, b"\0\1a\3\x23\xff\xff"),
            ReasonCode.RECEIVE_MAXIMUM_EXCEEDED: packet(0x34, b"\0\1a\0\1\0") + packet(0x34, b"\0\1a\0\2\0"),
        }
        found = {}
        for reason, data in causes.items():
            talk = await mqtt.connect("c", expiry_s=100)
            await talk.subscribe("#", qos=0)
            await talk.wire.send(packet(0x30, b"\0\1a\0x") * 20 + data)
            found[reason] = await talk.closed()
        await mqtt.connect("c")
        kicked = await mqtt.connect("kicked")
        mqtt.context.clients["kicked"].kick()
        found[ReasonCode.ADMINISTRATIVE_ACTION] = await kicked.closed()
        stopped = await mqtt.connect("stopped")
        mqtt.context.clients["stopped"].say_goodbye()
        found[ReasonCode.SERVER_SHUTTING_DOWN] = await stopped.closed()
        taken = await mqtt.connect("taken")
        await mqtt.connect("taken")
        found[ReasonCode.SESSION_TAKEN_OVER] = await taken.closed()
        for reason, last in found.items():
            check_disconnect(last, V5, reason)
            assert isinstance(last, Disconnect)
            assert last.properties.get(Property.SESSION_EXPIRY) is None
        assert set(found) <= DISCONNECT_REASONS


@statement(V5, "MQTT-3.14.0-1", "MQTT-3.2.0-1")
async def test_before_connack_no_disconnect_is_sent(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for data in (packet(0xE0), packet(0x10, b"\0\4MQTT\5\3"), packet(0x10, bytes(70_000)), packet(0xF0)):
            talk = mqtt.open()
            await talk.wire.send(data)
            last = await talk.closed()
            assert last is None or (isinstance(last, Connack) and last.reason >= ReasonCode.UNSPECIFIED_ERROR)
        talk = mqtt.open()
        await talk.send(Connect("a+b", V5), Disconnect())
        assert isinstance(await talk.receive(), Connack)
        with pytest.raises(EOFError):
            await talk.receive()


@statement(V5, "MQTT-3.14.2-3", "MQTT-3.14.2-4", "MQTT-3.1.2-24")
@pytest.mark.parametrize("limit", [20, 30, 60])
async def test_what_explains_it_does_not_make_disconnect_too_large(tmp_path: Path, limit: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for name in ("error", "taken over", "kicked"):
            talk = mqtt.open()
            await talk.send(Connect(name, V5, properties=Properties({Property.MAXIMUM_PACKET_SIZE: limit})))
            await talk.receive()
            if name == "error":
                await talk.wire.send(packet(0x30, b"\0\x20", b"n" * 31, b"#", b"\0"))
            elif name == "kicked":
                mqtt.context.clients[name].kick()
            else:
                await mqtt.connect(name)
            head = await talk.wire.receive_exactly(2)
            assert head[0] == 0xE0
            assert 2 + head[1] <= limit, name
            assert (await talk.wire.receive_exactly(head[1]))[0] >= ReasonCode.UNSPECIFIED_ERROR
            with pytest.raises(EOFError):
                await talk.wire.receive_exactly(1)


@statement(V5, "MQTT-3.1.2-29")
@pytest.mark.parametrize("asks", [0, 1])
async def test_a_client_that_wants_no_explanations_may_get_them_with_disconnect_only(tmp_path: Path, asks: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", values={Property.REQUEST_PROBLEM_INFORMATION: asks})
        await talk.send(Subscribe(1, (FilterSubscription("a/#/b", 1),)))
        suback = await talk.receive()
        assert bool(suback.properties) <= bool(asks)  # type: ignore[union-attr]
        await talk.wire.send(packet(0xD0))
        check_disconnect(await talk.closed(), V5, ReasonCode.PROTOCOL_ERROR)


@statement(V5, "MQTT-4.13.1-1", "MQTT-3.1.2-8")
async def test_a_disconnect_that_breaks_the_protocol_is_none(tmp_path: Path) -> None:
    """The session expiry interval was 0 in CONNECT, and must stay so (section 3.14.2.2.2)."""
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("w")
        await watcher.subscribe("will", qos=0)
        talk = await mqtt.connect("c", will=Will("will", b"gone"))
        await talk.send(Disconnect(0, Properties({Property.SESSION_EXPIRY: 10})))
        check_disconnect(await talk.closed(), V5, ReasonCode.PROTOCOL_ERROR)
        assert await watcher.payloads(1) == [b"gone"]


# AUTH


@statement(V5, "MQTT-3.15.1-1", "MQTT-4.12.0-7", "MQTT-4.13.1-1")
async def test_auth_of_a_client_without_a_method_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for reason in (ReasonCode.RE_AUTHENTICATE, ReasonCode.CONTINUE_AUTHENTICATION):
            talk = await mqtt.connect("c")
            await talk.send(Auth(reason, METHOD))
            check_disconnect(await talk.closed(), V5, ReasonCode.PROTOCOL_ERROR)
        for flags in range(1, 16):
            last = await after_connect(mqtt, packet(0xF0 | flags), V5)
            check_disconnect(last, V5, ReasonCode.MALFORMED_PACKET)


@statement(V5, "MQTT-4.12.0-6")
async def test_without_a_method_there_is_no_auth_and_no_method(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = mqtt.open()
        await talk.send(Connect("c", V5), Pingreq())
        answer = await talk.receive()
        assert isinstance(answer, Connack)
        assert answer.reason == ReasonCode.SUCCESS
        assert answer.properties.get(Property.AUTHENTICATION_METHOD) is None
        assert answer.properties.get(Property.AUTHENTICATION_DATA) is None
        assert isinstance(await talk.receive(), Pingresp)


@statement(V5, "MQTT-4.12.0-1", "MQTT-3.1.4-2", "MQTT-4.13.2-1")
# AUTH of the broker never has a reason string or user properties.
@statement(V5, "MQTT-3.15.2-2", "MQTT-3.15.2-3")
async def test_an_authentication_method_is_refused_without_auth(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for method in ("SCRAM-SHA-256", "", "x"):
            talk = mqtt.open()
            properties = Properties({Property.AUTHENTICATION_METHOD: method})
            await talk.send(Connect("c", V5, properties=properties), Auth(ReasonCode.CONTINUE_AUTHENTICATION, METHOD))
            answer = await talk.receive()
            assert isinstance(answer, Connack)
            assert answer.reason == ReasonCode.BAD_AUTHENTICATION_METHOD
            with pytest.raises(EOFError):
                await talk.receive()
            assert not mqtt.context.clients


@statement(V4, "MQTT-7.0.0-1")
@VERSIONS
async def test_the_broker_sends_only_packets_of_servers(tmp_path: Path, version: int) -> None:
    """It connects to no server, so that it need not be a conforming client as well."""
    of_servers = {kind for kind in PacketType if kind.name.startswith(("CONNACK", "PUB", "SUBACK", "UNSUBACK"))}
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await stay(mqtt, "me", version)
        await talk.subscribe("a", qos=2)
        await talk.send(Publish("a", b"x", 2, packet_id=1), Pingreq())
        kinds = set()
        while PacketType.PINGRESP not in kinds or PacketType.PUBLISH not in kinds:
            head = await talk.wire.receive_exactly(2)
            if head[1]:
                await talk.wire.receive_exactly(head[1])
            kinds.add(PacketType(head[0] >> 4))
        assert kinds <= of_servers | {PacketType.PINGRESP}
        await leave(mqtt, talk, "me")
