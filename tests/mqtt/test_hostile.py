"""What a client or a web page could do to others, and what must not get lost on the way."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import V4, mqtt_broker

from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connect, Publish
from martlet_mqtt.wire.properties import Properties
from martlet_mqtt.wire.scanner import RUN_PACKETS_MAX, scan_acks


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "KEYS"])
async def test_user_properties_that_act_in_the_log_reach_subscribers(tmp_path: Path, name: str) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe("a")
        user = ((name, "soon"), ("other", "x"))
        await talk.send(Publish("a", b"x", 0, properties=Properties({}, user)))
        (message,) = await talk.messages(1)
        assert message.properties.user == user


async def test_a_clean_start_right_after_a_session_ends_it(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        (await mqtt.connect("c", clean=False, expiry_s=100)).hang_up()
        (await mqtt.connect("c", clean=True)).hang_up()
        _, answer = await mqtt.answer(Connect("c", V4, False))
        assert (answer.reason, answer.session_present) == (ReasonCode.SUCCESS, False)


async def test_a_group_with_control_characters_is_refused(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        assert await talk.subscribe("$share/g\x1b[31m/a") == (ReasonCode.TOPIC_FILTER_INVALID,)


async def test_the_same_identifier_released_many_times_is_answered_each_time(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("c")
        await talk.send(Publish("a", b"x", 2, packet_id=5))
        assert (await talk.expect(Ack)).kind is PacketType.PUBREC
        await talk.send(*[Ack(PacketType.PUBREL, packet_id) for packet_id in (5, 5, 6)])
        answers = [await talk.expect(Ack) for _ in range(3)]
        assert [answer.kind for answer in answers] == [PacketType.PUBCOMP] * 3
        assert [answer.packet_id for answer in answers] == [5, 5, 6]
        assert answers[2].reason == ReasonCode.PACKET_IDENTIFIER_NOT_FOUND


def test_a_run_of_acknowledgements_ends_after_some() -> None:
    data = b"\x40\x02\x00\x01" * (2 * RUN_PACKETS_MAX)
    found = scan_acks(data, 0)
    assert found is not None
    run, end = found
    assert (len(run.ids), end) == (RUN_PACKETS_MAX, 4 * RUN_PACKETS_MAX)
