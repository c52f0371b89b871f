"""Orderly shutdown of a broker, and the DISCONNECT that clients get; response information."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from tests.cli.conftest import Process
from tests.mqtt.test_mqtt_crash import talking
from tests.wire_clients.mqtt import V4, V5, MqttClient, mqtt_broker

from martlet.config import fill
from martlet.errors import ConfigError
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, Will
from martlet_mqtt.wire.properties import Properties, Property

EXPIRY = Properties({Property.SESSION_EXPIRY: 1000})


def begin(folder: Path, *settings: str) -> Process:
    words = ["run", "--set", 'plugins.enabled=["remoting", "mqtt"]', "--set", "mqtt.listen=127.0.0.1:0"]
    return Process(folder, *words, *(word for each in settings for word in ("--set", each)))


async def connect(talk: MqttClient, connect: Connect) -> Connack:
    talk.version = connect.version
    await talk.send(connect)
    answer = await talk.expect(Connack)
    assert answer.reason == ReasonCode.SUCCESS
    return answer


def leaving(name: str, version: int = V5, delay_s: int = 0) -> Connect:
    """The CONNECT of a client with a will."""
    if version != V5:
        return Connect(name, version, will=Will(f"will/{name}", b"gone", 1))
    will = Will(f"will/{name}", b"gone", 1, properties=Properties({Property.WILL_DELAY: delay_s}))
    return Connect(name, will=will, properties=EXPIRY)


async def test_at_an_orderly_end_clients_are_sent_elsewhere_and_wills_published(tmp_path: Path) -> None:
    process = begin(tmp_path, "mqtt.server_reference=two.example:1883", "store.flush=async")
    clients = (leaving("five"), leaving("four", V4), leaving("late", delay_s=1), leaving("back", delay_s=900))
    ends: dict[str, object] = {}

    async def end_of(name: str, talk: MqttClient) -> None:
        ends[name] = await talk.closed()

    try:
        address = process.addresses()["mqtt"]
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            watcher = await stack.enter_async_context(talking(address))
            await connect(watcher, Connect("watcher", clean_start=False, properties=EXPIRY))
            await watcher.subscribe("will/+", qos=1)
            for each in clients:
                talk = await stack.enter_async_context(talking(address))
                await connect(talk, each)
                nursery.start_soon(end_of, each.client_id, talk)
            assert await trio.to_thread.run_sync(process.stop) == 0
    finally:
        process.end()
    five = ends["five"]
    assert isinstance(five, Disconnect)
    assert (five.reason, ends["four"]) == (ReasonCode.USE_ANOTHER_SERVER, None)
    assert five.properties.text(Property.SERVER_REFERENCE) == "two.example:1883"
    await after_the_restart(tmp_path)


async def after_the_restart(folder: Path) -> None:
    process = begin(folder)
    try:
        address = process.addresses()["mqtt"]
        async with talking(address) as watcher, talking(address) as back:
            await connect(back, Connect("back", clean_start=False, properties=EXPIRY))
            answer = await connect(watcher, Connect("watcher", clean_start=False, properties=EXPIRY))
            assert answer.session_present
            found = await watcher.messages(3)
            assert sorted(each.topic for each in found) == ["will/five", "will/four", "will/late"]
            assert found[2].topic == "will/late"
            assert await watcher.rest() == []
    finally:
        process.end()


async def test_without_another_server_clients_are_told_that_the_broker_stops(tmp_path: Path) -> None:
    plugin_config = MqttConfig(listen="127.0.0.1:0")
    async with mqtt_broker(tmp_path, plugin_config) as mqtt:
        talk = await mqtt.connect("c")
        mqtt.context.clients["c"].say_goodbye()
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert (last.reason, last.properties.text(Property.SERVER_REFERENCE)) == (ReasonCode.SERVER_SHUTTING_DOWN, None)


@pytest.mark.parametrize(
    ("client_id", "prefix", "information"),
    [
        ("me", "response", "response/me"),
        ("a/b é", "to/us", "to/us/a%2Fb%20%C3%A9"),
        ("me", "", None),
    ],
)
async def test_a_client_that_asks_gets_a_prefix_of_its_own(
    tmp_path: Path, client_id: str, prefix: str, information: str | None
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(response_prefix=prefix)) as mqtt:
        for asked, expected in ((1, information), (0, None), (None, None)):
            properties = Properties({} if asked is None else {Property.REQUEST_RESPONSE_INFORMATION: asked})
            talk, answer = await mqtt.answer(Connect(client_id, V5, properties=properties))
            assert answer.properties.text(Property.RESPONSE_INFORMATION) == expected
            await talk.disconnect()


async def test_a_client_without_an_identifier_gets_a_prefix_too(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        asked = Properties({Property.REQUEST_RESPONSE_INFORMATION: 1})
        talk, answer = await mqtt.answer(Connect("", V5, properties=asked))
        client_id = answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER)
        prefix = answer.properties.text(Property.RESPONSE_INFORMATION)
        assert prefix == f"response/{client_id}"
        await talk.subscribe(f"{prefix}/#")
        await talk.publish(f"{prefix}/1", b"x", 1)
        assert await talk.payloads(1) == [b"x"]


@pytest.mark.parametrize("prefix", ["a/#", "+", "$SYS", "a\n"])
def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.response_prefix"):
        MqttPlugin(fill(MqttConfig, {"response_prefix": prefix}, "mqtt"))
