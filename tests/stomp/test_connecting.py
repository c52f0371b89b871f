"""How a connection begins and ends."""

import re
from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, V1_2, frame, stomp_broker

from martlet_stomp.config import StompConfig
from martlet_stomp.wire.packets import Version

every_version = pytest.mark.parametrize("version", Version)


@every_version
@pytest.mark.parametrize("command", ["CONNECT", "STOMP"])
async def test_connected_says_version_session_and_server(tmp_path: Path, version: Version, command: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sessions = set()
        for _ in range(3):
            talk = stomp.open(version)
            headers = {} if version is V1_0 else {"accept_version": version.text, "host": "any"}
            await talk.send(frame(command, **headers))
            answer = await talk.expect("CONNECTED")
            assert answer["version"] == version.text
            assert re.fullmatch(r"martlet/\S+", answer["server"])
            assert answer.headers.get("heart-beat") == (None if version is V1_0 else "0,0")
            sessions.add(answer["session"])
        assert len(sessions) == 3
        assert stomp.context.statistics()["clients"] == 3


async def test_frames_may_follow_connect_at_once(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = stomp.open()
        connect = frame("CONNECT", accept_version="1.2", host="h")
        await talk.send(connect, talk.frame("SEND", b"x", destination="/queue/a", receipt="r"))
        assert (await talk.receive()).command == "CONNECTED"
        await talk.receipt("r")


async def test_a_client_without_a_common_version_is_told_which_there_are(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = stomp.open()
        await talk.send(frame("CONNECT", accept_version="3.0,2.0", host="h"))
        error = await talk.error()
        assert error["version"] == "1.0,1.1,1.2"


@every_version
async def test_disconnect_is_answered_and_closes(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.send(talk.frame("SEND", b"x", destination="/queue/a"), talk.frame("DISCONNECT", receipt="bye"))
        await talk.receipt("bye")
        assert await talk.is_closed()
        assert len(stomp.records("a")) == 1
        silent = await stomp.connect(version)
        await silent.send(silent.frame("DISCONNECT"))
        assert await silent.is_closed()
        assert not stomp.context.clients


async def test_an_error_names_the_receipt_of_its_frame_and_closes(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for command, headers in (
            ("SUBSCRIBE", {"id": "0", "destination": "/queue/"}),
            ("SUBSCRIBE", {"id": "1", "destination": "/queue/a"}),
            ("UNSUBSCRIBE", {"id": "7"}),
            ("NACK", {"id": "9-0-0"}),
            ("ACK", {"id": "9-0-0"}),
            ("SEND", {"destination": "/temp/x"}),
        ):
            talk = await stomp.connect()
            await talk.subscribe("/queue/b", name="1")
            await talk.send(talk.frame(command, receipt=f"of {command}", **headers))
            error = await talk.error()
            assert error["receipt-id"] == f"of {command}"
            assert error.body.decode().startswith(error["message"])
        assert not stomp.context.clients


async def test_a_version_1_0_client_may_leave_out_ids_of_subscriptions(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        await talk.send(talk.frame("SUBSCRIBE", destination="/queue/a", ack="client", receipt="s"))
        await talk.receipt("s")
        await talk.publish("/queue/a", b"x")
        (message,) = await talk.messages(1)
        assert "subscription" not in message.headers
        await talk.send(talk.frame("ACK", message_id=message["message-id"], receipt="a"))
        await talk.receipt("a")
        await talk.send(talk.frame("UNSUBSCRIBE", destination="/queue/a", receipt="u"))
        await talk.receipt("u")
        await talk.send(talk.frame("UNSUBSCRIBE", destination="/queue/a", receipt="u"))
        assert "there is no subscription" in (await talk.error())["message"]


async def test_a_version_1_0_client_may_unsubscribe_by_destination_though_it_gave_an_id(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        await talk.subscribe("/topic/a", name="1")
        await talk.subscribe("/topic/b", name="2")
        await talk.send(talk.frame("UNSUBSCRIBE", destination="/topic/a", receipt="u"))
        await talk.receipt("u")
        await talk.publish("/topic/a", b"a")
        await talk.publish("/topic/b", b"b")
        assert [message.body for message in await talk.rest()] == [b"b"]


async def test_subscriptions_of_a_connection_are_limited(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(subscriptions_max=2)) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/a", name="1")
        await talk.subscribe("/topic/a", name="2")
        await talk.send(talk.frame("SUBSCRIBE", id="3", destination="/queue/c"))
        assert "stomp.subscriptions_max" in (await talk.error()).body.decode()
        other = await stomp.connect()
        await other.subscribe("/queue/a", name="1")


async def test_a_broker_that_stops_tells_its_clients(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_2)
        stomp.plugin.say_goodbye()
        assert "the broker stops" in (await talk.error())["message"]
