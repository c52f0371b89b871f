"""The users of examples/martlet-users, with STOMP and MQTT alike."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.mqtt.users import Users
from tests.stomp.all_protocols import Protocols, all_protocols
from tests.wire_clients.mqtt import MqttClient

from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connect

DOOR = "publish mqtt/home/{user}/state; read mqtt/home/+/command; read stomp_temp/{user}/#; publish work"
DASHBOARD = "read mqtt/home/#; read $share/stomp/*; read work; publish stomp_temp/*"


@asynccontextmanager
async def house(directory: Path) -> AsyncIterator[Protocols]:
    users = Users(directory)
    users.write(door=DOOR, dashboard=DASHBOARD)
    async with all_protocols(directory / "data") as protocols:
        users.install(protocols.broker)
        for topic in ("mqtt", "work"):
            protocols.broker.topics.ensure(topic, 1)
        yield protocols


async def mqtt(protocols: Protocols, user: str) -> MqttClient:
    return await protocols.mqtt.connect(f"of {user}", user_name=user, password=user.encode())


async def test_a_user_may_do_the_same_with_both_protocols(tmp_path: Path) -> None:
    async with house(tmp_path) as protocols:
        door, watcher = await protocols.stomp.connect(login="door", passcode="door"), await mqtt(protocols, "dashboard")
        await watcher.subscribe("home/#", qos=1)
        await door.publish("/topic/mqtt/home/door/state", b"by STOMP")
        other = await mqtt(protocols, "door")
        assert await other.publish("home/door/state", b"by MQTT", 1) == ReasonCode.SUCCESS
        assert await watcher.payloads(2) == [b"by STOMP", b"by MQTT"]
        assert await other.publish("home/window/state", b"x", 1) == ReasonCode.NOT_AUTHORIZED
        await door.send(door.frame("SEND", b"x", destination="/topic/mqtt/home/window/state", receipt="r"))
        assert "'door' may not publish to" in (await door.error())["message"]


@pytest.mark.parametrize("topic_filter", ["home/+/command", "home/door/command", "home/#", "#", "home/+/state"])
async def test_a_user_may_follow_the_same_names_with_both_protocols(tmp_path: Path, topic_filter: str) -> None:
    allowed = topic_filter.startswith("home/") and topic_filter.endswith("/command")
    async with house(tmp_path) as protocols:
        codes = await (await mqtt(protocols, "door")).subscribe(topic_filter)
        assert codes == ((2,) if allowed else (ReasonCode.NOT_AUTHORIZED,))
        talk = await protocols.stomp.connect(login="door", passcode="door")
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination=f"/topic/mqtt/{topic_filter}", receipt="r"))
        answer = await talk.receive()
        assert answer.command == ("RECEIPT" if allowed else "ERROR")


async def test_a_wrong_password_is_one_with_both_protocols(tmp_path: Path) -> None:
    async with house(tmp_path) as protocols:
        _, answer = await protocols.mqtt.answer(Connect("c", V5, user_name="door", password=b"guess"))
        assert answer.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD
        _, error = await protocols.stomp.answer(login="door", passcode="guess")
        assert (error.command, error["message"]) == ("ERROR", "user 'door' or the password is wrong")


async def test_rules_for_temporary_destinations_name_the_user(tmp_path: Path) -> None:
    async with house(tmp_path) as protocols:
        door = await protocols.stomp.connect(login="door", passcode="door")
        dashboard = await protocols.stomp.connect(login="dashboard", passcode="dashboard")
        await dashboard.subscribe("/queue/work")
        await door.publish("/queue/work", b"what?", reply_to="/temp-queue/answers")
        (request,) = await dashboard.messages(1)
        await dashboard.publish(request["reply-to"], b"that")
        assert await door.bodies(1) == [b"that"]
        await dashboard.send(dashboard.frame("SUBSCRIBE", id="1", destination="/temp-queue/own", receipt="r"))
        assert "'dashboard' may not subscribe to" in (await dashboard.error())["message"]
