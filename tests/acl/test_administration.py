"""The capability of access control: what it lists, changes and refuses."""

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
from tests.acl.brokers import AclBroker, acl_broker, write_files

from martlet.contracts import AccessControl, AccessPolicy, AccessRule, AccessUser, Identity, UserChange, UserKey
from martlet.errors import Reason, Refused
from martlet_acl.administration import PASSWORD_BYTES_MAX
from martlet_acl.credentials import SecretKey
from martlet_acl.policy.quotas import StoredQuota

ROOT, ALICE = Identity("root"), Identity("alice")
A = AccessRule("topic:a", ("publish",), "allow")
B = AccessRule("topic:b", ("get", "list"), "deny", ("10.0.0.0/8",))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AclBroker]:
    users = {"root": {"administrator": True}, "alice": {"groups": ["devs", "qa"]}, "bob": {}}
    write_files(tmp_path, users, {"group:devs": ["allow all on topic:a"]}, groups={"devs": ["qa"], "qa": ["all"]})
    async with acl_broker(tmp_path, protocols=False) as found:
        yield found


async def refusal(change: Awaitable[object]) -> tuple[Reason, str]:
    with pytest.raises(Refused) as caught:
        await change
    return caught.value.reason, str(caught.value)


async def test_other_plugins_find_it(broker: AclBroker) -> None:
    assert broker.broker.capability(AccessControl) is broker.administration


async def test_users_are_listed_without_their_secrets(broker: AclBroker) -> None:
    administration = broker.administration
    change = UserChange(administrator=True, groups=("x",), password=b"hush", secret=b"hush hush")
    await administration.create_user("carol", change, ROOT)
    await administration.put_key("carol", "more", SecretKey("hush hush", disabled=True))
    assert administration.user_names() == ["root", "alice", "bob", "carol"]
    carol = administration.user("carol")
    keys = (UserKey("carol"), UserKey("more", disabled=True))
    assert carol == AccessUser("carol", administrator=True, groups=("x",), has_password=True, keys=keys)
    assert "hush" not in repr(carol)
    assert administration.user("nobody") is None


async def test_a_change_leaves_the_rest_as_it_is(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.update_user("alice", UserChange(disabled=True), ROOT)
    alice = administration.user("alice")
    assert alice == AccessUser("alice", False, True, ("devs", "qa"), True, (UserKey("alice"),))
    await administration.update_user("alice", UserChange(groups=()), ROOT)
    assert administration.user("alice") == AccessUser("alice", False, True, (), True, (UserKey("alice"),))


async def test_deleting_a_user_deletes_rules_and_keys(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.put_rules("user:alice", "custom", [A], ROOT)
    assert await administration.delete_user("alice", ROOT)
    assert administration.policy("user:alice") is None
    assert set(broker.state.keys) == {"root", "bob"}
    assert not await administration.delete_user("alice", ROOT)


async def test_rules_are_merged_by_resource(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.put_rules("user:alice", "custom", [A, B], ROOT)
    await administration.put_rules("user:alice", "custom", [AccessRule("topic:a", ("all",), "deny")], ROOT)
    await administration.put_rules("user:alice", "default", [B], ROOT)
    custom = (AccessRule("topic:a", ("all",), "deny"), B)
    assert administration.policy("user:alice") == AccessPolicy("user:alice", custom, (B,))
    assert administration.subjects() == ["group:devs", "user:alice"]
    assert await administration.delete_rules("user:alice", None, "topic:b", ROOT) == 2
    assert await administration.delete_rules("user:alice", "default", "", ROOT) == 0
    assert await administration.delete_rules("user:alice", None, "", ROOT) == 1
    assert administration.subjects() == ["group:devs"]


async def test_all_rules_are_added_or_none(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.put_rules("anonymous", "custom", [A], ROOT)
    wrong = [AccessRule("topic:a", ("all",), "deny"), B, AccessRule("topic:{user}", ("get",), "allow")]
    reason, text = await refusal(administration.put_rules("anonymous", "custom", wrong, ROOT))
    assert (reason, "anonymous clients have no name" in text) == (Reason.PARAMETER, True)
    assert administration.policy("anonymous") == AccessPolicy("anonymous", (A,))


async def test_groups_may_be_in_groups_but_not_in_themselves(broker: AclBroker) -> None:
    administration = broker.administration
    reason, text = await refusal(administration.put_group("all", ["devs"]))
    assert reason is Reason.PARAMETER
    assert "group 'devs' is in itself: devs in qa in all in devs" in text
    await administration.delete_group("qa")
    assert broker.state.policies.members.groups == {"devs": ()}
    assert broker.state.users["alice"].groups == ("devs",)
    await administration.delete_group("devs")
    assert administration.subjects() == []
    for name in ("devs", "nobody"):
        assert await refusal(administration.delete_group(name)) == (
            Reason.NOT_FOUND,
            f"group {name!r} does not exist",
        )


async def test_quotas_are_merged_and_end_with_their_subjects(broker: AclBroker) -> None:
    administration, quotas = broker.administration, broker.state.policies.quotas
    assert await administration.change_quota("user:alice", {"messages_in": 10}) == StoredQuota(10)
    assert await administration.change_quota("user:alice", {"refuses": True}) == StoredQuota(10, refuses=True)
    for change in ({"messages_in": -1}, {"messages": 1}):
        assert (await refusal(administration.change_quota("user:alice", change)))[0] is Reason.PARAMETER
    assert (await refusal(administration.change_quota("alice", {"messages_in": 1})))[0] is Reason.PARAMETER
    await administration.change_quota("group:devs", {"messages_in": 1})
    await administration.change_quota("everybody", {"messages_in": 2})
    await administration.delete_quota("everybody")
    assert (await refusal(administration.delete_quota("everybody")))[0] is Reason.NOT_FOUND
    assert quotas.stored() == {"user:alice": StoredQuota(10, refuses=True), "group:devs": StoredQuota(1)}
    await administration.delete_user("alice", ROOT)
    await administration.delete_group("devs")
    assert not quotas


async def test_only_an_administrator_touches_administrators(broker: AclBroker) -> None:
    administration = broker.administration
    for change in (
        administration.create_user("eve", UserChange(administrator=True), ALICE),
        administration.update_user("alice", UserChange(administrator=True), ALICE),
        administration.update_user("root", UserChange(password=b"mine"), ALICE),
        administration.delete_user("root", ALICE),
        administration.update_user("root", UserChange(disabled=True), Identity()),
        administration.delete_user("root", Identity("stranger")),
    ):
        assert (await refusal(change))[0] is Reason.NO_PERMISSION
    await administration.create_user("eve", UserChange(), ALICE)
    await administration.update_user("eve", UserChange(disabled=True), ALICE)
    await administration.update_user("alice", UserChange(administrator=True), ROOT)
    await administration.update_user("root", UserChange(disabled=True), ALICE)
    assert (await refusal(administration.delete_user("alice", ROOT)))[0] is Reason.NO_PERMISSION


async def test_invalid_changes_are_refused_and_change_nothing(broker: AclBroker) -> None:
    administration = broker.administration
    before = (dict(broker.state.users), dict(broker.state.secrets), broker.broker.rules.generation)
    for change, wanted, part in (
        (administration.create_user("alice", UserChange(), ROOT), Reason.ILLEGAL, "exists already"),
        (administration.create_user("a\n", UserChange(), ROOT), Reason.PARAMETER, "control character"),
        (administration.create_user("c", UserChange(groups=("",)), ROOT), Reason.PARAMETER, "empty name"),
        (administration.create_user("c", UserChange(secret=b"short"), ROOT), Reason.PARAMETER, "has 5 characters"),
        (administration.create_user("c", UserChange(secret=b"\xff" * 9), ROOT), Reason.PARAMETER, "UTF-8"),
        (administration.create_user("c", UserChange(password=b""), ROOT), Reason.PARAMETER, "has 0 bytes"),
        (
            administration.create_user("c", UserChange(password=b"x" * (PASSWORD_BYTES_MAX + 1)), ROOT),
            *(Reason.PARAMETER, "has 1025 bytes"),
        ),
        (administration.update_user("carol", UserChange(), ROOT), Reason.NOT_FOUND, "'carol' does not exist"),
        (administration.put_key("carol", "k", SecretKey("12345678")), Reason.NOT_FOUND, "does not exist"),
        (administration.put_key("bob", "alice", SecretKey("12345678")), Reason.PARAMETER, "has the access key"),
        (administration.put_key("bob", "carol", SecretKey("1")), Reason.PARAMETER, "has 1 characters"),
        (administration.delete_key("none"), Reason.NOT_FOUND, "access key 'none' does not exist"),
        (administration.switch_key("none", disabled=True), Reason.NOT_FOUND, "does not exist"),
        (administration.put_rules("alice", "custom", [A], ROOT), Reason.PARAMETER, "subject 'alice' is unknown"),
        (
            administration.put_rules("everybody", "custom", [AccessRule("a", ("get",), "allow")], ROOT),
            *(Reason.PARAMETER, "has no kind"),
        ),
    ):
        reason, text = await refusal(change)
        assert reason is wanted, text
        assert part in text
    assert (broker.state.users, broker.state.secrets, broker.broker.rules.generation) == before


async def test_the_name_of_a_key_is_not_that_of_another_user(broker: AclBroker) -> None:
    administration = broker.administration
    await administration.put_key("bob", "carol", SecretKey("12345678"))
    _, text = await refusal(administration.create_user("carol", UserChange(), ROOT))
    assert "would have the name of an access key of user 'bob'; remove the key" in text
    _, text = await refusal(administration.put_key("bob", "root", SecretKey("12345678")))
    assert "user 'root' has the access key 'root' already" in text


async def test_while_it_observes_only_who_would_be_allowed_changes_users_and_rules(broker: AclBroker) -> None:
    """Such changes stay when rules are enforced: otherwise everybody could make himself an administrator before."""
    administration = broker.administration
    await administration.set_observing(observe=True)
    for change in (
        administration.create_user("eve", UserChange(password=b"hush"), ALICE),
        administration.update_user("alice", UserChange(password=b"hush"), Identity()),
        administration.delete_user("bob", ALICE),
        administration.put_rules("user:eve", "custom", [AccessRule("*", ("all",), "allow")], ALICE),
        administration.delete_rules("group:devs", None, "", ALICE),
    ):
        reason, text = await refusal(change)
        assert reason is Reason.NO_PERMISSION
        assert "martlet acl" in text
    await administration.create_user("carol", UserChange(), ROOT)
    broker.plugin.saved.unproved.add("root")  # somebody came with a wrong password or signature
    reason, _ = await refusal(administration.create_user("dora", UserChange(), ROOT))
    assert reason is Reason.NO_PERMISSION
    await administration.create_user("dora", UserChange(), None)
    assert administration.user_names() == ["root", "alice", "bob", "carol", "dora"]
