"""The audit trail of a running broker, and tokens as passwords."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
import trio
from tests.acl.brokers import PASSWORD, ROOT, AclBroker, acl_broker, write_files
from tests.acl.test_tokens import CLAIMS, PRIVATE, jwk

from martlet.contracts import AccessRule, UserChange
from martlet_acl.config import AclConfig
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect

USERS = {"root": {"administrator": True}, "ann": {}, "eve": {"disabled": True}}
RULES = {"user:ann": ["allow all on name:mqtt/a/#"], "group:staff": ["allow publish on name:mqtt/s/#"]}


@asynccontextmanager
async def audited(directory: Path, **keys: Any) -> AsyncIterator[tuple[AclBroker, list[dict[str, Any]]]]:
    """Run a broker; the lines of its audit trail are in the list afterwards."""
    write_files(directory, USERS, RULES)
    lines: list[dict[str, Any]] = []
    async with acl_broker(directory, AclConfig(watch_s=0, **keys)) as broker:
        yield broker, lines
    text = await trio.Path(directory / "audit.log").read_text()
    lines += [json.loads(line) for line in text.splitlines()]


async def test_logins_refusals_and_changes_are_in_the_trail_and_no_secret(tmp_path: Path) -> None:
    async with audited(tmp_path) as (broker, lines):
        talk = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        assert talk is not None
        assert await broker.mqtt_publish(talk, "a/b")
        assert not await broker.mqtt_publish(talk, "b")
        assert await broker.mqtt_login("ann", b"a wrong password") is None
        await broker.administration.create_user("bob", UserChange(password=b"hush, a secret"), ROOT)
        for secret in ("secret of ann", "a wrong secret"):
            await broker.remoting_send(broker.remoting(), "T", "ann", secret)
    found = [(each["event"], each["identity"], each.get("allowed")) for each in lines]
    assert found == [
        ("login", "ann", True),
        ("access", "ann", False),
        ("login", "", False),
        ("change", "root", None),
        ("login", "ann", True),
        ("access", "ann", False),
        ("login", "", False),
    ]
    login, access, wrong, change, signed, send, forged = lines
    assert (login["method"], login["protocol"], login["client_id"]) == ("password", "mqtt", "of ann")
    assert (access["action"], access["resource"], access["protocol"]) == ("publish", "name:mqtt/b", "mqtt")
    assert (wrong["user"], change["change"]) == ("ann", "create user bob: password")
    assert (signed["method"], send["resource"], forged["user"]) == ("signature", "topic:T", "ann")
    assert "secret" not in json.dumps(lines).replace("the signature", "")
    assert "password of" not in json.dumps(lines)


async def test_changes_of_quotas_are_in_the_trail(tmp_path: Path) -> None:
    async with audited(tmp_path) as (broker, lines):
        await broker.administration.change_quota("user:ann", {"messages_in": 10, "refuses": True})
        await broker.administration.delete_quota("user:ann")
    assert [each["change"] for each in lines] == [
        "set quota of user:ann: messages_in 10, refuses true",
        "delete quota of user:ann",
    ]


async def test_a_subscription_that_ends_is_one_line(tmp_path: Path) -> None:
    async with audited(tmp_path) as (broker, lines):
        broker.broker.topics.ensure("news", 2)
        rules = [AccessRule(resource, ("all",), "allow") for resource in ("topic:news", "name:mqtt/a/#")]
        await broker.administration.put_rules("user:ann", "custom", rules, ROOT)
        mqtt = await broker.mqtt_login("ann", PASSWORD.format("ann").encode())
        stomp = await broker.stomp_login("ann", PASSWORD.format("ann"))
        assert mqtt is not None
        assert stomp is not None
        await mqtt.subscribe("a/#")
        await stomp[0].subscribe("/topic/news")
        for resource in ("topic:news", "name:mqtt/a/#"):
            await broker.administration.delete_rules("user:ann", "custom", resource, ROOT)
        assert isinstance(await mqtt.receive(), Disconnect)
        assert "may not subscribe" in str((await stomp[0].error()).headers)
    refused = [(each["protocol"], each["resource"]) for each in lines if each["event"] == "access"]
    assert sorted(refused) == [("mqtt", "name:mqtt/a/#"), ("stomp", "topic:news")]


async def test_a_topic_gets_the_lines_too(tmp_path: Path) -> None:
    async with audited(tmp_path, audit_topic="audit") as (broker, lines):
        assert await broker.mqtt_login("ann", PASSWORD.format("ann").encode()) is not None
        queue = None
        while queue is None or not queue.next_offset:
            await trio.sleep(0.01)
            queue = broker.broker.store.queues.find("audit", 0)
        assert broker.broker.topics.get("audit") is not None
    assert [each["event"] for each in lines] == ["login"]


async def test_without_a_file_there_is_no_trail(tmp_path: Path) -> None:
    write_files(tmp_path, USERS, RULES)
    async with acl_broker(tmp_path, AclConfig(watch_s=0, audit_file="")) as broker:
        assert await broker.mqtt_login("ann", PASSWORD.format("ann").encode()) is not None
        assert "audit_written" not in broker.plugin.statistics()
    assert not await trio.Path(tmp_path / "audit.log").exists()


def token_of(broker: AclBroker, user: str, **more: Any) -> bytes:
    claims = {**CLAIMS, "sub": user, "exp": broker.broker.clock.now_ms() // 1000 + 600, **more}
    algorithm, private = PRIVATE["e"]
    return jwt.encode(claims, private, algorithm, headers={"kid": "e"}).encode()


@asynccontextmanager
async def with_tokens(directory: Path, **more: Any) -> AsyncIterator[AclBroker]:
    write_files(directory, USERS, RULES, **more)
    (directory / "jwks.json").write_text(json.dumps({"keys": [jwk("e")]}))
    keys = AclConfig(
        watch_s=0,
        jwks=str(directory / "jwks.json"),
        token_issuer=str(CLAIMS["iss"]),
        token_audience="martlet",
        audit_file="",
    )
    async with acl_broker(directory, keys) as broker:
        yield broker


async def test_a_token_is_a_password_and_its_groups_count(tmp_path: Path) -> None:
    async with with_tokens(tmp_path) as broker:
        talk = await broker.mqtt_login("", token_of(broker, "zoe", groups=["staff"]), "z")
        assert talk is not None
        assert await broker.mqtt_publish(talk, "s/1")
        assert not await broker.mqtt_publish(talk, "a/1")
        assert await broker.mqtt_login("ann", token_of(broker, "zoe"), "y") is None
        assert await broker.mqtt_login("", token_of(broker, "eve"), "x") is None
        assert await broker.mqtt_login("", token_of(broker, "zoe", exp=1), "w") is None
        assert await broker.mqtt_login("", token_of(broker, "zoe")[:-4] + b"AAAA", "v") is None
        assert await broker.stomp_login("jwt", token_of(broker, "zoe").decode()) is not None
        assert await broker.mqtt_login("ann", PASSWORD.format("ann").encode(), "u") is not None


async def test_a_withdrawn_key_ends_logins_after_a_reload(tmp_path: Path) -> None:
    async with with_tokens(tmp_path) as broker:
        signed = token_of(broker, "zoe")
        assert await broker.mqtt_login("", signed, "a") is not None
        (tmp_path / "jwks.json").write_text(json.dumps({"keys": [jwk("r")]}))
        await trio.to_thread.run_sync(broker.plugin.martlet_reload)
        assert await broker.mqtt_login("", signed, "b") is None


@pytest.mark.parametrize("is_valid", [True, False])
async def test_oauthbearer_is_a_method_of_mqtt_5(tmp_path: Path, is_valid: bool) -> None:
    from tests.wire_clients.mqtt import MqttClient

    from martlet_mqtt.wire.properties import Properties, Property

    async with with_tokens(tmp_path) as broker:
        signed = token_of(broker, "zoe", groups=["staff"]) if is_valid else b"eyJ.x.y"
        message = b"n,a=zoe,\x01auth=Bearer " + signed + b"\x01\x01"
        talk = MqttClient(broker.running.connect(broker.ports["mqtt"]), V5)
        properties: dict[Property, Any] = {
            Property.AUTHENTICATION_METHOD: "OAUTHBEARER",
            Property.AUTHENTICATION_DATA: message,
        }
        await talk.send(Connect("z", V5, True, properties=Properties(properties)))
        answer = await talk.receive()
        assert isinstance(answer, Connack)
        if is_valid:
            assert answer.reason == ReasonCode.SUCCESS
            assert await broker.mqtt_publish(talk, "s/1")
        else:
            assert answer.reason == ReasonCode.NOT_AUTHORIZED


async def test_while_it_observes_a_wrong_token_is_noted(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, observe=True) as broker:
        for number, password in enumerate((token_of(broker, "zoe", exp=1), token_of(broker, "zoe")[:-4] + b"AAAA")):
            assert await broker.mqtt_login("zoe", password, f"c{number}") is not None
        assert {each.action for each in broker.plugin.observations.report()} == {"login"}
        assert broker.plugin.observations.count == 2


async def test_while_it_observes_the_token_of_a_disabled_user_is_noted(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, observe=True) as broker:
        assert await broker.mqtt_login("", token_of(broker, "eve")) is not None
        assert [each.reason for each in broker.plugin.observations.report()] == ["user 'eve' is disabled"]
