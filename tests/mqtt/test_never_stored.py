"""Messages that can never be stored: a client of MQTT 3, which would send them again for ever, may go on."""

from contextlib import suppress
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.settings import BrokerConfig
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V3, ReasonCode
from martlet_mqtt.wire.packets import Publish

OLD = pytest.mark.parametrize("version", [V3, V4])
QOS = pytest.mark.parametrize("qos", [0, 1, 2])
LIMIT = 2000
BROKER = BrokerConfig(message_bytes_max=LIMIT)


def counts(mqtt: MqttBroker) -> tuple[int, int, int]:
    counters = mqtt.context.counters
    return counters.stored, counters.refused, counters.unretained


async def others(mqtt: MqttBroker) -> MqttClient:
    talk = await mqtt.connect("reader")
    await talk.subscribe("#")
    return talk


@OLD
@QOS
@pytest.mark.parametrize("size", [LIMIT + 1, LIMIT + (1 << 17) + 1, 1_000_000])
async def test_a_message_that_is_too_large_is_acknowledged_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, qos: int, size: int
) -> None:
    async with mqtt_broker(tmp_path, broker=BROKER) as mqtt:
        reader, talk = await others(mqtt), await mqtt.connect("device", version)
        for _ in range(3):
            await talk.publish("a", bytes(size), qos)
        await talk.publish("a", b"after", 1)
        assert await reader.payloads(1) == [b"after"]
        assert counts(mqtt) == (1, 3, 0)
    (line,) = [each.getMessage() for each in caplog.records if each.name == "martlet.mqtt"]
    assert line.startswith("dropped a message of client 'device' of user '' at 127.0.0.1:2; ")
    assert "broker.message_bytes_max" in line


@QOS
async def test_a_client_of_mqtt_5_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, qos: int) -> None:
    async with mqtt_broker(tmp_path, broker=BROKER) as mqtt:
        talk = await mqtt.connect("device", V5)
        expected = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR if qos else 0
        assert await talk.publish("a", bytes(LIMIT + 1), qos) == expected
        await talk.rest()
        assert counts(mqtt) == (0, 1, 0)
        with suppress(trio.BrokenResourceError):
            await talk.send(Publish("a", bytes(1_000_000)))
        assert getattr(await talk.closed(), "reason", 0) == ReasonCode.PACKET_TOO_LARGE
    what = "refused" if qos else "dropped"
    assert [each for each in caplog.messages if each.startswith(f"{what} a message of client 'device'")]


@OLD
@QOS
async def test_a_message_for_which_no_room_is_left_is_stored_without_retaining_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, qos: int
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(retained_max=1)) as mqtt:
        reader, talk = await others(mqtt), await mqtt.connect("device", version)
        for name in "abc":
            await talk.publish(name, name.encode(), qos, retain=True)
        assert await reader.payloads(3) == [b"a", b"b", b"c"]
        late = await mqtt.connect("late")
        await late.subscribe("#")
        assert [each.payload for each in (*await late.messages(1), *await late.rest())] == [b"a"]
        assert counts(mqtt) == (3, 0, 2)
    (line,) = [each for each in caplog.messages if each.startswith("did not retain a message of client 'device'")]
    assert "mqtt.retained_max is 1" in line


@OLD
@pytest.mark.parametrize("reason", Reason)
async def test_only_what_may_succeed_later_makes_the_client_come_again(
    tmp_path: Path, version: int, reason: Reason
) -> None:
    def refuse(message: Message) -> Message:
        if message.body == b"bad":
            raise Refused(reason, "a plugin refuses it")
        return message

    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.set_stages([("test", Stage(refuse))])
        reader, talk = await others(mqtt), await mqtt.connect("device", version)
        await talk.send(Publish("a", b"bad", 1, packet_id=1), Publish("a", b"good", 1, packet_id=2))
        if reason in (Reason.UNAVAILABLE, Reason.QUOTA):
            assert await talk.closed() is None
            assert await reader.rest() == []
        else:
            assert await reader.payloads(1) == [b"good"]
