"""Subscriptions with a condition on the properties of messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.wire_clients.mqtt import V4, MqttBroker, MqttClient, mqtt_broker
from tests.wire_clients.remoting import RemotingClient, remoting_of

from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties, Property

ON = MqttConfig(selectors=True)
RED = "colour = 'red'"
NO = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


@asynccontextmanager
async def selecting(directory: Path, config: MqttConfig = ON, *, with_plugin: bool = True) -> AsyncIterator[MqttBroker]:
    async with mqtt_broker(directory, config) as mqtt:
        if with_plugin:
            mqtt.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(mqtt.broker))
        yield mqtt


async def subscribe(
    talk: MqttClient, selector: str | None, *filters: str | FilterSubscription, qos: int = 1, identifier: int = 0
) -> Suback:
    users = (("selector", selector), ("other", "x")) if selector is not None else ()
    wanted = tuple(each if isinstance(each, FilterSubscription) else FilterSubscription(each, qos) for each in filters)
    await talk.send(Subscribe(9, wanted, Properties({}, users, (identifier,) if identifier else ())))
    return await talk.expect(Suback)


async def publish(talk: MqttClient, name: str, payload: bytes, colour: str = "", **more: bool) -> None:
    properties = Properties({}, (("colour", colour),) if colour else ())
    assert await talk.publish(name, payload, 1, properties=properties, **more) == 0


async def payloads(talk: MqttClient) -> list[bytes]:
    """What came until now, acknowledged."""
    found = await talk.rest()
    for each in found:
        await talk.acknowledge(each)
    return [each.payload for each in found]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_only_selected_messages_come(tmp_path: Path, qos: int) -> None:
    async with selecting(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        assert (await subscribe(talk, RED, "a/+", "b", qos=qos)).codes == (qos, qos)
        assert (await subscribe(talk, None, "c", qos=qos)).codes == (qos,)
        names = ("a/1", "b", "c", "a/2")
        for index, name in enumerate(names * 10):
            await publish(publisher, name, b"%d" % index, ("red", "blue", "")[index % 3])
        expected = [b"%d" % i for i, name in enumerate(names * 10) if name == "c" or i % 3 == 0]
        found = await talk.messages(len(expected))
        assert sorted(each.payload for each in found) == sorted(expected)
        for each in found:
            await talk.acknowledge(each)
        assert await talk.rest() == []


async def test_each_matching_subscription_counts_with_its_own_selector(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        await subscribe(talk, RED, "a/+", qos=0, identifier=5)
        await subscribe(talk, "colour = 'blue'", "a/#", qos=1, identifier=7)
        for colour in ("red", "blue", "green"):
            await publish(publisher, "a/b", colour.encode(), colour)
        found = [(each.payload, each.qos, each.properties.identifiers) for each in await talk.messages(2)]
        assert found == [(b"red", 0, (5,)), (b"blue", 1, (7,))]
        await subscribe(talk, "colour <> 'red'", "a/+", qos=0, identifier=6)
        for colour in ("red", "blue", "green"):
            await publish(publisher, "a/b", colour.encode(), colour)
        found = [(each.payload, each.qos, each.properties.identifiers) for each in await talk.messages(2)]
        assert found == [(b"blue", 1, (6, 7)), (b"green", 0, (6,))]


async def test_a_selector_is_part_of_the_session(tmp_path: Path) -> None:
    """What was published meanwhile, also over a restart, and what is sent again."""
    async with selecting(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("s", expiry_s=1000), await mqtt.connect("p")
        await subscribe(talk, RED, "a", identifier=300)
        await publish(publisher, "a", b"sent", "red")
        (sent,) = await talk.messages(1)
        talk.hang_up()
        for index in range(200):
            await publish(publisher, "a", b"%d" % index, "red" if index % 50 == 0 else "blue")
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s", clean=False, expiry_s=1000, present=True)
        found = await talk.messages(5)
        assert [each.payload for each in found] == [b"sent", b"0", b"50", b"100", b"150"]
        assert (found[0].is_duplicate, found[0].packet_id) == (True, sent.packet_id)
        assert {each.properties.identifiers for each in found} == {(300,)}
        assert mqtt.context.clients["s"].filters.keys() == {"a"}


async def test_retained_messages_are_selected_too(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        talk, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        for index, colour in enumerate(("red", "blue", "", "red")):
            await publish(publisher, f"a/{index}", b"%d" % index, colour, retain=True)
        await subscribe(talk, RED, "a/+")
        found = await talk.messages(2)
        assert sorted(each.payload for each in found) == [b"0", b"3"]
        assert all(each.retain for each in found)
        assert await talk.rest() == []


async def test_a_shared_subscription_has_one_selector(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        one, two, publisher = await mqtt.connect("1"), await mqtt.connect("2"), await mqtt.connect("p")
        assert (await subscribe(one, RED, "$share/g/a")).codes == (1,)
        for selector in (None, "colour = 'blue'"):
            answer = await subscribe(two, selector, "$share/g/a")
            assert answer.codes == (NO,)
            assert "same selector" in str(answer.properties.text(Property.REASON_STRING))
        assert (await subscribe(two, RED, "$share/g/a")).codes == (1,)
        for index in range(20):
            await publish(publisher, "a", b"%d" % index, ("red", "blue")[index % 2])
        found: list[bytes] = []
        while len(found) < 10:
            found += [*await payloads(one), *await payloads(two)]
        assert sorted(map(int, found)) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        ("colour = ", "the selector cannot be used"),
        ("", "send 1 to 512"),
        ("x = 1 or " * 100 + "x = 1", "send 1 to 512"),
    ],
)
async def test_an_invalid_selector_is_refused_with_the_reason(tmp_path: Path, selector: str, text: str) -> None:
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s")
        answer = await subscribe(talk, selector, "a", "$share/g/b", "c")
        assert answer.codes == (NO,) * 3
        assert text in str(answer.properties.text(Property.REASON_STRING))
        assert mqtt.context.clients["s"].filters == {}
        two = Properties({}, (("selector", RED), ("selector", RED)))
        await talk.send(Subscribe(9, (FilterSubscription("a"),), two))
        assert (await talk.expect(Suback)).codes == (NO,)


async def test_figures_have_no_properties_to_select(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s")
        assert (await subscribe(talk, RED, "$SYS/#", "a")).codes == (NO, 1)


async def test_without_the_setting_a_selector_is_a_user_property_like_others(tmp_path: Path) -> None:
    async with selecting(tmp_path, MqttConfig()) as mqtt:
        talk, publisher = await mqtt.connect("s"), await mqtt.connect("p")
        assert (await subscribe(talk, "no condition (", "a")).codes == (1,)
        await publish(publisher, "a", b"blue", "blue")
        assert await talk.payloads(1) == [b"blue"]


async def test_without_the_plugin_a_selector_is_refused_and_a_session_waits_for_it(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s", expiry_s=1000)
        await subscribe(talk, RED, "a")
        talk.hang_up()
    async with selecting(tmp_path, replace(ON, selectors=False), with_plugin=False) as mqtt:
        publisher, other = await mqtt.connect("p"), await mqtt.connect("o")
        await publish(publisher, "a", b"red", "red")
        assert (await subscribe(other, RED, "a")).codes == (1,)  # the setting is off
        for version in (V4, 5):
            refused, answer = await mqtt.answer(Connect("s", version, clean_start=False))
            assert answer.reason == (NO if version == 5 else 3)
            assert isinstance(answer, Connack)
            assert await refused.closed() is None
    async with selecting(tmp_path, with_plugin=False) as mqtt:
        suback = await subscribe(await mqtt.connect("o"), RED, "a")
        assert suback.codes == (NO,)
        assert "SQL92" in str(suback.properties.text(Property.REASON_STRING))
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s", clean=False, expiry_s=1000, present=True)
        assert await talk.payloads(1) == [b"red"]
    async with selecting(tmp_path, with_plugin=False) as mqtt:
        await mqtt.connect("s", clean=True)


async def test_messages_of_rocketmq_producers_are_selected(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        talk, producer = await mqtt.connect("s"), RemotingClient.of(mqtt.running, remoting_of(mqtt.broker))
        await subscribe(talk, "level > 3 AND TAGS = 'a'", "+")
        for level in ("2", "5"):
            assert (await producer.publish("mqtt", level.encode(), {"TAGS": "a", "level": level})).code == 0
        assert await talk.payloads(1) == [b"5"]


async def test_selectors_and_other_options_work_together(tmp_path: Path) -> None:
    """No local, aliases, and retain as published."""
    async with selecting(tmp_path) as mqtt:
        talk = await mqtt.connect("s", values={Property.TOPIC_ALIAS_MAXIMUM: 3})
        publisher, name = await mqtt.connect("p"), "a/long/name"
        options = FilterSubscription(name, 0, no_local=True, retain_as_published=True, retain_handling=2)
        await subscribe(talk, RED, options)
        for who in (talk, publisher):
            for colour in ("red", "blue"):
                properties = Properties({}, (("colour", colour),))
                await who.send(Publish(name, colour.encode(), 0, True, properties=properties))
        await publisher.rest()
        for payload in (b"second", b"third"):
            await publish(publisher, name, payload, "red")
        first, second, third = await talk.messages(3)
        assert (first.payload, first.retain, first.topic) == (b"red", True, name)
        assert (second.payload, second.retain) == (b"second", False)
        assert (third.payload, third.topic) == (b"third", "")


async def test_a_refused_change_of_a_shared_subscription_leaves_it_as_it_was(tmp_path: Path) -> None:
    async with selecting(tmp_path) as mqtt:
        one, two, publisher = [await mqtt.connect(name) for name in ("one", "two", "publisher")]
        for talk in (one, two):
            assert (await subscribe(talk, RED, "$share/g/a")).codes == (1,)
        assert (await subscribe(one, None, "$share/g/a")).codes == (NO,)
        await two.unsubscribe("$share/g/a")
        for payload, colour in ((b"1", "red"), (b"2", ""), (b"3", "red")):
            await publish(publisher, "a", payload, colour)
        for payload in (b"1", b"3"):
            [packet] = await one.messages(1)
            assert packet.payload == payload
            await one.acknowledge(packet)
        assert (await subscribe(one, None, "$share/g/a")).codes == (1,), "it is alone now, and may change it"
