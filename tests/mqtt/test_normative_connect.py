"""CONNECT and CONNACK (sections 3.1 and 3.2), without wills."""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mqtt.normative import (
    VERSIONS,
    after_connect,
    answer_to,
    before_fence,
    check_disconnect,
    check_refusal,
    connect_packet,
    leave,
    packet,
    publish_packet,
    statement,
    stay,
)
from tests.wire_clients.mqtt import mqtt_broker
from trio.testing import MockClock

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connack, Connect, Disconnect, Pingreq, Pingresp, Publish, Will
from martlet_mqtt.wire.properties import Properties, Property, encode_text

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@statement(V4, "MQTT-3.1.0-1", "MQTT-3.2.0-1")
@statement(V5, "MQTT-3.1.0-1", "MQTT-3.2.0-1", "MQTT-3.14.0-1")
@VERSIONS
async def test_a_first_packet_that_is_not_connect_ends_the_connection_without_an_answer(
    tmp_path: Path, version: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#")
        for data in (packet(0xC0), packet(0xE0), publish_packet(version, b"a", b"early")):
            assert await answer_to(mqtt, data, version) is None
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-3.1.0-2")
@statement(V5, "MQTT-3.1.0-2", "MQTT-3.2.0-2", "MQTT-4.13.1-1")
@VERSIONS
async def test_a_second_connect_ends_the_connection_and_gets_no_connack(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.wire.send(connect_packet(version))
        if version == V5:
            last = await talk.receive()
            assert isinstance(last, Disconnect)
            assert last.reason == ReasonCode.PROTOCOL_ERROR
        with pytest.raises(EOFError):
            await talk.receive()


@statement(V4, "MQTT-3.1.2-1")
@statement(V5, "MQTT-3.1.2-1")
@VERSIONS
@pytest.mark.parametrize("name", [b"\0\4mqtt", b"\0\4MQTX", b"\0\6MQTTxx", b"\0\0"])
async def test_another_protocol_name_is_not_served(tmp_path: Path, version: int, name: bytes) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await answer_to(mqtt, connect_packet(version, name=name), V4)
        assert last is None or (isinstance(last, Connack) and last.reason == 1)
        assert not mqtt.context.clients


@statement(V4, "MQTT-3.1.2-2")
@statement(V5, "MQTT-3.1.2-2")
async def test_an_unknown_protocol_level_is_told_and_the_connection_closed(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for level in (0, 1, 2):
            assert await answer_to(mqtt, connect_packet(V4, level=level), V4) == Connack(False, 1)
        for level in (6, 100):
            last = await answer_to(mqtt, connect_packet(V5, level=level), V5)
            assert isinstance(last, Connack)
            assert last.reason == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION


@statement(V4, "MQTT-3.1.2-3", "MQTT-3.1.4-1")
@statement(V5, "MQTT-3.1.2-3", "MQTT-3.1.4-1")
@VERSIONS
async def test_the_reserved_flag_of_connect_ends_the_connection(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await answer_to(mqtt, connect_packet(version, 3), version)
        check_refusal(last, version, ReasonCode.MALFORMED_PACKET)


C = encode_text("c")
TEXT = encode_text("t")
EMPTY = b"\0"  # properties


@statement(V4, *(f"MQTT-3.1.2-{number}" for number in (9, 11, 13, 14, 15, 18, 19, 20, 21, 22)), "MQTT-3.1.4-1")
@statement(V4, "MQTT-3.1.3-1", "MQTT-3.1.3-3", "MQTT-4.8.0-1")
@statement(V5, *(f"MQTT-3.1.2-{number}" for number in (9, 11, 12, 13, 16, 17, 18, 19)), "MQTT-3.1.4-1")
@statement(V5, "MQTT-3.1.3-1", "MQTT-3.1.3-3")
@VERSIONS
@pytest.mark.parametrize(
    ("flags", "payload"),
    [
        (0x0A, [C]),  # without the will flag: QoS 1
        (0x12, [C]),  # QoS 2
        (0x22, [C]),  # retain
        (0x02, [C, EMPTY, TEXT, TEXT]),  # a will
        (0x1E, [C, EMPTY, TEXT, TEXT]),  # QoS 3
        (0x06, [C]),  # with the will flag: no will
        (0x06, [C, EMPTY, TEXT]),  # no payload of the will
        (0x02, [C, TEXT]),  # a user name without its flag
        (0x82, [C]),  # no user name with its flag
        (0x82, [C, TEXT, TEXT]),  # a password without its flag
        (0xC2, [C, TEXT]),  # no password with its flag
        (0x02, []),  # no client identifier
    ],
)
async def test_a_payload_that_contradicts_the_flags_of_connect_ends_the_connection(
    tmp_path: Path, version: int, flags: int, payload: list[bytes]
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        content = b"".join(each for each in payload if version == V5 or each is not EMPTY)
        last = await answer_to(mqtt, connect_packet(version, flags, content), version)
        check_refusal(last, version, ReasonCode.MALFORMED_PACKET)
        assert not mqtt.context.clients


@statement(V4, "MQTT-3.1.2-22", "MQTT-3.1.4-1")
async def test_a_password_without_a_user_name_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        assert await answer_to(mqtt, connect_packet(V4, 0x42, C + TEXT), V4) is None


@statement(V4, "MQTT-3.1.3-4", "MQTT-3.1.3-10", "MQTT-3.1.3-11", "MQTT-3.1.4-1", "MQTT-1.5.3-1", "MQTT-1.5.3-2")
@statement(V5, "MQTT-3.1.3-4", "MQTT-3.1.3-11", "MQTT-3.1.3-12", "MQTT-3.1.4-1", "MQTT-1.5.4-1", "MQTT-1.5.4-2")
@VERSIONS
@pytest.mark.parametrize("bad", [b"\0\1\xff", b"\0\3\xed\xa0\x80", b"\0\1\0", b"\0\2\xc3("])
async def test_strings_of_connect_must_be_strings(tmp_path: Path, version: int, bad: bytes) -> None:
    empty = EMPTY if version == V5 else b""
    async with mqtt_broker(tmp_path) as mqtt:
        for flags, payload in ((0x02, bad), (0x06, C + empty + bad + TEXT), (0x82, C + bad)):
            last = await answer_to(mqtt, connect_packet(version, flags, payload), version)
            check_refusal(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V5, "MQTT-3.1.4-1", "MQTT-4.13.1-1")
@pytest.mark.parametrize(
    "properties",
    [
        b"\x21\0\0",  # receive maximum 0
        b"\x27\0\0\0\0",  # maximum packet size 0
        b"\x11\0\0\0\1\x11\0\0\0\1",  # session expiry twice
        b"\x19\2",  # request response information 2
        b"\x17\2",  # request problem information 2
        b"\x16\0\1x",  # authentication data without a method
        b"\x23\0\1",  # a topic alias
        b"\x7f",  # no property
        b"\x11\0\0",  # cut off
    ],
)
async def test_properties_that_connect_may_not_have_end_the_connection(tmp_path: Path, properties: bytes) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await answer_to(mqtt, connect_packet(V5, properties=properties), V5)
        assert isinstance(last, Connack)
        assert last.reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR)


@statement(V4, "MQTT-3.1.4-1", "MQTT-3.2.2-6")
async def test_a_connect_that_no_return_code_fits_ends_the_connection_without_connack(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for topic in ("a/#", "+", ""):
            talk = mqtt.open(V4)
            await talk.send(Connect("c", V4, will=Will(topic, b"")))
            assert await talk.closed() is None


# sessions


@statement(V4, "MQTT-3.1.2-4", "MQTT-3.1.2-5", "MQTT-3.1.4-3", "MQTT-3.1.4-4", "MQTT-3.2.2-2", "MQTT-3.2.2-3")
@statement(V5, "MQTT-3.1.2-5", "MQTT-3.1.2-6", "MQTT-3.1.2-23", "MQTT-3.1.4-4", "MQTT-3.1.4-5", "MQTT-3.2.2-3")
@VERSIONS
async def test_a_session_continues_with_what_came_meanwhile(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version, present=False), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        await leave(mqtt, talk, "me")
        for qos in (1, 2):
            await publisher.publish("a", b"%d" % qos, qos)
        again = await stay(mqtt, "me", version, present=True)
        assert await again.payloads(2) == [b"1", b"2"]


@statement(V4, "MQTT-3.1.2-6", "MQTT-3.1.4-3", "MQTT-3.2.2-1")
@statement(V5, "MQTT-3.1.2-4", "MQTT-3.1.4-4", "MQTT-3.2.2-2")
@VERSIONS
async def test_a_clean_start_discards_the_session(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", "fence", qos=1)
        await publisher.publish("a", b"in flight", 1)
        await talk.messages(1)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"missed", 1)
        again = await mqtt.connect("me", version, clean=True, expiry_s=100, present=False)
        await again.subscribe("fence", qos=1)
        await publisher.publish("a", b"later", 1)
        assert await before_fence(again, publisher) == []


@statement(V4, "MQTT-3.1.2-6", "MQTT-3.2.2-3")
@statement(V5, "MQTT-3.2.2-3", "MQTT-4.1.0-2")
@VERSIONS
async def test_a_session_that_is_not_kept_is_gone_with_its_connection(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("me", version, clean=True), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=1)
        await leave(mqtt, talk, "me")
        again = await mqtt.connect("me", version, clean=False, present=False)
        await again.subscribe("fence", qos=1)
        await publisher.publish("a", b"lost", 1)
        assert await before_fence(again, publisher) == []


@statement(V4, "MQTT-3.1.3-2")
@statement(V5, "MQTT-3.1.3-2")
@VERSIONS
async def test_the_client_identifier_alone_names_the_session(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for name in ("a", "A", "á", "aa"):
            talk = await stay(mqtt, name, version, present=False)
            await talk.subscribe(f"only/{name}", qos=1)
            await leave(mqtt, talk, name)
        publisher = await mqtt.connect("p", version)
        for name in ("a", "A", "á", "aa"):
            await publisher.publish(f"only/{name}", name.encode(), 1)
        for name in ("a", "A", "á", "aa"):
            talk = await stay(mqtt, name, version, present=True)
            assert await talk.payloads(1) == [name.encode()]
            assert await talk.rest() == []


# client identifiers


@statement(V4, "MQTT-3.1.3-5", "MQTT-3.1.4-4")
@statement(V5, "MQTT-3.1.3-5", "MQTT-3.1.4-5")
@VERSIONS
async def test_ascii_letters_and_digits_are_client_identifiers(tmp_path: Path, version: int) -> None:
    names = [*ALPHABET, ALPHABET[:23], ALPHABET[-23:], *("x" * size for size in range(2, 24))]
    async with mqtt_broker(tmp_path) as mqtt:
        for name in names:
            await mqtt.connect(name, version, present=False)
        assert set(mqtt.context.clients) == set(names)


@statement(V4, "MQTT-3.1.3-6", "MQTT-3.1.3-7")
@statement(V5, "MQTT-3.1.3-6", "MQTT-3.1.3-7", "MQTT-3.2.2-16")
@VERSIONS
async def test_clients_without_an_identifier_get_different_ones(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        await stay(mqtt, "known", version)
        answers = [await mqtt.answer(Connect("", version)) for _ in range(5)]
        assert [(answer.reason, answer.session_present) for _, answer in answers] == [(0, False)] * 5
        assert len(mqtt.context.clients) == 6
        if version == V5:
            told = [answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER) for _, answer in answers]
            assert {"known", *told} == set(mqtt.context.clients)
        for talk, _ in answers:
            await talk.subscribe("a", qos=0)
        await answers[0][0].publish("a", b"for all", 1)
        for talk, _ in answers:
            assert await talk.payloads(1) == [b"for all"]


@statement(V5, "MQTT-3.1.3-7")
async def test_a_client_returns_to_its_session_with_the_identifier_that_it_was_assigned(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, answer = await mqtt.answer(Connect("", V5, properties=Properties({Property.SESSION_EXPIRY: 100})))
        assigned = answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER)
        assert assigned
        await talk.subscribe("a", qos=1)
        await leave(mqtt, talk, assigned)
        publisher = await mqtt.connect("p")
        await publisher.publish("a", b"kept", 1)
        again = await stay(mqtt, assigned, V5, present=True)
        assert await again.payloads(1) == [b"kept"]


@statement(V4, "MQTT-3.1.3-8", "MQTT-3.1.3-9", "MQTT-3.2.2-4", "MQTT-3.2.2-5")
async def test_no_identifier_and_no_clean_session_is_return_code_2(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, answer = await mqtt.answer(Connect("", V4, clean_start=False))
        assert (answer.reason, answer.session_present) == (2, False)
        with pytest.raises(EOFError):
            await talk.receive()


@statement(V4, "MQTT-3.1.3-9", "MQTT-3.2.2-4", "MQTT-3.2.2-5")
@statement(V5, "MQTT-3.1.3-8", "MQTT-3.2.2-6", "MQTT-3.2.2-7", "MQTT-3.1.4-2", "MQTT-4.13.2-1")
@VERSIONS
async def test_a_rejected_identifier_is_told_and_the_connection_closed(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for name in ("a\x01", "a\x7f", "x" * 1001):
            talk, answer = await mqtt.answer(Connect(name, version, clean_start=False))
            check_refusal(answer, version, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, 2)
            with pytest.raises(EOFError):
                await talk.receive()


# the answer


@statement(V4, "MQTT-3.1.4-2")
@statement(V5, "MQTT-3.1.4-3", "MQTT-3.14.4-2", "MQTT-4.13.2-1")
@VERSIONS
@pytest.mark.parametrize("clean", [True, False])
async def test_a_new_connection_ends_the_older_one_of_its_client(tmp_path: Path, version: int, clean: bool) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        first = await mqtt.connect("me", version, clean=clean)
        second = await mqtt.connect("me", version, clean=clean)
        check_disconnect(await first.closed(), version, ReasonCode.SESSION_TAKEN_OVER)
        await second.send(Pingreq())
        await second.expect(Pingresp)


@statement(V4, "MQTT-3.1.4-5")
@statement(V5, "MQTT-3.1.4-6", "MQTT-3.2.0-1")
@VERSIONS
async def test_nothing_after_a_rejected_connect_is_processed(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, publisher = await mqtt.connect("w", version), await mqtt.connect("p", version)
        await watcher.subscribe("#", qos=1)
        for rejected in (Connect("a\x01b", version), Connect("c\x7f", version, clean_start=False)):
            talk = mqtt.open(version)
            await talk.send(rejected, Publish("a", b"smuggled", 1, packet_id=1), Pingreq())
            answer = await talk.receive()
            assert isinstance(answer, Connack)
            assert answer.reason
            with pytest.raises(EOFError):
                await talk.receive()
        assert await before_fence(watcher, publisher) == []


@statement(V4, "MQTT-3.2.0-1", "MQTT-3.1.4-4")
@statement(V5, "MQTT-3.2.0-1", "MQTT-3.1.4-5", "MQTT-3.2.2-1")
@VERSIONS
async def test_connack_comes_before_everything_that_waits_for_the_client(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=2)
        for number in range(3):
            await publisher.publish("a", b"%d" % number, 2)
        first = (await talk.messages(3))[0]
        await talk.send(Ack(PacketType.PUBREC, first.packet_id))
        await talk.expect(Ack)
        await leave(mqtt, talk, "me")
        again = mqtt.open(version)
        await again.send(Connect("me", version, clean_start=False), Pingreq())
        head = await again.wire.receive_exactly(4)
        assert head[0] == 0x20
        assert head[2] == 1  # session present, and the seven flags above it are 0
        assert head[3] == 0


@statement(V5, "MQTT-3.2.0-2")
async def test_there_is_one_connack(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("a", qos=2)
        await talk.publish("a", b"x", 2)
        await talk.acknowledge((await talk.messages(1))[0])
        await talk.send(Pingreq(), Disconnect())
        assert isinstance(await talk.receive(), Pingresp)
        assert await talk.closed() is None


@statement(V5, "MQTT-3.2.2-9", "MQTT-3.2.2-10", "MQTT-3.2.2-12", "MQTT-3.2.2-13")
async def test_every_qos_and_retain_are_available_so_connack_limits_neither(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for qos in range(3):
            talk, answer = await mqtt.answer(Connect(f"c{qos}", V5, will=Will("w", b"will", qos, True)))
            assert answer.reason == ReasonCode.SUCCESS
            assert answer.properties.get(Property.MAXIMUM_QOS) is None
            assert answer.properties.get(Property.RETAIN_AVAILABLE) is None
            assert await talk.subscribe(f"a/{qos}", qos=qos) == (qos,)
            assert await talk.publish(f"a/{qos}", b"x", qos, retain=True) == ReasonCode.SUCCESS
            assert [each.qos for each in await talk.messages(1)] == [qos]


# keep alive


@statement(V4, "MQTT-3.1.2-24", "MQTT-3.1.2-23")
@statement(V5, "MQTT-3.1.2-22", "MQTT-3.1.2-20", "MQTT-3.2.2-22")
@VERSIONS
async def test_silence_ends_the_connection_as_a_failure(
    tmp_path: Path, version: int, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("w", version)
        await watcher.subscribe("will")
        talk = await mqtt.connect("c", version, keep_alive_s=10, will=Will("will", b"gone"))
        for _ in range(4):
            await trio.sleep(14)
            await talk.send(Pingreq())
            await talk.expect(Pingresp)
        start = trio.current_time()
        last = await talk.closed()
        assert 15 <= trio.current_time() - start < 17
        check_disconnect(last, version, ReasonCode.KEEP_ALIVE_TIMEOUT)
        assert await watcher.payloads(1) == [b"gone"]


@statement(V4, "MQTT-3.1.2-24")
@statement(V5, "MQTT-3.1.2-22")
@VERSIONS
async def test_any_packet_shows_that_a_client_is_alive(tmp_path: Path, version: int, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version, keep_alive_s=10)
        for number in range(1, 5):
            await trio.sleep(14)
            await talk.publish("a", b"alive", 2, number)
            await trio.sleep(14)
            await talk.subscribe("b", qos=0)
        assert await talk.rest() == []


@statement(V4, "MQTT-3.1.2-24")
async def test_keep_alive_0_allows_any_silence(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(sys_interval_s=86_400)) as mqtt:
        talk = await mqtt.connect("c", V4)
        await trio.sleep(80_000)
        assert await talk.rest() == []


@statement(V5, "MQTT-3.2.2-22", "MQTT-3.1.2-21", "MQTT-3.2.2-21")
async def test_connack_tells_a_keep_alive_only_if_another_one_counts(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for wanted in (1, 10, 3600):
            talk, answer = await mqtt.answer(Connect(f"c{wanted}", V5, keep_alive_s=wanted))
            assert answer.properties.get(Property.SERVER_KEEP_ALIVE) is None
            start = trio.current_time()
            await talk.closed()
            assert 1.5 * wanted <= trio.current_time() - start < 1.5 * wanted + 2
        talk, answer = await mqtt.answer(Connect("c", V5, keep_alive_s=10_000))
        limit = answer.properties.number(Property.SERVER_KEEP_ALIVE, 0)
        assert 0 < limit < 10_000
        start = trio.current_time()
        await talk.closed()
        assert 1.5 * limit <= trio.current_time() - start < 1.5 * limit + 2


# properties of CONNECT and CONNACK


@statement(V5, "MQTT-3.1.2-28")
@pytest.mark.parametrize("values", [{}, {Property.REQUEST_RESPONSE_INFORMATION: 0}])
async def test_response_information_is_not_sent_unasked(tmp_path: Path, values: dict[Property, Any]) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await mqtt.answer(Connect("c", V5, properties=Properties(values)))
        assert answer.reason == ReasonCode.SUCCESS
        assert answer.properties.get(Property.RESPONSE_INFORMATION) is None


@statement(V5, "MQTT-3.2.2-19", "MQTT-3.2.2-20", "MQTT-3.1.2-24")
async def test_what_explains_a_refusal_does_not_make_connack_too_large(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for limit in (5, 20, 40, 1000):
            properties = Properties({Property.MAXIMUM_PACKET_SIZE: limit})
            talk = mqtt.open()
            await talk.send(Connect("a\x01b", V5, properties=properties))
            head = await talk.wire.receive_exactly(2)
            assert head[0] == 0x20
            assert head[1] + 2 <= limit
            assert (await talk.wire.receive_exactly(head[1]))[1] == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID


@statement(V5, "MQTT-3.2.2-8")
async def test_connack_has_only_its_reason_codes(tmp_path: Path) -> None:
    allowed = {0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F}
    too_long = packet(0x10, bytes(70_000))
    bad_will = Connect("c", V5, will=Will("a/#", b""))
    async with mqtt_broker(tmp_path) as mqtt:
        refused: list[int] = []
        for data in (connect_packet(V5, 3), connect_packet(V5, properties=b"\x21\0\0"), too_long):
            last = await answer_to(mqtt, data, V5)
            refused += [last.reason] if isinstance(last, Connack) else []
        for connect in (Connect("a\x01", V5), bad_will, Connect("x" * 2000, V5)):
            _, answer = await mqtt.answer(connect)
            refused.append(answer.reason)
        assert len(refused) >= 5
        assert 0 not in refused
        assert set(refused) <= allowed


@statement(V5, "MQTT-3.1.2-2", "MQTT-3.1.0-2")
async def test_a_second_connect_of_another_version_ends_the_connection_as_well(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        last = await after_connect(mqtt, connect_packet(V4), V5)
        check_disconnect(last, V5, ReasonCode.PROTOCOL_ERROR)
