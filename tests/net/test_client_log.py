"""What the log says of clients: that they connected, and when and why they went."""

import logging
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import V4, V5, mqtt_broker
from tests.wire_clients.stomp import V1_2, stomp_broker
from trio.testing import MockClock

from martlet.net.complaints import EVERY_S, PER_SECOND, Complaints, Refusals
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.packets import Disconnect


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "martlet.server" and each.levelno == level]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_an_mqtt_client_is_named_when_it_comes_and_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("lamp", V4, clean=False, keep_alive_s=60)
        await talk.send(Disconnect())
        await talk.closed()
        talk = await mqtt.connect("lamp", V5, clean=False, is_bridge=False)
        talk.hang_up()
        await trio.testing.wait_all_tasks_blocked()
    assert lines(caplog) == [
        "mqtt client 'lamp' at 127.0.0.1:1 connected (MQTT 3.1.1, keep alive 60 s, new session)",
        "mqtt client 'lamp' at 127.0.0.1:1 disconnected; it said goodbye",
        "mqtt client 'lamp' at 127.0.0.1:2 connected (MQTT 5, keep alive 0 s, its session goes on)",
        "mqtt client 'lamp' at 127.0.0.1:2 disconnected; the connection ended without a goodbye",
    ]


async def test_the_reasons_of_the_broker_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("lamp", V4, keep_alive_s=60)
        await talk.closed()
        await mqtt.connect("door")
        await mqtt.connect("door")
        await trio.testing.wait_all_tasks_blocked()
    said = lines(caplog)
    why = "nothing was heard for 90 s; send PINGREQ within the keep alive"
    assert f"mqtt client 'lamp' at 127.0.0.1:1 disconnected; {why}" in said
    assert lines(caplog, logging.WARNING) == []
    assert "mqtt client 'door' at 127.0.0.1:2 disconnected; another connection uses the client identifier" in said


async def test_stomp_clients_are_named_by_client_id_or_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_2, **{"client-id": "shop"})
        await talk.disconnect()
        talk, connected = await stomp.answer()
        talk.hang_up()
        await trio.testing.wait_all_tasks_blocked()
        session = connected["session"]
    assert lines(caplog) == [
        "stomp client 'shop' at 127.0.0.1:1 connected (STOMP 1.2)",
        "stomp client 'shop' at 127.0.0.1:1 disconnected; it said goodbye",
        f"stomp client '{session}' at 127.0.0.1:2 connected (STOMP 1.2)",
        f"stomp client '{session}' at 127.0.0.1:2 disconnected; the connection ended without a goodbye",
    ]


async def test_the_lines_of_a_second_are_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        for number in range(100):
            await mqtt.connect(f"client {number}")
        assert len(lines(caplog)) == PER_SECOND
        await trio.sleep(1)
        await mqtt.connect("late")
        said = lines(caplog)
    assert said[PER_SECOND] == "80 more lines about connections were suppressed"
    assert said[PER_SECOND + 1].startswith("mqtt client 'late' ")


async def test_a_filter_beyond_the_limit_is_logged_with_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(filters_max=2)) as mqtt:
        talk = await mqtt.connect("lamp", V4)
        assert await talk.subscribe("a", "b", "c", "d", qos=0) == (0, 0, 0x80, 0x80)
    (line,) = [each.getMessage() for each in caplog.records if each.name == "martlet.mqtt"]
    assert line == (
        "refused a subscription of client 'lamp' of user '' at 127.0.0.1:1; "
        "the session has 2 filters; mqtt.filters_max allows no more"
    )


async def test_refusals_of_one_connection_are_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    refusals = Refusals(Complaints(logging.getLogger("martlet.test")))
    for _ in range(3):
        refusals.warn("refused a message", "x", "why")
    refusals.warn("refused a subscription", "x", "why")
    await trio.sleep(EVERY_S)
    refusals.warn("refused a message", "x", "why")
    assert caplog.messages == [
        "refused a message of x; why",
        "refused a subscription of x; why",
        "refused a message of x (2 more before); why",
    ]
