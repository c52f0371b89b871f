"""Who a user is, and what a user may do, as the file says."""

import hmac
import io
import re
from argparse import ArgumentParser
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from martlet.broker import Broker
from martlet.contracts import (
    Action,
    Certificate,
    Credentials,
    Identity,
    LoginOrigin,
    Password,
    PasswordCheck,
    Quota,
    SignedRequest,
)
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message
from martlet.testing.peers import serving
from martlet_users import UsersConfig, UsersPlugin, hash_password, read_users
from martlet_users.patterns import compile_pattern
from martlet_users.scram import make_secret, read_secret

SHOP = hash_password(b"open sesame", b"salt" * 4)
FILE = f"""
[users.shop]
password = "{SHOP}"
signing_key = "shop's key"
certificate = true
rules = ["publish orders", "read orders-*", "read %RETRY%billing"]

[users.robot]
signing_key = "robot's key"

[anonymous]
rules = ["read news"]
"""


LOGINS = ("", "shop", "robot", "another")


def users(directory: Path, text: str = FILE) -> UsersPlugin:
    path = directory / "users.toml"
    path.write_text(text)
    return UsersPlugin(UsersConfig(str(path)))


def install(plugin: UsersPlugin, broker: Broker) -> None:
    broker.authentication.authenticators = tuple(plugin.martlet_authenticators(broker))
    broker.authorizers = tuple(plugin.martlet_authorizers(broker))


def signed(name: str, key: str, content: bytes = b"T0body") -> SignedRequest:
    return SignedRequest(name, b64encode(hmac.digest(key.encode(), content, "sha1")).decode(), content)


def is_refused(plugin: UsersPlugin, broker: Broker, credentials: Credentials) -> str:
    [authenticate] = plugin.martlet_authenticators(broker)

    def prove() -> None:
        answer = authenticate(credentials, LoginOrigin())
        assert isinstance(answer, PasswordCheck)
        answer.check()

    with pytest.raises(Refused) as caught:
        prove()
    assert caught.value.reason is Reason.CREDENTIALS
    return str(caught.value)


async def test_each_kind_of_credentials_proves_a_user(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        plugin = users(tmp_path)
        install(plugin, running.broker)
        asked = running.broker.authentication
        shop = Identity("shop")
        assert await asked.authenticate_password(Password("shop", b"open sesame"), LoginOrigin()) == shop
        assert asked.authenticate(signed("shop", "shop's key"), LoginOrigin()) == shop
        assert asked.authenticate(Certificate("shop", (), b""), LoginOrigin()) == shop
        assert asked.authenticate(Certificate("robot", (), b""), LoginOrigin()) == Identity()


async def test_what_is_wrong_is_refused_without_saying_what(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        plugin, broker = users(tmp_path), running.broker
        for user, password in (("shop", b"open"), ("robot", b""), ("nobody", b"open sesame"), ("", b"")):
            assert is_refused(plugin, broker, Password(user, password)) == f"user {user!r} or the password is wrong"
        wrong = signed("shop", "shop's key", b"other body")
        forged = SignedRequest("shop", wrong.signature, b"T0body")
        strangers = signed("nobody", "nobody"), signed("", "nobody"), signed("nobody", "")
        install(plugin, broker)
        for credentials in (forged, signed("shop", "robot's key"), *strangers, SignedRequest("shop", "ü", b"")):
            text = f"access key {credentials.access_key!r} or the signature is wrong"
            with pytest.raises(Refused, match=re.escape(text)):
                broker.authentication.authenticate(credentials, LoginOrigin())


async def test_rules_allow_and_everything_else_is_denied(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        broker = running.broker
        install(users(tmp_path), broker)
        shop, nobody = broker.gate(Identity("shop")), broker.gate(Identity())
        allowed: list[tuple[Action, str]] = [
            ("publish", "orders"),
            ("subscribe", "orders-2026"),
            ("subscribe", "%RETRY%billing"),
        ]
        denied: list[tuple[Action, str]] = [
            ("subscribe", "orders"),
            ("publish", "orders-2026"),
            ("delete", "orders"),
            ("list", ""),
        ]
        assert [shop.allows(*question) for question in allowed] == [True] * 3
        assert [shop.allows(*question) for question in denied] == [False] * 4
        assert nobody.allows("subscribe", "news")
        assert not nobody.allows("publish", "news")
        broker.topics.ensure("news", 1)
        with pytest.raises(Refused, match=r"'shop' may not publish to topic\[news\]"):
            shop.publish(Message("news", b"x"))


async def test_a_reload_takes_a_new_file_and_keeps_the_old_one_where_it_is_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        broker, plugin = running.broker, users(tmp_path)
        install(plugin, broker)
        gate = broker.gate(Identity("robot"))
        assert not gate.allows("subscribe", "news")
        (tmp_path / "users.toml").write_text("users = 3 4")
        with pytest.raises(ConfigError):
            plugin.martlet_reload()
        broker.rules.changed()
        assert broker.gate(Identity()).allows("subscribe", "news")
        (tmp_path / "users.toml").write_text('[users.robot]\nrules = ["read *"]')
        await trio.to_thread.run_sync(plugin.martlet_reload)
        broker.rules.changed()
        assert gate.allows("subscribe", "news")


@pytest.mark.parametrize(
    ("change", "ended"),
    [
        (lambda text: text, []),
        (lambda text: text.replace('"publish orders", ', ""), []),
        (lambda text: text.replace(SHOP, hash_password(b"another", b"salt" * 4)), ["shop"]),
        (lambda text: text.replace("certificate = true", ""), ["shop"]),
        (lambda text: text.replace("robot's key", "another key"), ["robot"]),
        (lambda text: text.replace("[users.robot]", "[users.android]"), ["robot"]),
        (lambda text: text.replace("[users.robot]", '[users.robot]\npassword = "scrypt$YQ==$YQ=="'), []),
    ],
)
async def test_a_reload_ends_the_logins_of_who_proves_itself_in_another_way(
    tmp_path: Path, change: Callable[[str], str], ended: list[str]
) -> None:
    async with serving(tmp_path / "data") as running:
        broker, plugin = running.broker, users(tmp_path)
        install(plugin, broker)
        found: list[str] = []
        broker.revocation.logins.append(
            lambda: iter([(Identity(name), lambda refused, name=name: found.append(name)) for name in LOGINS])
        )
        (tmp_path / "users.toml").write_text(change(FILE))
        await trio.to_thread.run_sync(plugin.martlet_reload)
        await trio.testing.wait_all_tasks_blocked()
        assert found == ended


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[users.a]\npasswort = 'x'", "user 'a' .* has the unknown key 'passwort'; keys are certificate, password"),
        ("[users.a]\npassword = 'open'", "has a password that is not a hash; make one with martlet hash-password"),
        ("[users.a]\nrules = ['write x']", "has the rule 'write x'; it must begin with publish, read, manage"),
        ("= 3", "cannot be read"),
        ('[anonymous]\nrules = ["read mqtt/{user}/#"]', "but there {user} has no name"),
    ],
)
def test_a_mistake_in_the_file_is_told(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        users(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_users(str(tmp_path / "none"))


def test_the_command_prints_a_hash_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [command] = users(tmp_path).martlet_commands()
    parser = ArgumentParser()
    command.configure(parser)
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert command.run(parser.parse_args([])) == 0
    stored = capsys.readouterr().out.strip()
    plugin = users(tmp_path, f'[users.a]\npassword = "{stored}"')
    answer = plugin.users.authenticate(Password("a", b"secret"), LoginOrigin())
    assert isinstance(answer, PasswordCheck)
    answer.check()
    assert answer.identity == Identity("a")


def test_the_first_hash_needs_no_file_and_a_broker_does(tmp_path: Path) -> None:
    plugin = UsersPlugin(UsersConfig(str(tmp_path / "none")))
    assert [command.name for command in plugin.martlet_commands()] == ["hash-password"]
    for hook in (plugin.martlet_authenticators, plugin.martlet_mechanisms, plugin.martlet_authorizers):
        with pytest.raises(ConfigError, match="cannot be read"):
            hook(cast(Broker, None))


def test_the_command_prints_a_secret_for_scram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [command] = users(tmp_path).martlet_commands()
    parser = ArgumentParser()
    command.configure(parser)
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert command.run(parser.parse_args(["--scram"])) == 0
    found = read_secret(capsys.readouterr().out.strip())
    assert found == make_secret("secret", found.salt, found.iterations)
    monkeypatch.setattr("sys.stdin", io.StringIO("sec\x07ret\n"))
    assert command.run(parser.parse_args(["--scram"])) == 1
    assert capsys.readouterr() == ("", "the password contains '\\x07'; choose another one\n")


MATCHING = [
    ("*", ["", "orders", "a/b\nc"], []),
    ("orders", ["orders"], ["orders-2026", "orders/a", "order"]),
    ("orders*", ["orders", "orders-2026"], ["my orders"]),
    ("a*b*c", ["abc", "axxbyyc"], ["axxbyy", "acb"]),
    ("mqtt/home/+", ["mqtt/home/x", "mqtt/home/", "mqtt/home/+"], ["mqtt/home", "mqtt/home/x/y", "mqtt/home/#"]),
    ("mqtt/+/x", ["mqtt/a/x", "mqtt/+/x"], ["mqtt/a/b/x", "mqtt/#", "mqtt/a/+"]),
    ("mqtt/a/#", ["mqtt/a", "mqtt/a/b/c", "mqtt/a/#", "mqtt/a/+/c"], ["mqtt/ab", "mqtt/#", "mqtt/+/b", "mqtt"]),
    ("mqtt/#", ["mqtt", "mqtt/#", "mqtt/a"], ["mqtt2"]),
    ("mqtt/{user}/#", ["mqtt/ann/x", "mqtt/ann"], ["mqtt/bob/x", "mqtt/{user}/x", "mqtt/+/x"]),
    ("*/+/end", ["mqtt/a/b/end"], ["a/end", "mqtt/a/b/end/x", "mqtt/#/end"]),
    ("%RETRY%*", ["%RETRY%billing"], ["%DLQ%billing"]),
    ("a?[b].+", ["a?[b].+"], ["axb.+", "axb..", "a?[b].x"]),
]


@pytest.mark.parametrize(("pattern", "matching", "others"), MATCHING)
def test_patterns_match_names_and_the_filters_that_select_no_more(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    compiled = compile_pattern(pattern, "ann")
    assert [name for name in matching if not compiled.match(name)] == []
    assert [name for name in others if compiled.match(name)] == []


def test_a_name_in_a_rule_stands_for_itself(tmp_path: Path) -> None:
    assert not compile_pattern("mqtt/{user}", "+").match("mqtt/x")
    assert not compile_pattern("mqtt/{user}", "*").match("mqtt/x")
    assert not compile_pattern("mqtt/{user}", ".").match("mqtt/x")


@pytest.mark.parametrize(
    ("user", "levels"),
    [
        ("+", ["%2B"]),
        ("#", ["%23"]),
        ("+4917", ["%2B4917"]),
        ("a/b", ["a%2Fb"]),
        ("50%", ["50%25"]),
        ("ann@example.org", ["ann@example.org", "ann%40example.org"]),
        ("Zm9v+/8=", ["Zm9v%2B%2F8=", "Zm9v%2B%2F8%3D"]),
    ],
)
def test_special_characters_of_a_user_are_in_percent_encoding(user: str, levels: list[str]) -> None:
    pattern = compile_pattern("mqtt/{user}/state", user)
    for level in levels:
        assert pattern.match(f"mqtt/{level}/state")
    for other in ("+", "#", "*", "x", user if user not in levels else "+"):
        assert not pattern.match(f"mqtt/{other}/state")


QUOTAS = """
[users.door]
quota = { messages_in = 10, bytes_in = 10000, connections = 1 }

[users.till-1]
[users.till-2]

[groups.tills]
members = ["till-1", "till-2", "door"]
quota = { messages_in = 1000, subscriptions = 50, refuses = true }

[groups.all]
members = ["door"]

[anonymous]
quota = { connections = 100 }
"""


async def test_a_user_has_the_quotas_of_the_file_and_of_its_groups(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        [quotas] = users(tmp_path, QUOTAS).martlet_quotas(running.broker)
        own, tills = Quota("", 10, 10_000, connections=1), Quota("tills", 1000, subscriptions=50, refuses=True)
        assert quotas(Identity("door")) == (own, tills)
        assert quotas(Identity("till-1")) == quotas(Identity("till-2")) == (tills,)
        assert quotas(Identity()) == (Quota(connections=100),)
        assert quotas(Identity("nobody")) == ()


async def test_quotas_are_read_again_with_the_users(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as running:
        plugin = users(tmp_path, QUOTAS)
        [quotas] = plugin.martlet_quotas(running.broker)
        (tmp_path / "users.toml").write_text("[users.door]\nquota = { messages_out = 1 }\n")
        plugin.martlet_reload()
        assert quotas(Identity("door")) == (Quota(messages_out=1),)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[users.a]\nquota = { mesages_in = 1 }", "has a quota that has the unknown key 'mesages_in'"),
        ("[users.a]\nquota = { group = 'b' }", "has a quota that has the unknown key 'group'"),
        ("[users.a]\nquota = { bytes_in = 'many' }", "cannot be used; Expected `int`, got `str`"),
        ("[users.a]\nquota = { bytes_in = -1 }", "quota bytes_in is -1; use 0 for no limit"),
        ("[groups.g]\nquotas = 1", "group 'g' in .* has the unknown key 'quotas'; keys are members, quota"),
        ("[groups.g]\nmembers = ['x']", "has the member 'x', which is no user"),
    ],
)
def test_a_wrong_quota_is_an_error_with_the_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        users(tmp_path, text)
