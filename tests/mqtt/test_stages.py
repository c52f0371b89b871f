"""MQTT beside plugins whose stage wants every message: each message passes it once, and is kept as it left it."""

from pathlib import Path

import pytest
from tests.mqtt.retained_talk import kept
from tests.wire_clients.mqtt import mqtt_broker

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Will


def marked(message: Message) -> Message:
    if message.body == b"bad":
        raise Refused(Reason.NO_PERMISSION, "this one is not wanted")
    message.body += b"!"
    return message


@pytest.mark.parametrize("wanted", [(), ("TAGS",)], ids=["every message", "those with a tag"])
@pytest.mark.parametrize("expiry_s", [0, 1000])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_every_message_passes_the_stage_once(
    tmp_path: Path, qos: int, retain: bool, expiry_s: int, wanted: tuple[str, ...]
) -> None:
    """Each message of MQTT has a tag."""
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.set_stages([("toy", Stage(marked, wanted))])
        talk, subscriber = await mqtt.connect("p", expiry_s=expiry_s), await mqtt.connect("s")
        await subscriber.subscribe("a", qos=0)
        assert await talk.publish("a", b"x", qos, retain=retain) == 0
        assert await subscriber.payloads(1) == [b"x!"]
        assert await kept(mqtt, "a") == ({"a": b"x!"} if retain else {})
        if qos:
            assert await talk.publish("a", b"bad", qos, retain=retain) == ReasonCode.NOT_AUTHORIZED
        assert await kept(mqtt, "a") == ({"a": b"x!"} if retain else {})


async def test_a_will_passes_it_as_well(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.set_stages([("toy", Stage(marked))])
        subscriber = await mqtt.connect("s")
        await subscriber.subscribe("will", qos=0)
        talk = await mqtt.connect("c", will=Will("will", b"gone", 2, retain=True))
        talk.hang_up()
        assert await subscriber.payloads(1) == [b"gone!"]
        assert await kept(mqtt) == {"will": b"gone!"}
