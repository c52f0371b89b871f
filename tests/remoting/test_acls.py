"""Requests 3001 to 3010: RocketMQ's tools manage users and rules."""

from collections.abc import Mapping

import orjson
import pytest

from martlet.contracts import AccessControl, AccessPolicy, AccessRule, AccessUser, Identity, UserKey
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .access_control import FakeAccessControl, show_in_slices_only
from .conftest import NO_HEADER, FakeClient, Harness

RULE = {"resource": "Topic:orders*", "actions": ["Pub", "Get"], "sourceIps": ["10.0.0.0/8"], "decision": "Allow"}
CREATE, UPDATE = RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_UPDATE_USER


@pytest.fixture
def control(harness: Harness) -> FakeAccessControl:
    """Access control whose only user is the administrator *root*."""
    found = FakeAccessControl("root")
    harness.broker.capabilities[AccessControl] = found
    return found


@pytest.fixture
def client(harness: Harness, control: FakeAccessControl) -> FakeClient:
    return of(harness, "root")


def of(harness: Harness, name: str) -> FakeClient:
    """Return a client that has proved to be *name*."""
    found = harness.client()
    found.handler.context.own_gate = harness.broker.gate(Identity(name), found.peer.login_origin())
    return found


async def send(client: FakeClient, code: int, body: object = None, **ext: str) -> Command:
    return await client.ask(code, ext or NO_HEADER, b"" if body is None else orjson.dumps(body))


async def put(client: FakeClient, subject: str, *entries: Mapping[str, object], level: str = "Custom") -> Command:
    body = {"subject": subject, "policies": [{"policyType": level, "entries": list(entries)}]}
    return await send(client, RequestCode.AUTH_CREATE_ACL, body, subject=subject)


# users


async def test_a_user_is_created_with_one_password_for_everything(
    client: FakeClient, control: FakeAccessControl
) -> None:
    body = {"username": "alice", "password": "a password", "userType": None}
    assert (await send(client, CREATE, body, username="alice")).code == ResponseCode.SUCCESS
    assert control.users["alice"] == AccessUser("alice", has_password=True, keys=(UserKey("alice"),))
    assert (control.passwords["alice"], control.secrets["alice"]) == (b"a password", b"a password")


@pytest.mark.parametrize(("words", "administrator"), [("Super", True), ("super", True), ("Normal", False)])
async def test_types_are_compared_without_case(
    client: FakeClient, control: FakeAccessControl, words: str, administrator: bool
) -> None:
    await send(client, CREATE, {"password": "a password", "userType": words}, username="alice")
    assert control.users["alice"].administrator is administrator


async def test_an_update_changes_only_what_it_names(client: FakeClient, control: FakeAccessControl) -> None:
    await send(client, CREATE, {"password": "a password"}, username="alice")
    assert (await send(client, UPDATE, {"userStatus": "disable"}, username="alice")).code == ResponseCode.SUCCESS
    assert (control.users["alice"].disabled, control.secrets["alice"]) == (True, b"a password")
    await send(client, UPDATE, {"password": "another one", "userStatus": "enable"}, username="alice")
    assert (control.users["alice"].disabled, control.secrets["alice"]) == (False, b"another one")


async def test_no_answer_contains_a_password(client: FakeClient) -> None:
    await send(client, CREATE, {"password": "a password"}, username="alice")
    user = {"username": "alice", "password": "", "userType": "Normal", "userStatus": "enable"}
    found = await send(client, RequestCode.AUTH_GET_USER, username="alice")
    assert orjson.loads(found.body) == user
    listed = await send(client, RequestCode.AUTH_LIST_USER, filter="lic")
    assert orjson.loads(listed.body) == [user]
    everybody = await send(client, RequestCode.AUTH_LIST_USER)
    assert [each["username"] for each in orjson.loads(everybody.body)] == ["alice", "root"]


async def test_what_does_not_exist_is_an_answer_without_body(client: FakeClient) -> None:
    for code, ext in (
        (RequestCode.AUTH_GET_USER, {"username": "nobody"}),
        (RequestCode.AUTH_LIST_USER, {"filter": "nobody"}),
        (RequestCode.AUTH_GET_ACL, {"subject": "User:root"}),
        (RequestCode.AUTH_LIST_ACL, {}),
        (RequestCode.AUTH_DELETE_USER, {"username": "nobody"}),
    ):
        answer = await send(client, code, **ext)
        assert (answer.code, answer.body) == (ResponseCode.SUCCESS, b"")


async def test_a_user_is_deleted_with_its_rules(client: FakeClient, control: FakeAccessControl) -> None:
    await send(client, CREATE, {"password": "a password"}, username="alice")
    await put(client, "User:alice", RULE)
    assert (await send(client, RequestCode.AUTH_DELETE_USER, username="alice")).code == ResponseCode.SUCCESS
    assert (list(control.users), control.policies) == (["root"], {})


@pytest.mark.parametrize(
    ("code", "ext", "body", "answered", "text"),
    [
        (CREATE, {}, {"password": "a password"}, ResponseCode.INVALID_PARAMETER, "The username is blank"),
        (CREATE, {"username": " "}, {"password": "x"}, ResponseCode.NO_PERMISSION, "username can not be blank"),
        (CREATE, {"username": "alice"}, {}, ResponseCode.NO_PERMISSION, "password can not be blank"),
        (CREATE, {"username": "alice"}, {"password": " "}, ResponseCode.NO_PERMISSION, "password can not be blank"),
        (CREATE, {"username": "alice"}, {"password": "x"}, ResponseCode.INVALID_PARAMETER, "the secret is too short"),
        (CREATE, {"username": "root"}, {"password": "xxxx"}, ResponseCode.NO_PERMISSION, "The user is existed; "),
        (
            CREATE,
            {"username": "alice"},
            {"password": "xxxx", "userType": "Supr"},
            ResponseCode.NO_PERMISSION,
            "userType 'Supr' is unknown; write super or normal",
        ),
        (CREATE, {"username": "alice"}, None, ResponseCode.SYSTEM_ERROR, "cannot be read"),
        (UPDATE, {"username": "alice"}, {"password": "x"}, ResponseCode.NO_PERMISSION, "The user is not exist; "),
        (
            UPDATE,
            {"username": "root"},
            {"userStatus": "off"},
            ResponseCode.NO_PERMISSION,
            "userStatus 'off' is unknown",
        ),
        (RequestCode.AUTH_DELETE_USER, {}, None, ResponseCode.NO_PERMISSION, "username can not be blank"),
        (RequestCode.AUTH_GET_USER, {}, None, ResponseCode.INVALID_PARAMETER, "The username is blank"),
    ],
)
async def test_refusals_about_users_have_rocketmqs_codes_and_texts(
    client: FakeClient, code: int, ext: dict[str, str], body: object, answered: int, text: str
) -> None:
    answer = await send(client, code, body, **ext)
    assert answer.code == answered
    assert text in str(answer.remark)


async def test_only_an_administrator_touches_administrators(harness: Harness, control: FakeAccessControl) -> None:
    other = of(harness, "other")
    create = await send(other, CREATE, {"password": "a password", "userType": "Super"}, username="alice")
    text = "The super user can only be create by super user; 'other' is no administrator"
    assert (create.code, create.remark) == (ResponseCode.SYSTEM_ERROR, text)
    await send(other, CREATE, {"password": "a password"}, username="alice")
    promote = await send(other, UPDATE, {"userType": "Super"}, username="alice")
    assert promote.code == ResponseCode.SYSTEM_ERROR
    assert str(promote.remark).startswith("The super user can only be update by super user")
    for code, body in ((UPDATE, {"password": "xxxx"}), (RequestCode.AUTH_DELETE_USER, None)):
        refused = await send(other, code, body, username="root")
        assert refused.code == ResponseCode.NO_PERMISSION
        assert str(refused.remark).startswith("The super user can only be update by super user")
    assert control.users["root"] == AccessUser("root", administrator=True)
    assert not control.users["alice"].administrator


# rules


async def test_rules_are_shown_as_they_were_sent(client: FakeClient, control: FakeAccessControl) -> None:
    assert (await put(client, "User:root", RULE)).code == ResponseCode.SUCCESS
    rule = AccessRule("topic:orders*", ("publish", "get"), "allow", ("10.0.0.0/8",))
    assert control.policies == {"user:root": AccessPolicy("user:root", custom=(rule,))}
    found = await send(client, RequestCode.AUTH_GET_ACL, subject="User:root")
    acl = {"subject": "User:root", "policies": [{"policyType": "Custom", "entries": [RULE]}]}
    assert orjson.loads(found.body) == acl
    listed = await send(client, RequestCode.AUTH_LIST_ACL)
    assert orjson.loads(listed.body) == [acl]


@pytest.mark.parametrize(
    ("shown", "resource", "shown_again"),
    [
        ("topic:a", "topic:a", "Topic:a"),
        ("Group:*", "group:*", "Group:*"),
        ("*", "*", "*"),
        ("Cluster:*", "cluster", "Cluster:*"),
        ("Cluster:DefaultCluster", "cluster", "Cluster:*"),
        ("CLUSTER:Def*", "cluster", "Cluster:*"),
        ("Name:mqtt/home/#", "name:mqtt/home/#", "Name:mqtt/home/#"),
        ("Shared:stomp/queue/a", "shared:stomp/queue/a", "Shared:stomp/queue/a"),
    ],
)
async def test_each_resource_has_a_name_of_rocketmqs_form(
    client: FakeClient, control: FakeAccessControl, shown: str, resource: str, shown_again: str
) -> None:
    await put(client, "User:root", {"resource": shown, "actions": ["ALL"], "decision": "DENY"})
    assert control.policies["user:root"].custom == (AccessRule(resource, ("all",), "deny"),)
    found = await send(client, RequestCode.AUTH_GET_ACL, subject="User:root")
    [entry] = orjson.loads(found.body)["policies"][0]["entries"]
    assert entry == {"resource": shown_again, "actions": ["All"], "decision": "Deny"}


@pytest.mark.parametrize(
    ("shown", "subject"), [("group:devs", "group:devs"), ("Everybody", "everybody"), ("ANONYMOUS", "anonymous")]
)
async def test_each_subject_has_a_name_of_rocketmqs_form(
    client: FakeClient, control: FakeAccessControl, shown: str, subject: str
) -> None:
    assert (await put(client, shown, RULE)).code == ResponseCode.SUCCESS
    assert list(control.policies) == [subject]
    listed = await send(client, RequestCode.AUTH_LIST_ACL)
    assert [acl["subject"] for acl in orjson.loads(listed.body)] == [subject.capitalize()]


async def test_both_policies_have_rules_of_their_own(client: FakeClient, control: FakeAccessControl) -> None:
    deny = {"resource": "Topic:orders*", "actions": ["All"], "decision": "Deny"}
    await put(client, "User:root", RULE)
    await put(client, "User:root", deny, level="default")
    found = await send(client, RequestCode.AUTH_GET_ACL, subject="User:root")
    levels = [(each["policyType"], each["entries"]) for each in orjson.loads(found.body)["policies"]]
    assert levels == [("Custom", [RULE]), ("Default", [deny])]
    only = {"subject": "User:root", "resource": "Topic:orders*"}
    await send(client, RequestCode.AUTH_DELETE_ACL, **only)
    assert (control.policies["user:root"].custom, len(control.policies["user:root"].default)) == ((), 1)
    await send(client, RequestCode.AUTH_DELETE_ACL, **only, policyType="Default")
    assert control.policies == {}


async def test_without_a_resource_all_rules_of_a_subject_are_deleted(
    client: FakeClient, control: FakeAccessControl
) -> None:
    await put(client, "User:root", RULE)
    await put(client, "User:root", RULE, level="Default")
    answer = await send(client, RequestCode.AUTH_DELETE_ACL, subject="User:root")
    assert (answer.code, control.policies) == (ResponseCode.SUCCESS, {})


async def test_very_many_rules_are_looked_at_in_slices(
    client: FakeClient, control: FakeAccessControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_in_slices_only(monkeypatch)
    await put(client, "User:root", RULE)
    for code in (RequestCode.AUTH_GET_ACL, RequestCode.AUTH_LIST_ACL, RequestCode.AUTH_DELETE_ACL):
        assert (await send(client, code, subject="User:root")).code == ResponseCode.SUCCESS
    assert control.policies == {}


async def test_rules_are_listed_by_parts_of_names(client: FakeClient) -> None:
    await put(client, "Group:devs", RULE)
    await put(client, "Everybody", RULE, {"resource": "Group:g", "actions": ["Sub"], "decision": "Allow"})
    by_subject = await send(client, RequestCode.AUTH_LIST_ACL, subjectFilter="Group:d")
    assert [acl["subject"] for acl in orjson.loads(by_subject.body)] == ["Group:devs"]
    by_resource = await send(client, RequestCode.AUTH_LIST_ACL, resourceFilter="Group:")
    [acl] = orjson.loads(by_resource.body)
    assert [entry["resource"] for entry in acl["policies"][0]["entries"]] == ["Group:g"]


ONE: dict[str, object] = {"resource": "Topic:a", "actions": ["Pub"], "decision": "Allow"}


@pytest.mark.parametrize(
    ("subject", "entries", "text"),
    [
        ("User:nobody", [ONE], "The subject of User:nobody is not exist."),
        ("Nobody", [ONE], "The subject is null"),
        ("User:", [ONE], "The subject is null"),
        ("User:root", [], "The policies is empty."),
        ("User:root", [{**ONE, "resource": ""}], "The resource is null"),
        ("User:root", [{**ONE, "resource": "Topc:a"}], "The resource is null"),
        ("User:root", [{**ONE, "resource": "Cluster:other"}], "this broker belongs to 'DefaultCluster'"),
        ("User:root", [{**ONE, "actions": []}], "The actions is empty."),
        ("User:root", [{**ONE, "actions": ["Pub", "Any"]}], "The actions can not be Any; write Pub, Sub"),
        ("User:root", [{**ONE, "actions": ["Pub", "Write"]}], "The action 'Write' is unknown; write Pub, Sub"),
        ("User:root", [{**ONE, "actions": "Pub"}], "actions is no list of texts"),
        ("User:root", [{**ONE, "sourceIps": ["10.0.0.256"]}], "The source ip is invalid"),
        ("User:root", [{**ONE, "decision": "Maybe"}], "The decision is null or illegal"),
        ("User:root", [ONE, ONE], "two entries about one resource"),
    ],
)
async def test_an_invalid_rule_changes_nothing(
    client: FakeClient, control: FakeAccessControl, subject: str, entries: list[dict[str, object]], text: str
) -> None:
    answer = await put(client, subject, *entries)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert text in str(answer.remark)
    assert control.policies == {}


@pytest.mark.parametrize("body", [None, {}, {"policies": []}])
async def test_rules_without_a_body_are_refused(client: FakeClient, body: object) -> None:
    answer = await send(client, RequestCode.AUTH_UPDATE_ACL, body, subject="User:root")
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "The body of acl is null")


@pytest.mark.parametrize(
    ("code", "subject", "text"),
    [
        (RequestCode.AUTH_GET_ACL, "User:nobody", "The subject is not exist."),
        (RequestCode.AUTH_DELETE_ACL, "User:nobody", "The subject is not exist."),
        (RequestCode.AUTH_DELETE_ACL, "User:root", "The acl is not exist."),
    ],
)
async def test_unknown_subjects_are_refused(client: FakeClient, code: int, subject: str, text: str) -> None:
    answer = await send(client, code, subject=subject)
    assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, text)


async def test_a_mistyped_resource_deletes_nothing(client: FakeClient, control: FakeAccessControl) -> None:
    """RocketMQ takes it for none, and deletes all rules of the subject."""
    await put(client, "User:root", RULE)
    answer = await send(client, RequestCode.AUTH_DELETE_ACL, subject="User:root", resource="Topc:orders*")
    assert answer.code == ResponseCode.NO_PERMISSION
    assert len(control.policies) == 1


async def test_a_list_that_no_client_would_take_is_refused(client: FakeClient, control: FakeAccessControl) -> None:
    long = tuple(AccessRule(f"topic:{'x' * 1000}{number}", ("all",), "allow") for number in range(1000))
    for number in range(20):
        control.policies[f"group:{number}"] = AccessPolicy(f"group:{number}", custom=long)
    answer = await send(client, RequestCode.AUTH_LIST_ACL)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "name a subject" in str(answer.remark)
    found = await send(client, RequestCode.AUTH_LIST_ACL, subjectFilter="Group:19")
    assert len(orjson.loads(found.body)[0]["policies"][0]["entries"]) == 1000
