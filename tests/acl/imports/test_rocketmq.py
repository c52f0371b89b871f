"""Accounts of RocketMQ's ACL 1.0."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.contracts import Identity, Question
from martlet_acl.imports import yaml_nodes
from martlet_acl.imports.findings import ImportedUser
from martlet_acl.imports.rocketmq import read_plain_acl
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.rules import parse_rule

# As RocketMQ's distribution has it (distribution/conf/plain_acl.yml).
EXAMPLE = """\
globalWhiteRemoteAddresses:
  - 10.10.103.*
accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC=SUB
    groupPerms:
      - groupA=DENY
  - accessKey: rocketmq2
    secretKey: 12345678
    whiteRemoteAddress: 192.168.1.*
    admin: true
"""


def test_accounts_become_users_with_access_keys() -> None:
    imported = read_plain_acl(EXAMPLE)
    assert imported.users == {
        "RocketMQ": ImportedUser("RocketMQ", secret="12345678"),
        "rocketmq2": ImportedUser("rocketmq2", administrator=True, secret="12345678"),
    }
    assert "12345678" not in str(imported)


def test_permissions_become_rules() -> None:
    assert [
        f"{each.level}: {each.rule.decision} {','.join(each.rule.actions)} on {each.rule.resource}"
        for each in read_plain_acl(EXAMPLE).rules
    ] == [
        "default: deny all on topic:*",
        "default: allow subscribe on group:*",
        "custom: deny all on topic:topicA",
        "custom: allow publish,subscribe on topic:topicB",
        "custom: allow subscribe on topic:topicC",
        "default: deny publish on topic:topicC",
        "custom: deny all on group:groupA",
    ]


def test_addresses_without_signatures_are_named() -> None:
    first, second, *general = read_plain_acl(EXAMPLE).remarks
    assert first.startswith("line 2: requests from '10.10.103.*' need no signature in RocketMQ")
    assert second.startswith("line 18: requests from '192.168.1.*'")
    assert [remark.split(";")[0] for remark in general] == [
        "RocketMQ lets every account publish to RMQ_SYS_TRACE_TOPIC",
        "RocketMQ checks only sends, pulls, heartbeats and offsets of accounts",
    ]


def account(more: str) -> str:
    return f"accounts:\n- accessKey: a\n  secretKey: 12345678\n  {more}\n"


@pytest.mark.parametrize(
    ("source", "remark", "users"),
    [
        (account("topicPerms: [a]"), "line 4: 'a' is no permission; write topic=PUB", 0),
        (account("topicPerms: a=PUB"), "line 4: it is no list; account 'a' is not imported", 0),
        (account("topicPerms: [[a]]"), "line 4: it is no text; account 'a' is not imported", 0),
        (account("topicPerms: ['a*=PUB']"), "line 4: no topic has the name 'a*'", 1),
        (account("groupPerms: [a=ALL]"), "line 4: permission 'ALL' is unknown; as in RocketMQ, it is DENY", 1),
        (account("speed: 1"), "line 4: 'speed' of account 'a' is unknown", 1),
        ("accounts:\n- accessKey: a", "line 2: the account has no accessKey or no secretKey", 0),
        ("accounts:\n- accessKey: a\n  secretKey: x", "line 2: secret of user 'a': the secret has 1 char", 1),
        ("colour: red", "line 1: 'colour' is unknown", 0),
    ],
)
def test_what_cannot_be_imported_is_named(source: str, remark: str, users: int) -> None:
    imported = read_plain_acl(source)
    assert len(imported.users) == users
    assert any(each.startswith(remark) for each in imported.remarks), imported.remarks
    if not users:
        assert imported.rules == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a: [", "line 1: it is no YAML"),
        ("- x", "line 1: it is no mapping"),
        ("accounts: 5", "line 1: it is no list"),
        ("a: !!python/object:x {}\n\tb: 1", "it is no YAML"),
        ("[" * 5000, "it is no YAML"),
        ("x" * ((16 << 20) + 1), "characters"),
    ],
)
def test_a_file_of_another_form_is_refused(source: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        read_plain_acl(source)


def test_an_account_of_another_file_counts() -> None:
    imported = read_plain_acl(account("admin: true"), known=["a"])
    assert imported.users == {}
    assert imported.remarks == ["line 2: account 'a' is in another file already, which counts"]


def test_the_first_of_two_accounts_counts() -> None:
    again = account("defaultTopicPerm: PUB").removeprefix("accounts:\n")
    imported = read_plain_acl(account("admin: true") + again)
    assert imported.users["a"].administrator
    assert imported.rules == []
    assert imported.remarks == ["line 5: user 'a' is there already; only the first one is imported"]


def test_a_cycle_of_aliases_ends() -> None:
    node = yaml_nodes.parse_yaml("a: &x [*x, *x, b]")
    [(_, items)] = node.fields()
    assert [each.line for each in items.items()] == [1, 1, 1]


def test_an_empty_file_has_nothing() -> None:
    imported = read_plain_acl("")
    assert (imported.users, imported.rules, imported.remarks) == ({}, [], [])


WORDS = ("DENY", "PUB", "SUB", "PUB|SUB", "SUB|PUB")
permissions = st.dictionaries(st.sampled_from(["t1", "t2"]), st.sampled_from(WORDS), max_size=2)


@given(permissions, st.sampled_from(["", *WORDS]))
def test_rules_decide_as_acl_1(listed: dict[str, str], default: str) -> None:
    """An explicit permission counts alone; without one the default does; without that nothing is allowed."""
    items = ", ".join(f"{topic}={words}" for topic, words in listed.items())
    imported = read_plain_acl(account(f"topicPerms: [{items}]\n  defaultTopicPerm: {default}"))
    policies = Policies()
    for each in imported.rules:
        policies.put_rule(each.subject, each.level, parse_rule(each.rule))
    for topic, (action, word) in itertools.product(("t1", "t2", "t3"), (("publish", "PUB"), ("subscribe", "SUB"))):
        wanted = word in listed.get(topic, default or "DENY").split("|")
        verdict = policies.decide(Question(Identity("a"), action, "topic", topic))  # type: ignore[arg-type]
        assert (verdict is not None and verdict.allowed) == wanted
