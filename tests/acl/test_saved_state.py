"""The files of a running broker: a confirmed change survives everything, and a hand that edits them loses nothing."""

import errno
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.acl.brokers import AclBroker, acl_broker, policy, write_files
from trio.testing import MockClock

from martlet.contracts import AccessRule, UserChange
from martlet.errors import Reason, Refused
from martlet.store.disk.files import atomic_write, read_file
from martlet.testing.disk import Cut, FakeDisk
from martlet_acl.config import AclConfig
from martlet_acl.credentials import SecretKey
from martlet_acl.files import FILES, POLICIES, SECRETS, AclFilesError
from martlet_acl.policy.members import UserRecord

DATA = Path("/data")
RULE = AccessRule("topic:a", ("publish",), "allow")
CHEAP = AclConfig(watch_s=0, audit_file="")


@pytest.fixture(autouse=True)
def no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords are not the subject here."""
    verifier = "$scrypt$ln=12,r=8,p=1$c2FsdA$" + "A" * 43
    monkeypatch.setattr("martlet_acl.administration.hash_password", lambda *_: verifier)


def made_disk(policies: Any = None, secrets: Any = None) -> FakeDisk:
    disk = FakeDisk()
    document = {"users": {"root": {"administrator": True}}}
    for file, content in ((POLICIES, policies or document), (SECRETS, secrets or {})):
        atomic_write(disk, f"{DATA}/{file}", json.dumps(content).encode())
    return disk


@asynccontextmanager
async def running(disk: FakeDisk, config: AclConfig = CHEAP) -> AsyncIterator[AclBroker]:
    async with acl_broker(DATA, config, disk=disk, protocols=False) as broker:
        yield broker


def on_disk(disk: FakeDisk, file: str) -> Any:
    data = read_file(disk, f"{DATA}/{file}")
    assert data is not None
    return json.loads(data)


async def test_a_confirmed_change_is_in_both_files(autojump_clock: MockClock) -> None:
    disk = made_disk()
    async with running(disk) as broker:
        await broker.administration.create_user("alice", UserChange(password=b"x", secret=b"a secret"), None)
        await broker.administration.put_rules("user:alice", "custom", [RULE], None)
        policies, secrets = on_disk(disk, POLICIES), on_disk(disk, SECRETS)
    assert policies["version"] == secrets["version"] == 2
    assert policies["users"]["alice"] == {"secrets": 1}
    assert secrets["users"]["alice"]["version"] == 1
    assert policies["rules"] == {"user:alice": {"custom": policy("allow publish on topic:a")}}
    assert disk.files[f"{DATA}/{SECRETS}"].mode == disk.files[f"{DATA}/{SECRETS}.bak"].mode == 0o600
    assert disk.files[f"{DATA}/{POLICIES}"].mode == 0o640


async def test_changes_at_once_are_all_written(autojump_clock: MockClock) -> None:
    disk = made_disk()
    async with running(disk) as broker, trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(broker.administration.create_user, f"user{number}", UserChange(), None)
    assert len(on_disk(disk, POLICIES)["users"]) == 51


async def work(broker: AclBroker, confirmed: list[str]) -> None:
    """Make changes, each of which is noted once it is confirmed."""
    administration = broker.administration
    for number in range(4):
        name = f"user{number}"
        await administration.create_user(name, UserChange(secret=f"secret {number}".encode()), None)
        confirmed.append(f"+{name}")
        await administration.put_key(name, f"key{number}", SecretKey("another secret"))
        confirmed.append(f"+key{number}")
        await administration.put_rules(f"user:{name}", "custom", [RULE], None)
        confirmed.append(f"+user:{name}")
    for subject in ("user:user0", "user:user1"):
        await administration.change_quota(subject, {"messages_in": 10})
        confirmed.append(f"+quota_{subject}")
    await administration.delete_key("key1")
    confirmed.append("-key1")
    await administration.update_user("user2", UserChange(disabled=True), None)
    confirmed.append("-user2")
    await administration.delete_user("user3", None)
    confirmed += ["-user3", "-key3", "-user:user3"]
    await administration.delete_rules("user:user0", None, "", None)
    confirmed.append("-user:user0")
    await administration.delete_quota("user:user0")
    confirmed.append("-quota_user:user0")


def check(state: Any, confirmed: list[str], begun: list[str]) -> None:
    """See that each confirmed change is there, unless a later one, perhaps not confirmed, has undone it."""
    there = {name for name, user in state.users.items() if not user.disabled} | set(state.keys) | set(state.policies)
    there -= {"user0", "user1", "user2", "user3"} - {name for name, user in state.users.items() if not user.disabled}
    there |= {f"quota_{subject}" for subject in state.policies.quotas}
    for number, change in enumerate(confirmed):
        name, later = change[1:], confirmed[number + 1 :] + begun
        if change[0] == "+" and f"-{name}" not in later:
            assert name in there, change
        if change[0] == "-":
            assert name not in there, change


ALL = "+user0 +key0 +user:user0 +user1 +key1 +user:user1 +user2 +key2 +user:user2 +user3 +key3 +user:user3"
QUOTAS = ["+quota_user:user0", "+quota_user:user1"]
ENDS = ["-key1", "-user2", "-user3", "-key3", "-user:user3", "-user:user0", "-quota_user:user0"]
ALL_CHANGES = [*ALL.split(), *QUOTAS, *ENDS]


async def test_confirmed_changes_survive_a_power_cut_at_every_change_of_the_disk(autojump_clock: MockClock) -> None:
    cuts: list[tuple[FakeDisk, int]] = []
    confirmed: list[str] = []
    disk = made_disk()
    number = 0

    def keep(name: str) -> None:
        nonlocal number
        number += 1
        kind = list(Cut)[number % len(Cut)]
        cuts.append((disk.after_power_cut(kind, Random(number)), len(confirmed)))

    async with running(disk) as broker:
        disk.on_change = keep
        await work(broker, confirmed)
        disk.on_change = None
    assert confirmed == ALL_CHANGES
    assert len(cuts) > 300
    for found, count in cuts:
        async with running(found) as broker:
            check(broker.state, confirmed[:count], confirmed[count:])
            assert all(broker.state.version >= secrets.version for secrets in broker.state.secrets.values())
            await broker.administration.create_user("after", UserChange(), None)
        assert "after" in on_disk(found, POLICIES)["users"]


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_directory"])
async def test_a_change_that_cannot_be_written_is_said_and_written_later(call: str, autojump_clock: MockClock) -> None:
    for after in range(8):
        disk = made_disk()
        async with running(disk) as broker:
            await trio.sleep(0.1)
            disk.fail_next(call, errno.EIO, after=after)
            with suppress(Refused):
                await broker.administration.create_user("alice", UserChange(secret=b"a secret"), None)
            disk.failures.clear()
            assert "alice" in broker.state.users
            await trio.sleep(10)
            killed = disk.after_power_cut(Cut.LOST, Random(0))
        async with running(killed) as broker:
            assert set(broker.state.keys) == {"alice"}


async def test_a_full_disk_is_said_in_words(autojump_clock: MockClock) -> None:
    disk = made_disk()
    async with running(disk) as broker:
        disk.fail_next("write", errno.ENOSPC)
        with pytest.raises(Refused, match=r"in effect, but not on the disk yet; .* No space left") as caught:
            await broker.administration.create_user("alice", UserChange(), None)
        assert caught.value.reason is Reason.UNAVAILABLE


async def test_a_user_created_between_the_two_files_is_there_with_his_secrets_or_not_at_all(
    autojump_clock: MockClock,
) -> None:
    disk, cuts = made_disk(), list[FakeDisk]()

    def create_bob(change: str) -> None:
        if change == "rename" and "bob" not in broker.state.users:
            broker.state.put_user("bob", UserRecord())
            broker.state.put_key("bob", "key", SecretKey("a secret"))
            saved.note_change()
        cuts.append(disk.after_power_cut(Cut.LOST, Random(0)))

    async with running(disk) as broker:
        saved, disk.on_change = broker.plugin.saved, create_bob
        await broker.administration.create_user("alice", UserChange(), None)
        await saved.wait_saved()
        assert on_disk(disk, POLICIES)["users"]["bob"] == {"secrets": 2}
        assert on_disk(disk, POLICIES)["version"] == on_disk(disk, SECRETS)["version"]
        await broker.administration.create_user("carol", UserChange(), None)
        disk.on_change = None
    for cut in cuts:
        async with running(cut) as after_kill:
            assert ("bob" in after_kill.state.users) is ("key" in after_kill.state.keys)
            if "bob" not in after_kill.state.users:
                await after_kill.administration.create_user("bob", UserChange(), None)


async def test_an_edit_between_the_two_files_is_not_lost(autojump_clock: MockClock) -> None:
    disk = made_disk()
    async with running(disk) as broker, trio.open_nursery() as nursery:

        def edit(change: str) -> None:
            if change == "rename":
                disk.on_change = None
                document = {"users": {"root": {"administrator": True}, "edited": {}}}
                atomic_write(disk, f"{DATA}/{POLICIES}", json.dumps(document).encode())
                nursery.start_soon(broker.plugin.saved.reload)

        disk.on_change = edit
        with suppress(Refused):
            await broker.administration.create_user("alice", UserChange(), None)
        await trio.sleep(10)
        assert "edited" in broker.state.users
    assert "edited" in on_disk(disk, POLICIES)["users"]


# hands that edit


@pytest.fixture
async def edited(tmp_path: Path) -> AsyncIterator[tuple[AclBroker, Path]]:
    write_files(tmp_path, {"root": {"administrator": True}, "alice": {}}, {"user:alice": ["allow get on topic:a"]})
    async with acl_broker(tmp_path, CHEAP, protocols=False) as broker:
        yield broker, tmp_path


async def reload(broker: AclBroker) -> None:
    """Do what SIGHUP does."""
    await trio.to_thread.run_sync(broker.plugin.martlet_reload)


async def test_an_edited_file_is_used_after_sighup(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    generation = broker.broker.rules.generation, broker.broker.authentication.generation
    file = directory / POLICIES
    await reload(broker)
    assert (broker.broker.rules.generation, broker.broker.authentication.generation) == generation
    file.write_text(file.read_text().replace("topic:a", "topic:b"))
    await reload(broker)
    (rule,) = broker.state.policies.rules_of("user:alice", "custom")
    assert rule.resource.text == "topic:b"
    assert broker.broker.rules.generation > generation[0]
    assert broker.broker.authentication.generation > generation[1]


async def test_the_files_are_watched(tmp_path: Path) -> None:
    write_files(tmp_path, {"root": {}}, {})
    async with acl_broker(tmp_path, AclConfig(watch_s=0.01, audit_file=""), protocols=False) as broker:
        write_files(tmp_path, {"root": {}, "alice": {}}, {})
        while "alice" not in broker.state.users:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert set(broker.state.users) == {"root", "alice"}


async def test_wrong_edits_are_said_once_and_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, {"root": {}}, {})
    async with acl_broker(tmp_path, AclConfig(watch_s=0.01, audit_file=""), protocols=False) as broker:
        (tmp_path / POLICIES).write_text(json.dumps({"users": {"root": {"a": 1}, "b\n": {}}}))
        while not caplog.messages:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        assert set(broker.state.users) == {"root"}
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * len(caplog.records)
    assert caplog.messages == [
        "config/acl.json: user root: Object contains unknown field `a`",
        "config/acl.json: user b\\n: user 'b\\n' has a control character in its name",
        "the edited files are not used; users and rules stay as they were",
    ]


async def test_a_change_first_takes_over_edits(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    file = directory / POLICIES
    file.write_text(file.read_text().replace("topic:a", "topic:b"))
    await broker.administration.create_user("bob", UserChange(), None)
    written = json.loads(file.read_text())
    assert set(written["users"]) == {"root", "alice", "bob"}
    assert written["rules"]["user:alice"]["custom"][0]["resource"] == "topic:b"


async def test_no_change_is_made_over_wrong_edits(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    file = directory / POLICIES
    right = file.read_text()
    file.write_text(right.replace("topic:a", "queue:a"))
    with pytest.raises(Refused, match=r"made errors; correct them first: config/acl.json: .* has no kind") as caught:
        await broker.administration.create_user("bob", UserChange(), None)
    assert caught.value.reason is Reason.UNAVAILABLE
    assert "bob" not in broker.state.users
    assert "queue:a" in file.read_text()
    file.write_text(right)
    await broker.administration.create_user("bob", UserChange(), None)


async def test_an_edit_between_a_change_and_its_write_is_not_lost(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    file = directory / POLICIES
    saved = broker.plugin.saved
    await broker.administration.create_user("bob", UserChange(), None)
    saved.state.policies.remove_user("bob")
    saved.note_change()
    file.write_text(file.read_text().replace("topic:a", "topic:edited"))
    with pytest.raises(Refused, match="somebody has edited it; repeat the change"):
        await saved.wait_saved()
    assert "topic:edited" in file.read_text()
    await reload(broker)
    await broker.administration.delete_user("bob", None)
    assert "topic:edited" in file.read_text()
    assert "bob" not in file.read_text()


async def test_an_older_file_that_is_put_back_is_refused(
    edited: tuple[AclBroker, Path], caplog: pytest.LogCaptureFixture
) -> None:
    broker, directory = edited
    file = directory / POLICIES
    await broker.administration.create_user("bob", UserChange(), None)
    older = file.read_text()
    await broker.administration.delete_rules("user:alice", None, "", None)
    await broker.administration.delete_user("bob", None)
    file.write_text(older)
    await reload(broker)
    assert "bob" not in broker.state.users
    assert any("may allow what was denied since" in text for text in caplog.messages)
    file.write_text(older.replace('"version": 1,', ""))
    await reload(broker)
    assert "bob" in broker.state.users


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
async def test_secrets_that_every_user_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: bool
) -> None:
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    (tmp_path / SECRETS).chmod(mode)
    async with acl_broker(tmp_path, protocols=False) as broker:
        assert ("acl.secrets is open to every user of this machine" in caplog.text) is is_open
        caplog.clear()
        (tmp_path / SECRETS).write_text('{"users": {}}')
        await broker.plugin.saved.reload()
        assert ("acl.secrets is open to every user of this machine" in caplog.text) is is_open


async def test_edited_secrets_are_used(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    file = directory / SECRETS
    secrets = json.loads(file.read_text())
    del secrets["users"]["alice"]["keys"]
    secrets["users"]["root"]["keys"] = {"by-hand": {"secret": "from a person"}}
    file.write_text(json.dumps(secrets))
    await reload(broker)
    assert set(broker.state.keys) == {"by-hand"}


async def test_a_start_with_wrong_edits_uses_what_was_before_and_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, {"root": {}}, {})
    async with acl_broker(tmp_path, CHEAP, protocols=False) as broker:
        await broker.administration.create_user("alice", UserChange(), None)
    file = tmp_path / POLICIES
    right = file.read_text()
    file.write_text(right.replace('"alice"', '"alice\\n"'))
    wrong = file.read_text()
    async with acl_broker(tmp_path, CHEAP, protocols=False) as broker:
        assert set(broker.state.users) == {"root", "alice"}
        with pytest.raises(Refused, match="made errors"):
            await broker.administration.create_user("bob", UserChange(), None)
    assert file.read_text() == wrong
    assert any("using its previous generation until they are corrected" in text for text in caplog.messages)


async def test_a_deleted_file_is_not_taken_for_an_edit(edited: tuple[AclBroker, Path]) -> None:
    broker, directory = edited
    for path in (directory / "config").glob("acl.json*"):
        path.unlink()
    await reload(broker)
    assert set(broker.state.users) == {"root", "alice"}
    await broker.administration.create_user("bob", UserChange(), None)
    assert "bob" in (directory / POLICIES).read_text()


async def test_a_broker_without_files_does_not_start() -> None:
    with pytest.raises(AclFilesError, match=r"config/acl.json is missing; run `martlet acl init`"):
        async with running(FakeDisk()):
            pass


def test_the_files_are_written_in_this_order() -> None:
    assert FILES == (SECRETS, POLICIES)
