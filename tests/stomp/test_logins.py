"""Who a client is: login and passcode, or nobody."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.mqtt.users import Users
from tests.wire_clients.stomp import StompBroker, frame, stomp_broker

from martlet_stomp.wire.packets import Version

ALL = "publish *; read *"

every_version = pytest.mark.parametrize("version", Version)


@asynccontextmanager
async def closed_broker(directory: Path, **users: str) -> AsyncIterator[tuple[StompBroker, Users]]:
    """A broker on which *users*, whose passcodes are their names, have these rules, separated by semicolons."""
    found = Users(directory)
    found.write(**users)
    async with stomp_broker(directory / "data") as stomp:
        found.install(stomp.broker)
        yield stomp, found


def users_of(stomp: StompBroker) -> list[object]:
    return [client.described()["user"] for client in stomp.context.clients]


@every_version
async def test_a_passcode_says_who_the_client_is(tmp_path: Path, version: Version) -> None:
    async with closed_broker(tmp_path, ann=ALL, bob="") as (stomp, _):
        await stomp.connect(version, login="ann", passcode="ann")
        await stomp.connect(version, login="bob", passcode="bob")
        assert users_of(stomp) == ["ann", "bob"]


@every_version
@pytest.mark.parametrize(
    "headers",
    [
        {"login": "ann", "passcode": "bob"},
        {"login": "ann", "passcode": ""},
        {"login": "ann"},
        {"login": "nobody", "passcode": "nobody"},
        {"passcode": "ann"},
        {"login": "", "passcode": "ann"},
    ],
)
async def test_a_wrong_one_is_an_error_and_nothing_more_is_done(
    tmp_path: Path, version: Version, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with closed_broker(tmp_path, ann=ALL, anonymous=ALL) as (stomp, _):
        talk = stomp.open(version)
        with caplog.at_level(logging.DEBUG):
            await talk.send(
                frame("CONNECT", accept_version=version.text, host="h", **headers),
                talk.frame("SEND", b"x", destination="/queue/orders"),
            )
            error = await talk.error()
        assert "or the password is wrong" in error["message"]
        assert not stomp.context.clients
        assert stomp.records("orders") == []
        assert stomp.broker.statistics()["refused_by_authenticators"] == 1


async def test_a_user_name_with_a_control_character_is_refused(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (stomp, _):
        _, error = await stomp.answer(login="a\tb", passcode="x")
        assert error.command == "ERROR"
        assert b"use another user name" in error.body


async def test_who_says_nothing_is_anonymous(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, anonymous="read news; read $share/stomp/*") as (stomp, _):
        talk = await stomp.connect()
        stomp.broker.topics.ensure("news", 1)
        await talk.subscribe("/queue/news")
        assert users_of(stomp) == [""]
        await talk.send(talk.frame("SEND", b"x", destination="/queue/news", receipt="r"))
        assert "may not publish" in (await talk.error())["message"]


async def test_without_users_a_login_proves_nothing(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        await stomp.connect(login="guest", passcode="guest")
        assert users_of(stomp) == [""]


async def test_frames_that_follow_connect_wait_for_the_check(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, ann=ALL) as (stomp, _):
        talk = stomp.open()
        await talk.send(
            frame("CONNECT", accept_version="1.2", host="h", login="ann", passcode="ann"),
            talk.frame("SEND", b"x", destination="/queue/orders", receipt="r"),
        )
        assert (await talk.receive()).command == "CONNECTED"
        await talk.receipt("r")


async def test_changed_rules_count_at_once(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, ann=ALL) as (stomp, users):
        talk = await stomp.connect(login="ann", passcode="ann")
        await talk.publish("/queue/orders", b"1")
        users.write(ann="read *")
        await talk.send(talk.frame("SEND", b"2", destination="/queue/orders", receipt="r"))
        error = await talk.error()
        assert error["message"].startswith("'ann' may not publish to topic[orders]")
        assert [record.body for record in stomp.records("orders")] == [b"1"]
