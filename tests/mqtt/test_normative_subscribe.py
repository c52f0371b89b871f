"""SUBSCRIBE, SUBACK, UNSUBSCRIBE and UNSUBACK (sections 3.8 to 3.11)."""

from pathlib import Path

import pytest
from tests.mqtt.normative import (
    VERSIONS,
    after_connect,
    before_fence,
    check_disconnect,
    filter_packet,
    leave,
    statement,
    stay,
)
from tests.wire_clients.mqtt import mqtt_broker

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, FilterSubscription, Publish, Suback, Subscribe, Unsuback, Unsubscribe
from martlet_mqtt.wire.properties import encode_text

SUBSCRIBE_REASONS = {0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}
UNSUBSCRIBE_REASONS = {0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91}


@statement(V4, "MQTT-3.8.4-1", "MQTT-3.8.4-4", "MQTT-3.8.4-5", "MQTT-3.9.3-1", "MQTT-3.9.3-2")
@statement(V5, "MQTT-3.8.4-1", "MQTT-3.8.4-5", "MQTT-3.8.4-6", "MQTT-3.8.4-7", "MQTT-3.9.3-1", "MQTT-3.9.3-2")
@VERSIONS
async def test_suback_has_a_code_for_each_filter_in_order(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.authorizers = (lambda identity, action, name: "secret" not in name,)
        talk = await mqtt.connect("c", version)
        wanted = [("a", 0), ("a/#/b", 1), ("b", 2), ("secret", 1), ("", 0), ("c", 1), ("b", 1), ("x" * 5000, 0)]
        codes = await talk.subscribe(*(FilterSubscription(name, qos) for name, qos in wanted))
        if version == V5:
            invalid, denied = ReasonCode.TOPIC_FILTER_INVALID, ReasonCode.NOT_AUTHORIZED
            assert codes == (0, invalid, 2, denied, invalid, 1, 1, invalid)
            assert set(codes) <= SUBSCRIBE_REASONS
        else:
            assert codes == (0, 0x80, 2, 0x80, 0x80, 1, 1, 0x80)
        assert set(mqtt.context.clients["c"].filters) == {"a", "b", "c"}


@statement(V4, "MQTT-3.9.3-2", "MQTT-3.8.4-5")
@statement(V5, "MQTT-3.9.3-2", "MQTT-3.8.4-7")
@VERSIONS
async def test_a_subscription_above_the_limit_gets_a_code_of_the_specification(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(filters_max=2)) as mqtt:
        talk = await mqtt.connect("c", version)
        codes = await talk.subscribe("a", "b", "c", "a", qos=1)
        assert codes == (1, 1, ReasonCode.QUOTA_EXCEEDED if version == V5 else 0x80, 1)


@statement(V4, "MQTT-3.8.4-4", "MQTT-3.8.4-3")
@statement(V5, "MQTT-3.8.4-5", "MQTT-3.8.4-3")
@VERSIONS
async def test_filters_of_one_packet_act_in_their_order(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        codes = await talk.subscribe(FilterSubscription("a", 2), FilterSubscription("b", 0), FilterSubscription("a", 0))
        assert codes == (2, 0, 0)
        for name in ("a", "b", "a"):
            await publisher.publish(name, name.encode(), 2)
        found = await talk.messages(3)
        assert [(each.topic, each.qos) for each in found] == [("a", 0), ("b", 0), ("a", 0)]


@statement(V4, "MQTT-3.8.4-3")
@statement(V5, "MQTT-3.8.4-3", "MQTT-3.8.4-4")
@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_replacing_a_subscription_loses_nothing_and_repeats_nothing(
    tmp_path: Path, version: int, qos: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", qos=qos)
        count = 60
        for number in range(count):
            await publisher.send(Publish("a", b"%d" % number, 1, packet_id=number + 1))
            if number % 5 == 0:
                await talk.send(Subscribe(number + 1, (FilterSubscription("a", qos),)))
        found: list[bytes] = []
        while len(found) < count:
            one = await talk.receive()
            if not isinstance(one, Publish):
                continue  # SUBACK or PUBREL
            found.append(one.payload)
            await talk.send(Ack(PacketType.PUBACK if one.qos == 1 else PacketType.PUBREC, one.packet_id))
        assert found == [b"%d" % number for number in range(count)]


@statement(V4, "MQTT-3.8.4-6")
@statement(V5, "MQTT-3.8.4-8")
@VERSIONS
async def test_a_message_has_the_lower_qos(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p", version)
        for granted in range(3):
            talk = await mqtt.connect(f"c{granted}", version)
            assert await talk.subscribe("a", qos=granted) == (granted,)
            for qos in range(3):
                await publisher.publish("a", b"x", qos)
            await publisher.publish("a", b"x", 1)  # one of QoS 0 is stored before it
            found = await talk.messages(4)
            assert [each.qos for each in found] == [min(qos, granted) for qos in (0, 1, 2, 1)]


@statement(V4, "MQTT-3.8.3-4", "MQTT-4.8.0-1")
@VERSIONS
@pytest.mark.parametrize("options", [3, 0x40, 0x80, 0xC0, 0x43, 0x31])
async def test_qos_3_and_reserved_bits_of_subscriptions_end_the_connection(
    tmp_path: Path, version: int, options: int
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        data = filter_packet(0x82, 1, version, encode_text("a"), bytes((options,)))
        last = await after_connect(mqtt, data, version)
        check_disconnect(last, version, ReasonCode.MALFORMED_PACKET)


@statement(V4, "MQTT-3.8.3-4")
async def test_options_of_mqtt_5_are_reserved_bits_of_mqtt_3(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for options in (4, 8, 16, 32):
            data = filter_packet(0x82, 1, V4, encode_text("a"), bytes((options,)))
            assert await after_connect(mqtt, data, V4) is None


@statement(V5, "MQTT-3.8.3-5", "MQTT-4.13.1-1")
async def test_reserved_bits_of_options_are_malformed(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for options in (0x40, 0x80, 0xC1):
            data = filter_packet(0x82, 1, V5, encode_text("a"), bytes((options,)))
            check_disconnect(await after_connect(mqtt, data, V5), V5, ReasonCode.MALFORMED_PACKET)


@statement(V4, "MQTT-3.8.3-2", "MQTT-4.7.1-2", "MQTT-4.7.1-3", "MQTT-4.7.3-1")
@statement(V5, "MQTT-4.7.1-1", "MQTT-4.7.1-2", "MQTT-4.7.3-1")
@VERSIONS
async def test_wildcards_are_whole_levels_and_filters_not_empty(tmp_path: Path, version: int) -> None:
    good = ["#", "+", "a/#", "+/#", "a/+", "+/a", "a/+/b", "/#", "/+", "+/+/+", "/", "//"]
    bad = ["a#", "#/a", "a/#/b", "a/b#", "##", "a+", "+a", "a/b+/c", "++", "a/#b", "+#", ""]
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c", version)
        assert await talk.subscribe(*good, qos=1) == (1,) * len(good)
        failure = ReasonCode.TOPIC_FILTER_INVALID if version == V5 else 0x80
        assert await talk.subscribe(*bad, qos=1) == (failure,) * len(bad)


# no local


@statement(V5, "MQTT-3.8.3-3")
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_with_no_local_a_client_does_not_get_its_own_messages(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        me, other = await stay(mqtt, "me", V5), await mqtt.connect("other")
        await me.subscribe(FilterSubscription("a", 2, no_local=True), FilterSubscription("fence", 1))
        await other.subscribe("a", qos=0)
        await me.publish("a", b"mine", qos)
        await other.publish("a", b"theirs", qos)
        assert await other.payloads(2) == [b"mine", b"theirs"]
        assert await before_fence(me, other) == [b"theirs"]
        await leave(mqtt, me, "me")
        me = await stay(mqtt, "me", V5, present=True)
        await me.publish("a", b"mine again", qos)
        assert await before_fence(me, other) == []


@statement(V5, "MQTT-3.8.3-3")
async def test_with_no_local_a_client_does_not_get_what_it_retained_and_sent_before(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        me, other = await stay(mqtt, "me", V5), await mqtt.connect("other")
        await me.publish("a", b"mine", 1, retain=True)
        await other.publish("b", b"theirs", 1, retain=True)
        await mqtt.settle()
        await me.subscribe(FilterSubscription("#", 0, no_local=True))
        found = await before_fence(me, other)
        assert found == [b"theirs"]


@statement(V5, "MQTT-3.8.3-3")
async def test_no_local_concerns_its_own_subscription_alone(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        me = await mqtt.connect("me")
        await me.subscribe(FilterSubscription("a/#", 1, no_local=True), identifier=1)
        await me.subscribe(FilterSubscription("a/b", 0), identifier=2)
        await me.publish("a/b", b"mine", 1)
        (found,) = await me.messages(1)
        assert (found.payload, found.qos, found.properties.identifiers) == (b"mine", 0, (2,))
        assert await me.rest() == []


@statement(V5, "MQTT-3.8.3-4", "MQTT-4.13.1-1")
async def test_no_local_with_a_shared_subscription_ends_the_connection(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        data = filter_packet(0x82, 1, V5, encode_text("$share/g/a"), b"\5")
        check_disconnect(await after_connect(mqtt, data, V5), V5, ReasonCode.PROTOCOL_ERROR)


# UNSUBSCRIBE


@statement(V4, "MQTT-3.10.4-1", "MQTT-3.10.4-2", "MQTT-3.10.4-4", "MQTT-3.10.4-5", "MQTT-3.10.4-6")
@statement(V5, "MQTT-3.10.4-1", "MQTT-3.10.4-2", "MQTT-3.10.4-4", "MQTT-3.10.4-5", "MQTT-3.10.4-6")
@statement(V5, "MQTT-3.11.3-1", "MQTT-3.11.3-2")
@VERSIONS
async def test_unsubscribe_removes_equal_filters_alone(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c", version), await mqtt.connect("p", version)
        filters = ["a", "A", "b/+", "b/#", "é", "fence"]
        await talk.subscribe(*filters, qos=0)
        codes = await talk.unsubscribe("no", "a", "b/c", "b/+", "a", "e\u0301", "+", "#")
        missing = ReasonCode.NO_SUBSCRIPTION_EXISTED
        assert codes == ((missing, 0, missing, 0, missing, missing, missing, missing) if version == V5 else ())
        assert set(codes) <= UNSUBSCRIBE_REASONS
        assert set(mqtt.context.clients["c"].filters) == {"A", "b/#", "é", "fence"}
        for name in ("a", "A", "b/c", "é", "e\u0301"):
            await publisher.publish(name, name.encode(), 1)
        assert await before_fence(talk, publisher) == [b"A", b"b/c", "é".encode()]
        await talk.send(Unsubscribe(7, ("nothing",)))
        answer = await talk.expect(Unsuback)
        assert answer == Unsuback(7, (missing,) if version == V5 else ())


@statement(V4, "MQTT-3.10.4-2")
@statement(V5, "MQTT-3.10.4-2")
@VERSIONS
async def test_after_unsubscribe_no_message_is_added_to_the_session(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", "b", "fence", qos=1)
        await talk.unsubscribe("a")
        await publisher.publish("a", b"not wanted", 1)
        await leave(mqtt, talk, "me")
        await publisher.publish("a", b"not wanted", 1)
        await publisher.publish("b", b"wanted", 1)
        talk = await stay(mqtt, "me", version, present=True)
        assert await before_fence(talk, publisher) == [b"wanted"]


@statement(V4, "MQTT-3.10.4-3")
@statement(V5, "MQTT-3.10.4-3")
@VERSIONS
async def test_what_is_in_flight_is_completed_after_unsubscribe(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await stay(mqtt, "me", version), await mqtt.connect("p", version)
        await talk.subscribe("a", "fence", qos=2)
        for qos in (1, 2, 2):
            await publisher.publish("a", b"%d" % qos, qos)
        one, two, three = await talk.messages(3)
        await talk.unsubscribe("a")
        await talk.acknowledge(two)
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        again = await talk.messages(2)
        assert [(each.packet_id, each.is_duplicate) for each in again] == [
            (one.packet_id, True),
            (three.packet_id, True),
        ]
        for each in again:
            await talk.acknowledge(each)
        await leave(mqtt, talk, "me")
        talk = await stay(mqtt, "me", version, present=True)
        assert await before_fence(talk, publisher) == []


@statement(V5, "MQTT-3.10.4-3")
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_in_flight_of_a_group_is_completed_after_unsubscribe(tmp_path: Path, qos: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("c"), await mqtt.connect("p")
        await talk.subscribe("$share/g/a", "fence", qos=2)
        await publisher.publish("a", b"x", qos)
        (found,) = await talk.messages(1)
        assert found.qos == qos
        await talk.unsubscribe("$share/g/a")
        await talk.acknowledge(found)
        assert await before_fence(talk, publisher) == []
        other = await mqtt.connect("other")
        await other.subscribe("$share/g/a", "fence", qos=2)
        assert await before_fence(other, publisher) == []


@statement(V5, "MQTT-3.10.4-5", "MQTT-2.2.1-6")
async def test_every_subscribe_and_unsubscribe_has_its_own_answer(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.send(*(Subscribe(number, (FilterSubscription(f"a/{number}", 1),)) for number in range(1, 6)))
        assert [(await talk.expect(Suback)).packet_id for _ in range(5)] == [1, 2, 3, 4, 5]
        await talk.send(*(Unsubscribe(number, (f"a/{number}",)) for number in range(1, 6)))
        assert [await talk.expect(Unsuback) for _ in range(5)] == [Unsuback(number, (0,)) for number in range(1, 6)]
