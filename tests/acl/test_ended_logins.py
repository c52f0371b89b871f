"""What ends the logins of a user: changes by an administrator, and edited files."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from tests.acl.brokers import PASSWORD, AclBroker, acl_broker, write_files

from martlet.contracts import Identity, UserChange
from martlet_acl.credentials import SecretKey
from martlet_acl.files import POLICIES
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Disconnect

USERS: dict[str, object] = {"ann": {}, "bob": {}}
Change = Callable[[AclBroker], Awaitable[object]]

ENDS: dict[str, Change] = {
    "disabled": lambda broker: broker.administration.update_user("ann", UserChange(disabled=True), None),
    "removed": lambda broker: broker.administration.delete_user("ann", None),
    "another password": lambda broker: broker.administration.update_user("ann", UserChange(password=b"new"), None),
    "no password": lambda broker: broker.administration.update_user("ann", UserChange(), None, without_password=True),
    "another secret": lambda broker: broker.administration.update_user("ann", UserChange(secret=b"new secret"), None),
    "a removed key": lambda broker: broker.administration.delete_key("ann"),
    "a disabled key": lambda broker: broker.administration.switch_key("ann", disabled=True),
}
LEAVES: dict[str, Change] = {
    "a further key": lambda broker: broker.administration.put_key("ann", "more", SecretKey("another secret")),
    "groups": lambda broker: broker.administration.update_user("ann", UserChange(groups=("staff",)), None),
    "another user": lambda broker: broker.administration.update_user("bob", UserChange(disabled=True), None),
}


@pytest.mark.parametrize("what", ENDS)
async def test_a_change_ends_the_connections_of_the_user_and_of_no_other(tmp_path: Path, what: str) -> None:
    write_files(tmp_path, USERS, {"everybody": ["allow all on *"]})
    async with acl_broker(tmp_path) as broker:
        ann = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        bob = await broker.mqtt_login("bob", PASSWORD.format("bob").encode())
        assert ann is not None
        assert bob is not None
        await ENDS[what](broker)
        farewell = await ann.receive()
        assert isinstance(farewell, Disconnect)
        assert farewell.reason == ReasonCode.ADMINISTRATIVE_ACTION
        assert await broker.mqtt_publish(bob, "x")


@pytest.mark.parametrize("what", LEAVES)
async def test_another_change_ends_no_connection(tmp_path: Path, what: str) -> None:
    write_files(tmp_path, USERS, {"everybody": ["allow all on *"]})
    async with acl_broker(tmp_path) as broker:
        ann = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        assert ann is not None
        await LEAVES[what](broker)
        await trio.testing.wait_all_tasks_blocked()
        assert await broker.mqtt_publish(ann, "x")


async def test_an_edited_file_ends_the_connections_of_who_is_disabled_in_it(tmp_path: Path) -> None:
    write_files(tmp_path, USERS, {"everybody": ["allow all on *"]})
    async with acl_broker(tmp_path) as broker:
        talks = [await broker.mqtt_login(name, PASSWORD.format(name).encode()) for name in ("ann", "bob")]
        ann, bob = talks
        assert ann is not None
        assert bob is not None
        edited = json.loads((tmp_path / POLICIES).read_text())
        edited["users"]["ann"]["disabled"] = True
        (tmp_path / POLICIES).write_text(json.dumps(edited))
        await trio.to_thread.run_sync(broker.plugin.martlet_reload)
        assert isinstance(await ann.receive(), Disconnect)
        assert await broker.mqtt_publish(bob, "x")


async def test_while_it_observes_nobody_is_ended(tmp_path: Path) -> None:
    write_files(tmp_path, USERS, {}, observe=True)
    async with acl_broker(tmp_path) as broker:
        ann = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        assert ann is not None
        await ENDS["disabled"](broker)
        await trio.testing.wait_all_tasks_blocked()
        assert await broker.mqtt_publish(ann, "x")


async def enforce(broker: AclBroker, directory: Path, how: str) -> None:
    if how == "command":
        await broker.administration.set_observing(observe=False)
        return
    edited = json.loads((directory / POLICIES).read_text())
    (directory / POLICIES).write_text(json.dumps({**edited, "observe": False}))
    await trio.to_thread.run_sync(broker.plugin.martlet_reload)


@pytest.mark.parametrize("how", ["command", "edited file"])
async def test_who_proved_nothing_while_it_observed_is_ended_when_rules_are_enforced(tmp_path: Path, how: str) -> None:
    write_files(tmp_path, {**USERS, "root": {"administrator": True}}, {"everybody": ["allow all on *"]}, observe=True)
    async with acl_broker(tmp_path) as broker:
        eve = await broker.mqtt_login("root", b"a guess", "eve")
        bob = await broker.mqtt_login("bob", PASSWORD.format("bob").encode())
        nobody = await broker.mqtt_login(None, None, "nobody")
        assert eve is not None
        assert bob is not None
        assert nobody is not None
        await enforce(broker, tmp_path, how)
        farewell = await eve.receive()
        assert isinstance(farewell, Disconnect)
        assert farewell.reason == ReasonCode.ADMINISTRATIVE_ACTION
        assert await broker.mqtt_login("root", b"a guess", "eve") is None
        assert await broker.mqtt_publish(bob, "x")
        assert not await broker.mqtt_publish(nobody, "x")  # still connected, with the rules of anonymous


@pytest.mark.parametrize("what", ENDS)
async def test_a_change_made_while_it_observed_ends_connections_when_rules_are_enforced(
    tmp_path: Path, what: str
) -> None:
    write_files(tmp_path, USERS, {"everybody": ["allow all on *"]}, observe=True)
    async with acl_broker(tmp_path) as broker:
        ann = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        bob = await broker.mqtt_login("bob", PASSWORD.format("bob").encode())
        assert ann is not None
        assert bob is not None
        await ENDS[what](broker)
        assert await broker.mqtt_publish(ann, "x")
        await enforce(broker, tmp_path, "command")
        assert isinstance(await ann.receive(), Disconnect)
        assert await broker.mqtt_publish(bob, "x")


async def test_an_edited_file_ends_the_connections_of_who_is_new_and_disabled_in_it(tmp_path: Path) -> None:
    """Users of tokens and certificates need not be in the file before."""
    write_files(tmp_path, USERS, {"everybody": ["allow all on *"]})
    async with acl_broker(tmp_path) as broker:
        ended: list[str] = []
        names = ("carl", "dora")
        broker.broker.revocation.logins.append(
            lambda: iter([(Identity(name), lambda refused, name=name: ended.append(name)) for name in names])
        )
        edited = json.loads((tmp_path / POLICIES).read_text())
        edited["users"]["carl"] = {"disabled": True}
        (tmp_path / POLICIES).write_text(json.dumps(edited))
        await trio.to_thread.run_sync(broker.plugin.martlet_reload)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["carl"]
