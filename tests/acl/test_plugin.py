"""The plugin as a whole: what a start needs, what statistics say, and that no secret is seen anywhere."""

import errno
import json
import logging
import socket
from pathlib import Path

import pytest
import trio
from tests.acl.brokers import acl_broker, write_files

from martlet.app.config import read_config
from martlet.app.startup import run
from martlet.contracts import UserChange
from martlet.errors import ConfigError, PluginError, Refused
from martlet.net.unix_sockets import connect_unix
from martlet_acl import endpoint
from martlet_acl.config import AclConfig
from martlet_acl.credentials import SecretKey
from martlet_acl.endpoint import NAME
from martlet_acl.files import POLICIES, SECRETS

ONLY = {"plugins": {"enabled": ["acl"]}}


async def started(directory: Path) -> None:
    """Start a broker, and stop it once it is ready."""
    stop = trio.Event()
    tables: dict[str, object] = {**ONLY, "broker": {"data": str(directory)}}
    await run(read_config(tables), ready=lambda addresses: stop.set(), stop=stop)


async def test_a_broker_with_files_starts(tmp_path: Path) -> None:
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    await started(tmp_path)
    assert json.loads((tmp_path / POLICIES).read_text())["users"] == {"root": {"administrator": True}}


async def test_commands_can_connect_once_the_broker_is_ready(tmp_path: Path) -> None:
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    is_connected, stop = trio.Event(), trio.Event()
    commands, answers = list[socket.socket](), list[bytes]()

    def connect(addresses: dict[str, str]) -> None:
        commands.append(connect_unix(str(tmp_path / NAME), 30.0))
        commands[0].sendall(b'{"request": "list groups"}\n')
        is_connected.set()

    async def ask() -> None:
        await is_connected.wait()
        with commands[0] as command:
            answers.append(await trio.to_thread.run_sync(command.recv, 65536))
        stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await run(read_config({**ONLY, "broker": {"data": str(tmp_path)}}), ready=connect, stop=stop)
    assert answers == [b"{}\n"]


async def test_a_broker_starts_where_no_socket_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> socket.socket:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(endpoint, "listen_unix", refuse)
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    await started(tmp_path)
    assert f"{NAME} cannot be made, so no command can be used; Operation not permitted" in caplog.text


async def test_a_broker_without_files_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugin 'acl' failed .* run `martlet acl init`"):
        await started(tmp_path)


@pytest.mark.parametrize("file", [POLICIES, SECRETS])
async def test_a_broker_with_damaged_files_does_not_start(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    (tmp_path / file).write_text('{"users": {"a": 1, "b": 2}}')
    with pytest.raises(PluginError, match=rf"{file}: user a: .*; and 1 more problems"):
        await started(tmp_path)
    assert f"{file}: user b: " in caplog.text


def test_a_wrong_setting_is_named() -> None:
    from martlet.plugins.loader import load

    with pytest.raises(ConfigError, match=r"acl.password_cost"):
        load(["acl"], {"acl": {"password_cost": 30}})


async def test_no_secret_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hidden = "hush, a secret"
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    seen: list[object] = []
    async with acl_broker(tmp_path) as broker:
        administration = broker.administration
        await administration.create_user("alice", UserChange(password=hidden.encode(), secret=hidden.encode()), None)
        await administration.put_key("alice", "other", SecretKey(hidden))
        verifier = broker.state.secrets["alice"].password
        with pytest.raises(Refused) as caught:
            await administration.create_user("bob", UserChange(password=hidden.encode() * 100), None)
        seen += [str(caught.value), administration.user("alice"), broker.state.secrets, broker.plugin.statistics()]
        assert await broker.mqtt_login("alice", hidden.encode()) is not None
        assert await broker.mqtt_login("root", hidden.encode()) is None
        for secret in (hidden, "wrong" + hidden):
            answer = await broker.remoting_send(broker.remoting(), "T", "alice", secret)
            seen.append(answer.remark)
        seen.append(broker.broker.stats.collect())
        (tmp_path / SECRETS).write_text((tmp_path / SECRETS).read_text().replace('"password"', '"passwort"'))
        await trio.to_thread.run_sync(broker.plugin.martlet_reload)
        assert "unknown field `passwort`" in caplog.text
        text = repr(seen) + json.dumps(broker.plugin.statistics()) + caplog.text
        log = b"".join(path.read_bytes() for path in (tmp_path / "commitlog").iterdir())
        others = b"".join(path.read_bytes() for path in (tmp_path / "config").iterdir() if SECRETS not in str(path))
    for secret in (hidden, verifier, verifier.rpartition("$")[2]):
        assert secret not in text
        assert secret.encode() not in log
        assert secret.encode() not in others


def test_the_statistics_name_the_mode(tmp_path: Path) -> None:
    async def mode() -> object:
        quotas: dict[str, dict[str, int]] = {"everybody": {"connections": 1}, "user:root": {}}
        rules = {"everybody": ["allow get on *"]}
        write_files(tmp_path, {"root": {}}, rules, groups={"a": ["b"]}, observe=True, quotas=quotas)
        async with acl_broker(tmp_path, AclConfig(watch_s=0, audit_file=""), protocols=False) as broker:
            return broker.plugin.statistics()

    found = trio.run(mode)
    counts = {"users": 1, "groups": 1, "keys": 1, "rules": 1, "quotas": 2}
    assert found == {"mode": "observe", **counts, "version": 0, "observed": 0}
