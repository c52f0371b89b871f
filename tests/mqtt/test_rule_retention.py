"""A rule gives its topic a retention of its own (`FILTER=TOPIC:QUEUES:HOURS`): who gets what before and after."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import MqttBroker, leave, mqtt_broker

from martlet.errors import ConfigError
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.mapping.rules import TopicRules
from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import Ack

HOUR_MS = 3_600_000
DATA = Path("/data")
# Sessions and groups outlive the hours that pass.
CONFIG = MqttConfig(rules=["b/#=bees::2"], queues=1, shared_expiry_s=10**6)
DAY_S = 86_400
STORE = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16, delete_when="04")


async def pass_hours(mqtt: MqttBroker, clock: ManualClock, hours: float) -> None:
    await mqtt.settle()
    clock.ms += int(hours * HOUR_MS)
    await mqtt.broker.store.upkeep.topic_retention.sweep()


async def test_a_session_skips_what_has_expired_and_counts_as_one_that_missed_messages() -> None:
    clock, disk = ManualClock(), FakeDisk()
    async with mqtt_broker(DATA, CONFIG, clock=clock, disk=disk, store=STORE) as mqtt:
        publisher = await mqtt.connect("publisher")
        for client_id, topic_filter in (("all", "#"), ("bees", "b/+"), ("others", "a/#"), ("early", "#")):
            talk = await mqtt.connect(client_id, expiry_s=10 * DAY_S)
            await talk.subscribe(topic_filter, qos=1)
            if client_id != "early":
                await leave(mqtt, talk, client_id)
        for name in ("a/1", "b/1", "a/2"):
            await publisher.publish(name, name.encode(), 1)
        for packet in await talk.messages(3):
            await talk.acknowledge(packet)
        await leave(mqtt, talk, "early")
        await pass_hours(mqtt, clock, 3)
        await publisher.publish("b/2", b"b/2", 1)
        await mqtt.settle()
    expected = {"all": [b"a/1", b"a/2", b"b/2"], "bees": [b"b/2"], "others": [b"a/1", b"a/2"], "early": [b"b/2"]}
    for missed in (2, 0):
        async with mqtt_broker(DATA, CONFIG, clock=clock, disk=disk, store=STORE) as mqtt:
            await mqtt.broker.store.upkeep.topic_retention.sweep()
            for client_id, payloads in expected.items():
                talk = await mqtt.connect(client_id, clean=False, expiry_s=10 * DAY_S, present=True)
                for payload in payloads if missed else ():
                    (packet,) = await talk.messages(1)
                    assert packet.payload == payload
                    await talk.acknowledge(packet)
                assert await talk.rest() == []
                await leave(mqtt, talk, client_id)
            assert mqtt.context.counters.missed == missed


async def test_a_retained_message_stays_when_it_has_expired_in_its_topic() -> None:
    clock, disk = ManualClock(), FakeDisk()
    for _ in range(2):
        async with mqtt_broker(DATA, CONFIG, clock=clock, disk=disk, store=STORE) as mqtt:
            if not mqtt.broker.store.queue("bees", 0).next_offset:
                await (await mqtt.connect("publisher")).publish("b/1", b"kept", 1, retain=True)
            await pass_hours(mqtt, clock, 3)
            assert mqtt.broker.store.queue("bees", 0).first_offset == 1
            newcomer = await mqtt.connect("newcomer")
            await newcomer.subscribe("#", qos=1)
            (packet,) = await newcomer.messages(1)
            assert (packet.payload, packet.retain) == (b"kept", True)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("retained", [False, True])
async def test_what_is_in_flight_is_not_sent_again_once_it_has_expired(qos: int, retained: bool) -> None:
    """Except where it is a retained message, which stays."""
    clock = ManualClock()
    async with mqtt_broker(DATA, CONFIG, clock=clock, disk=FakeDisk(), store=STORE) as mqtt:
        publisher, talk = await mqtt.connect("publisher"), await mqtt.connect("c", expiry_s=DAY_S)
        if retained:
            await publisher.publish("b/1", b"sent", qos, retain=True)
        await talk.subscribe("b/#", qos=qos)
        if not retained:
            await publisher.publish("b/1", b"sent", qos)
        (sent,) = await talk.messages(1)
        await leave(mqtt, talk, "c")
        await pass_hours(mqtt, clock, 3)
        talk = await mqtt.connect("c", clean=False, expiry_s=DAY_S, present=True)
        if retained:
            (again,) = await talk.messages(1)
            assert (again.payload, again.packet_id, again.is_duplicate) == (b"sent", sent.packet_id, True)
        elif qos == 2:
            released = await talk.expect(Ack)
            assert (released.kind, released.packet_id) == (PacketType.PUBREL, sent.packet_id)
        await publisher.publish("b/2", b"new", qos)
        assert await talk.payloads(1) == [b"new"]
        assert mqtt.context.counters.removed == (0 if retained else 1)


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_shared_subscription_skips_what_has_expired(qos: int) -> None:
    clock = ManualClock()
    async with mqtt_broker(DATA, CONFIG, clock=clock, disk=FakeDisk(), store=STORE) as mqtt:
        publisher, talk = await mqtt.connect("publisher"), await mqtt.connect("c", expiry_s=DAY_S)
        await talk.subscribe("$share/g/b/#", qos=qos)
        await publisher.publish("b/1", b"unacknowledged", qos)
        await talk.messages(1)
        await leave(mqtt, talk, "c")
        await publisher.publish("b/1", b"waiting", qos)
        await pass_hours(mqtt, clock, 3)
        await publisher.publish("b/1", b"new", qos)
        other = await mqtt.connect("other")
        await other.subscribe("$share/g/b/#", qos=qos)
        assert [packet.payload for packet in await other.messages(1)] == [b"new"]
        assert await other.rest() == []


async def test_a_connected_subscriber_gets_everything_in_time() -> None:
    clock = ManualClock()
    async with mqtt_broker(DATA, CONFIG, clock=clock, disk=FakeDisk(), store=STORE) as mqtt:
        publisher, talk = await mqtt.connect("publisher"), await mqtt.connect("c")
        await talk.subscribe("#", qos=1)
        for number in range(6):
            payload = b"%d" % number
            await publisher.publish("b/1", payload, 1)
            (packet,) = await talk.messages(1)
            assert packet.payload == payload
            await talk.acknowledge(packet)
            await pass_hours(mqtt, clock, 1.5)
        assert mqtt.broker.store.queue("bees", 0).first_offset == 5


async def test_a_rule_says_the_retention_of_a_topic_that_it_creates_also_again() -> None:
    config = MqttConfig(rules=["b/#=bees:3:24", "c/#=cats", "d/#=dogs::5", "e/#=elks"], queues=4)
    async with mqtt_broker(DATA, config, disk=FakeDisk(), store=STORE) as mqtt:
        topics, hours = mqtt.broker.topics, mqtt.broker.store.upkeep.topic_retention.topics
        assert dict(hours) == {"bees": 24, "dogs": 5}
        counts = {name: topic.write_queues for name in ("bees", "cats", "dogs") if (topic := topics.get(name))}
        assert counts == {"bees": 3, "cats": 4, "dogs": 4}
        topics.delete("bees")
        assert dict(hours) == {"dogs": 5}
        await (await mqtt.connect("me")).publish("b/1", b"again", 1)
        assert dict(hours) == {"bees": 24, "dogs": 5}


async def test_a_rule_changes_nothing_of_a_topic_that_exists() -> None:
    disk = FakeDisk()
    for rule in ("b/#=bees::5", "b/#=bees:3:9", "b/#=bees"):
        async with mqtt_broker(DATA, MqttConfig(rules=[rule], queues=1), disk=disk, store=STORE) as mqtt:
            topic = mqtt.broker.topics.get("bees")
            assert topic is not None
            assert (topic.write_queues, dict(mqtt.broker.store.upkeep.topic_retention.topics)) == (1, {"bees": 5})


async def test_a_rule_with_more_hours_than_the_log_has_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with mqtt_broker(DATA, MqttConfig(rules=["b/#=bees::100"]), disk=FakeDisk(), store=STORE) as mqtt:
        assert dict(mqtt.broker.store.upkeep.topic_retention.topics) == {}
        topic = mqtt.broker.topics.get("bees")
        assert topic is not None
        assert topic.attributes == {}
    assert (
        "keeps messages of topic 'bees' for 100 hours, but store.file_reserved_hours is 72; all topics share"
        in caplog.text
    )


@pytest.mark.parametrize("hours", ["", "0", "1000001", "-1", "x", "1 ", "²", "9" * 5000])
@pytest.mark.parametrize("queues", ["", "3"])
def test_a_rule_with_a_wrong_number_of_hours_is_refused(queues: str, hours: str) -> None:
    with pytest.raises(ConfigError, match="number of hours is not 1 to 1000000; write FILTER=TOPIC, FILTER=TOPIC:QUE"):
        TopicRules([f"b/#=bees:{queues}:{hours}"], "mqtt", 8)


def test_rules_that_disagree_about_the_hours_of_a_topic_are_refused() -> None:
    with pytest.raises(ConfigError, match="another rule creates 'bees' with other hours"):
        TopicRules(["b/#=bees::3", "c/#=bees::4"], "mqtt", 8)
    with pytest.raises(ConfigError, match="too many colons"):
        TopicRules(["b/#=bees:1:3:4"], "mqtt", 8)
