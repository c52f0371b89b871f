"""Bridges of other brokers: the upper bit of the protocol level, and what they say about themselves under $SYS."""

from pathlib import Path

import pytest
from tests.mqtt.users import closed_broker
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.mapping.bridges import STATE_BYTES_MAX, STATES_MAX
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V3, V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Publish, Suback, Subscribe, Will
from martlet_mqtt.wire.properties import Properties, Property

OLD = pytest.mark.parametrize("version", [V3, V4])
ALL = pytest.mark.parametrize("version", [V3, V4, V5])
STATE = "$SYS/broker/connection/far.bridge/state"
STATES = "$SYS/broker/connection/#"


async def bridge(mqtt: MqttBroker, version: int, client_id: str = "bridge", **more: object) -> MqttClient:
    options = {"is_bridge": version != V5, "will": Will(STATE, b"0", 1, retain=True), **more}
    return await mqtt.connect(client_id, version, clean=False, **options)  # type: ignore[arg-type]


# the bit of the level


@OLD
async def test_a_bridge_does_not_get_its_own_messages(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, other = await bridge(mqtt, version), await mqtt.connect("other")
        await near.publish("t/a", b"before", 1)
        await near.subscribe("t/#", qos=1)
        await near.publish("t/a", b"mine", 1)
        await near.publish("t/a", b"kept", 1, retain=True)
        await other.publish("t/a", b"of another", 1)
        found = await near.messages(1)
        assert [each.payload for each in (*found, *await near.rest())] == [b"of another"]


@OLD
async def test_a_bridge_gets_retain_as_it_was_published(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, plain = await bridge(mqtt, version), await mqtt.connect("plain", version)
        other = await mqtt.connect("other")
        for talk in near, plain:
            await talk.subscribe("t/#", qos=1)
        await other.publish("t/a", b"state", 1, retain=True)
        await other.publish("t/a", b"event", 1)
        assert [each.retain for each in await near.messages(2)] == [True, False]
        assert [each.retain for each in await plain.messages(2)] == [False, False]


@OLD
async def test_both_hold_for_what_came_while_it_was_away(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, other = await bridge(mqtt, version), await mqtt.connect("other")
        await near.subscribe("t/#", qos=1)
        await near.publish("t/a", b"mine", 1)
        near.hang_up()
        await other.publish("t/a", b"kept", 1, retain=True)
        await other.publish("t/b", b"gone", 1)
        again = await bridge(mqtt, version, present=True)
        found = [(each.payload, each.retain) for each in await again.messages(2)]
        assert found == [(b"kept", True), (b"gone", False)]


async def test_a_bridge_may_have_shared_subscriptions(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, other = await bridge(mqtt, V4), await mqtt.connect("other")
        assert await near.subscribe("$share/g/t/#", qos=1) == (1,)
        await other.publish("t/a", b"x", 1)
        assert await near.payloads(1) == [b"x"]


async def test_mqtt_5_has_no_such_bit(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = mqtt.open(V5)
        await talk.wire.send(encode_packet(Connect("bridge", V5, is_bridge=True), V5))
        answer = await talk.closed()
        assert isinstance(answer, Connack)
        assert answer.reason == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION


# states


async def states(talk: MqttClient, count: int) -> list[tuple[str, bytes, bool]]:
    return [(each.topic, each.payload, each.retain) for each in await talk.messages(count)]


@ALL
async def test_subscribers_see_the_state_of_a_bridge(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, keeper = await mqtt.connect("watcher"), await mqtt.connect("keeper")
        await watcher.subscribe(STATES)
        await keeper.subscribe(FilterSubscription(STATES, retain_as_published=True))
        near = await bridge(mqtt, version)
        for qos in (0, 1, 2):
            assert await near.publish(STATE, b"1", qos, retain=True) == 0
            assert await states(watcher, 1) == [(STATE, b"1", False)]
            assert await states(keeper, 1) == [(STATE, b"1", True)]
        late = await mqtt.connect("late")
        await late.subscribe(STATES)
        assert await states(late, 1) == [(STATE, b"1", True)]
        near.hang_up()
        assert await states(watcher, 1) == [(STATE, b"0", False)]
        later = await mqtt.connect("later")
        await later.subscribe("$SYS/#")
        found = {each.topic: each.payload for each in await later.rest()}
        assert (found[STATE], "$SYS/broker/version" in found) == (b"0", True)


@ALL
@pytest.mark.parametrize("is_retained", [False, True])
async def test_a_subscriber_gets_no_state_that_was_published_before(
    tmp_path: Path, version: int, is_retained: bool
) -> None:
    """Of what comes in one segment, only what is after the SUBSCRIBE is new; before, it is retained or nothing."""
    other = STATE.replace("far", "other")
    async with mqtt_broker(tmp_path) as mqtt:
        near = await mqtt.connect("near", version)
        subscribe = Subscribe(7, (FilterSubscription(STATES),))
        await near.send(Publish(STATE, b"0", retain=is_retained), subscribe, Publish(other, b"1"))
        await near.expect(Suback)
        assert await states(near, 1 + is_retained) == [(STATE, b"0", True)] * is_retained + [(other, b"1", False)]
        assert await near.rest() == []


async def test_a_state_before_the_same_subscription_again_is_not_lost(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, again = await mqtt.connect("near"), FilterSubscription(STATES, retain_handling=2)
        await near.subscribe(again)
        await near.send(Publish(STATE, b"2", retain=True), Subscribe(8, (again,)))
        await near.expect(Suback)
        assert await states(near, 1) == [(STATE, b"2", False)]


async def test_no_local_holds_for_states(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near, other = await mqtt.connect("near"), await mqtt.connect("other")
        await near.subscribe(FilterSubscription(STATES, no_local=True))
        await near.publish(STATE, b"mine", 1)
        await other.publish(STATE.replace("far", "other"), b"of another", 1)
        assert [each.payload for each in await near.messages(1)] == [b"of another"]


async def test_an_empty_state_removes_it_and_one_without_retain_is_not_kept(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near = await bridge(mqtt, V4)
        await near.publish(STATE, b"1", 1, retain=True)
        await near.publish(STATE, b"", 1, retain=True)
        await near.publish("$SYS/broker/connection/a/b/state", b"1", 1)
        late = await mqtt.connect("late")
        await late.subscribe(STATES)
        assert await late.rest() == []


async def test_states_are_not_in_the_log(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near = await bridge(mqtt, V4)
        await near.publish(STATE, b"1", 1, retain=True)
        assert len(mqtt.context.retained) == 0
        near.hang_up()
        watcher = await mqtt.connect("watcher")
        await watcher.subscribe(STATES, "#")
        assert [each.topic for each in [*await watcher.messages(1), *await watcher.rest()]] == [STATE]
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("watcher")
        await watcher.subscribe(STATES)
        assert await watcher.rest() == []


async def test_the_will_of_a_bridge_survives_a_restart_of_the_broker(tmp_path: Path, autojump_clock: object) -> None:
    will = Will(STATE, b"0", 1, retain=True, properties=Properties({Property.WILL_DELAY: 1000}))
    async with mqtt_broker(tmp_path) as mqtt:
        near = await bridge(mqtt, V5, expiry_s=5000, will=will)
        near.hang_up()
    async with mqtt_broker(tmp_path) as mqtt:
        watcher = await mqtt.connect("watcher")
        await watcher.subscribe(STATES)
        assert await states(watcher, 1) == [(STATE, b"0", False)]


async def test_the_number_and_the_size_of_states_are_limited(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=100)) as mqtt:
        near = await mqtt.connect("near")
        assert await near.publish(STATE, bytes(STATE_BYTES_MAX + 1), 1, retain=True) == 0x83
        assert await near.publish(STATE.replace("far", "f" * 100), b"1", 1, retain=True) == 0x90
        for number in range(STATES_MAX + 10):
            await near.publish(STATE.replace("far", f"far{number}"), b"1", 1, retain=True)
        names = [name for name, _ in mqtt.context.bridges]
        assert (len(names), names[-1]) == (STATES_MAX, STATE.replace("far", f"far{STATES_MAX + 9}"))


@pytest.mark.parametrize("name", ["$SYS/broker/connection/state", "$SYS/broker/connection//stat", "$SYS/broker/uptime"])
async def test_other_names_of_sys_stay_those_of_the_broker(tmp_path: Path, name: str) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        near = await mqtt.connect("near")
        assert await near.publish(name, b"1", 1) == ReasonCode.TOPIC_NAME_INVALID


@pytest.mark.parametrize(("version", "reason"), [(V3, 5), (V4, 5), (V5, ReasonCode.TOPIC_NAME_INVALID)])
@pytest.mark.parametrize("name", ["$SYS/broker/uptime", "n" * 5000])
async def test_a_client_is_told_that_its_will_is_not_accepted(
    tmp_path: Path, version: int, reason: int, name: str
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await mqtt.answer(Connect("c", version, will=Will(name, b"x")))
        assert answer.reason == reason


@pytest.mark.parametrize(("rule", "reason"), [("", 5), ("publish $SYS/broker/connection/#", 0)])
async def test_a_state_needs_the_permission_to_publish_it(tmp_path: Path, rule: str, reason: int) -> None:
    async with closed_broker(tmp_path, far=f"publish mqtt/#; {rule}") as (mqtt, _):
        will = Will(STATE, b"0", 1, retain=True)
        connect = Connect("far", V4, will=will, user_name="far", password=b"far", is_bridge=True)
        talk, answer = await mqtt.answer(connect)
        assert answer.reason == reason
        plain, answer = await mqtt.answer(Connect("plain", V5, user_name="far", password=b"far"))
        assert answer.reason == 0
        assert await plain.publish(STATE, b"1", 1, retain=True) == (ReasonCode.NOT_AUTHORIZED if reason else 0)
        talk.hang_up()
