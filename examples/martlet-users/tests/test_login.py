"""A password over the wire: the line protocol's LOGIN proves a user, and the rules of that user hold from then on."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from line_talk import Room, room

from martlet_users import UsersConfig, UsersPlugin, hash_password

FILE = f"""
[users.shop]
password = "{hash_password(b"open sesame", b"salt" * 4)}"
rules = ["publish orders", "read orders"]

[anonymous]
rules = ["read orders"]
"""
LOGIN = "LOGIN shop open%20sesame"


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Room]:
    """A broker that knows the user shop."""
    (tmp_path / "users.toml").write_text(FILE)
    plugin = UsersPlugin(UsersConfig(str(tmp_path / "users.toml")))
    async with room(tmp_path / "data") as opened:
        opened.broker.authentication.authenticators = tuple(plugin.martlet_authenticators(opened.broker))
        opened.broker.authorizers = tuple(plugin.martlet_authorizers(opened.broker))
        yield opened


async def test_a_user_may_do_what_its_rules_say_once_it_has_logged_in(closed: Room) -> None:
    client = closed.connect()
    assert await client.ask("PUB orders x") == "ERR NO_PERMISSION '' may not publish to topic[orders]"
    # What follows LOGIN waits for its answer, also in the same packet.
    assert await client.ask(f"{LOGIN}\nPUB orders x") == "OK shop"
    assert await client.line() == "OK 0 0"
    assert await client.ask("PUB secrets x") == "ERR NO_PERMISSION 'shop' may not publish to topic[secrets]"
    other = closed.connect()
    assert await other.ask("PUB orders x") == "ERR NO_PERMISSION '' may not publish to topic[orders]"


@pytest.mark.parametrize("login", ["LOGIN shop open", "LOGIN nobody open%20sesame", "LOGIN shop %00"])
async def test_whoever_is_wrong_is_disconnected_and_nothing_more_is_done(
    closed: Room, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = closed.connect()
    with caplog.at_level(logging.DEBUG):
        await client.say(f"{login}\nPUB orders x\n{LOGIN}\nPUB orders x")
        user = login.split()[1]
        assert await client.end() == f"ERR CREDENTIALS user '{user}' or the password is wrong"
    assert closed.broker.store.appended == 0
    assert closed.broker.statistics()["refused_by_authenticators"] == 1
    assert "sesame" not in caplog.text


async def test_a_login_comes_before_subscriptions(closed: Room) -> None:
    client = closed.connect()
    assert await client.ask("SUB orders as MINE") == "OK 1"
    assert (await client.ask(LOGIN)).startswith("ERR ILLEGAL LOGIN must come before SUB")
    assert await client.ask("UNSUB 1 forget") == "OK 1"
    assert await client.ask(LOGIN) == "OK shop"
    assert await client.ask("SUB orders as MINE") == "OK 2"
    session = closed.broker.sessions.table.get("line MINE")
    assert session is not None
    assert session.owner == "shop"


async def test_without_a_plugin_that_knows_users_everybody_stays_anonymous(tmp_path: Path) -> None:
    async with room(tmp_path) as opened:
        assert await opened.connect().ask(LOGIN) == "OK"
