"""A broker as it is started, with the plugin of examples/martlet-users: one password opens STOMP and MQTT."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.interop.martlet_process import Martlet
from tests.users_plugin import users_plugin
from tests.wire_clients.mqtt import MqttClient
from tests.wire_clients.stomp import connected
from tests.wire_clients.streams import dialed

from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect

PASSWORD = "open: sesame"
RULES = ["publish mqtt/home/{user}/state", "read mqtt/home/#", "publish orders", "read orders", "read $share/stomp/*"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    folder = tmp_path_factory.mktemp("users")
    environment = users_plugin(folder)
    settings = {
        "plugins.enabled": '["nameserver", "remoting", "mqtt", "stomp", "users"]',
        "users.file": json.dumps(str(folder / "users.toml")),
    }
    (folder / "users.toml").write_text("")
    made = subprocess.run(
        [sys.executable, "-m", "martlet", "hash-password"],
        input=f"{PASSWORD}\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert made.returncode == 0, made.stderr
    (folder / "users.toml").write_text(
        f'[users.door]\npassword = "{made.stdout.strip()}"\nrules = {json.dumps(RULES)}\n'
    )
    martlet = Martlet(folder / "broker", settings, environment=environment)
    yield martlet
    martlet.close()


@asynccontextmanager
async def mqtt_client(broker: Martlet, password: str) -> AsyncIterator[tuple[MqttClient, Connack]]:
    async with dialed(broker.mqtt) as wire:
        talk = MqttClient(wire, V5)
        await talk.send(Connect("of door", V5, user_name="door", password=password.encode()))
        yield talk, await talk.expect(Connack)


async def test_one_password_opens_both(broker: Martlet) -> None:
    async with mqtt_client(broker, PASSWORD) as (mqtt, answer), dialed(broker.stomp) as wire:
        assert answer.reason == ReasonCode.SUCCESS
        stomp, connect_answer = await connected(wire, login="door", passcode=PASSWORD)
        assert connect_answer.command == "CONNECTED"
        await mqtt.subscribe("home/#", qos=1)
        await stomp.subscribe("/topic/mqtt/home/#")
        await stomp.publish("/topic/mqtt/home/door/state", b"open", colour="red")
        (published,) = await mqtt.messages(1)
        assert (published.topic, published.payload) == ("home/door/state", b"open")
        assert published.properties.user == (("colour", "red"),)
        await mqtt.publish("home/door/state", b"shut", 1)
        assert await stomp.bodies(2) == [b"open", b"shut"]
        await stomp.send(stomp.frame("SEND", b"x", destination="/topic/mqtt/home/window/state", receipt="r"))
        assert "'door' may not publish to" in (await stomp.error())["message"]
        assert await mqtt.publish("home/window/state", b"x", 1) == ReasonCode.NOT_AUTHORIZED


async def test_a_wrong_password_opens_neither(broker: Martlet) -> None:
    async with mqtt_client(broker, "a guess") as (_, answer), dialed(broker.stomp) as wire:
        assert answer.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD
        _, error = await connected(wire, login="door", passcode="a guess")
        assert (error.command, error["message"]) == ("ERROR", "user 'door' or the password is wrong")


async def test_nobody_gets_in_without_one_where_anonymous_may_do_nothing(broker: Martlet) -> None:
    async with dialed(broker.stomp) as wire:
        talk, answer = await connected(wire)
        assert answer.command == "CONNECTED"
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination="/queue/orders", receipt="r"))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert "'' may not subscribe to" in error["message"]
