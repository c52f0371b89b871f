"""Requests 50 and 51: tools of ACL 1.0 manage accounts, which are users with access keys."""

import pytest

from martlet.contracts import AccessControl, AccessRule, AccessUser, UserKey
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .access_control import FakeAccessControl, show_in_slices_only
from .conftest import FakeClient, Harness
from .test_acls import of

UPDATE, DELETE = RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, RequestCode.DELETE_ACL_CONFIG
NOT_UPDATED, NOT_DELETED = 209, 210
ALICE = {"accessKey": "alice", "secretKey": "a secret", "admin": "false"}


@pytest.fixture
def control(harness: Harness) -> FakeAccessControl:
    """Access control whose only user is the administrator *root*."""
    found = FakeAccessControl("root")
    harness.broker.capabilities[AccessControl] = found
    return found


@pytest.fixture
def client(harness: Harness, control: FakeAccessControl) -> FakeClient:
    return of(harness, "root")


async def test_an_account_becomes_a_user_with_an_access_key(client: FakeClient, control: FakeAccessControl) -> None:
    lists = {"topicPerms": "a=DENY,b=PUB|SUB, c = SUB", "groupPerms": "g=SUB|PUB"}
    defaults = {"defaultTopicPerm": "DENY", "defaultGroupPerm": "SUB"}
    assert (await client.ask(UPDATE, {**ALICE, **lists, **defaults})).code == ResponseCode.SUCCESS
    assert control.users["alice"] == AccessUser("alice", keys=(UserKey("alice"),))
    assert (control.secrets["alice"], control.passwords) == (b"a secret", {})
    both = ("publish", "subscribe")
    assert control.policies["user:alice"].custom == (
        AccessRule("topic:a", ("all",), "deny"),
        AccessRule("topic:b", both, "allow"),
        AccessRule("topic:c", ("subscribe",), "allow"),
        AccessRule("group:g", both, "allow"),
    )
    assert control.policies["user:alice"].default == (
        AccessRule("topic:c", ("publish",), "deny"),
        AccessRule("topic:*", ("all",), "deny"),
        AccessRule("group:*", ("subscribe",), "allow"),
    )


async def test_a_list_is_replaced_as_a_whole_and_what_is_missing_stays(
    client: FakeClient, control: FakeAccessControl
) -> None:
    await client.ask(UPDATE, {**ALICE, "topicPerms": "a=PUB,b=PUB", "groupPerms": "g=SUB"})
    await client.ask(UPDATE, {"accessKey": "alice", "topicPerms": "b=SUB,c=SUB"})
    rules = {rule.resource: rule.actions for rule in control.policies["user:alice"].custom}
    assert rules == {"topic:b": ("subscribe",), "topic:c": ("subscribe",), "group:g": ("subscribe",)}
    assert control.secrets["alice"] == b"a secret"


async def test_very_many_rules_of_an_account_are_looked_at_in_slices(
    client: FakeClient, control: FakeAccessControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_in_slices_only(monkeypatch)
    for perms in ("a=PUB", "b=PUB"):
        assert (await client.ask(UPDATE, {**ALICE, "topicPerms": perms})).code == ResponseCode.SUCCESS
    assert [rule.resource for rule in control.policies["user:alice"].custom] == ["topic:b"]


async def test_a_permission_replaces_the_default_as_a_whole(client: FakeClient, control: FakeAccessControl) -> None:
    await client.ask(UPDATE, {**ALICE, "topicPerms": "a=PUB,b=SUB", "defaultTopicPerm": "PUB|SUB"})
    both = ("publish", "subscribe")
    assert list(control.policies["user:alice"].default) == [
        AccessRule("topic:a", ("subscribe",), "deny"),
        AccessRule("topic:b", ("publish",), "deny"),
        AccessRule("topic:*", both, "allow"),
    ]
    await client.ask(UPDATE, {"accessKey": "alice", "topicPerms": "a=PUB|SUB"})
    policy = control.policies["user:alice"]
    assert policy.custom == (AccessRule("topic:a", both, "allow"),)
    assert policy.default == (AccessRule("topic:*", both, "allow"),)


async def test_administrators_are_made_by_administrators(
    harness: Harness, client: FakeClient, control: FakeAccessControl
) -> None:
    refused = await of(harness, "other").ask(UPDATE, {**ALICE, "admin": "true"})
    assert refused.code == NOT_UPDATED
    assert "only an administrator" in str(refused.remark)
    await client.ask(UPDATE, {**ALICE, "admin": "true"})
    assert control.users["alice"].administrator
    assert (await of(harness, "other").ask(DELETE, {"accessKey": "alice"})).code == NOT_DELETED
    assert (await client.ask(DELETE, {"accessKey": "alice"})).code == ResponseCode.SUCCESS
    assert list(control.users) == ["root"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"whiteRemoteAddress": "10.0.0.*"}, "would let addresses in without a signature"),
        ({"secretKey": ""}, "is new and has no secretKey"),
        ({"secretKey": "x"}, "the secret is too short"),
        ({"topicPerms": "a"}, "topicPerms has 'a'; write NAME=PUB"),
        ({"topicPerms": "*=PUB"}, "topicPerms has '*=PUB'"),
        ({"topicPerms": "{user}=PUB"}, "topicPerms has '{user}=PUB'"),
        ({"groupPerms": "g=ALL"}, "permission 'ALL' of group:g is unknown"),
        ({"defaultTopicPerm": "PUB|DENY"}, "permission 'PUB|DENY' of topic:* is unknown"),
    ],
)
async def test_what_no_user_can_have_is_refused(
    client: FakeClient, control: FakeAccessControl, more: dict[str, str], text: str
) -> None:
    answer = await client.ask(UPDATE, {**ALICE, **more})
    assert answer.code == NOT_UPDATED
    assert text in str(answer.remark)
    assert (list(control.users), control.policies) == (["root"], {})


async def test_an_unknown_account_cannot_be_deleted(client: FakeClient) -> None:
    answer = await client.ask(DELETE, {"accessKey": "nobody"})
    assert answer.code == NOT_DELETED
    assert "accesskey[nobody]" in str(answer.remark)
