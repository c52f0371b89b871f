"""The stored form: what is wrong in it is refused with its place."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.acl.policy.worlds import decoded, filled, worlds

from martlet_acl.policy import reading as module
from martlet_acl.policy.document import (
    PolicyDocument,
    StoredPolicies,
    StoredUser,
    document_of,
)
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import StoredRule

RULE = b'{"resource": "topic:a", "actions": ["get"], "decision": "allow"}'


def test_a_document_says_all_of_it() -> None:
    document = decoded(
        b"""{
        "users": {"alice": {"groups": ["shop"]}, "root": {"administrator": true}, "bob": {"disabled": true}},
        "groups": {"shop": ["staff"]},
        "quotas": {"user:alice": {"messages_in": 10, "refuses": true}, "everybody": {"connections": 3}, "user:bob": {}},
        "rules": {
            "user:alice": {"custom": [
                {"resource": "topic:orders*", "actions": ["publish"], "decision": "allow", "networks": ["10.0.0.0/8"]}
            ]},
            "everybody": {"default": [{"resource": "*", "actions": ["get", "list"], "decision": "allow"}]}
        }}"""
    )
    assert document == PolicyDocument(
        {
            "alice": StoredUser(("shop",)),
            "root": StoredUser(administrator=True),
            "bob": StoredUser(disabled=True),
        },
        {"shop": ("staff",)},
        {
            "user:alice": StoredPolicies((StoredRule("topic:orders*", ("publish",), "allow", ("10.0.0.0/8",)),)),
            "everybody": StoredPolicies(default=(StoredRule("*", ("get", "list"), "allow"),)),
        },
        quotas={
            "user:alice": StoredQuota(messages_in=10, refuses=True),
            "everybody": StoredQuota(connections=3),
            "user:bob": StoredQuota(),
        },
    )
    assert document_of(filled(document)) == document
    assert document_of(filled(decoded(b"{}"))) == PolicyDocument()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", r"Input data was truncated"),
        (b"[]", r"Expected `object`, got `array`"),
        (b'{"user": {}}', r"^Object contains unknown field `user`"),
        (b'{"users": []}', r"^users: Expected `object`, got `array`"),
        (b'{"users": {"alice": {"group": []}}}', r"^user alice: Object contains unknown field `group`"),
        (b'{"users": {"alice": {"groups": [1]}}}', r"^user alice, groups, number 1: Expected `str`, got `int`"),
        (b'{"users": {"": {}}}', r"^user : a user has an empty name"),
        (b'{"users": {"a": {"groups": [""]}}}', r"^user a: a group has an empty name"),
        (b'{"groups": {"a": "b"}}', r"^group a: Expected `array`, got `str`"),
        (b'{"groups": {"a": ["b"], "b": ["a"]}}', r"^group a: group 'a' is in itself: a in b in a"),
        (b'{"quotas": {"alice": {}}}', r"^quota of alice: subject 'alice' is unknown; write user:NAME"),
        (b'{"quotas": {"group:": {}}}', r"^quota of group : a group has an empty name"),
        (
            b'{"quotas": {"user:a": {"messages": 1}}}',
            r"^quota of user a: Object contains unknown field `messages`",
        ),
        (b'{"quotas": {"group:g": {"group": "h"}}}', r"^quota of group g: Object contains unknown field `group`"),
        (b'{"quotas": {"everybody": 7}}', r"^quota of everybody: Expected `object`, got `int`"),
        (b'{"quotas": {"anonymous": {"bytes_in": -1}}}', r"^quota of anonymous, bytes_in: Expected `int` >= 0"),
        (b'{"quotas": {"anonymous": {"bytes_in": 1.5}}}', r"^quota of anonymous, bytes_in: Expected `int`, got `flo"),
        (b'{"quotas": {"anonymous": {"bytes_in": true}}}', r"^quota of anonymous, bytes_in: Expected `int`, got `boo"),
        (
            b'{"quotas": {"user:a": {"bytes_out": 1125899906842625}}}',
            r"^quota of user a, bytes_out: Expected `int` <= ",
        ),
        (b'{"quotas": {"user:a": {"refuses": 1}}}', r"^quota of user a, refuses: Expected `bool`, got `int`"),
        (
            b'{"rules": {"alice": {"custom": [%b]}}}' % RULE,
            r"^rules of alice, custom rule 1: subject 'alice' is unknown",
        ),
        (
            b'{"rules": {"user:a:b": {"custom": [1]}}}',
            r"^rules of user a:b, custom rule 1: Expected `object`, got `int`",
        ),
        (b'{"rules": {"everybody": {"Custom": []}}}', r"^rules of everybody: Object contains unknown field `Custom`"),
        (
            b'{"rules": {"everybody": {"default": [%b, {"resource": "*", "actions": ["get"]}]}}}' % RULE,
            r"^rules of everybody, default rule 2: Object missing required field `decision`",
        ),
        (
            b'{"rules": {"everybody": {"custom": [{"resource": "*", "actions": "all", "decision": "deny"}]}}}',
            r"^rules of everybody, custom rule 1, actions: Expected `array`, got `str`",
        ),
        (
            b'{"rules": {"everybody": {"custom": [{"resource": "*", "actions": [], "decision": "deny", "ips": []}]}}}',
            r"^rules of everybody, custom rule 1: Object contains unknown field `ips`",
        ),
        (
            b'{"rules": {"group:g": {"custom": [%b, {"resource": "*", "actions": ["read"], "decision": "deny"}]}}}'
            % RULE,
            r"^rules of group g, custom rule 2, actions: action 'read' is unknown",
        ),
        (
            b'{"rules": {"group:g": {"custom": [%b, %b]}}}' % (RULE, RULE),
            r"^rules of group g, custom rule 2, resource: there is another rule about 'topic:a'",
        ),
        (
            b'{"rules": {"anonymous": {"custom": [%b]}}}' % RULE.replace(b":a", b":{user}"),
            r"^rules of anonymous, custom rule 1: resource 'topic:\{user\}' has \{user\}, but anonymous",
        ),
        (b"[" * 100_000, r"Expected `object`|nested too deep"),
        (b'{"users": {"a": {"groups": ' + b"[" * 100_000, r"nested too deep"),
        (b'{"users": {"a\xff": {}}}', r"Invalid UTF-8|codec"),
        (b'{"users": {"\\ud800": {}}}', r"(?i)surrogate|utf-16|truncated"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(data: bytes, error: str) -> None:
    with pytest.raises(PolicyError, match=error):
        filled(decoded(data))


def test_an_error_is_one_line_whatever_the_names_are() -> None:
    with pytest.raises(PolicyError) as caught:
        decoded(rb'{"users": {"a\u001b[2J\nb": 5}}')
    assert str(caught.value) == r"user a\x1b[2J\nb: Expected `object`, got `int`"


def test_a_document_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 3)
    with pytest.raises(PolicyError, match="4 bytes are too many; 3 are allowed"):
        decoded(b"{  }")


@given(worlds(), st.data())
def test_a_damaged_document_is_another_one_or_refused(world: object, data: st.DataObject) -> None:
    assert isinstance(world, tuple)
    text = bytearray(msgspec.json.encode(world[0]))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=2))
    try:
        policies = filled(decoded(bytes(text)))
    except PolicyError:
        return
    document = document_of(policies)
    assert document_of(filled(document)) == document


@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    (
                        "users",
                        "groups",
                        "quotas",
                        "messages_in",
                        "refuses",
                        "rules",
                        "custom",
                        "default",
                        "resource",
                        "actions",
                        "decision",
                        "user:a",
                        "everybody",
                    )
                ),
                inner,
                max_size=3,
            )
        ),
    ).map(msgspec.json.encode)
)
def test_any_bytes_are_a_document_or_refused(data: bytes) -> None:
    try:
        policies = filled(decoded(data))
    except PolicyError:
        return
    document = document_of(policies)
    assert document_of(filled(document)) == document
