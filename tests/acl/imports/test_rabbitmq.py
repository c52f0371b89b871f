"""RabbitMQ's exported definitions."""

import hashlib
import json
from base64 import b64encode
from typing import Any

import pytest

from martlet.contracts import Action, Identity, Question, ResourceKind
from martlet_acl.imports.findings import Imported
from martlet_acl.imports.rabbitmq import read_definitions
from martlet_acl.passwords import parse_verifier
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.rules import parse_rule

SHA256, SHA512 = "rabbit_password_hashing_sha256", "rabbit_password_hashing_sha512"


def read(**definitions: Any) -> Imported:
    return read_definitions(json.dumps({"rabbit_version": "3.10.8", "vhosts": [{"name": "/"}], **definitions}).encode())


def permission(configure: str, write: str, read: str, user: str = "u", vhost: str = "/") -> dict[str, str]:
    return {"user": user, "vhost": vhost, "configure": configure, "write": write, "read": read}


def keys(write: str, read: str, exchange: str = "amq.topic") -> dict[str, str]:
    return {"user": "u", "vhost": "/", "exchange": exchange, "write": write, "read": read}


def rules_of(imported: Imported) -> list[str]:
    return [
        f"{each.level}: {each.rule.decision} {','.join(each.rule.actions)} on {each.rule.resource}"
        for each in imported.rules
    ]


def may(imported: Imported, action: Action, kind: ResourceKind, name: str) -> bool:
    """As the core asks: about a name in a topic only after the topic."""
    policies = Policies()
    for each in imported.rules:
        policies.put_rule(each.subject, each.level, parse_rule(each.rule))

    def opinion(kind: ResourceKind, name: str) -> bool | None:
        verdict = policies.decide(Question(Identity("u"), action, kind, name))
        return None if verdict is None else verdict.allowed

    if kind == "name":
        of_topic = opinion("topic", name.partition("/")[0])
        if of_topic is False:
            return False
        of_name = opinion(kind, name)
        return of_topic is True if of_name is None else of_name
    return opinion(kind, name) is True


# users


@pytest.mark.parametrize(("algorithm", "function"), [(SHA256, hashlib.sha256), (SHA512, hashlib.sha512)])
def test_hashed_passwords_are_kept(algorithm: str, function: Any) -> None:
    salt = b"\x90\x8d\xc6\x0a"  # as in RabbitMQ's guide on passwords
    hashed = b64encode(salt + function(salt + b"test12").digest()).decode()
    user = {"name": "u", "password_hash": hashed, "hashing_algorithm": algorithm, "tags": ["management"], "limits": {}}
    imported = read(users=[user])
    assert parse_verifier(imported.users["u"].password).accepts(b"test12")
    assert imported.remarks == [
        "RabbitMQ's hashes of passwords are weak, one round of SHA-2: let users set their passwords anew"
    ]


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"password_hash": "AAAA", "hashing_algorithm": "md5"}, "user 'u': the hash 'md5' of the password is unknown"),
        ({"password_hash": "AAAA"}, "user 'u': the hash 'without a name' of the password is unknown"),
        ({"password_hash": "?", "hashing_algorithm": SHA256}, "user 'u': the hash of the password is no base64"),
        ({"password_hash": "AAAA", "hashing_algorithm": SHA256}, "user 'u': the hash of the password has 3 bytes"),
        ({"tags": "administrator"}, "user 'u': the tag administrator is not imported"),
        ({"limits": {"max-channels": 3}}, "user 'u': max-channels 3 is not imported; there are no channels here"),
    ],
)
def test_what_a_user_loses_is_named(fields: dict[str, Any], remark: str) -> None:
    imported = read(users=[{"name": "u", **fields}])
    assert imported.remarks[0].startswith(remark)
    assert (imported.users["u"].password, imported.users["u"].administrator) == ("", False)


@pytest.mark.parametrize(
    ("limits", "connections"),
    [({}, 0), ([], 0), ({"max-connections": 10}, 10), ({"max-connections": -1, "max-channels": -1}, 0)],
)
def test_the_connections_of_a_user_are_limited_as_before(limits: Any, connections: int) -> None:
    imported = read(users=[{"name": "u", "limits": limits}])
    assert imported.remarks == []
    assert imported.users["u"].connections == connections


def test_who_may_not_connect_at_all_gets_no_password() -> None:
    user = {"name": "u", "password_hash": b64encode(bytes(36)).decode(), "hashing_algorithm": SHA256}
    assert read(users=[user]).users["u"].password
    imported = read(users=[{**user, "limits": {"max-connections": 0}}])
    assert not imported.users["u"].password
    assert imported.remarks == [
        "user 'u': max-connections is 0, so the user may not connect; the password is not imported"
    ]


# rules


def test_who_may_do_everything_in_a_virtual_host_may_use_all_topics() -> None:
    imported = read(permissions=[permission(".*", ".*", ".*")])
    assert rules_of(imported) == [
        "custom: allow publish,subscribe,create,update,delete on topic:*",
        "custom: allow publish,subscribe on name:mqtt/#",
        "custom: allow subscribe on shared:stomp/queue",
        "custom: allow subscribe on shared:stomp/topic/*",
        "custom: allow subscribe on shared:mqtt/*",
    ]


def test_names_are_encoded_as_stomps_destinations() -> None:
    imported = read(permissions=[permission(r"^app\.", r"^app\.(a|b)$", r"^größe$")])
    assert rules_of(imported)[:4] == [
        "custom: allow create,update,delete on topic:app%2E*",
        "custom: allow publish on topic:app%2Ea",
        "custom: allow publish on topic:app%2Eb",
        "custom: allow subscribe on topic:gr%C3%B6%C3%9Fe",
    ]


def test_the_default_exchange_leads_to_queues_that_the_user_may_declare() -> None:
    imported = read(permissions=[permission("^jobs-.*", r"^amq\.default$", "")])
    assert rules_of(imported) == ["custom: allow publish,create,update,delete on topic:jobs-*"]


def test_names_of_mqtt_have_the_permissions_for_amq_topic() -> None:
    of_keys = keys(r"^sensors\.{username}\..*|^status$", ".*")
    imported = read(permissions=[permission("", r"^amq\.topic$", r"^amq\.topic$")], topic_permissions=[of_keys])
    for name, wanted in (("sensors/u/a", True), ("sensors/v/a", False), ("status", True), ("status/x", False)):
        assert may(imported, "publish", "name", f"mqtt/{name}") == wanted
        assert may(imported, "subscribe", "name", f"mqtt/{name}")
    assert not may(imported, "publish", "topic", "orders")


@pytest.mark.parametrize(("write", "names"), [(r"^sensors\..*", ["mqtt/sensors/a"]), ("", [])])
def test_a_permission_for_all_topics_is_none_for_other_keys(write: str, names: list[str]) -> None:
    imported = read(permissions=[permission("", ".*", ".*")], topic_permissions=[keys(write, "")])
    assert may(imported, "publish", "topic", "orders")
    for name in ("mqtt/sensors/a", "mqtt/other"):
        assert may(imported, "publish", "name", name) == (name in names)
        assert not may(imported, "subscribe", "name", name)


@pytest.mark.parametrize("expression", ["^m.*", "^mqtt.*"])
def test_a_permission_for_names_like_the_topic_of_mqtt_is_none_for_its_names(expression: str) -> None:
    imported = read(permissions=[permission("", expression, "")])
    assert may(imported, "publish", "topic", "mqtt-orders")
    assert not may(imported, "publish", "name", "mqtt/home")
    assert not may(imported, "publish", "topic", "mqtt")


@pytest.mark.parametrize(
    ("definitions", "remark"),
    [
        (
            {"permissions": [permission("", "^[a-z]+$", "")]},
            "permission 1, write '^[a-z]+$': rules cannot say '[a-z]+$' of an expression; it is not imported",
        ),
        (
            {"permissions": [permission("", "orders", "")]},
            "permission 1, write 'orders': without ^ it also matches inside names",
        ),
        (
            {"permissions": [permission("", "", "", vhost="other")]},
            "permission 1: user 'u' has it in the virtual host 'other'",
        ),
        (
            {"permissions": [permission("", "", "^mqtt$")]},
            "permission 1: the topic 'mqtt' has the names of MQTT",
        ),
        (
            {"topic_permissions": [keys(".*", ".*", exchange="logs")]},
            "topic permission 1: user 'u' has it for the exchange 'logs'",
        ),
        (
            {
                "permissions": [permission("", r"^amq\.topic$", "")],
                "topic_permissions": [keys("^{client_id}", "")],
            },
            "permission 1, topic write: keys like '{client_id}' cannot be said",
        ),
    ],
)
def test_what_cannot_be_said_is_named(definitions: dict[str, Any], remark: str) -> None:
    imported = read(**definitions)
    assert any(each.startswith(remark) for each in imported.remarks), imported.remarks


@pytest.mark.parametrize("source", [b"", b"[]", b'{"users": [{"name": 1}]}', b"\xff", b"[" * 100_000])
def test_a_file_of_another_form_is_refused(source: bytes) -> None:
    with pytest.raises(PolicyError, match="it is no file of definitions"):
        read_definitions(source)
