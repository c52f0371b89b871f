"""Logins over each protocol: right, wrong, rotated and disabled credentials, and users who do not exist."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.acl.brokers import SECRET, AclBroker, acl_broker, write_files

from martlet.contracts import (
    AccessKey,
    Certificate,
    Identity,
    LoginOrigin,
    Nobody,
    Password,
    PasswordCheck,
    SigningSecret,
    UserChange,
)
from martlet.errors import Reason, Refused
from martlet_acl.credentials import SecretKey
from martlet_acl.passwords import COST
from martlet_remoting.wire.codes import ResponseCode

OWNER = None
ALICE, BOB = "password of alice", "password of bob"
HERE = LoginOrigin("192.0.2.1", "mqtt")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AclBroker]:
    users = {"root": {"administrator": True}, "alice": {}, "bob": {"disabled": True}}
    rules = {"user:alice": ["allow all on topic:orders", "allow all on name:mqtt/alice/#"]}
    write_files(tmp_path, users, rules)
    async with acl_broker(tmp_path) as found:
        found.broker.topics.ensure("orders", 1)
        found.broker.topics.ensure("other", 1)
        yield found


async def send(broker: AclBroker, key: str, secret: str, topic: str = "orders") -> int:
    return (await broker.remoting_send(broker.remoting(), topic, key, secret)).code


async def test_the_right_password_logs_in_over_mqtt_and_stomp(broker: AclBroker) -> None:
    talk = await broker.mqtt_login("alice", ALICE.encode())
    assert talk is not None
    assert await broker.mqtt_publish(talk, "alice/state")
    assert not await broker.mqtt_publish(talk, "bob/state")
    assert await broker.stomp_login("alice", ALICE) is not None


@pytest.mark.parametrize(
    ("user", "password"), [("alice", BOB), ("alice", ""), ("nobody", ALICE), ("bob", BOB), ("", ALICE)]
)
async def test_wrong_unknown_and_disabled_ones_are_refused(broker: AclBroker, user: str, password: str) -> None:
    assert await broker.mqtt_login(user, password.encode()) is None
    if user:
        assert await broker.stomp_login(user, password) is None


async def test_a_right_signature_is_allowed_what_the_rules_allow(broker: AclBroker) -> None:
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.SUCCESS
    assert await send(broker, "alice", SECRET.format("alice"), "other") == ResponseCode.NO_PERMISSION
    assert await send(broker, "root", SECRET.format("root"), "other") == ResponseCode.SUCCESS


@pytest.mark.parametrize(("key", "secret"), [("alice", "secret of bob"), ("bob", "secret of bob"), ("eve", "secret")])
async def test_wrong_signatures_are_refused(broker: AclBroker, key: str, secret: str) -> None:
    answer = await broker.remoting_send(broker.remoting(), "orders", key, secret)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert secret not in (answer.remark or "")


async def test_a_client_without_credentials_has_only_the_rules_of_anonymous(broker: AclBroker) -> None:
    talk = await broker.mqtt_login(None, None)
    assert talk is not None
    assert not await broker.mqtt_publish(talk, "alice/state")
    assert await send(broker, "", "") == ResponseCode.NO_PERMISSION


async def test_a_changed_password_replaces_the_old_one(broker: AclBroker) -> None:
    assert await broker.mqtt_login("alice", ALICE.encode()) is not None  # it is remembered as proved
    await broker.administration.update_user("alice", UserChange(password=b"new"), OWNER)
    assert await broker.mqtt_login("alice", ALICE.encode()) is None
    assert await broker.mqtt_login("alice", b"new") is not None
    await broker.administration.update_user("alice", UserChange(), OWNER, without_password=True)
    assert await broker.mqtt_login("alice", b"new") is None


async def test_a_disabled_user_cannot_log_in_although_the_password_was_proved_before(broker: AclBroker) -> None:
    assert await broker.mqtt_login("alice", ALICE.encode()) is not None
    talk = broker.remoting()
    assert (await broker.remoting_send(talk, "orders", "alice", SECRET.format("alice"))).code == ResponseCode.SUCCESS
    await broker.administration.update_user("alice", UserChange(disabled=True), OWNER)
    assert await broker.mqtt_login("alice", ALICE.encode()) is None
    assert await broker.stomp_login("alice", ALICE) is None
    answer = await broker.remoting_send(talk, "orders", "alice", SECRET.format("alice"))
    assert answer.code == ResponseCode.NO_PERMISSION
    await broker.administration.update_user("alice", UserChange(disabled=False), OWNER)
    assert await broker.mqtt_login("alice", ALICE.encode()) is not None
    assert (await broker.remoting_send(talk, "orders", "alice", SECRET.format("alice"))).code == ResponseCode.SUCCESS


async def test_a_user_who_is_made_again_does_not_get_the_old_secrets(broker: AclBroker) -> None:
    assert await broker.administration.delete_user("alice", OWNER)
    await broker.administration.create_user("alice", UserChange(), OWNER)
    assert await broker.mqtt_login("alice", ALICE.encode()) is None
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.NO_PERMISSION


async def test_keys_are_rotated_while_both_are_valid(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.put_key("alice", "alice-2", SecretKey("the second secret"))
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.SUCCESS
    assert await send(broker, "alice-2", "the second secret") == ResponseCode.SUCCESS
    await administration.switch_key("alice", disabled=True)
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.NO_PERMISSION
    await administration.switch_key("alice", disabled=False)
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.SUCCESS
    await administration.delete_key("alice")
    assert await send(broker, "alice", SECRET.format("alice")) == ResponseCode.NO_PERMISSION
    assert await send(broker, "alice-2", "the second secret") == ResponseCode.SUCCESS


async def test_a_connection_does_not_keep_a_secret_that_was_replaced(broker: AclBroker) -> None:
    talk = broker.remoting()
    assert (await broker.remoting_send(talk, "orders", "alice", SECRET.format("alice"))).code == ResponseCode.SUCCESS
    await broker.administration.update_user("alice", UserChange(secret=b"another secret"), OWNER)
    answer = await broker.remoting_send(talk, "orders", "alice", SECRET.format("alice"))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert (await broker.remoting_send(talk, "orders", "alice", "another secret")).code == ResponseCode.SUCCESS


def ask(broker: AclBroker, credentials: AccessKey | Certificate | Nobody | Password) -> object:
    (authenticate,) = broker.broker.authentication.authenticators
    return authenticate(credentials, HERE)


async def test_a_certificate_is_that_of_the_user_with_its_name(broker: AclBroker) -> None:
    assert ask(broker, Certificate("alice", (), b"")) == Identity("alice")
    assert ask(broker, Certificate("stranger", (), b"")) is None
    assert ask(broker, Certificate("", (), b"")) is None
    with pytest.raises(Refused, match="user 'bob' is disabled") as caught:
        ask(broker, Certificate("bob", (), b""))
    assert caught.value.reason is Reason.CREDENTIALS


async def test_who_does_not_exist_is_checked_as_long_as_who_does(broker: AclBroker) -> None:
    for name in ("alice", "bob", "nobody", ""):
        answer = ask(broker, Password(name, b"?"))
        assert isinstance(answer, PasswordCheck)
        assert f"$ln={COST},r=8,p=1$".encode() in answer.verifier
        with pytest.raises(Refused, match="or the password is wrong"):
            answer.check()
    for key in ("alice", "nobody"):
        assert isinstance(ask(broker, AccessKey(key)), SigningSecret)


async def test_a_disabled_user_learns_it_only_with_the_right_password(broker: AclBroker) -> None:
    answer = ask(broker, Password("bob", BOB.encode()))
    assert isinstance(answer, PasswordCheck)
    with pytest.raises(Refused, match="user 'bob' is disabled"):
        answer.check()
